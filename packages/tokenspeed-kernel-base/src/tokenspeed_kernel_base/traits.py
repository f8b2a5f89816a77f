"""Kernels' constraints on a request's traits.

A trait is one fact of a request other than a tensor format: ``head_dim=64``, ``sinks=True``. A kernel constrains traits by name. A
plain value or a set means "one of these"; `at_least`, `at_most`, `between`, `multiple_of` and the builtin ``any`` express the rest.
Constraints combine with ``&``: ``at_most(256) & multiple_of(16)``.

**Silence.** Flags and values differ. A kernel that does not constrain a flag (a trait whose value is True or False) does not have
the flag's feature: the kernel is rejected if the request sets the flag, and eligible if the flag is False. A kernel that does not
constrain a trait with other values accepts all of these values. A request may have no value for a trait (the page size of a call
without a cache, say). Such a request is rejected only by kernels that require the trait to be True.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

TraitValue = bool | int | float | str | None

TraitKind: TypeAlias = type | types.UnionType | tuple[str, ...]
"""The kind of values of a trait, as declared by an operator: ``bool`` for a flag, ``int``, ``float``, ``str``, ``int | None``, or a
tuple of the allowed names."""


@dataclass(frozen=True)
class Constraint:
    """The values that a kernel accepts for one trait. A value must be in ``values`` (None: no list), within the bounds, and
    divisible by ``divisor``.

    Bounds and divisor apply to numbers. Other values, bool included, fail these tests.
    """

    values: frozenset[Any] | None = None
    low: float | None = None
    high: float | None = None
    divisor: int | None = None

    def accepts(self, value: Any) -> bool:
        if self.values is not None and not any(_same(value, member) for member in self.values):
            return False
        if self.low is None and self.high is None and self.divisor is None:
            return True
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.divisor is None or value % self.divisor == 0)
        )

    def __and__(self, other: Constraint | Any) -> Constraint:
        right = as_constraint(other)
        members = self.values if self.values is not None else right.values
        if members is not None:
            return Constraint(frozenset(v for v in members if self.accepts(v) and right.accepts(v)))
        divisors = [d for d in (self.divisor, right.divisor) if d is not None]
        return Constraint(
            None,
            max((b for b in (self.low, right.low) if b is not None), default=None),
            min((b for b in (self.high, right.high) if b is not None), default=None),
            math.lcm(*divisors) if divisors else None,
        )

    def satisfiable(self) -> bool:
        """Whether the constraint accepts any value at all."""
        if self.values is not None:
            return any(self.accepts(value) for value in self.values)
        if self.low is None or self.high is None:
            return True
        if self.divisor is None or not (math.isfinite(self.low) and math.isfinite(self.high)):
            return self.low <= self.high
        return -(-self.low // self.divisor) * self.divisor <= self.high

    def only_true(self) -> bool:
        """Whether the constraint accepts True and nothing else."""
        return self.values is not None and len(self.values) == 1 and next(iter(self.values)) is True

    def __str__(self) -> str:
        parts = []
        if self.values is not None:
            members = sorted(self.values, key=lambda v: (str(type(v)), v if isinstance(v, (int, float)) else str(v)))
            parts.append(str(members[0]) if len(members) == 1 else "one of " + ", ".join(map(str, members)))
        if self.low is not None and self.high is not None:
            parts.append(f"{self.low} to {self.high}")
        elif self.low is not None:
            parts.append(f"at least {self.low}")
        elif self.high is not None:
            parts.append(f"at most {self.high}")
        if self.divisor is not None:
            parts.append(f"a multiple of {self.divisor}")
        return " and ".join(parts) or "any"


ANY = Constraint()


def _same(left: Any, right: Any) -> bool:
    # True == 1 in Python; a flag is not a count.
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def one_of(*values: TraitValue) -> Constraint:
    return Constraint(values=frozenset(values))


def at_least(low: float) -> Constraint:
    return Constraint(low=low)


def at_most(high: float) -> Constraint:
    return Constraint(high=high)


def between(low: float, high: float) -> Constraint:
    """A value from ``low`` to ``high``, both included."""
    if low > high:
        raise ValueError(f"between needs low <= high, got {low} and {high}")
    return Constraint(low=low, high=high)


def multiple_of(divisor: int) -> Constraint:
    if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
        raise ValueError(f"multiple_of needs a positive int, got {divisor!r}")
    return Constraint(divisor=divisor)


def as_constraint(value: Any) -> Constraint:
    """Converts what a kernel declares for a trait to a constraint: a `Constraint`, the builtin ``any``, a set, list or tuple of
    values, or one value.
    """
    if isinstance(value, Constraint):
        return value
    if value is any:
        return ANY
    members = value if isinstance(value, (set, frozenset, list, tuple)) else (value,)
    if all(member is None or isinstance(member, (bool, int, float, str)) for member in members):
        return Constraint(values=frozenset(members))
    raise TypeError(f"a trait is constrained by a value, a set of values, a range, multiple_of or any; got {value!r}")


def impossible_values(constraint: Constraint, kind: TraitKind) -> list[Any]:
    """Returns the parts of a constraint that no value of this kind satisfies: members of its list of values; or the whole
    constraint, if it has bounds or a divisor and the kind has no numbers. Empty if the constraint fits the kind.

    >>> impossible_values(one_of(64, "64"), int), impossible_values(at_most(8), bool)
    (['64'], [Constraint(values=None, low=None, high=8, divisor=None)])
    """
    if constraint.values is not None:
        return sorted((value for value in constraint.values if not _is_a(value, kind)), key=str)
    number = {int, float}.intersection(_types_of(kind))
    return [] if number or constraint == ANY else [constraint]


def describe_kind(kind: TraitKind) -> str:
    """A trait's kind of values in words: ``"True or False"``, ``"int or None"``."""
    if isinstance(kind, tuple):
        return f"one of {', '.join(map(repr, kind))}"
    names = {bool: "True or False", types.NoneType: "None"}
    return " or ".join(names.get(cls, cls.__name__) for cls in _types_of(kind))


def _types_of(kind: TraitKind) -> tuple[type, ...]:
    if isinstance(kind, tuple):
        return (str,)
    return (kind,) if isinstance(kind, type) else typing.get_args(kind)


def _is_a(value: Any, kind: TraitKind) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    allowed = _types_of(kind)
    return type(value) in allowed or (type(value) is int and float in allowed)


def trait_gaps(declared: Mapping[str, Constraint], requested: Mapping[str, Any], *, universal: bool = False) -> list[str]:
    """Returns why a kernel with these constraints does not support the requested traits, one phrase per trait; empty if it supports
    them.

    ``universal``: whether the kernel supports flags that it does not constrain.
    """
    gaps = []
    for name, value in requested.items():
        constraint = declared.get(name)
        if constraint is None:
            if value is True and not universal:
                gaps.append(f"does not declare the flag {name}, which the request sets")
        elif not constraint.accepts(value):
            gaps.append(f"{name}={value} is not {constraint}")
    for name, constraint in declared.items():
        # A kernel that requires a flag to be True is not eligible for a request without this flag.
        if name not in requested and constraint.only_true():
            gaps.append(f"needs {name}=True, which the request does not set")
    return gaps


def traits_overlap(
    left: Mapping[str, Constraint], right: Mapping[str, Constraint], *, left_universal: bool = False, right_universal: bool = False
) -> bool:
    """Whether some request could satisfy the constraints of both kernels."""
    for name in left.keys() | right.keys():
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            # The kernel without a constraint accepts False and every value that is no flag. So it conflicts only with a constraint
            # that accepts True alone.
            said, silent_universal = (a, right_universal) if a is not None else (b, left_universal)
            if said is not None and ((said.only_true() and not silent_universal) or not said.satisfiable()):
                return False
        elif not (a & b).satisfiable():
            return False
    return True


def format_traits(traits: Mapping[str, Any], describe: Callable[[Any], str] = str) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in sorted(traits.items()))
