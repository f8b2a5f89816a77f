"""What the tests of the operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.parameters import Kind

_SCHEMA_TEST = "test_schema"


def _check_custom_op(function: Any, arguments: dict[str, Any]) -> None:
    """The operator works under torch.compile, with these arguments: as PyTorch's own checks see it, and by its results."""
    op = function.operator
    complete = op.complete(arguments)
    flat = [complete[p.name] for p in op.parameters if p.kind is not Kind.HINT]
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", _SCHEMA_TEST]
    if any(t.element_size() == 1 and t.is_floating_point() for t in tensors):
        tests.remove(_SCHEMA_TEST)  # it compares values in a way that PyTorch lacks for 8-bit floats
    torch.library.opcheck(getattr(torch.ops.tokenspeed_kernel, op.mode).default, (*flat, None, None), test_utils=tests)

    written = (*op.outs, *op.mutates)
    eager = {n: x.clone() if n in written and x is not None else x for n, x in complete.items()}
    traced = {n: x.clone() if n in written and x is not None else x for n, x in complete.items()}
    wanted = function(**eager)
    torch._dynamo.reset()
    got = torch.compile(lambda kwargs: function(**kwargs), fullgraph=True, backend="aot_eager")(traced)
    _same(got, wanted)
    for name in written:
        if complete[name] is not None:
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
def check_custom_op() -> Callable[[Any, dict[str, Any]], None]:
    return _check_custom_op
