"""Helpers that the tests of the operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Check = Callable[[Any, dict[str, Any]], None]


def _check_compiled(function: Any, arguments: dict[str, Any]) -> None:
    written = (*function.operator.outs, *function.operator.mutates)
    eager = {n: x.clone() if n in written and x is not None else x for n, x in arguments.items()}
    traced = {n: x.clone() if n in written and x is not None else x for n, x in arguments.items()}
    wanted = function(**eager)
    torch._dynamo.reset()
    got = torch.compile(lambda kwargs: function(**kwargs), fullgraph=True)(traced)
    _same(got, wanted)
    for name in written:
        if arguments[name] is not None:
            _same(traced[name], eager[name])


def _same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            _same(one, other)
    elif wanted is not None:
        assert got.dtype == wanted.dtype
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def check_custom_op(opcheck: Check) -> Check:
    """Returns a function that checks an operator under torch.compile: it runs PyTorch's own checks, and compares compiled and eager
    results."""

    def check(function: Any, arguments: dict[str, Any]) -> None:
        complete = function.operator.complete(arguments)
        opcheck(function, complete)
        _check_compiled(function, complete)

    return check
