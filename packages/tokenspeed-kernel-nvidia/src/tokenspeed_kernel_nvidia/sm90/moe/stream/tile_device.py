"""Types shared by all warps of `kernel_device`: the call's arguments, entries, work items, and the layout of shared memory.

An *entry* is some pairs of one expert, at most `Config.pairs`, which share one read of the weights. An *item* is a work item: one
panel, or some slabs of a panel, for one entry. Items of w13 and w2 are divided into *ranges*. CTAs take ranges from a global
counter, all ranges of w13 before any of w2. So a CTA waits only for CTAs that are already running, whatever the number of CTAs. At
the end each CTA writes a part of the output. No other CTA waits for this part.

A subclass whose CTAs all run at once may split a panel between two consecutive ranges (stream-K, ``Shapes.splits``). The CTA with
the panel's last slabs computes them first, and sends its partial sums to the CTA with the panel's first slabs. That CTA computes
its slabs last, and runs the epilogue.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, Uint8, cute

from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, COUNTERS, MAX_EXPERTS, MAX_PAIRS, MMA_WARPS, Config

# Counters in global memory: the next range; finished items of w2; finished CTAs; from READY on, finished items of w13 of each
# entry.
TICKET, DONE, LEFT, READY = 0, 1, 2, COUNTERS
# Kinds of stages: slabs of the two GEMMs; the message to write the output; and the message that nothing follows.
W13, W2, COMBINE, END = range(4)
_LAST_BIT, _AHEAD_BIT, _ENTRY_BIT, _INDEX_BIT, _SLAB_BIT, _HEAD_BIT = 2, 3, 4, 15, 24, 30
_EXPERT_BITS, _FIRST_BITS = 9, 11
ENTRIES = 0  # index of the number of entries in `sizes`
ROWS_AT_ONCE = 2  # rows that the MMA warps prepare at the same time, half of the warps each


@dataclass(frozen=True)
class Layer:
    """The plan's sizes and options, and the addresses of weights.

    Attributes:
        w13, w2: the addresses of the panels of all experts, see `mxfp4.layout`.
        w13_strips, w2_strips: the number of strips of an expert.
        w13_bytes, w2_bytes: the bytes of a panel.
        w13_blocks, w2_blocks: the number of k blocks of a panel.
        w13_items, w2_items: the number of panels of an expert.
        turns: the number of ranges of w13, and of w2, that a CTA takes on average.
        experts, hidden, intermediate, top_k: the plan's sizes.
        alpha, limit, beta: the plan's options; an infinite limit means no limit.
    """

    w13: Int64
    w2: Int64
    w13_strips: Int32
    w2_strips: Int32
    w13_bytes: Int32
    w2_bytes: Int32
    w13_blocks: Int32
    w2_blocks: Int32
    w13_items: Int32
    w2_items: Int32
    turns: Int32
    experts: Int32
    hidden: Int32
    intermediate: Int32
    top_k: Int32
    alpha: Float32
    limit: Float32
    beta: Float32


@dataclass(frozen=True)
class Call:
    """The arguments of a launch, and the shared memory of a CTA. Tensors in global memory are given by their addresses.

    Attributes:
        layer: the layer.
        x, x_stride: the tokens, and the row pitch in elements.
        ids, weights: int32 and float32 ``[tokens, top_k]``, contiguous.
        out, out_stride: the output, and its row pitch in elements.
        tokens: the number of tokens.
        activated: the results of the first GEMM, bfloat16, or float32 if `Config.wide`, ``[pairs, intermediate]``.
        slots: the weighted results of the second GEMM, float32 ``[pairs, hidden]``.
        counters: the counters in global memory, see TICKET.
        pipe: the barriers of the ring buffer.
        partial: the barriers of the buffers of partial sums.
        ring: the address of the ring buffer.
        rows: the address of an entry's rows, see `rows_device`.
        maxima, small, factors: the addresses of three arrays: each warp's amax of rows, its counts of inexact elements, and the
            rows' factors.
        items: the item code of each stage, see `item_code`.
        partial_items: the item code of each buffer of partial sums.
        sums, heads: the addresses of the buffers: partial sums, and the row factors and biases of their strips.
        sizes, starts, entries, order, experts_of_pairs: the lists that `schedule_device` makes: the number of entries; the index in
            ``order`` of each expert's first pair; the entries, see `entry_code`; the pairs, sorted by expert; and the expert of
            each pair, negative if it has none.
    """

    layer: Layer
    x: Int64
    x_stride: Int64
    ids: Int64
    weights: Int64
    out: Int64
    out_stride: Int64
    tokens: Int32
    activated: Int64
    slots: Int64
    counters: Int64
    pipe: Pipeline
    partial: Pipeline
    ring: Int32
    rows: Int32
    maxima: Int32
    small: Int32
    factors: Int32
    items: cute.Pointer
    partial_items: cute.Pointer
    sums: Int32
    heads: Int32
    sizes: cute.Pointer
    starts: cute.Pointer
    entries: cute.Pointer
    order: cute.Pointer
    experts_of_pairs: cute.Pointer

    def counter(self, index: Any) -> Int64:
        """Returns the address of a counter."""
        return self.counters + Int64(index) * 4


@dataclass(frozen=True)
class Entry:
    """Some pairs of an expert: the index in ``order`` of the first pair, and the number of pairs."""

    expert: Int32
    first: Int32
    count: Int32


@dataclass(frozen=True)
class Place:
    """The place of a slab: the index of the entry, the panel within the panels of the expert, and the slab within the panel."""

    index: Int32
    panel: Int32
    slab: Int32


def entry_code(expert: Int32, first: Int32, count: Int32) -> Int32:
    """Packs an entry into an int32: 9 bits of the expert, 11 of the first pair, and the count in the upper bits."""
    return expert | first << _EXPERT_BITS | count << (_EXPERT_BITS + _FIRST_BITS)


def entry_of(code: Int32) -> Entry:
    """Unpacks an entry."""
    first = (code >> _EXPERT_BITS) & ((1 << _FIRST_BITS) - 1)
    return Entry(code & ((1 << _EXPERT_BITS) - 1), first, code >> (_EXPERT_BITS + _FIRST_BITS))


def pair_of(place: Int32) -> Int32:
    """Returns the pair of an element of the call's ``order``, which may have upper bits set, see `beyond_bit`."""
    return place & (MAX_PAIRS - 1)


def beyond_bit(item: Int32) -> Int32:
    """Returns the bit, above a pair's index in the call's ``order``, that marks the pair for the GEMM of an item: the fp8 parts do
    not represent the pair's row."""
    return Int32(MAX_PAIRS) << kind_of(item)


def item_code(kind: Any, entry: Any = 0, place: Any = 0, last: Any = 0, slab: Any = 0, is_head: Any = 0) -> Int32:
    """Packs an item into an int32.

    Args:
        kind: W13, W2, COMBINE or END.
        entry: the index of the entry.
        place: the index of the panel within the panels of the expert.
        last: 1 for the last item of an entry in its range.
        slab: the first slab of the second part of a split panel; 0: the panel is not split.
        is_head: of a split panel, 1 for the first part, 0 for the second.
    """
    part = Int32(slab) << _SLAB_BIT | Int32(is_head) << _HEAD_BIT
    return Int32(kind) | Int32(last) << _LAST_BIT | Int32(entry) << _ENTRY_BIT | Int32(place) << _INDEX_BIT | part


def kind_of(item: Int32) -> Int32:
    """Returns W13, W2, COMBINE or END."""
    return item & ((1 << _LAST_BIT) - 1)


def is_last(item: Int32) -> Any:
    """Whether the item is the last of its entry within its range."""
    return (item >> _LAST_BIT & 1) == 1


def ahead_of(item: Int32) -> Int32:
    """Returns the message that announces items of this item's entry. When the MMA warps get this message, they prepare the entry's
    rows, while the bulk copies of the items' weights are already in flight.
    """
    return item | 1 << _AHEAD_BIT


def is_ahead(item: Int32) -> Any:
    """Whether a work item is a message of `ahead_of`."""
    return (item >> _AHEAD_BIT & 1) == 1


def index_of(item: Int32) -> Int32:
    """Returns the index of an item's entry."""
    return item >> _ENTRY_BIT & ((1 << (_INDEX_BIT - _ENTRY_BIT)) - 1)


def panel_of(item: Int32) -> Int32:
    """Returns the index of an item's panel within the panels of its expert."""
    return item >> _INDEX_BIT & ((1 << (_SLAB_BIT - _INDEX_BIT)) - 1)


def split_of(item: Int32) -> Int32:
    """Returns the first slab of the second part of an item's panel, or 0 if the panel is not split."""
    return item >> _SLAB_BIT & ((1 << (_HEAD_BIT - _SLAB_BIT)) - 1)


def is_head(item: Int32) -> Any:
    """Whether an item is the first part of a split panel."""
    return (item >> _HEAD_BIT & 1) == 1


def is_tail(item: Int32) -> Any:
    """Whether an item is the second part of a split panel."""
    return (split_of(item) > 0) & (item >> _HEAD_BIT & 1 == 0)


def rows_of(item: Int32) -> Int32:
    """Returns an identifier of an item's entry and GEMM. Items with the same identifier use the same rows in shared memory."""
    return item & ((1 << _INDEX_BIT) - 1 - (1 << _LAST_BIT))


class Shapes:
    """The sizes that follow from a configuration, and the shared memory."""

    splits = False  # whether panels are split between CTAs

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.wide = config.wide
        self.tiles = config.tiles
        self.layers = config.layers
        self.mma_tiles = config.columns // 8
        self.stages = config.stages
        self.slab = config.slab
        self.group = config.group

    def storage(self) -> Any:
        """Returns the type of a CTA's shared memory."""
        config = self.config

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            partial_full: cute.struct.MemRange[Int64, BUFFERS]
            partial_empty: cute.struct.MemRange[Int64, BUFFERS]
            items: cute.struct.MemRange[Int32, config.stages]
            partial_items: cute.struct.MemRange[Int32, BUFFERS]
            sizes: cute.struct.MemRange[Int32, 2]
            totals: cute.struct.MemRange[Int32, 32]
            maxima: cute.struct.MemRange[Int32, 2 * MMA_WARPS]
            small: cute.struct.MemRange[Int32, config.pairs * MMA_WARPS // ROWS_AT_ONCE]
            factors: cute.struct.MemRange[Int32, config.pairs]
            counts: cute.struct.MemRange[Int32, MAX_EXPERTS]
            starts: cute.struct.MemRange[Int32, MAX_EXPERTS]
            entries: cute.struct.MemRange[Int32, MAX_PAIRS]
            order: cute.struct.MemRange[Int32, MAX_PAIRS]
            experts_of_pairs: cute.struct.MemRange[Int32, MAX_PAIRS]
            heads: cute.struct.Align[cute.struct.MemRange[Uint8, BUFFERS * PANEL_HEAD_BYTES], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Uint8, BUFFERS * config.sums_bytes], 128]
            rows: cute.struct.Align[cute.struct.MemRange[Uint8, config.rows_bytes], 128]
            ring: cute.struct.Align[cute.struct.MemRange[Uint8, config.stages * config.stage_bytes], 128]

        return Storage
