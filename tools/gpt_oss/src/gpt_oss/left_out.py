"""Measures how much shorter a pass is without the calls of one kernel.

Kernels overlap (PDL): a kernel starts and loads weights before the preceding one has ended. So the isolated times of kernels
(`gpt_oss.breakdown`) do not add up to the time of a pass. The time by which a pass is shorter without a kernel is the most that
optimising this kernel can gain. The kernel's results are replaced by those of an earlier pass, so that all other kernels do the
same work. In-place changes by the kernel are omitted: this changes values, and so possibly the selected experts, but not their
number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel import KernelRegistry, watch_calls

_REPLAYS = 20


@dataclass(frozen=True)
class LeftOut:
    """A kernel and the cost of its calls.

    Attributes:
        operator: the operator.
        kernel: the kernel's name.
        calls: calls per pass.
        microseconds: how much shorter the pass is without all these calls.
    """

    operator: str
    kernel: str
    calls: int
    microseconds: float


def leave_out(forward: Callable[[], Any], device: torch.device) -> tuple[float, list[LeftOut]]:
    """Times a pass, and for each of its kernels the same pass without it.

    If several ranks run a pass together, each must call this; all ranks leave out the same kernel at a time.

    Args:
        forward: launches the pass, which must be capturable. It runs repeatedly, so its outputs must not matter.
        device: a GPU.

    Returns:
        The microseconds of the pass, and its kernels, the most expensive first.
    """
    results: dict[tuple[str, str], list[Any]] = {}

    def record(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        key = _key(call)
        if key is None:
            return run

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            results.setdefault(key, []).append(result)
            return result

        return recorded

    with watch_calls(record):
        forward()
    whole = _microseconds(forward, device)
    found = [
        LeftOut(*key, len(made), whole - _microseconds(lambda: _without(forward, key, made), device))  # noqa: B023
        for key, made in results.items()
    ]
    return whole, sorted(found, key=lambda each: -each.microseconds)


def _key(call: Any) -> tuple[str, str] | None:
    """Operator and kernel; None for a composed operator, whose parts are recorded separately."""
    operator = f"{call.family}.{call.mode}"
    composed = KernelRegistry.get().get_by_name(call.kernel, operator).solution == "composed"
    return None if composed else (operator, call.kernel)


def _without(forward: Callable[[], Any], left_out: tuple[str, str], results: list[Any]) -> None:
    waiting = iter(results)

    def skip(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        return (lambda *args, **kwargs: next(waiting)) if _key(call) == left_out else run

    with watch_calls(skip):
        forward()


def _microseconds(forward: Callable[[], Any], device: torch.device) -> float:
    """The microseconds of a pass in a graph, averaged over consecutive replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * float(begin.elapsed_time(end)) / _REPLAYS
