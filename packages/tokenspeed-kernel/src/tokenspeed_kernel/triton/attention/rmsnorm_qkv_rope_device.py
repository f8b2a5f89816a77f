"""Device code of `rmsnorm_qkv_rope`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def _store_to_cache(cache, values, slot, inside, dim, strides_page, stride_slot, stride_head, stride_dim, head, page_size):
    place = (slot // page_size) * strides_page + (slot % page_size) * stride_slot + head * stride_head
    tl.store(cache + place[:, None] + dim[None, :] * stride_dim, values, mask=inside[:, None])


@triton.jit
def rmsnorm_qkv_rope_kernel(
    x,
    residual,
    norm_weight,
    qkv_weight,
    bias,
    positions,
    cos_sin_cache,
    out,
    residual_out,
    k_cache,
    v_cache,
    slot_mapping,
    tokens,
    hidden,
    heads,
    kv_heads,
    page_size,
    eps,
    x_stride,
    residual_stride,
    norm_stride,
    weight_row,
    bias_stride,
    positions_stride,
    table_stride,
    out_stride,
    residual_out_stride,
    k_page,
    k_slot,
    k_head,
    k_dim,
    v_page,
    v_slot,
    v_head,
    v_dim,
    slots_stride,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program for ``PAIRS`` pairs of elements of a head, which turn together, of all tokens."""
    half: tl.constexpr = HEAD_DIM // 2
    dtype = out.dtype.element_ty
    program = tl.program_id(0)
    head = program // (half // PAIRS)
    first = program % (half // PAIRS) * PAIRS
    token = tl.arange(0, TOKENS)
    real = token < tokens
    row = token.to(tl.int64)
    # Elements of a pair side by side, so that they can be told apart in the product.
    column = tl.arange(0, 2 * PAIRS)
    output = head * HEAD_DIM + first + column // 2 + column % 2 * half
    weight_rows = qkv_weight + output.to(tl.int64)[:, None] * weight_row

    squares = tl.zeros((TOKENS,), tl.float32)
    product = tl.zeros((TOKENS, 2 * PAIRS), tl.float32)
    for start in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < hidden
        weight = tl.load(weight_rows + at[None, :], mask=inside[None, :], other=0.0)
        both = real[:, None] & inside[None, :]
        total = tl.load(x + row[:, None] * x_stride + at[None, :], mask=both, other=0.0)
        if HAS_RESIDUAL:
            added = tl.load(residual + row[:, None] * residual_stride + at[None, :], mask=both, other=0.0)
            total = round_to(total.to(tl.float32) + added.to(tl.float32), dtype, INTERPRETED)
            if start == program * BLOCK_K:  # programs share the sum out among them
                tl.store(residual_out + row[:, None] * residual_out_stride + at[None, :], total, mask=both)
        wide = total.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        scale = tl.load(norm_weight + at * norm_stride, mask=inside, other=0.0).to(tl.float32)
        # The root mean square is known at the end only, and divides the product as it would the factor.
        scaled = round_to(wide * scale[None, :], dtype, INTERPRETED)
        product = tl.dot(scaled.to(DTYPE), tl.trans(weight).to(DTYPE), product, input_precision="ieee")

    product = product * tl.rsqrt(squares / hidden + eps)[:, None]
    if BIAS:
        product += tl.load(bias + output * bias_stride).to(tl.float32)[None, :]
    product = round_to(product, dtype, INTERPRETED).to(tl.float32)
    a, b = tl.split(tl.reshape(product, (TOKENS, PAIRS, 2)))
    pair = first + tl.arange(0, PAIRS)
    if head < heads + kv_heads:
        position = tl.load(positions + token * positions_stride, mask=real, other=0).to(tl.int64)
        angles = cos_sin_cache + position[:, None] * table_stride + pair[None, :]
        cos, sin = tl.load(angles), tl.load(angles + half)
        a, b = a * cos - b * sin, b * cos + a * sin
    a, b = round_to(a, dtype, INTERPRETED), round_to(b, dtype, INTERPRETED)
    place = out + row[:, None] * out_stride + head * HEAD_DIM + pair[None, :]
    tl.store(place, a, mask=real[:, None])
    tl.store(place + half, b, mask=real[:, None])
    if WRITE and head >= heads:
        slot = tl.load(slot_mapping + token * slots_stride, mask=real, other=-1).to(tl.int64)
        written = slot >= 0
        if head < heads + kv_heads:
            kv_head = head - heads
            _store_to_cache(k_cache, a, slot, written, pair, k_page, k_slot, k_head, k_dim, kv_head, page_size)
            _store_to_cache(k_cache, b, slot, written, pair + half, k_page, k_slot, k_head, k_dim, kv_head, page_size)
        else:
            kv_head = head - heads - kv_heads
            _store_to_cache(v_cache, a, slot, written, pair, v_page, v_slot, v_head, v_dim, kv_head, page_size)
            _store_to_cache(v_cache, b, slot, written, pair + half, v_page, v_slot, v_head, v_dim, kv_head, page_size)
