"""Attention of the newest tokens to a paged cache.

All query heads of a key head, and all new tokens of a sequence, are the rows of one tile, so that a key is read once. Memory
decides the speed: a program is a warp or a few, several share a multiprocessor, and each keeps some blocks of keys and values on
the way. Long sequences are split over programs, see `_split_kv`.
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
from tokenspeed_kernel.triton.attention._split_kv import merge_units, plan_units
from tokenspeed_kernel.triton.common import (
    TRITON,
    cdiv,
    common_device,
    dense,
    for_architecture,
    launch_options,
    may_overlap,
    multiprocessors,
    next_power_of_2,
)
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Config(NamedTuple):
    """How a program walks its keys, and how work is cut.

    The figures beside the constants are microseconds on an H200, in a CUDA graph, of 64 query heads and 8 key heads of dimension
    64, bfloat16, pages of 64, where nothing else is said: "64 x 8K" are 64 sequences of 8192 tokens.

    Attributes:
        block_n: keys at once.
        num_warps: of a program.
        num_stages: of the loop; the compiler halves them between page numbers, which come first, and keys and values.
        resident: programs that share a multiprocessor.
        waves: how often the device is filled with programs where there is much work.
        long: keys of a program that are enough for its start and end not to matter.
        least: keys that a program has at least, where a sequence has as many.
        whole: a sequence of at most so many keys is never split.
    """

    block_n: int
    num_warps: int
    num_stages: int
    resident: int
    waves: int = 3  # 64 x 8K: 261, with 5 or 6: 262; 64 x 1K: 39, with 6: 41
    long: int = 2048  # 16 x 8K: 73, with 1024: 78. 64 x 8K with 4096: 256 for 261, but with an fp8 cache 169 for 147
    least: int = 128  # 1 x 1K: 6.6, with 256: 7.7, with 64: 6.7
    whole: int = 256  # 64 x 8K in a window of 128: 8.8; split and merged: 11.1


# Shared memory of a multiprocessor, of which the keys on their way take most.
_SHARED_BYTES = {"sm_80": 160_000, "sm_90": 225_000, "sm_100": 225_000, "sm_103": 225_000, "amd": 64_000, "any": 98_000}
_OTHER_BYTES = 4_000  # of a program, besides those keys


class Measured(NamedTuple):
    """What tuning found for a call; it replaces what `_config` would choose. For the fields, see `Config`."""

    block_n: int | None = None
    num_warps: int | None = None


_UNMEASURED = Measured()


def _config(key_bytes: int, rows: int, dtype: torch.dtype, lean: bool, device: torch.device, measured: Measured) -> Config:
    """For keys that take ``key_bytes`` with their values, tiles of ``rows`` query rows, and products of ``dtype``.

    ``lean``: no registers go to masks of a window or of each row, to the pages of each key, nor to operands in two parts.
    """
    room = for_architecture(_SHARED_BYTES, device)
    # 32 keys at once: 16 x 8K 76 for 72; 128: 75, and 64 x 1K 43 for 38.
    # Two buffers (5 stages): 16 x 8K 86 for 72, four (9 stages): 83, as fewer programs are resident. But where a tile has many rows
    # of 128 wide keys (64 heads on one, 64 x 4K), four: 47 for 56.
    block_n, num_stages = 64, 9 if rows > 32 and key_bytes >= 512 else 7
    if rows > 32 or key_bytes > 512:
        num_warps = 4  # the tile's registers; with 64 rows two warps: 341 for 297
    else:
        # 64 x 1K: one warp 37, two 38, four 40; but what is not lean would spill. 64 x 8K, 4 new tokens: 273, 292, 300.
        num_warps = 1 if lean and key_bytes <= 256 else 2
    if dtype == torch.float32:  # no tensor cores: products take registers
        block_n, num_warps = 32, 8 if rows > 32 else 4
    if platform_of(device).is_amd:  # not measured: what compiles without spills
        num_warps, num_stages = 4, 2
    while block_n > 16 and block_n * key_bytes > 32_768:  # of dimension 128, 128 x 2K: 64 keys 257, 32 keys 271
        block_n //= 2
    block_n, num_warps = measured.block_n or block_n, measured.num_warps or num_warps
    while num_stages > 3 and num_stages // 2 * block_n * key_bytes > room - 8 * _OTHER_BYTES:
        num_stages -= 2
    resident = room // (num_stages // 2 * block_n * key_bytes + _OTHER_BYTES)
    return Config(block_n, num_warps, num_stages, min(8, max(1, resident)))


class Formats(NamedTuple):
    """What is multiplied.

    Attributes:
        dtype: of the products' operands, Triton's.
        rescaled: whether queries are brought to float16's range, by a power of two that scores are multiplied with again.
        q_fp8, kv_fp8: how 8-bit queries, keys and values become operands, see `_fp8` and `_fp8_pairs`; None where they are none.
        pairs: whether the cache is read as pairs of 8-bit numbers.
    """

    dtype: Any
    rescaled: bool
    q_fp8: str | None
    kv_fp8: str | None
    pairs: bool


class Tile(NamedTuple):
    """What a program computes, and how.

    Attributes:
        packed: key heads that are one wide head for the program.
        split: whether a sequence may have several units.
        alike: whether keys and values lie at the same places of their caches.
        far: whether offsets within a cache need 64 bits.
        block_m, block_n: query rows, and keys at once.
        block_d, block_w: columns of keys and values, powers of two.
        stages: of the loop over keys.
        early: whether it may start before the kernel in front of it has ended.
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


_LEAST_ROWS = 16  # of a product's tile
# Key heads are packed until a key takes so many bytes, a line of the cache. With an fp8 cache, 64 x 8K: 146, unpacked 208; with
# 256 bytes, bfloat16: 261 for 264, but 1 x 1K 7.5 for 6.7.
_PACKED_BYTES = 128


def _packed(k_cache: Tensor, v_cache: Tensor, rows: int) -> int:
    """How many key heads of ``rows`` query rows share a program: all in the least tile, side by side in memory."""
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
    """How far the last element is from the first, in elements."""
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
    """See the operator."""
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
    """Attention of a few new tokens a sequence, into ``out`` and ``lse``.

    Args:
        cu_seqlens_q: None where every sequence has max_seqlen_q new tokens. Otherwise those with more are passed over: nothing is
            written for them.
        tree_mask: as of `mha_with_kvcache`.
    """
    if out.numel() == 0 and (lse is None or lse.numel() == 0):
        return
    cache_seqlens, cu_seqlens_q, sinks = cache_seqlens.contiguous(), dense(cu_seqlens_q), dense(sinks)
    device, batch = q.device, cache_seqlens.shape[0]
    _, page_size, heads, head_dim = k_cache.shape
    v_head_dim = v_cache.shape[3]

    pairs = pairable(k_cache) and pairable(v_cache)
    each = 2 if pairs else 1
    # Narrow queries and keys meet in the dtype that holds both.
    if k_cache.dtype not in FP8 or q.dtype == torch.float32:
        dtype = q.dtype
    else:
        dtype = torch.float16
    dtype = for_architecture({"cpu": torch.float32, "any": dtype}, device)  # the interpreter's products of bfloat16 are wrong
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
    sm_count = multiprocessors(device)
    plan = plan_units(
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
    device_code.decode_kernel[(plan.units * programs,)](
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
        plan.waves_units,
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
        merge_units(
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
