"""Definitions for all warps of `kernel_device`: the kernel's arguments, the layout of shared memory, and each role's threads."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, opt_barrier
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring, Tma

# The index of the score warpgroup, and of the first value warpgroup. Warpgroup 0 loads, 1 computes scores, and 2 and 3 compute half
# of the output's columns each.
SCORES, VALUES = 1, 2
READERS = 2  # number of value warpgroups
THREADS = 128 * 4
# Indices into the CTA's plan in shared memory. The blocks of all work items, concatenated, form a queue. STARTING empty positions
# precede each item's blocks; they represent the cost of starting an item. A CTA's range is the positions from BEGIN up to END. The
# range begins in item ITEM, whose first block is at position FIRST. A group's full range has PER_GROUP positions.
ITEM, FIRST, BEGIN, END, PER_GROUP, STARTING = range(6)
# Named barriers: PLANNED completes when the plan has been written, and SCORED synchronises the score warpgroup.
PLANNED, SCORED = 1, 2
PLANNERS = 32 + 3 * 128

LATENT_CHUNK = 128  # columns of a latent chunk. Each chunk has its own barriers, so q @ k starts when the first chunk is loaded
LATENT_CHUNKS = LATENT // LATENT_CHUNK  # latent chunks per block; each value warpgroup computes every other chunk
CHUNK_PANELS = LATENT_CHUNK // PANEL
PANEL_BYTES = ROWS * PANEL * 2
FP8 = cutlass.Float8E4M3FN
FP8_CHUNK_BYTES = 16  # granularity of the shared-memory swizzle
NOTES = 3 * ROWS + 4  # float32 elements of a block's `Notes`


@dataclass(frozen=True)
class Notes:
    """Data that the score warpgroup passes to the value warpgroups with a block's probabilities.

    Attributes:
        at: the shared-memory address of three arrays. The first has the rescale factor of each row's accumulators. The second has
            each row's max and sum, valid only for the last block of a work item. The third says for each score warp whether one of
            its rows must be rescaled.
    """

    at: cute.Pointer

    def factor(self, row: Int32) -> cute.Pointer:
        """Returns the address of a row's rescale factor."""
        return self.at + row

    def sums(self, row: Int32) -> cute.Pointer:
        """Returns the address of a row's max, which its row sum follows."""
        return self.at + ROWS + 2 * row

    def grown(self, warp: Int32) -> cute.Pointer:
        """Returns the address of a score warp's flag: not 0 if one of its 16 rows must be rescaled."""
        return self.at + 3 * ROWS + warp

    def chosen(self, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Returns the address of a bit mask of a gathered block's valid tokens. The mask shares memory with the row sums, which are
        written only after the mask has been read.
        """
        return cute.recast_ptr(self.at + ROWS, dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """TMA views of the queries, or of the cache.

    Attributes:
        latents: a view whose boxes are panels of latents.
        others: a view whose boxes are rotary parts; None if the boxes of ``latents`` have the same size.
    """

    latents: Tma
    others: Tma | None

    @property
    def ropes(self) -> Tma:
        """The view whose boxes are rotary parts."""
        return self.latents if self.others is None else self.others


@dataclass(frozen=True)
class Table:
    """A matrix in global memory: its address, and its strides between rows and between columns in elements."""

    address: Int64
    row: Int64
    column: Int64


@dataclass(frozen=True)
class Call:
    """A CTA's view of the kernel's arguments, and its shared memory.

    A work item consists of the new tokens of a sequence that fit in a tile, with all heads: one token with 64 heads, four tokens
    with 16 heads.

    Attributes:
        page_table: address of int32 ``[batch, max_pages]``.
        cache_seqlens: address of int32 ``[batch]``.
        batch: number of work items of all sequences together.
        items: number of work items per sequence.
        q_len: number of new tokens per sequence.
        max_seqlen_k: the maximum number of tokens of a sequence in the cache; larger values of cache_seqlens are clamped.
        out: the output, with tokens as rows and heads as columns.
        lse: address of float32 ``[tokens, heads]``, or 0.
        partial: address of the partial results in the workspace.
        groups: number of CTA groups among which the blocks are divided. A CTA group is a cluster of CTAs, each with its own heads.
        page_shift: log2 of the page size.
        scale: softmax_scale * log2(e).
        group, rank: this CTA's group, and its rank in that group.
        plan: the CTA's plan in shared memory, see ITEM.
        storage: all of shared memory, see `SharedMemory.storage`.
        q_scale, kv_scale: addresses of the scales of fp8 queries and of an fp8 cache, or 0; None if neither is fp8.
        cu_seqlens_q, is_causal: arguments of `mla_extend.kernel_device`; None in other kernels.
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

    # The properties below compute shared-memory addresses at each use. So no address occupies a register between uses.

    @property
    def latent_chunks(self) -> Pipeline:
        """The barriers of the ring of latent chunks."""
        return pipeline(self.storage.latent_chunks_full, self.storage.latent_chunks_empty)

    @property
    def ropes(self) -> Pipeline:
        """The barriers of the ring of rotary parts, which probabilities overwrite."""
        return pipeline(self.storage.ropes_full, self.storage.ropes_empty)

    @property
    def probs_full(self) -> Barriers:
        """Barriers, one per stage of the rotary ring, that complete when a block's probabilities have been stored over its rotary
        part."""
        return Barriers(self.storage.probs_full.data_ptr())

    def end(self) -> Int32:
        """Returns the end of the CTA's range, plan entry `END`. It is read at each use, to save a register."""
        return self.plan[opt_barrier(Int32(END))]

    def notes(self, at: Cursor) -> Notes:
        """Returns the `Notes` of the block whose probabilities are in the rotary ring's stage ``at``."""
        return Notes(self.storage.notes.data_ptr() + at.stage * NOTES)


@dataclass(frozen=True)
class SharedMemory:
    """The shared-memory layout of a configuration, made by `shared_memory`.

    Attributes:
        stored: the dtype with which the tiles are declared.
        latent_chunks: the ring of latent chunks.
        ropes: the ring of rotary parts. A block's probabilities have as many bytes per row as its rotary part, and overwrite it.
        others: the columns of Q that are in shared memory.
        sums: number of float32 elements after the `Notes`, for the factors and row sums of `fp8_sums_device`.
    """

    config: Config
    stored: type[cutlass.Numeric]
    latent_chunks: Ring
    ropes: Ring
    others: Ring
    sums: int

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
            notes: cute.struct.Align[cute.struct.MemRange[Float32, config.stages * NOTES + self.sums], 16]
            latent_chunks: cute.struct.Align[cute.struct.MemRange[dtype, self.latent_chunks.size], 1024]
            ropes: cute.struct.Align[cute.struct.MemRange[dtype, self.ropes.size], 1024]
            others: cute.struct.Align[cute.struct.MemRange[dtype, max(self.others.size, 16)], 1024]

        return Storage

    def panel_at(self, call: Call, at: Cursor, panel: int) -> Int32:
        """Returns the shared-memory address of a panel of the latent chunk at ``at``."""
        return call.storage.latent_chunks.data_ptr().toint() + (at.stage * self.latent_chunks.panels + panel) * PANEL_BYTES

    def rope_at(self, call: Call, at: Cursor) -> Int32:
        """Returns the shared-memory address of the rotary part in stage ``at``, and of the probabilities that overwrite it."""
        return call.storage.ropes.data_ptr().toint() + at.stage * (ROWS * self.ropes.row_bytes)


def shared_memory(config: Config) -> SharedMemory:
    """Returns the shared-memory layout of a configuration. With an fp8 cache, a latent chunk is one panel of 128 columns."""
    if isinstance(config, Fp8Config):
        return SharedMemory(
            config,
            cutlass.Uint8,
            Ring(ROWS, LATENT_CHUNK, config.latent_chunks, LATENT_CHUNK, LATENT_CHUNK),
            Ring(ROWS, ROPE, config.stages, ROPE, ROPE),
            Ring(ROWS, config.others, 1, LATENT_CHUNK, LATENT_CHUNK),
            READERS * 4 * ROWS,
        )
    return SharedMemory(
        config,
        dtype_of(config.dtype),
        Ring(ROWS, LATENT_CHUNK, config.latent_chunks),
        Ring(ROWS, ROPE, config.stages),
        Ring(ROWS, LATENT + ROPE - config.kept, 1),
        0,
    )


@cute.jit
def release(barriers: Barriers, at: Cursor, ctas: cutlass.Constexpr[int]):
    """Releases a ring stage on behalf of one consumer warp. The warp arrives on the barriers of all CTAs of the cluster, because
    loads of all these CTAs overwrite the stage."""
    barrier = barriers.of(at)
    for rank in cutlass.range_constexpr(ctas):
        with cute.arch.elect_one():
            if cutlass.const_expr(ctas == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, rank)


# `opt_barrier` makes the compiler recompute thread indices at each use. So they occupy no registers between uses.


@cute.jit
def thread_of_scores() -> Int32:
    """Returns this thread's index in the score warpgroup."""
    thread, _, _ = cute.arch.thread_idx()
    return opt_barrier(thread) - SCORES * 128


@cute.jit
def thread_of_values() -> Int32:
    """Returns this thread's index in the two value warpgroups."""
    thread, _, _ = cute.arch.thread_idx()
    return opt_barrier(thread) - VALUES * 128


def row_of_values(thread: Int32) -> Int32:
    """Returns the first of a value thread's two query rows in an accumulator; the other row is 8 further."""
    return ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)
