"""How to change a case's recipe so that its call has a wanted trait, or an operand another dtype.

A trait is a function of the arguments, and a recipe draws arguments from plain values. Which values give a trait the value that is
wanted is found by trial, from the most likely change to the least, so nothing here knows an operator.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tokenspeed_kernel_base.cases import DEFAULT, Case, Recipe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import check_types, tensor_arguments
from tokenspeed_kernel_base.selection import Request

_MOST_TRIES = 400
# Elements of all arguments of a case that is drawn.
_MOST_ELEMENTS = 1 << 26

Change = dict[str, Any]


def asked(op: Operator[Any, Any], case: Case) -> tuple[Request, dict[str, Any]]:
    """What a case asks of a kernel, and its arguments. Its tensors lie on the CPU."""
    arguments = op.complete(case.build("cpu"))
    check_types(op.mode, op.parameters, arguments)
    return op.request(arguments), arguments


def asked_without_values(op: Operator[Any, Any], case: Case) -> tuple[Request, dict[str, Any]] | None:
    """The same without filling tensors, which takes gigabytes for a large case. None where some arguments follow from the values of
    others, so that these have to be drawn."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    try:
        with FakeTensorMode():
            return asked(op, case)
    except DataDependentOutputException:
        return None


def typical_cases(op: Operator[Any, Any]) -> list[Case]:
    """The small cases, first those most like the first large one, which has a model's sizes and options."""
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
    """What a recipe was made from, defaults included; nothing of any other function."""
    if not isinstance(make, Recipe):
        return {}
    parameters = inspect.signature(make.maker).parameters.values()
    return {**{p.name: p.default for p in parameters if p.default is not p.empty}, **make.values}


def _likeness(values: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """How many values are those of the model; of tuples, which part; less what one of the two says alone, and empty tensors."""
    shared = -float(any(isinstance(value, tuple) and 0 in value for value in values.values()))
    for name in values.keys() & model.keys():
        one, other = values[name], model[name]
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) > 0:
            shared += sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
        else:
            shared += type(one) is type(other) and bool(one == other)
    return shared - len(values.keys() ^ model.keys())


def vary_towards(
    op: Operator[Any, Any], case: Case, wanted: Mapping[str, Any], request_of: Callable[[Case], Request | None]
) -> tuple[Case, str]:
    """The case with its recipe changed until its request has what is wanted.

    Args:
        op: the operator.
        case: where to start.
        wanted: values of traits, and dtypes of operands, by name.
        request_of: the request of a case; None for one that the operator refuses.

    Returns:
        The changed case, and an empty string; or the case as far as it came, and the first name of what it could not be given.
    """
    held: Change = {}
    for name, value in wanted.items():
        held[name] = value
        if not _has(request_of(case), held):
            found = _nearest(op, case, name, held, request_of)
            if found is None:
                return case, name
            case = found
    return case, ""


def _nearest(
    op: Operator[Any, Any], case: Case, name: str, wanted: Mapping[str, Any], request_of: Callable[[Case], Request | None]
) -> Case | None:
    """Of the cases with what is wanted the one that asks for least else; of cases with two values changed, the first."""
    recipe, request = case.make, request_of(case)
    if not isinstance(recipe, Recipe) or request is None:
        return None
    # A case is drawn to know its request, so changes that may make it enormous are left out.
    room = math.inf if case.large else _MOST_ELEMENTS / max(_elements(op, case), 1)
    towards = changes_towards(op, recipe, value_in(request, name, wanted[name]), name, wanted[name])
    changes = [change for change in towards if growth(recipe, change) <= room]
    found: list[tuple[int, Case]] = []
    for change in changes:
        asked = request_of(other := replace(case, make=recipe.vary(**change)))
        if asked is not None and _has(asked, wanted):
            found.append((_difference(asked, request), other))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    pairs = ({**a, **b} for a, b in itertools.combinations(changes, 2) if not a.keys() & b.keys())
    cases = (replace(case, make=recipe.vary(**change)) for change in itertools.islice(pairs, _MOST_TRIES))
    return next((other for other in cases if _has(request_of(other), wanted)), None)


def _elements(op: Operator[Any, Any], case: Case) -> int:
    return sum(tensor.numel() for _, tensor in tensor_arguments(op.parameters, op.complete(case.build("cpu"))))


def _difference(one: Request, other: Request) -> int:
    """In how many traits and formats two requests differ."""
    return len({*one.traits.items()} ^ {*other.traits.items()}) + len({*one.signature.roles} ^ {*other.signature.roles})


def _has(request: Request | None, wanted: Mapping[str, Any]) -> bool:
    return request is not None and all(same_value(value_in(request, name, value), value) for name, value in wanted.items())


def value_in(request: Request, name: str, like: Any) -> Any:
    """What a request says of a name: of an operand, if a dtype is looked for, else of a trait; None if it says nothing."""
    if isinstance(like, torch.dtype):
        return next((fmt.storage_dtype for role, fmt in request.signature.roles if role == name), None)
    return request.traits.get(name)


def same_value(left: Any, right: Any) -> bool:
    """Equality under which a flag is no number."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def changes_towards(op: Operator[Any, Any], recipe: Recipe, current: Any, name: str, value: Any) -> Iterator[Change]:
    """Changes of a recipe that may give a trait (or an operand) its value: options of that name, sizes set or scaled to it, and
    values that other cases give.

    Args:
        op: the operator.
        recipe: what draws a case.
        current: the trait's value in that case.
        name: of the trait.
        value: that is wanted.
    """
    parameters = inspect.signature(recipe.maker).parameters
    spread = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    values = values_of(recipe)
    if name in parameters or (spread and name in op.names):
        yield {name: value}
    for given, old in recipe.values.items():
        if given not in parameters or parameters[given].default is not inspect.Parameter.empty:
            yield {given: DEFAULT}
        if isinstance(old, torch.dtype):  # options that are dtypes often have to be the operands'
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


def _dtyped_options(op: Operator[Any, Any], parameters: Mapping[str, Any], spread: bool) -> set[str]:
    """Options that some case gives as a dtype."""
    recipes = [case.make for case in op.all_cases() if isinstance(case.make, Recipe)]
    options = {n for recipe in recipes for n, v in recipe.values.items() if isinstance(v, torch.dtype) and n in op.names}
    return {name for name in options if spread or name in parameters}


def _seen(op: Operator[Any, Any], recipe: Recipe, parameters: Mapping[str, Any], spread: bool) -> Iterator[Change]:
    """Options that the operator's other cases give, each value once."""
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
    """An upper bound of the factor by which a change multiplies the elements of a case."""
    values = values_of(recipe)
    grown = 1.0
    for name, value in change.items():
        for now, then in _paired(value, values.get(name)):
            grown *= max(now / max(then, 1), 1.0)
    return grown


def _paired(value: Any, before: Any) -> Iterator[tuple[int, int]]:
    """Sizes with their former values, 1 where there were none."""
    if isinstance(value, (list, tuple)):
        then = before if isinstance(before, (list, tuple)) and len(before) == len(value) else [1] * len(value)
        for one, other in zip(value, then, strict=True):
            yield from _paired(one, other)
    elif type(value) is int:
        yield value, before if type(before) is int else 1
