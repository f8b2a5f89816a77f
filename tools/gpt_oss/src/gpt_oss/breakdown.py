"""Where the time of a pass goes: each operator's calls of the pass, timed by themselves, beside what the device can do at most.

The calls are those that the pass makes, with its tensors, and only those of kernels: of a composed operator that no fused kernel
serves, the parts. All calls of one kernel run one after another, in one graph on a GPU, so that each finds its weights as it finds
them in a pass: not in the caches, if the layers' weights together are more than these hold. What kernels of different operators
save by overlapping is not seen, nor is what PyTorch does between operators.
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

_BUDGET_S = 0.05  # of timing a kernel


@dataclass(frozen=True)
class Part:
    """All calls of one kernel in a pass.

    Attributes:
        family: of the operator.
        row: the kernel on an average call, as a benchmark's report has it; without a time if its calls cannot be repeated.
        calls: how many there are.
        floor_us: what the device needs at least for all of them, by its measured roofline; None where there is none.
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
    """The calls of one kernel."""

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
        """Times the calls."""
        count = len(self.calls)
        family, _, _ = self.operator.partition(".")
        solution = KernelRegistry.get().get_by_name(self.kernel, self.operator).solution
        row = Row(self.kernel, self.operator, f"{name}, {count} calls", "measured", solution=solution)
        try:
            timing = (measure_graph if device.type == "cuda" else measure)(self.calls, device, budget_s=_BUDGET_S)
        except RuntimeError as error:  # a kernel that waits for the device cannot be captured; the others count all the same
            return Part(family, replace(row, status="error", reason=f"while timing: {error}"), count, None)
        row = replace(row, timing=timing)
        if len(self.costs) < count:
            return Part(family, row, count, None)
        flops, moved = (sum(getattr(cost, field) for cost in self.costs) / count for field in ("flops", "bytes"))
        row = replace(row, tflops=flops / timing.median_us / 1e6, gb_per_s=moved / timing.median_us / 1e3)
        if roofline is None:
            return Part(family, row, count, None)
        average = replace(self.costs[0], flops=flops, bytes=moved)
        row = replace(row, share=share_of(average, timing.median_us, self.operands, roofline))
        # The part of the roofline that a call of one microsecond would reach is the microseconds that the device needs for it.
        return Part(family, row, count, sum(share_of(cost, 1.0, self.operands, roofline).part for cost in self.costs))


def break_down(forward: Callable[[], Any], name: str, device: torch.device, roofline: Roofline | None) -> list[Part]:
    """Runs a pass, and then the calls of each of its kernels; longest first.

    Args:
        forward: launches the pass. Tensors that it makes are kept meanwhile. What its operators write they write again, so results
            of the pass, the cache included, must not matter.
        name: what the pass is called in the rows.
        device: where it runs.
        roofline: of the device, or None.
    """
    found: dict[tuple[str, str], _Recorded] = {}

    def watcher(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        operator = f"{call.family}.{call.mode}"
        if KernelRegistry.get().get_by_name(call.kernel, operator).solution == "composed":
            return run  # its parts come by themselves

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
    """For each family of operators, longest first, how many calls there are, how long they take together in microseconds, what part
    of the time of all calls that is, and what part of it the device needs at least (None without a roofline)."""
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
