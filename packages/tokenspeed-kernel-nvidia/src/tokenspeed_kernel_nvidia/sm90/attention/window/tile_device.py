"""Common to all warps of `kernel_device`: the layout of shared memory, and a work item's record.

A Q tile has 64 rows, row = position * heads + head. A stage holds the keys and values of an item. A tile's keys are a view of the
stage. The view starts at a multiple of 8 keys, where the swizzle pattern repeats. So all tiles of an item share one copy.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Numeric, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.attention.window.config import WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring

# Indices of the fields of a record, see `Record`; RECORD is its size.
COUNT, POSITION, TOKEN, FIRST, LENGTH, KV_HEAD, SHIFT, RECORD = range(8)


@dataclass(frozen=True)
class Record:
    """A work item's parameters in shared memory, written by the producer warp.

    Attributes:
        at: the first of RECORD consecutive words.
    """

    at: cute.Pointer

    @property
    def count(self) -> Int32:
        """Tiles of the item; 0 after the last item."""
        return self.at[COUNT]

    @property
    def position(self) -> Int32:
        """The item's first position in the sequence."""
        return self.at[POSITION]

    @property
    def token(self) -> Int32:
        """The row of q of the item's first position."""
        return self.at[TOKEN]

    @property
    def first(self) -> Int32:
        """The position of the sequence's first query. The item may start up to 7 positions before it."""
        return self.at[FIRST]

    @property
    def length(self) -> Int32:
        """Keys of the sequence."""
        return self.at[LENGTH]

    @property
    def kv_head(self) -> Int32:
        return self.at[KV_HEAD]

    @property
    def shift(self) -> Int32:
        """Number of keys in the stage before the first tile's keys, divided by 8."""
        return self.at[SHIFT]

    def write(self, *numbers: Int32) -> None:
        """Writes all fields, in order."""
        for index, number in enumerate(numbers):
            self.at[index] = number

    def write_end(self) -> None:
        """Marks the end. The consumers still issue q @ k of a tile that does not exist, so the shift must be valid."""
        self.at[COUNT] = Int32(0)
        self.at[SHIFT] = Int32(0)


class Shared:
    """A CTA's shared memory. Addresses are computed at each use.

    The class is not a frozen dataclass, so that CuteDSL carries it through branches and loops like its struct. Otherwise the
    compiler computes addresses before the branch to the warps' roles. Counters of the producer warps are then in vector registers
    instead of uniform registers: 2 KiB more code.

    Attributes:
        storage: see `Rings.storage`.
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
        """Barriers: a stage's keys and record have been written."""
        return Barriers(self.storage.k_full.data_ptr())

    @property
    def v_full(self) -> Barriers:
        """Barriers: a stage's values have been loaded."""
        return Barriers(self.storage.v_full.data_ptr())

    @property
    def v_ready(self) -> Barriers:
        """Barriers: rows of V beyond the sequence have been zeroed."""
        return Barriers(self.storage.v_ready.data_ptr())

    @property
    def kv_empty(self) -> Barriers:
        """Barriers: all tiles have read the stage."""
        return Barriers(self.storage.kv_empty.data_ptr())

    def record(self, kv_at: Cursor) -> Record:
        """The record of the item in a stage."""
        return Record(self.storage.records.data_ptr() + kv_at.stage * RECORD)


@dataclass(frozen=True)
class Rows:
    """A thread's two rows of a tile, 8 apart.

    Attributes:
        rows: their indices.
        positions: the rows' positions, relative to the tile's first position.
        column: the first of the thread's two columns in each 8.
    """

    rows: tuple
    positions: tuple
    column: Int32


@dataclass(frozen=True)
class TilePosition:
    """A tile's location in its sequence.

    Attributes:
        position, token: the tile's first position in the sequence, and the row of q of that position.
        first, length: position of the sequence's first query, and end of its positions.
        head: the first of its query heads.
    """

    position: Int32
    token: Int32
    first: Int32
    length: Int32
    head: Int32

    @cute.jit
    def holds(self, offset: Int32):
        """Whether a position of the tile is a query of the sequence."""
        return self.position + offset >= self.first and self.position + offset < self.length


@dataclass(frozen=True)
class Rings:
    """The layout of shared memory, made by `rings_of`: a ring each of Q tiles, K, V and output tiles.

    Attributes:
        dtype: dtype of the tiles.
        out: an output tile for each warpgroup.
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
        """V as 8-byte words: ``(word of a panel's row, row, panel, stage)``, unswizzled: the swizzle permutes within a row only."""
        ring = self.v
        panel = ring.rows * PANEL // 4
        layout = cute.make_layout(
            (PANEL // 4, ring.rows, ring.panels, ring.stages), stride=(1, PANEL // 4, panel, ring.panels * panel)
        )
        return cute.make_tensor(cute.recast_ptr(shared.storage.v.data_ptr(), dtype=Int64), layout)


def rings_of(config: Config) -> Rings:
    """The layout of a configuration's shared memory."""
    return Rings(
        config,
        dtype_of(config.dtype),
        Ring(64, config.head_dim, config.q_stages),
        Ring(config.rows, config.head_dim, config.kv_stages),
        Ring(config.value_rows, config.head_dim, config.kv_stages),
        Ring(64, config.head_dim, WARPGROUPS),
    )
