"""One kind of call in a receipt, and the kernels that were not taken for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passed:
    """A kernel that was not taken.

    Attributes:
        kernel: its name.
        gate: the gate of selection that it failed, one of `GATES`; empty if it is eligible.
        rank: the first of `RANKS` in which it is behind the chosen kernel; empty if it is not eligible.
        reason: selection's reason for the verdict on it.
    """

    kernel: str
    gate: str
    rank: str
    reason: str


@dataclass(frozen=True)
class Row:
    """One kind of call.

    Attributes:
        phase: ``"decode"``, ``"prefill"``, or ``"process"`` for calls that this process has made.
        operator: ``"family.mode"``.
        role: where a model makes the call; empty for a process.
        times: such calls in one step; of a capture, the number of captured calls. 0 if unknown.
        sizes: the size classes with this outcome: sequences of a decode step, tokens of a prefill. Empty for a process.
        kernel: the kernel; empty if none is eligible.
        solution: its backend.
        reason: selection's reason for it, or why no kernel is eligible.
        config: its measured configuration; empty for its defaults.
        passed: kernels that were not taken, the nearest first.
        formats, traits: of the request; of a model's calls those of the smallest size.
        predicted_us: the predicted microseconds at each of ``sizes``; None where nothing was measured.
        predicted_by: the source of each prediction: ``"table"``: a tuned result of this kernel; ``"roofline"``: the time that the
            device's measured roofline allows at least; empty for none.
    """

    phase: str
    operator: str
    role: str
    times: int
    sizes: tuple[int, ...]
    kernel: str
    solution: str
    reason: str
    config: Mapping[str, Any] = field(default_factory=dict)
    passed: tuple[Passed, ...] = ()
    formats: str = ""
    traits: Mapping[str, Any] = field(default_factory=dict)
    predicted_us: tuple[float | None, ...] = ()
    predicted_by: tuple[str, ...] = ()
