"""Selects few cases that together contain every kind of call, for machines on which all cases take too long: interpreters and
emulators."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.spec import KernelSpec

# The fixed cost of a case, in elements of its arguments: in Triton's interpreter, and where the case compiles a kernel.
INTERPRETATION = 4096
COMPILATION = 1_000_000
# Floating-point operations that take about as long as one more element of an argument.
FLOPS_PER_ELEMENT = 64


def covering(drawn: Mapping[KernelSpec, Mapping[Case, dict[str, Any]]], start: float) -> dict[KernelSpec, set[Case]]:
    """Selects few cases of kernels that share their device code. Each fact about any of the cases holds for a selected case of some
    kernel. If a kernel has cases with floating-point operations, one of them is selected. The same holds for cases without.

    Facts are: the value of a trait, the format of an operand, the dtype of a tensor, whether an option is given, the value of a
    flag, whether a tensor is contiguous or empty, the number of processes.

    Args:
        drawn: by kernel of one operator, the complete arguments of each case for which the kernel is eligible.
        start: what each case costs in addition to its work, as a number of elements.
    """
    pairs = [(spec, case) for spec, cases in drawn.items() for case in cases]
    facts, costs = [], []
    for spec, case in pairs:
        op, arguments = get_operator(spec.operator), drawn[spec][case]
        facts.append(_facts(op, spec, case, arguments) | {("kernel", spec.name, op.cost_of(arguments).flops > 0)})
        costs.append(start + _work(op, arguments))
    kept: dict[KernelSpec, set[Case]] = {spec: set() for spec in drawn}
    for i in cover(facts, costs):
        kept[pairs[i][0]].add(pairs[i][1])
    return kept


def cover(facts: Sequence[frozenset[Hashable]], costs: Sequence[float]) -> set[int]:
    """Returns indices of sets whose union is the union of all sets, at a low total cost.

    The choice is greedy: next comes the set with the most missing facts for its cost. It depends on nothing but the arguments.

    >>> sorted(cover([frozenset("abc"), frozenset("ab"), frozenset("c")], [9, 1, 1]))
    [1, 2]
    """
    missing = frozenset[Hashable]().union(*facts)
    chosen: list[int] = []
    while missing:
        chosen.append(max(range(len(facts)), key=lambda i: len(facts[i] & missing) / costs[i]))
        missing -= facts[chosen[-1]]
    for i in sorted(chosen, key=lambda i: -costs[i]):  # sets that were chosen later may have made this one redundant
        if facts[i] <= frozenset[Hashable]().union(*(facts[other] for other in chosen if other != i)):
            chosen.remove(i)
    return {*chosen}


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
