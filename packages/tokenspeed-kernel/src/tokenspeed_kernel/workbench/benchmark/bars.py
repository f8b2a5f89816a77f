"""Acceptance bars: bounds that a benchmark program's measured values must meet."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Measured values by shape and implementation: times in microseconds, or another quantity that a bar compares.
Times = Mapping[str, Mapping[str, float]]
Measure = Callable[[Times], float]


@dataclass(frozen=True)
class Bar:
    """An acceptance bar: a bound on a value that is computed from measured times.

    Attributes:
        name: name of the bar.
        bound: the largest or smallest value that passes, see ``most``.
        most: whether ``bound`` is an upper bound.
        shapes: names of the shapes that must have been measured.
        measure: function that computes the bar's value from times.
        baselines: the baselines to compare with. The bar has a value only if at least one of them is installed, and each installed
            one was measured at each shape.
    """

    name: str
    bound: float
    most: bool
    shapes: tuple[str, ...]
    measure: Measure
    baselines: tuple[str, ...] = ()

    def judged(self, times: Times, absent: Iterable[str] = ()) -> dict[str, Any]:
        """Returns the bar's outcome for measured times. The value is None if a measurement is missing.

        ``absent``: baselines that are not installed.
        """
        installed = {*self.baselines} - {*absent}
        known = bool(installed) or not self.baselines
        known = known and all({"ours", *installed} <= times.get(shape, {}).keys() for shape in self.shapes)
        return outcome(self.name, self.bound, self.measure(times) if known else None, most=self.most)


def outcome(name: str, bound: float, value: float | None, *, most: bool = True) -> dict[str, Any]:
    """Returns a bar's outcome for a report: its name, its bound, its value, and whether the value meets the bound."""
    holds = None if value is None else value <= bound if most else value >= bound
    return {"name": name, "bound": bound, "most": most, "value": value, "holds": holds}


def at_most(shape: str, us: float) -> Bar:
    """Returns a bar: this project's kernel takes at most ``us`` microseconds at a shape."""
    return Bar(f"{shape}: us", us, True, (shape,), lambda times: times[shape]["ours"])


def against(name: str, bound: float, shapes: Sequence[str], baselines: Sequence[str], *, mean: bool = False) -> Bar:
    """Returns a bar: the fastest baseline's time, divided by our time, is at least ``bound``.

    The ratio is that of the worst shape or, with ``mean``, the geometric mean over the shapes.
    """

    def measure(times: Times) -> float:
        ratios = [min(times[shape][each] for each in baselines if each in times[shape]) / times[shape]["ours"] for shape in shapes]
        return statistics.geometric_mean(ratios) if mean else min(ratios)

    return Bar(name, bound, False, tuple(shapes), measure, tuple(baselines))


def no_less_accurate(errors: Times) -> list[dict[str, Any]]:
    """Returns a list with the outcome of one bar: our kernel's relative error is at most 1.2 times the portable kernel's, at every
    shape.

    The list is empty if no shape has both errors.
    """
    ratios = [of_one["ours"] / of_one["triton"] for of_one in errors.values() if {"ours", "triton"} <= of_one.keys()]
    return [outcome("relative error over the portable kernel's, worst shape", 1.2, max(ratios))] if ratios else []
