"""What the loading warp and the computing warpgroups of `prefill_device` share: tiles, rings, and a tile's record."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any, Optional

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.attention.prefill_config import Config
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, Pipeline, advance, first_to_read, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of, float_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring

RECORD = 8  # numbers of a tile's record


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        cu_seqlens: of the queries.
        cache_seqlens: tokens of each sequence in the cache. Where keys lie in a row: where each sequence's begin, and their
            number; None if they are the queries' own tokens.
        page_table: None where keys lie in a row.
    """

    cu_seqlens: cute.Tensor
    cache_seqlens: Optional[cute.Tensor]
    page_table: Optional[cute.Tensor]


@dataclass(frozen=True)
class Record:
    """What the loading warp says of a tile, in shared memory.

    Attributes:
        at: where; its numbers follow one another.
    """

    at: cute.Pointer

    @property
    def exists(self) -> Boolean:
        """False behind the last tile."""
        return Boolean(self.at[0] != 0)

    @property
    def first_token(self) -> Int32:
        """Where the sequence's queries begin."""
        return self.at[1]

    @property
    def q_len(self) -> Int32:
        return self.at[2]

    @property
    def kv_len(self) -> Int32:
        return self.at[3]

    @property
    def position(self) -> Int32:
        """The tile's first query, among those of its sequence."""
        return self.at[4]

    @property
    def kv_head(self) -> Int32:
        return self.at[5]

    @property
    def qk_scale(self) -> Float32:
        """What scores of fp8 queries and keys are multiplied with."""
        return float_of(self.at[6])

    @property
    def v_scale(self) -> Float32:
        """What outputs of fp8 values are multiplied with."""
        return float_of(self.at[7])

    def write(self, *numbers: Int32) -> None:
        for index, number in enumerate((Int32(1), *numbers)):
            self.at[index] = number

    def write_end(self) -> None:
        self.at[0] = Int32(0)


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory. Addresses in it are computed where they are used, so that none takes a register in between.

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
        """Of fp8 values, and of an fp8 cache's keys, that are to be converted."""
        return pipeline(self.storage.raw_full, self.storage.raw_empty)

    def record(self, q_at: Cursor) -> Record:
        """Of the tile in a stage of q."""
        return Record(self.storage.records.data_ptr() + q_at.stage * RECORD)


@dataclass(frozen=True)
class SplitShared(Shared):
    """`Shared` where each warpgroup has barriers of its own for its queries: a cursor's stage is the number of the warpgroup.

    A warpgroup gives its queries back before it stores what came of them. So it has two records in turns, by a reader's phase.
    """

    def record(self, q_at: Cursor) -> Record:
        return Record(self.storage.records.data_ptr() + (q_at.stage * 2 + q_at.phase) * RECORD)


class Tiles:
    """The shapes that follow from a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        # What is multiplied: an fp8 cache beside 16-bit queries becomes float16, and so do the queries.
        self.mma_dtype = cutlass.Float8E4M3FN if config.fp8 else cutlass.Float16 if config.fp8_cache else self.dtype
        panel = config.panel, config.panel * config.bytes
        self.q_ring = Ring(config.block_m, config.k_columns, config.q_stages, *panel)
        self.kv_ring = Ring(config.block_n, config.k_columns, config.kv_stages, *panel)  # of values too, where they are as wide
        self.v_ring = Ring(config.block_n, config.v_columns, config.kv_stages, *panel)
        # Of what is to be converted, in panels with rows of 128 or 64 bytes, and the same, transposed.
        self.raw_ring = Ring(config.block_n, config.raw_columns, config.raw_stages, config.raw_panel, config.raw_panel)
        self.turned_ring = Ring(config.v_columns, config.block_n, config.kv_stages, config.block_n, config.block_n)
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
        """A CTA's shared memory, by the kind of its queries' barriers."""
        return SplitShared(storage) if self.config.splits_q else Shared(storage)

    @cute.jit
    def first_q(self, wg: Int32) -> Cursor:
        """Where a warpgroup finds the queries of its first tile."""
        at = first_to_read()
        if const_expr(self.config.splits_q):
            at = Cursor(wg, at.phase)
        return at

    @cute.jit
    def next_q(self, at: Cursor) -> Cursor:
        """Where the queries of the next tile are, or go."""
        if const_expr(self.config.splits_q):
            at = Cursor(at.stage, at.phase ^ 1)
        else:
            at = advance(at, self.config.q_stages)
        return at

    @cute.jit
    def keys_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32) -> Int32:
        """How many keys, from the first on, some row of a tile sees; 1 where there are none, because a tile takes a block."""
        seen = kv_len
        if causal != 0:
            seen = kv_len - q_len + cutlass.min(position + self.config.positions, q_len)
        return cutlass.max(seen, 1)

    @cute.jit
    def blocks_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32, window_left: Int32):
        """The first block of keys that some row of a tile sees, and the end of those."""
        n = self.config.block_n
        end = (self.keys_seen(q_len, kv_len, position, causal) + (n - 1)) // n
        first = Int32(0)
        if const_expr(self.config.windowed):
            first = cutlass.min(cutlass.max(kv_len - q_len + position - window_left, 0) // n, end - 1)
        return first, end
