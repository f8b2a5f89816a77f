"""Generates cases at the edges of a kernel's declared trait constraints, and cases with nothing to compute.

The cases are made by changing the operator's own small cases, see `tokenspeed_kernel.workbench.numerics.recipes`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenspeed_kernel.workbench.numerics.narrow import narrowed
from tokenspeed_kernel.workbench.numerics.recipes import changes_towards, growth, same_value
from tokenspeed_kernel.workbench.numerics.verify import check_with_values, refusal
from tokenspeed_kernel_base.cases import Case, Recipe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.selection import gate
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.traits import Constraint

# The largest number of elements of all arguments together. Larger cases take too long for a check.
_MOST_ELEMENTS = 1 << 22
_MOST_TRIES = 400


def edge_values(constraint: Constraint) -> tuple[list[Any], list[Any]]:
    """Returns the trait values at the edges of a constraint: values that it accepts, and neighbours that it rejects.

    Example:
        >>> from tokenspeed_kernel_base.traits import at_most, multiple_of
        >>> edge_values(at_most(256) & multiple_of(16))
        ([16, 48, 240, 256], [8, 15, 17, 255, 257, 272])
    """
    if constraint.values is not None:
        members = sorted(constraint.values, key=lambda v: (str(type(v)), v if isinstance(v, (int, float)) else str(v)))
        near: list[Any] = []
        for member in members:
            if isinstance(member, bool):
                near.append(not member)
            elif isinstance(member, int):
                near += [member - 1, member + 1]
        return members, [v for v in dict.fromkeys(near) if _positive(v) and not constraint.accepts(v)]
    if constraint.low is None and constraint.high is None and constraint.divisor is None:
        return [False, True], []
    step = constraint.divisor or 1
    bottom, top = _finite(constraint.low), _finite(constraint.high)
    low = max(math.ceil((1 if bottom is None else bottom) / step) * step, step)
    values = [low, low + 2 * step]
    near = [low - 1, low // 2, low + 1]
    if top is not None:
        high = math.floor(top / step) * step
        values += [high - step, high]
        near += [high - 1, high + 1, high + step]
    accepted = [v for v in dict.fromkeys(values) if v > 0 and constraint.accepts(v)]
    return accepted, sorted({v for v in near if v > 0 and not constraint.accepts(v)})


def _finite(bound: float | None) -> float | None:
    return bound if bound is not None and math.isfinite(bound) else None


def _positive(value: Any) -> bool:
    return isinstance(value, bool) or value > 0


@dataclass
class Known:
    """A case of an operator, with its traits and its number of elements."""

    case: Case
    traits: dict[str, Any]
    elements: int


@dataclass
class CaseSpace:
    """The small cases of an operator on one device, from which edge cases for a kernel are made.

    Attributes:
        taken: the cases that the kernel is eligible for, the smallest first.
        wrong: names of the cases with wrong results.
        said: the kinds (`Fault.check`) of the kernel's known faults other than wrong results.
        most_elements: the largest number of elements of a call's tensors.
    """

    op: Operator[Any, Any]
    spec: KernelSpec
    device: torch.device
    seed: int = 0
    most_elements: int = _MOST_ELEMENTS
    taken: list[Known] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        op: Operator[Any, Any],
        spec: KernelSpec,
        device: torch.device,
        cases: Iterable[Case],
        seed: int = 0,
        large: bool = False,
    ) -> CaseSpace:
        """Builds the space from those of the operator's ``cases`` for which the kernel is eligible. ``large``: whether a kernel may
        need calls that are ten times larger than usual."""
        space = cls(op, spec, device, seed, 10 * _MOST_ELEMENTS if large else _MOST_ELEMENTS)
        known = (space.look(case) for case in cases)
        space.taken = sorted((k for k in known if k is not None and space.takes(k.case)), key=lambda k: k.elements)
        return space

    def look(self, case: Case) -> Known | None:
        """Returns a case as a `Known`; None if the operator rejects the case's call, or if the call is too large."""
        try:
            arguments = self.op.complete(case.build(self.device, self.seed))
            check_with_values(self.op, arguments)
            request = self.op.request(arguments)
        except Exception:  # a recipe may raise anything for inconsistent values
            return None
        elements = sum(t.numel() for _, t in tensor_arguments(self.op.parameters, arguments))
        return Known(case, dict(request.traits), elements) if elements <= self.most_elements else None

    def gap(self, case: Case) -> tuple[str, str] | None:
        """Returns the gate that rejects the kernel for this case, and the reason; None if the kernel is eligible."""
        arguments = self.op.complete(case.build(self.device, self.seed))
        rejected = refusal(self.op, self.spec, arguments)
        return rejected or gate(self.spec, self.op.request(self.op.prepared(arguments, self.spec)))

    def takes(self, case: Case) -> bool:
        return self.gap(case) is None

    def reach(self, trait: str, value: Any, *, taken: bool, most: int = 2) -> list[Case]:
        """Returns cases whose calls have this value of a trait.

        Args:
            trait, value: the wanted trait, and its wanted value.
            taken: True for cases for which the kernel is eligible; False for cases that the kernel's traits reject.
            most: the largest number of cases to return. At most one of them is made from each case of the operator.

        Cases with known wrong results are left out, because the comparison with the reference reports these.
        """

        def has_value(known: Known) -> bool:
            return trait in known.traits and same_value(known.traits[trait], value)

        def fits(known: Known | None) -> bool:
            if known is None or not has_value(known):
                return False
            gap = self.gap(known.case)
            return gap is None if taken else gap is not None and gap[0] == "traits"

        usable = [known for known in self.taken if known.elements and known.case.name not in self.wrong]
        found = [known.case for known in _spread([known for known in usable if taken and has_value(known)], most)]
        # The smallest cases hide faults: a single token attends only to itself, whatever its score. So larger cases are tried, too.
        for known in _spread([known for known in usable if isinstance(known.case.make, Recipe)], 4):
            if len(found) >= most:
                break
            tries = itertools.islice(self._changed(known, trait, value), _MOST_TRIES)
            found += itertools.islice((case for case in tries if fits(self.look(case))), 1)
        return found

    def _changed(self, known: Known, trait: str, value: Any) -> Iterator[Case]:
        """Yields versions of a case with one changed value of its recipe, then versions with two changed values.

        The changes are those that may give the trait the wanted value.
        """
        recipe = known.case.make
        assert isinstance(recipe, Recipe)
        # The size of a case is known only after its arguments are made. So changes that may make a case huge are left out
        # beforehand.
        found = changes_towards(self.op, recipe, known.traits.get(trait), trait, value)
        changes = [(change, growth(recipe, change)) for change in found]
        room = self.most_elements / known.elements
        for change, by in changes:
            if by <= room:
                yield replace(known.case, make=recipe.vary(**change), large=False)
        for (one, by), (other, by_too) in itertools.combinations(changes, 2):
            if not one.keys() & other.keys() and by * by_too <= room:
                yield replace(known.case, make=recipe.vary(**one, **other), large=False)


def _spread(sorted_by_size: list[Known], most: int) -> list[Known]:
    """Selects at most ``most`` cases, from the middle size down to the smallest, so that the first ones are neither trivial nor
    slow.
    """
    middle = len(sorted_by_size) // 2
    steps = max((middle + 1) // most, 1)
    return sorted_by_size[middle::-steps][:most] if sorted_by_size else []


def empty_cases(space: CaseSpace, most: int = 12) -> Iterator[Case]:
    """Yields cases with nothing to compute, or with some empty items: sizes of 0, lengths of 0, no items at all."""
    seen: set[str] = set()
    makers: dict[Any, int] = {}
    count = 0
    for known in space.taken:
        make = known.case.make
        maker = make.maker if isinstance(make, Recipe) else make
        if not known.elements or known.case.name in space.wrong or makers.setdefault(maker, 0) >= 2:
            continue
        makers[maker] += 1
        variations = _emptied(make) if isinstance(make, Recipe) else [narrowed(space.op, known.case, items=0).make]
        for variation in variations:
            if str(variation) in seen:
                continue
            seen.add(str(variation))
            text = str(variation) if isinstance(variation, Recipe) else f"no items: {known.case.name}"
            case = replace(known.case, name=text, make=variation)
            if space.look(case) is not None and space.takes(case):
                yield case
                count += 1
                if count >= most:
                    return


def _emptied(recipe: Recipe) -> Iterator[Recipe]:
    lists = {n: list(v) for n, v in recipe.values.items() if isinstance(v, list) and all(type(x) is int for x in v)}
    if lists:
        yield recipe.vary(**{name: [0 for _ in v] or [0] for name, v in lists.items()})
        yield recipe.vary(**{name: [*v[:1], 0, *v[1:]] for name, v in lists.items()})
        yield recipe.vary(**{name: [] for name in lists})
        names = list(lists)
        for name in names[1:]:
            yield recipe.vary(**{name: [0 for _ in lists[name]]})
    for name, value in recipe.values.items():
        if type(value) is int and value > 0:
            yield recipe.vary(**{name: 0})
        elif isinstance(value, tuple) and value and all(type(n) is int for n in value):
            for i in range(len(value)):
                yield recipe.vary(**{name: (*value[:i], 0, *value[i + 1 :])})
