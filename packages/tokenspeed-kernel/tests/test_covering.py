"""The choice of few cases that contain every kind of call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import tokenspeed_kernel  # noqa: F401  - registers the kernels
from tokenspeed_kernel.workbench.numerics.covering import INTERPRETATION, cover, covering
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.registry import KernelRegistry

SETS = st.lists(st.tuples(st.frozensets(st.integers(0, 9)), st.integers(1, 50)), min_size=1, max_size=12)


@given(SETS)
def test_a_cover_has_all_facts_and_no_redundant_set(sets: list[tuple[frozenset[int], int]]) -> None:
    facts, costs = [each for each, _ in sets], [cost for _, cost in sets]
    chosen = cover(facts, costs)
    assert frozenset().union(*(facts[i] for i in chosen)) == frozenset().union(*facts)
    for i in chosen:
        assert facts[i] - frozenset().union(*(facts[other] for other in chosen - {i}))
    assert cover(facts, costs) == chosen


def test_a_cheap_pair_replaces_an_expensive_set() -> None:
    facts = [frozenset("abc"), frozenset("ab"), frozenset("c")]
    assert cover(facts, [9, 1, 1]) == {1, 2}
    assert cover(facts, [1, 1, 1]) == {0}


def test_cases_that_cover_an_operator() -> None:
    """The left out cases have no dtype, option or flag that the kept cases lack."""
    op = get_operator("mha_prefill")
    spec = KernelRegistry.get().get_by_name("reference_mha_prefill")
    drawn = {case: op.complete(case.build()) for case in op.all_cases() if not case.large}
    kept = covering({spec: drawn}, INTERPRETATION)[spec]
    assert kept < drawn.keys()
    requests = {case: op.request(arguments) for case, arguments in drawn.items()}
    for case in drawn.keys() - kept:
        others = [requests[other] for other in kept]
        assert all(any(name in other.given for other in others) for name in requests[case].given)
        assert all(any(role in other.signature.roles for other in others) for role in requests[case].signature.roles)
        flags = {name: value for name, value in requests[case].traits.items() if isinstance(value, (bool, str))}
        assert all(any(other.traits[name] == value for other in others) for name, value in flags.items())


def test_cases_that_cover_several_kernels() -> None:
    """Kernels share what they cover, but each has a case with work."""
    op = get_operator("mha_prefill")
    specs = [spec for spec in KernelRegistry.get().get_for_operator(op.family, op.mode) if spec.solution in ("reference", "triton")]
    assert len(specs) > 1
    drawn = {case: op.complete(case.build()) for case in op.all_cases() if not case.large}
    alone = covering({specs[0]: drawn}, INTERPRETATION)[specs[0]]
    kept = covering(dict.fromkeys(specs, drawn), INTERPRETATION)
    assert sum(map(len, kept.values())) < len(specs) * len(alone)
    for cases in kept.values():
        assert {op.cost_of(drawn[case]).flops > 0 for case in cases} == {False, True}
    traits = {case: set(op.request(arguments).traits.items()) for case, arguments in drawn.items()}
    together = set().union(*(traits[case] for cases in kept.values() for case in cases))
    assert all(traits[case] <= together for case in alone)
    assert covering({specs[0]: {}}, INTERPRETATION) == {specs[0]: set()}
