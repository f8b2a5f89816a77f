"""Decode attention: each sequence's newest tokens attend over a paged cache.

One tile holds all query heads of a KV head and all new tokens of a sequence, so that each key is read once. The kernel is
memory-bound. A program has one or a few warps, and several programs share an SM/CU. Each program keeps several blocks of keys and
values in flight. Long sequences are split over programs, see `_split_kv`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import CACHED, MHA
from tokenspeed_kernel.triton.attention._fp8 import fp8_operand
from tokenspeed_kernel.triton.attention._fp8_pairs import pairable, paired
from tokenspeed_kernel.triton.attention._online_softmax import score_factors
from tokenspeed_kernel.triton.attention._shape import Shape, scales_apart
from tokenspeed_kernel.triton.attention._split_kv import merge_partials, plan_work_items
from tokenspeed_kernel.triton.common import (
    TRITON,
    cdiv,
    common_device,
    dense,
    for_architecture,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Config(NamedTuple):
    """How a program loops over its keys, and how work is split among programs.

    The figures beside the constants are microseconds on an H200, in a CUDA graph, with 64 query heads and 8 KV heads of dimension
    64, bfloat16, pages of 64, unless stated otherwise. "64 x 8K" means 64 sequences of 8192 tokens.

    Attributes:
        block_n: keys per block.
        num_warps: warps of a program.
        num_stages: pipeline stages of the loop. Half of the stages cover the loads of page numbers, half the loads of keys and
            values.
        resident: programs per SM/CU that run concurrently.
        waves: waves of programs into which a batch with much work is split.
        long: how many keys a program needs to amortise its prologue and epilogue.
        least: fewest keys of a program, if its sequence has that many.
        whole: sequences of at most this many keys are never split.
    """

    block_n: int
    num_warps: int
    num_stages: int
    resident: int
    waves: int = 3  # 64 x 8K: 261 us, or 262 us with 5 or 6 waves; 64 x 1K: 39 us, or 41 us with 6 waves
    long: int = 2048  # 16 x 8K: 73 us, or 78 us with 1024. 64 x 8K: 261 us, or 256 with 4096; fp8 cache: 147 us, or 169 with 4096
    least: int = 128  # 1 x 1K: 6.6 us, or 7.7 us with 256, 6.7 us with 64
    whole: int = 256  # 64 x 8K in a window of 128: 8.8 us, or 11.1 us with split-KV and merge


# Shared memory per SM/CU. The pipeline stages of keys and values take most of it.
_SHARED_BYTES = {"sm_80": 160_000, "sm_90": 225_000, "sm_100": 225_000, "sm_103": 225_000, "amd": 64_000, "any": 98_000}
_OTHER_BYTES = 4_000  # a program's shared memory besides the pipeline stages


class Measured(NamedTuple):
    """Tuned values for fields of `Config`, which replace the values that `_config` chooses for a call. None: no tuned value."""

    block_n: int | None = None
    num_warps: int | None = None


_UNMEASURED = Measured()


def _config(key_bytes: int, rows: int, dtype: torch.dtype, lean: bool, device: torch.device, measured: Measured) -> Config:
    """Returns the configuration for ``key_bytes`` bytes per key and value, tiles of ``rows`` query rows, and MMAs in ``dtype``.

    ``lean``: whether the kernel needs no registers for a window's mask, per-row masks, a page number per key, or even and odd
    operands.
    """
    room = for_architecture(_SHARED_BYTES, device)
    # 64 keys per block: 16 x 8K takes 72 us (32 keys: 76, 128 keys: 75); 64 x 1K takes 38 us (128 keys: 43). Three buffers (7
    # stages): 16 x 8K takes 72 us. Two buffers (5 stages) take 86 us. Four (9 stages) take 83 us, because fewer programs are
    # resident. Tiles with many rows and keys of 128 columns (64 query heads on one KV head, 64 x 4K): four buffers take 47 us,
    # three take 56 us.
    block_n, num_stages = 64, 9 if rows > 32 and key_bytes >= 512 else 7
    if rows > 32 or key_bytes > 512:
        num_warps = 4  # for the tile's registers; 64 rows take 297 us, or 341 us with two warps
    else:
        # Microseconds with one, two and four warps. 64 x 1K: 37, 38, 40. 64 x 8K with 4 new tokens: 273, 292, 300. Unless `lean`,
        # one warp spills registers.
        num_warps = 1 if lean and key_bytes <= 256 else 2
    if dtype == torch.float32:  # no tensor cores: float32 dot products take more registers
        block_n, num_warps = 32, 8 if rows > 32 else 4
    if platform_of(device).is_amd:  # not measured on AMD, but compiles without register spills
        num_warps, num_stages = 4, 2
    while block_n > 16 and block_n * key_bytes > 32_768:  # dimension 128, 128 x 2K: 64 keys 257 us, 32 keys 271 us
        block_n //= 2
    block_n, num_warps = measured.block_n or block_n, measured.num_warps or num_warps
    while num_stages > 3 and num_stages // 2 * block_n * key_bytes > room - 8 * _OTHER_BYTES:
        num_stages -= 2
    resident = room // (num_stages // 2 * block_n * key_bytes + _OTHER_BYTES)
    return Config(block_n, num_warps, num_stages, min(8, max(1, resident)))


class Formats(NamedTuple):
    """Dtypes of the MMA operands, and the conversions to them.

    Attributes:
        dtype: Triton's dtype of the MMA operands.
        rescaled: whether queries are divided by a power of two, so that they fit float16's range. The scores are multiplied by the
            same power.
        q_fp8, kv_fp8: how 8-bit queries, keys and values are converted, see `_fp8` and `_fp8_pairs`; None for other dtypes.
        pairs: whether the cache is read as pairs of 8-bit values.
    """

    dtype: Any
    rescaled: bool
    q_fp8: str | None
    kv_fp8: str | None
    pairs: bool


class Tile(NamedTuple):
    """Compile-time constants of `decode_kernel`.

    Attributes:
        packed: the number of KV heads that the program treats as one wide head.
        split: whether a sequence may have several work items.
        alike: whether the key and value caches have the same page and slot strides.
        far: whether offsets within a cache need 64 bits.
        block_m, block_n: query rows, and keys per block.
        block_d, block_w: padded columns of keys and values, powers of two.
        stages: pipeline stages of the loop over keys.
        early: whether the kernel is launched with PDL.
    """

    packed: int
    split: bool
    alike: bool
    far: bool
    block_m: int
    block_n: int
    block_d: int
    block_w: int
    stages: int
    early: bool


_LEAST_ROWS = 16  # the least M of a `tl.dot`
# KV heads are packed until a key takes this many bytes, a cache line. With an fp8 cache, 64 x 8K takes 146 us, or 208 us unpacked.
# Packing bfloat16 keys up to 256 bytes gives 261 us instead of 264 us, but 7.5 us instead of 6.7 us for 1 x 1K.
_PACKED_BYTES = 128


def _packed(k_cache: Tensor, v_cache: Tensor, rows: int) -> int:
    """Returns how many KV heads, of ``rows`` query rows each, a program processes as one wide head.

    These heads' rows must fit into the smallest tile, and the heads must be adjacent in memory.
    """
    packed, heads = 1, k_cache.shape[2]
    for cache in (k_cache, v_cache):
        dim = cache.shape[3]
        if cache.stride(2) != dim * cache.stride(3) or dim & (dim - 1):
            return 1
    key_bytes = max(k_cache.shape[3], v_cache.shape[3]) * k_cache.element_size()
    while heads % (2 * packed) == 0 and 2 * packed * rows <= _LEAST_ROWS and 2 * packed * key_bytes <= _PACKED_BYTES:
        packed *= 2
    return packed


def _reach(x: Tensor) -> int:
    """Returns the offset of a tensor's last element from its first, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=CACHED,
    traits={**MHA, "scaled": any, "multi_query": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
    tunables={"block_n": [32, 64, 128], "num_warps": [1, 2, 4]},
)
def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    *,
    block_n: int | None = None,
    num_warps: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mha_decode_with_kvcache`, which documents the arguments."""
    if out is None:
        out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=output_dtype(q), device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    attend_newest(
        q,
        None,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        max_seqlen_k,
        max_seqlen_q,
        window_left,
        logit_cap,
        sinks,
        softmax_scale,
        q_scale,
        k_scale,
        v_scale,
        out,
        lse,
        Measured(block_n, num_warps),
    )
    return out if lse is None else (out, lse)


def attend_newest(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    measured: Measured = _UNMEASURED,
    tree_mask: Tensor | None = None,
) -> None:
    """Computes the attention of a few new tokens per sequence, and writes ``out`` and ``lse``.

    Args:
        cu_seqlens_q: None if every sequence has max_seqlen_q new tokens. With cu_seqlens_q, sequences with more new tokens are
            skipped: nothing is written for them.
        tree_mask: the argument ``tree_mask`` of `mha_with_kvcache`: the bit masks of draft trees.
    """
    nothing_written = out.numel() == 0 and (lse is None or lse.numel() == 0)
    if cache_seqlens.shape[0] == 0 or max_seqlen_q == 0 or nothing_written:  # padding: no new tokens
        return
    cache_seqlens, cu_seqlens_q, sinks = cache_seqlens.contiguous(), dense(cu_seqlens_q), dense(sinks)
    device, batch = q.device, cache_seqlens.shape[0]
    _, page_size, heads, head_dim = k_cache.shape
    v_head_dim = v_cache.shape[3]

    pairs = pairable(k_cache) and pairable(v_cache)
    each = 2 if pairs else 1
    # With an fp8 cache, the MMA operands are float16, except for float32 queries.
    if k_cache.dtype not in FP8 or q.dtype == torch.float32:
        dtype = q.dtype
    else:
        dtype = torch.float16
    dtype = for_architecture({"cpu": torch.float32, "any": dtype}, device)  # the interpreter's bfloat16 dots are wrong
    rescaled = q.dtype == torch.bfloat16 and dtype == torch.float16
    group = q.shape[1] // heads
    rows = group * max_seqlen_q
    packed = _packed(k_cache, v_cache, rows)
    block_m = min(64, max(_LEAST_ROWS, next_power_of_2(rows * packed)))
    tiles = cdiv(rows * packed, block_m)
    block_d = next_power_of_2(max(16, head_dim * packed // each))
    block_w = next_power_of_2(max(16, v_head_dim * packed // each))
    lean = max_seqlen_q == 1 and window_left < 0 and page_size % 64 == 0 and not pairs
    config = _config((block_d + block_w) * k_cache.element_size() * each, block_m, dtype, lean, device, measured)
    programs = heads // packed * tiles
    capacity = min(max_seqlen_k, page_table.shape[1] * page_size)
    blocks = cdiv(capacity, config.block_n)
    if window_left >= 0:
        blocks = min(blocks, cdiv(max_seqlen_q + window_left, config.block_n) + 1)
    sm_count = sm_count_of(device)
    plan = plan_work_items(
        batch,
        blocks,
        programs,
        sm_count * config.resident,
        config.waves,
        cdiv(config.long, config.block_n),
        cdiv(config.least, config.block_n),
        cdiv(config.whole, config.block_n),
    )
    walk = plan.walk(max_seqlen_q, window_left, config.block_n)
    split = plan.most > 1
    partial, partial_lse = plan.partials(heads, rows, v_head_dim, device)
    q, q_fp8 = fp8_operand(q)
    fp8: str | None
    if pairs:
        (k_cache, fp8), (v_cache, _) = paired(k_cache), paired(v_cache)
    else:
        (k_cache, fp8), (v_cache, _) = fp8_operand(k_cache), fp8_operand(v_cache)
    multiplier, cap_log2 = score_factors(softmax_scale_of(softmax_scale, head_dim), logit_cap)
    early = may_overlap(device)
    device_code.decode_kernel[(plan.work_items * programs,)](
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        sinks,
        dense(tree_mask),
        q_scale,
        k_scale,
        v_scale,
        out,
        lse,
        partial,
        partial_lse,
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        *page_table.stride(),
        *out.stride(),
        batch,
        capacity,
        window_left,
        multiplier,
        cap_log2,
        plan.least,
        plan.wave,
        plan.waves_work_items,
        plan.long,
        SHAPE=Shape(
            heads=heads,
            group=group,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            page_size=page_size,
            q_scales=scales_apart(q_scale),
            k_scales=scales_apart(k_scale),
            v_scales=scales_apart(v_scale),
            has_cap=logit_cap > 0,
        ),
        FORMATS=Formats(common_device.DTYPES[dtype], rescaled, q_fp8, fp8, pairs),
        WALK=walk,
        TILE=Tile(
            packed=packed,
            split=split,
            alike=k_cache.stride()[:2] == v_cache.stride()[:2],
            far=max(_reach(k_cache), _reach(v_cache)) >= 2**31,
            block_m=block_m,
            block_n=config.block_n,
            block_d=block_d,
            block_w=block_w,
            stages=config.num_stages,
            early=early,
        ),
        num_warps=config.num_warps,
        **launch_options(early),
    )
    if split:
        merge_partials(
            plan,
            walk,
            partial,
            partial_lse,
            out,
            lse,
            sinks,
            cache_seqlens,
            capacity,
            window_left,
            sm_count,
            early,
            cu_seqlens_q,
        )
