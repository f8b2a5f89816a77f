"""The clearing warp of `kernel_device`, which zeroes rows of V outside the sequence. Such rows may hold NaN. The probabilities of
these rows are 0, but 0 * NaN is NaN."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import advance, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Rings, Shared


@dataclass(frozen=True)
class ValueClearer:
    """The warp that zeroes the rows of V stages that are before or after the sequence, then signals ``v_ready`` to the
    consumers."""

    config: Config
    rings: Rings

    @cute.jit
    def clear_after_stages(self, value_words: cute.Tensor, thread: Int32):
        """Zeroes, once, the 8 rows of V after each stage's keys. P @ V multiplies these rows by probabilities of 0."""
        if thread < 128:
            for stage in cutlass.range_constexpr(self.config.kv_stages):
                for panel in cutlass.range_constexpr(self.rings.v.panels):
                    value_words[thread % 16, self.config.rows + thread // 16, panel, stage] = Int64(0)

    @cute.jit
    def clear(self, shared: Shared, value_words: cute.Tensor, lane: Int32):
        """Zeroes rows of the V stages of all the CTA's work items, and signals ``v_ready`` of each stage, also if there is nothing
        to zero."""
        c = self.config
        at = first_to_read()
        more = Boolean(True)
        while more:
            shared.v_full.wait(at)
            record = shared.record(at)
            count = record.count
            more = count > 0
            if more:
                row = record.position - REACH - record.shift * 8
                behind = cutlass.min(record.shift * 8 + count // c.splits * c.positions + REACH + 8, c.rows)
                from_row = record.length - row
                if row < 0 or from_row < behind:
                    for index in cutlass.range(lane, -row * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.rings.v.panels):
                            value_words[index % 16, index // 16, panel, at.stage] = Int64(0)
                    for index in cutlass.range(from_row * 16 + lane, behind * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.rings.v.panels):
                            value_words[index % 16, index // 16, panel, at.stage] = Int64(0)
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                if lane == 0:
                    shared.v_ready.arrive(at)
                at = advance(at, c.kv_stages)
