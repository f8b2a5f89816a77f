"""Which kernel serves a request, and why not the others.

A request passes every kernel of its operator through the gates: solution (if the caller asked for one), platform, formats,
implementation (which fails only where importing it has failed before), features, traits. What is left is ranked: an override
first, then measured (tuned) results, the family's oracle, the objective, the priority, and at last the name. The gates fail
closed, and each says why; `explain_selection`, `NoKernelFoundError` and the selection itself come out of the one function
`consider`, so that they cannot disagree.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_kernel import config, memo
from tokenspeed_kernel.platform import PlatformInfo, current_platform
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, Priority
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import format_traits

logger = logging.getLogger("tokenspeed_kernel")


class SelectionObjective(enum.Enum):
    """What to prefer among kernels that all do the job. Each looks at a tag of the same name unless said otherwise."""

    DEFAULT = "default"  # priority alone
    LATENCY = "latency"
    THROUGHPUT = "throughput"
    PORTABILITY = "portability"  # kernels with the fewest demands on the platform
    DETERMINISM = "determinism"  # bitwise the same from run to run
    DEBUG = "debug"  # the plainest: lowest priority first


class SelectionStrategy(enum.Enum):
    """Where the ranking comes from."""

    HEURISTIC = "heuristic"  # tuned results where there are any, else oracle, objective, priority
    AUTOTUNE = "autotune"  # the same, and refused while there is no source of tuned results


@dataclass(frozen=True)
class SelectionPolicy:
    """What holds for every selection that does not say otherwise.

    Attributes:
        default_strategy: for operators that ``op_strategies`` does not name.
        op_strategies: by ``("family", "mode")``.
        objective: what requests that give none are ranked by.
    """

    default_strategy: SelectionStrategy = SelectionStrategy.HEURISTIC
    op_strategies: Mapping[tuple[str, str], SelectionStrategy] = field(default_factory=dict)
    objective: SelectionObjective = SelectionObjective.DEFAULT

    def get_strategy(self, family: str, mode: str) -> SelectionStrategy:
        return self.op_strategies.get((family, mode), self.default_strategy)


class SelectionOracle:
    """Knowledge that priorities cannot express, for one family: subclass it and pass it to `register_oracle`."""

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: Mapping[str, Any] | None) -> int:
        """A score for a kernel that has passed the gates; the higher is preferred, before objective and priority."""
        return 0


@dataclass(frozen=True)
class Request:
    """What a kernel is wanted for.

    ``traits`` holds every trait the caller knows, flags that are clear included. ``fixed_traits`` names those that say what the
    operands are rather than what is asked of the kernel (the layout of weights, say): an override does not get past them.
    """

    family: str
    mode: str
    signature: FormatSignature
    platform: PlatformInfo
    traits: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    objective: SelectionObjective = SelectionObjective.DEFAULT
    solution: str | None = None
    fixed_traits: frozenset[str] = frozenset()

    @property
    def operator(self) -> str:
        return f"{self.family}.{self.mode}"


@dataclass(frozen=True)
class Override:
    """A kernel that is wanted by name, and by whom."""

    kernel: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """What became of one kernel: accepted with its rank, or rejected at a gate with the reason."""

    spec: KernelSpec
    gate: str | None = None
    reason: str = ""
    rank: tuple[float, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.gate is None


@dataclass(frozen=True)
class Explanation:
    """The whole of one selection.

    Attributes:
        request: what was asked.
        verdicts: every kernel of the operator: accepted ones best first, then the rejected.
        chosen: the kernel that serves the request, or None.
        override: the kernel wanted by name, if any.
        problem: why there is no kernel, beyond what the verdicts say.
    """

    request: Request
    verdicts: tuple[Verdict, ...]
    chosen: KernelSpec | None
    override: Override | None = None
    problem: str = ""

    def __str__(self) -> str:
        request = self.request
        lines = [
            f"{request.operator} on {request.platform}, objective {request.objective.value}"
            + (f", solution {request.solution}" if request.solution else ""),
            f"  formats  {request.signature}",
            f"  traits   {format_traits(request.traits) or 'none'}",
        ]
        if request.features:
            lines.append(f"  features {', '.join(sorted(request.features))}")
        if self.override:
            lines.append(f"  override {self.override.kernel} ({self.override.source})")
        if self.problem:
            lines.append(f"  problem  {self.problem}")
        width = max((len(v.spec.name) for v in self.verdicts), default=0)
        for verdict in self.verdicts:
            mark = "->" if verdict.spec is self.chosen else "  " if verdict.accepted else " x"
            reason = verdict.reason if verdict.accepted else f"{verdict.gate}: {verdict.reason}"
            lines.append(f"{mark} {verdict.spec.name:<{width}}  {reason}")
        if not self.verdicts:
            lines.append("   no kernel is registered for this operator")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "operator": self.request.operator,
            "platform": {"name": self.request.platform.device_name, "arch": self.request.platform.arch},
            "objective": self.request.objective.value,
            "formats": {role: str(fmt) for role, fmt in self.request.signature.roles},
            "traits": dict(self.request.traits),
            "override": self.override.kernel if self.override else None,
            "problem": self.problem,
            "chosen": self.chosen.name if self.chosen else None,
            "candidates": [
                {
                    "name": v.spec.name,
                    "solution": v.spec.solution,
                    "priority": v.spec.priority,
                    "accepted": v.accepted,
                    "gate": v.gate,
                    "reason": v.reason,
                    "origin": v.spec.origin,
                }
                for v in self.verdicts
            ],
        }


class NoKernelFoundError(RuntimeError):
    """No kernel can serve a request. The message lists every candidate with its reason; ``explanation`` has them as data."""

    def __init__(self, explanation: Explanation | str) -> None:
        self.explanation = explanation if isinstance(explanation, Explanation) else None
        text = str(explanation)
        super().__init__(f"no kernel serves {text}" if self.explanation else text)


@dataclass(frozen=True)
class SelectedKernel:
    """A decision: the kernel's name and its implementation, which is what calling this calls."""

    name: str
    impl: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.impl(*args, **kwargs)


# -- what decisions rest on, besides the registry -----------------------------------------------------------------------------

TunedLookup = Callable[[Request, KernelSpec], "float | None"]

_policy: SelectionPolicy | None = None
_oracles: dict[str, SelectionOracle] = {}
_tuned: TunedLookup | None = None


@dataclass(eq=False)
class _OverrideBlock:
    operator: tuple[str, str]
    kernel: str
    # Tasks inherit the context that they are made in and may outlive the block, so that leaving the context is not enough.
    active: bool = True


_overrides: contextvars.ContextVar[tuple[_OverrideBlock, ...]] = contextvars.ContextVar("kernel_overrides", default=())


def selection_policy() -> SelectionPolicy:
    """The policy in force: the one that was set, or the defaults with the objective from the settings."""
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
    """Puts a policy in force for the whole process; None for the default one.

    Raises:
        ValueError: the policy measures (AUTOTUNE), and nothing that measures has been put in with `set_tuned_results`.
    """
    global _policy
    if policy is not None:
        strategies = {policy.default_strategy, *policy.op_strategies.values()}
        if SelectionStrategy.AUTOTUNE in strategies and _tuned is None:
            raise ValueError(
                "SelectionStrategy.AUTOTUNE needs measured results: put a source of them in with set_tuned_results first"
            )
    _policy = policy
    memo.invalidate()


def register_oracle(family: str, oracle: SelectionOracle | None) -> None:
    """Puts in the oracle of a family, in place of any before it; None takes it out."""
    if oracle is None:
        _oracles.pop(family, None)
    elif callable(getattr(oracle, "adjust", None)):
        _oracles[family] = oracle
    else:
        raise TypeError(f"an oracle has a method adjust(spec, platform, traits), got {oracle!r}")
    memo.invalidate()


def set_tuned_results(lookup: TunedLookup | None) -> None:
    """Puts in the source of measured results: a function of request and kernel that returns microseconds, or None.

    A kernel with a result precedes all without one, and the quickest comes first.
    """
    global _tuned
    _tuned = lookup
    memo.invalidate()


@contextlib.contextmanager
def kernel_override(family: str, mode: str, kernel_name: str) -> Iterator[None]:
    """Serves an operator with this kernel inside the block, in this thread or task only, and in tasks made there until it ends.

    The platform and format gates still hold. The traits gate does not: a kernel can be tried on what it does not declare.

    Raises:
        KeyError: no kernel of that name.
        ValueError: the kernel is another operator's.
    """
    spec = KernelRegistry.get().get_by_name(kernel_name)
    if (spec.family, spec.mode) != (family, mode):
        raise ValueError(f"{kernel_name} implements {spec.operator}, not {family}.{mode}")
    block = _OverrideBlock((family, mode), kernel_name)
    token = _overrides.set((*_overrides.get(), block))
    try:
        with memo.exceptional():
            try:
                yield
            finally:
                block.active = False  # while nothing is remembered yet: no decision of the block may stay
    finally:
        _overrides.reset(token)


def override_in_force(family: str, mode: str) -> Override | None:
    """The kernel wanted by name where a call names none itself: by `kernel_override`, the environment, or the TOML file."""
    for block in reversed(_overrides.get()):
        if block.active and block.operator == (family, mode):
            return Override(block.kernel, "kernel_override")
    setting = config.settings().override_for(family, mode)
    return Override(*setting) if setting else None


# -- deciding -----------------------------------------------------------------------------------------------------------------


def gate(spec: KernelSpec, request: Request, *, overridden: bool = False) -> tuple[str, str] | None:
    """The first gate that a kernel fails, with the reason; None if it passes all. Overridden, it need not have the features and
    traits that are asked for, but for the fixed traits."""
    if request.solution is not None and spec.solution != request.solution:
        return "solution", f"is made with {spec.solution}, {request.solution} was asked for"
    gap = spec.capability.gap(request.platform)
    if gap is not None:
        return "platform", gap
    if spec.format_signatures is not None and request.signature not in spec.format_signatures:
        return "formats", _nearest_difference(spec.format_signatures, request.signature)
    if (error := KernelRegistry.get().load_error(spec.name)) is not None:
        return "implementation", f"cannot be loaded: {error}"
    missing = request.features - spec.features
    if missing and not spec.universal and not overridden:
        return "features", f"lacks {', '.join(sorted(missing))}"
    gaps = spec.trait_gaps(request.traits, request.fixed_traits if overridden else None)
    return ("traits", "; ".join(gaps)) if gaps else None


def _nearest_difference(offered: Iterable[FormatSignature], wanted: FormatSignature) -> str:
    differences = [signature.difference(wanted) for signature in offered]
    nearest = min(differences, key=lambda phrases: (len(phrases), phrases))
    return "; ".join(nearest)


def rank(spec: KernelSpec, request: Request) -> tuple[tuple[float, ...], str]:
    """A kernel's place among those that pass the gates (the greater tuple first; equal ones go by name) and what it rests on."""
    parts: list[str] = []
    tuned = _tuned(request, spec) if _tuned is not None else None
    if tuned is not None:
        parts.append(f"tuned: {tuned:.4g} us")
    oracle = _oracles.get(request.family)
    score = oracle.adjust(spec, request.platform, request.traits) if oracle is not None else 0
    if score:
        parts.append(f"oracle {score:+d}")
    preference, why = _preference(spec, request.objective)
    if why:
        parts.append(why)
    parts.append(f"priority {spec.priority}")
    return (-tuned if tuned is not None else float("-inf"), score, preference, spec.priority), ", ".join(parts)


def _preference(spec: KernelSpec, objective: SelectionObjective) -> tuple[float, str]:
    if objective is SelectionObjective.DEFAULT:
        return 0, ""
    if objective is SelectionObjective.DEBUG:
        return -spec.priority, "debug prefers the plainest"
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
        # A reference demands least of all, and is not what one ports to.
        return (-demands if spec.priority >= Priority.PORTABLE else -5), f"{demands} demands on the platform"
    tagged = objective.value in spec.tags
    return float(tagged), f"tagged {objective.value}" if tagged else ""


def consider(request: Request, override: Override | None = None) -> Explanation:
    """Passes every kernel of the request's operator through the gates, ranks what is left, and chooses."""
    specs = KernelRegistry.get().get_for_operator(request.family, request.mode)
    wanted = override.kernel if override else None
    accepted: list[Verdict] = []
    rejected: list[Verdict] = []
    for spec in specs:
        overridden = spec.name == wanted
        failed = gate(spec, request, overridden=overridden)
        if failed is not None:
            rejected.append(Verdict(spec, *failed))
            continue
        place, why = rank(spec, request)
        if overridden:
            full = gate(spec, request)
            why = "override" + (f", although {full[1]}" if full else "") + f", {why}"
        accepted.append(Verdict(spec, None, why, (float(overridden), *place)))
    accepted.sort(key=lambda verdict: (tuple(-part for part in verdict.rank), verdict.spec.name))
    if len(accepted) > 1 and accepted[0].rank == accepted[1].rank:
        first, second = accepted[0], accepted[1]
        tie = f"{first.reason}; ties with {second.spec.name} ({second.spec.origin}) and precedes it by name"
        accepted[0] = Verdict(first.spec, None, tie, first.rank)

    chosen = accepted[0].spec if accepted else None
    problem = ""
    if override is not None and (chosen is None or chosen.name != wanted):
        # An override that cannot be honoured is an error: quietly running something else would hide it.
        chosen = None
        problem = _why_no_override(override, request, rejected)
    return Explanation(request, (*accepted, *rejected), chosen, override, problem)


def _why_no_override(override: Override, request: Request, rejected: Iterable[Verdict]) -> str:
    for verdict in rejected:
        if verdict.spec.name == override.kernel:
            return f"{override.kernel} is wanted by {override.source}, but fails the {verdict.gate} gate: {verdict.reason}"
    try:
        spec = KernelRegistry.get().get_by_name(override.kernel)
    except KeyError as error:
        return f"{override.source}: {error.args[0]}"
    return f"{override.kernel} is wanted by {override.source}, but implements {spec.operator}, not {request.operator}"


_decisions: dict[Any, SelectedKernel] = memo.new_memo()


def select(request: Request, override: Override | None = None) -> SelectedKernel:
    """The kernel for a request; the same object every time until what it rests on changes.

    Raises:
        NoKernelFoundError: no kernel passes, or the override does not.
    Warns:
        KernelLoadWarning: the best kernel cannot be imported; the next best serves the request.
    """
    # The type belongs to a trait's identity: True and 1 are equal, and not the same request.
    traits = frozenset((name, type(value), value) for name, value in request.traits.items())
    key = (
        request.operator,
        request.signature,
        traits,
        request.features,
        request.platform,
        request.objective,
        request.solution,
        request.fixed_traits,
        override,
    )
    known = _decisions.get(key)
    if known is not None:
        return known
    impl: Callable[..., Any] | None = None
    while impl is None:  # a kernel that cannot be loaded is left out of the next round
        started = memo.epoch()
        explanation = consider(request, override)
        if explanation.chosen is None:
            raise NoKernelFoundError(explanation)
        name, pretended = explanation.chosen.name, request.platform.pretended
        impl = _refuse_to_launch(name, request.platform) if pretended else KernelRegistry.get().load_or_leave_out(name)
    if config.settings().verbose:
        logger.info("%s", explanation)
    selected = SelectedKernel(name, impl)
    memo.remember(_decisions, key, selected, started, exceptions_in_key=True)
    return selected


def _refuse_to_launch(name: str, platform: PlatformInfo) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} was selected for {platform}, which is pretended: selections can be explained, nothing launches")

    return refuse


def make_request(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
) -> Request:
    """A request with what is not given filled in: the current platform and the policy's objective."""
    return Request(
        family,
        mode,
        format_signature,
        platform or current_platform(),
        dict(traits or {}),
        frozenset(features or ()),
        SelectionObjective(objective) if objective is not None else selection_policy().objective,
        solution,
    )


def select_kernel(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> SelectedKernel:
    """Chooses a kernel.

    Args:
        family, mode: the operator.
        format_signature: formats of the operands.
        features: abilities that the kernel must name.
        platform: where it shall run; the current platform if not given. A pretended one gives a kernel that refuses to run.
        objective: what to prefer; the policy's if not given.
        traits: what the request needs; see `tokenspeed_kernel.traits`.
        solution: only kernels made with this.
        override: only this kernel; the platform and format gates still hold.

    Raises:
        NoKernelFoundError: none will do; the message has every candidate with its reason.
    """
    request = make_request(
        family, mode, format_signature, features=features, platform=platform, objective=objective, traits=traits, solution=solution
    )
    return select(request, Override(override, "override=") if override else override_in_force(family, mode))


def explain_selection(
    family: str,
    mode: str,
    format_signature: FormatSignature,
    *,
    features: Iterable[str] | None = None,
    platform: PlatformInfo | None = None,
    objective: SelectionObjective | str | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> str:
    """What `select_kernel` would choose and why, as text; never raises for want of a kernel. `consider` gives it as data."""
    request = make_request(
        family, mode, format_signature, features=features, platform=platform, objective=objective, traits=traits, solution=solution
    )
    return str(consider(request, Override(override, "override=") if override else override_in_force(family, mode)))


def warmup_selection(ops: Iterable[tuple[str, str, FormatSignature, Mapping[str, Any] | None]] | None = None) -> list[str]:
    """Makes decisions ahead of the first call, so that it need not import anything.

    Args:
        ops: family, mode, signature and traits of each request to come. None imports every kernel that this platform can run.

    Returns:
        Names of the kernels that are now loaded.

    Raises:
        NoKernelFoundError: nothing serves one of ``ops``.
    """
    if ops is not None:
        return [select_kernel(family, mode, signature, traits=traits).name for family, mode, signature, traits in ops]
    platform, registry = current_platform(), KernelRegistry.get()
    ready = [spec.name for spec in registry.list_kernels() if spec.capability.satisfied_by(platform)]
    return [name for name in ready if registry.load_or_leave_out(name) is not None]
