"""Panels of the experts that are split between two CTAs, in the persistent kernel.

The slabs of all panels of a GEMM are divided evenly among the CTAs (stream-K). So a CTA begins and ends within a panel. It computes
the last slabs of its first panel first, and sends their sums as tagged numbers to the preceding CTA, which has the panel's first
slabs. That CTA computes them last, so it rarely waits. Its first warpgroup adds the sums that it receives to its own.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_number, store_number
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import Exchange
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import LAST_TAG, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import is_head, kind_of


class Split(Exchange):
    """The part of the kernel that sends and receives the sums of split panels."""

    splits = True

    @cute.jit
    def range_of(self, call: LayerCall, panels: Int32, blocks: Int32):
        """Returns this CTA's range of the slabs of all entries' panels.

        With fewer than 1.25 panels per CTA, a panel could have more than two parts. Then no panel is split.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        slabs = self.slabs_of(blocks)
        steps, step = panels * slabs, Int32(1)
        if 4 * panels < 5 * ctas:
            steps, step = panels, slabs
        return cta * steps // ctas * step, (cta + 1) * steps // ctas * step

    def tag_of_sums(self, call: LayerCall) -> Int32:
        """Returns the tag of a layer's numbers. The tag has 32 bits, because not every number is written in every layer."""
        return call.kept[LAST_TAG] + 2 + call.index

    def sums_at(self, call: LayerCall, item: Int32, strip: Int32, tile: int) -> Int64:
        """Returns the address of this lane's two numbers. ``item``: a part of a split panel."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        sender = kind_of(item) * ctas + cutlass.select_(is_head(item), cta + 1, cta)
        return call.given.sent + Int64(((sender * PANEL_STRIPS + strip) * self.tiles + tile) * 32 + cute.arch.lane_idx()) * 16

    @cute.jit
    def send_sums(self, call: LayerCall, at: Any, item: Int32, strip: Int32):
        """Sends the sums of a strip. ``at``: the position in the buffers of partial sums."""
        tag = self.tag_of_sums(call)
        for tile in cutlass.range_constexpr(self.tiles):
            to = self.sums_at(call, item, strip, tile)
            for row, total in enumerate(self.sum_of_groups(call, at, strip, cute.arch.lane_idx(), tile)):
                store_number(to + 8 * row, total, tag)

    @cute.jit
    def load_sums(self, call: LayerCall, item: Int32, strip: Int32, words: cute.Tensor):
        """Loads the two numbers of each tile, four words, which may not have been sent yet."""
        for tile in cutlass.range_constexpr(self.tiles):
            for index, word in enumerate(load_number(self.sums_at(call, item, strip, tile))):
                words[4 * tile + index] = word

    @cute.jit
    def await_sums(self, call: LayerCall, item: Int32, strip: Int32, words: cute.Tensor):
        """Loads the numbers again and again until all have been sent. ``words``: from `load_sums`."""
        tag = self.tag_of_sums(call)
        left = self.polls_of(call)
        missing = self.missing(words, tag)
        while (missing != 0) & (left > 0):
            self.load_sums(call, item, strip, words)
            missing = self.missing(words, tag)
            left -= 1
        if missing != 0:
            self.give_up(call)

    def missing(self, words: cute.Tensor, tag: Int32) -> Int32:
        """Returns 0 if all numbers have the tag."""
        found = Int32(0)
        for tile in range(self.tiles):
            found |= (Int32(words[4 * tile + 1]) ^ tag) | (Int32(words[4 * tile + 3]) ^ tag)
        return found
