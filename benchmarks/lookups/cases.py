"""The cases of name lookups. They have no bounds, only a verdict, which takes all peers into account."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lookups.programs import KINDS
from benchmarks.lookups.styles import STYLES
from benchmarks.measure import Case, Sample, Wall, own_sample


@dataclass(frozen=True)
class LookupSettings:
    """How long one run measures."""

    # The CPU time to measure; at least one round is run.
    seconds: float = 0.05


QUICK = LookupSettings()


def _case(kind: str, title: str) -> Case:
    def measure(style: str, settings: LookupSettings) -> Sample:
        options = ("--style", style, "--seconds", str(settings.seconds))
        return own_sample("lookups.programs", kind, style, *options)

    if kind not in KINDS:
        raise ValueError(kind)
    wall = Wall("Lookups, wall time", "wall_us", "us/lookup", ())
    unit = "us CPU/lookup"
    name = kind.replace("_", "-")
    return Case(name, "Lookups, CPU time", title, "cpu_us", unit, (), measure, only=tuple(STYLES), wall=wall)


CASES: tuple[Case, ...] = (
    _case("ten_names", "1,000 lookups of ten names, all at once"),
    _case("different_names", "1,000 lookups of as many new names, one after the other"),
)
