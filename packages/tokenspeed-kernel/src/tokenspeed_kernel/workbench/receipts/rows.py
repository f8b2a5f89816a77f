"""The rows of a receipt: a kind of call, the selected kernel, and kernels that were not selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passed:
    """A kernel that was not selected for a kind of call, and why.

    Attributes:
        kernel: the kernel's name.
        gate: the gate of selection that rejected the kernel, one of `GATES`; empty if the kernel is eligible.
        rank: the first of the criteria `RANKS` by which the kernel is behind the selected one; empty if the kernel is not eligible.
        reason: the reason that selection gives for its verdict on the kernel.
    """

    kernel: str
    gate: str
    rank: str
    reason: str


@dataclass(frozen=True)
class Row:
    """One kind of call, and the kernel that is selected for it.

    Attributes:
        phase: ``"decode"``, ``"prefill"``, or ``"process"`` for calls that this process has made.
        operator: ``"family.mode"``.
        role: the part of the model that makes the call; empty for a process.
        times: number of such calls in one step, or in the capture; 0 if unknown.
        sizes: the sizes for which this kernel is selected: sequences per decode step, or tokens per prefill. Empty for a process.
        kernel: the selected kernel; empty if no kernel is eligible.
        solution: the kernel's backend.
        reason: why selection chose the kernel, or why no kernel is eligible.
        config: the kernel's configuration from tuning; empty for its defaults.
        passed: kernels that were not selected: first rejected kernels of higher priority, then the next best eligible kernel.
        formats, traits: formats and traits of the request. For a model, those of the call with the smallest size.
        predicted_us: the predicted time in microseconds at each of ``sizes``; None without a prediction.
        predicted_by: the source of each prediction. ``"table"``: a tuned result of this kernel. ``"roofline"``: the shortest time
            that the device's measured roofline allows. Empty: no prediction.
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
