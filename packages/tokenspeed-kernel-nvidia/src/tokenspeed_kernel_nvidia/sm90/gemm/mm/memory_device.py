"""Address computations, predicated loads and stores, and argument structs of `kernel_device`."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import store_half
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, pack


def type_of(name: str) -> type[Numeric]:
    """Returns CuteDSL's dtype for the name of an activation's or a result's dtype. 8-bit floats are passed as uint8."""
    return Float32 if name == "float32" else cutlass.Uint8 if name.startswith("float8") else dtype_of(name)


# -- instructions ----------------------------------------------------------------------------------------------------------------


def load_words_if(address: Any, condition: Boolean, space: str = "global.L1::no_allocate") -> Any:
    """Loads four consecutive words if ``condition`` holds; otherwise returns zeros. ``space`` is PTX's state space, with
    qualifiers.

    A load from global memory is not ``.nc``, because the preceding kernel may have written the words (PDL).
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        f"@p ld.{space}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(condition)],
    )


def read_byte(address: Int32) -> Any:
    """Loads a byte from shared memory."""
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def write_byte(address: Int32, value: Any) -> None:
    """Stores a byte to shared memory."""
    cute.arch.inline_ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[address, value])


def load_float_if(address: Any, condition: Boolean) -> Any:
    """Loads a float32 from global memory if ``condition`` holds; otherwise returns 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.f32 {$w0}, 0f00000000; @p ld.global.f32 {$w0}, [{$r0}]; }",
        write_only_types=[Float32],
        read_only_args=[address, Int32(condition)],
    )


def load_byte_if(address: Any, condition: Boolean) -> Any:
    """Loads a byte from global memory if ``condition`` holds; otherwise returns 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.u8 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(condition)],
    )


def store_number(address: Int64, value: Float32, dtype: type[Numeric]) -> None:
    """Rounds a float32 to ``dtype`` and stores it to global memory."""
    if dtype is Float32:
        cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])
    else:
        store_half(address, pack(dtype, value, value))


# -- addresses -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix in global memory: the first row's address, and the distance between rows in bytes."""

    address: Int64
    pitch: Int64

    @cute.jit
    def row(self, index: Int32):
        """Returns the global address of row ``index``."""
        return self.address + Int64(index) * self.pitch


@dataclass(frozen=True)
class Vector:
    """A contiguous vector in global memory with one value for each column of the result. Its dtype is known only at run time.

    Attributes:
        address: global address of the first value.
        kind: the number of the dtype in `cutedsl.launch.KINDS`; 0 without a vector.
    """

    address: Int64
    kind: Int32

    def load(self, index: Int32, condition: Boolean) -> Any:
        """Loads a value, unconverted, if ``condition`` holds; otherwise returns 0. `number` converts the value where it is used, so
        that no earlier instruction waits for the load.
        """
        size = cutlass.select_(self.kind == 1, Int32(4), Int32(2))
        return cute.arch.inline_ptx(
            "{ .reg .pred p, q; setp.eq.s32 p, {$r1}, 1; setp.gt.s32 q, {$r1}, 1; mov.b32 {$w0}, 0; "
            "@p ld.global.b32 {$w0}, [{$r0}]; @q ld.global.u16 {$w0}, [{$r0}]; }",
            write_only_types=[Uint32],
            read_only_args=[self.address + Int64(index * size), cutlass.select_(condition, self.kind, Int32(0))],
        )

    def prefetch(self, index: Int32, condition: Boolean) -> None:
        """Prefetches a value's cache line into L2, if ``condition`` holds and there is a vector."""
        size = cutlass.select_(self.kind == 1, Int32(4), Int32(2))
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p prefetch.global.L2 [{$r0}]; }",
            read_only_args=[self.address + Int64(index * size), cutlass.select_(condition, self.kind, Int32(0))],
        )

    def number(self, stored: Uint32) -> Any:
        """Converts a value that `load` returned to float32."""
        return cute.arch.inline_ptx(
            "{ .reg .pred p, q; .reg .b16 h, z; setp.eq.s32 p, {$r1}, 2; setp.eq.s32 q, {$r1}, 3; mov.b32 {h, z}, {$r0}; "
            "mov.b32 {$w0}, {$r0}; @p mov.b32 {$w0}, {z, h}; @q cvt.f32.f16 {$w0}, h; }",
            write_only_types=[Float32],
            read_only_args=[stored, self.kind],
        )


@dataclass(frozen=True)
class Table:
    """A strided matrix of scales or results: the first element's global address, and its strides between rows and columns in
    elements."""

    address: Int64
    row: Int64
    column: Int64

    @cute.jit
    def at(self, row: Int32, column: Int32, size: cutlass.Constexpr[int]):
        """Returns the global address of an element. ``size``: bytes per element."""
        return self.address + (row * self.row + column * self.column) * size


@dataclass(frozen=True)
class Places:
    """A CTA's shared-memory addresses, and two sizes.

    Attributes:
        sums: the warps' partial sums.
        scales, activations, ring: the scales, the activations, and the ring of weights, see `Layout`.
        gathered: the partial sums that the CTAs of the cluster send.
        zeros: 16 zero bytes.
        chunk_bytes: bytes of a row of weights to which the activations in shared memory belong.
        stages: number of stages of the ring.
    """

    sums: Int32
    scales: Int32
    activations: Int32
    ring: Int32
    gathered: Int32
    zeros: Int32
    chunk_bytes: Int32
    stages: Int32


@dataclass(frozen=True)
class Call:
    """The kernel's arguments, a CTA's part of the work, and its shared memory.

    Attributes:
        a, weights: the activations and the weights, in global memory.
        out: the result, in global memory.
        begin: the byte offset in each row of weights at which this CTA's part of k begins.
        row_bytes: bytes of this CTA's part of a row of weights.
        bias: the bias, which is added to the result.
        a_scale, b_scale: scales of a's rows and b's columns, as the operator defines them. Strides are 0 if one scale applies to
            all.
        m, n: numbers of rows of activations, and of rows of weights.
        first, rows: this CTA's first row of weights, and its number of rows.
        rank: the CTA's rank in its cluster or pair.
        vectors_inverse: the reciprocal of the number of 16-byte vectors of a row of weights in a chunk.
        pipe: the barriers of the ring of weights.
        arrived: the barrier of partial sums from the cluster's CTAs.
        activated: the barrier of bulk copies of activations.
        ended: the barrier whose first phase ends when the preceding kernel has ended.
        at: the shared-memory addresses.
    """

    a: Matrix
    weights: Matrix
    out: Table
    begin: Int32
    row_bytes: Int32
    bias: Vector
    a_scale: Table
    b_scale: Table
    m: Int32
    n: Int32
    first: Int32
    rows: Int32
    rank: Int32
    vectors_inverse: Float32
    pipe: Pipeline
    arrived: cute.Pointer
    activated: cute.Pointer
    ended: cute.Pointer
    at: Places
