"""MLA prefill without weight absorption, by the kernel of `prefill`.

Each query head has its own KV head. head_dim is 192, v_head_dim 128.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.attention.prefill.launch import attend
from tokenspeed_kernel_nvidia.sm90.attention.supported import RAGGED, RAGGED_FP8


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    logit_cap: float,
    return_lse: bool,
    softmax_scale: float | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    window_left: int,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes latent attention of whole sequences, or of queries to K/V of other lengths: launches the kernel on arguments that
    the operator has checked.

    Attention with a window is causal.
    """
    if not k.shape[0] and q.shape[0]:  # no query sees a key, but TMA descriptors need memory to describe
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    return attend(
        q, k, v, k.shape[1], 0, cu_seqlens, cu_seqlens_kv, None, is_causal, window_left, logit_cap, None, return_lse,
        softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip


_FORMS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("", RAGGED, {"logit_cap": any, "is_causal": any}),
    ("_window", RAGGED, {"logit_cap": any, "is_causal": {True}, "sliding_window": {True}}),
    ("_fp8", RAGGED_FP8, {"scaled": any, "is_causal": any}),
    ("_fp8_window", RAGGED_FP8, {"scaled": any, "is_causal": {True}, "sliding_window": {True}}),
)
for _form, _formats, _traits in _FORMS:
    register_kernel(
        "attention",
        "mla_prefill",
        name=f"cutedsl_mla_prefill{_form}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=_formats,
        traits={"head_dim": 192, "v_head_dim": 128, "gqa_ratio": 1, "return_lse": any, "own_kv_lengths": any, **_traits},
        priority=Priority.SPECIALIZED,
        tags={"determinism", *(("fp8_weights",) if _formats is RAGGED_FP8 else ())},
    )(mla_prefill)
