"""Finding the quickest of some candidates in a given time.

First each is called twice. One that takes several times as long as the best so far, also once more, is hopeless and is given up.
The others are measured in rounds (successive halving, Jamieson and Talwalkar, 2016, arXiv:1502.07943): after each round the slower
half goes, and the rest get its time in the next. In a round they take turns, so that a drift of the machine meets all alike. What a
kernel does by its own choice always stays: it is what the result is told against.

On a GPU a candidate is timed in a CUDA graph: launching a few kernels from Python takes longer than small ones run, and serving
captures its calls. One that cannot be captured is timed as it is called, launches included.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.timing import captured, sample

# How much slower than the best a candidate may be at first sight, when clocks and caches have not settled.
_HOPELESS = 3.0
# At first sight, times below this do not count: a single call and the wait for the device take as long.
_BLURRED_US = 100.0
# Calls in a round: the median of fewer is not reliable, that of more no better.
_FEWEST, _MOST = 5, 300
_ROUNDS = 4
# The part of the time that looking at each candidate first may take, compilation included.
_FIRST_SHARE = 0.7
# A configuration replaces a kernel's own choice if it is quicker by this share; less is noise.
WORTHWHILE = 0.02


class TrialStatus(str, enum.Enum):
    """What became of a candidate."""

    MEASURED = "measured"
    HOPELESS = "hopeless"  # stopped early
    FAILED = "failed"  # raised, or gives wrong results
    NOT_REACHED = "not reached"  # the time was up


@dataclass(frozen=True)
class Candidate:
    """One kernel with one configuration (empty: its own choice), and a callable that runs it."""

    kernel: str
    config: Mapping[str, Any]
    call: Callable[[], Any]


@dataclass
class Trial:
    """A candidate's record: ``us`` is the median of what was measured, in microseconds; of a hopeless one, what was seen of it.
    ``uncaptured``: why it was timed with its launches on a GPU."""

    kernel: str
    config: Mapping[str, Any]
    status: TrialStatus = TrialStatus.NOT_REACHED
    us: float | None = None
    reason: str = ""
    uncaptured: str = ""
    samples: list[float] = field(default_factory=list, repr=False)

    @property
    def own_choice(self) -> bool:
        return not self.config

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "config": dict(self.config),
            "status": self.status.value,
            "us": self.us,
            "reason": self.reason,
            "samples": len(self.samples),
            **({"uncaptured": self.uncaptured} if self.uncaptured else {}),
        }


def search(candidates: Sequence[Candidate], device: torch.device, budget_s: float) -> list[Trial]:
    """Measures candidates.

    Args:
        candidates: those that matter most first: where time is up, the last were not reached.
        device: where they run.
        budget_s: seconds for all together. Each kernel's own choice is seen in any case, however long that takes.

    Returns:
        One trial a candidate, in order. Nothing is raised for a candidate that raises.
    """
    start = time.monotonic()
    trials = [Trial(candidate.kernel, candidate.config) for candidate in candidates]
    best = float("inf")
    for candidate, trial in zip(candidates, trials, strict=True):
        if not trial.own_choice and time.monotonic() - start > _FIRST_SHARE * budget_s:
            continue
        try:
            _once(candidate.call, device)
            trial.us = _once(candidate.call, device)
            if _is_hopeless(trial.us, best):  # or the machine was busy: look once more
                trial.us = min(trial.us, _once(candidate.call, device))
        except Exception as error:  # a candidate may fail in any way: too much shared memory, no such instruction...
            trial.status, trial.reason = TrialStatus.FAILED, first_line(error)
            continue
        best = min(best, trial.us)
        if _is_hopeless(trial.us, best):
            trial.status, trial.reason = TrialStatus.HOPELESS, f"{trial.us / best:.1f} times the best at first sight"
        else:
            trial.status = TrialStatus.MEASURED
    racing = [i for i, trial in enumerate(trials) if trial.status is TrialStatus.MEASURED]
    calls = _timed_calls(racing, candidates, trials, device)
    left_s = max(budget_s - (time.monotonic() - start), 0.2 * budget_s)
    for turn in range(_ROUNDS):
        racing = _round(racing, calls, trials, device, left_s / _ROUNDS)
        if len(racing) <= 1:
            break
        if turn < _ROUNDS - 1:
            racing = _survivors(racing, trials)
    return trials


def _is_hopeless(us: float, best: float) -> bool:
    return us > max(_HOPELESS * best, best + _BLURRED_US)


def _timed_calls(
    racing: list[int], candidates: Sequence[Candidate], trials: list[Trial], device: torch.device
) -> dict[int, Callable[[], Any]]:
    """What is called to time each candidate: on a GPU a graph of it, where it can be captured."""
    calls = {i: candidates[i].call for i in racing}
    if device.type != "cuda":
        return calls
    pool = torch.cuda.graph_pool_handle()
    for i in racing:
        try:
            calls[i] = captured([candidates[i].call], device, pool)
        except Exception as error:  # what waits for the device, or allocates in ways of its own
            trials[i].uncaptured = first_line(error)
    return calls


def _round(
    racing: list[int], calls: Mapping[int, Callable[[], Any]], trials: list[Trial], device: torch.device, budget_s: float
) -> list[int]:
    """Measures those in the race once more; which of them still are."""
    left = []
    for i in racing:
        trial = trials[i]
        try:
            trial.samples += sample(calls[i], device, budget_s=budget_s / len(racing), fewest=_FEWEST, most=_MOST)
        except Exception as error:
            trial.status, trial.reason = TrialStatus.FAILED, first_line(error)
            continue
        trial.us = statistics.median(trial.samples)
        left.append(i)
    return left


def _survivors(racing: list[int], trials: list[Trial]) -> list[int]:
    """The quicker half, what is as quick as the slowest of that, and each kernel's own choice."""
    times = {i: trials[i].us or 0.0 for i in racing}
    ordered = sorted(racing, key=times.__getitem__)
    bar = times[ordered[(len(ordered) - 1) // 2]] * (1 + WORTHWHILE / 2)
    for i in racing:
        if times[i] > bar and not trials[i].own_choice:
            trials[i].reason = "out of the race early"
    return [i for i in racing if times[i] <= bar or trials[i].own_choice]


def by_merit(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of one kernel that were measured to the end, the best first: the quickest, but the kernel's own choice where
    nothing is quicker by a share that is worth while."""
    done = [trial for trial in trials if trial.status is TrialStatus.MEASURED and trial.us is not None]
    ordered = sorted(done, key=lambda trial: trial.us or 0.0)
    own = next((trial for trial in ordered if trial.own_choice), None)
    if own is not None and ordered and (own.us or 0.0) <= (ordered[0].us or 0.0) * (1 + WORTHWHILE):
        ordered.remove(own)
        ordered.insert(0, own)
    return ordered


def _once(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of a call, the wait for the device included."""
    start = time.perf_counter_ns()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) / 1e3


def first_line(error: Exception) -> str:
    """An error as a table shows it."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
