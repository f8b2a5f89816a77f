"""AITER's signatures without annotations and with defaults that do not need AITER, from the source of ROCm/aiter.

`RELEASED` has the functions of v0.1.20 (commit fc2e5d57fb5b8ad8e7e23f7103071dde798ea618), which v0.1.20.post1 (20 August 2026) did
not change. It is the newest release whose source could be read at its own commit. `NEWER` has later sources, which could be read
without their commits: ``fused_moe`` and ``unified_attention`` of September 2026. The newest release that public pages name is
v0.1.24.post1 (commit c8325e00c88f1b97af75150a311f6704c2729f9c, 29 September 2026); its files could not be read. Main at commit
e4048607a535ace3a2b51ded31b1c8c2d45c0879 (22 August 2026) lies between both.

Every function only gained optional parameters. Therefore a call that both signatures accept is a call of each of these versions.
"""

from __future__ import annotations

import inspect

RELEASED = {
    # aiter/ops/mha.py
    "aiter.flash_attn_varlen_func": (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, "
        "logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic=False, "
        "return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None, cu_seqlens_q_padded=None, "
        "cu_seqlens_k_padded=None, sink_ptr=None)"
    ),
    # aiter/ops/triton/attention/unified_attention.py
    "aiter.ops.triton.attention.unified_attention.unified_attention": (
        "(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table, "
        "softcap, q_descale, k_descale, v_descale, q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None, "
        "shuffled_kv_cache=False, skip_reduce=False)"
    ),
    # aiter/fused_moe.py; the defaults of activation and quant_type are ActivationType.Silu and QuantType.No
    "aiter.fused_moe.fused_moe": (
        "(hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=None, quant_type=None, "
        "doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, block_size_M=None, "
        "num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, intermediate_pad=0, bias1=None, "
        "bias2=None, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, gate_mode='separated', shared_w1=None, "
        "shared_w2=None, shared_w1_scale=None, shared_w2_scale=None, shared_expert_id=-1)"
    ),
    # aiter/ops/shuffle.py
    "aiter.ops.shuffle.shuffle_weight": ("(x, layout=(16, 16), use_int4=False, is_guinterleave=False, gate_up=False, pad_k_to=0)"),
    "aiter.ops.shuffle.shuffle_scale": "(src, experts_cnt=None, is_guinterleave=False, gate_up=False)",
    "aiter.ops.shuffle.shuffle_weight_a16w4": "(src, NLane, gate_up)",
    "aiter.ops.shuffle.shuffle_scale_a16w4": "(src, experts_cnt, gate_up)",
}

NEWER = {
    **RELEASED,
    "aiter.ops.triton.attention.unified_attention.unified_attention": (
        RELEASED["aiter.ops.triton.attention.unified_attention.unified_attention"][:-1] + ", backend=None)"
    ),
    "aiter.fused_moe.fused_moe": RELEASED["aiter.fused_moe.fused_moe"][:-1] + ", stage2_scatter=None, output=None)",
}


def signature_of(text: str) -> inspect.Signature:
    """Parses the text of a signature."""
    namespace: dict[str, object] = {}
    exec(f"def function{text}: ...", namespace)
    function = namespace["function"]
    assert inspect.isfunction(function)
    signature = inspect.signature(function)
    assert str(signature) == text
    return signature


def bind(name: str, *args: object, **kwargs: object) -> inspect.BoundArguments:
    """Binds a call of the AITER function ``name`` to the signatures of all versions. Returns the arguments of the newest.

    Raises:
        TypeError: some version does not accept the call.
    """
    signature_of(RELEASED[name]).bind(*args, **kwargs)
    return signature_of(NEWER[name]).bind(*args, **kwargs)
