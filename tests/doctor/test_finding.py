"""A probe that fails is a finding."""

from __future__ import annotations

from collections.abc import Iterator

from mokfx.doctor.finding import Finding, examined


def test_a_probe_that_fails_says_so_and_what_it_found_before_stays() -> None:
    def probe() -> Iterator[Finding]:
        yield Finding("first", "well")
        raise OSError("no such device\nand a second line")

    first, second = examined("GPUs", probe)
    assert first == Finding("first", "well", part="GPUs")
    assert (second.state, second.value, second.part) == ("failed", "OSError: no such device", "GPUs")
    assert second.remedy


def test_an_error_without_words_has_its_name() -> None:
    def probe() -> Iterator[Finding]:
        raise RuntimeError
        yield

    (finding,) = examined("links", probe)
    assert finding.value == "RuntimeError: "
