"""Attention to a paged cache of latents, for decoding and extending.

All heads read the same keys, and the values are the first columns of the keys: a block of latents that has been read serves both
products. The rows of a tile are heads, then tokens, so that 128 heads make two full tiles of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.attention import _online_softmax as softmax
from tokenspeed_kernel.triton.attention._fp8 import fp8_operand, widened
from tokenspeed_kernel.triton.attention._mla_schedule import schedule_units
from tokenspeed_kernel.triton.attention._split_kv import OVERLAPPING, merge_units
from tokenspeed_kernel.triton.common import dense, for_architecture, multiprocessors
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype


@dataclass(frozen=True)
class Tile:
    """How a program walks its keys.

    Attributes:
        block_m, block_n: rows, and keys at once.
        num_warps, num_stages: of a program, and blocks of keys on the way, the one at work included.
        transposed: keys are the rows of the scores, and columns of the latents those of the accumulated values: matrix units that
            take 64 rows at least are then full with few queries.
        apart: the warps are laid out for each product alone, see `_attend_latent`.
        parts: into how many parts of a block the sums of weights are kept until the end, one for the warps that have those keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    transposed: bool = False
    apart: bool = False
    parts: int = 1


# By the most rows of a sequence. On an H200, bfloat16, 64 sequences of 8192 keys:
# 128 heads (two tiles of 64 rows): 350 us, 417 TFLOP/s. Not apart 541, transposed 418, 32 keys at once 592 and more, 32 rows
# 635; loads by tensor maps were no faster.
# 16 heads: 150 us, 4.0 TB/s. 8 warps, apart 155; not transposed, 16 rows 228 and more, 64 rows 195.
_TILES = {
    "sm_90": {
        16: Tile(16, 64, 4, 2, transposed=True),
        32: Tile(32, 64, 8, 2, transposed=True, apart=True, parts=4),
        64: Tile(64, 64, 8, 2, apart=True, parts=2),
    },
    # What fits 64 KB of shared memory, and elsewhere what spills no registers.
    "gfx942": {16: Tile(16, 32, 4, 1)},
    "gfx950": {16: Tile(16, 32, 4, 1)},
    "any": {16: Tile(16, 64, 8, 2)},
    # The interpreter takes its time by the operation.
    "cpu": {16: Tile(16, 64, 1, 1), 128: Tile(128, 64, 1, 1)},
}
_FLOAT32 = Tile(16, 16, 4, 2)
_WIDE = Tile(16, 16, 4, 1)  # more than 576 columns


def tile_for(rows: int, block_c: int, block_r: int, dtype: torch.dtype, fp8_cache: bool, device: torch.device) -> Tile:
    """The tile for sequences of ``rows`` rows at most, and a cache of that many columns, those that only fill up included."""
    if block_c + block_r > 576:
        return _WIDE
    if dtype == torch.float32:
        return _FLOAT32
    # Below 64 columns a transposed product falls to other instructions than the scores, and results are wrong (Triton 3.6, sm_90).
    tiles = for_architecture(_TILES, device) if block_c >= 64 else _TILES["any"]
    # A transposed product has the keys in its first operand, which comes out of registers if it has to be widened first.
    fitting = [most for most in tiles if rows <= most and not (fp8_cache and tiles[most].transposed)]
    return tiles[min(fitting, default=max(tiles))]


@triton.jit
def _scores(q, k, acc, TRANSPOSED: tl.constexpr):
    """``q @ k.T + acc`` [M, N], or its transpose."""
    if TRANSPOSED:
        products = tl.dot(k, tl.trans(q), tl.zeros([k.shape[0], q.shape[0]], tl.float32) + acc, input_precision="ieee")
    else:
        products = tl.dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32) + acc, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["batch", "capacity", "q_bound", "tiles"])
def _attend_latent(
    q,  # [tokens, HEADS, RANK + ROPE]
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE]
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has Q_LEN queries
    q_scale,
    kv_scale,
    out,
    lse,
    units,  # a `Schedule`'s, or None where every sequence is one
    partial,
    partial_lse,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    kv_stride_p,
    kv_stride_t: tl.constexpr,
    kv_stride_d,
    page_table_stride_b,
    page_table_stride_p,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    batch,
    capacity,
    q_bound,
    tiles,
    multiplier,
    cap_log2,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    Q_FP8: tl.constexpr,
    FP8: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    APART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of the rows of a sequence, and all of its keys or a unit of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # for the schedule
    # Tiles of the same keys lie side by side: the second finds them in the cache of the device.
    sequence = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if units is not None:
        unit = units + tl.program_id(0) // tiles * 4
        sequence = tl.load(unit)
        if sequence < 0:
            return
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
    if cu_seqlens_q is None:
        q_len = q_bound
        first_token = sequence.to(tl.int64) * q_len
    else:
        tile = tiles - 1 - tile  # the later queries see the most keys
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - first_token.to(tl.int32)
        if tile * BLOCK_M >= q_len * HEADS:
            return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * HEADS
    token = first_token + row // HEADS
    head = row % HEADS
    position = length - q_len + row // HEADS
    seen = length
    if CAUSAL:
        seen = tl.maximum(length - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) + 1, 0)
    begin = tile * 0
    end = (length + BLOCK_N - 1) // BLOCK_N
    if units is not None:
        begin, end, part = tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
    end = tl.minimum(end, (seen + BLOCK_N - 1) // BLOCK_N)

    c = tl.arange(0, BLOCK_C)
    q_at = q + token * q_stride_t + head * q_stride_h
    q_latent = tl.load(q_at[:, None] + c[None, :] * q_stride_d, mask=real[:, None] & (c < RANK)[None, :], other=0.0)
    r = tl.arange(0, BLOCK_R)
    if ROPE > 0:
        q_rope_at = q_at[:, None] + (RANK + r)[None, :] * q_stride_d
        q_rope = tl.load(q_rope_at, mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    q_latent = widened(q_latent, DTYPE, Q_FP8)
    if ROPE > 0:
        q_rope = widened(q_rope, DTYPE, Q_FP8)
    if q_scale is not None:
        multiplier *= tl.load(q_scale)
    if kv_scale is not None:
        multiplier *= tl.load(kv_scale)

    pages = page_table + sequence.to(tl.int64) * page_table_stride_b
    n = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if PARTS == 1:
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, PARTS], tl.float32)
    if TRANSPOSED:
        acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    page = begin * 0
    if PAGE_SIZE % BLOCK_N == 0 and begin < end:
        page = tl.load(pages + begin // (PAGE_SIZE // BLOCK_N) * page_table_stride_p)
    for block in tl.range(begin, end, num_stages=STAGES):
        # Keys that no query sees are not read, as they may be NaN: the last one that some query sees stands in.
        key = block * BLOCK_N + n
        held = tl.minimum(n, seen - 1 - block * BLOCK_N)
        if PAGE_SIZE % BLOCK_N == 0:
            block_at = kv_cache + page.to(tl.int64) * kv_stride_p + block % (PAGE_SIZE // BLOCK_N) * (BLOCK_N * kv_stride_t)
            latent_at = block_at + (held[:, None] * kv_stride_t + c[None, :] * kv_stride_d)
            rope_at = block_at + (held[:, None] * kv_stride_t + (RANK + r)[None, :] * kv_stride_d)
            page = tl.load(pages + tl.minimum(block + 1, end - 1) // (PAGE_SIZE // BLOCK_N) * page_table_stride_p)
        else:
            held += block * BLOCK_N
            page_of = tl.load(pages + held // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            key_at = kv_cache + (page_of * kv_stride_p + held % PAGE_SIZE * kv_stride_t)
            latent_at = key_at[:, None] + c[None, :] * kv_stride_d
            rope_at = key_at[:, None] + (RANK + r)[None, :] * kv_stride_d
        if BLOCK_C == RANK:
            latent = tl.load(latent_at)
        else:
            latent = tl.load(latent_at, mask=(c < RANK)[None, :], other=0.0)
        if BLOCK_R == ROPE:
            rope = tl.load(rope_at)
        elif ROPE > 0:
            rope = tl.load(rope_at, mask=(r < ROPE)[None, :], other=0.0)
        # Always so. But what is in a branch comes behind the loads of the next block, which are then on the way meanwhile; without,
        # the compiler puts them behind the products.
        if block >= begin:
            values = widened(latent, DTYPE, FP8)
            if ROPE > 0:
                rotary = widened(rope, DTYPE, FP8)
            if APART:
                # Always so, again. The compiler lays the warps out for a product by what its result leads to, as far as a branch's
                # end: for another product, in a column, each half of the warps would repeat the other's scores. The other branches
                # hold what costs enough not to be moved out.
                if block < end:
                    products = _scores(q_rope, rotary, 0.0, TRANSPOSED)
                else:
                    products = _scores(q_rope, rotary, 1.0, TRANSPOSED)
                if block >= 0:
                    products = _scores(q_latent, values, products, TRANSPOSED)
            else:
                products = _scores(q_latent, values, 0.0, TRANSPOSED)
                if ROPE > 0:
                    products = _scores(q_rope, rotary, products, TRANSPOSED)
            if TRANSPOSED:
                products = tl.trans(products)
            if CAUSAL:
                visible = key[None, :] <= position[:, None]
            else:
                visible = (key < length)[None, :]
            scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
            scores = tl.where(visible, scores, -float("inf"))
            if PARTS == 1:
                weights, decay, largest, total = softmax.step_scored(largest, total, scores, factor)
            else:  # the sums over the columns of each warp alone; `decayed` is `decay` in the same layout
                raised = tl.maximum(largest, tl.max(scores, 1) * factor)
                shift = tl.where(raised == -float("inf"), 0.0, raised)
                weights = tl.exp2(scores * factor - shift[:, None])
                decay = tl.exp2(largest - shift)
                decayed = tl.reshape(tl.broadcast_to(decay[:, None], [BLOCK_M, BLOCK_N]), [BLOCK_M, PARTS, BLOCK_N // PARTS])
                total = total * tl.max(decayed, 2) + tl.sum(tl.reshape(weights, [BLOCK_M, PARTS, BLOCK_N // PARTS]), 2)
                largest = raised
            weights = weights.to(DTYPE)
            if TRANSPOSED:
                acc = tl.dot(tl.trans(values), tl.trans(weights), acc * decay[None, :], input_precision="ieee")
            else:
                acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")

    if PARTS > 1:
        total = tl.sum(total, 1)
    if TRANSPOSED:
        acc = tl.trans(acc)
    acc *= softmax.reciprocal_of(total)[:, None]
    if kv_scale is not None:
        acc *= tl.load(kv_scale)
    stored = real[:, None] & (c < RANK)[None, :]
    if units is not None and part >= 0:
        at_row = part.to(tl.int64) * (q_bound * HEADS) + row
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(partial_lse + at_row, shift + tl.log2(total), mask=real)
        tl.store(partial + at_row[:, None] * RANK + c[None, :], acc, mask=stored)
        return
    out_at = out + (token * out_stride_t + head * out_stride_h)[:, None] + c[None, :] * out_stride_d
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + token * HEADS + head, softmax.log_sum_exp(largest, total), mask=real)


_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def attend_latent(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    is_causal: bool,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a cache of latents: ``max_seqlen_q`` of every sequence, or as ``cu_seqlens_q`` says."""
    cache_seqlens, cu_seqlens_q = cache_seqlens.contiguous(), dense(cu_seqlens_q)
    tokens, heads, width = q.shape
    batch, page_size, device = cache_seqlens.shape[0], kv_cache.shape[1], q.device
    if out is None:
        out = q.new_empty(tokens, heads, kv_lora_rank, dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    if tokens == 0 or heads == 0:
        return out if lse is None else (out, lse)

    dtype = output_dtype(q)
    dtype = for_architecture({"cpu": torch.float32, "any": dtype}, device)  # interpreted products of bfloat16 are wrong
    rows = min(max_seqlen_q, tokens) * heads
    # Where sequences differ, the bound differs from call to call; the kernel that merges is compiled for each that it is given.
    q_bound = max_seqlen_q if cu_seqlens_q is None else triton.next_power_of_2(min(max_seqlen_q, tokens))
    rope = width - kv_lora_rank
    block_c = triton.next_power_of_2(max(16, kv_lora_rank))
    block_r = triton.next_power_of_2(max(16, rope))
    tile = tile or tile_for(rows, block_c, block_r, output_dtype(q), kv_cache.dtype in FP8, device)
    tiles = triton.cdiv(rows, tile.block_m)
    capacity = min(max_seqlen_k, page_table.shape[1] * page_size)
    sm_count = for_architecture({"cpu": 2, "any": multiprocessors(device)}, device)  # interpreted programs run one by one
    early = for_architecture(OVERLAPPING, device)
    schedule = schedule_units(cache_seqlens, capacity, tiles, sm_count, tile.block_n, early)
    early = early and schedule is not None
    units, partial, partial_lse = None, None, None
    if schedule is not None:
        units = schedule.units
        partial, partial_lse = schedule.plan.partials(1, q_bound * heads, kv_lora_rank, device)
    multiplier, cap_log2 = softmax.score_factors(softmax_scale, logit_cap)
    q, q_fp8 = fp8_operand(q)
    kv_cache, fp8 = fp8_operand(kv_cache)
    _attend_latent[((batch if units is None else units.shape[0]) * tiles,)](
        q,
        kv_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        q_scale,
        kv_scale,
        out,
        lse,
        units,
        partial,
        partial_lse,
        *q.stride(),
        *kv_cache.stride(),
        *page_table.stride(),
        *out.stride(),
        batch,
        capacity,
        q_bound,
        tiles,
        multiplier,
        cap_log2,
        HEADS=heads,
        RANK=kv_lora_rank,
        ROPE=rope,
        PAGE_SIZE=page_size,
        CAUSAL=is_causal,
        HAS_CAP=logit_cap > 0,
        DTYPE=_TRITON_DTYPES[dtype],
        Q_FP8=q_fp8,
        FP8=fp8,
        TRANSPOSED=tile.transposed,
        APART=tile.apart and rope > 0,
        PARTS=tile.parts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_C=block_c,
        BLOCK_R=block_r,
        STAGES=tile.num_stages,
        EARLY=early,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if early else {}),
    )
    if schedule is not None and partial is not None and partial_lse is not None:
        merge_units(
            schedule.plan,
            partial,
            partial_lse,
            out,
            lse,
            None,
            cache_seqlens,
            capacity,
            q_bound,
            -1,
            tile.block_n,
            sm_count,
            early,
            cu_seqlens_q=cu_seqlens_q,
            parts=schedule.parts,
        )
    return out if lse is None else (out, lse)
