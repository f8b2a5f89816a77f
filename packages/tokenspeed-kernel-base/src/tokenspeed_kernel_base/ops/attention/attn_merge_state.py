"""Merges the partial attention results for two sets of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator


@operator(
    "attention",
    "attn_merge_state",
    formats=("out_a", "out_b"),
    traits={"v_head_dim": int},
    outs=("out", "lse"),
    in_place={"out": ("out_a", "out_b"), "lse": ("lse_a", "lse_b")},
    varying=("tokens",),
)
def attn_merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges the attention of the same queries to two sets of keys into the attention to both (split-KV merge).

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``, the rescaling of
    online softmax (Milakov & Gimelshein, 2018, arXiv:1805.02867). The merge is commutative, and associative up to rounding.
    Arithmetic is float32 (float64 for float64 outputs); each result is rounded once.

    A partial result without keys has ``lse = -inf``. Its output is ignored, so the merged result equals the other partial
    result. If neither result has keys, the output is 0 and the log-sum-exp -inf. A sink is part of the log-sum-exp of the call
    that receives it. So pass the sinks to exactly one of the two calls.

    Args:
        out_a: float16, bfloat16, float32 or float64 ``[tokens, heads, v_head_dim]``.
        lse_a: float32 ``[tokens, heads]``, natural logarithm, < inf.
        out_b: like out_a.
        lse_b: like lse_a.
        out: receives the merged output; may be out_a or out_b.
        lse: receives the merged log-sum-exp; may be lse_a or lse_b.

    Returns:
        The merged output, like out_a, and log-sum-exp, like lse_a.

    Raises:
        TypeError, ValueError: a dtype or shape is not as stated here. Raised before anything is launched.

    Example:
        One key with value 1, and three keys with mean value 5, all with equal scores:

        >>> import torch
        >>> from tokenspeed_kernel import attn_merge_state
        >>> one, three = torch.ones(1, 1, 1), torch.full((1, 1, 1), 5.0)
        >>> out, lse = attn_merge_state(one, torch.tensor([[1.0]]).log(), three, torch.tensor([[3.0]]).log())
        >>> round(out.item(), 5), round(lse.exp().item(), 5)
        (4.0, 4.0)

    Safe in CUDA graphs.
    """
    wide = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    wide_a, wide_b = lse_a.to(wide), lse_b.to(wide)
    largest = torch.maximum(wide_a, wide_b)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weight_a, weight_b = torch.exp(wide_a - shift).unsqueeze(-1), torch.exp(wide_b - shift).unsqueeze(-1)
    # The output of a partial result without keys may hold NaN, so it is replaced by 0 instead of being multiplied by 0.
    part_a = torch.where(weight_a == 0, 0.0, out_a.to(wide) * weight_a)
    part_b = torch.where(weight_b == 0, 0.0, out_b.to(wide) * weight_b)
    total = weight_a + weight_b
    merged = (part_a + part_b) / torch.where(total == 0, 1.0, total)
    return merged.to(out_a.dtype), (shift + torch.log(total.squeeze(-1))).to(lse_a.dtype)


@attn_merge_state.traits
def _(out_a: Tensor) -> dict[str, object]:
    return {"v_head_dim": out_a.shape[-1]}


@attn_merge_state.check
def _(check: Checker, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    check.tensor("out_a", out_a, "tokens heads v_head_dim", FLOATS)
    check.tensor("lse_a", lse_a, "tokens heads", torch.float32)
    check.same_shape("out_b", out_b, "out_a", out_a)
    check.same_shape("lse_b", lse_b, "lse_a", lse_a)


@attn_merge_state.fake
def _(out_a: Tensor, lse_a: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


@recipe
def _inputs(
    tokens: int, heads: int, v_head_dim: int, dtype: torch.dtype = torch.bfloat16, empty: bool = False
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        arguments = {
            "out_a": draw.normal(tokens, heads, v_head_dim, dtype=dtype),
            "lse_a": draw.normal(tokens, heads, scale=4.0),
            "out_b": draw.normal(tokens, heads, v_head_dim, dtype=dtype),
            "lse_b": draw.normal(tokens, heads, scale=4.0),
        }
        if empty:  # by token index modulo 4: partial result a has no keys, b has none, neither has keys, both have keys
            turn = torch.arange(tokens, device=draw.device) % 4
            for part, nothing in (("a", (turn == 0) | (turn == 2)), ("b", (turn == 1) | (turn == 2))):
                arguments[f"lse_{part}"][nothing] = -torch.inf
                arguments[f"out_{part}"][nothing] = torch.nan
        return arguments

    return make


@attn_merge_state.cases
def _() -> list[Case]:
    return [
        Case("one token, float32", _inputs(1, 1, 1, torch.float32)),
        Case("float64", _inputs(5, 3, 16, torch.float64)),
        Case("odd sizes, float16", _inputs(7, 5, 33, torch.float16)),
        Case("empty parts", _inputs(9, 4, 64, empty=True)),
        Case("gpt-oss-120b decode 64", _inputs(64, 64, 64)),
        Case("no tokens", _inputs(0, 8, 64)),
        Case("deepseek-v3 prefill 8192", _inputs(8192, 128, 128), large=True),
        Case("llama-70b prefill 16384, float32", _inputs(16384, 64, 128, torch.float32), large=True),
    ]


@attn_merge_state.cost
def _(out_a: Tensor, lse_a: Tensor) -> Cost:
    return Cost(flops=3.0 * out_a.numel(), bytes=3.0 * nbytes(out_a, lse_a))
