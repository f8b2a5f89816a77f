"""How much shorter a pass is without the calls of one kernel.

Kernels overlap: one begins before the one before has ended, and reads weights meanwhile. So the times of kernels that run by
themselves (`gpt_oss.breakdown`) do not add up to the time of a pass. What a pass is shorter by without a kernel is what there is to
gain from it. In its place stand the results of an earlier pass, so that all others do what they did. What a kernel would change in
place stays as it is: that changes numbers, and so perhaps which experts tokens choose, but not how many.
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
    """A kernel, and what its calls cost.

    Attributes:
        operator: what it computes.
        kernel: its name.
        calls: how many there are in a pass.
        microseconds: by which the pass is shorter without all of them.
    """

    operator: str
    kernel: str
    calls: int
    microseconds: float


def leave_out(forward: Callable[[], Any], device: torch.device) -> tuple[float, list[LeftOut]]:
    """Times a pass, and for each of its kernels the same pass without it.

    Where several ranks run a pass together, each must call this, and leaves out what the others leave out.

    Args:
        forward: launches the pass, which may be captured. It runs again and again, so what it writes must not matter.
        device: a GPU.

    Returns:
        The microseconds of the pass, and its kernels, those first without which it is shortest.
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
    """Operator and kernel; None for a composed operator, whose parts come by themselves."""
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
    """Of a pass in a graph, on average of replays one after another."""
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
