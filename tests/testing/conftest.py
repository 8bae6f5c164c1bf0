"""The fixture under test, as a user's conftest has it."""

from mokfx.testing.plugin import _assert_rewritten as _assert_rewritten
