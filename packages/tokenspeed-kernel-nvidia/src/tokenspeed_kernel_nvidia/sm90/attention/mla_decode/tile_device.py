"""Common to all warps of `kernel_device`: the kernel's arguments, rings in shared memory, work items from lengths."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_int, opt_barrier
from tokenspeed_kernel_nvidia.cutedsl.split_kv_device import SplitKv
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, LEAST_BLOCKS, ROPE, ROWS, STARTING_BLOCKS, Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring, Tma

# First warpgroup of each role: warpgroup 0 loads, 1 computes scores, 2 and 3 compute half of the output's columns each.
SCORES, VALUES = 1, 2
READERS = 2  # value warpgroups
THREADS = 128 * 4
# Indices into the CTA's plan in shared memory. The blocks of all work items, concatenated, form a queue; STARTING empty positions
# precede each item's blocks, as the cost of starting it. A CTA's range is the positions from BEGIN up to END. It begins in item
# ITEM, whose first block is at position FIRST. A group's full range has PER_GROUP positions.
ITEM, FIRST, BEGIN, END, PER_GROUP, STARTING = range(6)
# Named barriers: the plan has been written; the barrier of the score warpgroup.
PLANNED, SCORED = 1, 2
PLANNERS = 32 + 3 * 128

LATENT_CHUNK = 128  # columns of a latent chunk, which has its own barriers: q @ k starts when the first chunk is loaded
LATENT_CHUNKS = LATENT // LATENT_CHUNK  # chunks of a block; the two value warpgroups take every other one
CHUNK_PANELS = LATENT_CHUNK // PANEL
PANEL_BYTES = ROWS * PANEL * 2
NOTES = 3 * ROWS + 4  # float32 elements of a block's `Notes`


@dataclass(frozen=True)
class Notes:
    """What the score warpgroup passes to the value warpgroups with a block's probabilities.

    Attributes:
        at: each row's rescale factor of accumulators; then each row's row max and row sum, valid with the last block of a work item
            only; then for each warp whether any of its rows must be rescaled.
    """

    at: cute.Pointer

    def factor(self, row: Int32) -> cute.Pointer:
        return self.at + row

    def sums(self, row: Int32) -> cute.Pointer:
        return self.at + ROWS + 2 * row

    def grown(self, warp: Int32) -> cute.Pointer:
        return self.at + 3 * ROWS + warp

    def chosen(self, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """A bit mask of the valid rows of a gathered block. It aliases the sums, which are written only after it has been read."""
        return cute.recast_ptr(self.at + ROWS, dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """TMA views of queries or cache.

    Attributes:
        latents: boxes of a panel of latents.
        others: boxes of the rotary part; None where the same box fits both.
    """

    latents: Tma
    others: Tma | None

    @property
    def ropes(self) -> Tma:
        return self.latents if self.others is None else self.others


@dataclass(frozen=True)
class Table:
    """A matrix in global memory: its address, and strides of rows and columns in elements."""

    address: Int64
    row: Int64
    column: Int64


@dataclass(frozen=True)
class Call:
    """The kernel's arguments as a CTA sees them, and its shared memory.

    A work item is the new tokens of a sequence that fit a tile, with all heads: one token with 64 heads, four with 16.

    Attributes:
        page_table: of int32 ``[batch, max_pages]``.
        cache_seqlens: address of int32 ``[batch]``.
        batch: work items of all sequences.
        items: work items per sequence.
        q_len: new tokens of a sequence.
        max_seqlen_k: larger sequence lengths are clamped to it.
        out: output, with tokens as rows and heads as columns.
        lse: address of float32 ``[tokens, heads]``, or 0.
        partial: address of partial results.
        groups: number of groups, among which the work is split; a group is a cluster of CTAs, each with its own heads.
        page_shift: log2 of the page size.
        scale: softmax_scale * log2(e).
        group, rank: this CTA's group, and its rank in it.
        plan: see ITEM.
        storage: see `Tiles.storage`.
        q_scale, kv_scale: addresses of the scales of fp8 queries and of an fp8 cache, or 0; None where neither is fp8.
        cu_seqlens_q, is_causal: for `mla_extend.kernel_device`, else None.
    """

    page_table: Table
    cache_seqlens: Int64
    batch: Int32
    items: Int32
    q_len: Int32
    max_seqlen_k: Int32
    out: Table
    lse: Int64
    partial: Int64
    groups: Int32
    page_shift: Int32
    scale: Float32
    group: Int32
    rank: Int32
    plan: cute.Pointer
    storage: Any
    q_scale: Int64 | None = None
    kv_scale: Int64 | None = None
    cu_seqlens_q: Int64 | None = None
    is_causal: Int32 | None = None

    # Addresses in shared memory are computed at each use, so that none occupies a register in between.

    @property
    def latent_chunks(self) -> Pipeline:
        """The ring of latent chunks."""
        return pipeline(self.storage.latent_chunks_full, self.storage.latent_chunks_empty)

    @property
    def ropes(self) -> Pipeline:
        """The ring of rotary parts, which probabilities overwrite."""
        return pipeline(self.storage.ropes_full, self.storage.ropes_empty)

    @property
    def probs_full(self) -> Barriers:
        """Barriers by stage: a block's probabilities have been stored over its rotary part."""
        return Barriers(self.storage.probs_full.data_ptr())

    def end(self) -> Int32:
        """`END`, read from the plan at each use, to save a register."""
        return self.plan[opt_barrier(Int32(END))]

    def notes(self, at: Cursor) -> Notes:
        """The notes of a stage's probabilities."""
        return Notes(self.storage.notes.data_ptr() + at.stage * NOTES)


class Tiles(SplitKv):
    """Base of the mixins: shapes and shared memory of a configuration, and what belongs to a work item."""

    every_factor = False  # whether notes also hold the factors, 1, of rows whose max has not grown
    kept_sums = 0  # float32 elements after the notes, for sums that are read after a stage is released

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.stored = self.dtype  # dtype that shared memory is declared with
        self.latent_chunks = Ring(ROWS, LATENT_CHUNK, config.latent_chunks)
        self.ropes = Ring(ROWS, ROPE, config.stages)
        self.others = Ring(ROWS, LATENT + ROPE - config.kept, 1)  # queries that are not in registers

    def storage(self) -> Any:
        config, dtype = self.config, self.stored

        @cute.struct
        class Storage:
            latent_chunks_full: cute.struct.MemRange[Int64, config.latent_chunks]
            latent_chunks_empty: cute.struct.MemRange[Int64, config.latent_chunks]
            ropes_full: cute.struct.MemRange[Int64, config.stages]
            ropes_empty: cute.struct.MemRange[Int64, config.stages]
            probs_full: cute.struct.MemRange[Int64, config.stages]
            plan: cute.struct.MemRange[Int32, 8]
            notes: cute.struct.Align[cute.struct.MemRange[Float32, config.stages * NOTES + self.kept_sums], 16]
            latent_chunks: cute.struct.Align[cute.struct.MemRange[dtype, self.latent_chunks.size], 1024]
            ropes: cute.struct.Align[cute.struct.MemRange[dtype, self.ropes.size], 1024]
            others: cute.struct.Align[cute.struct.MemRange[dtype, max(self.others.size, 16)], 1024]

        return Storage

    def panel_at(self, call: Call, at: Cursor, panel: int) -> Int32:
        """The address of a panel of a chunk."""
        return call.storage.latent_chunks.data_ptr().toint() + (at.stage * self.latent_chunks.panels + panel) * PANEL_BYTES

    def rope_at(self, call: Call, at: Cursor) -> Int32:
        """The address of a stage's rotary part, or of the probabilities there."""
        return call.storage.ropes.data_ptr().toint() + at.stage * (ROWS * self.ropes.row_bytes)

    @cute.jit
    def release(self, barriers: Barriers, at: Cursor):
        """A warp releases a stage: it arrives in every CTA of the cluster, as copies of all of them overwrite the stage."""
        barrier = barriers.of(at)
        for rank in cutlass.range_constexpr(self.config.cluster):
            with cute.arch.elect_one():
                if cutlass.const_expr(self.config.cluster == 1):
                    cute.arch.mbarrier_arrive(barrier)
                else:
                    cute.arch.mbarrier_arrive(barrier, rank)

    # -- work items ------------------------------------------------------------------------------------------------------------

    @cute.jit
    def tokens_of(self, call: Call, item: Int32):
        """Returns a work item's sequence, its first new token in that, and its number of tokens."""
        sequence = item // call.items
        first = (item - sequence * call.items) * self.config.tokens_of_tile
        return sequence, first, cutlass.min(call.q_len - first, self.config.tokens_of_tile)

    @cute.jit
    def tile_of(self, call: Call, item: Int32):
        """Returns first token, first head and number of tokens of this CTA's tile of a work item."""
        sequence, first, tokens = self.tokens_of(call, item)
        return sequence * call.q_len + first, call.rank * ROWS, tokens

    def next_item(self, call: Call, item: Int32) -> Int32:
        return item + 1

    def most_items(self, call: Call) -> Int32:
        """Returns an upper bound of the number of work items."""
        return call.batch

    @cute.jit
    def length_of(self, call: Call, item: Int32):
        """Returns how many cache tokens a work item's last token sees. Items beyond the last one are clamped to it."""
        sequence, first, tokens = self.tokens_of(call, cutlass.min(item, call.batch - 1))
        length = cutlass.min(load_int(call.cache_seqlens + Int64(sequence) * 4, False), call.max_seqlen_k)
        return cutlass.max(length - call.q_len + first + tokens, 0)

    @cute.jit
    def visible(self, call: Call, length: Int32):
        """Returns the first visible position, its block, and the number of visible blocks, at least 1."""
        return Int32(0), Int32(0), cutlass.max((length + (ROWS - 1)) // ROWS, 1)

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, blocks: Int32):
        """Returns the queue positions per group, and the starting cost of a work item in positions: see `STARTING`.

        Where all items have equally many blocks, the range is a multiple or a fraction of an item, if that is at most 1/16 more
        than an even split: each split of an item costs partial results, twice as large as the output, and their merge. Otherwise
        the starting cost gives groups with many items fewer blocks.
        """
        starting = cutlass.select_(total == blocks * call.batch, Int32(0), Int32(STARTING_BLOCKS))
        per_group = cutlass.max((total + starting * call.batch + call.groups - 1) // call.groups, LEAST_BLOCKS)
        if starting == 0:
            even = (per_group + blocks - 1) // blocks * blocks
            if blocks > per_group:
                parts = blocks // per_group
                even = (blocks + parts - 1) // parts
            if even * 16 <= per_group * 17:
                per_group = even
        return per_group, starting
