"""Conversion to and from narrow number formats. Pure functions of PyTorch tensors, on any device.

========  ====  =======================  ==========================================================
format    bits  largest finite           notes
========  ====  =======================  ==========================================================
e4m3fn    8     448                      no infinities; NaN is ``0x7f`` and ``0xff``
e4m3fnuz  8     240                      one zero; NaN is ``0x80``
e5m2      8     57344                    has infinities, which saturating conversion never makes
e2m1      4     6                        0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN
e8m0      8     2^127                    a power of two, ``2^(byte - 127)``; 255 is NaN; stored as uint8
========  ====  =======================  ==========================================================

Two e2m1 values share a byte: the lower nibble is the element with the lower index. Every conversion rounds to nearest, ties to
even, and saturates.

The mx formats follow "OCP Microscaling Formats (MX) Specification", version 1.0. `BLOCK_MX` consecutive elements of the last axis
share one e8m0 scale, whose exponent is ``floor(log2(amax)) - emax``. Here ``amax`` is the block's largest magnitude, and ``emax``
the exponent of the element format's largest power of two. The specification leaves two choices open. Here a block with a NaN or an
infinity gets the scale 255 and zero elements, so the whole block dequantises to NaN. Exponents below -127 become -127, so that a
block of zeros has the scale byte 0.

nvfp4 has blocks of `BLOCK_NVFP4` elements with e4m3fn scales, and one float32 global scale for the whole tensor.

No function here checks its arguments or synchronises with the device; the operators of this package check arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_FP8 = 128  # blocks of weights have this size along both axes
BLOCK_MX = 32
BLOCK_NVFP4 = 16
TILE_ROWS, TILE_SCALES = 128, 4  # a 128x4 tile of scales: rows of the tensor, and scales of each row

SOURCE_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})  # dtypes of unquantised values
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0}
E2M1_MAX = 6.0
SMALLEST_NORMAL = 2.0**-126  # smallest normal float32

_EMAX_FP8 = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_EMAX_E2M1 = 2
_E8M0_NAN = 255


def divide(x: Tensor, divisor: float) -> Tensor:
    """Returns ``x / divisor``, correctly rounded. The divisor must be a tensor, because PyTorch on a GPU multiplies by the
    reciprocal of a Python number.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def encode_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Rounds a float ``[...]`` to the 8-bit float ``dtype`` ``[...]``, saturating.

    Infinities become the largest finite value; every NaN becomes ``0x7f`` (e4m3fnuz: ``0x80``). float64 is rounded to float32
    first.
    """
    limit = FP8_MAX[dtype]
    x = x.float()
    return torch.where(x.isnan(), torch.nan, x.clamp(-limit, limit)).to(dtype)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """Converts e8m0, uint8 ``[...]``, to float32 ``[...]``: ``2^(scale - 127)``, NaN for 255."""
    # An e8m0 byte equals a float32's exponent field, except for 0 (2^-127 is subnormal in float32) and 255.
    exponent = scale.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == _E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def encode_e2m1(x: Tensor) -> Tensor:
    """Rounds a float ``[..., n]`` to packed e2m1, uint8 ``[..., n/2]``.

    Magnitudes above 6 become 6, NaN becomes 0, -0 stays -0."""
    x = x.float()
    magnitude = x.abs()
    # Each boundary lies halfway between two neighbours. A tie goes to the neighbour with the even bit pattern.
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    code |= (x.signbit() & ~x.isnan()).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Converts packed e2m1, uint8 ``[..., n/2]``, to float32 ``[..., n]``."""
    code = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    # The magnitude in units of 0.5: 0 or 1 if the exponent is 0, else (2 + mantissa) * 2^(exponent - 1).
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    magnitude = halves.float() * 0.5
    return torch.where(code >= 8, -magnitude, magnitude)


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a float ``[..., k]`` to packed e2m1, uint8 ``[..., k/2]``, and e8m0 scales, uint8 ``[..., k/32]``."""
    scaled, scale = _share_exponents(x, _EMAX_E2M1)
    return encode_e2m1(scaled), scale


def decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantises packed e2m1, uint8 ``[..., k/2]``, with e8m0 scales, uint8 ``[..., k/32]``, to ``dtype`` ``[..., k]``.

    Value times scale is exact in float32 (or overflows), so the result is rounded to ``dtype`` once.
    """
    return _scale_blocks(decode_e2m1(packed), e8m0_to_float(scale), BLOCK_MX).to(dtype)


def encode_mxfp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, round_up: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises a float ``[..., k]`` to ``dtype`` (e4m3fn or e5m2) ``[..., k]`` and e8m0 scales, uint8 ``[..., k/32]``.

    ``round_up``: whether to use the smallest scales at which nothing saturates, instead of the scales that the OCP specification
    defines."""
    scaled, scale = _share_exponents(x, _EMAX_FP8[dtype], torch.finfo(dtype).max if round_up else None)
    return encode_fp8(scaled, dtype), scale


def decode_mxfp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantises e4m3fn or e5m2 ``[..., k]`` with e8m0 scales, uint8 ``[..., k/32]``, to ``dtype``, as `decode_mxfp4` does."""
    return _scale_blocks(q.float(), e8m0_to_float(scale), BLOCK_MX).to(dtype)


def encode_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a float ``[..., k]`` to packed e2m1, uint8 ``[..., k/2]``, and e4m3fn block scales ``[..., k/16]``.

    ``x ~= q * block_scale * global_scale``, where global_scale is float32 ``[]`` or ``[1]``. Arithmetic is float32, in this
    order: ``block_scale = e4m3fn((amax / 6) / global_scale)`` and ``q = e2m1(x / (block_scale * global_scale))``. If ``amax / 6``
    is 0, the block scale is 0, even if global_scale is 0. If ``block_scale * global_scale`` is 0, q is 0. A block with a NaN or
    an infinity has block scale NaN and q = 0.
    """
    blocks = split_blocks(x.float(), BLOCK_NVFP4)
    amax = blocks.abs().amax(-1)
    sixth = divide(amax, E2M1_MAX)
    wanted = torch.where(sixth == 0, 0.0, sixth / global_scale.reshape(()))
    block_scale = encode_fp8(torch.where(amax.isfinite(), wanted, torch.nan), torch.float8_e4m3fn)
    step = (block_scale.float() * global_scale.reshape(())).unsqueeze(-1)
    scaled = torch.where(step > 0, blocks / step, 0.0)
    return encode_e2m1(scaled.flatten(-2)), block_scale


def decode_nvfp4(packed: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverts `encode_nvfp4`: computes ``q * (block_scale * global_scale)`` in float32, and rounds the result to ``dtype``."""
    step = block_scale.float() * global_scale.reshape(())
    return _scale_blocks(decode_e2m1(packed), step, BLOCK_NVFP4).to(dtype)


def decode_fp8(q: Tensor, scale: Tensor, block_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantises an 8-bit float ``[...]``: multiplies it by float32 block scales in float32, and rounds the result to ``dtype``.

    ``block_shape`` is the block's size along the trailing axes, in elements: with ``(128, 128)``, q ``[..., n, k]`` has scale
    ``[..., ceil(n/128), ceil(k/128)]``.
    """
    return (q.float() * expand_scale(scale, block_shape, q.shape)).to(dtype)


def expand_scale(scale: Tensor, block_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Repeats block scales over the elements that share them, up to ``shape``; the last block of an axis may be partial."""
    for axis, block in zip(range(-len(block_shape), 0), block_shape, strict=True):
        if block != 1:
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, shape[axis])
    return scale


def swizzle(scale: Tensor) -> Tensor:
    """Swizzles 1-byte scales ``[..., rows, columns]`` as `swizzle_scales` does.

    The result is ``[..., ceil(rows/128), ceil(columns/4), 32, 4, 4]``."""
    *lead, rows, columns = scale.shape
    padding = (0, -columns % TILE_SCALES, 0, -rows % TILE_ROWS)
    # Some PyTorch functions do not support 8-bit floats.
    padded = functional.pad(scale.contiguous().view(torch.uint8), padding)
    tiles = padded.view(*lead, padded.shape[-2] // TILE_ROWS, 4, 32, padded.shape[-1] // TILE_SCALES, TILE_SCALES)
    at = len(lead)
    order = (*range(at), at, at + 3, at + 2, at + 1, at + 4)
    return tiles.permute(order).contiguous().view(scale.dtype)


def in_layout(scale: Tensor, scale_layout: str) -> Tensor:
    """Returns scales in the given layout: unchanged if it is linear, else swizzled to 128x4 tiles."""
    return swizzle(scale) if scale_layout == "128x4" else scale


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Inverts `swizzle`: returns contiguous scales ``[..., rows, columns]``."""
    *lead, tiles_down, tiles_across, _, _, _ = scale.shape
    at = len(lead)
    order = (*range(at), at, at + 3, at + 2, at + 1, at + 4)
    padded = scale.contiguous().view(torch.uint8).permute(order)
    whole = padded.reshape(*lead, tiles_down * TILE_ROWS, tiles_across * TILE_SCALES)
    return whole[..., :rows, :columns].contiguous().view(scale.dtype)


def poison_padding(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a copy of scales in 128x4 tiles whose padding is 0xff, which is NaN both as e4m3fn and as e8m0."""
    held = swizzle(torch.ones(rows, columns, dtype=torch.uint8, device=scale.device)).expand(scale.shape)
    made = scale.contiguous().view(torch.uint8)
    return torch.where(held != 0, made, 255).view(scale.dtype)


def poison_packed(packed: Tensor, count: int, axis: int = -1) -> Tensor:
    """Returns a copy of packed e8m0 scales, four in an int32 along an axis. Bytes past the first ``count`` are 255 (NaN)."""
    made = packed.clone()
    unused = -count % 4
    if unused and made.shape[axis]:
        made.select(axis, -1).bitwise_or_(-1 << 8 * (4 - unused))
    return made


def pack_e8m0(exponents: Tensor) -> Tensor:
    """Packs uint8 ``[..., count]`` into int32 ``[..., ceil(count/4)]``, the first in the lowest byte, padded with zeros."""
    padded = functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    first, second, third, fourth = split_blocks(padded.to(torch.int32), 4).unbind(-1)
    return first | second << 8 | third << 16 | fourth << 24


def unpack_e8m0(packed: Tensor, count: int) -> Tensor:
    """Inverts `pack_e8m0`: unpacks int32 ``[..., ceil(count/4)]``, the lowest byte first, into uint8 ``[..., count]``."""
    bytes_ = [(packed >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    return torch.stack(bytes_, dim=-1).flatten(-2).narrow(-1, 0, count).to(torch.uint8)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """Reshapes ``[..., k]`` to ``[..., k/block, block]``, contiguous."""
    return x.contiguous().view(*x.shape[:-1], x.shape[-1] // block, block)


def e8m0_of(amax: Tensor, emax: int, largest: float | None = None) -> Tensor:
    """Returns the e8m0 scales, int32, of blocks whose largest magnitudes are ``amax``, float32; the module's docstring gives the
    formula.

    ``emax`` is the exponent of the element format's largest power of two. ``largest`` is the format's largest value. If ``largest``
    is given, scales are rounded up so that no scaled element exceeds ``largest``.
    """
    # A float32's exponent field is floor(log2) + 127. Subnormal numbers have exponent field 0, and get the smallest scale in any
    # case.
    field = amax.view(torch.int32) >> 23
    finite = field != 255
    if largest is not None:
        # If amax's mantissa is greater than the mantissa of ``largest``, the scale is the next power of two.
        mantissa = amax.view(torch.int32) & 0x7FFFFF
        field = field + (mantissa > round((largest * 2.0**-emax - 1) * 2**23)).to(torch.int32)
    return torch.where(finite, (field - emax).clamp(min=0), _E8M0_NAN)


def over_e8m0(x: Tensor, scale: Tensor) -> Tensor:
    """Divides float32 values by the e8m0 scales (int32) that `e8m0_of` returns; 0 if a scale is NaN."""
    # Multiplying by the reciprocal, 2^(127 - byte), is exact. The reciprocal is a normal number for all bytes that occur: 0 to
    # 254 - emax.
    reciprocal = ((254 - scale) << 23).view(torch.float32)
    return torch.where(scale != _E8M0_NAN, x * reciprocal, 0.0)


def e8m0_of_fp8(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the smallest e8m0 scales (int32) at which no element of a block saturates in ``dtype`` (e4m3fn or e5m2)."""
    return e8m0_of(amax, _EMAX_FP8[dtype], FP8_MAX[dtype])


def _share_exponents(x: Tensor, emax: int, largest: float | None = None) -> tuple[Tensor, Tensor]:
    """Divides x by its blocks' scales. Returns float32 ``[..., k]``, and the e8m0 scales, uint8 ``[..., k/32]``; see `e8m0_of`."""
    blocks = split_blocks(x.float(), BLOCK_MX)
    scale = e8m0_of(blocks.abs().amax(-1), emax, largest)
    return over_e8m0(blocks, scale.unsqueeze(-1)).flatten(-2), scale.to(torch.uint8)


def _scale_blocks(values: Tensor, scale: Tensor, block: int) -> Tensor:
    return (split_blocks(values, block) * scale.unsqueeze(-1)).flatten(-2)
