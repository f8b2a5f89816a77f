"""What the loading warps and the computing warpgroups of `window_device` share: tiles, rings, and an item's record.

A tile of queries has 64 rows, row = position * heads + head. Of keys and values a stage holds those of an item. A tile's keys are a
view of them that begins at a multiple of 8 keys, where the swizzle's pattern begins anew: so all tiles of an item read one copy.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.window_config import WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Barriers, Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring

# What a record says, by the number of its place: see `Record`.
COUNT, POSITION, TOKEN, FIRST, LENGTH, KV_HEAD, SHIFT, RECORD = range(8)


@dataclass(frozen=True)
class Record:
    """What the loading warp says of an item, in shared memory.

    Attributes:
        at: where; its numbers follow one another.
    """

    at: cute.Pointer

    @property
    def count(self) -> Int32:
        """How many tiles it has; 0 behind the last item."""
        return self.at[COUNT]

    @property
    def position(self) -> Int32:
        """Its first position in the sequence."""
        return self.at[POSITION]

    @property
    def token(self) -> Int32:
        """The row of q of that position."""
        return self.at[TOKEN]

    @property
    def first(self) -> Int32:
        """The position of the sequence's first query. The item may begin up to 7 before it."""
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
        """How many eights of keys lie before those of the first tile."""
        return self.at[SHIFT]

    def write(self, *numbers: Int32) -> None:
        """All of them, in their order."""
        for index, number in enumerate(numbers):
            self.at[index] = number

    def write_end(self) -> None:
        """Behind the last item. Scores of no tile are begun all the same, so there is a shift."""
        self.at[COUNT] = Int32(0)
        self.at[SHIFT] = Int32(0)


class Shared:
    """A CTA's shared memory. Addresses in it are computed where they are used.

    It is no frozen dataclass, so that CuteDSL carries it through branches and loops, as it does its struct. Otherwise the compiler
    computes addresses before it branches to the warps' work, and what the loading warps count comes to lie in vector registers
    instead of uniform ones: 2 KiB more code.

    Attributes:
        storage: see `Tiles.storage`.
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
        """A stage's keys, and its record, are there."""
        return Barriers(self.storage.k_full.data_ptr())

    @property
    def v_full(self) -> Barriers:
        """Its values are there."""
        return Barriers(self.storage.v_full.data_ptr())

    @property
    def v_ready(self) -> Barriers:
        """Rows of V that are no values of the sequence are zero."""
        return Barriers(self.storage.v_ready.data_ptr())

    @property
    def kv_empty(self) -> Barriers:
        """All tiles have read the stage."""
        return Barriers(self.storage.kv_empty.data_ptr())

    def record(self, kv_at: Cursor) -> Record:
        """Of the item in a stage."""
        return Record(self.storage.records.data_ptr() + kv_at.stage * RECORD)


class Tiles:
    """The shapes that follow from a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.q_ring = Ring(64, config.head_dim, config.q_stages)
        self.k_ring = Ring(config.rows, config.head_dim, config.kv_stages)
        self.v_ring = Ring(config.value_rows, config.head_dim, config.kv_stages)
        self.out_ring = Ring(64, config.head_dim, WARPGROUPS)  # a tile of each warpgroup

    def storage(self) -> Any:
        config, dtype = self.config, self.dtype

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.q_ring.size], 1024]
            out: cute.struct.Align[cute.struct.MemRange[dtype, self.out_ring.size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, self.k_ring.size], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.v_ring.size], 1024]
            q_full: cute.struct.MemRange[Int64, config.q_stages]
            q_empty: cute.struct.MemRange[Int64, config.q_stages]
            k_full: cute.struct.MemRange[Int64, config.kv_stages]
            v_full: cute.struct.MemRange[Int64, config.kv_stages]
            v_ready: cute.struct.MemRange[Int64, config.kv_stages]
            kv_empty: cute.struct.MemRange[Int64, config.kv_stages]
            records: cute.struct.MemRange[Int32, config.kv_stages * RECORD]

        return Storage

    def value_words(self, shared: Shared) -> cute.Tensor:
        """V in pieces of 8 bytes: ``(piece of a panel's row, row, panel, stage)``. The swizzle moves pieces within a row only."""
        ring = self.v_ring
        panel = ring.rows * PANEL // 4
        layout = cute.make_layout(
            (PANEL // 4, ring.rows, ring.panels, ring.stages), stride=(1, PANEL // 4, panel, ring.panels * panel)
        )
        return cute.make_tensor(cute.recast_ptr(shared.storage.v.data_ptr(), dtype=Int64), layout)
