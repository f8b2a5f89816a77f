"""Acceptance bars: bounds on measured values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# By shape and implementation: microseconds, or another quantity of a bar.
Times = Mapping[str, Mapping[str, float]]
Measure = Callable[[Times], float]


@dataclass(frozen=True)
class Bar:
    """An acceptance bar.

    Attributes:
        name: of the bar.
        bound: the bound.
        most: whether the bound is an upper one.
        shapes: names of the shapes that must have been measured.
        measure: from times to the bar's value.
        baselines: baselines. Those installed must have been measured for each shape, and at least one must be installed.
    """

    name: str
    bound: float
    most: bool
    shapes: tuple[str, ...]
    measure: Measure
    baselines: tuple[str, ...] = ()

    def judged(self, times: Times, absent: Iterable[str] = ()) -> dict[str, Any]:
        """The name, the bound, the value (None if a measurement is missing) and whether the bar holds.

        Args:
            absent: baselines that are not installed.
        """
        installed = {*self.baselines} - {*absent}
        known = bool(installed) or not self.baselines
        known = known and all({"ours", *installed} <= times.get(shape, {}).keys() for shape in self.shapes)
        value = self.measure(times) if known else None
        holds = None if value is None else value <= self.bound if self.most else value >= self.bound
        return {"name": self.name, "bound": self.bound, "most": self.most, "value": value, "holds": holds}


def of_ours(shape: str) -> Measure:
    """This package's value at a shape."""
    return lambda times: times[shape]["ours"]


def ratios(times: Times, names: Iterable[str], baselines: Sequence[str]) -> list[float]:
    """The time of the best baseline divided by ours, by shape."""
    return [min(times[name][baseline] for baseline in baselines if baseline in times[name]) / times[name]["ours"] for name in names]


def mean_ratio(names: Sequence[str], baselines: Sequence[str]) -> Measure:
    return lambda times: statistics.geometric_mean(ratios(times, names, baselines))


def least_ratio(names: Sequence[str], baselines: Sequence[str]) -> Measure:
    return lambda times: min(ratios(times, names, baselines))
