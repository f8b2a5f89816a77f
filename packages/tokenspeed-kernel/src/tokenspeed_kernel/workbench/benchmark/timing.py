"""Timing callables: by events on a GPU, in a CUDA graph, by the clock on a CPU; with cold caches or warm ones."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Cache = Literal["cold", "warm"]
Call = Callable[[], Any]

# Compilation, allocator and clocks settle within three calls, or within one that is known to take this long.
_WARMUP, _LONG_US = 3, 10_000.0
_FEWEST, _MOST = 10, 1000
# So many bytes are written between two calls on a GPU, to push the operands out of its caches: more than any device's last-level
# cache holds (256 MiB). Writing them takes longer than queueing the next call, so the device never waits for the host.
_FLUSHED_BYTES = 512 << 20
# With warm caches nothing is written. The device spins instead until the host has queued the next call: 0.1 ms at 2 GHz.
_SPUN_CYCLES = 200_000
_TICK_US = 1e-3
# At most so many samples of a round are kept, evenly spaced. Its median is that of all samples.
_KEPT = 64


@dataclass(frozen=True)
class Round:
    """Calls that were made one after another.

    Attributes:
        median_us: of all of them, in microseconds.
        samples_us: their times in the order in which they were made; every second, third... one if there are many.
    """

    median_us: float
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class Timing:
    """Times of single calls, in microseconds: median, 10th and 90th percentile of all, and what they were in each round."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    rounds: tuple[Round, ...] = ()

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Timing:
        """From the times of one round or more, in microseconds; none may be empty."""
        kept = tuple(Round(_five_digits(statistics.median(of_one)), _thinned(of_one)) for of_one in rounds)
        return cls._of([time_us for of_one in rounds for time_us in of_one], kept)

    @classmethod
    def joined(cls, first: Timing, second: Timing) -> Timing:
        """The rounds of both. Median and deciles are those of the samples that were kept."""
        kept = (*first.rounds, *second.rounds)
        made = cls._of([time_us for of_one in kept for time_us in of_one.samples_us], kept)
        return replace(made, repeats=first.repeats + second.repeats)

    @classmethod
    def _of(cls, times: list[float], rounds: tuple[Round, ...]) -> Timing:
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 2
        return cls(statistics.median(times), deciles[0], deciles[-1], len(times), rounds)


def _thinned(samples: Sequence[float]) -> tuple[float, ...]:
    step = -(-len(samples) // _KEPT)
    return tuple(_five_digits(sample) for sample in samples[::step])


def _five_digits(value: float) -> float:
    """More would say nothing about the time, and make reports larger."""
    return float(f"{value:.5g}")


def default_cache(device: torch.device) -> Cache:
    """Cold on a GPU, where other kernels push a kernel's operands out of the caches between two of its calls; warm on a CPU."""
    return "cold" if device.type == "cuda" else "warm"


def measure(
    calls: Call | Sequence[Call], device: torch.device | str, *, budget_s: float = 0.5, cache: Cache | None = None
) -> Timing:
    """Times a callable, or several in turn: the same work on different memory.

    On a GPU each call is timed by events on the current stream; on a CPU by the clock.

    Args:
        calls: what to time; takes nothing.
        device: where it runs.
        budget_s: how long to go on, in seconds, warm-up left out; at least 10 and at most 1000 calls are made.
        cache: ``"cold"``: each call finds the device's caches full of something else; ``"warm"``: as the call before left them.
            `default_cache` if not given. A CPU's caches are warm.

    Raises:
        ValueError: there is nothing to call, or cold caches are asked of a CPU.

    Example:
        >>> import torch
        >>> x = torch.ones(64, 64)
        >>> measure(lambda: x @ x, "cpu", budget_s=0.01).repeats >= 10
        True
    """
    return Timing.of([sample(calls, torch.device(device), budget_s=budget_s, cache=cache)])


def measure_graph(
    calls: Sequence[Call], device: torch.device | str, *, budget_s: float = 0.5, cache: Cache | None = None
) -> Timing:
    """Times callables one after another in one CUDA graph: what they take on the device, without what launching them takes.

    With cold caches the graph starts with them. So each call meets cold caches, if it works on memory of its own.

    Args:
        calls: what to time, the same work on different memory; take nothing. What starting a graph takes, a few microseconds, is
            shared among them.
        device: a GPU.
        budget_s: how long to go on, in seconds, warm-up and capture left out; the graph runs at least 10 and at most 1000 times.
        cache: see `measure`.

    Returns:
        The time of one call on average.

    Raises:
        ValueError: there are no calls, or the device is a CPU.
    """
    return Timing.of([sample_graph(calls, torch.device(device), budget_s=budget_s, cache=cache)])


def sample(
    calls: Call | Sequence[Call],
    device: torch.device,
    *,
    budget_s: float,
    cache: Cache | None = None,
    fewest: int = _FEWEST,
    most: int = _MOST,
    expected_us: float | None = None,
    meanwhile: Call | None = None,
) -> list[float]:
    """The times that `measure` sums up, in microseconds, in order.

    Args:
        calls, device, budget_s, cache: see `measure`.
        fewest, most: how many calls are timed at least and at most.
        expected_us: what a call takes, where that is known; else it is tried first.
        meanwhile: called once while the device still works on what was queued, to look at its state under load.
    """
    listed = [calls] if callable(calls) else list(calls)
    cache = cache or default_cache(device)
    if not listed:
        raise ValueError("there is nothing to time")
    if cache == "cold" and device.type != "cuda":
        raise ValueError(f"cold caches can be had on a GPU only, got {device}")
    warmup = 1 if (expected_us or 0.0) > _LONG_US else _WARMUP
    for call in (*listed, *[listed[0]] * (warmup - 1)):
        call()
    times_of = functools.partial(_gpu_times, cache=cache) if device.type == "cuda" else _cpu_times
    if expected_us is None:
        expected_us = statistics.median(times_of(listed, 3, device, None))
    repeats = min(max(int(budget_s * 1e6 / max(expected_us, 1e-3)), fewest), most)
    return times_of(listed, repeats, device, meanwhile)


def sample_graph(calls: Sequence[Call], device: torch.device, *, expected_us: float | None = None, **options: Any) -> list[float]:
    """The times that `measure_graph` sums up, in microseconds a call, in order. ``expected_us`` is a call's; see `sample`."""
    if device.type != "cuda" or not calls:
        raise ValueError(f"a CUDA graph wants at least one call and a GPU, got {len(calls)} for {device}")
    replay = captured(calls, device)
    whole_us = None if expected_us is None else expected_us * len(calls)
    return [time_us / len(calls) for time_us in sample(replay, device, expected_us=whole_us, **options)]


def captured(calls: Sequence[Call], device: torch.device, pool: Any = None) -> Call:
    """Callables in one CUDA graph.

    Args:
        calls: what to capture, in order; each is called first, outside of the graph.
        device: a GPU.
        pool: of `torch.cuda.graph_pool_handle`, where graphs that never run at once share their memory.

    Returns:
        Runs the graph, and keeps the calls alive, because the graph reads the tensors that they hold.

    Raises:
        RuntimeError: a call does what cannot be captured, such as waiting for the device.
    """
    with torch.cuda.device(device):
        for call in (*calls, *[calls[0]] * _WARMUP):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for call in calls:
                call()
    return _Captured(graph, tuple(calls))


@dataclass(frozen=True)
class _Captured:
    """A graph, and the calls that it was made of: it reads the tensors that these hold."""

    graph: torch.cuda.CUDAGraph
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        self.graph.replay()


def host_time(call: Call, device: torch.device, calls: int = 20) -> float:
    """Microseconds until a call returns to its caller on a GPU, when it has queued its work. Nobody waits for that work.

    Args:
        call: takes nothing.
        calls: how many to make. What they launch must fit into the device's queue (about 1000 kernels), or the host waits.
    """
    call()
    torch.cuda.synchronize(device)
    times = _cpu_times([call], calls, device, None)
    torch.cuda.synchronize(device)
    return statistics.median(times)


def _cpu_times(calls: Sequence[Call], repeats: int, device: torch.device, meanwhile: Call | None) -> list[float]:
    times = []
    for index in range(repeats):
        call = calls[index % len(calls)]
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    if meanwhile is not None:
        meanwhile()
    return times


def _gpu_times(
    calls: Sequence[Call], repeats: int, device: torch.device, meanwhile: Call | None, cache: Cache = "cold"
) -> list[float]:
    with torch.cuda.device(device):
        before = _before_each(device, cache)
        starts, ends = [], []
        for _ in range(repeats):
            starts.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            before()
            start.record()
            calls[index % len(calls)]()
            end.record()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize()
    # A call that launches nothing may take less than a tick of the device's clock, and rates divide by its time.
    return [max(start.elapsed_time(end) * 1e3, _TICK_US) for start, end in zip(starts, ends, strict=True)]


def _before_each(device: torch.device, cache: Cache) -> Call:
    """What keeps the device at work while the host queues the next call."""
    if cache == "warm":
        return functools.partial(torch.cuda._sleep, _SPUN_CYCLES)
    return torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device).zero_
