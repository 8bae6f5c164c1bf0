"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "missing", "failed"]
"""note: as it is, nothing is wrong; missing: something here cannot run; failed: the probe itself did."""


@dataclass(frozen=True)
class Finding:
    """What a probe found."""

    name: str
    value: str
    state: State = "ok"
    remedy: str = ""
    """What to do; of each "missing" and "failed"."""
    part: str = ""
    """The heading that it stands under."""


Probe = Callable[[], Iterator[Finding]]


def examined(part: str, probe: Probe) -> Iterator[Finding]:
    """What a probe finds, up to where it fails, as a finding too."""
    try:
        for finding in probe():
            yield Finding(finding.name, finding.value, finding.state, finding.remedy, part)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        yield Finding(
            "probe",
            f"{type(error).__name__}: {said}",
            "failed",
            "the other lines do not depend on it; if the machine works otherwise, report this",
            part,
        )
