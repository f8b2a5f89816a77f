"""Device code of `_combine`: the weighted sum over each token's top-k slots."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def combine_kernel(
    slots_ptr,
    slots_stride_part,
    weights_ptr,
    weights_stride_token,
    weights_stride_slot,
    ids_ptr,
    ids_stride_token,
    ids_stride_slot,
    out_ptr,
    out_stride_token,
    out_stride_feature,
    hidden,
    num_experts,
    TOP_K: tl.constexpr,  # constexpr, so that the loads of all slots are in flight together
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Computes BLOCK features of one token: the sum over its slots of weight times result, in float32, in the order of slots.
    #
    # ``slots_ptr``: the down projection's results, ``[PARTS, tokens * TOP_K, hidden]``. With split-K, the PARTS partial sums of a
    # slot are added first. Slots whose expert id is not from 0 to ``num_experts - 1`` are skipped, without reading their rows.
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * ids_stride_token + slot * ids_stride_slot)
        # A slot without an expert has an unwritten row and an arbitrary weight. Both may be NaN.
        has_expert = (expert >= 0) & (expert < num_experts)
        present = tl.where(has_expert, hidden, 0)
        weight = tl.load(weights_ptr + token * weights_stride_token + slot * weights_stride_slot)
        source = slots_ptr + (token * TOP_K + slot) * hidden + feature
        value = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            value += tl.load(source + part * slots_stride_part, mask=feature < present, other=0.0).to(tl.float32)
        total += tl.where(has_expert, weight * value, 0.0)
    target = out_ptr + token * out_stride_token + feature * out_stride_feature
    tl.store(target, round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)
