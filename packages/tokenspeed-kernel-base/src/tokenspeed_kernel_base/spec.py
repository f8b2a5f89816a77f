"""A kernel's declaration: accepted arguments, requirements, and guarantees."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.traits import Constraint, as_constraint, trait_gaps, traits_overlap


class Priority(enum.IntEnum):
    """The quality that a kernel claims; selection prefers the higher priority. Integers between the named values order kernels of
    the same quality."""

    REFERENCE = 0
    COMPOSED = 2
    PORTABLE = 4
    PERFORMANT = 8
    SPECIALIZED = 12


MAX_PRIORITY = 19

# The layout in which models' weights are passed to `prepare`. Every other layout belongs to certain kernels.
CANONICAL = "canonical"

TAGS = {
    "determinism": "it gives the same bits from run to run, as the conformance kit checks; the objective of this name prefers it",
    "batch_invariant": "an item's result does not depend on what else is in its batch, which the conformance kit checks",
    "fp8_weights": "it may round softmax probabilities to fp8 if an operand is fp8; the objective `accuracy` avoids it",
    "waits": "it may wait for the device, so a CUDA graph cannot capture it",
}
"""The tags that a kernel may have, with their meanings."""


class RegistrationError(ValueError):
    """A kernel's declaration is invalid. The message names the kernel, the location of its declaration, and the fault."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel's declaration.

    Attributes:
        name: unique among all kernels.
        family, mode: the operator that the kernel implements.
        solution: the backend, that is, the toolkit or library that the kernel is made with: ``"triton"``, ``"torch"``...
        capability: requirements of the platform.
        format_signatures: the accepted operand formats; None for all.
        traits: constraints by trait. `tokenspeed_kernel_base.traits` defines what a trait without a constraint means.
        universal: whether the kernel accepts every flag and value that ``traits`` do not restrict. Only kernels made from an
            operator's body may be universal: the operator's reference and, if the body calls other operators, its composed kernel.
        priority: 0 to 19, see `Priority`.
        tags: some of `TAGS`.
        aligned_caches: cache parameters whose rows must start at multiples of 16 bytes; other caches are copied whole at every
            call.
        only_by_name: why only requests that name the kernel may select it; empty if every request may.
        accuracy: a bound of the kernel's error, within the error that the operator allows. `explain` shows this text.
        weight_preprocessor: converts weights to this kernel's layout once, when a model is loaded.
        tunables: parameters whose best values are measured, by name, with the values to try. See `register_kernel`.
        tunable_if: returns why a configuration is invalid for a request, or None.
        package: the top-level package that declares the kernel.
        origin: the location of the declaration, ``file:line``.
    """

    name: str
    family: str
    mode: str
    solution: str = ""
    capability: CapabilityRequirement = field(default_factory=CapabilityRequirement)
    format_signatures: frozenset[FormatSignature] | None = frozenset()
    traits: Mapping[str, Constraint] = field(default_factory=dict)
    priority: int = Priority.PERFORMANT
    tags: frozenset[str] = frozenset()
    aligned_caches: tuple[str, ...] = ()
    only_by_name: str = ""
    accuracy: str = ""
    weight_preprocessor: Callable[..., Any] | str | None = None
    universal: bool = False
    tunables: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tunable_if: Callable[[Any, Mapping[str, Any]], str | None] | None = None
    package: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        for what in ("name", "family", "mode", "solution"):
            value = getattr(self, what)
            if not isinstance(value, str) or not value:
                raise RegistrationError(f"{what} of a kernel must be a non-empty str, got {value!r} ({self.origin})")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or not 0 <= self.priority <= MAX_PRIORITY:
            raise RegistrationError(
                f"{self.name}: priority must be an int from 0 to {MAX_PRIORITY}, got {self.priority!r} ({self.origin})"
            )
        object.__setattr__(self, "priority", int(self.priority))
        if not isinstance(self.capability, CapabilityRequirement):
            raise RegistrationError(
                f"{self.name}: capability must be a CapabilityRequirement, got {self.capability!r} ({self.origin})"
            )
        several = isinstance(self.tags, Iterable) and not isinstance(self.tags, str)
        if not several or not all(isinstance(tag, str) for tag in self.tags):
            raise RegistrationError(f"{self.name}: tags must be a set of str, got {self.tags!r} ({self.origin})")
        object.__setattr__(self, "tags", frozenset(self.tags))
        for tag in sorted(self.tags - TAGS.keys()):
            meant = did_you_mean(tag, TAGS, repr)
            raise RegistrationError(f"{self.name}: tags must be among {', '.join(TAGS)}, got {tag!r}{meant} ({self.origin})")
        preprocessor = self.weight_preprocessor
        if not (preprocessor is None or callable(preprocessor) or isinstance(preprocessor, str)):
            raise RegistrationError(
                f'{self.name}: weight_preprocessor must be a function or "module:function", got {preprocessor!r} ({self.origin})'
            )
        if not isinstance(self.traits, Mapping) or not all(isinstance(trait, str) for trait in self.traits):
            raise RegistrationError(
                f"{self.name}: traits must be a dict of constraints by trait, got {self.traits!r} ({self.origin})"
            )
        self._check_signatures()
        self._check_tunables()
        object.__setattr__(self, "traits", MappingProxyType({name: self._constraint(name) for name in self.traits}))

    def _constraint(self, trait: str) -> Constraint:
        try:
            constraint = as_constraint(self.traits[trait])
        except TypeError as error:
            raise RegistrationError(f"{self.name}: trait {trait}: {error} ({self.origin})") from None
        if not constraint.satisfiable():
            raise RegistrationError(f"{self.name}: trait {trait} has a constraint that no value satisfies ({self.origin})")
        return constraint

    def _check_signatures(self) -> None:
        if self.format_signatures is None:
            return
        listed = tuple(self.format_signatures) if isinstance(self.format_signatures, Iterable) else (self.format_signatures,)
        for signature in listed:
            if not isinstance(signature, FormatSignature):
                raise RegistrationError(f"{self.name}: signatures must be FormatSignature, got {signature!r} ({self.origin})")
        object.__setattr__(self, "format_signatures", frozenset(listed))
        if not self.format_signatures:
            raise RegistrationError(
                f"{self.name}: signatures is empty, so no request would match; pass None to accept all ({self.origin})"
            )

    def _check_tunables(self) -> None:
        if not isinstance(self.tunables, Mapping):
            raise RegistrationError(
                f"{self.name}: tunables must be a dict of names to values, got {self.tunables!r} ({self.origin})"
            )
        frozen: dict[str, tuple[Any, ...]] = {}
        for name, values in self.tunables.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise RegistrationError(f"{self.name}: a tunable must be the name of a keyword, got {name!r} ({self.origin})")
            if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
                raise RegistrationError(f"{self.name}: tunable {name} must be a list of values, got {values!r} ({self.origin})")
            listed = frozen[name] = tuple(values)
            if not listed or any(value is not None and type(value) not in (bool, int, float, str) for value in listed):
                raise RegistrationError(
                    f"{self.name}: tunable {name} must have one or more values of bool, int, float, str or None, got {listed!r} "
                    f"({self.origin})"
                )
        if self.tunable_if is not None and not (callable(self.tunable_if) and self.tunables):
            what = f"a function, got {self.tunable_if!r}" if self.tunables else "None, because the kernel has no tunables"
            raise RegistrationError(f"{self.name}: tunable_if must be {what} ({self.origin})")
        object.__setattr__(self, "tunables", MappingProxyType(frozen))

    def configurations(self) -> Iterator[dict[str, Any]]:
        """Yields every combination of the tunables' values; yields nothing if the kernel has no tunables."""
        if self.tunables:
            for values in itertools.product(*self.tunables.values()):
                yield dict(zip(self.tunables, values, strict=True))

    def undeclared(self, config: Mapping[str, Any]) -> str | None:
        """Returns in what respect the kernel does not declare a configuration; None if it declares the configuration. The empty
        configuration, which means the defaults, is always declared.
        """
        if not config:
            return None
        if config.keys() != self.tunables.keys():
            declared = (
                f"the tunables of {self.name} are {', '.join(self.tunables)}" if self.tunables else f"{self.name} has no tunables"
            )
            return f"sets {', '.join(config)}, but {declared}"
        for name, value in config.items():
            if not any(type(value) is type(allowed) and value == allowed for allowed in self.tunables[name]):
                return f"{name}={value!r} is not among {', '.join(map(repr, self.tunables[name]))}"
        return None

    def configuration_gap(self, config: Mapping[str, Any], request: Any) -> str | None:
        """Why a configuration is invalid for a request: it is not declared, or ``tunable_if`` rejects it. None for a valid
        configuration.
        """
        gap = self.undeclared(config)
        return self.tunable_if(request, config) if gap is None and config and self.tunable_if is not None else gap

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the declaration without the functions in ``tunable_if`` and ``weight_preprocessor``. Other processes can read the
        copy, but not run these functions."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields.update(traits=dict(self.traits), tunables=dict(self.tunables), tunable_if=None)
        if not isinstance(self.weight_preprocessor, str):
            fields["weight_preprocessor"] = None
        return functools.partial(KernelSpec, **fields), ()

    @property
    def is_reference(self) -> bool:
        """Whether the kernel is its operator's reference, which defines the correct results."""
        return self.universal and self.priority == Priority.REFERENCE

    @property
    def operator(self) -> str:
        return f"{self.family}.{self.mode}"

    def overlaps(self, other: KernelSpec) -> bool:
        """Whether both kernels could be eligible for one request."""
        if self.operator != other.operator or not self.capability.overlaps(other.capability):
            return False
        mine, theirs = self.format_signatures, other.format_signatures
        if mine is not None and theirs is not None and not mine & theirs:
            return False
        return traits_overlap(self.traits, other.traits, left_universal=self.universal, right_universal=other.universal)

    def trait_gaps(self, requested: Mapping[str, Any], only: Iterable[str] | None = None) -> list[str]:
        """Returns why the kernel does not support the requested traits, one phrase per trait; empty if it supports them. With
        ``only``, all other traits are ignored.
        """
        if only is None:
            return trait_gaps(self.traits, requested, universal=self.universal)
        names = set(only)
        declared = {name: constraint for name, constraint in self.traits.items() if name in names}
        return trait_gaps(declared, {n: v for n, v in requested.items() if n in names}, universal=self.universal)
