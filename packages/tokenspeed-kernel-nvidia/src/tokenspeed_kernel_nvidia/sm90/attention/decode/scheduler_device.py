"""The tile scheduler of `kernel_device`, which finds each CTA's range of K/V tiles. `split_kv_device` divides the tiles evenly."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import split_kv_device as split_kv
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import (
    DONE,
    LEFT,
    OFFSET,
    PER_GROUP,
    PLANNED,
    SEQUENCE,
    THREADS,
    Call,
    Shapes,
)

AT_ONCE = 8  # sequence lengths that a lane loads per round


@dataclass(frozen=True)
class Work:
    """Divides a call's K/V tiles (without split-KV: its sequences) among CTA groups. This is the object ``work`` of
    `split_kv_device`."""

    config: Config
    shapes: Shapes

    def length_of(self, call: Call, sequence: Int32) -> Int32:
        return self.shapes.length_of(call, sequence)

    def visible(self, call: Call, length: Int32):
        return self.shapes.visible(call, length)

    def tiles_of(self, call: Call, step: Int32, at_once: int, lengths: cute.Tensor, counts: cute.Tensor) -> Int32:
        return split_kv.tiles_of(self, call, step, at_once, lengths, counts)

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, _: Int32):
        """Returns the number of K/V tiles per CTA group, and the fixed cost of starting a sequence, 0. ``total``: number of tiles
        of all sequences."""
        c = self.config
        per_group = (total + call.groups - 1) // call.groups
        if const_expr(c.block == 16):  # a multiple of `parts`, so that all consumer warps have the same number of tiles
            per_group = (per_group + c.parts - 1) // c.parts * c.parts
        return per_group, Int32(0)

    @cute.jit
    def plan(self, call: Call):
        """Finds this CTA's range of tiles, writes it to the plan, and signals PLANNED to the consumer warps.

        Returns:
            The range's first sequence, that sequence's length, the range's offset in that sequence in tiles, the number of tiles
            (without split-KV: of sequences) of the range, and the step from a sequence of the range to the next.
        """
        lane = cute.arch.lane_idx()
        step = Int32(1)
        if const_expr(self.config.split):
            sequence, length, offset, left, per_group, _none = [Int32(0)] * 6
            if call.batch <= 32:  # a variant with less code, because instruction fetch takes most of the time
                sequence, length, offset, left, per_group, _none = split_kv.divide(self, call, 1)
            else:
                sequence, length, offset, left, per_group, _none = split_kv.divide(self, call, AT_ONCE)
        else:
            sequence, offset, per_group, step = call.group, Int32(0), Int32(0), call.groups
            length = self.length_of(call, sequence)
            left = (call.batch - call.group + call.groups - 1) // call.groups
        if lane == 0:
            call.plan[SEQUENCE] = sequence
            call.plan[OFFSET] = offset
            call.plan[LEFT] = left
            call.plan[DONE] = Int32(0)
            call.plan[PER_GROUP] = per_group
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=PLANNED, number_of_threads=THREADS)
        return sequence, length, offset, left, step

    @cute.jit
    def take(self, count: Int32, left: Int32):
        """Returns how many of a sequence's ``count`` tiles this CTA computes, and how many tiles (without split-KV: sequences) of
        the CTA's range are then left. ``left``: how many are left now."""
        if const_expr(self.config.split):
            count = cutlass.min(count, left)
            left -= count
        else:
            left -= 1
        return count, left
