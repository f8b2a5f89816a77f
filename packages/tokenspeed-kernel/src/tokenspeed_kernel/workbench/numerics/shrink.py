"""Shrinks a failing call to the smallest call with the same fault.

A case that a `Recipe` makes from numbers is varied through these numbers: shorter lists of lengths, smaller sizes, omitted options.
Any other case is narrowed (`tokenspeed_kernel.workbench.numerics.narrow`). Calls that the operator rejects are skipped. So this
module need not know which values are consistent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_kernel.workbench.numerics.narrow import Narrowed, axes_of, count_items, narrowed
from tokenspeed_kernel.workbench.numerics.recipes import values_of
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, check_with_values, default_device, verify_case
from tokenspeed_kernel_base.cases import DEFAULT, Case, Recipe
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.spec import KernelSpec

# Only the first elements of a list, this many at most, are left out or reduced one by one.
_MOST_ELEMENTS = 12


@dataclass(frozen=True)
class Shrunk:
    """The outcome of a search for the smallest case with the same fault.

    Attributes:
        case: the smallest case found; the given case if no smaller case was found.
        result: the result of verifying the kernel on that case.
        tried: number of calls that the search ran.
        exhausted: whether nothing smaller is left to try; False if time ran out first.
        reproducer: source of a Python program that verifies the case and makes the call.
    """

    case: Case
    result: CaseResult
    tried: int
    exhausted: bool
    reproducer: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the result of the search as plain values, for JSON."""
        told = {"tried": self.tried, "exhausted": self.exhausted, "reproducer": self.reproducer}
        return {"case": str(self.case.make), "reason": self.result.reason, **told}


def shrink(
    spec: KernelSpec,
    case: Case,
    result: CaseResult,
    device: torch.device | str | None = None,
    *,
    seed: int = 0,
    repeat: int | None = None,
    seconds: float = 20.0,
) -> Shrunk:
    """Searches for the smallest case on which a kernel fails in the same way: with the same status, and a fault of the same kind.

    The search is deterministic unless time runs out.

    Args:
        spec: the kernel.
        case: the failing case.
        result: the result of `verify_case` for this case.
        device, seed, repeat: the arguments of that `verify_case`.
        seconds: begin no further call after this time.
    """
    op, where = get_operator(spec.operator), default_device() if device is None else torch.device(device)
    search = _Search(op, spec, where, seed, repeat, result, time.monotonic() + seconds)
    smallest, found = search.descend(case)
    text = reproducer(op, spec, smallest, where, seed)
    return Shrunk(smallest, found, search.tried, not search.late(), text)


@dataclass
class _Search:
    op: Operator[Any, Any]
    spec: KernelSpec
    device: torch.device
    seed: int
    repeat: int | None
    wanted: CaseResult
    deadline: float
    tried: int = 0

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def descend(self, case: Case) -> tuple[Case, CaseResult]:
        """Replaces a case by ever smaller cases that fail in the same way, until no variation of the last case fails in this
        way.
        """
        result, size = self.wanted, self._size(case)
        seen: set[str] = set()
        progress = size is not None
        while progress and not self.late():
            progress = False
            for smaller in variations(self.op, case, self.device, self.seed):
                text = str(smaller.make) if isinstance(smaller.make, Recipe) else str(getattr(smaller.make, "steps", ""))
                if text in seen:
                    continue
                seen.add(text)
                measured = self._size(smaller)
                if measured is None or size is None or measured >= size:
                    continue
                if self.late():
                    break
                self.tried += 1
                outcome = verify_case(self.spec, smaller, self.device, seed=self.seed, repeat=self.repeat)
                if self._same(outcome):
                    case, result, size, progress = smaller, outcome, measured, True
                    break
        return case, result

    def _same(self, outcome: CaseResult) -> bool:
        kinds = {fault.kind for fault in self.wanted.faults[:1]}
        return outcome.status is self.wanted.status and any(fault.kind in kinds for fault in outcome.faults)

    def _size(self, case: Case) -> tuple[int, int, int] | None:
        """Returns the size of a case, for comparison: the number of its tensors' elements, the number of its recipe's values, and
        the sum of these values' magnitudes. Returns None if the operator rejects the call.
        """
        try:
            arguments = self.op.complete(case.build(self.device, self.seed))
            check_with_values(self.op, arguments)
        except Exception:  # a recipe may raise anything for inconsistent values
            return None
        elements = sum(t.numel() for _, t in tensor_arguments(self.op.parameters, arguments))
        values = [*_leaves(case.make)] if isinstance(case.make, Recipe) else []
        return elements, len(values), sum(abs(int(v)) for v in values if type(v) is int)


def _leaves(recipe: Recipe) -> Iterator[Any]:
    for value in recipe.values.values():
        if isinstance(value, Recipe):
            yield from _leaves(value)
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def variations(op: Operator[Any, Any], case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Iterator[Case]:
    """Yields simpler variations of a case, the largest simplifications first. The operator may reject some of them."""
    if isinstance(case.make, Recipe) and any(type(value) is int for value in _leaves(case.make)):
        for recipe in _simpler(case.make, frozenset(op.names)):
            yield replace(case, make=recipe)
        return
    arguments = op.complete(case.build(device, seed))
    items = count_items(op, arguments)
    for count in _smaller(items):
        yield narrowed(op, case, items=count)
    tensors = dict(tensor_arguments(op.parameters, arguments))
    sizes = {n: tensors[name].shape[i] for name, names in axes_of(op, arguments).items() for i, n in enumerate(names) if n}
    for name, size in sizes.items():
        for count in _smaller(size):
            yield narrowed(op, case, **{name: count})


def _simpler(recipe: Recipe, options: frozenset[str]) -> Iterator[Recipe]:
    """Yields simpler variations of a recipe: all numbers halved, fewer lengths, values left out, one smaller number, two smaller
    numbers.

    ``options``: parameters of the operator. A number with the name of a parameter is a setting and may be 0. Other numbers are
    sizes of at least 1.
    """
    values = values_of(recipe)
    lists = {name: list(v) for name, v in values.items() if isinstance(v, (list, tuple)) and v and all(type(x) is int for x in v)}
    numbers = {name: v for name, v in values.items() if type(v) is int}

    def vary(changes: dict[str, Any]) -> Recipe:
        return recipe.vary(**{n: type(values[n])(v) if n in lists else v for n, v in changes.items()})

    def least(name: str) -> int:
        return 0 if name in options else 1

    halved = {name: [n // 2 for n in v] for name, v in lists.items()}
    less = {name: max(v // 2, least(name)) for name, v in numbers.items() if v > 0}
    yield vary({**halved, **less})
    yield vary({**halved, **{name: v for name, v in less.items() if name in options}})
    yield vary({name: v for name, v in less.items() if name not in options})

    # Lists of equal length are changed together, such as each sequence's new tokens and total tokens.
    for size in sorted({len(v) for v in lists.values()}, reverse=True):
        group = {name: v for name, v in lists.items() if len(v) == size}
        kept: list[list[int]] = [[*range(size // 2)], [*range(size // 2, size)]] if size > 3 else []
        kept += [[i for i in range(size) if i != j] for j in range(min(size, _MOST_ELEMENTS))]
        for indices in kept:
            yield vary({name: [v[i] for i in indices] for name, v in group.items()})
    for name, value in recipe.values.items():
        if isinstance(value, Recipe):
            for inner in _simpler(value, options):
                yield vary({name: inner})
        elif not isinstance(value, torch.dtype) and name not in lists:
            yield vary({name: DEFAULT})
    for name, number in numbers.items():
        for smaller in _smaller(number, least(name)):
            yield vary({name: smaller})
    for name, lengths in lists.items():
        for i in range(min(len(lengths), _MOST_ELEMENTS)):
            for smaller in _smaller(lengths[i]):
                yield vary({name: [*lengths[:i], smaller, *lengths[i + 1 :]]})
    for changes in _two_at_once(numbers, lists):
        if all(value >= least(name) for name, value in changes.items() if name in numbers):
            yield vary(changes)


def _two_at_once(numbers: dict[str, int], lists: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """Yields changes of a recipe that reduce two values together: numbers that must divide or equal each other, or a number and a
    length.
    """
    for (one, a), (other, b) in itertools.combinations(numbers.items(), 2):
        for pair in ((1, 1), (a // 2, b // 2), (a - 1, b - 1)):
            if pair[0] < a and pair[1] < b:
                yield {one: pair[0], other: pair[1]}
    places = [(name, i) for name, v in lists.items() for i in range(min(len(v), _MOST_ELEMENTS)) if v[i]]
    for (one, i), (other, j) in itertools.combinations(places, 2):
        if one != other and i == j:
            a, b = lists[one][i], lists[other][j]
            yield {one: _put(lists[one], i, a // 2), other: _put(lists[other], j, b // 2)}
            yield {one: _put(lists[one], i, a - 1), other: _put(lists[other], j, b - 1)}
    for (name, i), (other, number) in itertools.product(places, numbers.items()):
        length = lists[name][i]
        if number > 0:
            yield {name: _put(lists[name], i, length // 2), other: number // 2}
            yield {name: _put(lists[name], i, length - 1), other: number - 1}


def _put(values: list[int], at: int, value: int) -> list[int]:
    return [*values[:at], value, *values[at + 1 :]]


def _smaller(number: int, least: int = 0) -> list[int]:
    """Returns numbers to try instead of ``number``, all smaller and at least ``least``, the smallest first."""
    return list(dict.fromkeys(n for n in (0, 1, 2, number // 4, number // 2, number - 2, number - 1) if least <= n < number))


def reproducer(op: Operator[Any, Any], spec: KernelSpec, case: Case, device: torch.device | str, seed: int = 0) -> str:
    """Returns the source of a Python program that verifies a kernel on a case, prints the difference, and makes the call."""
    imports = {
        "import torch",
        "from tokenspeed_kernel_base.cases import Case",
        "from tokenspeed_kernel.workbench.numerics import verify_case",
        "from tokenspeed_kernel_base.operator import get_operator",
        "from tokenspeed_kernel_base.registry import KernelRegistry",
    }
    lines = [f'op = get_operator("{op}")']
    base = case.make.base if isinstance(case.make, Narrowed) else case.make
    if isinstance(base, Recipe) and "<" not in base.maker.__qualname__:
        imports |= _imports(base)
        lines.append(f"case = Case({case.name!r}, {base})")
    else:
        lines.append(f"case = next(case for case in op.all_cases() if case.name == {case.name!r})")
        imports.discard("from tokenspeed_kernel_base.cases import Case")
    if isinstance(case.make, Narrowed):
        imports.add("from tokenspeed_kernel.workbench.numerics.narrow import narrowed")
        lines += [f"case = narrowed(op, case, {_keyword(size, count)})" for size, count in case.make.steps]
    if "torch." not in " ".join(lines):
        imports.discard("import torch")
    lines += [
        f"kernel = KernelRegistry.get().get_by_name({spec.name!r})",
        f'print(verify_case(kernel, case, "{device}", seed={seed}).reason)',
        "",
        "# the call itself:",
        f"arguments = op.prepared(op.complete(case.build({str(device)!r}, {seed})), kernel)"
        if op.has_hook("prepare")
        else f"arguments = case.build({str(device)!r}, {seed})",
        f"got = op.function(**arguments, override={spec.name!r})",
    ]
    ordered = sorted(imports, key=lambda line: (not line.startswith("import"), line))
    return "\n".join([*ordered, "", *lines]) + "\n"


def _keyword(name: str, value: int) -> str:
    return f"{name}={value}" if name.isidentifier() else f"**{{{name!r}: {value}}}"


def _imports(recipe: Recipe) -> set[str]:
    found = {f"from {recipe.maker.__module__} import {recipe.maker.__name__}"}
    for value in recipe.values.values():
        if isinstance(value, Recipe):
            found |= _imports(value)
    return found
