"""Limits the time of steps that may take too long: baselines that tune themselves, and references."""

from __future__ import annotations

import contextvars
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.timing import sample


class OutOfTimeError(Exception):
    """A step exceeded its time limit."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `OutOfTimeError` inside the ``with`` block after ``seconds``, as soon as Python code runs again.

    The function works in the main thread only, and its blocks cannot be nested. If code in the block converts the exception to
    another exception, as a compiler may, the block still raises `OutOfTimeError`, with the other exception as its cause.
    """
    over = OutOfTimeError(f"it took more than {seconds:.0f} s")
    is_over = False

    def stop(number: int, frame: Any) -> None:
        nonlocal is_over
        is_over = True
        raise over

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    except Exception as error:
        if is_over and error is not over:
            raise over from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _few_times(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """Returns the median time of a call in milliseconds, once per quantile. Triton's autotuner expects a time for each quantile."""
    device = torch.device("cuda", torch.cuda.current_device())
    times = sample(call, device, budget_s=0.0, cache="cold", fewest=7, most=7, expected_us=1.0)
    return [statistics.median(times) / 1e3] * len(quantiles)


def tune_quickly(keep: bool) -> None:
    """Makes Triton's autotuner compile its configurations in parallel, and time each one a few times only.

    By default Triton compiles the configurations one after another, and the first call of vLLM's chunked scan takes minutes.
    Triton's own timing runs a short kernel a thousand times, and overwrites the whole cache before each run.

    Args:
        keep: whether the autotuner's results are stored on disk for later processes. Pass False if other processes use the device
            at the same time.
    """
    os.environ.setdefault("FLA_CACHE_RESULTS", str(int(keep)))  # flash-linear-attention reads this variable itself
    try:
        from triton import knobs
        from triton.runtime import autotuner
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # another release of Triton, or no Triton: change nothing
        return
    knobs.autotuning.cache = keep
    run = autotuner.Autotuner.run
    threads = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1))
    known: set[Any] = set()

    def compile_all(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with AsyncCompileMode(threads, ignore_errors=True):
            tuner.warmup(*args, **{name: value for name, value in kwargs.items() if name != "warmup"})

    def run_prepared(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        key = (id(tuner), *(str(given.get(name)) for name in tuner.keys))
        if len(tuner.configs) > 1 and key not in known:
            known.add(key)
            tuner.__dict__.setdefault("do_bench", _few_times)
            try:
                # A time limit may interrupt the compilation. Triton's asynchronous compile mode then ends with this copied context.
                contextvars.copy_context().run(compile_all, tuner, args, kwargs)
            except OutOfTimeError:
                raise
            except Exception as error:  # a configuration does not compile; the autotuner, which runs next, skips it
                print(f"compiled one after another: {tuner.base_fn.__name__}: {type(error).__name__}: {error}"[:160])
        return run(tuner, *args, **kwargs)

    autotuner.Autotuner.run = run_prepared
