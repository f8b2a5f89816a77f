"""Common to the producer warps and the consumer warpgroups of `kernel_device`: tile shapes, rings, and tile records."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any, Optional

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_read, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, float_of
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring

RECORD = 8  # int32 words of a tile's record


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        cu_seqlens: cumulative lengths of the queries.
        cache_seqlens: sequence lengths in the paged cache. With ragged K/V: offsets of the sequences' keys, ``[batch + 1]``, or
            None if equal to the queries' offsets.
        page_table: None with ragged K/V.
    """

    cu_seqlens: cute.Tensor
    cache_seqlens: Optional[cute.Tensor]
    page_table: Optional[cute.Tensor]


@dataclass(frozen=True)
class Record:
    """A tile's parameters in shared memory, written by the producer warp for the consumers.

    Attributes:
        at: the first of RECORD consecutive words.
    """

    at: cute.Pointer

    @property
    def exists(self) -> Boolean:
        """Whether there is a tile; false after the last one."""
        return Boolean(self.at[0] != 0)

    @property
    def first_token(self) -> Int32:
        """Row of the sequence's first query."""
        return self.at[1]

    @property
    def q_len(self) -> Int32:
        return self.at[2]

    @property
    def kv_len(self) -> Int32:
        return self.at[3]

    @property
    def position(self) -> Int32:
        """Index of the tile's first query in its sequence."""
        return self.at[4]

    @property
    def kv_head(self) -> Int32:
        return self.at[5]

    @property
    def qk_scale(self) -> Float32:
        """q_scale * k_scale: the factor of scores of fp8 operands."""
        return float_of(self.at[6])

    @property
    def v_scale(self) -> Float32:
        """The factor of outputs of fp8 values."""
        return float_of(self.at[7])

    def write(self, *numbers: Int32) -> None:
        for index, number in enumerate((Int32(1), *numbers)):
            self.at[index] = number

    def write_end(self) -> None:
        self.at[0] = Int32(0)


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory. Addresses are computed at each use. So no address occupies a register between uses.

    Attributes:
        storage: see `Tiles.storage`.
    """

    storage: Any

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
        """The ring of blocks to convert: fp8 values, and an fp8 cache's keys."""
        return pipeline(self.storage.raw_full, self.storage.raw_empty)

    def record(self, q_at: Cursor) -> Record:
        """The record of the tile in a Q stage."""
        return Record(self.storage.records.data_ptr() + q_at.stage * RECORD)


@dataclass(frozen=True)
class SplitShared(Shared):
    """`Shared` for warpgroups with separate Q barriers. A Q cursor's stage is the warpgroup's index.

    A warpgroup releases its queries before it stores the tile's output. For that store it still needs the tile's record. So each
    warpgroup has two records, selected by the phase of its cursor.
    """

    def record(self, q_at: Cursor) -> Record:
        return Record(self.storage.records.data_ptr() + (q_at.stage * 2 + q_at.phase) * RECORD)


class Tiles:
    """Base of the mixins: dtypes, rings and shapes that follow from a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        # dtype of the MMA operands: with an fp8 cache and 16-bit queries, both are converted to float16.
        self.mma_dtype = cutlass.Float8E4M3FN if config.fp8 else cutlass.Float16 if config.fp8_cache else self.dtype
        panel = config.panel, config.panel * config.bytes
        self.q_ring = Ring(config.block_m, config.k_columns, config.q_stages, *panel)
        self.kv_ring = Ring(config.block_n, config.k_columns, config.kv_stages, *panel)  # of keys
        self.v_ring = Ring(config.block_n, config.v_columns, config.kv_stages, *panel)
        # Blocks to convert, in panels with rows of 128 or 64 bytes; and fp8 values after transposition.
        self.raw_ring = Ring(config.block_n, config.raw_columns, config.raw_stages, config.raw_panel, config.raw_panel)
        self.transposed_ring = Ring(config.v_columns, config.block_n, config.kv_stages, config.block_n, config.block_n)
        self.out_ring = Ring(config.block_m, config.head_dim, 1)

    def storage(self) -> Any:
        config = self.config
        dtype = cutlass.Uint8 if config.fp8 else self.dtype
        q_barriers = config.warpgroups if config.splits_q else config.q_stages
        out_size = 8 if config.stores_from_registers else self.out_ring.size

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
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.q_ring.size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, self.kv_ring.size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.v_ring.size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, out_size], 1024]
            raw: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.raw_stages * config.raw_bytes], 1024 if config.converts else 16
            ]

        return Storage

    def shared_of(self, storage: Any) -> Shared:
        """A CTA's shared memory; `SplitShared` if each warpgroup has its own Q barriers."""
        return SplitShared(storage) if self.config.splits_q else Shared(storage)

    @cute.jit
    def first_q(self, wg: Int32) -> Cursor:
        """The Q cursor of a warpgroup's first tile."""
        at = first_to_read()
        if const_expr(self.config.splits_q):
            at = Cursor(wg, at.phase)
        return at

    @cute.jit
    def next_q(self, at: Cursor) -> Cursor:
        """The Q cursor of the next tile."""
        if const_expr(self.config.splits_q):
            at = Cursor(at.stage, at.phase ^ 1)
        else:
            at = advance(at, self.config.q_stages)
        return at

    @cute.jit
    def keys_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32) -> Int32:
        """The end of the keys that some row of a tile sees, at least 1, because every tile processes a block."""
        seen = kv_len
        if causal != 0:
            seen = kv_len - q_len + cutlass.min(position + self.config.positions, q_len)
        return cutlass.max(seen, 1)

    @cute.jit
    def blocks_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32, window_left: Int32):
        """Returns the first and the end of the key blocks that at least one row of a tile sees."""
        n = self.config.block_n
        end = (self.keys_seen(q_len, kv_len, position, causal) + (n - 1)) // n
        first = Int32(0)
        if const_expr(self.config.windowed):
            first = cutlass.min(cutlass.max(kv_len - q_len + position - window_left, 0) // n, end - 1)
        return first, end
