"""Finds the fastest kernel and configuration for a request. Lists the candidates, times and checks them, and records the results.

`tune_case` uses this module for ``tokenspeed-kernel tune``, and `autotune` for `SelectionStrategy.AUTOTUNE`. These two callers
differ in the source of the arguments, and in the results that the candidates' results are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.tuned import Device, Entry, Result, source_fingerprint
from tokenspeed_kernel.workbench.tuning.search import Candidate, Trial, TrialStatus, by_merit, first_line, search
from tokenspeed_kernel_base.measured import Found
from tokenspeed_kernel_base.platform import driver_version
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Override, Request, consider, select
from tokenspeed_kernel_base.spec import KernelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of tuning on one case, for kernels that take the same arguments.

    Kernels that need differently prepared arguments do not compete, so each group of kernels with the same arguments has its own
    outcome.

    Attributes:
        operator, case: names of the operator and the case.
        trials: the measurement of each candidate.
        untuned: the kernel that would be selected without tuned results; None if no kernel is eligible.
        results: the recorded results, the fastest first; empty if there was only one candidate, or none was correct.
        saved: the file to which the results were written; None if the results apply to this process only.
        reason: why there are no results.
    """

    operator: str
    case: str
    trials: tuple[Trial, ...] = ()
    untuned: str | None = None
    results: tuple[Result, ...] = ()
    saved: Path | None = None
    reason: str = ""

    @property
    def untuned_us(self) -> float | None:
        """The time of a call with the kernel and configuration that run without tuned results, in microseconds."""
        return next((t.us for t in self.trials if t.kernel == self.untuned and t.own_choice), None)

    @property
    def gain(self) -> float | None:
        """The speedup by tuning: the time without tuned results, divided by the time of the fastest recorded result."""
        before = self.untuned_us
        return before / self.results[0].us if before is not None and self.results else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the outcome as plain values, for JSON."""
        best = self.results[0] if self.results else None
        return {
            "operator": self.operator,
            "case": self.case,
            "untuned": self.untuned,
            "untuned_us": self.untuned_us,
            "tuned": best and best.kernel,
            "config": best and dict(best.config),
            "tuned_us": best and best.us,
            "gain": self.gain,
            "saved": str(self.saved) if self.saved else None,
            "reason": self.reason,
            "trials": [trial.to_dict() for trial in self.trials],
        }


def untuned_choice(request: Request) -> str | None:
    """Returns the kernel that would be selected for a request without tuned results; None if no kernel is eligible."""
    chosen = consider(request, found=Found()).chosen
    return chosen.name if chosen is not None else None


def candidates(request: Request, specs: Iterable[KernelSpec]) -> list[tuple[str, Config]]:
    """Returns the candidates for a request: kernel names with the configurations that are valid for the request.

    Default configurations come first: that of the kernel selected without tuned results, then those of the other kernels by
    priority. An empty configuration is the kernel's default. The reference is not a candidate.
    """
    first = untuned_choice(request)
    real = sorted((s for s in specs if not s.is_reference), key=lambda s: (s.name != first, -s.priority, s.name))
    own: list[tuple[str, Config]] = [(spec.name, {}) for spec in real]
    return own + [(s.name, config) for s in real for config in s.configurations() if s.configuration_gap(config, request) is None]


def run(request: Request, kernel: str, config: Config, values: Sequence[Any]) -> Any:
    """Runs a kernel with a configuration, through selection. This is cheap, because selections are memoised."""
    return select(request, Override(kernel, "tuning", tuple(config.items()))).impl(*values)


def pick(
    request: Request,
    chosen: Sequence[tuple[str, Config]],
    values: Callable[[str], Sequence[Any]],
    check: Callable[[Trial], str],
    device: torch.device,
    budget_s: float,
    case: str,
) -> Outcome:
    """Times candidates, and records the fastest correct configuration of each kernel.

    Args:
        request: the request of the call.
        chosen: the candidates to time, see `candidates`.
        values: function that returns the arguments for a kernel, by its name. Each call of the kernel's candidates has these
            arguments.
        check: function that returns the error in a candidate's results; empty if the results are correct.
        device: the device that the candidates run on.
        budget_s: the seconds that all timing may take, compilation included. Each kernel's default configuration is always timed.
        case: name of the case, or sizes of the measured call; stored with the results.
    """
    untuned = untuned_choice(request)
    if len(chosen) < 2:
        return Outcome(request.operator, case, (), untuned, reason=f"{chosen[0][0]} is the only candidate, with nothing to tune")
    trials = search(
        [Candidate(name, config, _call(request, name, config, values(name))) for name, config in chosen], device, budget_s
    )
    results = []
    for name in dict.fromkeys(trial.kernel for trial in trials):
        of_kernel = [trial for trial in trials if trial.kernel == name]
        best = next((trial for trial in by_merit(of_kernel) if _is_right(trial, check)), None)
        if best is not None:
            results.append(_result(best, of_kernel))
    if not results:
        return Outcome(request.operator, case, tuple(trials), untuned, reason="no candidate ran to the end and was right")
    results.sort(key=lambda result: (result.us, result.kernel))
    entry = Entry(
        request.operator,
        str(request.signature),
        dict(request.traits),
        request.buckets,
        Device.of(request.platform),
        tuple(results),
        driver_version(request.platform.vendor),
        tuned.toolchain(),
        case,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return Outcome(request.operator, case, tuple(trials), untuned, tuple(results), tuned.record(entry))


def _call(request: Request, kernel: str, config: Config, values: Sequence[Any]) -> Callable[[], Any]:
    """Returns a callable that runs a candidate. The kernel is loaded at the first call."""
    impl: Callable[..., Any] | None = None

    def call() -> Any:
        nonlocal impl
        impl = impl or select(request, Override(kernel, "tuning", tuple(config.items()))).impl
        return impl(*values)

    return call


def _is_right(trial: Trial, check: Callable[[Trial], str]) -> bool:
    try:
        problem = check(trial)
    except Exception as error:  # a kernel may fail intermittently
        problem = first_line(error)
    if problem:
        trial.status, trial.reason = TrialStatus.FAILED, problem
    return not problem


def _result(best: Trial, trials: Sequence[Trial]) -> Result:
    """Returns the result to store for a kernel. ``best``: the trial of its best configuration; ``trials``: all of its trials."""
    own = next((t.us for t in trials if t.own_choice and t.status in (TrialStatus.MEASURED, TrialStatus.HOPELESS)), None)
    assert best.us is not None
    source = source_fingerprint(KernelRegistry.get().module_of(best.kernel))
    return Result(best.kernel, dict(best.config), round(best.us, 4), None if own is None else round(own, 4), source)
