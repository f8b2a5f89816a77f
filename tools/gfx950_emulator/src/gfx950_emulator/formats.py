"""Number formats of CDNA3 and CDNA4, and the conversions between them, as numpy functions with one value per lane.

gfx950 uses the OCP encodings of fp8: fp8 is E4M3FN, bf8 is E5M2. gfx942 uses the FNUZ encodings: fp8 is E4M3FNUZ, bf8 is E5M2FNUZ.
The 6-bit and 4-bit formats are those of the OCP Microscaling (MX) specification 1.0: fp6 is E2M3, bf6 is E3M2, fp4 is E2M1; a scale
is E8M0.

Facts and their sources:

- *Operands and scales.* V_CVT_SCALEF32_* take the biased exponent of a float32 operand as E8M0 scale; sign and mantissa of that
  operand do not matter (CDNA4 ISA document, pseudocode of these instructions: ``scale = exponent(S2.f32)``). Narrowing divides by
  ``2**(exponent - 127)`` before it rounds; widening multiplies by this power. Exponent 255 makes a NaN (AMD's reference code,
  ``hip/amd_detail/amd_hip_ocp_host.hpp``: ``from_float`` and ``to_float``). Exponent 0 means 2**-127.
- *Rounding* is to nearest even, regardless of MODE (ISA pseudocode of V_CVT_PK_FP8_F32, V_CVT_PK_BF16_F32 and so on: ``ROUND_MODE =
  ROUND_NEAREST_EVEN``). Values are rounded once. With a scale, the scaled value is rounded (``from_float``).
- *Overflow of fp8 and bf8.* With MODE.FP16_OVFL = 0, values that round beyond the largest finite number become NaN in fp8, which
  has no infinity, and infinity in bf8 (Composable Kernel, ``mxf8_utils.hpp``). Infinities are converted in the same way. With
  FP16_OVFL = 1 (``saturate=True`` below), finite values and infinities become the largest finite number, and NaN stays NaN. Triton
  sets this bit, MODE[23], in kernels that convert to fp8, and its hardware test ``test_typeconvert_downcast_clamping`` expects this
  on gfx950.
- *FNUZ* formats have neither infinity nor -0; the encoding with only the sign bit set is the one NaN, and the exponent's bias is
  larger by 1 than that of the OCP format (Composable Kernel, ``ck_tile/core/numeric/float8.hpp``). With MODE.FP16_OVFL = 0, values
  that round beyond the largest number, and infinities, become NaN. With FP16_OVFL = 1, they become the largest number.
- *fp6, bf6 and fp4* have neither infinity nor NaN and always saturate. A NaN, or a NaN scale, becomes the largest number with the
  sign of the source (``amd_hip_ocp_host.hpp``); the ISA's pseudocode does not say.
- *Widening to float16* overflows to infinity (``amd_hip_ocp_host.hpp``, "gfx950 HW behavior").
- *NaN encodings.* NaNs keep their sign. NaNs in narrow formats have all mantissa bits set; payloads are not documented. float32
  NaNs that are converted to bfloat16 or float16 are made quiet, and keep the upper bits of their payload.
- *Stochastic rounding* adds random bits below the last kept bit, and truncates (``from_float_sr`` of the same file; the ISA's
  pseudocode names the bits: S1[31:12] for fp8, S1[31:11] for bf8).
- *Denormals* of every format are read and written; MODE's denormal bits are on in Triton's kernels and are not consulted here.

Arguments are arrays of any shape with at least one axis. ``codes`` are encoded values, uint8 (uint16 for 16-bit formats); values
are float32. Overflow causes no warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

# numpy is fastest with scalars of the arrays' own type.
_QUIET = np.uint32(0x400000)
_SIGN, _MAGNITUDE, _INFINITY = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_ONE, _HALF, _LOWER, _UPPER, _BELOW_TIE = (np.uint32(x) for x in (1, 16, 0xFFFF, 0xFFFF0000, 0x7FFF))


def _has_nan(values: np.ndarray) -> bool:
    squares = np.vdot(values, values)  # a sum of squares cannot cancel, so only a NaN makes it NaN
    return squares != squares


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of up to 16 bits, sign first.

    Attributes:
        name: the format's name, as in mnemonics; mnemonics do not say whether fp8 and bf8 are FNUZ.
        exponent_bits, mantissa_bits, bias: widths of the fields in bits, and the exponent's bias.
        infinity: whether the largest exponent means infinity with a zero mantissa, and NaN with any other mantissa (as in IEEE
            754).
        nan: for a format without infinity, whether the encoding with all bits set is NaN (E4M3FN).
        fnuz: whether the encoding with only the sign bit set is NaN instead of -0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinity: bool = False
    nan: bool = False
    fnuz: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of encoded values."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16)

    @property
    def sign(self) -> int:
        """The sign bit, as an integer."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        """The encoding of the largest finite number."""
        if self.infinity:
            return self.infinity_code - 1
        return self.sign - 2 if self.nan else self.sign - 1

    @property
    def infinity_code(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan_code(self) -> int:
        """The encoding of NaN, in which all mantissa bits are set, except in FNUZ formats. If the format has no NaN, this is the
        largest number."""
        return self.sign if self.fnuz else self.sign - 1

    def overflow_code(self, saturate: bool) -> int:
        """Returns the encoding of a value that overflows, without its sign."""
        if saturate or not (self.infinity or self.nan or self.fnuz):
            return self.largest
        return self.infinity_code if self.infinity else self.nan_code

    def signed(self, codes: np.ndarray, negative: np.ndarray) -> np.ndarray:
        """Returns encodings with the sign bit set where ``negative``; a FNUZ format has no -0."""
        if self.fnuz:
            negative = negative & (codes != 0)
        return np.where(negative, codes | self.sign, codes).astype(self.dtype)

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every encoding, float32 [2**bits]."""
        codes = np.arange(1 << self.bits, dtype=np.int64)
        exponent = codes >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent > 0, mantissa + (1 << self.mantissa_bits), mantissa).astype(np.float64)
        magnitude = np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        if self.infinity:
            special = np.where(mantissa == 0, np.inf, np.nan)
            magnitude = np.where(exponent == (1 << self.exponent_bits) - 1, special, magnitude)
        elif self.nan:
            magnitude = np.where(codes & (self.sign - 1) == self.sign - 1, np.nan, magnitude)
        values = np.where(codes & self.sign, -magnitude, magnitude).astype(np.float32)
        if self.fnuz:
            values[self.sign] = np.nan
        values.setflags(write=False)
        return values


FP8 = Format("fp8", 4, 3, 7, nan=True)
BF8 = Format("bf8", 5, 2, 15, infinity=True)
FP8_FNUZ = Format("fp8_fnuz", 4, 3, 8, fnuz=True)
BF8_FNUZ = Format("bf8_fnuz", 5, 2, 16, fnuz=True)
FP6 = Format("fp6", 2, 3, 1)
BF6 = Format("bf6", 3, 2, 3)
FP4 = Format("fp4", 2, 1, 1)
F16 = Format("f16", 5, 10, 15, infinity=True)
BF16 = Format("bf16", 8, 7, 127, infinity=True)


def _powers_of_two(exponents: np.ndarray) -> np.ndarray:
    powers = np.ldexp(1.0, exponents)
    powers[255] = np.nan
    powers = powers.astype(np.float32)
    powers.setflags(write=False)
    return powers


E8M0 = _powers_of_two(np.arange(256) - 127)
"""float32 [256]: the value of each scale byte, 2**(byte - 127); 255 is NaN."""

_E8M0_INVERSE = _powers_of_two(127 - np.arange(256))


def scale_exponent(scale: np.ndarray) -> np.ndarray:
    """Returns the scale byte that a float32 scale operand holds: its biased exponent.

    Args:
        scale: uint32, the operand's bits.

    Returns:
        uint32 in [0, 256).
    """
    return scale >> np.uint32(23) & np.uint32(0xFF)


def decode(form: Format, codes: np.ndarray) -> np.ndarray:
    """Decodes ``codes`` (any integer dtype, below ``2**form.bits``) to float32, exactly."""
    return form.values.take(codes)


def decode_scaled(form: Format, codes: np.ndarray, exponent: np.ndarray | int) -> np.ndarray:
    """Returns ``decode(form, codes) * 2**(exponent - 127)`` as float32: exact, unless it overflows to infinity.

    Args:
        codes: integers below ``2**form.bits``.
        exponent: scale bytes in [0, 256), of the same shape as codes or a scalar; 255 makes a NaN.
    """
    values = form.values.take(codes)
    with np.errstate(over="ignore", invalid="ignore"):
        # A NaN scale has no sign; the result has the sign of the decoded value.
        return np.copysign(values * E8M0[exponent], values)


@lru_cache(maxsize=32)
def _narrowing(form: Format, saturate: bool) -> np.ndarray:
    """Returns a lookup table of ``form.dtype`` [65536]. The index is the upper half of a float32 that was rounded to odd; the entry
    is its encoding in `form`.

    Rounding to odd sets the last kept bit if any dropped bit was set. Rounding to odd and then to nearest equals rounding once, if
    at least two more bits are kept than the target has. The index has 8 significant bits, which suffice for formats with at most 4.
    """
    upper = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        magnitude = np.abs((upper << np.uint32(16)).view(np.float32).astype(np.float64))
    finite = np.where(np.isfinite(magnitude), magnitude, 0.0)
    lowest = 1 - form.bias
    exponent = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 1, lowest), lowest)
    units = np.rint(np.ldexp(finite, form.mantissa_bits - exponent)).astype(np.int64)
    codes = ((exponent - lowest) << form.mantissa_bits) + units
    codes = np.where((codes > form.largest) | np.isinf(magnitude), form.overflow_code(saturate), codes)
    codes = np.where(np.isnan(magnitude), form.nan_code, codes)
    codes = form.signed(codes, (upper >> np.uint32(15)).astype(bool))
    codes.setflags(write=False)
    return codes


def _narrow(form: Format, bits: np.ndarray, saturate: bool) -> np.ndarray:
    upper = bits >> _HALF
    upper |= (bits & _LOWER) != 0
    return _narrowing(form, saturate).take(upper)


def _of_at_most_8_bits(form: Format) -> None:
    if form.bits > 8:
        raise ValueError(f"{form.name} is not one of fp8, bf8, fp6, bf6, fp4")


def encode(form: Format, values: np.ndarray, saturate: bool = False) -> np.ndarray:
    """Rounds float32 to a format of at most 8 bits, as V_CVT_PK_FP8_F32 and V_CVT_PK_BF8_F32 do.

    Args:
        form: fp8, bf8, fp6, bf6 or fp4.
        values: float32.
        saturate: MODE.FP16_OVFL; without effect on fp6, bf6 and fp4, which always saturate.

    Returns:
        uint8, the encoded values.

    Raises:
        ValueError: `form` is wider than 8 bits.
    """
    _of_at_most_8_bits(form)
    return _narrow(form, values.view(np.uint32), saturate)


def encode_scaled(form: Format, values: np.ndarray, exponent: np.ndarray | int, saturate: bool = False) -> np.ndarray:
    """Rounds ``values / 2**(exponent - 127)``, as V_CVT_SCALEF32_PK_FP8_F32, ..._FP4_F32 and so on do.

    Arguments and errors are as in `encode`; `exponent` holds scale bytes in [0, 256), of the same shape as values or a scalar.
    """
    _of_at_most_8_bits(form)
    # The product may overflow to infinity or lose bits below 2**-149. Both cases are so far outside these formats that the result
    # equals that of the exact quotient.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        quotient = (values * _E8M0_INVERSE[exponent]).view(np.uint32)
    return _narrow(form, quotient & _MAGNITUDE | values.view(np.uint32) & _SIGN, saturate)


def encode_stochastic(
    form: Format, values: np.ndarray, random: np.ndarray, exponent: np.ndarray | int = 127, saturate: bool = False
) -> np.ndarray:
    """Rounds ``values / 2**(exponent - 127)`` up or down by random bits, as V_CVT_SR_* and V_CVT_SCALEF32_SR_* do.

    The upper bits of `random` are added to the bits of the float32 below the last kept bit, and the sum is truncated. If the result
    is a denormal of `form`, source bits below the 23 mantissa bits are truncated first.

    Args:
        form: any format, 16-bit ones included.
        values: float32.
        random: uint32.
        exponent: scale bytes in [0, 256).
        saturate: MODE.FP16_OVFL.

    Returns:
        encoded values of ``form.dtype``.
    """
    bits = values.view(np.uint32)
    scale = np.asarray(exponent).astype(np.int64)
    mantissa, power = np.frexp(np.abs(np.where(np.isfinite(values), values, np.float32(0))).astype(np.float64))
    significand = np.ldexp(mantissa, 24).astype(np.int64)  # exact: float32 has 24 significant bits
    power = power - 1 - (scale - 127)
    lowest = 1 - form.bias
    kept = np.maximum(power, lowest)
    units = (significand >> np.minimum(kept - power, 63)) + (random >> np.uint32(9 + form.mantissa_bits)).astype(np.int64)
    codes = ((kept - lowest).astype(np.int64) << form.mantissa_bits) + (units >> (23 - form.mantissa_bits))
    codes = np.where(significand == 0, 0, codes)
    codes = np.where((codes > form.largest) | np.isinf(values), form.overflow_code(saturate), codes)
    codes = np.where(np.isnan(values) | (scale == 255), form.nan_code, codes)
    return form.signed(codes, (bits & _SIGN).astype(bool))


def next_random(random: np.ndarray) -> np.ndarray:
    """Returns the random words for the next element of a stochastic rounding, uint32: one step of V_PRNG_B32's shift register."""
    return random << np.uint32(1) ^ (random >> np.uint32(31)) * np.uint32(197)


def bf16_to_f32(codes: np.ndarray) -> np.ndarray:
    """Converts bfloat16 bits (uint16) to float32, exactly, including NaN payloads."""
    return (codes.astype(np.uint32) << _HALF).view(np.float32)


def _bf16_in_upper_half(values: np.ndarray, saturate: bool) -> np.ndarray:
    """Rounds float32 to bfloat16 in the upper half of a uint32; the lower half is arbitrary."""
    bits = values.view(np.uint32)
    rounded = bits >> _HALF
    rounded &= _ONE
    rounded += bits
    rounded += _BELOW_TIE
    if _has_nan(values):
        rounded = np.where(np.isnan(values), bits | _QUIET, rounded)
    if saturate:
        overflow = np.isfinite(values) & (rounded & _MAGNITUDE >= _INFINITY)
        rounded = np.where(overflow, bits & _SIGN | np.uint32(0x7F7F0000), rounded)
    return rounded


def f32_to_bf16(values: np.ndarray, saturate: bool = False) -> np.ndarray:
    """Converts float32 to bfloat16 bits (uint16), rounding to nearest even.

    With ``saturate``, finite values that overflow become the largest finite number, and infinities stay. AMD's emulator rocjitsu
    does the same for MODE.FP16_OVFL = 1, following the ISA document's text on data conversion. Without ``saturate``, finite values
    that overflow become infinity.
    """
    return (_bf16_in_upper_half(values, saturate) >> _HALF).astype(np.uint16)


def pack_bf16(low: np.ndarray, high: np.ndarray, saturate: bool = False) -> np.ndarray:
    """Converts two float32 to bfloat16 as `f32_to_bf16` does, and packs them into one uint32, `low` in bits 15:0
    (V_CVT_PK_BF16_F32)."""
    packed = _bf16_in_upper_half(high, saturate)
    packed &= _UPPER
    below = _bf16_in_upper_half(low, saturate)
    below >>= _HALF
    packed |= below
    return packed


def f16_to_f32(codes: np.ndarray) -> np.ndarray:
    """Converts float16 bits (uint16) to float32, exactly; NaNs are made quiet."""
    with np.errstate(invalid="ignore"):
        values = codes.view(np.float16).astype(np.float32)
    if _has_nan(values):
        bits = values.view(np.uint32)
        values = np.where(np.isnan(values), bits | _QUIET, bits).view(np.float32)
    return values


def f32_to_f16(values: np.ndarray, saturate: bool = False, toward_zero: bool = False) -> np.ndarray:
    """Converts float32 to float16 bits (uint16).

    Args:
        values: float32.
        saturate: MODE.FP16_OVFL: finite values that overflow become the largest finite number; infinities stay.
        toward_zero: whether to round towards zero, as V_CVT_PKRTZ_F16_F32; otherwise to nearest even.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = values.astype(np.float16)
    codes = rounded.view(np.uint16)
    if saturate or toward_zero:
        away = np.abs(rounded.astype(np.float32)) > np.abs(values)
        if not toward_zero:
            away &= np.isinf(rounded)
        codes = codes - away  # the next smaller magnitude; below infinity that is the largest number
    if _has_nan(values):
        bits = values.view(np.uint32)
        quiet = bits >> _HALF & np.uint32(0x8000) | bits >> np.uint32(13) & np.uint32(0x3FF) | np.uint32(0x7E00)
        codes = np.where(np.isnan(values), quiet.astype(np.uint16), codes)
    return codes


_SIX_BITS = 6 * np.arange(32)
_SIX_WORD, _SIX_SHIFT = _SIX_BITS // 32, (_SIX_BITS % 32).astype(np.uint64)[:, None]


def unpack6(words: np.ndarray) -> np.ndarray:
    """Unpacks 32 values of 6 bits from 6 registers; element j occupies bits 6j + 5 to 6j of the 192, register 0 first.

    Args:
        words: uint32 [6, lanes].

    Returns:
        uint8 [32, lanes].
    """
    if words.ndim != 2 or len(words) != 6:
        raise ValueError(f"words: expected shape [6, lanes], got {list(words.shape)}")
    wide = np.zeros((7, words.shape[1]), np.uint64)
    wide[:6] = words
    pairs = wide[:6] | wide[1:] << np.uint64(32)  # some elements lie in two registers
    return (pairs[_SIX_WORD] >> _SIX_SHIFT & np.uint64(63)).astype(np.uint8)


def pack6(codes: np.ndarray) -> np.ndarray:
    """Packs uint8 [32, lanes], each below 64, into uint32 [6, lanes]. This is the inverse of `unpack6`."""
    if codes.ndim != 2 or len(codes) != 32:
        raise ValueError(f"codes: expected shape [32, lanes], got {list(codes.shape)}")
    shifted = codes.astype(np.uint64) << _SIX_SHIFT
    wide = np.zeros((7, codes.shape[1]), np.uint64)
    for word, bits in zip(_SIX_WORD, shifted, strict=True):
        wide[word] |= bits & np.uint64(0xFFFFFFFF)
        wide[word + 1] |= bits >> np.uint64(32)
    return wide[:6].astype(np.uint32)


def unpack4(words: np.ndarray) -> np.ndarray:
    """Unpacks 4-bit values from registers, low bits first: uint32 [registers, lanes] to uint8 [8 * registers, lanes]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return (words[:, None] >> shifts & np.uint32(15)).astype(np.uint8).reshape(8 * len(words), -1)


def pack4(codes: np.ndarray) -> np.ndarray:
    """Packs uint8 [8 * registers, lanes], each below 16, into uint32 [registers, lanes]. This is the inverse of `unpack4`."""
    if len(codes) % 8:
        raise ValueError(f"codes: expected a multiple of 8 rows, got {len(codes)}")
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(codes.reshape(len(codes) // 8, 8, -1).astype(np.uint32) << shifts, axis=1)
