"""Definitions for all warps of `kernel_device`: the kernel's arguments, layouts of K/V tiles, and the CTA's progress."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any, Optional

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_int
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import CONSUMERS, Config, Row

THREADS = 32 * (CONSUMERS + 1)
# Indices into the CTA's plan in shared memory: the current sequence, the CTA's first tile in this sequence, the number of tiles
# that remain (without split-KV: of sequences), the number of completed tiles, the number of tiles of a group's full range, and the
# previous value of the sequence's arrival counter.
SEQUENCE, OFFSET, LEFT, DONE, PER_GROUP, BEFORE = range(6)
# How much a row max, in units of log2, may grow before the accumulators are rescaled (lazy rescaling). Probabilities are then at
# most 2^8, far from the largest float16 value.
LAZY = 8.0
PLANNED = 1  # the named barrier at which consumer warps wait until the producer warp has written the plan


@dataclass(frozen=True)
class Rows:
    """Rows of q or out: the global address of row 0, and the strides between tokens and between heads in elements."""

    address: Int64
    token: Int64
    head: Int64

    @cute.jit
    def at(self, token: Int32, head: Int32):
        """Returns the global address of the row of a token and a query head."""
        return self.address + 2 * (Int64(token) * self.token + Int64(head) * self.head)


@dataclass(frozen=True)
class PageTable:
    """The page table: its global address, and its strides between sequences and between pages in elements."""

    address: Int64
    sequence: Int64
    page: Int64


@dataclass(frozen=True)
class Call:
    """A CTA's view of the kernel's arguments, and its shared memory. Tensors in global memory are given by address.

    Attributes:
        q, out: queries and output.
        page_table: int32 ``[batch, max_pages]``.
        cache_seqlens: address of int32 ``[batch]``.
        batch: number of sequences.
        partial: address of the partial results in the workspace.
        counters: address of int32 counters, one for each CTA group and KV head.
        lse: address of float32 ``[tokens, heads]``, or 0.
        sinks: the attention sinks, which are added to the softmax's denominator.
        q_len: new tokens of each sequence.
        gqa_ratio, kv_heads: GQA group size (query heads per KV head), and KV heads.
        max_seqlen_k: the maximum number of tokens of a sequence in the cache; larger values of cache_seqlens are clamped.
        window_left: the operator's argument: visible tokens before the query's own; negative without a window.
        groups: number of CTA groups, among which the K/V tiles are divided. Each group has CTAs for all KV heads.
        page_shift: log2 of the page size.
        scale: softmax_scale * log2(e), or logit_cap * log2(e) if scores are capped.
        k_scales, v_scales: scales of an fp8 cache.
        cap_scale: factor from q @ k to the argument of `softmax_device.cap`; None if scores are not capped.
        group, kv_head: this CTA's group, and its first KV head. KV heads that are side by side (``abreast``) count as one KV head,
            also in ``kv_heads``.
        pipe: the barriers of the ring of K/V tiles.
        plan: the CTA's progress in shared memory, see SEQUENCE.
        sums, results: partial results of the consumer warps for a sequence, in shared memory: row max and row sum, and
            accumulators.
        sink_values: the sink of each query row, in shared memory.
        tiles: the ring of K/V tiles.
    """

    q: Rows
    out: Rows
    page_table: PageTable
    cache_seqlens: Int64
    batch: Int32
    partial: Int64
    counters: Int64
    lse: Int64
    sinks: Sinks
    q_len: Int32
    gqa_ratio: Int32
    kv_heads: Int32
    max_seqlen_k: Int32
    window_left: Int32
    groups: Int32
    page_shift: Int32
    scale: Float32
    k_scales: Scales
    v_scales: Scales
    cap_scale: Optional[Float32]
    group: Int32
    kv_head: Int32
    pipe: Pipeline
    plan: cute.Pointer
    sums: cute.Pointer
    results: cute.Pointer
    sink_values: cute.Pointer
    tiles: cute.Pointer


@dataclass(frozen=True)
class Panels:
    """Layout of a tile's keys, or of its values, in a stage of the ring.

    Attributes:
        width: elements of a key or value vector.
        columns, row_bytes: numbers of elements and of bytes in a panel's row.
        count: number of panels.
        begin: offset of the first panel in the stage, in elements.
        bytes: number of bytes of a panel, with the rows of all KV heads.
        box: number of rows (tokens) of one KV head that are consecutive in a panel.
        heads: number of KV heads per CTA.
    """

    width: int
    columns: int
    row_bytes: int
    count: int
    begin: int
    bytes: int
    box: int
    heads: int

    def row_at(self, row: int | Int32) -> int | Int32:
        """Returns the byte offset of a token's row in its panel, for the CTA's first KV head. In a panel, ``box`` rows of the first
        KV head precede the same tokens' rows of the next head."""
        return row // self.box * (self.heads * self.box * self.row_bytes) + row % self.box * self.row_bytes

    def swizzle_xor(self, row: Any) -> Any:
        """Returns the XOR mask that the swizzle applies to the index of a 16-byte chunk in a panel's row. ``row``: the row's index
        modulo 8."""
        return row if self.row_bytes == 128 else row // 2

    def chunk_in_row(self, chunk: int) -> int:
        """Returns the byte offset of a vector's 16-byte chunk in its panel's row, before the swizzle. The caller may XOR this
        offset into a swizzled address. ``chunk``: the chunk's index in the vector.
        """
        return chunk % (self.row_bytes // 16) * 16

    def panel_at(self, chunk: int) -> int:
        """Returns the byte offset of the panel that holds a vector's 16-byte chunk. ``chunk``: the chunk's index in the vector."""
        return chunk // (self.row_bytes // 16) * self.bytes


def panels_of(config: Config, row: Row, box: int, begin: int) -> Panels:
    """Returns the panels of a tile's keys, or of its values, whose vectors have the layout ``row``."""
    size = config.heads * config.block * row.panel_bytes
    return Panels(row.width, row.panel, row.panel_bytes, row.panels, begin, size, box, config.heads)


class Shapes:
    """Shapes that follow from a configuration, the layout of shared memory, and the range of a sequence that queries see."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.kv_dtype = cutlass.Uint8 if config.fp8 else self.dtype
        self.mma_dtype = cutlass.Float16 if config.fp8 else self.dtype  # dtype of the MMA operands
        self.k_width = config.k_row.width  # elements of a key
        self.v_width = config.v_row.width
        self.box = config.block if config.gathered else config.box
        self.boxes = self.config.block // self.box
        self.keys = panels_of(config, config.k_row, self.box, 0)
        self.values = panels_of(config, config.v_row, self.box, config.heads * config.block * config.k_row.columns)
        self.stage_bytes = config.kv_bytes * config.stage_elements
        self.tiles = max(1, config.rows // config.row_warps // 16)  # tiles of 16 query rows per warp
        self.used = 1 if config.rows == 8 else 2  # query rows of a tile of 16 that a lane holds
        self.together = 4 if config.fp8 else 2  # adjacent columns of an accumulator row that a lane holds
        self.fours = config.v_head_dim // 4  # threads per output row, of 4 elements each

    def storage(self) -> Any:
        config, dtype = self.config, self.kv_dtype

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            begun: cute.struct.MemRange[Int64, 1]
            plan: cute.struct.MemRange[Int32, 8]
            sums: cute.struct.MemRange[Float32, 2 * config.parts * config.rows]
            sinks: cute.struct.MemRange[Float32, config.rows]
            results: cute.struct.Align[cute.struct.MemRange[Float32, config.merge_floats], 16]
            tiles: cute.struct.Align[cute.struct.MemRange[dtype, config.stages * config.stage_elements], 1024]

        return Storage

    @cute.jit
    def length_of(self, call: Call, sequence: Int32, early: cutlass.Constexpr[bool] = False):
        """Loads a sequence's length, clamped to at most max_seqlen_k and at least 0. For an index beyond the batch, returns the
        last sequence's length, because callers load ahead.
        ``early``: whether other threads may still write the length (see `load_int`).
        """
        length = load_int(call.cache_seqlens + Int64(cutlass.min(sequence, call.batch - 1)) * 4, early)
        return cutlass.min(cutlass.max(length, 0), call.max_seqlen_k)

    @cute.jit
    def visible(self, call: Call, length: Int32):
        """Returns the first position of a sequence that a query sees, the tile of this position, and the number of visible tiles.
        The number is at least 1, so that the output of an empty sequence is written too. ``length``: the sequence's length."""
        begin = cutlass.select_(call.window_left >= 0, cutlass.max(length - call.q_len - call.window_left, 0), Int32(0))
        first = begin // self.config.block
        return begin, first, cutlass.max((length + self.config.block - 1) // self.config.block - first, 1)

    @cute.jit
    def swizzled(self, panels: cutlass.Constexpr[Panels], lane_row: Int32, chunk: Int32):
        """Returns the byte offset within the first panel, after the swizzle, of 16-byte chunk number ``chunk`` of row ``lane_row``
        (0 to 7)."""
        swizzle_xor = panels.swizzle_xor(lane_row)
        return lane_row * panels.row_bytes + (chunk ^ swizzle_xor) * 16

    def has(self, r: int, column: int, width: int) -> bool:
        """Whether a column of a K/V tile belongs to the KV head of a lane's ``r``-th query row. ``width``: columns per KV head."""
        return self.config.abreast == 1 or column // width == r

    def of_head(self, call: Call, kv_head: Int32, row: Any) -> Any:
        """Returns the KV head of a query row, and the row's index among that head's rows. ``kv_head``: the KV head of row 0, where
        heads that are side by side count as one.
        """
        if self.config.abreast == 1:
            return kv_head, row
        return kv_head * self.config.abreast + row // 8, row % 8

    @cute.jit
    def partial_at(self, call: Call, group: Int32, begins: Any, row: Int32):
        """Returns two global addresses for a query row of a CTA group's partial result: that of row max and row sum, and that of
        the output accumulator.

        A group of CTAs writes at most two partial results. One is of the sequence that an earlier group began (``begins`` is
        False). The other is of the sequence that begins in this group and continues in the next one (``begins`` is True).
        """
        slot = group * 2 + cutlass.select_(begins, Int32(1), Int32(0))
        at = (slot * call.kv_heads + call.kv_head) * self.config.rows + row
        sums = call.partial + Int64(call.groups * call.kv_heads * 2 * self.config.rows) * (self.config.v_head_dim * 4)
        return sums + Int64(at * 8), call.partial + Int64(at * (self.config.v_head_dim * 4))
