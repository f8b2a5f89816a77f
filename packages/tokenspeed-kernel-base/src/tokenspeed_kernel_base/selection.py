"""Selects the kernel for a request, and explains why the other kernels were not selected.

A request passes every kernel of its operator through the gates of `GATES`. The remaining kernels are ranked by `RANKS`. The gates
fail closed, and each gate gives a reason for a rejection. `explain_selection`, `NoKernelFoundError` and the selection itself all
use the function `consider`, so they cannot disagree.

Measured results also give a kernel's fastest configuration, which selection binds to the implementation. Each result applies to one
bucket of sizes; a request contains its sizes.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_kernel_base import config, measured, memo
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.explanation import (
    Explanation,
    NoKernelFoundError,
    Override,
    Request,
    SelectedKernel,
    SelectionObjective,
    Verdict,
)
from tokenspeed_kernel_base.measured import Found, Tuned
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform
from tokenspeed_kernel_base.registry import KernelRegistry, nearest_kernel
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.spec import KernelSpec, Priority
from tokenspeed_kernel_base.traits import format_traits

__all__ = [
    "GATES",
    "RANKS",
    "Explanation",
    "NoKernelFoundError",
    "Override",
    "Request",
    "SelectedKernel",
    "SelectionObjective",
    "SelectionPolicy",
    "SelectionStrategy",
    "Verdict",
    "consider",
    "explain_selection",
    "gate",
    "kernel_override",
    "make_request",
    "override_in_force",
    "override_of_call",
    "rank",
    "select",
    "select_kernel",
    "selection_policy",
    "selections_made",
    "set_selection_policy",
    "warmup_selection",
]

logger = logging.getLogger("tokenspeed_kernel")


class SelectionStrategy(enum.Enum):
    """How kernels are ranked."""

    HEURISTIC = "heuristic"  # rank by tuned results if there are any, otherwise by objective and priority
    AUTOTUNE = "autotune"  # like HEURISTIC, but without tuned results the first call measures the kernels, and stores the results


@dataclass(frozen=True)
class SelectionPolicy:
    """The strategy of each operator, and the objective of requests that give none.

    Attributes:
        default_strategy: the strategy of operators that ``op_strategies`` does not name.
        op_strategies: strategies of operators, by ``("family", "mode")``.
        objective: the ranking objective of requests that give none.
        autotune_budget_s: time limit of AUTOTUNE's measurements for one decision, in seconds, compilation included. Each kernel's
            default configuration is measured even beyond this limit.
    """

    default_strategy: SelectionStrategy = SelectionStrategy.HEURISTIC
    op_strategies: Mapping[tuple[str, str], SelectionStrategy] = field(default_factory=dict)
    objective: SelectionObjective = SelectionObjective.DEFAULT
    autotune_budget_s: float = 5.0

    def get_strategy(self, family: str, mode: str) -> SelectionStrategy:
        return self.op_strategies.get((family, mode), self.default_strategy)


# -- what decisions depend on, besides the registry ---------------------------------------------------------------------------

_policy: SelectionPolicy | None = None

_warned: set[tuple[str, str]] = set()


@dataclass(eq=False)
class _OverrideBlock:
    operator: tuple[str, str]
    kernel: str
    config: tuple[tuple[str, Any], ...] | None
    # A task inherits its creator's context and may outlive the block. So the end of the block also clears this flag.
    active: bool = True


_overrides: contextvars.ContextVar[tuple[_OverrideBlock, ...]] = contextvars.ContextVar("kernel_overrides", default=())


def selection_policy() -> SelectionPolicy:
    """The policy that `set_selection_policy` set; without one, the default policy with the objective from the settings."""
    if _policy is not None:
        return _policy
    objective = config.settings().objective
    if objective is None:
        return SelectionPolicy()
    try:
        return SelectionPolicy(objective=SelectionObjective(objective))
    except ValueError:
        known = ", ".join(o.value for o in SelectionObjective)
        raise config.ConfigurationError(
            f"objective must be one of {known}, got {objective!r} ({config.settings().source})"
        ) from None


def set_selection_policy(policy: SelectionPolicy | None) -> None:
    """Sets the policy of the whole process; None restores the default.

    With `SelectionStrategy.AUTOTUNE` the first call of each bucket of sizes measures every eligible kernel, for about
    ``autotune_budget_s``, on the call's own inputs. Tensors that kernels write to are copied first. The results are stored for
    other processes. Nothing is measured during the capture of a CUDA graph: the kernel for HEURISTIC runs, with a warning.
    """
    global _policy
    _policy = policy
    memo.invalidate()


@contextlib.contextmanager
def kernel_override(family: str, mode: str, kernel_name: str, *, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Forces a kernel for an operator inside the block. Applies to this thread or task, and to tasks created in the block until it
    ends.

    The override bypasses the name gate, and the traits gate except for fixed traits. So the override can run a kernel for traits
    that the kernel does not declare. All other gates still apply.

    Args:
        family, mode: the operator.
        kernel_name: the kernel.
        config: the configuration to run with: a value for each of the kernel's tunables, or ``{}`` for the kernel's defaults. If
            omitted, the kernel runs with its tuned configuration, if there is one. ``config`` also applies to calls in the block
            that name the kernel by their own ``override``.

    Raises:
        KeyError: no kernel of that name.
        ValueError: the kernel belongs to another operator, or does not declare the configuration.
    """
    spec = KernelRegistry.get().get_by_name(kernel_name, f"{family}.{mode}")
    if (spec.family, spec.mode) != (family, mode):
        raise ValueError(f"{kernel_name} implements {spec.operator}, not {family}.{mode}")
    undeclared = spec.undeclared(config or {})
    if undeclared is not None:
        raise ValueError(f"a configuration of {kernel_name} {undeclared}")
    block = _OverrideBlock((family, mode), kernel_name, None if config is None else tuple(config.items()))
    token = _overrides.set((*_overrides.get(), block))
    try:
        with memo.exceptional():
            try:
                yield
            finally:
                block.active = False  # still inside `exceptional`, so no decision made in the block is memoised
    finally:
        _overrides.reset(token)


def override_in_force(family: str, mode: str) -> Override | None:
    """The kernel that `kernel_override`, the environment or the TOML file forces for an operator, in this order of precedence."""
    for block in reversed(_overrides.get()):
        if block.active and block.operator == (family, mode):
            return Override(block.kernel, "kernel_override", block.config)
    setting = config.settings().override_for(family, mode)
    return Override(*setting) if setting else None


def override_of_call(family: str, mode: str, kernel: str | None) -> Override | None:
    """The override that applies to a call: the call's own override ``kernel``, else `override_in_force`. If `kernel_override`
    forces a configuration of the kernel that the call names, this configuration applies too.
    """
    in_force = override_in_force(family, mode)
    if not kernel:
        return in_force
    return Override(kernel, "override=", in_force.config if in_force is not None and in_force.kernel == kernel else None)


# -- deciding -----------------------------------------------------------------------------------------------------------------


GATES = {
    "package": "it belongs to the request's package, if the request is limited to a package",
    "solution": "it has the request's solution, if the request is limited to a solution",
    "name": "the request names it, if it is declared with ``only_by_name``",
    "platform": "the platform meets its requirements",
    "formats": "it declares the formats of the request's operands",
    "implementation": "it was not disabled, for example by a failed import or a failed self-check",
    "parameters": "its implementation takes every parameter that the call sets to a value other than the default",
    "traits": "the request's traits meet its constraints, and it declares every flag that the request sets",
}
"""The gates in order: each gate's name, and the statement that is true of a kernel that passes. An override bypasses the name gate,
and the traits gate except for fixed traits.
"""

RANKS = ("override", "measured result", "objective", "priority", "name")
"""The ranking criteria for kernels that pass all gates, in order."""


def gate(spec: KernelSpec, request: Request, *, overridden: bool = False) -> tuple[str, str] | None:
    """Returns the first of `GATES` that a kernel fails, with the reason; None if the kernel passes all gates. ``overridden``
    bypasses the name gate, and the traits gate except for fixed traits."""
    if request.package is not None and spec.package != request.package:
        return "package", f"belongs to {spec.package}, the request is for kernels of {request.package}"
    if request.solution is not None and spec.solution != request.solution:
        return "solution", f"is of solution {spec.solution}, the request is for {request.solution}"
    if spec.only_by_name and not overridden:
        return "name", f"is eligible only for calls that name it: {spec.only_by_name}"
    gap = spec.capability.gap(request.platform)
    if gap is not None:
        return "platform", gap
    if spec.format_signatures is not None and request.signature not in spec.format_signatures:
        return "formats", _nearest_difference(spec.format_signatures, request.signature)
    if (disabled := KernelRegistry.get().why_disabled(spec.name)) is not None:
        return "implementation", disabled
    if request.given and (ignored := KernelRegistry.get().ignored_parameters(spec.name) & request.given):
        return "parameters", f"does not take {', '.join(sorted(ignored))}"
    gaps = spec.trait_gaps(request.traits, request.fixed_traits if overridden else None)
    return ("traits", "; ".join(gaps)) if gaps else None


def _nearest_difference(offered: Iterable[FormatSignature], wanted: FormatSignature) -> str:
    differences = [signature.difference(wanted) for signature in offered]
    nearest = min(differences, key=lambda phrases: (len(phrases), phrases))
    return "; ".join(nearest)


def _find_measured(request: Request) -> Found:
    """The measured results for a request, by kernel."""
    return measured.find(request.operator, request.signature, request.traits, request.buckets, request.platform)


def _tuned_reason(name: str, results: Mapping[str, Tuned]) -> str:
    """Compares a kernel's measured time with the fastest alternative, in words: another kernel, or this kernel's defaults."""
    mine = results[name]
    others = [other.us for kernel, other in results.items() if kernel != name]
    if mine.config and mine.own_us is not None:
        others.append(mine.own_us)
    text = f"tuned: {mine.us:.4g} us" + (f" vs {min(others):.4g}" if others else "")
    return f"{text} ({format_traits(mine.config)})" if mine.config else text


def rank(spec: KernelSpec, request: Request, results: Mapping[str, Tuned]) -> tuple[tuple[float, ...], str]:
    """A kernel's rank among the kernels that pass all gates, and its reasons as text. The greatest rank wins; a tie is broken by
    name. ``results``: the measurements of the kernels that pass."""
    parts: list[str] = []
    mine = results.get(spec.name)
    if mine is not None:
        parts.append(_tuned_reason(spec.name, results))
    preference, why = _preference(spec, request)
    if why:
        parts.append(why)
    parts.append(f"priority {spec.priority}")
    if spec.accuracy:
        parts.append(spec.accuracy)
    return (-mine.us if mine is not None else float("-inf"), preference, spec.priority), ", ".join(parts)


def _preference(spec: KernelSpec, request: Request) -> tuple[float, str]:
    objective = request.objective
    if objective is SelectionObjective.DEFAULT:
        return 0, ""
    if objective is SelectionObjective.DEBUG:
        return -spec.priority, "objective debug prefers the lowest priority"
    if objective is SelectionObjective.PORTABILITY:
        capability = spec.capability
        demands = sum(
            (
                capability.vendors is not None,
                capability.min_arch_version is not None,
                capability.max_arch_version is not None,
                bool(capability.required_features),
            )
        )
        # Kernels with a priority below PORTABLE require the least of a platform, but are only fallbacks. So they rank last.
        return (-demands if spec.priority >= Priority.PORTABLE else -5), f"{demands} demands on the platform"
    if objective is SelectionObjective.ACCURACY:
        rounds = "fp8_weights" in spec.tags and any(fmt.storage_dtype in FP8 for _, fmt in request.signature.roles)
        return -float(rounds), "tagged fp8_weights" if rounds else ""
    tagged = objective.value in spec.tags
    return float(tagged), f"tagged {objective.value}" if tagged else ""


def consider(request: Request, override: Override | None = None, *, found: Found | None = None) -> Explanation:
    """Passes every kernel of the request's operator through the gates, ranks the kernels that pass, and selects the best.

    ``found``: measured results that replace the stored results. With an empty ``found``, the selection ignores measurements.
    """
    specs = KernelRegistry.get().get_for_operator(request.family, request.mode, request.package)
    wanted = override.kernel if override else None
    failures = {spec.name: gate(spec, request, overridden=spec.name == wanted) for spec in specs}
    rejected = [Verdict(spec, *failed) for spec in specs if (failed := failures[spec.name]) is not None]
    passing = [spec for spec in specs if failures[spec.name] is None]
    found = _find_measured(request) if found is None else found
    results = {spec.name: found.results[spec.name] for spec in passing if spec.name in found.results}
    accepted: list[Verdict] = []
    for spec in passing:
        overridden = spec.name == wanted
        position, why = rank(spec, request, results)
        if overridden:
            full = gate(spec, request)
            why = "override" + (f" despite {full[0]} ({full[1]})" if full else "") + f", {why}"
        configured, refused = _configuration(spec, request, override if overridden else None, results.get(spec.name))
        accepted.append(Verdict(spec, None, why + refused, (float(overridden), *position), configured))
    accepted.sort(key=lambda verdict: (tuple(-part for part in verdict.rank), verdict.spec.name))
    if len(accepted) > 1 and accepted[0].rank == accepted[1].rank:
        first, second = accepted[0], accepted[1]
        tie = f"{first.reason}; ties with {second.spec.name} ({second.spec.origin}) and precedes it by name"
        accepted[0] = Verdict(first.spec, None, tie, first.rank, first.config)

    chosen = accepted[0].spec if accepted else None
    problem = ""
    if override is not None and (chosen is None or chosen.name != wanted):
        # If the override's kernel is not eligible, no kernel is chosen. Silently running another kernel would hide the failure.
        chosen = None
        problem = _why_no_override(override, request, rejected)
    elif request.solution is not None and not any(spec.solution == request.solution for spec in specs):
        problem = _no_such_solution(request.solution, specs)
    return Explanation(request, (*accepted, *rejected), chosen, override, problem, found.notes)


def _configuration(
    spec: KernelSpec, request: Request, override: Override | None, result: Tuned | None
) -> tuple[Mapping[str, Any], str]:
    """Returns the configuration that a kernel would run with; if the measured configuration cannot be used, also the reason."""
    if override is not None and override.config is not None:
        return dict(override.config), ""
    if result is None or not result.config:
        return {}, ""
    gap = spec.configuration_gap(result.config, request)  # measured at one size of the bucket, and perhaps invalid at this size
    return (result.config, "") if gap is None else ({}, f"; runs as untuned: {gap}")


def _why_no_override(override: Override, request: Request, rejected: Iterable[Verdict]) -> str:
    for verdict in rejected:
        if verdict.spec.name == override.kernel:
            return f"{override.source} requests {override.kernel}, which fails the {verdict.gate} gate: {verdict.reason}"
    near = nearest_kernel(override.kernel, KernelRegistry.get().get_for_operator(request.family, request.mode, request.package))
    try:
        spec = KernelRegistry.get().get_by_name(override.kernel)
    except KeyError:
        return f"{override.source}: no kernel named {override.kernel}{near}"
    if spec.operator != request.operator:
        problem = f"implements {spec.operator}, not {request.operator}{near}"
    elif request.package is not None:
        problem = f"does not belong to {request.package}"
    else:
        problem = f"is private to the functions of {spec.package}"
    return f"{override.source} requests {override.kernel}, which {problem}"


def _no_such_solution(solution: str, specs: Iterable[KernelSpec]) -> str:
    """Text for a request whose solution no kernel has, with the nearest known solution."""
    kernels = {spec.name: spec.solution for spec in specs}
    if solution in kernels:
        near = f"; it is a kernel of solution {kernels[solution]}: override= takes it"
    else:
        near = did_you_mean(solution, sorted({*kernels.values()}))
    return f"no kernel of this operator has solution {solution}{near}"


_decisions: dict[Any, SelectedKernel] = memo.new_memo()
# `memo.invalidate` does not clear this record, so a receipt of the process also lists the calls before a change.
_made: dict[Any, tuple[Request, Override | None]] = {}


def selections_made() -> list[tuple[Request, Override | None]]:
    """The requests that this process has selected a kernel for, in order, each with its override. At most `memo.MAX_ENTRIES`
    requests are recorded. A request's sizes are those of its first call."""
    return [*_made.values()]


def select(request: Request, override: Override | None = None, arguments: Mapping[str, Any] | None = None) -> SelectedKernel:
    """Selects the kernel for a request. Returns the same object until something that the decision depends on changes.

    Args:
        request: the request.
        override: the kernel requested by name.
        arguments: arguments of the call by name, for a measurement if the policy requires one; None without a call.

    Raises:
        NoKernelFoundError: no kernel passes the gates, or the override does not.
    Warns:
        KernelLoadWarning: the best kernel cannot be imported; the next best is selected.
    """
    # A trait's type is part of the key: True and 1 are equal, but make different requests.
    traits = frozenset((name, type(value), value) for name, value in request.traits.items())
    key = (
        request.operator,
        request.signature,
        traits,
        request.platform,
        request.objective,
        request.solution,
        request.fixed_traits,
        override,
        tuple(request.buckets.items()) if sizes_matter(request) else (),
        request.package,
        request.given,
    )
    known = _decisions.get(key)
    if known is not None:
        return known
    provisional = override is None and arguments is not None and not _autotuned(request, arguments)
    impl: Callable[..., Any] | None = None
    while impl is None:  # each round after the first rejects a kernel that failed to load, or that lacks a parameter of the call
        started = memo.epoch()
        explanation = consider(request, override)
        if explanation.chosen is None:
            raise NoKernelFoundError(explanation)
        name, pretended = explanation.chosen.name, request.platform.pretended
        impl = _refuse_to_launch(name, request.platform) if pretended else _loaded(name, request)
    configured = explanation.verdicts[0].config
    if config.settings().verbose:
        logger.info("%s", explanation)
    selected = SelectedKernel(name, functools.partial(impl, **configured) if configured else impl, configured, provisional)
    if not provisional:
        memo.remember(_decisions, key, selected, started, exceptions_in_key=True)
    if len(_made) < memo.MAX_ENTRIES:
        _made.setdefault(key, (request, override))
    return selected


def _loaded(name: str, request: Request) -> Callable[..., Any] | None:
    """A kernel's implementation; None if the import fails, or if the implementation lacks a parameter that the call gives."""
    registry = KernelRegistry.get()
    impl = registry.load_or_leave_out(name)
    return None if impl is None or registry.ignored_parameters(name) & request.given else impl


def sizes_matter(request: Request) -> bool:
    """Whether the decision for a request depends on its sizes: measured results exist, or the policy requires measurements."""
    strategy = selection_policy().get_strategy(request.family, request.mode)
    return strategy is not SelectionStrategy.HEURISTIC or measured.has_results(request.operator, request.platform)


def _autotuned(request: Request, arguments: Mapping[str, Any]) -> bool:
    """Measures the kernels for a request if the policy requires measurements and there are none for the request. Returns False if a
    required measurement was impossible.
    """
    policy = selection_policy()
    if policy.get_strategy(request.family, request.mode) is not SelectionStrategy.AUTOTUNE:
        return True
    if request.platform.pretended or request.platform.emulated or _find_measured(request).results:
        return True
    problem = measured.autotune(request, arguments, policy.autotune_budget_s)
    if problem and (request.operator, problem) not in _warned:
        _warned.add((request.operator, problem))
        warnings.warn(f"{request.operator} is not measured: {problem}; its kernel is chosen as without AUTOTUNE", stacklevel=5)
    return not problem


def _refuse_to_launch(name: str, platform: PlatformInfo) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} was selected for {platform}, which is pretended: selections can be explained, nothing launches. "
            f"To launch, leave the use_platform block, or unset {config.PREFIX}PLATFORM"
        )

    return refuse


def make_request(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Request:
    """Makes a request. The platform is by default the current platform, the objective that of the policy. Raises ValueError for a
    trait or an operand that the operator does not declare."""
    interface = KernelRegistry.get().interface_of(family, mode)
    if interface is not None:
        interface.check_request(f"{family}.{mode}", traits or {}, (operand for operand, _ in format_signature.roles))
    return Request(
        family,
        mode,
        format_signature,
        platform or current_platform(),
        dict(traits or {}),
        SelectionObjective(objective) if objective is not None else selection_policy().objective,
        solution,
        sizes=dict(sizes or {}),
    )


def select_kernel(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    override: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> SelectedKernel:
    """Selects a kernel.

    Args:
        family, mode: the operator.
        format_signature: formats of the operands.
        platform: the platform to run on; the current one if not given. A kernel selected for a pretended platform refuses to run.
        objective: the preference among eligible kernels; the policy's objective if not given.
        traits: the traits of the request; see `tokenspeed_kernel_base.traits`.
        solution: only kernels of this solution.
        override: only this kernel; the platform and format gates still apply.
        sizes: the sizes of the call, by the names of `Request.sizes`; tuned results are keyed by them.

    Raises:
        ValueError: the operator does not declare a trait, or an operand of the signature.
        NoKernelFoundError: no kernel is eligible. The message gives the reason for each kernel.
    """
    request = make_request(
        family,
        mode,
        format_signature,
        platform=platform,
        objective=objective,
        traits=traits,
        solution=solution,
        sizes=sizes,
    )
    return select(request, override_of_call(family, mode, override))


def explain_selection(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    override: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The selection of `select_kernel` and its reasons, as text. Does not raise an error if no kernel is eligible. `consider`
    returns the same information as data."""
    request = make_request(
        family,
        mode,
        format_signature,
        platform=platform,
        objective=objective,
        traits=traits,
        solution=solution,
        sizes=sizes,
    )
    return str(consider(request, override_of_call(family, mode, override)))


def warmup_selection(ops: Iterable[tuple[str, str, FormatSignature, Mapping[str, Any] | None]] | None = None) -> list[str]:
    """Selects kernels before the first call, so the call imports nothing.

    Args:
        ops: family, mode, signature and traits of each expected request. None imports every kernel that this platform can run.

    Returns:
        Names of the kernels that are now loaded.

    Raises:
        NoKernelFoundError: no kernel is eligible for one of ``ops``.
    """
    if ops is not None:
        return [select_kernel(family, mode, signature, traits=traits).name for family, mode, signature, traits in ops]
    platform, registry = current_platform(), KernelRegistry.get()
    ready = [spec.name for spec in registry.list_kernels() if spec.capability.satisfied_by(platform)]
    return [name for name in ready if registry.load_or_leave_out(name) is not None]
