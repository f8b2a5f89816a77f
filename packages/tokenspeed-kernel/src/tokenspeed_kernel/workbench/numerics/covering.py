"""Selects few cases that together contain every kind of call, for machines on which all cases take too long: interpreters and
emulators."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.spec import KernelSpec

# Cases with less work than this many elements take tenths of a second in Triton's interpreter.
SMALL = 4096
# Floating-point operations that take about as long as one more element of an argument.
FLOPS_PER_ELEMENT = 64


def covering(spec: KernelSpec, drawn: Mapping[Case, dict[str, Any]]) -> set[Case]:
    """Returns the small cases, and few larger ones, such that each fact about any of the cases holds for one that is returned.

    Facts are: the value of a trait, the format of an operand, the dtype of a tensor, whether an option is given, the value of a
    flag, whether a tensor is contiguous or empty, the number of processes.

    Args:
        spec: a kernel that is eligible for all of the cases.
        drawn: the complete arguments of each case.
    """
    op = get_operator(spec.operator)
    cases = list(drawn)
    facts = [_facts(op, spec, case, arguments) for case, arguments in drawn.items()]
    work = [_work(op, arguments) for arguments in drawn.values()]
    kept = cover(facts, work, [i for i, amount in enumerate(work) if amount < SMALL])
    return {cases[i] for i in kept}


def cover(facts: Sequence[frozenset[Hashable]], costs: Sequence[float], given: Sequence[int] = ()) -> set[int]:
    """Returns indices of sets whose union is the union of all sets, at a low total cost. The sets of ``given`` are among these.

    The choice is greedy: next comes the set with the most missing facts for its cost. It depends on nothing but the arguments.

    >>> sorted(cover([frozenset("abc"), frozenset("ab"), frozenset("c")], [9, 1, 1]))
    [1, 2]
    """
    missing = frozenset[Hashable]().union(*facts).difference(*(facts[i] for i in given))
    chosen: list[int] = []
    while missing:
        chosen.append(max(range(len(facts)), key=lambda i: len(facts[i] & missing) / costs[i]))
        missing -= facts[chosen[-1]]
    for i in sorted(chosen, key=lambda i: -costs[i]):  # sets that were chosen later may have made this one redundant
        others = [*given, *(other for other in chosen if other != i)]
        if facts[i] <= frozenset[Hashable]().union(*(facts[other] for other in others)):
            chosen.remove(i)
    return {*given, *chosen}


def _facts(op: Operator[Any, Any], spec: KernelSpec, case: Case, arguments: dict[str, Any]) -> frozenset[Hashable]:
    request = op.request(arguments)
    facts: set[Hashable] = {("processes", case.world_size)}
    facts.update(("format", role, str(form)) for role, form in request.signature.roles)
    facts.update(("trait", name, _kind(spec, name, value)) for name, value in request.traits.items())
    facts.update(("given", name, name in request.given) for name in op.names)
    facts.update(("flag", name, arguments[name]) for name in op.names if isinstance(arguments[name], (bool, str)))
    for name, tensor in tensor_arguments(op.parameters, arguments):
        facts |= {("dtype", name, tensor.dtype), ("contiguous", name, tensor.is_contiguous()), ("empty", name, not tensor.numel())}
    return frozenset(facts)


def _kind(spec: KernelSpec, trait: str, value: Any) -> Hashable:
    """Returns the value. A number that the kernel does not list is only a power of two or not: this decides whether a kernel needs
    masks."""
    constraint = spec.traits.get(trait)
    listed = constraint is not None and constraint.values is not None
    if listed or isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return value > 0 and float(value).hex().partition("p")[0] == "0x1.0000000000000"


def _work(op: Operator[Any, Any], arguments: dict[str, Any]) -> float:
    elements = sum(tensor.numel() for _, tensor in tensor_arguments(op.parameters, arguments))
    return 1 + elements + op.cost_of(arguments).flops / FLOPS_PER_ELEMENT
