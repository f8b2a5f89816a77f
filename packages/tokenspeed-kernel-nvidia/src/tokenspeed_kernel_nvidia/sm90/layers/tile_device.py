"""Types shared by all warps of the persistent kernel: the launch's arguments, a layer's call, and the shared memory."""

# mypy: ignore-errors

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int32, Int64, Uint8, cute

from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.cutedsl.registers_device import opt_barrier
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    EVENTS,
    HEAD_DIM,
    HEAD_WORDS,
    LAYER_COUNTERS,
    MOST_LAYERS,
    PAIRS,
    ROUTER_BYTES,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, MMA_WARPS
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import ROWS_AT_ONCE, Call, Layer

# Columns of the table of layers. Each column has an address, except WINDOW: the number of keys that a token sees, including its
# own.
(
    INPUT_NORM, QKV_WEIGHT, QKV_BIAS, SINKS, K_CACHE, V_CACHE, WINDOW, PROJECTION, PROJECTION_BIAS, NORM, ROUTER, ROUTER_BIAS,
    TABLE_W13, TABLE_W2,
) = range(14)  # fmt: skip
COLUMNS = 14
# Indices of `LayerCall.kept`, the CTA's values that would otherwise be computed in each layer or occupy registers:
# * FIRST_ROW, ROW_COUNT: the CTA's rows of the projection; QKV_FIRST_ROW, QKV_ROW_COUNT: its rows of qkv;
# * EXPERT_COUNT: the number of experts whose logits the CTA computes;
# * GIVEN_UP: 1 if a wait of the CTA has given up;
# * LENGTH, TOKEN, HEAD, SPLIT: the CTA's work item of attention: the number of keys, the token, the key head, and the split;
# * FIRST_QUAD, END_QUAD: the CTA's range of the layer's output, in groups of four elements;
# * LAST_TAG: the tag of the last launch's last layer;
# * QKV_PART, PART: `part_bytes` of the weights of qkv and of the projection.
FIRST_ROW, ROW_COUNT, EXPERT_COUNT, GIVEN_UP, QKV_FIRST_ROW, QKV_ROW_COUNT = range(6)
LENGTH, TOKEN, HEAD, SPLIT, FIRST_QUAD, END_QUAD, LAST_TAG, QKV_PART, PART = range(6, 15)


@dataclass(frozen=True)
class Attention:
    """The arguments of attention that all layers share.

    Attributes:
        qkv: tagged words ``[tokens, rows of qkv]``: queries, keys and values before the rotary embedding.
        partials: 64-bit words ``[tokens, query heads, splits, PARTIAL_WORDS]``, see `attend_device`.
        attended: tagged words ``[tokens, width]``: the attention's output.
        lengths: int32 ``[tokens]``: the number of keys of each token's sequence. The token's own key is the last of them.
        pages, pages_pitch: int32 ``[tokens, pages]``, and its row pitch.
        slots, slot_words: the slot where each token's key and value are stored, int32 or int64, and the pitch in 32-bit words. With
            a negative slot, they are not stored.
        table, table_pitch: cosines and sines, float32 ``[positions, HEAD_DIM]``, and the row pitch.
        page_pitch, token_pitch, head_pitch: pitches of the caches, in elements.
        page_size: the number of keys of a page.
        kv_heads, group: the number of key heads, and the number of query heads of each.
        split_bits: the base-2 logarithm of the number of CTAs that share the keys of a token and a key head.
        scale: the softmax scale times log2(e).
    """

    qkv: Int64
    partials: Int64
    attended: Int64
    lengths: Int64
    pages: Int64
    slots: Int64
    table: Int64
    page_pitch: Int64
    token_pitch: Int64
    head_pitch: Int64
    pages_pitch: Int32
    slot_words: Int32
    table_pitch: Int32
    page_size: Int32
    kv_heads: Int32
    group: Int32
    split_bits: Int32
    scale: Float32

    @property
    def splits(self) -> Int32:
        """The number of CTAs that share the keys of a token and a key head."""
        return Int32(1) << self.split_bits

    @property
    def heads(self) -> Int32:
        """The number of query heads."""
        return self.kv_heads * self.group

    @property
    def qkv_rows(self) -> Int32:
        """The number of rows of the weights of queries, keys and values."""
        return (self.kv_heads * self.group + 2 * self.kv_heads) * HEAD_DIM


@dataclass(frozen=True)
class Given:
    """The arguments of a launch. Tensors are given by their addresses.

    Attributes:
        table: int64 ``[layers, COLUMNS]``.
        residual: bfloat16 ``[tokens, hidden]``, the first layer's input.
        out: bfloat16 ``[layers, tokens, hidden]``. A layer's output is the next layer's input. With several ranks, only the last
            layer's output is stored.
        head: the counters in global memory, see `config.HEAD_WORDS`.
        outputs: tagged words ``[ranks, tokens, hidden]``: the layer's input, which is the preceding layer's output; with several
            ranks, each rank's addends.
        totals: projection plus input, likewise.
        logits: tagged words ``[tokens, experts]``.
        activated: tagged words ``[pairs, intermediate]``: the results of the experts' first GEMM.
        slots: tagged numbers ``[pairs, hidden]``: the weighted results of the experts' second GEMM.
        sent: tagged numbers ``[2, ctas, PANEL_STRIPS, tiles, 32, 2]``: the partial sums that CTAs send in each of the experts' two
            GEMMs, see `split_device`.
        tokens, width, layers: the numbers of tokens, of the projection's input features, and of layers.
        polls: the number of polls after which a wait gives up and sets the error flag.
        eps: added to the mean square of the norms.
        layer: the experts' sizes and options. The addresses of weights are 0.
        attention: the arguments of attention.
        rank: this GPU's rank among those that share the layers.
        others: int64 ``[ranks - 1]``: for each other rank, the distance from an address in this rank's scratch memory to the same
            place in the other rank's.
    """

    table: Int64
    residual: Int64
    out: Int64
    head: Int64
    outputs: Int64
    totals: Int64
    logits: Int64
    activated: Int64
    slots: Int64
    sent: Int64
    tokens: Int32
    width: Int32
    layers: Int32
    polls: Int32
    eps: Float32
    layer: Layer
    attention: Attention
    rank: Int32
    others: Int64


@dataclass(frozen=True)
class LayerCall(Call):
    """The call of one layer: the arguments of `stream`'s call, and those of the steps before the experts.

    ``x`` is the address of the normalised tokens, and ``weights`` the address of the routing weights, both in shared memory.

    Attributes:
        given: the launch's arguments.
        index: the layer's index.
        tag: the tag of the layer's words, 16 bits.
        attended_at, partials_at, router_at, squares_at: addresses in shared memory: the tokens that GEMMs with dense weights
            multiply, the warps' partial sums, this CTA's rows of the router, and the warps' sums of squares.
        chosen: the expert of each pair.
        kept: int32 values of the CTA, see FIRST_ROW.
        table: a copy of the table of layers.
        angles: cosines and sines for the token of the CTA's work item of attention.
        known_tiles, known_offsets: a cache of `page_of`, with two entries for each warp, for layers without and with a window: the
            warp's first tile in such layers, and the tile's offset in the caches. A tile of -1 is unknown.
        others: a copy of `Given.others`.
        router_full, routed: barriers with one phase per layer: the router's rows, and the lists of pairs, are in shared memory.
    """

    given: Given
    index: Int32
    tag: Int32
    attended_at: Int32
    partials_at: Int32
    router_at: Int32
    squares_at: Int32
    chosen: cute.Pointer
    kept: cute.Pointer
    table: cute.Pointer
    angles: Int32
    known_tiles: cute.Pointer
    known_offsets: cute.Pointer
    others: cute.Pointer
    router_full: cute.Pointer
    routed: cute.Pointer

    @property
    def first_row(self) -> Int32:
        """This CTA's first row of the projection."""
        return self.kept[FIRST_ROW]

    @property
    def row_count(self) -> Int32:
        """The number of this CTA's rows of the projection."""
        return self.kept[ROW_COUNT]

    @property
    def expert_count(self) -> Int32:
        """The number of experts whose logits this CTA computes. Experts are assigned to CTAs round-robin."""
        return self.kept[EXPERT_COUNT]

    @property
    def qkv_first_row(self) -> Int32:
        """This CTA's first row of qkv."""
        return self.kept[QKV_FIRST_ROW]

    @property
    def qkv_row_count(self) -> Int32:
        """The number of this CTA's rows of qkv."""
        return self.kept[QKV_ROW_COUNT]

    def counter(self, index: Any) -> Int64:
        """Returns the address of a counter of this layer, computed from an opaque index, so that it occupies no register between
        uses."""
        return self.counter_of(opt_barrier(self.index), index)

    def counter_of(self, layer: Int32, index: Any) -> Int64:
        """Returns the address of a counter of a layer. Layer -1 has counters, too: for the first layer's input."""
        # `head` is a kernel argument, which the compiler reads from constant memory. `call.counters` is computed, so it would
        # occupy registers or be spilled.
        return self.given.head + Int64(HEAD_WORDS + (layer + 1) * LAYER_COUNTERS + index) * 4

    def output_of(self, layer: Int32) -> Int64:
        """Returns the address of a layer's output."""
        return self.out + Int64(self.given.tokens) * self.layer.hidden * 2 * layer

    def address(self, column: int) -> Int64:
        """Returns the address in a column of this layer's row of the table of layers."""
        return self.address_of(self.index, column)

    def address_of(self, index: Int32, column: int) -> Int64:
        """Returns the address in a column of a layer's row of the table of layers."""
        return self.table[index * COLUMNS + column]


def call_of_layer(call: LayerCall, index: Int32, tag: Int32) -> LayerCall:
    """Returns a layer's call. ``call``: the call of layer 0; ``tag``: the tag of the last launch's last layer.

    `opt_barrier` hides from the compiler that the addresses in shared memory are the same in all layers. Otherwise the compiler
    would compute each step's addresses before the loop over layers, and they would occupy registers in all steps.
    """
    return replace(
        call,
        layer=replace(call.layer, w13=call.address_of(index, TABLE_W13), w2=call.address_of(index, TABLE_W2)),
        ring=opt_barrier(call.ring),
        rows=opt_barrier(call.rows),
        index=index,
        tag=(tag + 2 + index) & 0xFFFF,  # tag + 1 is the tag of the first layer's input
    )  # fmt: skip


def storage_of(config: Any) -> Any:
    """Returns the type of a CTA's shared memory."""

    @cute.struct
    class Storage:
        full: cute.struct.MemRange[Int64, config.stages]
        empty: cute.struct.MemRange[Int64, config.stages]
        partial_full: cute.struct.MemRange[Int64, BUFFERS]
        partial_empty: cute.struct.MemRange[Int64, BUFFERS]
        router_full: cute.struct.MemRange[Int64, 1]
        routed: cute.struct.MemRange[Int64, 1]
        items: cute.struct.MemRange[Int32, config.stages]
        partial_items: cute.struct.MemRange[Int32, BUFFERS]
        sizes: cute.struct.MemRange[Int32, 2]
        kept: cute.struct.MemRange[Int32, 15]
        known_tiles: cute.struct.MemRange[Int32, 2 * MMA_WARPS]
        known_offsets: cute.struct.MemRange[Int64, 2 * MMA_WARPS]
        table: cute.struct.MemRange[Int64, COLUMNS * MOST_LAYERS]
        others: cute.struct.MemRange[Int64, max(config.ranks - 1, 1)]
        angles: cute.struct.Align[cute.struct.MemRange[Float32, HEAD_DIM], 16]
        maxima: cute.struct.MemRange[Int32, 2 * MMA_WARPS]
        small: cute.struct.MemRange[Int32, config.pairs * MMA_WARPS // ROWS_AT_ONCE]
        factors: cute.struct.MemRange[Int32, config.pairs]
        entries: cute.struct.MemRange[Int32, PAIRS]
        order: cute.struct.MemRange[Int32, 2 * PAIRS]
        experts_of_pairs: cute.struct.MemRange[Int32, PAIRS]
        chosen: cute.struct.MemRange[Int32, PAIRS]
        weights: cute.struct.MemRange[Float32, PAIRS]
        squares: cute.struct.Align[cute.struct.MemRange[Float32, config.tokens * MMA_WARPS], 16]
        router: cute.struct.Align[cute.struct.MemRange[Uint8, ROUTER_BYTES], 128]
        partials: cute.struct.Align[cute.struct.MemRange[Uint8, config.partials_bytes], 128]
        heads: cute.struct.Align[cute.struct.MemRange[Uint8, BUFFERS * PANEL_HEAD_BYTES], 128]
        sums: cute.struct.Align[cute.struct.MemRange[Uint8, BUFFERS * config.sums_bytes], 128]
        rows: cute.struct.Align[cute.struct.MemRange[Uint8, config.rows_room], 128]
        ring: cute.struct.Align[cute.struct.MemRange[Uint8, config.stages * config.stage_bytes], 128]
        if config.trace:
            events: cute.struct.MemRange[Int64, 2 * len(EVENTS)]  # at the end of the ring buffer, see `trace_device`

    return Storage
