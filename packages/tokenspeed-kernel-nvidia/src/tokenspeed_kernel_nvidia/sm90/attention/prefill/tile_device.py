"""Definitions for all warps of `kernel_device`: the layout of shared memory, tile records, and cursors."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any, Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Numeric, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_read, nth_to_read, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, float_of, opt_barrier
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring

RECORD = 8  # int32 words of a tile's record
WARPS = 5  # the first of the consumer warpgroups' named barriers, each for a warpgroup's four warps


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        cu_seqlens: cumulative numbers of queries, ``[batch + 1]``.
        cache_seqlens: with a paged cache, the sequence lengths ``[batch]``. With ragged K/V, the offsets ``[batch + 1]`` of the
            sequences' keys, or None if these are ``cu_seqlens``.
        page_table: the page table of a paged cache; None with ragged K/V.
    """

    cu_seqlens: cute.Tensor
    cache_seqlens: Optional[cute.Tensor]
    page_table: Optional[cute.Tensor]


@dataclass(frozen=True)
class Record:
    """A tile's parameters in shared memory, which the producer warp writes for the other warps.

    Attributes:
        at: shared address of the first of RECORD consecutive int32 words.
    """

    at: cute.Pointer

    @property
    def exists(self) -> Boolean:
        """Whether there is a tile; false after the CTA's last tile."""
        return Boolean(self.at[0] != 0)

    @property
    def first_token(self) -> Int32:
        """The row in q of the sequence's first query."""
        return self.at[1]

    @property
    def q_len(self) -> Int32:
        return self.at[2]

    @property
    def kv_len(self) -> Int32:
        return self.at[3]

    @property
    def position(self) -> Int32:
        """The index of the tile's first query in its sequence."""
        return self.at[4]

    @property
    def kv_head(self) -> Int32:
        return self.at[5]

    @property
    def qk_scale(self) -> Float32:
        """q_scale * k_scale of the tile's KV head: the factor of q @ k with fp8 operands."""
        return float_of(self.at[6])

    @property
    def v_scale(self) -> Float32:
        """v_scale of the tile's KV head: the factor of the output with fp8 V."""
        return float_of(self.at[7])

    def write(self, *numbers: Int32) -> None:
        """Writes the record of a tile: ``numbers`` are `first_token` and the properties after it, in order."""
        for index, number in enumerate((Int32(1), *numbers)):
            self.at[index] = number

    def write_end(self) -> None:
        """Writes the record that follows the CTA's last tile."""
        self.at[0] = Int32(0)


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory. Addresses are computed at each use, so that no address occupies a register between uses.

    Attributes:
        storage: the structure that `Rings.storage` returns.
        splits_q: whether each consumer warpgroup has its own Q barriers, see `Config.splits_q`. If so, a Q cursor's stage is the
            warpgroup's index.
    """

    storage: Any
    splits_q: bool

    @property
    def q_pipe(self) -> Pipeline:
        return pipeline(self.storage.q_full, self.storage.q_empty)

    @property
    def k_pipe(self) -> Pipeline:
        return pipeline(self.storage.k_full, self.storage.k_empty)

    @property
    def v_pipe(self) -> Pipeline:
        return pipeline(self.storage.v_full, self.storage.v_empty)

    @property
    def raw_pipe(self) -> Pipeline:
        """The barriers of the ring of raw fp8 blocks, before transposition or conversion to fp16: V, and also K if
        `Config.fp8_cache`."""
        return pipeline(self.storage.raw_full, self.storage.raw_empty)

    def record(self, q_at: Cursor) -> Record:
        """Returns the record of the tile in the Q stage ``q_at``.

        With separate Q barriers, a warpgroup releases its queries before it stores the tile's output. The store still needs the
        tile's record. So each warpgroup has two records, selected by the phase of its cursor.
        """
        index = q_at.stage * 2 + q_at.phase if self.splits_q else q_at.stage
        return Record(self.storage.records.data_ptr() + index * RECORD)


@dataclass(frozen=True)
class Rings:
    """The layout of shared memory, made by `rings_of`: a ring buffer for each kind of tile.

    Attributes:
        dtype: dtype of the output, and of 16-bit q, k and v.
        mma_dtype: dtype of the MMA operands.
        q, k, v: the rings of Q tiles, K blocks and V blocks, as MMA operands.
        raw: the ring of raw fp8 blocks (see `Config.raw_stages`), in panels with rows of 128 or 64 bytes.
        transposed: another view of the memory of ``v``: fp8 V after transposition.
        out: an output tile.
    """

    config: Config
    dtype: type[Numeric]
    mma_dtype: type[Numeric]
    q: Ring
    k: Ring
    v: Ring
    raw: Ring
    transposed: Ring
    out: Ring

    def storage(self) -> Any:
        config = self.config
        dtype = cutlass.Uint8 if config.fp8 else self.dtype
        q_barriers = config.warpgroups if config.splits_q else config.q_stages
        out_size = 8 if config.stores_from_registers else self.out.size

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[cutlass.Int64, q_barriers]
            q_empty: cute.struct.MemRange[cutlass.Int64, q_barriers]
            k_full: cute.struct.MemRange[cutlass.Int64, config.kv_stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, config.kv_stages]
            v_full: cute.struct.MemRange[cutlass.Int64, config.kv_stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, config.kv_stages]
            raw_full: cute.struct.MemRange[cutlass.Int64, config.raw_stages]
            raw_empty: cute.struct.MemRange[cutlass.Int64, config.raw_stages]
            records: cute.struct.MemRange[Int32, config.q_records * RECORD]
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.q.size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, self.k.size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.v.size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, out_size], 1024]
            raw: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.raw_stages * config.raw_bytes], 1024 if config.converts else 16
            ]

        return Storage


def rings_of(config: Config) -> Rings:
    """Returns the shared-memory layout of a configuration."""
    dtype = dtype_of(config.dtype)
    panel = config.panel, config.panel * config.bytes
    return Rings(
        config,
        dtype,
        # With an fp8 cache and 16-bit queries, the K and V blocks and the queries are converted to float16.
        cutlass.Float8E4M3FN if config.fp8 else cutlass.Float16 if config.fp8_cache else dtype,
        Ring(config.block_m, config.k_columns, config.q_stages, *panel),
        Ring(config.block_n, config.k_columns, config.kv_stages, *panel),
        Ring(config.block_n, config.v_columns, config.kv_stages, *panel),
        Ring(config.block_n, config.raw_columns, config.raw_stages, config.raw_panel, config.raw_panel),
        Ring(config.v_columns, config.block_n, config.kv_stages, config.block_n, config.block_n),
        Ring(config.block_m, config.head_dim, 1),
    )


@dataclass(frozen=True)
class Cursors:
    """Advances the warps' cursors: in the Q ring from tile to tile, and in the K and V rings from block to block."""

    config: Config

    @cute.jit
    def first_q(self, wg: Int32) -> Cursor:
        """Returns the position in the Q ring of the first tile of consumer warpgroup ``wg``."""
        at = first_to_read()
        if const_expr(self.config.splits_q):
            at = Cursor(wg, at.phase)
        return at

    @cute.jit
    def next_q(self, at: Cursor) -> Cursor:
        """Returns the position in the Q ring of the next tile. ``at``: the position of the current tile."""
        if const_expr(self.config.splits_q):
            at = Cursor(at.stage, at.phase ^ 1)
        else:
            at = advance(at, self.config.q_stages)
        return at

    def next_queries(self, q_at: Cursor) -> Cursor:
        """Returns the next tile's Q cursor, in the form that a consumer keeps in registers: see `queries_at`."""
        return Cursor(q_at.stage + 1, q_at.phase) if self.counts_tiles else self.next_q(q_at)

    def queries_at(self, q_at: Cursor) -> Cursor:
        """Returns a tile's Q cursor, given the form that a consumer keeps: if `counts_tiles`, ``q_at.stage`` is the tile's
        index."""
        return nth_to_read(q_at.stage, self.config.q_stages) if self.counts_tiles else q_at

    @property
    def counts_tiles(self) -> bool:
        """Whether a consumer keeps the tile's index instead of a Q cursor: one register instead of two."""
        return self.config.converts and not self.config.splits_q

    @cute.jit
    def keys_behind(self, k_at: Cursor, v_at: Cursor) -> Cursor:
        """Returns the K cursor ``k_at``. It is one block ahead of ``v_at``, because q @ k of a block is issued with P @ V of the
        preceding block. With fp8 K/V, the K cursor is recomputed from ``v_at``, because no register is left for ``k_at``."""
        return advance(v_at, self.config.kv_stages) if const_expr(self.config.converts) else k_at


@cute.jit
def thread_and_row(config: cutlass.Constexpr[Config], wg: Int32):
    """Returns this thread's index among the consumer threads, and the first of its two rows of a tile. The second row is 8 further.

    Both results are recomputed at each use, because the mainloop has no registers to keep them.
    """
    thread = opt_barrier(cute.arch.thread_idx()[0]) - 128
    if const_expr(config.converts):
        wg = thread // 128
    return thread, wg * 64 + (thread % 128) // 32 * 16 + thread % 32 // 4


@cute.jit
def sync_warps(wg: Int32):
    """Synchronises the four warps of consumer warpgroup ``wg``."""
    cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)
