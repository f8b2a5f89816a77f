"""Timing one callable."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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


def measure(call: Callable[[], Any], device: torch.device | str, *, budget_s: float = 0.5) -> Timing:
    """Times a callable.

    On a GPU each call starts with cold caches and is timed by events on the current stream. On a CPU it is timed by the clock,
    with the caches as the call before left them.

    Args:
        call: what to time; takes nothing.
        device: where it runs.
        budget_s: how long to go on, in seconds, warm-up left out; at least 10 and at most 1000 calls are made.

    Example:
        >>> import torch
        >>> x = torch.ones(64, 64)
        >>> measure(lambda: x @ x, "cpu", budget_s=0.01).repeats >= 10
        True
    """
    for _ in range(_WARMUP):
        call()
    return _timed(call, torch.device(device), budget_s)


def measure_graph(calls: Sequence[Callable[[], Any]], device: torch.device | str, *, budget_s: float = 0.5) -> Timing:
    """Times callables one after another in one CUDA graph: what they take on the device, without what launching them takes.

    Each time the graph starts with cold caches. So each call meets cold caches, if it works on memory of its own.

    Args:
        calls: what to time, the same work on different memory; take nothing. What starting a graph takes, a few microseconds, is
            shared among them.
        device: a GPU.
        budget_s: how long to go on, in seconds, warm-up and capture left out; the graph runs at least 10 and at most 1000 times.

    Returns:
        The time of one call on average.

    Raises:
        ValueError: there are no calls, or the device is a CPU.
    """
    where = torch.device(device)
    if where.type != "cuda" or not calls:
        raise ValueError(f"a CUDA graph wants at least one call and a GPU, got {len(calls)} for {where}")
    with torch.cuda.device(where):
        for call in (*calls, *[calls[0]] * _WARMUP):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return _timed(graph.replay, where, budget_s, len(calls))


def _timed(call: Callable[[], Any], device: torch.device, budget_s: float, share: int = 1) -> Timing:
    times_of = _gpu_times if device.type == "cuda" else _cpu_times
    estimate = statistics.median(times_of(call, 3, device))
    repeats = min(max(int(budget_s * 1e6 / max(estimate, 1e-3)), _FEWEST), _MOST)
    times = [time_us / share for time_us in times_of(call, repeats, device)]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1], repeats)


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
