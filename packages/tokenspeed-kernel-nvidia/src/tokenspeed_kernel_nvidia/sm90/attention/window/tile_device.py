"""Definitions for all warps of `kernel_device`: the layout of shared memory, and a work item's record.

A Q tile has 64 rows, row = position * heads + head. A K/V stage holds the keys and values of a work item. A tile's keys are a view
of the stage. The view starts at a multiple of 8 keys, because the swizzle pattern repeats there. So all tiles of an item share one
copy of the keys and values.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Numeric, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.attention.window.config import WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring

# Indices of the fields of a `Record`; RECORD is the number of its words.
COUNT, POSITION, TOKEN, FIRST, LENGTH, KV_HEAD, SHIFT, RECORD = range(8)


@dataclass(frozen=True)
class Record:
    """A work item's parameters in shared memory, which the warp that loads K and V writes.

    Attributes:
        at: shared address of the first of RECORD consecutive int32 words.
    """

    at: cute.Pointer

    @property
    def count(self) -> Int32:
        """The number of tiles of the work item; 0 after the CTA's last item."""
        return self.at[COUNT]

    @property
    def position(self) -> Int32:
        """The position in the sequence at which the work item begins."""
        return self.at[POSITION]

    @property
    def token(self) -> Int32:
        """The row in q of the work item's first position."""
        return self.at[TOKEN]

    @property
    def first(self) -> Int32:
        """The position of the sequence's first query. The work item may begin up to 7 positions earlier."""
        return self.at[FIRST]

    @property
    def length(self) -> Int32:
        """The number of keys of the sequence."""
        return self.at[LENGTH]

    @property
    def kv_head(self) -> Int32:
        return self.at[KV_HEAD]

    @property
    def shift(self) -> Int32:
        """The number of keys in the K/V stage before the first tile's keys, divided by 8."""
        return self.at[SHIFT]

    def write(self, *numbers: Int32) -> None:
        """Writes all fields of the record, in the order of their indices."""
        for index, number in enumerate(numbers):
            self.at[index] = number

    def write_end(self) -> None:
        """Writes the record that follows the CTA's last work item. Consumers still issue one q @ k with this record, so the shift
        must be valid."""
        self.at[COUNT] = Int32(0)
        self.at[SHIFT] = Int32(0)


class Shared:
    """A CTA's shared memory. Addresses are computed at each use.

    The class is not a frozen dataclass, so that CuteDSL carries an object through branches and loops like a struct. Otherwise the
    compiler would compute addresses before the branch to the warps' roles. Counters of the producer warps would then be in vector
    registers instead of uniform registers, which takes 2 KiB more code.

    Attributes:
        storage: the structure that `Rings.storage` returns.
    """

    def __init__(self, storage: Any):
        self.storage = storage

    def __extract_mlir_values__(self):
        return self.storage.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        return Shared(self.storage.__new_from_mlir_values__(values))

    @property
    def q_pipe(self) -> Pipeline:
        return pipeline(self.storage.q_full, self.storage.q_empty)

    @property
    def k_full(self) -> Barriers:
        """One barrier per K/V stage, which completes when the stage's keys have been loaded and its record has been written."""
        return Barriers(self.storage.k_full.data_ptr())

    @property
    def v_full(self) -> Barriers:
        """One barrier per K/V stage, which completes when the stage's values have been loaded."""
        return Barriers(self.storage.v_full.data_ptr())

    @property
    def v_ready(self) -> Barriers:
        """One barrier per K/V stage, which completes when the stage's rows of V outside the sequence have been zeroed."""
        return Barriers(self.storage.v_ready.data_ptr())

    @property
    def kv_empty(self) -> Barriers:
        """One barrier per K/V stage, which completes when every MMA warp has released the stage, after all Q tiles of its work
        item."""
        return Barriers(self.storage.kv_empty.data_ptr())

    def record(self, kv_at: Cursor) -> Record:
        """Returns the record of the work item in the K/V stage ``kv_at``."""
        return Record(self.storage.records.data_ptr() + kv_at.stage * RECORD)


@dataclass(frozen=True)
class Rows:
    """A thread's two rows of a tile, 8 apart.

    Attributes:
        rows: the two rows' indices in the tile.
        positions: the two rows' positions, relative to the tile's first position.
        column: the first of the thread's two columns in each group of 8 columns.
    """

    rows: tuple
    positions: tuple
    column: Int32


@dataclass(frozen=True)
class TilePosition:
    """A tile's location in its sequence.

    Attributes:
        position, token: the tile's first position in the sequence, and the row in q of that position.
        first, length: the position of the sequence's first query, and the sequence's number of positions.
        head: the first of the tile's query heads.
    """

    position: Int32
    token: Int32
    first: Int32
    length: Int32
    head: Int32

    @cute.jit
    def holds(self, offset: Int32):
        """Whether the tile's position number ``offset`` is a query of the sequence."""
        return self.position + offset >= self.first and self.position + offset < self.length


@dataclass(frozen=True)
class Rings:
    """The layout of shared memory, made by `rings_of`: a ring each of Q tiles, K, V and output tiles.

    Attributes:
        dtype: dtype of all tiles.
        out: an output tile for each consumer warpgroup.
    """

    config: Config
    dtype: type[Numeric]
    q: Ring
    k: Ring
    v: Ring
    out: Ring

    def storage(self) -> Any:
        config, dtype = self.config, self.dtype

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.q.size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[dtype, self.out.size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, self.k.size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.v.size], 1024]
            q_full: cute.struct.MemRange[Int64, config.q_stages]
            q_empty: cute.struct.MemRange[Int64, config.q_stages]
            k_full: cute.struct.MemRange[Int64, config.kv_stages]
            v_full: cute.struct.MemRange[Int64, config.kv_stages]
            v_ready: cute.struct.MemRange[Int64, config.kv_stages]
            kv_empty: cute.struct.MemRange[Int64, config.kv_stages]
            records: cute.struct.MemRange[Int32, config.kv_stages * RECORD]

        return Storage

    def value_words(self, shared: Shared) -> cute.Tensor:
        """Returns a view of the V ring as 8-byte words, ``(word of a panel's row, row, panel, stage)``. The view has no swizzle,
        because the swizzle permutes chunks within a row only, and callers zero whole rows."""
        ring = self.v
        panel = ring.rows * PANEL // 4
        layout = cute.make_layout(
            (PANEL // 4, ring.rows, ring.panels, ring.stages), stride=(1, PANEL // 4, panel, ring.panels * panel)
        )
        return cute.make_tensor(cute.recast_ptr(shared.storage.v.data_ptr(), dtype=Int64), layout)


def rings_of(config: Config) -> Rings:
    """Returns the shared-memory layout of a configuration."""
    return Rings(
        config,
        dtype_of(config.dtype),
        Ring(64, config.head_dim, config.q_stages),
        Ring(config.rows, config.head_dim, config.kv_stages),
        Ring(config.value_rows, config.head_dim, config.kv_stages),
        Ring(64, config.head_dim, WARPGROUPS),
    )
