"""Which kernels and configurations could serve a request, and what becomes of their trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.tuned import Device, Entry, Result, source_fingerprint
from tokenspeed_kernel.workbench.tuning.search import Trial, TrialStatus
from tokenspeed_kernel_base.measured import Found
from tokenspeed_kernel_base.platform import driver_version
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel_base.selection import Override, Request, consider


def untuned_choice(request: Request) -> str | None:
    """The kernel that would serve a request if nothing had been measured; None if none does."""
    chosen = consider(request, found=Found()).chosen
    return chosen.name if chosen is not None else None


def configurations(spec: KernelSpec, request: Request) -> list[Mapping[str, Any]]:
    """A kernel's own choice, then every configuration that will do for a request."""
    return [{}, *(config for config in spec.configurations() if spec.configuration_gap(config, request) is None)]


Configured = tuple[KernelSpec, Mapping[str, Any]]


def in_order(candidates: Iterable[Configured], first: str | None) -> list[Configured]:
    """Each kernel's own choice before all else, and the kernels by what they claim, ``first`` ahead of them. A reference is left
    out: it says what is right, and is no candidate."""
    real = [(spec, config) for spec, config in candidates if not spec.universal]
    return sorted(real, key=lambda one: (bool(one[1]), one[0].name != first, -one[0].priority, one[0].name))


def entry_of(request: Request, results: Sequence[Result], case: str) -> Entry:
    """An entry with these results, measured here and now."""
    return Entry(
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


def result_of(trial: Trial, trials: Sequence[Trial]) -> Result:
    """What is written down of a kernel: the trial that was taken, of all of that kernel."""
    own = next((t.us for t in trials if t.own_choice and t.status in (TrialStatus.MEASURED, TrialStatus.HOPELESS)), None)
    assert trial.us is not None
    source = source_fingerprint(KernelRegistry.get().module_of(trial.kernel))
    return Result(trial.kernel, dict(trial.config), round(trial.us, 4), None if own is None else round(own, 4), source)


def override_for(trial: Trial) -> Override:
    return Override(trial.kernel, "tuning", tuple(trial.config.items()))
