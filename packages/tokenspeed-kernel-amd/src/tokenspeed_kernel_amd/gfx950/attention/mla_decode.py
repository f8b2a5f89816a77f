"""MLA decode: latent attention of the newest tokens of sequences to a paged cache of latents.

All heads read the same keys, and the first 512 of a key's 576 columns are its value. So a block of keys is copied to LDS once, and
is read for the QK and for the PV MFMAs. A workgroup has 4 waves and a CU of its own:

* Tile: 16 query rows (row = new token and head), blocks of 64 keys. If tiles of 16 rows are more than the CUs, a tile has 32 rows:
  the keys in LDS are then read once for 32 rows.
* QK: each wave computes the scores of 16 keys: for 16 rows, 18 MFMAs 16x16x32 along the 576 columns. Every wave holds all of q, 72
  VGPRs for 16 rows.
* Softmax: the waves exchange row max and probabilities through LDS.
* PV: each wave computes a quarter of the columns for all 64 keys.
* LDS: two stages of 64 keys. A stage has 64 KB of latents, 2 KB of padding, and 8 KB of rotary parts: 148 of the 160 KB in all. The
  padding keeps row reads and transposing reads free of bank conflicts.
* In flight: the loads of up to two blocks, 144 KB per CU. The columns of a buffer that only QK reads, such as rotary parts, are
  refilled after the QK MFMAs. The columns that PV reads too are refilled after the PV MFMAs.

fp8 caches: blocks of 128 keys. QK and PV are fp8 MFMAs, 16x16x128; only rotary parts take 16x16x32. A bf16 row of q becomes the sum
of two fp8 planes, which has the 8 significant bits of bf16. Probabilities are rounded to fp8, scaled by 2^8 so that fewer
underflow.

Split-KV: the keys of a sequence are divided into splits, see `decode`. Each split writes a partial result in fp32. The last
workgroup of a sequence to arrive at a counter merges the partial results in a fixed order. So there is one launch, and results are
bitwise reproducible. Merging a split takes as long as attention to 32 keys. So the splits of n keys have at least ``sqrt(32 n)``
keys: a sequence of 2048 keys has 8 splits.

If a batch would occupy at most half of the 256 CUs, its workgroups compute *halves*: two workgroups share a split and a tile. Both
workgroups compute all scores, but each computes only 256 of the 512 columns of the output. This halves the time of PV, and of the
merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gluon.call import TileShape, lengths_at_once, score_scaling
from tokenspeed_kernel_amd.gluon.decode import SplitPlan
from tokenspeed_kernel_base.alignment import ROW_BYTES, aligned, aligned_cache
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper

device = DeviceModule(__name__ + "_device")

XCDS = 8  # consecutive workgroups run on different XCDs

RANK, ROPE = 512, 64  # columns of a latent, which is also the value, and of its rotary part
CACHE = "kv_cache"


FORMATS = (
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e4m3fn),
)  # fmt: skip
SIGNATURES = frozenset(
    format_signature(q=dense_tensor_format(dtype), kv_cache=dense_tensor_format(cache)) for dtype, cache in FORMATS
)
TRAITS = {
    "scaled": any,
    "head_dim": RANK + ROPE,
    "v_head_dim": RANK,
    "page_size": {16, 32, 64, 128, 256},
    "logit_cap": any,
    "return_lse": any,
    "sliding_window": any,
}


@dataclass(frozen=True)
class Config:
    """Tuning of split-KV.

    Attributes:
        waves: splits per CU that a large batch is divided into.
        long: target length of a split, in keys. Splits are shorter only if splits of this length would be fewer than one per CU.
        least: minimum length of a split, in keys.
        merge_keys: merging a partial result takes as long as attention to this many keys, see `SplitPlan.merge_cost`.
    """

    waves: int = 4
    long: int = 1024
    least: int = 128
    merge_keys: int = 32


TILE = TileShape(m=16, block_n=64, num_warps=4, stages=2)
FP8_TILE = TILE._replace(block_n=128)
CONFIG = Config()


class Operands(NamedTuple):
    """Run-time arguments, in the order of the kernel's arguments; see `gluon.call.Operands`.

    Attributes:
        cu_seqlens_q: None if every sequence has the same number of new tokens.
        token_vectors: distance from one slot of a page to the next, in vectors of 16 bytes.
        scale, cap: the factor of the dot products q @ k, and the logit cap times log2(e), see `score_scaling`.
        q_scale, kv_scale: the scales of fp8 q and of an fp8 cache, or None.
    """

    cu_seqlens_q: Tensor | None
    cache_seqlens: Tensor
    page_table: Tensor
    kv_cache: Tensor
    q: Tensor
    batch: int
    max_seqlen_k: int
    table_stride: int
    token_vectors: int
    scale: float
    cap: float
    q_scale: Tensor | None
    kv_scale: Tensor | None
    out: Tensor
    lse: Tensor | None


class Partial(NamedTuple):
    """The splits' partial results. A split has a partial result for each tile of rows and each half; ``tiles`` counts both.

    A sequence with n > 1 splits uses n of the ``slots``. The sequence's first slot is twice the sum of m - 1 over all earlier
    sequences, where m is an earlier sequence's number of splits, at least 1. No two sequences share a slot, because
    2 (m - 1) >= m for m > 1.

    Attributes:
        results: float32 [slots * tiles, m * 512 / halves], normalised outputs in the order of `mla_merge_device.packed_offsets`.
        log_sums: float32 [slots * tiles, m], the base-2 LSE of the scores.
        arrived: int32 [batch * tiles], how many splits have stored their partial result; 0 before and after a launch.
    """

    results: Tensor
    log_sums: Tensor
    arrived: Tensor


class Shape(NamedTuple):
    """Compile-time constants: sizes that are fixed by a model and its cache, and strides in elements.

    Attributes:
        halves: 2 if a workgroup computes half of the output's columns, otherwise 1.
        sparse: whether rows of `Operands.page_table` hold slots of the cache, one for each key, instead of pages. Negative entries
            are no keys.
    """

    heads: int
    page_size: int
    halves: int
    sparse: bool
    q_token: int
    q_head: int
    page: int
    out_token: int
    out_head: int


class Variant(NamedTuple):
    """The options that a kernel is compiled for: compile-time constants, see `gluon.call.Variant`."""

    window_left: int
    is_causal: bool
    capped: bool
    lse: bool


@register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=SIGNATURES,
    traits={**TRAITS, "multi_query": any},
    aligned_caches=(CACHE,),
    priority=Priority.SPECIALIZED,
    tags={"determinism", "fp8_weights"},
)
def mla_decode_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mla_decode_with_kvcache`, which checks the arguments first."""
    call = called(
        q, None, kv_cache, page_table, cache_seqlens, max_seqlen_k, kv_lora_rank, softmax_scale, True, window_left, logit_cap,
        return_lse, q_scale, kv_scale, out,
    )  # fmt: skip
    if q.shape[0]:
        attend_split_kv(call.operands, call.variant, max_seqlen_q)
    return call.result


@dataclass(frozen=True)
class Call:
    """A call's arguments as the kernels need them, see `called`. ``given``: the caller's ``out``, which may be another tensor."""

    operands: Operands
    variant: Variant
    given: Tensor | None

    @property
    def result(self) -> Tensor | tuple[Tensor, Tensor]:
        """What the operator returns. Read this property only after the launch, because it may enqueue a copy to ``given``."""
        written = deliver(self.operands.out, self.given)
        return written if self.operands.lse is None else (written, self.operands.lse)


def called(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
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
) -> Call:
    """Makes the `Call` of an operator: copies tensors with unsupported strides, and allocates the outputs."""
    tokens, heads, head_dim = q.shape
    kv_cache, page_table = aligned_cache(kv_cache, CACHE), rows(page_table)
    scale, cap = score_scaling(head_dim, softmax_scale, logit_cap)
    operands = Operands(
        cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        cache_seqlens=cache_seqlens.contiguous(),
        page_table=page_table,
        kv_cache=kv_cache,
        q=aligned(q),
        batch=cache_seqlens.shape[0],
        max_seqlen_k=max_seqlen_k,
        table_stride=page_table.stride(0),
        token_vectors=kv_cache.stride(1) * kv_cache.element_size() // ROW_BYTES,
        scale=scale,
        cap=cap,
        q_scale=q_scale,
        kv_scale=kv_scale,
        out=rows_to_write(out, q, tokens, heads, kv_lora_rank, dtype=output_dtype(q)),
        lse=q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None,
    )
    return Call(operands, Variant(window_left, is_causal, cap > 0, return_lse), out)


def tile_of(operands: Operands, q_len: int) -> TileShape:
    """Returns the tile for sequences with at most q_len new tokens.

    A tile of 64 rows would spill registers. A batch of 128 new tokens after 896 earlier ones, with 128 heads, takes 39 us of the
    emulator's timing model with tiles of 32 rows, and 59 us with tiles of 16.
    """
    tile = FP8_TILE if operands.kv_cache.element_size() == 1 else TILE
    if tiles_of(operands, q_len, tile) > current_compute_units() and q_len * operands.q.shape[1] > tile.m:
        tile = tile._replace(m=2 * tile.m)
    return tile


def tiles_of(operands: Operands, q_len: int, tile: TileShape) -> int:
    """Returns the number of tiles of a batch whose sequences have q_len new tokens each."""
    return operands.batch * -(-q_len * operands.q.shape[1] // tile.m)


def shape_of(operands: Operands, halves: int, sparse: bool = False) -> Shape:
    """Returns the call's `Shape`, for workgroups that compute ``1 / halves`` of the output's columns."""
    q, kv_cache, out = operands.q, operands.kv_cache, operands.out
    strides = (q.stride(0), q.stride(1), kv_cache.stride(0), out.stride(0), out.stride(1))
    return Shape(q.shape[1], kv_cache.shape[1], halves, sparse, *strides)


def attend_split_kv(operands: Operands, variant: Variant, q_len: int, sparse: bool = False) -> None:
    """Launches split-KV attention for sequences with at most q_len new tokens. ``sparse``: see `Shape`."""
    tile = tile_of(operands, q_len)
    in_view = operands.max_seqlen_k
    if variant.window_left >= 0:
        in_view = min(in_view, variant.window_left + q_len + tile.block_n)
    blocks = -(-in_view // tile.block_n)
    merge_cost = CONFIG.merge_keys / tile.block_n
    short = CONFIG.least // tile.block_n
    # A sequence's bound on the number of splits grows with its length, so the longest sequence has the largest bound.
    most = math.ceil(blocks / max(short, math.sqrt(blocks * merge_cost)))
    tiles = -(-q_len * operands.q.shape[1] // tile.m)
    compute_units = current_compute_units()
    if sparse and tiles * operands.batch >= compute_units:
        most = 1  # the lists of slots are about equally long
    halves = 2 if 2 * tiles * operands.batch * most <= compute_units else 1
    tiles *= halves
    at_once = max(1, compute_units // tiles)
    splits = min(operands.batch + at_once * CONFIG.waves, operands.batch * max(1, most))
    split_kv = splits > operands.batch
    splits = -(-splits // XCDS) * XCDS
    plan = SplitPlan(
        q_len=q_len,
        window_left=variant.window_left,
        aligned=min(operands.kv_cache.shape[1], tile.block_n),
        block_n=tile.block_n,
        split_kv=split_kv,
        at_once=at_once,
        waves=CONFIG.waves,
        long=CONFIG.long // tile.block_n,
        short=short,
        lengths=lengths_at_once(operands.batch),
        once=lengths_at_once(operands.batch) >= operands.batch,
        merge_cost=merge_cost,
        skipped_splits=1,  # the slots of `Partial` assume at least one split per sequence
    )
    partial = _partial(operands, 2 * (splits - operands.batch) * tiles, tile.m, RANK // halves, tiles) if split_kv else None
    device.mla_decode_kernel[(splits * tiles,)](
        operands, partial, shape_of(operands, halves, sparse), variant, tile, plan, num_warps=tile.num_warps
    )


def _partial(operands: Operands, parts: int, m: int, columns: int, tiles: int) -> Partial:
    index = operands.q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    log_sums, results = parts * m, parts * m * columns
    workspace = keeper.get(index, stream, 4 * (results + log_sums), operands.batch * tiles)
    floats = workspace.memory[: 4 * (results + log_sums)].view(torch.float32)
    return Partial(floats[:results], floats[results:], workspace.counters)
