"""Timing one callable."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Compilation, allocator and clocks settle within a few calls.
_WARMUP = 3
_FEWEST, _MOST = 10, 1000
# What is written between two calls on a GPU to push the operands out of its caches: more than the last-level cache of any
# device at hand (256 MiB). Writing it takes longer than queueing the next call does, so the device never waits for the host.
_FLUSHED_BYTES = 512 << 20


@dataclass(frozen=True)
class Timing:
    """Times of single calls, in microseconds: median, 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int


def measure(call: Callable[[], Any], device: torch.device | str, *, budget_s: float = 0.5, graph_calls: int = 0) -> Timing:
    """Times a callable.

    On a GPU each call starts with cold caches and is timed by events on the current stream. On a CPU it is timed by the clock,
    with the caches as the call before left them.

    In a CUDA graph a GPU gets what it has to do in one piece, so that times leave out what Python and the driver take to launch
    it. What remains of the launch of the graph itself is a few microseconds: to measure something as short as that, capture
    several calls. Only the first of them starts with cold caches then.

    Args:
        call: what to time; takes nothing.
        device: where it runs.
        budget_s: how long to go on, in seconds, warm-up left out; at least 10 and at most 1000 calls (or graphs of calls) are made.
        graph_calls: how many calls to capture in a CUDA graph, which is then timed as one, and its time divided by this; 0 for no
            graph.

    Raises:
        ValueError: a graph on a CPU.

    Example:
        >>> import torch
        >>> x = torch.ones(64, 64)
        >>> measure(lambda: x @ x, "cpu", budget_s=0.01).repeats >= 10
        True
    """
    where = torch.device(device)
    if graph_calls and where.type != "cuda":
        raise ValueError(f"graph_calls is for GPUs; got {graph_calls} for {where}")
    times_of = _gpu_times if where.type == "cuda" else _cpu_times
    for _ in range(_WARMUP):
        call()
    if graph_calls:
        call = _captured(call, graph_calls, where)
    estimate = statistics.median(times_of(call, 3, where))
    repeats = min(max(int(budget_s * 1e6 / max(estimate, 1e-3)), _FEWEST), _MOST)
    times = [time_us / max(graph_calls, 1) for time_us in times_of(call, repeats, where)]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1], repeats)


def _captured(call: Callable[[], Any], count: int, device: torch.device) -> Callable[[], Any]:
    """That many calls as one CUDA graph."""
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    return graph.replay


def _cpu_times(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _gpu_times(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        starts, ends = [], []
        for _ in range(repeats):
            starts.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        for start, end in zip(starts, ends, strict=True):
            flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]
