"""How decoding kernels divide the blocks of all sequences among groups of CTAs: evenly, on the device, from the lengths."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute


class Sharing:
    """The part of a kernel that divides the work.

    Who inherits from it says how long a sequence is (``length_of``), which of its blocks are visible (``visible``), and how many
    blocks a group should have (``share_of``). A call says how many sequences (``batch``) and groups (``groups``) there are, and
    which group this is (``group``).

    ``share_of`` takes a call, the blocks of all sequences, and those of the first one. It also returns how many blocks count before
    a sequence's own, because to begin it takes the time of so many. A range has those too.
    """

    @cute.jit
    def range_of(self, call: Any, share: Int32):
        """Where the range of this CTA's group begins, and how many blocks it has. ``share``: what `share_of` says."""
        return call.group * share, share

    @cute.jit
    def divide(self, call: Any, at_once: cutlass.Constexpr[int]):
        """Finds the share of this CTA's group, by one warp.

        All sequences' tiles, one after another, are cut into as many ranges as there are groups, see `range_of`. A group has a CTA
        for each key head.

        Args:
            at_once: how many lengths a lane reads together.

        Returns:
            The sequence that the range begins in, that sequence's length, the tile there, how many tiles, the share, and how many
            count before a sequence's own.
        """
        lane = cute.arch.lane_idx()
        lengths, counts = (cute.make_rmem_tensor((at_once,), Int32) for _ in range(2))
        rounds = (call.batch + 32 * at_once - 1) // (32 * at_once)
        total = Int32(0)
        # Backwards, as the search below begins with the first.
        for back in cutlass.range(rounds, unroll=1):
            total += cute.arch.warp_redux_sync(self.tiles_of(call, rounds - 1 - back, at_once, lengths, counts), "add")
        share, starting = self.share_of(call, total, cute.arch.shuffle_sync(counts[0], 0))
        total += starting * call.batch
        start, size = self.range_of(call, share)
        before = Int32(0)
        found = Int32(-1)
        offset = Int32(0)
        length = Int32(0)
        step = Int32(0)
        while found < 0 and step < rounds and start < total:
            some = Int32(0)
            for each in cutlass.range_constexpr(at_once):
                some += counts[each] + starting
            ends = some
            for power in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(ends, 1 << power)
                ends += cutlass.select_(lane >= (1 << power), other, Int32(0))
            running = before + ends - some
            mine = Int32(-1)
            for each in cutlass.range_constexpr(at_once):
                if running <= start < running + counts[each] + starting:
                    mine = (step * 32 + lane) * at_once + each
                    offset = start - running
                    length = lengths[each]
                running += counts[each] + starting
            found = cute.arch.warp_redux_sync(mine, "max")
            offset = cute.arch.warp_redux_sync(offset, "max")
            length = cute.arch.warp_redux_sync(length, "max")
            before += cute.arch.shuffle_sync(ends, 31)
            step += 1
            if found < 0 and step < rounds:
                self.tiles_of(call, step, at_once, lengths, counts)
        return cutlass.max(found, 0), length, offset, cutlass.max(cutlass.min(size, total - start), 0), share, starting

    @cute.jit
    def tiles_of(self, call: Any, step: Int32, at_once: cutlass.Constexpr[int], lengths: cute.Tensor, counts: cute.Tensor):
        """A lane's next sequences: their lengths and tiles. Returns how many tiles there are together."""
        some = Int32(0)
        for each in cutlass.range_constexpr(at_once):
            sequence = (step * 32 + cute.arch.lane_idx()) * at_once + each
            lengths[each] = self.length_of(call, sequence)
            _, _, count = self.visible(call, lengths[each])
            counts[each] = cutlass.select_(sequence < call.batch, count, Int32(0))
            some += counts[each]
        return some
