"""The producer warp's loads of Q, in whole tiles or for each warpgroup separately. The loaders also write the tiles' records."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Rings, Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, tma_load


@dataclass(frozen=True)
class QLoader:
    """Loads whole Q tiles. The methods' argument ``record`` holds the arguments of `Record.write`."""

    config: Config
    rings: Rings

    def acquire(self, shared: Shared, q_at: Cursor) -> None:
        """Waits until the Q stage ``q_at`` is empty."""
        shared.q_pipe.acquire(q_at)

    @cute.jit
    def write(self, shared: Shared, q_at: Cursor, record: tuple):
        """Writes a tile's record to shared memory."""
        if cute.arch.lane_idx() == 0:
            shared.record(q_at).write(*record)
        cute.arch.sync_warp()

    @cute.jit
    def load(self, shared: Shared, q: Tma, q_at: Cursor, record: tuple):
        """Loads a Q tile: all query heads of a KV head, for `Config.positions` tokens."""
        c = self.config
        start, _, _, position, kv_head, *_ = record
        with cute.arch.elect_one():
            shared.q_pipe.commit(q_at, c.q_bytes)
        token = start + position
        box = ((c.gqa_ratio, c.positions), c.panel)
        tiles = self.rings.q.packed_boxes(shared.storage.q, c.gqa_ratio, c.positions)
        for panel in cutlass.range_constexpr(self.rings.q.panels):
            source = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * c.panel), q.tensor)
            tma_load(q.atom, source, box, tiles[None, None, panel, 0, q_at.stage], shared.q_pipe.full.of(q_at))

    @cute.jit
    def end(self, shared: Shared, q_at: Cursor):
        """Signals to the consumers that there are no more tiles."""
        if cute.arch.lane_idx() == 0:
            shared.record(q_at).write_end()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            shared.q_pipe.full.arrive(q_at)


@dataclass(frozen=True)
class SplitQLoader:
    """Loads each consumer warpgroup's rows of a Q tile separately, after the tile's first K block: see `Config.splits_q`."""

    config: Config
    rings: Rings

    def acquire(self, shared: Shared, q_at: Cursor) -> None:
        """Does nothing: `load_late` waits for the stages."""

    def write(self, shared: Shared, q_at: Cursor, record: tuple) -> None:
        """Does nothing: `load_late` writes the records."""

    def load(self, shared: Shared, q: Tma, q_at: Cursor, record: tuple) -> None:
        """Does nothing: `load_late` loads the queries."""

    @cute.jit
    def load_late(self, shared: Shared, q: Tma, q_at: Cursor, record: tuple):
        """Loads each warpgroup's queries of a tile, and writes the warpgroup's record, as soon as the warpgroup has released its
        previous queries.

        Args:
            record: the arguments of `Record.write` for the tile's records.
        """
        c = self.config
        start, _, _, position, kv_head, *_ = record
        box = ((c.gqa_ratio, c.q_positions), c.panel)
        tiles = self.rings.q.packed_boxes(shared.storage.q, c.gqa_ratio, c.q_positions, c.warpgroups)
        for wg in cutlass.range_constexpr(c.warpgroups):
            at = Cursor(Int32(wg), q_at.phase)
            shared.q_pipe.acquire(at)
            # A producer's phase is the inverse of the consumers' phase, which selects the record.
            if cute.arch.lane_idx() == 0:
                shared.record(Cursor(at.stage, at.phase ^ 1)).write(*record)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                shared.q_pipe.commit(at, c.q_bytes)
            token = start + position + wg * c.q_positions
            for panel in cutlass.range_constexpr(self.rings.q.panels):
                source = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * c.panel), q.tensor)
                tma_load(q.atom, source, box, tiles[None, None, panel, wg, 0], shared.q_pipe.full.of(at))

    @cute.jit
    def end(self, shared: Shared, q_at: Cursor):
        """Signals to each warpgroup that there are no more tiles."""
        for wg in cutlass.range_constexpr(self.config.warpgroups):
            at = Cursor(Int32(wg), q_at.phase)
            shared.q_pipe.acquire(at)
            if cute.arch.lane_idx() == 0:
                shared.record(Cursor(at.stage, at.phase ^ 1)).write_end()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                shared.q_pipe.full.arrive(at)
