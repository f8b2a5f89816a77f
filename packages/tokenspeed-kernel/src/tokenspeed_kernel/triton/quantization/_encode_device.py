"""Device code of `_encode`: decoding and encoding of fp8, e2m1 and e8m0, division by scales, and maxima that propagate NaN."""

from __future__ import annotations

import triton
import triton.language as tl

# -- 8-bit floats --------------------------------------------------------------------------------------------------------------


@triton.jit
def encode_fp8(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Encodes float32 as the bits of an 8-bit float: round to nearest even, saturating; all NaNs become one NaN."""
    if NATIVE and FORMAT == "e4m3fn":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if NATIVE and FORMAT == "e5m2":
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    MANTISSA: tl.constexpr = 2 if FORMAT == "e5m2" else 3
    BIAS: tl.constexpr = 15 if FORMAT == "e5m2" else (8 if FORMAT == "e4m3fnuz" else 7)
    LARGEST: tl.constexpr = 57344.0 if FORMAT == "e5m2" else (240.0 if FORMAT == "e4m3fnuz" else 448.0)
    NAN_CODE: tl.constexpr = 0x80 if FORMAT == "e4m3fnuz" else 0x7F
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # A float32 whose ulp is the spacing of the format's subnormals. Adding it rounds a magnitude to a multiple of the spacing.
    ALIGNED: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    subnormal = (magnitude + ALIGNED).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal - ((127 - BIAS) << MANTISSA))
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FORMAT == "e4m3fnuz":  # this format has no -0
        sign = tl.where(code == 0, 0, sign)
    return tl.where(x != x, NAN_CODE, code | sign).to(tl.uint8)


@triton.jit
def decode_fp8(code, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Decodes the bits of an 8-bit float to float32, exactly."""
    if NATIVE and FORMAT == "e4m3fn":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if FORMAT == "e5m2":  # the upper half of a float16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    # Exponent and mantissa, moved to their positions in a float32, give the value divided by a power of two, subnormals included.
    MISSING: tl.constexpr = 2.0**119 if FORMAT == "e4m3fnuz" else 2.0**120
    wide = code.to(tl.int32)
    value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * MISSING
    if FORMAT == "e4m3fnuz":
        return tl.where(wide == 0x80, float("nan"), value)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rounds float32 to dtype DTYPE, a 16-bit float or float32, to nearest even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, bits, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


# -- e2m1 and e8m0 -------------------------------------------------------------------------------------------------------------


@triton.jit
def encode_e2m1(x, sign_of):
    """Encodes float32 as e2m1 (int32, 0 to 15): round to nearest even, saturating. The sign comes from ``sign_of``, float32."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    # Adding a large constant rounds a value to a multiple of the constant's ulp, to nearest even, and leaves the multiple in the
    # low bits. The ulps are 0.5 below 2 (codes 0 to 4), 1 from 2 to 4 (codes 4 to 6), and 2 from 4 on (codes 6 and 7).
    aligned = tl.where(magnitude < 2.0, 4194304.0, tl.where(magnitude < 4.0, 8388610.0, 16777224.0))
    code = (magnitude + aligned).to(tl.int32, bitcast=True) & 7
    return code | ((sign_of.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def pack_e2m1(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Packs e2m1 values, int32 ``[ROWS, COLUMNS]``, into bytes (as int32) ``[ROWS, COLUMNS / 2]``. The even column is the low
    nibble.
    """
    low, high = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))
    return low | (high << 4)


@triton.jit
def pack_scaled_e2m1(pairs, factors):
    """Multiplies bf16x2 pairs (int32) by powers of two (bf16x2 in int32), and encodes each as two e2m1 values in a byte.

    The result is int32, with undefined bits above the byte. For sm_90 and later.

    This function does the work of `encode_e2m1` and `pack_e2m1` with half the instructions. The ulp of bfloat16 is 0.5 from 64 on,
    1 from 128 on, and 2 from 256 on, so adding a constant of such a size rounds to e2m1. The scaled values are exact.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 v, two, four, sign, c;
        mul.rn.bf16x2 v, $1, $2;
        and.b32 v, v, 0x7fff7fff;
        mov.b32 c, 0x40c040c0;
        min.bf16x2 v, v, c;
        mov.b32 c, 0x40004000;
        set.ge.bf16x2.bf16x2 two, v, c;
        mov.b32 c, 0x40804080;
        set.ge.bf16x2.bf16x2 four, v, c;
        mov.b32 c, 0x42844284;
        mov.b32 sign, 0x42804280;
        fma.rn.bf16x2 two, two, c, sign;
        mov.b32 c, 0x43064306;
        fma.rn.bf16x2 two, four, c, two;
        add.rn.bf16x2 v, v, two;
        shr.u32 sign, $1, 12;
        and.b32 sign, sign, 0x00080008;
        and.b32 v, v, 0x00070007;
        or.b32 v, v, sign;
        shr.u32 sign, v, 12;
        or.b32 $0, v, sign;
        }
        """,
        "=r,r,r",
        args=[pairs, factors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def unpack_e2m1(packed):
    """Unpacks uint8 ``[R, C / 2]`` into e2m1 values, int32 ``[R, C]``; bits above the fourth are not cleared."""
    wide = packed.to(tl.int32)
    return tl.interleave(wide, wide >> 4)


@triton.jit
def decode_e2m1(code):
    """Decodes e2m1 values (int32, bits above the fourth ignored) to float32, exactly."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


@triton.jit
def decode_e8m0(byte):
    """Decodes e8m0 (uint8) to float32: 2^(byte - 127), NaN for 255."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def swizzled_in_tile(row, column):
    """Returns the byte offset of the scale at (row, column) within its 512-byte tile of 128x4 scales."""
    return row % 32 * 16 + row // 32 % 4 * 4 + column % 4


@triton.jit
def row_and_column_of(at, tiles_across):
    """Returns the row and column of the scale at byte ``at`` of the 128x4 tiles: inverts `swizzled_in_tile` and the tile order."""
    tile = at // 512
    row = tile // tiles_across * 128 + at % 16 // 4 * 32 + at % 512 // 16
    return row, tile % tiles_across * 4 + at % 4


@triton.jit
def blocks_of_program(
    count,
    x_stride,
    x_outer_stride,
    rows,
    columns,
    BLOCKS: tl.constexpr,
    LENGTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Locates the blocks of x that a program quantises, see `_rows.blocks_of`. A block has ``LENGTH`` elements, which are loaded in
    groups of ``UNIT``.

    Returns:
        ``(first_x, x_at, first_made, made_at, first_scale, inside, stored)``. ``first_x`` is the index of the program's first
        element of x, and ``x_at`` each block's offset from this element, in groups of ``UNIT`` elements. ``first_made`` is the
        number of the program's first block, and ``made_at`` each block's offset from this number. ``first_scale`` is the index of
        the program's first scale; further scales follow contiguously. ``inside`` masks the blocks that exist, ``stored`` the scales
        to store.
    """
    programs = tl.cdiv(count, BLOCKS)
    outer, first = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs * BLOCKS
    block = tl.arange(0, BLOCKS)
    if TILES:
        row, column = row_and_column_of(first + block, tl.cdiv(columns, 4))
        inside = (row < rows) & (column < columns)
        x_at = row.to(tl.int64) * (x_outer_stride // UNIT) + column * (LENGTH // UNIT)
        made_at = row.to(tl.int64) * columns + column
        first_x, first_made = outer * rows * x_outer_stride, outer * rows * columns
        first_scale, stored = outer * count + first, first + block < count
    else:
        inside = block < count - first
        x_at, made_at = block * (x_stride // UNIT), block
        first_x, first_made = outer * x_outer_stride + first.to(tl.int64) * x_stride, outer * count + first
        first_scale, stored = first_made, inside
    return first_x, x_at, first_made, made_at, first_scale, inside, stored


# -- largest magnitudes and divisions ------------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Returns the amax along an axis; NaN if any element is NaN."""
    return tl.reduce(tl.abs(x), axis, _larger)


@triton.jit
def larger(a, b):
    """Returns the larger of two values; NaN if either is NaN."""
    return _larger(a, b)


@triton.jit
def prepare_divisor(divisor, INTERPRETED: tl.constexpr):
    """Prepares a divisor for `divide`. Returns a signed power of two, the divisor times this power, and minus the reciprocal of the
    scaled divisor.

    The power of two has the divisor's sign, so that the scaled divisor is positive. The scaled divisor is between 2^-85 and 2^64,
    where remainders are not subnormal. An infinite divisor becomes 0, with a reciprocal of 0.
    """
    if not INTERPRETED:
        magnitude = tl.abs(divisor)
        factor = tl.where(magnitude < 2.0**-60, 2.0**64, tl.where(magnitude > 2.0**60, 2.0**-64, 1.0))
        sign = tl.where(divisor.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)
        divisor = magnitude * factor
        factor *= sign
        reciprocal = tl.div_rn(-1.0, divisor)
        return factor, tl.where(reciprocal == 0.0, 0.0, divisor), reciprocal
    return divisor, divisor, divisor


@triton.jit
def divide(x, factor, divisor, negative_reciprocal, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Computes ``x / divisor`` for a prepared divisor, accurately enough for rounding to a narrow format: see `division_steps`.

    Multiplies by the reciprocal, then corrects the quotient by its remainder. This takes a third of the instructions of a division.
    Quotients that overflow are NaN or infinite. Zeros keep their sign.
    """
    if not INTERPRETED:
        negative = x * -factor
        quotient = negative * negative_reciprocal
        for _ in tl.static_range(STEPS):
            remainder = tl.fma(quotient, divisor, negative)
            quotient = tl.fma(remainder, negative_reciprocal, quotient)
        return quotient
    return x / divisor


@triton.jit
def divide_any(x, factor, divisor, negative_reciprocal, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Like `divide`, for quotients of any size. Quotients beyond 2^20 are not corrected, as they saturate in every narrow
    format."""
    quotient = divide(x, factor, divisor, negative_reciprocal, INTERPRETED, STEPS)
    if not INTERPRETED:
        rough = (x * -factor) * negative_reciprocal
        quotient = tl.where(tl.abs(rough) < 2.0**20, quotient, rough)
    return quotient
