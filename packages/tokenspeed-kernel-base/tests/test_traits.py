"""Tests constraints on traits against brute force over small sets of values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.traits import (
    ANY,
    Constraint,
    as_constraint,
    at_least,
    at_most,
    between,
    format_traits,
    multiple_of,
    one_of,
    trait_gaps,
    traits_overlap,
)

UNIVERSE: tuple[Any, ...] = (True, False, None, "nhd", "", 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, -8, 0.5, 2.0, 8.5)

atoms = st.one_of(
    st.sampled_from([True, False, None, "nhd", 1, 8, 0.5]),
    st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=4),
    st.builds(at_least, st.integers(-9, 30)),
    st.builds(at_most, st.integers(-9, 30)),
    st.tuples(st.integers(-9, 30), st.integers(0, 20)).map(lambda p: between(p[0], p[0] + p[1])),
    st.builds(multiple_of, st.sampled_from([1, 2, 3, 4, 8])),
    st.just(any),
)
constraints = st.recursive(atoms.map(as_constraint), lambda inner: st.builds(lambda a, b: a & b, inner, inner), max_leaves=4)


@settings(max_examples=400, deadline=None)
@given(constraints, constraints)
def test_and_accepts_what_both_accept(left: Constraint, right: Constraint) -> None:
    both = left & right
    for value in UNIVERSE:
        assert both.accepts(value) == (left.accepts(value) and right.accepts(value)), (value, str(both))


@settings(max_examples=300, deadline=None)
@given(constraints)
def test_satisfiable_means_that_a_value_exists(constraint: Constraint) -> None:
    numbers = range(-100, 101)
    assert constraint.satisfiable() == any(constraint.accepts(v) for v in (*UNIVERSE, *numbers))


@pytest.mark.parametrize(
    ("constraint", "accepted", "refused"),
    [
        (as_constraint(True), [True], [False, 1, 1.0, None, "True"]),
        (as_constraint(1), [1, 1.0], [True, 2, "1"]),
        (as_constraint({64, 128}), [64, 128], [96, True]),
        (as_constraint(("a", None)), ["a", None], ["b", 0, False]),
        (at_least(2), [2, 2.5, 10**30], [1, True, None, "3"]),
        (at_most(2), [2, -1, 0.5], [3, False, None]),
        (between(2, 4), [2, 3, 4], [1, 5]),
        (multiple_of(16), [0, 16, -32, 48.0], [8, 17, True, "16"]),
        (at_most(256) & multiple_of(16), [256, 16], [272, 250]),
        (at_most(256) & {64, 512}, [64], [512, 128]),
        (ANY, [True, False, None, 3, "x"], []),
        (as_constraint(any), [True, 0], []),
    ],
)
def test_values_that_constraints_accept(constraint: Constraint, accepted: list[Any], refused: list[Any]) -> None:
    assert [v for v in accepted if not constraint.accepts(v)] == []
    assert [v for v in refused if constraint.accepts(v)] == []


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (as_constraint(64), "64"),
        (one_of(128, 64), "one of 64, 128"),
        (one_of("b", "a", 3), "one of 3, a, b"),
        (at_least(2), "at least 2"),
        (at_most(2), "at most 2"),
        (between(2, 4), "2 to 4"),
        (multiple_of(16) & at_most(256), "at most 256 and a multiple of 16"),
        (ANY, "any"),
    ],
)
def test_how_constraints_read(constraint: Constraint, text: str) -> None:
    assert str(constraint) == text


def test_wrong_constraints() -> None:
    for divisor in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="multiple_of needs a positive int"):
            multiple_of(divisor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="between needs low <= high, got 4 and 2"):
        between(4, 2)
    for value in (object(), {"a": 1}, [[1]], b"x", 1j):
        with pytest.raises(TypeError, match="a trait is constrained by"):
            as_constraint(value)


def test_and_with_what_an_author_would_write() -> None:
    assert (at_most(256) & 64).accepts(64)
    assert str(multiple_of(4) & {3, 8}) == "8"


def test_huge_bounds_are_exact() -> None:
    low = 2**60 + 1
    assert not Constraint(low=low, high=low + 1, divisor=4).satisfiable()
    assert Constraint(low=low, high=low + 3, divisor=4).satisfiable()


# -- gaps -------------------------------------------------------------------------------------------------------------------------

GAPS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    ({}, {"sinks": False, "head_dim": 64}, []),
    ({}, {"sinks": True}, ["does not declare the flag sinks, which the request sets"]),
    ({"sinks": any}, {"sinks": True}, []),
    ({"sinks": {True, False}}, {}, []),
    ({"sinks": True}, {"sinks": True}, []),
    ({"sinks": True}, {"sinks": False}, ["sinks=False is not True"]),
    ({"sinks": True}, {}, ["needs sinks=True, which the request does not set"]),
    ({"sinks": False}, {"sinks": True}, ["sinks=True is not False"]),
    ({"sinks": False}, {}, []),
    ({"head_dim": {64, 128}}, {"head_dim": 96}, ["head_dim=96 is not one of 64, 128"]),
    ({"head_dim": 64}, {}, []),
    ({"head_dim": at_most(256), "page": 16}, {"head_dim": 512, "page": 1, "x": True}, [
        "head_dim=512 is not at most 256", "page=1 is not 16", "does not declare the flag x, which the request sets"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "requested", "gaps"), GAPS)
def test_gaps(declared: dict[str, Any], requested: dict[str, Any], gaps: list[str]) -> None:
    rules = {name: as_constraint(value) for name, value in declared.items()}
    assert trait_gaps(rules, requested) == gaps
    said_something = [g for g in gaps if not g.startswith("does not declare")]
    assert trait_gaps(rules, requested, universal=True) == said_something


def _requests(names: list[str], pools: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in product(*(pools[name] for name in names)):
        yield dict(zip(names, values, strict=True))


POOLS: dict[str, tuple[Any, ...]] = {"sinks": (True, False), "lse": (True, False), "dim": (0, 1, 2, 3, 4, 8, 12, 16, 24, "auto")}
sided = st.fixed_dictionaries(
    {},
    optional={
        "sinks": st.sampled_from([True, False, {True, False}, any]),
        "lse": st.sampled_from([True, False, {True, False}, any]),
        "dim": st.sampled_from(
            [1, {2, 3}, {8, "auto"}, at_least(12), at_most(4), multiple_of(8), multiple_of(3) & at_most(12), any]
        ),
    },
)


@settings(max_examples=400, deadline=None)
@given(sided, sided, st.booleans(), st.booleans())
def test_overlap_means_that_a_request_exists(left: Any, right: Any, left_universal: bool, right_universal: bool) -> None:
    a = {name: as_constraint(value) for name, value in left.items()}
    b = {name: as_constraint(value) for name, value in right.items()}
    exists = any(
        not trait_gaps(a, request, universal=left_universal) and not trait_gaps(b, request, universal=right_universal)
        for request in _requests([*POOLS], POOLS)
    )
    assert traits_overlap(a, b, left_universal=left_universal, right_universal=right_universal) == exists


def test_traits_as_text() -> None:
    assert format_traits({"b": 1, "a": True}) == "a=True, b=1"
