"""Causal self-attention of whole sequences (prefill)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import FLOATS, FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import ragged
from tokenspeed_kernel_base.ops.attention._softmax import Softmax, attend_ragged, empty_outputs, softmax_scale_of
from tokenspeed_kernel_base.ops.attention._traits import (
    SCALE_KINDS,
    SOFTMAX_KINDS,
    WINDOW_AND_SINK_KINDS,
    scale_traits,
    softmax_traits,
    window_and_sink_traits,
)
from tokenspeed_kernel_base.ops.attention._variations import vary_ragged


@operator(
    "attention",
    "mha_prefill",
    formats=("q", "k", "v"),
    traits={**SOFTMAX_KINDS, **WINDOW_AND_SINK_KINDS, **SCALE_KINDS},
    hints=("cu_seqlens_cpu",),
    varying=("batch", "tokens"),
    bounds=("max_seqlen",),
    padded="cu_seqlens",
    unlimited=("window_left",),
    scales=("q_scale", "k_scale", "v_scale"),
)
def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal self-attention of packed sequences (Vaswani et al., 2017, arXiv:1706.03762).

    The output is ``softmax(q @ k.T * softmax_scale) @ v`` within each sequence, where a token sees itself and earlier tokens. Query
    head h uses key and value head ``h // (heads // kv_heads)``. Scores, softmax and accumulators are float32 (float64 for a float64
    q); the output is rounded once. fp8 operands are dequantised: fp8 values times their scales. With fp8 operands, a kernel may
    also round the softmax probabilities P to fp8 before the P·v MMA, as FlashAttention-3 does (Shah et al., 2024,
    arXiv:2407.08608). This adds an error of about 2.5% to each probability, independent from key to key. Such kernels have the tag
    ``fp8_weights``, and the selection objective ``accuracy`` avoids them.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, head_dim]``.
        k: q's dtype ``[tokens, kv_heads, head_dim]``; kv_heads divides heads.
        v: q's dtype ``[tokens, kv_heads, v_head_dim]``.
        cu_seqlens: int32 ``[batch + 1]``, where each sequence begins, and where the last one ends: ``[0, 3, 3, 8]`` means
            sequences of 3, 0 and 5 tokens. Non-decreasing, starting with 0. Rows past the last offset are padding: they belong to
            no sequence, and the same rows of the outputs are not written.
        cu_seqlens_cpu: the same values on the host, if the caller has them. A hint, never required: with it, a kernel that needs
            the lengths on the host does not wait for the device.
        max_seqlen: an upper bound of the longest sequence, in tokens. None: the number of tokens is the only known bound.
        window_left: how many tokens to the left a query sees besides itself; -1, or 2^30 and more, means all. A model's "sliding
            window 128" is ``window_left=127``: the token and 127 before it.
        logit_cap: if positive, scores become ``logit_cap * tanh(score / logit_cap)``, after softmax_scale and before masking
            (Gemma Team, 2024, arXiv:2408.00118). 0 is off.
        sinks: any float dtype ``[heads]``. One extra logit for each query head, on the scale of the scores after softmax_scale
            and logit_cap. It enters the softmax's denominator only, and has no value vector.
        return_lse: whether to also return the log-sum-exp.
        softmax_scale: multiplies the dot products q·k; None is ``1 / sqrt(head_dim)``.
        q_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, multiplies q, for fp8 q only; the scale of a KV head applies to all
            its query heads.
        k_scale: the scale of k, like q_scale, for fp8 k only.
        v_scale: the scale of v, like q_scale, for fp8 v only.
        out: receives the output; must not overlap q, k or v.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the log-sum-exp,
        float32 ``[tokens, heads]``: the natural logarithm of the softmax's denominator. The denominator is the sum of
        ``exp(score)`` over visible keys, **plus exp(sink)** if sinks are given. `attn_merge_state` can merge partial results if
        exactly one of them includes the sinks.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            cu_seqlens are checked only if it lies in host memory.

    Example:
        Two sequences of 3 and 1 tokens; each token sees itself and the one before it ("sliding window 2").

        >>> import torch
        >>> from tokenspeed_kernel import mha_prefill
        >>> q = k = torch.zeros(4, 1, 8)
        >>> v = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(4, 1, 1)
        >>> cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> mha_prefill(q, k, v, cu_seqlens, window_left=1).flatten()
        tensor([1., 2., 4., 7.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads cu_seqlens on the host unless
    the hint is given.
    """
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), True, window_left, logit_cap, sinks)
    starts = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    result, lse = attend_ragged(q, k, v, starts, softmax, None, q_scale, k_scale, v_scale)
    return (result, lse) if return_lse else result


@mha_prefill.traits
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, k.shape[1], v.shape[2], logit_cap, return_lse),
        **window_and_sink_traits(window_left, sinks),
        **scale_traits(q_scale, k_scale, v_scale),
    }


@mha_prefill.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check.tensor("q", q, "tokens heads head_dim", FLOATS | FP8)
    check.tensor("k", k, "tokens kv_heads head_dim", q.dtype)
    check.tensor("v", v, "tokens kv_heads v_head_dim", q.dtype)
    check.divides("kv_heads", "heads")
    _checks.check_offsets(check, "cu_seqlens", cu_seqlens)
    check.bound("max_seqlen", max_seqlen)
    _checks.check_options(check, softmax_scale, logit_cap, window_left, sinks)
    _checks.check_scales(check, q, k, v, q_scale, k_scale, v_scale, "kv_heads")


@mha_prefill.check_values(host=("cu_seqlens",))
def _(
    check: Checker, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Sequence[int] | Tensor | None, max_seqlen: int | None
) -> None:
    _checks.check_values_ragged(check, q, cu_seqlens, cu_seqlens_cpu, max_seqlen)


@mha_prefill.fake
def _(q: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    return empty_outputs(q, v.shape[2], return_lse)


@mha_prefill.cases
def _() -> list[Case]:
    gpt_oss: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True}
    llama_70b: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128}
    gemma_2_9b: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 256, "softmax_scale": 0.0625, "logit_cap": 50.0}
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    each = ("q_scale", "k_scale", "v_scale")
    return [
        Case("one token, float32", ragged([1], dtype=torch.float32)),
        Case("one key head, lengths 0 to 33, float32, lse", ragged([5, 0, 33, 1], 6, 1, 40, dtype=torch.float32, return_lse=True)),
        Case("float64", ragged([7, 2], 4, 2, 16, dtype=torch.float64, return_lse=True)),
        Case("five query heads a key head, head_dim 80", ragged([70, 3], 10, 2, 80)),
        Case("v_head_dim 96 under head_dim 160", ragged([37, 65], 4, 2, 160, 96)),
        Case("logit cap 30, float16, scale 0.3", ragged([50, 20], dtype=torch.float16, logit_cap=30.0, softmax_scale=0.3)),
        Case("window of the token alone", ragged([9, 4], 4, 2, window_left=0)),
        Case("window, cap, sinks and lse together", ragged([90], 8, 4, sinks=True, window_left=31, logit_cap=5.0, return_lse=True)),
        Case("a key head for each head, head_dim 192, v_head_dim 128", ragged([40, 70], 3, 3, 192, 128)),
        Case("head_dim 80, a key head for each head", ragged([66, 5], 2, 2, 80)),
        Case("head_dim 96", ragged([66, 5], 4, 2, 96)),
        Case("head_dim 128, logit cap 50", ragged([66, 5], 4, 2, 128, logit_cap=50.0)),
        Case("head_dim 256, lse", ragged([70], 4, 2, 256, return_lse=True)),
        Case("window of 1000, five query heads a key head", ragged([66, 9], 5, 1, 64, window_left=1000)),
        Case("window of 150", ragged([300, 9], 4, 1, window_left=149)),
        Case("lengths known on the host", ragged([17, 64], hint=True)),
        Case("gpt-oss-120b sliding layer, 1 to 180 tokens", ragged([1, 127, 128, 180], **gpt_oss, window_left=127)),
        Case("gpt-oss-120b full layer, 1 to 100 tokens", ragged([1, 64, 100], **gpt_oss)),
        Case("llama-70b, 16 of its heads, 1 to 150 tokens, lse", ragged([1, 150, 64], 16, 2, 128, return_lse=True)),
        Case("head_dim 128 in a window of 100", ragged([150, 33], 8, 2, 128, sinks=True, window_left=99)),
        Case("fp8 without scales", ragged([40, 30], 8, 2, dtype=e4m3)),
        Case("fp8, a scale each, head_dim 128, lse", ragged([90, 3], 8, 2, 128, dtype=e4m3, scales=each, return_lse=True)),
        Case(
            "fp8, a scale a kv head, window, cap and sinks",
            ragged([70, 9], 8, 2, 80, dtype=e4m3, scales=each, scale_per_head=True, sinks=True, window_left=31, logit_cap=5.0),
        ),
        Case(
            "fp8 in a window of 20, head_dim 128", ragged([70, 9], 8, 2, 128, dtype=e4m3, scales=each, sinks=True, window_left=19)
        ),
        Case("fp8, head_dim 96", ragged([66, 5], 4, 2, 96, dtype=e4m3, scales=each)),
        Case("fp8, head_dim 192, v_head_dim 128", ragged([40, 70], 3, 3, 192, 128, e4m3, scales=each, scale_per_head=True)),
        Case("fp8 in a window of 30, head_dim 256", ragged([70, 9], 4, 2, 256, dtype=e4m3, scales=each, window_left=29)),
        Case("fp8 e5m2, values alone scaled", ragged([33, 18], 4, 1, 96, 64, e5m2, scales=("v_scale",))),
        Case("rows behind the last sequence, lse", ragged([40, 0, 66], 8, 2, padding=9, sinks=True, return_lse=True)),
        Case("rows behind the last sequence, in a window", ragged([70, 9], 8, 2, 128, padding=70, window_left=19)),
        Case("nothing but rows behind the last sequence", ragged([0], 8, 2, padding=5)),
        Case("empty sequences", ragged([0, 0])),
        Case("no sequences", ragged([], return_lse=True)),
        Case("no sequences, but rows behind", ragged([], 8, 2, padding=5)),
        Case("gpt-oss-120b sliding layer 4 x 4096", ragged([4096] * 4, **gpt_oss, window_left=127), large=True),
        Case("gpt-oss-120b sliding layer 16 x 8192", ragged([8192] * 16, **gpt_oss, window_left=127), large=True),
        *(
            Case(f"gpt-oss-120b full layer {batch} x {length}", ragged([length] * batch, **gpt_oss), large=True)
            for length in (1024, 4096, 8192)
            for batch in (1, 4, 16)
        ),
        Case("llama-8b 4 x 8192", ragged([8192] * 4, 32, 8, 128), large=True),
        Case("llama-70b 2 x 8192", ragged([8192] * 2, **llama_70b), large=True),
        Case("llama-70b 2 x 8192, fp8", ragged([8192] * 2, **llama_70b, dtype=e4m3, scales=each), large=True),
        Case("gpt-oss-120b full layer 4 x 8192, fp8", ragged([8192] * 4, **gpt_oss, dtype=e4m3, scales=each), large=True),
        Case("gemma-2-9b full layer 4 x 4096", ragged([4096] * 4, **gemma_2_9b), large=True),
        Case("gemma-2-9b sliding layer 2 x 8192", ragged([8192] * 2, **gemma_2_9b, window_left=4095), large=True),
        Case("gemma-3-12b full layer 4 x 4096", ragged([4096] * 4, 16, 8, 256, softmax_scale=0.0625), large=True),
        Case("phi-3-mini 4 x 4096", ragged([4096] * 4, 32, 32, 96), large=True),
        Case("phi-2 8 x 2048", ragged([2048] * 8, 32, 32, 80), large=True),
        Case("llama-70b 37 to 4000 tokens", ragged([37, 4000, 515, 1234], **llama_70b, return_lse=True), large=True),
    ]


@mha_prefill.work
def _(cu_seqlens: Tensor) -> dict[str, list[int]]:
    return {"lengths": cu_seqlens.diff().tolist()}


mha_prefill.vary(vary_ragged)


@mha_prefill.cost
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window_left: int, return_lse: bool) -> Cost:
    return _cost.ragged_cost(q, k, v, cu_seqlens, window_left, return_lse)
