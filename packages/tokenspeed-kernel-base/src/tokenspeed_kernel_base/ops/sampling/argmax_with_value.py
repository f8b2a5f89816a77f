"""Greedy sampling with a sharded vocabulary: the best token of one shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.argmax import draw_logits

MOST_TOKENS = 2**31 - 1


@operator(
    "sampling",
    "argmax_with_value",
    formats=("logits",),
    traits={"vocab": int},
    outs=("values_out", "tokens_out"),
    exact=True,
    varying=("rows",),
)
def argmax_with_value(
    logits: Tensor,
    first_token: int = 0,
    values_out: Tensor | None = None,
    tokens_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row, and its token, for one vocabulary shard. Among equal logits, the first one wins.

    For a vocabulary that is sharded over devices, each device calls this operator with its logits and its first token.
    `merge_argmax` takes the stacked results of all devices. The order is that of `argmax`: NaN ranks above every number, 0 and -0
    are equal.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab > 0, of the tokens ``first_token`` to
            ``first_token + vocab - 1``.
        first_token: the token of the first column, at least 0. All tokens must be below 2^31.
        values_out: receives the largest logits.
        tokens_out: receives the tokens of the largest logits.

    Returns:
        values: float32 ``[rows]`` (float64 logits are rounded); tokens: int32 ``[rows]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import argmax_with_value
        >>> argmax_with_value(torch.tensor([[0.5, 2.0, 2.0], [5.0, -1.0, 3.0]]), first_token=100)
        (tensor([2., 5.]), tensor([101, 100], dtype=torch.int32))

    Safe in CUDA graphs. Results are exactly the same with every backend.
    """
    best = logits.argmax(-1, keepdim=True)
    return logits.gather(1, best).squeeze(1).float() + 0.0, (best.squeeze(1) + first_token).int()


@argmax_with_value.traits
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[-1]}


@argmax_with_value.check
def _(check: Checker, logits: Tensor, first_token: int) -> None:
    check.tensor("logits", logits, "rows vocab", FLOATS)
    vocab = check["vocab"]
    check.require(vocab > 0, "logits", "of shape [rows, vocab] with vocab > 0", str(list(logits.shape)))
    check.require(0 <= first_token <= MOST_TOKENS - vocab, "first_token", f"from 0 to 2^31 - 1 - {vocab}", first_token)


@argmax_with_value.fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int32)


@recipe
def _inputs(
    rows: int, vocab: int, first_token: int = 0, dtype: torch.dtype = torch.bfloat16, ends: bool = False
) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"logits": draw_logits(draw, rows, vocab, dtype, ends), "first_token": first_token}


def _odd_values(draw: Draw) -> dict[str, Any]:
    logits = draw.normal(5, 300)
    logits[0, 17::50] = float("nan")
    logits[0, 17] = -float("nan")  # the sign bit is set
    logits[1] = float("-inf")
    logits[2, [40, 200]] = float("inf")
    logits[3] = -logits[3].abs()
    logits[3, 100:] *= 0.0
    logits[4] = draw.integers(-2, 1, 300).float()
    return {"logits": logits, "first_token": 1000}


@argmax_with_value.cases
def _() -> list[Case]:
    return [
        Case("one token, float32", _inputs(1, 1, 0, torch.float32)),
        Case("odd vocab 1001, float16", _inputs(7, 1001, 3, torch.float16)),
        Case("the largest are the last and the first, odd vocab 1001", _inputs(5, 1001, 7, ends=True)),
        Case("the largest of 25136 are the last and the first", _inputs(2, 25136, 25136, ends=True)),
        Case("nan, inf, -inf, signed zeros and ties", _odd_values),
        Case("no rows", _inputs(0, 100)),
        Case("gpt-oss-120b decode 4, the second of 8 parts", _inputs(4, 25136, 25136)),
        Case("gpt-oss-120b decode 64, the last of 8 parts, float32", _inputs(64, 25136, 175952, torch.float32), large=True),
        Case("gpt-oss-120b decode 64, the whole vocabulary, float32", _inputs(64, 201088, 0, torch.float32), large=True),
        Case("llama-3 decode 256, the second of 2 parts", _inputs(256, 64128, 64128), large=True),
    ]


@argmax_with_value.cost
def _(logits: Tensor) -> Cost:
    return Cost(flops=1.0 * logits.numel(), bytes=nbytes(logits) + 8.0 * logits.shape[0])
