"""Finds the fastest of several candidates within a time budget.

First each candidate is called twice. If the second call takes several times as long as the fastest candidate so far, there is a
third call. If the third call is as slow, the candidate is not measured further ("hopeless"). The other candidates are measured in
rounds (successive halving, Jamieson and Talwalkar, 2016, arXiv:1502.07943). After each round the slower half is dropped. The faster
half gets all the time of the next round. A round measures one candidate after another, so that drift of the machine affects all
candidates alike. A kernel's default configuration always stays, as the baseline of the result.

On a GPU a candidate is timed in a CUDA graph. The reasons are that launching a few kernels from Python takes longer than small
kernels run, and that inference engines capture their calls. A candidate that cannot be captured is timed as called, launch overhead
included.
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

# A candidate is hopeless if it takes this many times as long as the fastest one. The factor is large, because clocks and caches
# have not settled in the first calls.
_HOPELESS = 3.0
# Differences between first calls below this many microseconds are ignored, because the call and the synchronisation take about as
# long.
_BLURRED_US = 100.0
# Calls of a candidate in a round: the median of fewer calls is unreliable, that of more calls is no better.
_FEWEST, _MOST = 5, 300
_ROUNDS = 4
# The fraction of the budget for the first calls of all candidates, compilation included.
_FIRST_FRACTION = 0.7
# A configuration replaces a kernel's default if it is faster by more than this fraction. Smaller gains are noise.
WORTHWHILE = 0.02


class TrialStatus(str, enum.Enum):
    """The outcome of measuring a candidate."""

    MEASURED = "measured"
    HOPELESS = "hopeless"  # far slower than another candidate in the first calls, not measured further
    FAILED = "failed"  # raised an error, or gave wrong results
    NOT_REACHED = "not reached"  # never called: the time budget was used up


@dataclass(frozen=True)
class Candidate:
    """One kernel with one configuration (empty: the kernel's default), and a callable that runs the kernel with it."""

    kernel: str
    config: Mapping[str, Any]
    call: Callable[[], Any]


@dataclass
class Trial:
    """The measurement of a candidate.

    ``us``: the median time in microseconds; for a hopeless candidate, the time of its first calls. ``uncaptured``: why the
    candidate could not be captured in a CUDA graph; it was timed with launch overhead then.
    """

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
    """Measures candidates within a time budget, as the module's docstring describes.

    Args:
        candidates: the candidates, the most important ones first. The last ones are not measured if the budget is used up.
        device: the device that the candidates run on.
        budget_s: the seconds that all candidates together may take. Each kernel's default configuration is always called, even
            beyond the budget.

    Returns:
        One trial per candidate, in order. If a candidate raises an error, its trial has status FAILED, and nothing is raised.
    """
    start = time.monotonic()
    trials = [Trial(candidate.kernel, candidate.config) for candidate in candidates]
    best = float("inf")
    for candidate, trial in zip(candidates, trials, strict=True):
        if not trial.own_choice and time.monotonic() - start > _FIRST_FRACTION * budget_s:
            continue
        try:
            _once(candidate.call, device)
            trial.us = _once(candidate.call, device)
            if _is_hopeless(trial.us, best):  # the machine may have been busy: try again
                trial.us = min(trial.us, _once(candidate.call, device))
        except Exception as error:  # a candidate may fail in any way: too much shared memory, no such instruction...
            trial.status, trial.reason = TrialStatus.FAILED, first_line(error)
            continue
        best = min(best, trial.us)
        if _is_hopeless(trial.us, best):
            trial.status, trial.reason = TrialStatus.HOPELESS, f"{trial.us / best:.1f} times the best in the first calls"
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
    """Returns the callable to time for each candidate: on a GPU, a CUDA graph of the candidate if the capture succeeds."""
    calls = {i: candidates[i].call for i in racing}
    if device.type != "cuda":
        return calls
    pool = torch.cuda.graph_pool_handle()
    for i in racing:
        try:
            calls[i] = captured([candidates[i].call], device, pool)
        except Exception as error:  # the call synchronises, or allocates memory in a way that cannot be captured
            trials[i].uncaptured = first_line(error)
    return calls


def _round(
    racing: list[int], calls: Mapping[int, Callable[[], Any]], trials: list[Trial], device: torch.device, budget_s: float
) -> list[int]:
    """Measures candidates for one round. ``racing`` and the result are indices of candidates; failed ones are left out of the
    result."""
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
    """Returns the indices of the candidates for the next round: the faster half, candidates about as fast as the slowest of that
    half, and each kernel's default.
    """
    times = {i: trials[i].us or 0.0 for i in racing}
    ordered = sorted(racing, key=times.__getitem__)
    bar = times[ordered[(len(ordered) - 1) // 2]] * (1 + WORTHWHILE / 2)
    for i in racing:
        if times[i] > bar and not trials[i].own_choice:
            trials[i].reason = "dropped after a round: slower than the faster half"
    return [i for i in racing if times[i] <= bar or trials[i].own_choice]


def by_merit(trials: Sequence[Trial]) -> list[Trial]:
    """Returns one kernel's trials that were measured, the best first.

    The best trial is the fastest one, or that of the kernel's default if no other is faster by more than `WORTHWHILE`. The others
    follow by time.
    """
    done = [trial for trial in trials if trial.status is TrialStatus.MEASURED and trial.us is not None]
    ordered = sorted(done, key=lambda trial: trial.us or 0.0)
    own = next((trial for trial in ordered if trial.own_choice), None)
    if own is not None and ordered and (own.us or 0.0) <= (ordered[0].us or 0.0) * (1 + WORTHWHILE):
        ordered.remove(own)
        ordered.insert(0, own)
    return ordered


def _once(call: Callable[[], Any], device: torch.device) -> float:
    """Calls a candidate once. Returns the time in microseconds, with the synchronisation of the device."""
    start = time.perf_counter_ns()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) / 1e3


def first_line(error: Exception) -> str:
    """Formats an error in one line, for tables."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
