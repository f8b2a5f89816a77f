"""Changes a case's recipe so that its call has a wanted trait value or operand dtype.

A trait is a function of the arguments, and a recipe makes arguments from plain values. This module tries changes of the plain
values, the most likely ones first, until the trait has the wanted value. So this module needs no knowledge of operators.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tokenspeed_kernel_base.cases import DEFAULT, Case, Recipe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import check_types, tensor_arguments
from tokenspeed_kernel_base.selection import Request

# The most pairs of changes that a search tries, over all its starting cases. Searches without a result must end soon.
_MOST_PAIRS = 400
# The most elements that the arguments of a tried case may have together.
_MOST_ELEMENTS = 1 << 26
# The most items to which a list of sizes is lengthened.
_LONGEST = 64
# Tried cases with more elements count as large, so that their requests are made with fake tensors: random values would take longer.
_FEW_ELEMENTS = 1 << 20

Change = dict[str, Any]


def asked(op: Operator[Any, Any], case: Case) -> tuple[Request, dict[str, Any]]:
    """Returns the selection request of a case's call, and the call's arguments, with tensors on the CPU."""
    arguments = op.complete(case.build("cpu"))
    check_types(op.mode, op.parameters, arguments)
    return op.request(arguments), arguments


def request_without_values(op: Operator[Any, Any], case: Case) -> tuple[Request, dict[str, Any]] | None:
    """Like `asked`, but with fake tensors, because the tensors of a large case would take gigabytes.

    Returns None if some arguments depend on the values of other arguments, which fake tensors do not have.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    try:
        with FakeTensorMode():
            return asked(op, case)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None


def typical_cases(op: Operator[Any, Any]) -> list[Case]:
    """Returns an operator's small cases, ordered by similarity to its first large case, which has a real model's sizes and
    options.
    """
    cases = op.all_cases()
    small = [case for case in cases if not case.large]
    large = next((case.make for case in cases if case.large and isinstance(case.make, Recipe)), None)
    if large is None:
        return small
    model = values_of(large)
    return sorted(small, key=lambda case: -_likeness(values_of(case.make), model) if _same_maker(case.make, large) else math.inf)


def _same_maker(make: Any, other: Recipe) -> bool:
    return isinstance(make, Recipe) and make.maker is other.maker


def values_of(make: Any) -> dict[str, Any]:
    """Returns the values from which a recipe makes its arguments, defaults included; empty for a function that is no recipe."""
    if not isinstance(make, Recipe):
        return {}
    parameters = inspect.signature(make.maker).parameters.values()
    return {**{p.name: p.default for p in parameters if p.default is not p.empty}, **make.values}


def _likeness(values: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Scores the similarity of a recipe's values to a model's: the number of equal values (for tuples the equal fraction), minus
    the number of values given in only one of the two, minus 1 if a size is 0.
    """
    shared = -float(any(isinstance(value, tuple) and 0 in value for value in values.values()))
    for name in values.keys() & model.keys():
        one, other = values[name], model[name]
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) > 0:
            shared += sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
        else:
            shared += type(one) is type(other) and bool(one == other)
    return shared - len(values.keys() ^ model.keys())


def vary_towards(
    op: Operator[Any, Any], starts: Sequence[Case], wanted: Mapping[str, Any], request_of: Callable[[Case], Request | None]
) -> tuple[Case, str]:
    """Changes the recipe of the first starting case that allows this, until its selection request has the wanted traits and operand
    dtypes.

    Args:
        op: the operator.
        starts: the cases to start from; at least one.
        wanted: values of traits, and dtypes of operands, by name.
        request_of: returns the selection request of a case; None for a case that the operator rejects.

    Returns:
        The changed case, and an empty string; or the first starting case, and the first name that could not be satisfied from it.
    """
    missed, pairs = "", iter(range(_MOST_PAIRS))
    for start in starts:
        case, gap = _towards(op, start, wanted, request_of, pairs)
        if not gap:
            return case, ""
        missed = missed or gap
    return starts[0], missed


def _towards(
    op: Operator[Any, Any],
    case: Case,
    wanted: Mapping[str, Any],
    request_of: Callable[[Case], Request | None],
    pairs: Iterator[int],
) -> tuple[Case, str]:
    """Returns the changed case, and an empty string; or the partially changed case, and the first name that could not be
    satisfied."""
    held: Change = {}
    for name, value in wanted.items():
        held[name] = value
        if not _has(request_of(case), held):
            found = _nearest(op, case, name, held, request_of, pairs)
            if found is None:
                return case, name
            case = found
    return case, ""


def _nearest(
    op: Operator[Any, Any],
    case: Case,
    name: str,
    wanted: Mapping[str, Any],
    request_of: Callable[[Case], Request | None],
    pairs: Iterator[int],
) -> Case | None:
    """Returns a changed case whose selection request has the wanted values; None if there is none.

    Cases that differ from the given case in one value of the recipe are tried first; of these, the one whose request otherwise
    changes least is returned. Then cases that differ in two values are tried, and the first one found is returned. Each of these
    takes an item of ``pairs``; the search ends when there are no more.
    """
    recipe, request = case.make, request_of(case)
    if not isinstance(recipe, Recipe) or request is None:
        return None
    # The request of a case is known only after its arguments are made. So changes that may make the case huge are left out.
    elements = 1 if case.large else max(_elements(op, case), 1)
    room = math.inf if case.large else _MOST_ELEMENTS / elements

    def changed(change: Change) -> Case:
        large = case.large or growth(recipe, change) * elements > _FEW_ELEMENTS
        return replace(case, make=recipe.vary(**change), large=large)

    towards = changes_towards(op, recipe, value_in(request, name, wanted[name]), name, wanted[name])
    changes = [change for change in towards if growth(recipe, change) <= room]
    found: list[tuple[int, Case]] = []
    for change in changes:
        asked = request_of(other := changed(change))
        if asked is not None and _has(asked, wanted):
            found.append((_difference(asked, request), other))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    both = ({**a, **b} for a, b in itertools.combinations(changes, 2) if not a.keys() & b.keys())
    cases = (changed(change) for change, _ in zip(both, pairs, strict=False) if growth(recipe, change) <= room)
    return next((other for other in cases if _has(request_of(other), wanted)), None)


def _elements(op: Operator[Any, Any], case: Case) -> int:
    """Returns the number of elements of a call's tensors, for `growth`. An axis of size 0 counts as 1, as it does there."""
    tensors = tensor_arguments(op.parameters, op.complete(case.build("cpu")))
    return sum(math.prod(max(size, 1) for size in tensor.shape) for _, tensor in tensors)


def _difference(one: Request, other: Request) -> int:
    """Counts the traits and operand formats in which two selection requests differ."""
    return len({*one.traits.items()} ^ {*other.traits.items()}) + len({*one.signature.roles} ^ {*other.signature.roles})


def _has(request: Request | None, wanted: Mapping[str, Any]) -> bool:
    return request is not None and all(same_value(value_in(request, name, value), value) for name, value in wanted.items())


def value_in(request: Request, name: str, like: Any) -> Any:
    """Returns a selection request's value for a name: the dtype of the operand with this name if ``like`` is a dtype, else the
    trait with this name. Returns None if the request has no such operand or trait.
    """
    if isinstance(like, torch.dtype):
        return next((fmt.storage_dtype for role, fmt in request.signature.roles if role == name), None)
    return request.traits.get(name)


def same_value(left: Any, right: Any) -> bool:
    """Returns whether two trait values are equal. A boolean never equals an integer."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def changes_towards(op: Operator[Any, Any], recipe: Recipe, current: Any, name: str, value: Any) -> Iterator[Change]:
    """Yields changes of a recipe's values that may give a trait (or an operand's dtype) the wanted value.

    The changes set an option of that name, set or scale sizes to the value, repeat or leave out items of a list of sizes, or use
    values of the operator's other cases.

    Args:
        op: the operator.
        recipe: the case's recipe.
        current: the trait's value in that case.
        name: the trait's name.
        value: the wanted value.
    """
    parameters = inspect.signature(recipe.maker).parameters
    spread = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    values = values_of(recipe)
    if name in parameters or (spread and name in op.names):
        yield {name: value}
    for given, old in recipe.values.items():
        if given not in parameters or parameters[given].default is not inspect.Parameter.empty:
            yield {given: DEFAULT}
        if isinstance(old, torch.dtype):  # dtype options often must equal the operands' dtype
            yield from ({option: old} for option in _dtyped_options(op, parameters, spread) if option != given)
    if isinstance(value, torch.dtype):
        yield from ({n: value} for n, old in values.items() if isinstance(old, torch.dtype))
        yield from ({n: value} for n, old in values.items() if old is None)
    if type(value) is int:
        yield from _sizes_towards(values, parameters, current, value)
    yield from ({n: not flag} for n, flag in values.items() if isinstance(flag, bool))
    yield from _seen(op, recipe, parameters, spread)


def _sizes_towards(values: Mapping[str, Any], parameters: Mapping[str, Any], current: Any, value: int) -> Iterator[Change]:
    for name, number in values.items():
        wanted = {value}
        if type(current) is int and current:
            sizes = number if isinstance(number, (tuple, list)) else [number]
            wanted |= {size * value // current for size in sizes if type(size) is int and size * value % current == 0}
        if type(number) is int or (number is None and name in parameters):
            yield from ({name: n} for n in sorted(wanted))
        elif isinstance(number, (tuple, list)) and number and all(type(n) is int for n in number):
            for i, n in itertools.product(reversed(range(len(number))), sorted(wanted)):
                yield {name: type(number)([*number[:i], n, *number[i + 1 :]])}
            if current == len(number) and 0 < value <= _LONGEST:  # the trait may be the number of items
                yield {name: type(number)(itertools.islice(itertools.cycle(number), value))}


def _dtyped_options(op: Operator[Any, Any], parameters: Mapping[str, Any], spread: bool) -> set[str]:
    """Returns the names of the operator's options for which some case gives a dtype."""
    recipes = [case.make for case in op.all_cases() if isinstance(case.make, Recipe)]
    options = {n for recipe in recipes for n, v in recipe.values.items() if isinstance(v, torch.dtype) and n in op.names}
    return {name for name in options if spread or name in parameters}


def _seen(op: Operator[Any, Any], recipe: Recipe, parameters: Mapping[str, Any], spread: bool) -> Iterator[Change]:
    """Yields changes that set an option to a value from any of the operator's cases. Each value is yielded once."""
    seen: dict[str, list[Any]] = {}
    for case in op.all_cases():
        for name, value in case.make.values.items() if isinstance(case.make, Recipe) else ():
            usable = name in op.names
            if type(value) is not int:
                taken = name in parameters or (spread and (usable or _same_maker(case.make, recipe)))
                usable = taken and not isinstance(value, (list, Recipe))
            known = seen.setdefault(name, [])
            if usable and value != recipe.values.get(name) and all(type(value) is not type(v) or value != v for v in known):
                known.append(value)
    for name, values in seen.items():
        yield from ({name: value} for value in values)


def growth(recipe: Recipe, change: dict[str, Any]) -> float:
    """Returns an upper bound of the factor by which a change multiplies the number of elements of a case's tensors."""
    values = values_of(recipe)
    grown = 1.0
    for name, value in change.items():
        for now, then in _paired(value, values.get(name)):
            grown *= max(now / max(then, 1), 1.0)
    return grown


def _paired(value: Any, before: Any) -> Iterator[tuple[int, int]]:
    """Yields pairs of a changed size and its previous value, or 1 if the size had no value. For a list whose items are repeated or
    left out, yields its lengths."""
    if isinstance(value, (list, tuple)):
        if isinstance(before, (list, tuple)) and before and [*value] == [*itertools.islice(itertools.cycle(before), len(value))]:
            yield len(value), len(before)
            return
        then = before if isinstance(before, (list, tuple)) and len(before) == len(value) else [1] * len(value)
        for one, other in zip(value, then, strict=True):
            yield from _paired(one, other)
    elif type(value) is int:
        yield value, before if type(before) is int else 1
