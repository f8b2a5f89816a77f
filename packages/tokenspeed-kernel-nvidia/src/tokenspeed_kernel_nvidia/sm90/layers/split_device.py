"""Panels of the experts that are split between two CTAs, in the persistent kernel.

A panel is 64 rows of an expert's weights, and a slab is a range of k of a panel, one stage of the ring buffer. The slabs of all
panels of a GEMM are divided evenly among the CTAs (stream-K). So a CTA may begin and end within a panel. It computes its first
panel's slabs first, and sends their partial sums as tagged numbers to the preceding CTA, which has the panel's first slabs. The
preceding CTA computes those slabs last. So its epilogue warps, which add the partial sums, rarely wait.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_number, store_number
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, store_floats
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import Exchange
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import LAST_TAG, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import FINISH_WARP, FINISHERS
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import as_float
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import kind_of

_STRIPS = PANEL_STRIPS // FINISHERS  # strips of an epilogue warp


class Split(Exchange):
    """The part of the kernel that sends and receives the partial sums of split panels."""

    splits = True

    @cute.jit
    def range_of(self, call: LayerCall, panels: Int32, blocks: Int32):
        """Returns this CTA's range of the slabs of all entries' panels: its first slab, and the slab after its last.

        With fewer than 1.25 panels per CTA, a panel's slabs could be divided among three CTAs, but a CTA receives partial sums from
        one CTA only. Then no panel is split.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        slabs = self.slabs_of(blocks)
        steps, step = panels * slabs, Int32(1)
        if 4 * panels < 5 * ctas:
            steps, step = panels, slabs
        return cta * steps // ctas * step, (cta + 1) * steps // ctas * step

    def tag_of_sums(self, call: LayerCall) -> Int32:
        """Returns the tag of the partial sums that CTAs send in a layer. The tag has 32 bits: not every CTA sends in every layer,
        so a former tag may be of any earlier layer, and must not recur."""
        return call.kept[LAST_TAG] + 2 + call.index

    def sent_at(self, call: LayerCall, kind: Int32, cta: Int32, strip: Int32, tile: int) -> Int64:
        """Returns the address of this lane's two numbers of a strip and a tile. ``cta``: the CTA that sends them."""
        ctas, _, _ = cute.arch.grid_dim()
        place = ((kind * ctas + cta) * PANEL_STRIPS + strip) * self.tiles + tile
        return call.given.sent + Int64(place * 32 + cute.arch.lane_idx()) * 16

    @cute.jit
    def send_sums(self, call: LayerCall, at: Any, item: Int32, strip: Int32):
        """Sends the partial sums of a strip. ``at``: the position in the ring of buffers for partial sums."""
        cta, _, _ = cute.arch.block_idx()
        tag = self.tag_of_sums(call)
        for tile in cutlass.range_constexpr(self.tiles):
            to = self.sent_at(call, kind_of(item), cta, strip, tile)
            for row, total in enumerate(self.sum_of_groups(call, at, strip, cute.arch.lane_idx(), tile)):
                store_number(to + 8 * row, total, tag)

    @cute.jit
    def load_sums(self, call: LayerCall, warp: Int32, kind: Int32, words: cute.Tensor):
        """Loads the numbers that the next CTA sends for this warp's strips, without waiting: they may not have been sent yet."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        sender = cutlass.min(cta + 1, ctas - 1)
        for each in cutlass.range_constexpr(_STRIPS):
            for tile in cutlass.range_constexpr(self.tiles):
                at = self.sent_at(call, kind, sender, strip_of(warp, each), tile)
                for index, word in enumerate(load_number(at)):
                    words[(each * self.tiles + tile) * 4 + index] = word

    @cute.jit
    def join_sums(self, call: LayerCall, at: Any, warp: Int32, item: Int32, words: cute.Tensor):
        """Adds the numbers that the next CTA sends to this CTA's partial sums in shared memory. An epilogue warp calls this method.
        ``words``: the numbers from `load_sums`; they are loaded again until all have arrived."""
        lane = cute.arch.lane_idx()
        tag = self.tag_of_sums(call)
        left = self.polls_of(call)
        missing = missing_tags(words, tag)
        while (missing != 0) & (left > 0):
            self.load_sums(call, warp, kind_of(item), words)
            missing = missing_tags(words, tag)
            left -= 1
        if missing != 0:
            self.give_up(call)
        for each in cutlass.range_constexpr(_STRIPS):
            for tile in cutlass.range_constexpr(self.tiles):
                to = self.sums_at(call, at, 0, strip_of(warp, each), lane, tile)
                own = load_floats("shared", to, 2)
                index = (each * self.tiles + tile) * 4
                store_floats("shared", to, [own[row] + as_float(words[index + 2 * row]) for row in range(2)])


def strip_of(warp: Int32, each: int) -> Int32:
    """Returns the index of an epilogue warp's strip."""
    return warp - FINISH_WARP + each * FINISHERS


def missing_tags(words: cute.Tensor, tag: Int32) -> Int32:
    """Returns 0 if all numbers have the tag, otherwise another number."""
    found = Int32(0)
    for index in range(1, cute.size(words), 2):
        found |= Int32(words[index]) ^ tag
    return found
