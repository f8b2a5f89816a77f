"""A bar: a number that measurements are held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# By shape and contestant: microseconds, or whatever else a bar is of.
Times = Mapping[str, Mapping[str, float]]
Measure = Callable[[Times], float]


@dataclass(frozen=True)
class Bar:
    """One of them.

    Attributes:
        name: what is asked.
        bound: the number to hold, at least or at most.
        most: whether it is the largest that will do; else the smallest.
        shapes: names of those that must have been measured.
        measure: from times to the number.
        peers: those of these that are installed must have been measured for each shape, and one at least must be.
    """

    name: str
    bound: float
    most: bool
    shapes: tuple[str, ...]
    measure: Measure
    peers: tuple[str, ...] = ()

    def judged(self, times: Times, absent: Iterable[str] = ()) -> dict[str, Any]:
        """The name, the bound, the number (None if something was not measured) and whether it holds.

        Args:
            absent: peers that are not installed.
        """
        installed = {*self.peers} - {*absent}
        known = bool(installed) or not self.peers
        known = known and all({"ours", *installed} <= times.get(shape, {}).keys() for shape in self.shapes)
        value = self.measure(times) if known else None
        holds = None if value is None else value <= self.bound if self.most else value >= self.bound
        return {"name": self.name, "bound": self.bound, "most": self.most, "value": value, "holds": holds}


def of_ours(shape: str) -> Measure:
    """The number of this package at a shape."""
    return lambda times: times[shape]["ours"]


def ratios(times: Times, names: Iterable[str], peers: Sequence[str]) -> list[float]:
    """How many times as long as ours the best peer takes, by shape."""
    return [min(times[name][peer] for peer in peers if peer in times[name]) / times[name]["ours"] for name in names]


def mean_ratio(names: Sequence[str], peers: Sequence[str]) -> Measure:
    return lambda times: statistics.geometric_mean(ratios(times, names, peers))


def least_ratio(names: Sequence[str], peers: Sequence[str]) -> Measure:
    return lambda times: min(ratios(times, names, peers))
