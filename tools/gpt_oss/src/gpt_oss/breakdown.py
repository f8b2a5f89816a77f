"""Breaks down the time of a pass: times the calls of each kernel in isolation, and compares the time with the device's roofline.

The calls and their tensors are those of the pass. If a composed operator has no fused kernel, its parts are timed instead. All
calls of one kernel run back to back, on a GPU in one graph. So the caches are in the same state as in a pass: a layer's weights are
not cached if the weights of all layers exceed the caches. The breakdown shows neither the time that kernels of different operators
save by overlapping, nor PyTorch's work between operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_kernel import KernelRegistry, get_operator, watch_calls
from tokenspeed_kernel.workbench.benchmark import Roofline, Row, measure, measure_graph
from tokenspeed_kernel.workbench.benchmark.roofline import share_of

_BUDGET_S = 0.05  # time budget per kernel


@dataclass(frozen=True)
class Part:
    """All calls of one kernel in a pass.

    Attributes:
        family: the operator's family.
        row: the average call as a row of a benchmark report. The row has no time if the calls cannot be repeated.
        calls: number of calls.
        floor_us: the shortest total time of the calls that the device's measured roofline allows, in us; None without a roofline.
    """

    family: str
    row: Row
    calls: int
    floor_us: float | None

    @property
    def total_us(self) -> float:
        """The time of all calls in microseconds; 0 if they were not timed."""
        return 0.0 if self.row.timing is None else self.row.timing.median_us * self.calls


class _Recorded:
    """The recorded calls of one kernel, with their arguments."""

    def __init__(self, operator: str, kernel: str) -> None:
        self.operator, self.kernel = operator, kernel
        self.calls: list[Callable[[], Any]] = []
        self.costs: list[Any] = []
        self.operands: tuple[torch.dtype, ...] = ()

    def add(self, call: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        op = get_operator(self.operator)
        self.calls.append(functools.partial(run, *args, **kwargs))
        self.operands = tuple(fmt.storage_dtype for _, fmt in call.signature.roles)
        if op.has_hook("cost"):
            self.costs.append(op.cost_of(call.arguments))

    def part(self, name: str, device: torch.device, roofline: Roofline | None) -> Part:
        """Times the recorded calls."""
        count = len(self.calls)
        family, _, _ = self.operator.partition(".")
        solution = KernelRegistry.get().get_by_name(self.kernel, self.operator).solution
        row = Row(self.kernel, self.operator, f"{name}, {count} calls", "measured", solution=solution)
        try:
            timing = (measure_graph if device.type == "cuda" else measure)(self.calls, device, budget_s=_BUDGET_S)
        except RuntimeError as error:  # a kernel that synchronises cannot be captured in a graph; other kernels are still timed
            return Part(family, replace(row, status="error", reason=f"while timing: {error}"), count, None)
        row = replace(row, timing=timing.without_samples())
        if len(self.costs) < count:
            return Part(family, row, count, None)
        flops, moved = (sum(getattr(cost, field) for cost in self.costs) / count for field in ("flops", "bytes"))
        row = replace(row, tflops=flops / timing.median_us / 1e6, gb_per_s=moved / timing.median_us / 1e3)
        if roofline is None:
            return Part(family, row, count, None)
        average = replace(self.costs[0], flops=flops, bytes=moved)
        row = replace(row, share=share_of(average, timing.median_us, self.operands, roofline))
        # If a call took 1 us, it would reach the fraction f of the roofline. So the roofline's time of this call is f us.
        return Part(family, row, count, sum(share_of(cost, 1.0, self.operands, roofline).part for cost in self.costs))


def break_down(forward: Callable[[], Any], name: str, device: torch.device, roofline: Roofline | None) -> list[Part]:
    """Runs a pass, then times the calls of each of its kernels. Returns the kernels, longest total time first.

    Args:
        forward: function that launches the pass. The tensors of the pass are kept alive. The operators write their outputs
            repeatedly, so the results of the pass, the cache included, must not matter.
        name: the pass's name in the rows.
        device: the device.
        roofline: the device's roofline, or None.
    """
    found: dict[tuple[str, str], _Recorded] = {}

    def watcher(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        operator = f"{call.family}.{call.mode}"
        if KernelRegistry.get().get_by_name(call.kernel, operator).solution == "composed":
            return run  # the parts of a composed operator are recorded separately

        def recorded(*args: Any, **kwargs: Any) -> Any:
            key = (operator, call.kernel)
            if key not in found:
                found[key] = _Recorded(*key)
            found[key].add(call, run, args, kwargs)
            return run(*args, **kwargs)

        return recorded

    with watch_calls(watcher):
        forward()
    parts = [recorded.part(name, device, roofline) for recorded in found.values()]
    return sorted(parts, key=lambda part: -part.total_us)


def by_family(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns a row per family of operators, the family with the longest time first.

    A row has the family's number of calls, their total microseconds, their fraction of the time of all calls, and the fraction of
    the roofline that they reach (None without a roofline).
    """
    whole = sum(part.total_us for part in parts)
    rows = []
    for family in dict.fromkeys(part.family for part in parts):
        of_one = [part for part in parts if part.family == family]
        total = sum(part.total_us for part in of_one)
        floors = [part.floor_us for part in of_one]
        floor = None if None in floors else sum(filter(None, floors))
        rows.append(
            {
                "family": family,
                "calls": sum(part.calls for part in of_one),
                "microseconds": total,
                "share_of_time": total / whole if whole else 0.0,
                "share_of_roofline": floor / total if floor is not None and total else None,
            }
        )
    return sorted(rows, key=lambda row: -row["microseconds"])
