"""The persistent kernel with a trace: threads store the SM's clock at some points of each layer, see `config.EVENTS`.

Clocks of SMs differ. So each CTA also stores its clock and the global timer at its start and at its end. An event costs about 40
cycles. Events are kept in shared memory, in one set for even and one for odd layers, because the producer warp is ahead by up to a
layer. After each layer, an MMA warp moves its own events and the producer's to global memory, and an epilogue thread moves its own.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.layers.config import (
    ATTENDED,
    CHAIN,
    EVENTS,
    HEAD_WORDS,
    LAYER_COUNTERS,
    LOGITS,
    PARTIALS,
    PRODUCED,
    QKV,
    TOTALS,
    WIDTH_PITCH,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.layers.kernel_device import Persistent
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import QKV_WEIGHT, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import FINISH_WARP, LOAD_WARP
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import W2, W13, Place, kind_of

_COUNT = len(EVENTS)
_INPUT_SEEN, _INPUT_NORMED, _QKV_FULL, _QKV_MULTIPLIED, _QKV_STORED = range(5)
_QUERIES_SEEN, _VALUES_MULTIPLIED, _PARTIALS_STORED, _ATTENDED_STORED, _ATTENDED_SEEN = range(5, 10)
_FULL, _PROJECTED, _TOTALS_STORED, _TOTALS_SEEN, _MET, _NORMED = range(10, 16)
_LOGITS_STORED, _LOGITS_SEEN, _CHOSEN, _LISTED = range(16, 20)
_BEGUN, _SPLIT, _SLAB, _MULTIPLIED = range(20, 24)  # for w13; the events for w2 are four indices later
_DONE, _WRITTEN = range(28, 30)
# _ISSUED is for w13; the next index is for w2.
_QKV_BEGUN, _QKV_ISSUED, _PROJECTION_ISSUED, _KNOWN, _ISSUED = range(CHAIN, CHAIN + 5)
# The events of a thread's own words, for the counters with which words are published.
_STORED = {QKV: _QKV_STORED, PARTIALS: _PARTIALS_STORED, ATTENDED: _ATTENDED_STORED, TOTALS: _TOTALS_STORED, LOGITS: _LOGITS_STORED}
_FINISHED = CHAIN + PRODUCED  # for w13; the next index is for w2
_MMA, _LOAD, _FINISH = 0, 32 * LOAD_WARP, 32 * FINISH_WARP  # threads that store events


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Traced(config)


def store_clock(address: Any) -> None:
    """Stores the SM's clock in shared memory."""
    cute.arch.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[address, cute.arch.clock64()])


def store_first_clock(address: Any) -> None:
    """Stores the SM's clock in shared memory, if the address holds 0."""
    cute.arch.inline_ptx(
        "{ .reg .b64 old; .reg .pred none; ld.shared.b64 old, [{$r0}]; setp.eq.s64 none, old, 0;"
        " @none st.shared.b64 [{$r0}], {$r1}; }",
        read_only_args=[address, cute.arch.clock64()],
    )


def store_anchor(address: Any) -> None:
    """Stores the SM's clock and the global timer in global memory."""
    cute.arch.inline_ptx(
        "st.global.b64 [{$r0}], {$r1}; st.global.b64 [{$r0} + 8], {$r2};",
        read_only_args=[address, cute.arch.clock64(), cute.arch.globaltimer()],
    )


def move_event(to: Any, source: Any) -> None:
    """Copies an event from shared to global memory, and sets it to 0 in shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b64 found, none; mov.b64 none, 0; ld.shared.b64 found, [{$r1}]; st.global.b64 [{$r0}], found;"
        " st.shared.b64 [{$r1}], none; }",
        read_only_args=[to, source],
    )


def clear_event(address: Any) -> None:
    """Stores 0 in shared memory."""
    cute.arch.inline_ptx("{ .reg .b64 none; mov.b64 none, 0; st.shared.b64 [{$r0}], none; }", read_only_args=[address])


class Traced(Persistent):
    """The kernel of one configuration with a trace. The methods call those of `Persistent`, and store events before and after the
    calls."""

    @cute.jit
    def event_at(self, call: LayerCall, event: Any) -> Int32:
        """Returns the shared-memory address of an event of the layer."""
        end_of_ring = call.ring + self.stages * self.config.stage_bytes
        return end_of_ring + ((call.index & 1) * _COUNT + event) * 8

    @cute.jit
    def mark(self, call: LayerCall, event: Any, thread: cutlass.Constexpr[int] = _MMA, first: cutlass.Constexpr[bool] = False):
        """Stores an event, by one thread. ``first``: keep the layer's first time of this event, instead of its last."""
        own, _, _ = cute.arch.thread_idx()
        if own == thread:
            if const_expr(first):
                store_first_clock(self.event_at(call, event))
            else:
                store_clock(self.event_at(call, event))

    @cute.jit
    def clear_events(
        self, call: LayerCall, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int], thread: cutlass.Constexpr[int]
    ):
        """Clears some events in both sets, by the thread that stores these events."""
        own, _, _ = cute.arch.thread_idx()
        if own == thread:
            for event in cutlass.range(begin, end, unroll=1):
                clear_event(self.event_at(call, event))
                clear_event(self.event_at(call, event + _COUNT))

    @cute.jit
    def trace_at(self, call: LayerCall, layer: Int32, event: Int32) -> Int64:
        """Returns the address of an event in global memory, behind the layers' counters."""
        cta, _, _ = cute.arch.block_idx()
        layers = call.given.layers
        events = call.given.head + 4 * (HEAD_WORDS + (layers + 1) * LAYER_COUNTERS)
        return events + Int64((cta * (layers + 1) + layer) * _COUNT + event) * 8

    # -- roles -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def consume_layers(self, call: LayerCall, warp: Int32, tag: Int32):
        thread, _, _ = cute.arch.thread_idx()
        self.clear_events(call, 0, CHAIN, _MMA)
        if thread == _MMA:
            store_anchor(self.trace_at(call, call.given.layers, Int32(0)))
        Persistent.consume_layers(self, call, warp, tag)
        if thread == _MMA:
            store_anchor(self.trace_at(call, call.given.layers, Int32(2)))

    @cute.jit
    def finish_layers(self, call: LayerCall, warp: Int32, tag: Int32):
        self.clear_events(call, _FINISHED, _COUNT, _FINISH)
        Persistent.finish_layers(self, call, warp, tag)

    @cute.jit
    def produce(self, call: LayerCall):
        self.clear_events(call, CHAIN, _FINISHED, _LOAD)
        Persistent.produce(self, call)

    # -- the producer warp and the epilogue warps ----------------------------------------------------------------------------------

    @cute.jit
    def load_tiles(
        self, call: LayerCall, at: Any, column: cutlass.Constexpr[int], first_row: Int32, row_count: Int32, row_bytes: Int32
    ):
        if const_expr(column == QKV_WEIGHT):
            self.mark(call, _QKV_BEGUN, _LOAD)
        at = Persistent.load_tiles(self, call, at, column, first_row, row_count, row_bytes)
        self.mark(call, _QKV_ISSUED if const_expr(column == QKV_WEIGHT) else _PROJECTION_ISSUED, _LOAD)
        return at

    @cute.jit
    def load_range(self, call: LayerCall, at: Any, kind: cutlass.Constexpr[int], place: Place, left: Int32):
        if const_expr(kind == W13):
            self.mark(call, _KNOWN, _LOAD)
        at = Persistent.load_range(self, call, at, kind, place, left)
        self.mark(call, _ISSUED + kind, _LOAD)
        return at

    @cute.jit
    def finish_strip(
        self,
        call: LayerCall,
        at: Any,
        item: Int32,
        strip: Int32,
        lane: Int32,
        pairs: cute.Tensor,
        beyond: cute.Tensor,
        weights: cute.Tensor,
    ):
        Persistent.finish_strip(self, call, at, item, strip, lane, pairs, beyond, weights)
        self.mark(call, _FINISHED + kind_of(item), _FINISH)

    @cute.jit
    def finish(self, call: LayerCall, warp: Int32, at: Any):
        at = Persistent.finish(self, call, warp, at)
        thread, _, _ = cute.arch.thread_idx()
        if thread == _FINISH:
            for event in cutlass.range(_FINISHED, _COUNT, unroll=1):
                move_event(self.trace_at(call, call.index, event), self.event_at(call, event))
        return at

    # -- the MMA warps -----------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_rows(self, call: LayerCall, warp: Int32, source: Int64, tag: Int32, to: Int32, pitch: cutlass.Constexpr[int]):
        Persistent.load_rows(self, call, warp, source, tag, to, pitch)
        self.mark(call, _INPUT_SEEN if const_expr(pitch == WIDTH_PITCH) else _TOTALS_SEEN)

    @cute.jit
    def normalise_input(self, call: LayerCall, norm: list, column: Int32, live: Any):
        Persistent.normalise_input(self, call, norm, column, live)
        self.mark(call, _INPUT_NORMED)

    @cute.jit
    def multiply_tiles(
        self, call: LayerCall, warp: Int32, at: Any, row_count: Int32, row_bytes: Int32, of_qkv: cutlass.Constexpr[bool]
    ):
        call.pipe.wait(at)
        self.mark(call, _QKV_FULL if const_expr(of_qkv) else _FULL)
        at = Persistent.multiply_tiles(self, call, warp, at, row_count, row_bytes, of_qkv)
        self.mark(call, _QKV_MULTIPLIED if const_expr(of_qkv) else _PROJECTED)
        return at

    @cute.jit
    def publish(self, call: LayerCall, index: cutlass.Constexpr[int]):
        Persistent.publish(self, call, index)
        if const_expr(index in _STORED):
            self.mark(call, _STORED[index])

    @cute.jit
    def load_queries(self, call: LayerCall, token: Int32, head: Int32, stores: Any):
        Persistent.load_queries(self, call, token, head, stores)
        self.mark(call, _QUERIES_SEEN)

    @cute.jit
    def store_warp(self, call: LayerCall, warp: Int32, lane: Int32, sums: cute.Tensor, largest: Float32, total: Float32):
        Persistent.store_warp(self, call, warp, lane, sums, largest, total)
        self.mark(call, _VALUES_MULTIPLIED)

    @cute.jit
    def load_attended(self, call: LayerCall, warp: Int32):
        Persistent.load_attended(self, call, warp)
        self.mark(call, _ATTENDED_SEEN)

    @cute.jit
    def normalise(self, call: LayerCall, warp: Int32, norm: list):
        self.mark(call, _MET)
        Persistent.normalise(self, call, warp, norm)
        self.mark(call, _NORMED)

    @cute.jit
    def load_logits(self, call: LayerCall, token: Int32, words: cute.Tensor):
        Persistent.load_logits(self, call, token, words)
        self.mark(call, _LOGITS_SEEN)

    @cute.jit
    def select_experts(self, call: LayerCall, token: Int32):
        Persistent.select_experts(self, call, token)
        self.mark(call, _CHOSEN)

    @cute.jit
    def list_few_pairs(self, call: LayerCall, expert: Int32):
        Persistent.list_few_pairs(self, call, expert)
        self.mark(call, _LISTED)

    @cute.jit
    def list_slots(self, call: LayerCall, expert: Int32):
        Persistent.list_slots(self, call, expert)
        self.mark(call, _LISTED)

    @cute.jit
    def prepare_rows(self, call: LayerCall, item: Int32, factors: cute.Tensor):
        self.mark(call, _BEGUN + 4 * kind_of(item), first=True)
        Persistent.prepare_rows(self, call, item, factors)
        self.mark(call, _SPLIT + 4 * kind_of(item), first=True)

    @cute.jit
    def multiply(self, call: LayerCall, warp: Int32, group: Int32, at: Any, to: Any, item: Int32, factors: cute.Tensor):
        kind = kind_of(item)
        if kind <= W2:
            self.mark(call, _SLAB + 4 * kind, first=True)
        at = Persistent.multiply(self, call, warp, group, at, to, item, factors)
        if kind <= W2:
            self.mark(call, _MULTIPLIED + 4 * kind)
        return at

    @cute.jit
    def sum_of_slots(self, call: LayerCall, token: Int32, column: Int32):
        total = Persistent.sum_of_slots(self, call, token, column)
        self.mark(call, _DONE)
        return total

    @cute.jit
    def combine(self, call: LayerCall, warp: Int32):
        Persistent.combine(self, call, warp)
        self.mark(call, _WRITTEN)
        if warp == 0:
            cute.arch.sync_warp()
            lane = cute.arch.lane_idx()
            for event in cutlass.range(lane, _FINISHED, 32, unroll=1):
                move_event(self.trace_at(call, call.index, event), self.event_at(call, event))
            cute.arch.sync_warp()
