"""How `mm_device` finds, reads and copies memory."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32, cute

from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import Config


def type_of(name: str) -> type[Numeric]:
    """CuteDSL's type of an activation or a result. 8-bit floats are handed over as bytes."""
    return Float32 if name == "float32" else cutlass.Uint8 if name.startswith("float8") else dtype_of(name)


# -- instructions ----------------------------------------------------------------------------------------------------------------


def load_words_if(space: str, address: Any, condition: Boolean) -> Any:
    """Four neighbouring words, or zeros."""
    kept = ".L1::no_allocate" if space == "global" else ""  # what the kernel before wrote is not to be had by ".nc"
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        f"@p ld.{space}{kept}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(condition)],
    )


def load_float_if(address: Any, condition: Boolean) -> Any:
    """A number of global memory, or zero."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.f32 {$w0}, 0f00000000; @p ld.global.f32 {$w0}, [{$r0}]; }",
        write_only_types=[Float32],
        read_only_args=[address, Int32(condition)],
    )


def load_byte_if(address: Any, condition: Boolean) -> Any:
    """A byte of global memory, or zero."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.u8 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(condition)],
    )


def copy_to_shared(to: Int32, address: Int64, size: Int32, barrier: Int32) -> None:
    """Starts a bulk copy, whose bytes the barrier counts. Addresses and size: multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[to, address, size, barrier],
    )


def prefetch_to_l2(address: Int64, size: Int32) -> None:
    """Starts to bring bytes to the L2 cache. Address and size: multiples of 16."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, size])


# -- where things are ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """Where rows are: the address of the first, and how many bytes further each next one is."""

    address: Int64
    pitch: Int64

    @cute.jit
    def row(self, index: Int32):
        return self.address + Int64(index) * self.pitch


@dataclass(frozen=True)
class Vector:
    """Numbers, one for each column of the result, of a dtype that is known at run time.

    Attributes:
        address: where they lie, one after another.
        kind: their dtype, see `launch.KINDS`; 0 for none.
    """

    address: Int64
    kind: Int32

    @cute.jit
    def load(self, index: Int32) -> Float32:
        """0 if there are none."""
        found = Float32(0.0)
        if self.kind == 1:
            found = cute.make_ptr(Float32, self.address, cute.AddressSpace.gmem)[index]
        elif self.kind == 2:
            found = cute.make_ptr(cutlass.BFloat16, self.address, cute.AddressSpace.gmem)[index].to(Float32)
        elif self.kind == 3:
            found = cute.make_ptr(cutlass.Float16, self.address, cute.AddressSpace.gmem)[index].to(Float32)
        return found


@dataclass(frozen=True)
class Table:
    """Scales: the address of the first, and how many elements further those of the next row and column are."""

    address: Int64
    row: Int32
    column: Int32

    @cute.jit
    def at(self, row: Int32, column: Int32, size: cutlass.Constexpr[int]):
        """The address of one. ``size``: bytes of each."""
        return self.address + (Int64(row) * self.row + Int64(column) * self.column) * size


@dataclass(frozen=True)
class Call:
    """What a CTA is asked for.

    Attributes:
        a, weights: rows of activations, and of weights.
        row_bytes: of weights.
        bias: added to the result.
        a_scale, b_scale: scales as the operator has them, of a's rows and b's columns; a step of 0 where one serves all.
        m, n: rows of activations, and of all weights.
        first, rows: this CTA's rows of weights.
        pipe: the barriers of the ring.
        ring, results: shared memory.
    """

    a: Matrix
    weights: Matrix
    row_bytes: Int32
    bias: Vector
    a_scale: Table
    b_scale: Table
    m: Int32
    n: Int32
    first: Int32
    rows: Int32
    pipe: Pipeline
    ring: Int32
    results: cute.Pointer


def storage_of(config: Config) -> Any:
    """Shared memory of a CTA."""

    @cute.struct
    class Storage:
        full: cute.struct.MemRange[Int64, config.stages]
        empty: cute.struct.MemRange[Int64, config.stages]
        results: cute.struct.Align[cute.struct.MemRange[Float32, config.result_floats], 16]
        ring: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.stages * config.stage_bytes], 128]

    return Storage
