from mokfx.capture.proof import Unproven, proving, unproven
from mokfx.capture.session import Capture, substitutions

__all__ = ["Capture", "Unproven", "proving", "substitutions", "unproven"]
