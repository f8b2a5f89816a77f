"""Acceptance bars: bounds on measured values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# By shape and implementation: microseconds, or the quantity that a bar compares.
Times = Mapping[str, Mapping[str, float]]
Measure = Callable[[Times], float]


@dataclass(frozen=True)
class Bar:
    """An acceptance bar.

    Attributes:
        name: name of the bar.
        bound: the bound.
        most: whether the bound is an upper one.
        shapes: names of the shapes that must have been measured.
        measure: function that computes the bar's value from times.
        baselines: the baselines to compare with. Installed ones must have been measured for each shape, and at least one must be
            installed.
    """

    name: str
    bound: float
    most: bool
    shapes: tuple[str, ...]
    measure: Measure
    baselines: tuple[str, ...] = ()

    def judged(self, times: Times, absent: Iterable[str] = ()) -> dict[str, Any]:
        """The outcome. The value is None if a measurement is missing. ``absent``: baselines that are not installed."""
        installed = {*self.baselines} - {*absent}
        known = bool(installed) or not self.baselines
        known = known and all({"ours", *installed} <= times.get(shape, {}).keys() for shape in self.shapes)
        return outcome(self.name, self.bound, self.measure(times) if known else None, most=self.most)


def outcome(name: str, bound: float, value: float | None, *, most: bool = True) -> dict[str, Any]:
    """The name, the bound, the value, and whether the bar holds."""
    holds = None if value is None else value <= bound if most else value >= bound
    return {"name": name, "bound": bound, "most": most, "value": value, "holds": holds}


def at_most(shape: str, us: float) -> Bar:
    """A bar on this project's time at a shape."""
    return Bar(f"{shape}: us", us, True, (shape,), lambda times: times[shape]["ours"])


def against(name: str, bound: float, shapes: Sequence[str], baselines: Sequence[str], *, mean: bool = False) -> Bar:
    """A bar on the time of the best baseline over ours: of the worst shape, or the geometric mean."""

    def measure(times: Times) -> float:
        ratios = [min(times[shape][each] for each in baselines if each in times[shape]) / times[shape]["ours"] for shape in shapes]
        return statistics.geometric_mean(ratios) if mean else min(ratios)

    return Bar(name, bound, False, tuple(shapes), measure, tuple(baselines))


def no_less_accurate(errors: Times) -> list[dict[str, Any]]:
    """The outcome of the bar that compares our relative error with the portable kernel's. Empty if no shape has both errors."""
    ratios = [of_one["ours"] / of_one["triton"] for of_one in errors.values() if {"ours", "triton"} <= of_one.keys()]
    return [outcome("relative error over the portable kernel's, worst shape", 1.2, max(ratios))] if ratios else []
