"""Tuning on cases: measure, verify the winner, write it down."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.numerics.verify import Status, default_device, refusal, verify_case
from tokenspeed_kernel.workbench.tuned import Result
from tokenspeed_kernel.workbench.tuning.candidates import (
    configurations,
    entry_of,
    in_order,
    override_for,
    result_of,
    untuned_choice,
)
from tokenspeed_kernel.workbench.tuning.search import Candidate, Trial, TrialStatus, by_merit, search
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel_base.selection import Request, gate, kernel_override, select


@dataclass(frozen=True)
class Outcome:
    """What tuning found on one case. Kernels that want their arguments prepared differently do not compete: each kind is one
    outcome.

    Attributes:
        operator, case: names.
        trials: every candidate.
        untuned: the kernel that runs where nothing was measured; None if none does.
        results: what was written down, the quickest first; empty if there was nothing to choose from, or nothing was right.
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


def tune_case(
    operator: str,
    case: Case,
    device: torch.device | str | None = None,
    *,
    kernels: Collection[str] | None = None,
    budget_s: float = 10.0,
) -> list[Outcome]:
    """Measures the kernels that serve a case, with the configurations that they declare, and records the quickest that is right.

    Args:
        operator: ``"family.mode"``.
        case: its inputs; those that a kernel wants prepared are prepared for it.
        device: where; `default_device` if not given.
        kernels: names of those to measure; all that pass the gates if not given.
        budget_s: seconds of measuring for each outcome, compilation included, verification left out. Each kernel's own choice is
            measured in any case.

    Returns:
        One outcome for each kind of prepared arguments; at least one.
    """
    op = get_operator(operator)
    where = default_device() if device is None else torch.device(device)
    outcome = functools.partial(Outcome, operator, case.name)
    platform = platform_of(where)
    if platform.pretended or platform.emulated:
        return [outcome(reason=f"{platform} is no device: its times say nothing")]
    if case.world_size > 1:
        return [outcome(reason=f"it is for {case.world_size} processes, and only calls of one are measured")]
    groups: dict[str, list[tuple[KernelSpec, Request, dict[str, Any]]]] = {}
    with torch.no_grad():
        arguments = op.complete(case.build(where))
        op.check_call(arguments)
        for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
            if spec.universal or spec.capability.gap(platform) or refusal(op, spec, arguments) is not None:
                continue
            prepared = op.prepared(arguments, spec)
            request = op.request(prepared)
            if gate(spec, request) is None:
                key = tuned.entry_key(operator, str(request.signature), request.traits, request.sizes)
                groups.setdefault(key, []).append((spec, request, prepared))
        del arguments
        made = []
        for group in groups.values():
            chosen = [one for one in group if kernels is None or one[0].name in kernels]
            if chosen:
                made.append(_tune_group(op, case, where, chosen, budget_s, outcome))
    return made or [outcome(reason="no kernel that is to be measured serves it here")]


def _tune_group(
    op: Operator[Any, Any],
    case: Case,
    device: torch.device,
    group: list[tuple[KernelSpec, Request, dict[str, Any]]],
    budget_s: float,
    outcome: Callable[..., Outcome],
) -> Outcome:
    request = group[0][1]
    untuned = untuned_choice(request)
    values = {spec.name: tuple(arguments.values()) for spec, _, arguments in group}
    wanted = in_order(((spec, config) for spec, request, _ in group for config in configurations(spec, request)), untuned)
    if len(wanted) == 1:
        return outcome(untuned=untuned, reason=f"{wanted[0][0].name} is the only candidate, with nothing to tune")
    candidates = [Candidate(spec.name, config, _call(op, request, spec, config, values[spec.name])) for spec, config in wanted]
    trials = search(candidates, device, budget_s)
    del candidates, values
    results = []
    for name in dict.fromkeys(trial.kernel for trial in trials):
        of_kernel = [trial for trial in trials if trial.kernel == name]
        best = _first_right(op, case, device, of_kernel)
        if best is not None:
            results.append(result_of(best, of_kernel))
    if not results:
        return outcome(tuple(trials), untuned, reason="no candidate ran to the end and was right")
    results.sort(key=lambda result: (result.us, result.kernel))
    saved = tuned.record(entry_of(request, results, case.name))
    return outcome(tuple(trials), untuned, tuple(results), saved)


def _call(op: Operator[Any, Any], request: Request, spec: KernelSpec, config: Mapping[str, Any], values: tuple[Any, ...]) -> Any:
    """A callable that runs a kernel as it would be run, with a configuration. The kernel is loaded when it is first called."""
    loaded: Any = None

    def call() -> Any:
        nonlocal loaded
        if loaded is None:
            loaded = select(request, override_for(Trial(spec.name, config))).impl
        return loaded(*values)

    return call


def _first_right(op: Operator[Any, Any], case: Case, device: torch.device, trials: list[Trial]) -> Trial | None:
    """The best of one kernel's trials that gives right results; those that do not have failed."""
    for trial in by_merit(trials):
        with kernel_override(op.family, op.mode, trial.kernel, config=trial.config):
            verified = verify_case(KernelRegistry.get().get_by_name(trial.kernel), case, device)
        if verified.status is Status.PASSED:
            return trial
        trial.status, trial.reason = TrialStatus.FAILED, f"verify: {verified.status.value}: {verified.reason}"
    return None
