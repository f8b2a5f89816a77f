"""What all warps of `mla_decode_device` share: the call, rings in shared memory, and how work follows from lengths."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, LEAST_SHARE, ROPE, ROWS, STARTING_BLOCKS, Config
from tokenspeed_kernel_nvidia.sm90.attention.share_device import Sharing
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of, load_int, opt_barrier
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring, Tma

# Warpgroups: one loads, one computes scores, two have half of the output's columns each.
SCORES, VALUES = 1, 2
READERS = 2  # warpgroups with values
THREADS = 128 * 4
# Numbers of the plan, in shared memory. The blocks of all units, one after another, are numbered, and before those of each unit
# come STARTING numbers of no block. A CTA begins with the unit UNIT, whose first block has the number FIRST, at the block with the
# number BEGIN, and ends before END. A group has SHARE numbers.
UNIT, FIRST, BEGIN, END, SHARE, STARTING = range(6)
# Named barriers: that the plan is there, and that of the warpgroup with scores.
PLANNED, SCORED = 1, 2
PLANNERS = 32 + 3 * 128

PIECE = 128  # columns of a block's latents that lie together, with a barrier: scores begin when the first piece is there
PIECES = LATENT // PIECE  # of a block; the two warpgroups with values have every other one
PIECE_PANELS = PIECE // PANEL
PANEL_BYTES = ROWS * PANEL * 2
NOTES = 3 * ROWS + 4  # numbers beside a block's probabilities: see `Notes`


@dataclass(frozen=True)
class Notes:
    """What the warpgroup with scores tells those with values beside probabilities of a block.

    Attributes:
        at: what each row's sums are to be multiplied by, then each row's maximum and the sum of its exponentials, which are there
            with the last block of a unit only, then whether any row of a warp is to be multiplied.
    """

    at: cute.Pointer

    def factor(self, row: Int32) -> cute.Pointer:
        return self.at + row

    def sums(self, row: Int32) -> cute.Pointer:
        return self.at + ROWS + 2 * row

    def grown(self, warp: Int32) -> cute.Pointer:
        return self.at + 3 * ROWS + warp

    def chosen(self, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Which rows of a block of gathered keys are any: a bit each. They lie where sums do: who writes those has read these."""
        return cute.recast_ptr(self.at + ROWS, dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """Queries or the cache as bulk copies see them.

    Attributes:
        latents: boxes of a panel of latents.
        others: boxes of the rotary part; None where they are alike.
    """

    latents: Tma
    others: Tma | None

    @property
    def ropes(self) -> Tma:
        return self.latents if self.others is None else self.others


@dataclass(frozen=True)
class Table:
    """Where an array is: its address, and how many elements further those of the next row and column are."""

    address: Int64
    row: Int64
    column: Int64


@dataclass(frozen=True)
class Call:
    """What a CTA is asked for, and its shared memory.

    A *unit* is the new tokens of a sequence that share a tile, with all heads: of 64 heads and more one token, and of 16 four.

    Attributes:
        page_table: of int32 ``[batch, max_pages]``.
        cache_seqlens: address of int32 ``[batch]``.
        batch: units of all sequences.
        units: of a sequence.
        q_len: new tokens of a sequence.
        max_seqlen_k: lengths beyond are taken for this one.
        out: tokens and heads.
        lse: address of float32 ``[tokens, heads]``, or 0.
        partial: address of partial results.
        groups: that share the work; a group is a cluster of CTAs, each with its own heads.
        page_shift: log2 of the page size.
        scale: softmax_scale * log2(e).
        group, rank: this CTA's group, and its place in it.
        plan: see UNIT.
        storage: see `Tiles.storage`.
        q_scale, kv_scale: addresses of the scales of fp8 queries and of an fp8 cache, or 0; None where neither is fp8.
        cu_seqlens_q, is_causal: of `mla_extend_device`, and None else.
    """

    page_table: Table
    cache_seqlens: Int64
    batch: Int32
    units: Int32
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

    # Addresses in shared memory are computed where they are used, so that none takes a register in between.

    @property
    def pieces(self) -> Pipeline:
        """The ring of pieces of latents."""
        return pipeline(self.storage.pieces_full, self.storage.pieces_empty)

    @property
    def ropes(self) -> Pipeline:
        """The ring of rotary parts, whose places probabilities take."""
        return pipeline(self.storage.ropes_full, self.storage.ropes_empty)

    @property
    def probs_full(self) -> Barriers:
        """That probabilities of a block are in the place of its rotary part."""
        return Barriers(self.storage.probs_full.data_ptr())

    def end(self) -> Int32:
        """`END`, read where it is asked for: it would take a register in between."""
        return self.plan[opt_barrier(Int32(END))]

    def notes(self, at: Cursor) -> Notes:
        """Beside the probabilities of a stage."""
        return Notes(self.storage.notes.data_ptr() + at.stage * NOTES)


class Tiles(Sharing):
    """Shapes and shared memory of a configuration, and the pieces of a unit of work."""

    every_factor = False  # whether notes have factors of rows whose maximum has not grown, too: 1
    kept_sums = 0  # numbers in shared memory, behind the notes, for sums that are read after a stage is released

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.stored = self.dtype  # what shared memory is declared as
        self.pieces = Ring(ROWS, PIECE, config.pieces)
        self.ropes = Ring(ROWS, ROPE, config.stages)
        self.others = Ring(ROWS, LATENT + ROPE - config.kept, 1)  # queries that are not in registers

    def storage(self) -> Any:
        config, dtype = self.config, self.stored

        @cute.struct
        class Storage:
            pieces_full: cute.struct.MemRange[Int64, config.pieces]
            pieces_empty: cute.struct.MemRange[Int64, config.pieces]
            ropes_full: cute.struct.MemRange[Int64, config.stages]
            ropes_empty: cute.struct.MemRange[Int64, config.stages]
            probs_full: cute.struct.MemRange[Int64, config.stages]
            plan: cute.struct.MemRange[Int32, 8]
            notes: cute.struct.Align[cute.struct.MemRange[Float32, config.stages * NOTES + self.kept_sums], 16]
            pieces: cute.struct.Align[cute.struct.MemRange[dtype, self.pieces.size], 1024]
            ropes: cute.struct.Align[cute.struct.MemRange[dtype, self.ropes.size], 1024]
            others: cute.struct.Align[cute.struct.MemRange[dtype, max(self.others.size, 16)], 1024]

        return Storage

    def panel_at(self, call: Call, at: Cursor, panel: int) -> Int32:
        """The address of a panel of a piece."""
        return call.storage.pieces.data_ptr().toint() + (at.stage * self.pieces.panels + panel) * PANEL_BYTES

    def rope_at(self, call: Call, at: Cursor) -> Int32:
        """The address of a rotary part, or of probabilities."""
        return call.storage.ropes.data_ptr().toint() + at.stage * (ROWS * self.ropes.row_bytes)

    @cute.jit
    def release(self, barriers: Barriers, at: Cursor):
        """A warp is done with what copies of all CTAs of the cluster overwrite."""
        barrier = barriers.of(at)
        for rank in cutlass.range_constexpr(self.config.cluster):
            with cute.arch.elect_one():
                if cutlass.const_expr(self.config.cluster == 1):
                    cute.arch.mbarrier_arrive(barrier)
                else:
                    cute.arch.mbarrier_arrive(barrier, rank)

    # -- units -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def place_of(self, call: Call, unit: Int32):
        """Returns a unit's sequence, its first new token, and how many it has."""
        sequence = unit // call.units
        first = (unit - sequence * call.units) * self.config.tokens_of_tile
        return sequence, first, cutlass.min(call.q_len - first, self.config.tokens_of_tile)

    @cute.jit
    def tile_of(self, call: Call, unit: Int32):
        """Returns the first token and the first head of this CTA's tile of a unit, and how many tokens it has."""
        sequence, first, tokens = self.place_of(call, unit)
        return sequence * call.q_len + first, call.rank * ROWS, tokens

    def next_unit(self, call: Call, unit: Int32) -> Int32:
        return unit + 1

    def most_units(self, call: Call) -> Int32:
        """Returns how many units there are at most."""
        return call.batch

    @cute.jit
    def length_of(self, call: Call, unit: Int32):
        """Returns how many tokens of the cache the last token of a unit sees. Behind the last unit, that one stands for it."""
        sequence, first, tokens = self.place_of(call, cutlass.min(unit, call.batch - 1))
        length = cutlass.min(load_int(call.cache_seqlens + Int64(sequence) * 4, False), call.max_seqlen_k)
        return cutlass.max(length - call.q_len + first + tokens, 0)

    @cute.jit
    def visible(self, call: Call, length: Int32):
        """Returns the first position that is seen, the first block, and how many blocks; one where there is nothing to see."""
        return Int32(0), Int32(0), cutlass.max((length + (ROWS - 1)) // ROWS, 1)

    @cute.jit
    def share_of(self, call: Call, total: Int32, blocks: Int32):
        """Returns how many numbers of blocks a group has, and how many come before a unit's blocks: see `STARTING`.

        Where units are all alike, it is a multiple or a part of a unit's blocks, if not many more than an even share. What lies in
        several groups costs partial results, which are twice as large as the output, and more time to merge them. Else groups with
        many units have fewer blocks.
        """
        starting = cutlass.select_(total == blocks * call.batch, Int32(0), Int32(STARTING_BLOCKS))
        share = cutlass.max((total + starting * call.batch + call.groups - 1) // call.groups, LEAST_SHARE)
        if starting == 0:
            even = (share + blocks - 1) // blocks * blocks
            if blocks > share:
                parts = blocks // share
                even = (blocks + parts - 1) // parts
            if even * 16 <= share * 17:
                share = even
        return share, starting
