"""Causal self-attention of whole sequences, for multi-head latent attention before absorption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import ragged
from tokenspeed_kernel_base.ops.attention._softmax import Softmax, attend_ragged, empty_outputs, softmax_scale_of
from tokenspeed_kernel_base.ops.attention._traits import softmax_traits
from tokenspeed_kernel_base.ops.attention._variations import vary_ragged


@operator(
    "attention",
    "mla_prefill",
    formats=("q", "k", "v"),
    hints=("cu_seqlens_cpu",),
    varying=("batch", "tokens"),
    bounds=("max_seqlen",),
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of whole sequences to themselves, with keys and values expanded from their latents.

    Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434) in its plain form, which is the cheaper one where a sequence
    has many queries: every head has keys and values of its own, and a key is the expanded latent and the shared rotary part
    side by side. The same as `mha_prefill` of as many key heads as query heads; declared apart because head_dim and v_head_dim
    differ here (192 and 128 in DeepSeek-V3) and kernels are made for that. Accumulates in float32 (float64 where q is) and rounds
    the output once.

    Args:
        q: float16, bfloat16, float32 or float64 ``[tokens, heads, head_dim]``, nope and rotary part side by side.
        k: like q. Its rotary part may be a broadcast view.
        v: like q, ``[tokens, heads, v_head_dim]``.
        cu_seqlens: int32 ``[batch + 1]``, where each sequence begins, and the number of tokens.
        cu_seqlens_cpu: the same values on the host, a hint; never required.
        max_seqlen: an upper bound of the longest sequence, in tokens. None: none is known but ``tokens``.
        logit_cap: where positive, scores become ``logit_cap * tanh(score / logit_cap)``; 0 is off.
        return_lse: also return the log-sum-exp.
        softmax_scale: multiplies the products of q and k; None is ``1 / sqrt(head_dim)``.
        out: receives the output. It must not overlap q, k or v.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype. With return_lse also the natural log-sum-exp, float32
        ``[tokens, heads]``.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as said here; nothing has been launched then. Values of cu_seqlens
            are looked at only where it lies in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import mla_prefill
        >>> q = k = torch.zeros(3, 1, 12)
        >>> v = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)
        >>> mla_prefill(q, k, v, torch.tensor([0, 3], dtype=torch.int32)).flatten()
        tensor([1., 2., 3.])

    Safe in CUDA graphs where a kernel serves it; the reference reads cu_seqlens on the host unless the hint is given.
    """
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), logit_cap=logit_cap)
    result, lse = attend_ragged(q, k, v, offsets.tolist() if isinstance(offsets, Tensor) else offsets, softmax)
    return (result, lse) if return_lse else result


@mla_prefill.traits
def _(q: Tensor, k: Tensor, v: Tensor, logit_cap: float, return_lse: bool) -> dict[str, object]:
    return softmax_traits(q, k.shape[1], v.shape[2], logit_cap, return_lse)


@mla_prefill.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    logit_cap: float,
    softmax_scale: float | None,
) -> None:
    check.tensor("q", q, "tokens heads head_dim", FLOATS)
    check.require(check["heads"] > 0, "heads of q", "positive", 0)
    check.tensor("k", k, "tokens heads head_dim", q.dtype)
    check.tensor("v", v, "tokens heads v_head_dim", q.dtype)
    _checks.check_offsets(check, "cu_seqlens", cu_seqlens)
    check.bound("max_seqlen", max_seqlen)
    _checks.check_options(check, softmax_scale, logit_cap)


@mla_prefill.check_values(host=("cu_seqlens",))
def _(
    check: Checker, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Sequence[int] | Tensor | None, max_seqlen: int | None
) -> None:
    _checks.check_values_ragged(check, q, cu_seqlens, cu_seqlens_cpu, max_seqlen)


@mla_prefill.fake
def _(q: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    return empty_outputs(q, v.shape[2], return_lse)


@mla_prefill.cases
def _() -> list[Case]:
    deepseek_v3: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128, "softmax_scale": 0.1352}
    return [
        Case("one token, float32", ragged([1], 2, 2, 24, 16, dtype=torch.float32)),
        Case("lengths 0 to 33, float32, lse", ragged([5, 0, 33, 1], 3, 3, 40, 24, dtype=torch.float32, return_lse=True)),
        Case("float64", ragged([7, 2], 2, 2, 12, 8, dtype=torch.float64)),
        Case("logit cap 30, float16", ragged([50, 20], 4, 4, 96, 64, dtype=torch.float16, logit_cap=30.0)),
        Case("lengths known on the host", ragged([17, 64], 4, 4, 96, 64, hint=True)),
        Case("deepseek-v3, 8 of its heads, 1 to 300 tokens", ragged([1, 129, 300], 8, 8, **deepseek_v3)),
        Case("no sequences", ragged([], 8, 8, **deepseek_v3, return_lse=True)),
        Case("deepseek-v3 4 x 4096", ragged([4096] * 4, 128, 128, **deepseek_v3), large=True),
        Case("deepseek-v3, 16 of its heads, 2 x 8192", ragged([8192] * 2, 16, 16, **deepseek_v3, return_lse=True), large=True),
    ]


@mla_prefill.work
def _(cu_seqlens: Tensor) -> dict[str, list[int]]:
    return {"lengths": cu_seqlens.diff().tolist()}


mla_prefill.vary(vary_ragged)


@mla_prefill.cost
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, return_lse: bool) -> Cost:
    return _cost.ragged_cost(q, k, v, cu_seqlens, -1, return_lse)
