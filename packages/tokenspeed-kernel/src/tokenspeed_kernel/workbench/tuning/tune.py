"""Tuning on cases, for ``tokenspeed-kernel tune``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from tokenspeed_kernel.workbench.numerics.verify import Status, default_device, refusal, verify_case
from tokenspeed_kernel.workbench.tuned import entry_key
from tokenspeed_kernel.workbench.tuning.pick import Outcome, candidates, pick
from tokenspeed_kernel.workbench.tuning.search import Trial
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request, gate, kernel_override
from tokenspeed_kernel_base.spec import KernelSpec


def tune_case(
    operator: str,
    case: Case,
    device: torch.device | str | None = None,
    *,
    kernels: Collection[str] | None = None,
    budget_s: float = 10.0,
) -> list[Outcome]:
    """Measures the kernels that are eligible for a case, with their declared configurations. Records the fastest correct ones.

    Args:
        operator: ``"family.mode"``.
        case: the case; its arguments are prepared for each kernel that needs prepared arguments.
        device: the device; `default_device` if not given.
        kernels: names of the kernels to measure; all eligible ones if not given.
        budget_s: the seconds that measuring may take per outcome, compilation included, without verification. Each kernel's
            default configuration is always measured.

    Returns:
        One outcome for each group of kernels that take the same prepared arguments; at least one.
    """
    op, registry = get_operator(operator), KernelRegistry.get()
    where = default_device() if device is None else torch.device(device)
    platform = platform_of(where)
    if platform.pretended or platform.emulated:
        return [Outcome(operator, case.name, reason=f"{platform} is emulated or pretended, so its times mean nothing")]
    if case.world_size > 1:
        return [Outcome(operator, case.name, reason=f"it is for {case.world_size} processes, and only calls of one are measured")]

    def check(trial: Trial) -> str:
        with kernel_override(op.family, op.mode, trial.kernel, config=trial.config):
            verified = verify_case(registry.get_by_name(trial.kernel), case, where)
        return "" if verified.status is Status.PASSED else f"verify: {verified.status.value}: {verified.reason}"

    groups: dict[str, tuple[Request, list[KernelSpec]]] = {}
    values: dict[str, tuple[Any, ...]] = {}
    rejected: dict[str, str] = {}  # by kernel, why it is not measured
    with torch.no_grad():
        arguments = op.complete(case.build(where))
        op.check_call(arguments)
        for spec in registry.get_for_operator(op.family, op.mode):
            if spec.is_reference:
                continue
            if kernels is not None and spec.name not in kernels:
                rejected[spec.name] = "not among the kernels that were named"
                continue
            why = refusal(op, spec, arguments)
            if why is not None:
                rejected[spec.name] = ": ".join(why)
                continue
            prepared = op.prepared(arguments, spec)
            request = op.request(prepared)
            why = gate(spec, request)
            if why is not None:
                rejected[spec.name] = ": ".join(why)
            else:
                key = entry_key(operator, str(request.signature), request.traits, request.sizes)
                groups.setdefault(key, (request, []))[1].append(spec)
                values[spec.name] = tuple(prepared.values())
        del arguments
        made = [
            pick(request, candidates(request, specs), values.__getitem__, check, where, budget_s, case.name)
            for request, specs in groups.values()
        ]
    return made or [Outcome(operator, case.name, reason=_nothing_to_measure(rejected, kernels))]


def _nothing_to_measure(rejected: Mapping[str, str], kernels: Collection[str] | None) -> str:
    """Says why a case has no kernel to measure. ``rejected`` has the reason for each kernel but the reference."""
    if not rejected:
        return "the operator has no kernel but the reference"
    said = "no kernel but the reference is eligible" if kernels is None else "none of the kernels to measure is eligible"
    return f"{said}: {'; '.join(f'{name}: {why}' for name, why in rejected.items())}"
