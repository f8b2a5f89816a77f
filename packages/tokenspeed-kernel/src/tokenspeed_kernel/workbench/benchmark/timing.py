"""Times callables with cold or warm caches: by events on a GPU, in a CUDA graph, or by the clock on a CPU."""

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

# Warm-up calls: compilation, allocator and clocks settle within three calls, or within one call of at least _LONG_US.
_WARMUP, _LONG_US = 3, 10_000.0
_FEWEST, _MOST = 10, 1000
# Bytes written between two calls on a GPU, to evict the operands from its caches: more than any device's last-level cache (256
# MiB). Writing them takes longer than queueing the next call, so the device never waits for the host.
_FLUSHED_BYTES = 512 << 20
# With warm caches, nothing is written between two calls. Instead the device spins until the host has queued the next call: 0.1 ms
# at 2 GHz.
_SPUN_CYCLES = 200_000
_TICK_US = 1e-3
# A round keeps at most this many samples, evenly spaced. The round's median is computed before samples are dropped.
_KEPT = 64


@dataclass(frozen=True)
class Round:
    """Consecutive timed calls.

    Attributes:
        median_us: the median time of all calls, in microseconds.
        samples_us: the times in order, in microseconds; if there are many, every second, third, ... time. Empty in reports under
            version control.
    """

    median_us: float
    samples_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Times per call, in microseconds: median, 10th and 90th percentile of all calls, and the rounds."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    rounds: tuple[Round, ...] = ()

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Timing:
        """Summarises the times of one or more rounds of calls, in microseconds. No round may be empty."""
        kept = tuple(Round(_five_digits(statistics.median(of_one)), _thinned(of_one)) for of_one in rounds)
        return cls._of([time_us for of_one in rounds for time_us in of_one], kept)

    @classmethod
    def joined(cls, first: Timing, second: Timing) -> Timing:
        """Merges the rounds of two timings. Median and percentiles are computed from the kept samples of both timings."""
        kept = (*first.rounds, *second.rounds)
        made = cls._of([time_us for of_one in kept for time_us in of_one.samples_us], kept)
        return replace(made, repeats=first.repeats + second.repeats)

    def without_samples(self) -> Timing:
        """Returns the timing without its samples: median and percentiles of all calls, and each round's median."""
        return replace(self, rounds=tuple(Round(of_one.median_us) for of_one in self.rounds))

    @classmethod
    def _of(cls, times: list[float], rounds: tuple[Round, ...]) -> Timing:
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 2
        return cls(statistics.median(times), deciles[0], deciles[-1], len(times), rounds)


def _thinned(samples: Sequence[float]) -> tuple[float, ...]:
    step = -(-len(samples) // _KEPT)
    return tuple(_five_digits(sample) for sample in samples[::step])


def _five_digits(value: float) -> float:
    """Rounds a time to five significant digits: more would be noise, and would enlarge reports."""
    return float(f"{value:.5g}")


def default_cache(device: torch.device) -> Cache:
    """Returns "cold" for a GPU, because in a model other kernels evict a kernel's operands between two calls; "warm" for a CPU."""
    return "cold" if device.type == "cuda" else "warm"


def measure(
    calls: Call | Sequence[Call], device: torch.device | str, *, budget_s: float = 0.5, cache: Cache | None = None
) -> Timing:
    """Times a callable, or several callables in rotation, which do the same work on different memory.

    On a GPU each call is timed by events on the current stream; on a CPU by the clock.

    Args:
        calls: the callables to time, without parameters.
        device: the device that the callables run on.
        budget_s: seconds of timing, without warm-up; at least 10 and at most 1000 calls are made.
        cache: ``"cold"``: the operands are evicted from the device's caches before each call; ``"warm"``: caches stay as the
            previous call left them. `default_cache` if not given. A CPU supports only warm caches.

    Raises:
        ValueError: there are no callables, or cold caches are requested on a CPU.

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
    """Times consecutive callables in one CUDA graph. The result is their time on the device, without launch overhead.

    With ``"cold"``, caches are cold when the graph starts. So each call finds cold caches if it has its own memory.

    Args:
        calls: the callables to time, without parameters. They do the same work on different memory. The launch of the graph, a few
            microseconds, is spread over them.
        device: a GPU.
        budget_s: seconds of timing, without warm-up and capture; the graph runs at least 10 and at most 1000 times.
        cache: ``"cold"`` or ``"warm"``, see `measure`.

    Returns:
        The average time of one call.

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
    """Returns the times that `measure` summarises, in microseconds, in order.

    Args:
        calls, device, budget_s, cache: see `measure`.
        fewest, most: the fewest and the most calls to time.
        expected_us: a call's time in microseconds if known; otherwise it is estimated first.
        meanwhile: called once while the device still executes queued work, to read its state under load.
    """
    listed = [calls] if callable(calls) else list(calls)
    cache = cache or default_cache(device)
    if not listed:
        raise ValueError("calls must hold at least one callable, got none")
    if cache == "cold" and device.type != "cuda":
        raise ValueError(f"cache='cold' needs a GPU, got {device}")
    warmup = 1 if (expected_us or 0.0) > _LONG_US else _WARMUP
    for call in (*listed, *[listed[0]] * (warmup - 1)):
        call()
    times_of = functools.partial(_gpu_times, cache=cache) if device.type == "cuda" else _cpu_times
    if expected_us is None:
        expected_us = statistics.median(times_of(listed, 3, device, None))
    repeats = min(max(int(budget_s * 1e6 / max(expected_us, 1e-3)), fewest), most)
    return times_of(listed, repeats, device, meanwhile)


def sample_graph(calls: Sequence[Call], device: torch.device, *, expected_us: float | None = None, **options: Any) -> list[float]:
    """Returns the times that `measure_graph` summarises, in microseconds per call, in order.

    ``expected_us``: the expected time of one call, see `sample`.
    """
    if device.type != "cuda" or not calls:
        raise ValueError(f"a CUDA graph needs at least one call and a GPU, got calls={len(calls)}, device={device}")
    replay = captured(calls, device)
    whole_us = None if expected_us is None else expected_us * len(calls)
    return [time_us / len(calls) for time_us in sample(replay, device, expected_us=whole_us, **options)]


def captured(calls: Sequence[Call], device: torch.device, pool: Any = None) -> Call:
    """Captures callables in one CUDA graph.

    Args:
        calls: the callables to capture, in order; each is first called outside the graph.
        device: a GPU.
        pool: a `torch.cuda.graph_pool_handle`. Graphs that never run concurrently can share memory through it.

    Returns:
        A callable that runs the graph. The callable keeps the calls alive, because the graph reads the tensors that they hold.

    Raises:
        RuntimeError: a call contains something that cannot be captured, such as waiting for the device.
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
    """A graph and its captured calls. The calls hold the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        self.graph.replay()


def host_time(call: Call, device: torch.device, calls: int = 20) -> float:
    """Returns how many microseconds a call on a GPU takes on the host. The call queues its work without waiting for the device.

    Args:
        call: a callable without parameters.
        device: a GPU.
        calls: number of calls. The launches of all calls must fit into the device's queue (about 1000 kernels); otherwise the host
            waits.
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
            starts.append(torch.cuda.Event(enable_timing=True))
            ends.append(torch.cuda.Event(enable_timing=True))
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            before()
            start.record()
            calls[index % len(calls)]()
            end.record()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize()
    # A call that launches nothing may take less than a tick of the device's clock. Rates divide by the time, so it must not be 0.
    return [max(start.elapsed_time(end) * 1e3, _TICK_US) for start, end in zip(starts, ends, strict=True)]


def _before_each(device: torch.device, cache: Cache) -> Call:
    """Returns a function to call before each timed call. The function keeps the device busy while the host queues the timed call.
    For cold caches, it also evicts the caches.
    """
    if cache == "warm":
        return functools.partial(torch.cuda._sleep, _SPUN_CYCLES)
    return torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device).zero_
