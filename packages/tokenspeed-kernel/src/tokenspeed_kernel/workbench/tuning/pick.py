"""The flow that picks a winner: candidates, without those that traits or tunables refuse; timed; checked; the results recorded.

`tune_case` goes through it for ``tokenspeed-kernel tune``, `autotune` for `SelectionStrategy.AUTOTUNE`. They differ in where the
arguments come from, and in what a candidate's results are compared with.
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
    """What tuning found on one case. Kernels that want their arguments prepared differently do not compete: each kind is one
    outcome.

    Attributes:
        operator, case: names.
        trials: every candidate.
        untuned: the kernel that runs where nothing was measured; None if none does.
        results: what was recorded, the quickest first; empty if there was nothing to choose from, or nothing was right.
        saved: the file that it was written to; None if it holds for this process only.
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
        """What a call takes where nothing was measured."""
        return next((t.us for t in self.trials if t.kernel == self.untuned and t.own_choice), None)

    @property
    def gain(self) -> float | None:
        """How many times quicker the tuned choice is than the untuned one."""
        before = self.untuned_us
        return before / self.results[0].us if before is not None and self.results else None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
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
    """The kernel that would serve a request if nothing had been measured; None if none does."""
    chosen = consider(request, found=Found()).chosen
    return chosen.name if chosen is not None else None


def candidates(request: Request, specs: Iterable[KernelSpec]) -> list[tuple[str, Config]]:
    """Kernels with the configurations that do for a request, by name.

    Each kernel's own choice (an empty configuration) comes before all else, the untuned choice first, the others by priority. A
    reference is left out: it says what is right, and is no candidate.
    """
    first = untuned_choice(request)
    real = sorted((s for s in specs if not s.is_reference), key=lambda s: (s.name != first, -s.priority, s.name))
    own: list[tuple[str, Config]] = [(spec.name, {}) for spec in real]
    return own + [(s.name, config) for s in real for config in s.configurations() if s.configuration_gap(config, request) is None]


def run(request: Request, kernel: str, config: Config, values: Sequence[Any]) -> Any:
    """Runs a kernel with a configuration. Selecting it anew costs nothing that counts: decisions are remembered."""
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
    """Times candidates, and records the quickest configuration of each kernel that is right.

    Args:
        request: what they serve.
        chosen: see `candidates`.
        values: a kernel's arguments, by its name; given to each of its candidates, again and again.
        check: what is wrong with a trial's results; empty if nothing is.
        device: where they run.
        budget_s: seconds for all timing, compilation included. Each kernel's own choice is timed in any case.
        case: what was measured, for the record.
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
    """A callable that runs a candidate. The kernel is loaded when it is first called."""
    impl: Callable[..., Any] | None = None

    def call() -> Any:
        nonlocal impl
        impl = impl or select(request, Override(kernel, "tuning", tuple(config.items()))).impl
        return impl(*values)

    return call


def _is_right(trial: Trial, check: Callable[[Trial], str]) -> bool:
    try:
        problem = check(trial)
    except Exception as error:  # it may be the kind that fails now and then
        problem = first_line(error)
    if problem:
        trial.status, trial.reason = TrialStatus.FAILED, problem
    return not problem


def _result(best: Trial, trials: Sequence[Trial]) -> Result:
    """What is recorded of a kernel whose trials these are."""
    own = next((t.us for t in trials if t.own_choice and t.status in (TrialStatus.MEASURED, TrialStatus.HOPELESS)), None)
    assert best.us is not None
    source = source_fingerprint(KernelRegistry.get().module_of(best.kernel))
    return Result(best.kernel, dict(best.config), round(best.us, 4), None if own is None else round(own, 4), source)
