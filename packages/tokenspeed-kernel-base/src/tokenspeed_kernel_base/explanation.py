"""A selection's request, its verdicts and its result."""

from __future__ import annotations

import enum
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.traits import format_traits


class SelectionObjective(enum.Enum):
    """The preference among eligible kernels. An objective prefers kernels with the tag of the objective's name, unless its comment
    says otherwise.
    """

    DEFAULT = "default"  # priority alone
    PORTABILITY = "portability"  # fewest platform requirements
    DETERMINISM = "determinism"  # bitwise reproducible from run to run
    ACCURACY = "accuracy"  # avoids the tag ``fp8_weights``: softmax probabilities rounded to fp8
    DEBUG = "debug"  # lowest priority first, because such kernels are the plainest

    @classmethod
    def _missing_(cls, value: object) -> SelectionObjective | None:
        if value not in ("latency", "throughput"):
            return None
        warnings.warn(
            f"the objective {value!r} is deprecated: no kernel is tagged so; use 'default'", DeprecationWarning, stacklevel=3
        )
        return cls.DEFAULT


@dataclass(frozen=True)
class Request:
    """A request for a kernel.

    ``traits`` holds the value of every trait that the caller knows, including flags that are False. ``fixed_traits`` names the
    traits that describe the operands (the layout of weights, say); overrides cannot bypass these traits. ``sizes`` holds the sizes
    of the call: tokens, heads, rows... No gate reads ``sizes``. ``varying`` names the sizes that change from call to call; the
    model fixes the others. ``intermediates`` are formats to which the operator rounds intermediate values; these formats affect
    tolerances only. ``package`` restricts the request to the kernels of one package. ``given`` names the parameters whose value in
    the call differs from the default.
    """

    family: str
    mode: str
    signature: FormatSignature
    platform: PlatformInfo
    traits: Mapping[str, Any] = field(default_factory=dict)
    objective: SelectionObjective = SelectionObjective.DEFAULT
    solution: str | None = None
    fixed_traits: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)
    varying: frozenset[str] = frozenset()
    intermediates: tuple[TensorFormat, ...] = ()
    package: str | None = None
    given: frozenset[str] = frozenset()

    @property
    def operator(self) -> str:
        return f"{self.family}.{self.mode}"

    @property
    def buckets(self) -> dict[str, int]:
        """The sizes by which measured results are keyed. Varying sizes are rounded up to a power of two. Fixed sizes stay exact,
        because they decide which kernel is fastest and which configuration fits."""
        return {name: bucket(size) if name in self.varying else size for name, size in self.sizes.items()}


def bucket(size: int) -> int:
    """The smallest power of two that is at least ``size``; 0 for 0.

    >>> [bucket(n) for n in (0, 1, 3, 64, 65)]
    [0, 1, 4, 64, 128]
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True)
class Override:
    """A kernel requested by name, and the source of that request. ``config`` is the requested configuration: its tunables' values
    by name. An empty ``config`` means the kernel's defaults. None means the tuned configuration, or the defaults if there is none.
    """

    kernel: str
    source: str
    config: tuple[tuple[str, Any], ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """The result for one kernel: accepted with a rank and a configuration (empty: the kernel's defaults), or rejected by a gate
    with a reason."""

    spec: KernelSpec
    gate: str | None = None
    reason: str = ""
    rank: tuple[float, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return self.gate is None


# If more kernels than this are rejected for the same reason, the printed explanation lists them in one entry.
_FEW = 8
_INDENTED = textwrap.TextWrapper(
    100, initial_indent=" " * 5, subsequent_indent=" " * 5, break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True)
class Explanation:
    """One complete selection.

    Attributes:
        request: the request.
        verdicts: one per kernel of the operator: accepted kernels best first, then rejected kernels.
        chosen: the selected kernel, or None.
        override: the kernel requested by name, and the source of that request, if any.
        problem: why no kernel was selected, if the verdicts alone do not tell.
        notes: measured results that exist but are not used, with the reasons.
        cards: descriptions of the call's resources, and caches that the chosen kernel copies, by parameter.
    """

    request: Request
    verdicts: tuple[Verdict, ...]
    chosen: KernelSpec | None
    override: Override | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()
    cards: Mapping[str, str] = field(default_factory=dict)

    @property
    def rejections(self) -> dict[tuple[str, str], list[str]]:
        """The names of the rejected kernels, by gate and reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for verdict in self.verdicts:
            if verdict.gate is not None:
                groups.setdefault((verdict.gate, verdict.reason), []).append(verdict.spec.name)
        return groups

    def __str__(self) -> str:
        request = self.request
        lines = [
            f"{request.operator} on {request.platform}, objective {request.objective.value}"
            + (f", solution {request.solution}" if request.solution else ""),
            f"  formats  {request.signature}",
            f"  traits   {format_traits(request.traits) or 'none'}",
        ]
        if request.sizes:
            lines.append(f"  sizes    {format_traits(request.sizes)}")
        if self.override:
            lines.append(f"  override {self.override.kernel} ({self.override.source})")
        if self.problem:
            lines.append(f"  problem  {self.problem}")
        lines += [f"  tuned    {note}" for note in self.notes]
        lines += [f"  {name:<8} {card}" for name, card in self.cards.items()]
        accepted = [verdict for verdict in self.verdicts if verdict.accepted]
        few = {key: names for key, names in self.rejections.items() if len(names) <= _FEW}
        width = max((len(name) for names in ([v.spec.name for v in accepted], *few.values()) for name in names), default=0)
        for verdict in accepted:
            mark = "->" if verdict.spec is self.chosen else "  "
            lines.append(f"{mark} {verdict.spec.name:<{width}}  {verdict.reason}")
        for (gate, reason), names in self.rejections.items():
            if (gate, reason) in few:
                lines += [f" x {name:<{width}}  {gate}: {reason}" for name in names]
            else:
                lines.append(f" x {len(names)} kernels  {gate}: {reason}")
                lines += _INDENTED.wrap(", ".join(names))
        if not self.verdicts:
            lines.append("   no kernel is registered for this operator")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        return {
            "operator": self.request.operator,
            "platform": {"name": self.request.platform.device_name, "arch": self.request.platform.arch},
            "objective": self.request.objective.value,
            "formats": {role: str(fmt) for role, fmt in self.request.signature.roles},
            "traits": dict(self.request.traits),
            "sizes": dict(self.request.sizes),
            "override": self.override.kernel if self.override else None,
            "problem": self.problem,
            "notes": list(self.notes),
            "cards": dict(self.cards),
            "chosen": self.chosen.name if self.chosen else None,
            "candidates": [
                {
                    "name": v.spec.name,
                    "solution": v.spec.solution,
                    "priority": v.spec.priority,
                    "accepted": v.accepted,
                    "gate": v.gate,
                    "reason": v.reason,
                    "config": dict(v.config),
                    "origin": v.spec.origin,
                }
                for v in self.verdicts
            ],
        }


class NoKernelFoundError(RuntimeError):
    """No kernel is eligible for a request, or the requested override is not eligible. The message lists every candidate with the
    reason for its rejection. ``explanation`` holds the candidates and the reasons as data."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NoKernelFoundError, (self.explanation or self.args[0],)

    def __init__(self, explanation: Explanation | str) -> None:
        self.explanation = explanation if isinstance(explanation, Explanation) else None
        text = str(explanation)
        package = self.explanation.request.package if self.explanation else None
        super().__init__(f"no kernel {f'of {package} ' if package else ''}serves {text}" if self.explanation else text)


@dataclass(frozen=True)
class SelectedKernel:
    """A decision: a kernel's name and its implementation. Calling this object calls the implementation.

    Attributes:
        name: the kernel's name.
        impl: the kernel's function, with the measured configuration bound to it if there is one.
        config: the measured configuration; empty for the kernel's defaults.
        provisional: True if the policy requires that the kernels are measured for this request, but the measurement was impossible.
            The next call then decides again.
    """

    name: str
    impl: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    provisional: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.impl(*args, **kwargs)
