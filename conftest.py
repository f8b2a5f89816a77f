"""Implements the marker ``sampled``, for tests with many expensive cases. Also keeps the garbage collector from scanning what the
collection of tests leaves."""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates ``-m``
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all cases of a ``sampled(n)`` test as slow, except n cases. These are evenly spaced, and include the first and the last
    case.

    The choice depends only on the order of the cases, so all workers and all runs choose the same cases.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        (kept,) = of_one_test[0].get_closest_marker("sampled").args
        last = len(of_one_test) - 1
        fast = {round(i * last / max(kept - 1, 1)) for i in range(kept)}
        for i, item in enumerate(of_one_test):
            if i not in fast:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Excludes all current objects from garbage collections: modules and thousands of tests, which live until the end anyway. Each
    full collection would scan them."""
    gc.collect()
    gc.freeze()
