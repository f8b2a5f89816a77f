"""The names that an operator declares, and the check of kernels' declarations against them.

An unchecked name would fail open: a kernel that constrains the misspelled trait ``hiden`` would be eligible for every ``hidden``.
So every name in a kernel's declaration (trait, trait value, operand, format) is looked up at registration. If the operator is
declared after the kernel is registered, the names are looked up when the operator is declared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.spec import KernelSpec, RegistrationError
from tokenspeed_kernel_base.traits import TraitKind, describe_kind, impossible_values


@dataclass(frozen=True)
class Interface:
    """The names that an operator declares to its kernels.

    Attributes:
        parameters: the operator's parameters, in order. An implementation takes only the parameters that it uses.
        traits: the kind of values of each trait that a request may have, by the trait's name.
        formats: operands of a request's signature, with the names of each operand's possible formats.
        layout: the trait that gives the layout of weights; None if the operator has no such trait.
        written: parameters whose memory a call may write to. Every implementation takes them.
        holders: the classes of objects and resources that a call may be given. The ``trait_kinds`` of these classes and of derived
            classes also count as traits.
    """

    parameters: tuple[str, ...]
    traits: Mapping[str, TraitKind] = field(default_factory=dict)
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: str | None = None
    written: tuple[str, ...] = ()
    holders: tuple[type, ...] = ()

    def check(self, spec: KernelSpec) -> None:
        """Raises RegistrationError for a trait, a trait's value, an operand or a format that the operator does not declare."""
        for trait, constraint in spec.traits.items():
            kind = self.traits.get(trait) or self.all_traits().get(trait)
            if kind is None:
                _refuse(spec, self._no_trait(spec.operator, trait))
            odd = impossible_values(constraint, kind)
            if odd:
                near = did_you_mean(odd[0], kind, repr) if isinstance(kind, tuple) and isinstance(odd[0], str) else ""
                said = f"{', '.join(map(repr, odd))} can never hold{near}" if constraint.values else f"it is never {constraint}"
                _refuse(spec, f"trait {trait} is {describe_kind(kind)}, so {said}")
        for signature in spec.format_signatures or ():
            for operand, fmt in signature.roles:
                if operand not in self.formats:
                    _refuse(spec, self._no_operand(spec.operator, operand))
                if fmt.format not in self.formats[operand]:
                    said = f"{operand} of {spec.operator} is never {fmt.format}"
                    _refuse(spec, _with_known(said, fmt.format, self.formats[operand], "It may be"))

    def check_request(self, operator: str, traits: Iterable[str], operands: Iterable[str]) -> None:
        """Raises ValueError for undeclared names in a request, because kernels would ignore them."""
        for trait in traits:
            if trait not in self.all_traits():
                raise ValueError(self._no_trait(operator, trait))
        for operand in operands:
            if operand not in self.formats:
                raise ValueError(self._no_operand(operator, operand))

    def unstated(self, traits: Mapping[str, Any], signature: FormatSignature) -> list[str]:
        """Parts of a request that the operator does not declare: names of traits, then undeclared formats as
        ``"operand: format"``."""
        formats = [f"{role}: {fmt.format}" for role, fmt in signature.roles if fmt.format not in self.formats.get(role, ())]
        return [*(name for name in traits if name not in self.traits), *formats]

    def all_traits(self) -> dict[str, TraitKind]:
        """The traits that a request may have, with the kind of each trait's values. Includes resources' traits.

        The result is not cached, because a kernel's package may define another resource class.
        """
        stated = {name: kind for cls in _with_derived(self.holders) for name, kind in getattr(cls, "trait_kinds", {}).items()}
        return {**stated, **self.traits}

    def _no_trait(self, operator: str, trait: str) -> str:
        return _with_known(f"{operator} states no trait {trait}", trait, sorted(self.all_traits()), "Its traits are")

    def _no_operand(self, operator: str, operand: str) -> str:
        return _with_known(f"signatures of {operator} have no operand {operand}", operand, self.formats, "Its operands are")


def layouts_of(spec: KernelSpec, trait: str | None) -> frozenset[str]:
    """The weight layouts that a kernel accepts, from its constraint on the trait ``trait``; empty if the kernel has none."""
    constraint = spec.traits.get(trait) if trait is not None else None
    return frozenset() if constraint is None or constraint.values is None else constraint.values


def refuse_layout(spec: KernelSpec, layout: str, made: Iterable[str]) -> None:
    """Raises RegistrationError, because the kernel names a layout that no preprocessor makes. ``made``: the layouts that
    preprocessors make."""
    said = f"no kernel's weight_preprocessor makes the layout {layout}, and this kernel has none"
    _refuse(spec, _with_known(said, layout, sorted(made), "There are"))


def _refuse(spec: KernelSpec, said: str) -> NoReturn:
    raise RegistrationError(f"{spec.name}: {said} ({spec.origin})")


def _with_known(said: str, name: str, known: Collection[str], are: str) -> str:
    """A sentence about an unknown name, then the nearest known name and the list of all known names."""
    return f"{said}{did_you_mean(name, known) or '.'} {are} {', '.join(known) or 'none'}"


def _with_derived(classes: Iterable[type]) -> set[type]:
    """The classes and all classes derived from them."""
    found: set[type] = set()
    for cls in classes:
        derived: list[type] = cls.__subclasses__()
        found |= {cls, *_with_derived(derived)}
    return found
