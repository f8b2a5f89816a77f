"""Greedy sampling with a sharded vocabulary: merges the shards' best tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.variation import Variation, Want


@operator("sampling", "merge_argmax", formats=("values",), traits={"parts": int}, exact=True, varying=("rows",))
def merge_argmax(values: Tensor, tokens: Tensor, out_dtype: torch.dtype = torch.int64, out: Tensor | None = None) -> Tensor:
    """Merges `argmax_with_value` results of vocabulary shards: returns the token of the largest value of each row.

    Among equal values, the smallest token wins. If the inputs are the results for all shards, stacked in any order, the result is
    that of `argmax` for all logits. The values of float64 logits are rounded to float32, so logits of different shards that round
    to the same value are equal here. NaN ranks above every number, 0 and -0 are equal.

    Args:
        values: float32 ``[parts, rows]``, parts > 0.
        tokens: int32 ``[parts, rows]``, at least 0.
        out_dtype: int64 or int32.
        out: ``out_dtype [rows]``, receives the result.

    Returns:
        ``out_dtype [rows]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. The values of tokens are
            not checked.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import merge_argmax
        >>> merge_argmax(torch.tensor([[2.0, 1.0], [2.0, 3.0]]), torch.tensor([[4, 0], [9, 7]], dtype=torch.int32))
        tensor([4, 7])

    Safe in CUDA graphs. Results are exactly the same with every backend.
    """
    by_token, order = tokens.sort(dim=0, stable=True)
    best = values.gather(0, order).argmax(dim=0, keepdim=True)
    return by_token.gather(0, best).squeeze(0).to(out_dtype)


@merge_argmax.traits
def _(values: Tensor) -> dict[str, object]:
    return {"parts": values.shape[0]}


@merge_argmax.check
def _(check: Checker, values: Tensor, tokens: Tensor, out_dtype: torch.dtype) -> None:
    check.tensor("values", values, "parts rows", torch.float32)
    check.require(check["parts"] > 0, "values", "of shape [parts, rows] with parts > 0", str(list(values.shape)))
    check.tensor("tokens", tokens, "parts rows", torch.int32)
    check.one_of("out_dtype", out_dtype, (torch.int64, torch.int32))


@merge_argmax.fake
def _(values: Tensor, out_dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape[1], dtype=out_dtype)


@recipe
def _inputs(parts: int, rows: int, out_dtype: torch.dtype = torch.int64) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        # Values are integers, so that some of them are equal. Each row has its shards in random order.
        values = draw.normal(parts, rows).round()
        order = torch.rand(parts, rows, generator=draw.generator, device=draw.device).argsort(0)
        tokens = order * 25136 + draw.integers(0, 25136, parts, rows)
        return {"values": values, "tokens": tokens.int(), "out_dtype": out_dtype}

    return make


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(8, 6)(draw)
    arguments["values"][2::3, 0] = float("nan")
    arguments["values"][:, 1] = float("-inf")
    arguments["values"][3::2, 2] = float("inf")
    arguments["values"][:, 3] *= 0.0
    return arguments


@merge_argmax.cases
def _() -> list[Case]:
    return [
        Case("one part", _inputs(1, 5)),
        Case("three parts, int32 tokens", _inputs(3, 1, torch.int32)),
        Case("nan, inf, -inf and signed zeros", _odd_values),
        Case("no rows", _inputs(4, 0)),
        Case("decode 64 of 8 parts", _inputs(8, 64)),
        Case("decode 1024 of 72 parts", _inputs(72, 1024), large=True),
    ]


@merge_argmax.vary
def _(variation: Variation, values: Tensor, out_dtype: torch.dtype) -> dict[str, Any]:
    if variation.want is not Want.CAPTURED:
        return {}
    parts, rows = values.shape
    return _inputs(parts, rows, out_dtype)(variation.draw)


@merge_argmax.cost
def _(values: Tensor, tokens: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=1.0 * values.numel(), bytes=nbytes(values, tokens) + out_dtype.itemsize * values.shape[1])
