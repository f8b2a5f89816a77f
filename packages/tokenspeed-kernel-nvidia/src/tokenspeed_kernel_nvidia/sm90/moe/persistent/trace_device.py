"""The persistent kernel with a trace: threads store the SM's clock at some points of each layer, see `config.EVENTS`.

Clocks of SMs differ. So each CTA also stores its clock and the global timer at its start and at its end. An event costs about 40
cycles. Events are kept in shared memory, in one set for even and one for odd layers. After each layer, a warp moves the layer's
events to global memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.moe.persistent.config import (
    CHAIN,
    EVENTS,
    HEAD_WORDS,
    LAYER_COUNTERS,
    PRODUCED,
    TOTALS,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.moe.persistent.kernel_device import Persistent
from tokenspeed_kernel_nvidia.sm90.moe.persistent.tile_device import LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import FINISH_WARP, LOAD_WARP
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import W2, kind_of

_COUNT = len(EVENTS)
_GATE, _ATTENDED, _FULL, _PROJECTED, _TOTALS_STORED, _TOTALS_SEEN, _MET, _NORMED = range(8)
_LOGITS_STORED, _LOGITS_SEEN, _CHOSEN, _LISTED = range(8, 12)
_BEGUN, _SPLIT, _SLAB, _MULTIPLIED = range(12, 16)  # for w13; the events for w2 are four indices later
_DONE, _WRITTEN = range(20, 22)
_PROJECTION_BEGUN, _PROJECTION_ISSUED, _KNOWN, _ISSUED = range(CHAIN, CHAIN + 4)  # _ISSUED is for w13; the next index is for w2
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
        events = call.given.head + 4 * (HEAD_WORDS + layers * LAYER_COUNTERS)
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
    def load_projection(self, call: LayerCall, at: Any):
        self.mark(call, _PROJECTION_BEGUN, _LOAD)
        at = Persistent.load_projection(self, call, at)
        self.mark(call, _PROJECTION_ISSUED, _LOAD)
        return at

    @cute.jit
    def load_experts(self, call: LayerCall, at: Any):
        self.mark(call, _KNOWN, _LOAD)
        return Persistent.load_experts(self, call, at)

    @cute.jit
    def load_range(self, call: LayerCall, at: Any, kind: cutlass.Constexpr[int], first: Int32, end: Int32):
        at = Persistent.load_range(self, call, at, kind, first, end)
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

    # -- the MMA warps -----------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_attended(self, call: LayerCall, warp: Int32):
        Persistent.load_attended(self, call, warp)
        self.mark(call, _GATE)

    @cute.jit
    def multiply_tiles(self, call: LayerCall, warp: Int32, at: Any):
        self.mark(call, _ATTENDED)
        call.pipe.wait(at)
        self.mark(call, _FULL)
        at = Persistent.multiply_tiles(self, call, warp, at)
        self.mark(call, _PROJECTED)
        return at

    @cute.jit
    def publish(self, call: LayerCall, index: cutlass.Constexpr[int]):
        Persistent.publish(self, call, index)
        self.mark(call, _TOTALS_STORED if const_expr(index == TOTALS) else _LOGITS_STORED)

    @cute.jit
    def load_words_of_all(self, call: LayerCall, addresses: list, words: cute.Tensor):
        Persistent.load_words_of_all(self, call, addresses, words)
        self.mark(call, _TOTALS_SEEN if const_expr(len(addresses) > 1) else _LOGITS_SEEN)

    @cute.jit
    def normalise(self, call: LayerCall, warp: Int32, norm: list):
        self.mark(call, _MET)
        Persistent.normalise(self, call, warp, norm)
        self.mark(call, _NORMED)

    @cute.jit
    def select_experts(self, call: LayerCall, token: Int32):
        Persistent.select_experts(self, call, token)
        self.mark(call, _CHOSEN)

    @cute.jit
    def list_few_pairs(self, call: LayerCall, expert: Int32):
        Persistent.list_few_pairs(self, call, expert)
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
        self.mark(call, _DONE, first=True)
        return Persistent.sum_of_slots(self, call, token, column)

    @cute.jit
    def combine(self, call: LayerCall, warp: Int32):
        Persistent.combine(self, call, warp)
        self.mark(call, _WRITTEN)
        if warp == 0:
            cute.arch.sync_warp()
            lane = cute.arch.lane_idx()
            if lane < _COUNT:
                move_event(self.trace_at(call, call.index, lane), self.event_at(call, lane))
            cute.arch.sync_warp()
