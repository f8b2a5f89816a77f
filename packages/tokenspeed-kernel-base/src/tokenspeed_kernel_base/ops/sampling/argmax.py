"""Greedy sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator


@operator("sampling", "argmax", formats=("logits",), traits={"vocab": int}, exact=True, varying=("rows",))
def argmax(logits: Tensor, out_dtype: torch.dtype = torch.int64, out: Tensor | None = None) -> Tensor:
    """Greedy sampling: returns the token with the largest logit of each row. Among equal logits, the first one wins.

    NaN ranks above every number, so a row with NaNs gives the index of its first NaN. A row of ``-inf`` gives 0. 0 and -0 are
    equal.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab > 0.
        out_dtype: int64 or int32.
        out: ``out_dtype [rows]``, receives the result.

    Returns:
        ``out_dtype [rows]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import argmax
        >>> argmax(torch.tensor([[0.1, 2.0, 2.0], [5.0, -1.0, float("nan")]]))
        tensor([1, 2])

    Safe in CUDA graphs. Results are exactly the same with every backend.
    """
    return torch.argmax(logits, dim=-1).to(out_dtype)


@argmax.traits
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[-1]}


@argmax.check
def _(check: Checker, logits: Tensor, out_dtype: torch.dtype) -> None:
    check.tensor("logits", logits, "rows vocab", FLOATS)
    check.require(check["vocab"] > 0, "logits", "of shape [rows, vocab] with vocab > 0", str(list(logits.shape)))
    check.one_of("out_dtype", out_dtype, (torch.int64, torch.int32))


@argmax.fake
def _(logits: Tensor, out_dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=out_dtype)


def draw_logits(draw: Draw, rows: int, vocab: int, dtype: torch.dtype, ends: bool) -> Tensor:
    """Draws logits. With ``ends``, the largest logit is the last one in even rows, and the first one in odd rows."""
    logits = draw.normal(rows, vocab, dtype=dtype, scale=4.0)
    if ends:
        logits[::2, -1] = logits[1::2, 0] = 100.0
    return logits


@recipe
def _inputs(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16, ends: bool = False) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"logits": draw_logits(draw, rows, vocab, dtype, ends)}


def _ties(draw: Draw) -> dict[str, Any]:
    return {"logits": draw.integers(0, 3, 32, 1000).float()}


def _odd_values(draw: Draw) -> dict[str, Any]:
    logits = draw.normal(5, 300)
    logits[0, 17::50] = float("nan")
    logits[0, 17] = -float("nan")  # the sign bit is set
    logits[1] = float("-inf")
    logits[2, [40, 200]] = float("inf")
    logits[3] = -logits[3].abs()
    logits[3, 100:] *= 0.0
    logits[4, 250] = float("nan")
    logits[4, 7] = float("inf")
    return {"logits": logits}


@argmax.cases
def _() -> list[Case]:
    return [
        Case("one token, float32", _inputs(1, 1, torch.float32)),
        Case("gpt-oss-120b decode 4", _inputs(4, 201088)),
        Case("the largest are the last and the first, odd vocab 1001", _inputs(5, 1001, ends=True)),
        Case("the largest of 201088 are the last and the first, float32", _inputs(2, 201088, torch.float32, ends=True)),
        Case("odd vocab 1001, float16", _inputs(7, 1001, torch.float16)),
        Case("int32 tokens", lambda draw: {**_inputs(5, 3000)(draw), "out_dtype": torch.int32}),
        Case("a third of the row ties", _ties),
        Case("nan, inf, -inf and signed zeros", _odd_values),
        Case("no rows", _inputs(0, 100)),
        Case("gpt-oss-120b decode 256", _inputs(256, 201088), large=True),
        Case("gpt-oss-120b decode 64", _inputs(64, 201088), large=True),
        Case("gpt-oss-120b decode 64, float32", _inputs(64, 201088, torch.float32), large=True),
        Case("gpt-oss-120b decode 1, float32", _inputs(1, 201088, torch.float32), large=True),
        Case("llama-3 decode 256, float32", _inputs(256, 128256, torch.float32), large=True),
    ]


@argmax.cost
def _(logits: Tensor, out_dtype: torch.dtype) -> Cost:
    return Cost(flops=1.0 * logits.numel(), bytes=nbytes(logits) + out_dtype.itemsize * logits.shape[0])
