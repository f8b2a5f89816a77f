"""Measures how much shorter a pass is without the calls of one kernel.

Kernels overlap (PDL): a kernel starts and loads weights before the preceding kernel has ended. So the isolated times of kernels
(`gpt_oss.breakdown`) do not add up to the time of a pass. Leaving out a kernel shows how much optimising it can save at most.
Results of an earlier pass replace the results of the kernel, so that all other kernels do the same work. Only the kernel's in-place
changes are missing. This changes values. It may change which experts are selected, but not their number per token.
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
        calls: number of calls per pass.
        microseconds: by how many microseconds a pass is shorter without these calls.
    """

    operator: str
    kernel: str
    calls: int
    microseconds: float


def leave_out(forward: Callable[[], Any], device: torch.device) -> tuple[float, list[LeftOut]]:
    """Times a pass, and times the pass again without each of its kernels.

    If several ranks run a pass together, each rank must call this function. All ranks leave out the same kernel at the same time.

    Args:
        forward: function that launches the pass. A CUDA graph must be able to capture it. The pass runs repeatedly, so its outputs
            must not matter.
        device: a GPU.

    Returns:
        The microseconds of the pass, and its kernels, the kernel that saves most first.
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
    """Returns a call's operator and kernel; None for a composed operator, because its parts are recorded separately."""
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
    """Measures the microseconds of a pass in a graph, averaged over consecutive replays."""
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
