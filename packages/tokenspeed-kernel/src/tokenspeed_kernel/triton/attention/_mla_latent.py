"""MLA over a paged cache of latents, for decode and extend.

All heads read the same keys, and values are the first columns of the keys. So one load of a block of latents feeds both the QK
and the PV MMA. Query row r of a sequence is token ``r // heads`` and head ``r % heads``. With 128 heads, one token fills two tiles
of 64 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._fp8 import fp8_operand
from tokenspeed_kernel.triton.attention._mha_call import Formats
from tokenspeed_kernel.triton.attention._mla_schedule import schedule_work_items
from tokenspeed_kernel.triton.attention._online_softmax import score_factors
from tokenspeed_kernel.triton.attention._split_kv import merge_partials
from tokenspeed_kernel.triton.common import (
    cdiv,
    common_device,
    dense,
    for_architecture,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel.triton.kvcache._latent_groups import latent_groups
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Sizes that a model fixes, and options that change the result.

    Attributes:
        heads: number of query heads.
        rank, rope: columns of a latent and of its rotary part.
        page_size: tokens in a page.
        causal, windowed: whether keys after a query's position, and keys before its window, are hidden.
        has_cap: whether scores have a logit cap.
        sparse: whether each page table entry is the slot of a single key; a negative entry means no key.
    """

    heads: int
    rank: int
    rope: int
    page_size: int
    causal: bool
    windowed: bool
    has_cap: bool
    sparse: bool = False


class Tile(NamedTuple):
    """The tile sizes, and how a program loops over its blocks of keys.

    Attributes:
        block_m, block_n: query rows of a tile, and keys per block.
        num_warps, num_stages: warps of a program, and pipeline stages of the loop.
        transposed: whether to swap A and B: keys are then the M dimension of the scores, and latent columns the M dimension of the
            accumulator. MMAs whose M is at least 64 are then full even with few queries.
        apart: whether the QK and the PV MMA have their own warp layouts, see `_qk_mma` of the device code.
        parts: the number of ranges of a block's keys for which a row has separate row sums. Each range belongs to a group of warps.
            The partial row sums are added after the loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    transposed: bool = False
    apart: bool = False
    parts: int = 1


class Program(NamedTuple):
    """The kernel's compile-time constants: fields of `Tile`, padded columns of latents (``block_c``) and rotary parts
    (``block_r``).

    ``early``: whether the kernel is launched with PDL, before the schedule is complete.
    """

    block_m: int
    block_n: int
    block_c: int
    block_r: int
    transposed: bool
    apart: bool
    parts: int
    stages: int
    early: bool


# Tiles by the maximum number of query rows of a sequence. On an H200, bfloat16, 64 sequences of 8192 keys:
# 128 heads (two tiles of 64 rows): 350 us, 417 TFLOP/s. Alternatives: without `apart` 541 us; with `transposed` 418 us; blocks of
# 32 keys at least 592 us; tiles of 32 rows 635 us. Loads through tensor descriptors were no faster than loads by pointers.
# 16 heads: 150 us, 4.0 TB/s. Alternatives: 8 warps and `apart` 155 us; without `transposed` at least 228 us with tiles of 16 rows,
# and 195 us with tiles of 64 rows.
_TILES = {
    "sm_90": {
        16: Tile(16, 64, 4, 2, transposed=True),
        32: Tile(32, 64, 8, 2, transposed=True, apart=True, parts=4),
        64: Tile(64, 64, 8, 2, apart=True, parts=2),
    },
    # Tiles that fit into 64 KB of shared memory (gfx942), or that spill no registers (other architectures).
    "gfx942": {16: Tile(16, 32, 4, 1)},
    "gfx950": {16: Tile(16, 32, 4, 1)},
    "any": {16: Tile(16, 64, 8, 2)},
    # Triton's interpreter takes about as long for an operation on a large tile as on a small one.
    "cpu": {16: Tile(16, 64, 1, 1), 128: Tile(128, 64, 1, 1)},
}
# Tiles for latents with group scales. Such latents are float32 in registers before they are scaled, and need smaller tiles.
_GROUPED = {arch: {16: Tile(16, 16, 4, 1)} for arch in ("gfx942", "gfx950")}
_FLOAT32 = Tile(16, 16, 4, 2)
_WIDE = Tile(16, 16, 4, 1)  # for more than 576 columns of latent and rotary part together


def tile_for(
    rows: int, block_c: int, block_r: int, dtype: torch.dtype, fp8_cache: bool, device: torch.device, grouped: bool = False
) -> Tile:
    """Returns the tile for sequences of at most ``rows`` query rows.

    ``block_c``, ``block_r``: the padded columns of latents and of rotary parts.

    ``grouped``: whether latents have a scale per 128 elements.
    """
    if block_c + block_r > 576:
        return _WIDE
    if dtype == torch.float32:
        return _FLOAT32
    # Below 64 padded latent columns, the two swap-AB MMAs compile to different instructions, and results are wrong (Triton 3.6,
    # sm_90).
    tiles = for_architecture(_TILES, device) if block_c >= 64 else _TILES["any"]
    if grouped:
        tiles = for_architecture({"any": tiles, **_GROUPED}, device)
    # With swap-AB, keys are the MMA's first operand. Keys converted from fp8 would be in registers, so fp8 caches do not use
    # swap-AB.
    fitting = [most for most in tiles if rows <= most and not (fp8_cache and tiles[most].transposed)]
    return tiles[min(fitting, default=max(tiles))]


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
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
    tile: Tile | None = None,
    tree_mask: Tensor | None = None,
    sparse: bool = False,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the attention of the newest tokens of each sequence over a cache of latents.

    A sequence has ``max_seqlen_q`` new tokens, or as many as ``cu_seqlens_q`` says.

    ``sparse``: whether every token counts as a sequence. Its keys are then the slots in its row of ``page_table``.
    """
    cache_seqlens, cu_seqlens_q = cache_seqlens.contiguous(), dense(cu_seqlens_q)
    tokens, heads, width = q.shape
    batch, page_size, device = cache_seqlens.shape[0], kv_cache.shape[1], q.device
    if out is None:
        out = q.new_empty(tokens, heads, kv_lora_rank, dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    if tokens == 0 or heads == 0:
        return out if lse is None else (out, lse)

    dtype = output_dtype(q)
    dtype = for_architecture({"cpu": torch.float32, "any": dtype}, device)  # Triton's interpreter computes wrong bfloat16 dots
    rows = min(max_seqlen_q, tokens) * heads
    # With cu_seqlens_q the bound varies between calls. The bound is rounded up to a power of two, because the merge kernel is
    # compiled for each bound.
    q_bound = max_seqlen_q if cu_seqlens_q is None else next_power_of_2(min(max_seqlen_q, tokens))
    rope = width - kv_lora_rank
    block_c = next_power_of_2(max(16, kv_lora_rank))
    block_r = next_power_of_2(max(16, rope))
    groups = latent_groups(kv_scale_cache, rope_cache)
    tile = tile or tile_for(rows, block_c, block_r, output_dtype(q), kv_cache.dtype in FP8, device, groups is not None)
    tiles = cdiv(rows, tile.block_m)
    capacity = min(max_seqlen_k, page_table.shape[1] * (1 if sparse else page_size))
    sm_count = for_architecture({"cpu": 2, "any": sm_count_of(device)}, device)  # interpreted programs run one after another
    early = may_overlap(device)
    reach = q_bound + window_left if window_left >= 0 else -1
    schedule = schedule_work_items(cache_seqlens, capacity, reach, tiles, sm_count, tile.block_n, early)
    early = early and schedule is not None
    work_items, partial, partial_lse = None, None, None
    if schedule is not None:
        work_items = schedule.work_items
        partial, partial_lse = schedule.plan.partials(1, q_bound * heads, kv_lora_rank, device)
    multiplier, cap_log2 = score_factors(softmax_scale, logit_cap)
    q, q_fp8 = fp8_operand(q)
    kv_cache, fp8 = fp8_operand(kv_cache)
    device_code.attend_latent_kernel[((batch if work_items is None else work_items.shape[0]) * tiles,)](
        q,
        kv_cache,
        kv_scale_cache,
        rope_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        dense(tree_mask),
        q_scale,
        kv_scale,
        out,
        lse,
        work_items,
        partial,
        partial_lse,
        *q.stride(),
        *kv_cache.stride(),
        *page_table.stride(),
        *out.stride(),
        batch,
        capacity,
        q_bound,
        window_left,
        tiles,
        multiplier,
        cap_log2,
        SHAPE=Shape(heads, kv_lora_rank, rope, page_size, is_causal, window_left >= 0, logit_cap > 0, sparse),
        GROUPS=groups,
        FORMATS=Formats(common_device.DTYPES[dtype], q_fp8, fp8),
        TILE=Program(
            block_m=tile.block_m,
            block_n=tile.block_n,
            block_c=block_c,
            block_r=block_r,
            transposed=tile.transposed,
            apart=tile.apart and rope > 0,
            parts=tile.parts,
            stages=tile.num_stages,
            early=early,
        ),
        num_warps=tile.num_warps,
        **launch_options(early),
    )
    if schedule is not None and partial is not None and partial_lse is not None:
        merge_partials(
            schedule.plan,
            schedule.plan.walk(q_bound, -1, tile.block_n),
            partial,
            partial_lse,
            out,
            lse,
            None,
            cache_seqlens,
            capacity,
            -1,
            sm_count,
            early,
            cu_seqlens_q=cu_seqlens_q,
            parts=schedule.parts,
        )
    return out if lse is None else (out, lse)
