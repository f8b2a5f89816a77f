"""Register-level helpers of a warp: shuffles between lanes, fragments of small matrices, and single PTX instructions.

A thread's accumulator of wgmma or mma.sync is a flat list of float32. The thread has two rows r = 0, 1, which are 8 rows apart. In
each group of 8 columns it has two neighbouring columns c = 0, 1. Element ``4 * j + 2 * r + c`` is column ``8 * j + 2 * (lane % 4) +
c``. So a row is spread over a quad of four lanes.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Numeric, Uint32, cute

LANES = 32
# The float32 exponent field to which an amax is scaled for float16. The scaled amax is at least 2^14 and below 2^15; float16's
# largest exponent is 15.
EXPONENT = 127 + 14
LEAST_EXPONENT = 27  # an amax with a smaller exponent field would need a factor that float32 cannot represent


def dtype_of(name: str) -> type[Numeric]:
    """Returns CuteDSL's dtype for a name in `launch.DTYPES`, or for ``"float32"``."""
    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}[name]


def _ptx_type(dtype: type[Numeric]) -> str:
    return "bf16" if dtype is cutlass.BFloat16 else "f16"


def opt_barrier(x: Int32) -> Int32:
    """Returns x, opaque to the compiler. So the compiler cannot compute values from the result earlier, before or outside of a
    loop, where they would occupy registers for longer.
    """
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]))


# -- between lanes -------------------------------------------------------------------------------------------------------------


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Returns the maximum of x over the four lanes that hold one row of an accumulator."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Returns the sum of x over the four lanes that hold one row of an accumulator."""
    x += cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def column_max(x: Float32) -> Float32:
    """Returns the maximum of x over the eight lanes that hold one column of an accumulator: those with the same lane index modulo
    4."""
    for power in cutlass.range_constexpr(2, 5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << power))
    return x


@cute.jit
def column_sum(x: Float32) -> Float32:
    """Returns the sum of x over the eight lanes that hold one column of an accumulator."""
    for power in cutlass.range_constexpr(2, 5):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << power)
    return x


@cute.jit
def transpose_matrix(word: Uint32, lane: Int32) -> Uint32:
    """Transposes an 8 x 8 matrix of 16-bit elements, held by a warp. Lane ``4 g + t`` holds columns 2 t and 2 t + 1 of row g in one
    word, before and after."""
    column = lane // 4
    low, high = (cute.arch.shuffle_sync(word, offset=lane % 4 * 8 + row * 4 + column // 2) for row in range(2))
    return permute_bytes(low, high, cutlass.select_(column % 2 == 0, Int32(0x5410), Int32(0x7632)))


@cute.jit
def any_lane(condition: Boolean) -> Boolean:
    """Returns whether the condition holds in any lane of the warp."""
    return cute.arch.vote_any_sync(condition)


@cute.jit
def ballot(condition: Boolean) -> Int32:
    """Returns a bit mask of the warp's lanes: bit i is lane i's condition."""
    return Int32(cute.arch.vote_ballot_sync(condition))


def lanes_with(x: Int32) -> Int32:
    """Returns a bit mask of the warp's lanes: bit i is set if lane i's x equals this lane's x."""
    return cute.arch.inline_ptx("match.any.sync.b32 {$w0}, {$r0}, 0xFFFFFFFF;", write_only_types=[Int32], read_only_args=[x])


@cute.jit
def warp_prefix_sum(x: Int32, lane: Int32) -> Int32:
    """Returns the inclusive prefix sum of x over the warp's lanes."""
    for shift in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(x, offset=1 << shift)
        x = x + below if lane >= 1 << shift else x
    return x


@cute.jit
def transpose_quad(words: list, lane: Int32) -> list:
    """Transposes a 4 x 4 matrix of words, four in each of a quad's four lanes: word i of lane j becomes word j of lane i.

    Args:
        lane: this lane's index within its quad.
    """
    for step in cutlass.range_constexpr(2):
        far, upper = 1 << step, (lane >> step) % 2 == 1
        for low in cutlass.range_constexpr(4):
            if cutlass.const_expr(low & far == 0):
                sent = cutlass.select_(upper, words[low], words[low + far])
                got = cute.arch.shuffle_sync_bfly(sent, offset=far)
                words[low], words[low + far] = (
                    cutlass.select_(upper, got, words[low]),
                    cutlass.select_(upper, words[low + far], got),
                )
    return words


# -- fragments -----------------------------------------------------------------------------------------------------------------


@cute.jit
def scale_row(values: cute.Tensor, row: cutlass.Constexpr[int], factor: Float32) -> None:
    """Multiplies one of the two rows of a thread's accumulator by ``factor``."""
    for j in cutlass.range_constexpr(cute.size(values) // 4):
        values[4 * j + 2 * row] = values[4 * j + 2 * row] * factor
        values[4 * j + 2 * row + 1] = values[4 * j + 2 * row + 1] * factor


@cute.jit
def round_to(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds an accumulator, ``source``, to a 16-bit operand of the next MMA, ``target``. Both fragments have the same element
    order."""
    target.store(source.load().to(target.element_type))


def pack(dtype: type[Numeric], low: Float32, high: Float32) -> Uint32:
    """Rounds two float32 values to the 16-bit dtype, and packs them into one register."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{_ptx_type(dtype)}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def widened(dtype: type[Numeric], word: Uint32) -> Any:
    """Converts the two 16-bit values of a register to float32."""
    if dtype is cutlass.BFloat16:
        code = "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xFFFF0000; }"
    else:
        code = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
    return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[word])


@cute.jit
def factors_of_float16(bits: Int32):
    """Returns the power of 2 that scales the values of a warp's lanes into float16's range, and the inverse of this power.

    Args:
        bits: the float32 bit pattern of this lane's amax.
    """
    exponent = exponent_of(cute.arch.warp_redux_sync(bits, "max"))
    return float_of((EXPONENT + 127 - exponent) << 23), float_of((exponent + 127 - EXPONENT) << 23)


def exponent_of(bits: Int32) -> Int32:
    """Returns the exponent field of the float32 bit pattern of an amax, at least `LEAST_EXPONENT`."""
    return cutlass.max(bits >> 23, LEAST_EXPONENT)


def widen_fp8(dtype: type[Numeric], word: Any) -> Any:
    """Converts a word of four e4m3 values to two registers with two values of the 16-bit dtype each."""
    halves = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }"
        if dtype is cutlass.Float16
        else "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, i; mov.b32 {l, h}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 i, d; "
        "cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, i, g; }"
    )
    return cute.arch.inline_ptx(halves, write_only_types=[Uint32] * 2, read_only_args=[word])


def permute_bytes(x: Any, y: Any, order: Any) -> Any:
    """Returns a word of four bytes selected from two words (prmt). The hex digits of ``order``, an int or a register, are the
    selectors."""
    known = isinstance(order, int)
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order if known else '{$r2}'};",
        write_only_types=[Uint32],
        read_only_args=[x, y] if known else [x, y, order],
    )


def pack_fp8(first: Float32, second: Float32, third: Float32, fourth: Float32) -> Uint32:
    """Rounds four values to e4m3, saturating, and packs them into one register."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};"
        " mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[first, second, third, fourth],
    )


def bits_of(x: Float32) -> Int32:
    """Returns the bit pattern of a float32 as an integer."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def float_of(bits: Int32) -> Float32:
    """Returns the float32 with this bit pattern."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def mma_m16n8k16(dtype: type[Numeric], c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Returns ``c + a @ b`` for the fragments of a 16 x 16 and a 16 x 8 operand in a 16-bit dtype."""
    kind = _ptx_type(dtype)
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def ldmatrix(address: Any, transposed: bool) -> Any:
    """Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane i passes the address of row i % 8 of matrix i / 8."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def stmatrix(address: Any, words: Sequence[Any]) -> None:
    """Stores four 8 x 8 matrices of 16-bit elements to shared memory. Takes the addresses that `ldmatrix` takes, and the words that
    an untransposed `ldmatrix` returns."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


# -- loads and stores by address -----------------------------------------------------------------------------------------------


def load_floats(space: str, address: Any, count: int) -> Any:
    """Loads 1, 2 or 4 consecutive float32 values; a single value is returned bare, not in a list. ``space`` is PTX's state
    space."""
    vector = f".v{count}" if count > 1 else ""
    to = ", ".join(f"{{$w{at}}}" for at in range(count))
    return cute.arch.inline_ptx(
        f"ld.{space}{vector}.f32 {f'{{{to}}}' if vector else to}, [{{$r0}}];",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )


def load_floats_if(condition: Any, address: Any, count: int) -> Any:
    """Loads 2 or 4 consecutive float32 values from global memory, bypassing L1 (``.cg``), if ``condition`` holds; otherwise returns
    zeros."""
    to = [f"{{$w{at}}}" for at in range(count)]
    zeros = " ".join(f"mov.b32 {one}, 0;" for one in to)
    return cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r0}}, 0; {zeros} @p ld.global.cg.v{count}.f32 {{{', '.join(to)}}}, [{{$r1}}]; }}",
        write_only_types=[Float32] * count,
        read_only_args=[Int32(condition), address],
    )


def store_floats(space: str, address: Any, values: Sequence[Any]) -> None:
    """Stores 1, 2 or 4 consecutive float32 values. ``space`` is PTX's state space."""
    vector = f".v{len(values)}" if len(values) > 1 else ""
    given = ", ".join(f"{{$r{at + 1}}}" for at in range(len(values)))
    cute.arch.inline_ptx(
        f"st.{space}{vector}.f32 [{{$r0}}], {f'{{{given}}}' if vector else given};", read_only_args=[address, *values]
    )


def store_if(condition: Any, address: Any, values: Sequence[Any]) -> None:
    """Stores 1, 2 or 4 consecutive 32-bit words or float32 values to global memory if ``condition`` holds.

    The store is predicated, not in a branch: ptxas treats a branch around a store as divergent. In a loop with such a branch, ptxas
    waits for every MMA separately.
    """
    vector = f".v{len(values)}" if len(values) > 1 else ""
    given = ", ".join(f"{{$r{at + 2}}}" for at in range(len(values)))
    given = f"{{{given}}}" if vector else given
    cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r0}}, 0; @p st.global{vector}.b32 [{{$r1}}], {given}; }}",
        read_only_args=[Int32(condition), address, *values],
    )


def load_word(address: Any) -> Any:
    """Loads a 32-bit word, such as two 16-bit values, from global memory."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def store_words(address: Any, words: Sequence[Any]) -> None:
    """Stores 1, 2 or 4 consecutive 32-bit words to global memory, for instance pairs of 16-bit values."""
    if len(words) == 1:
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, *words])
        return
    given = ", ".join(f"{{$r{at + 1}}}" for at in range(len(words)))
    cute.arch.inline_ptx(f"st.global.v{len(words)}.b32 [{{$r0}}], {{{given}}};", read_only_args=[address, *words])


def load_int(address: Any, early: bool) -> Any:
    """Loads an int32 from global memory. ``early``: whether other threads may still write the value. If so, the load is relaxed at
    GPU scope, so that it does not read a stale line of L1.
    """
    order = ".relaxed.gpu" if early else ""
    return cute.arch.inline_ptx(f"ld{order}.global.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address])


def prefetch_line(address: Any) -> None:
    """Prefetches the cache line at a global address into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
