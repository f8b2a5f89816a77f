"""GEMM operands: their formats and dequantised values.

Three things determine an operand's format: its dtype, its scale's dtype and its scale's shape. `recognise` defines this rule, and
which pairs of formats are valid. ``a`` is ``[..., m, k]`` and ``b`` is ``[..., k, n]`` with the same leading sizes: none for `mm`,
the batch for `bmm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FLOATS, FP8, HALVES, Checker, describe
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_FP8,
    BLOCK_MX,
    BLOCK_NVFP4,
    SOURCE_DTYPES,
    decode_fp8,
    decode_mxfp4,
    decode_mxfp8,
    decode_nvfp4,
    e8m0_to_float,
    pack_e8m0,
    poison_packed,
    poison_padding,
    unpack_e8m0,
    unswizzle,
)
from tokenspeed_kernel_base.ops.quantization.formats import (
    E8M0,
    blocks,
    check_scalar,
    fp8_format,
    mxfp4_format,
    mxfp8_format,
    nvfp4_format,
    swizzled_shape,
)
from tokenspeed_kernel_base.ops.quantization.mx import MXFP8_DTYPES
from tokenspeed_kernel_base.signature import (
    FormatSignature,
    ScaleFormat,
    TensorFormat,
    dense_tensor_format,
    dtype_names,
    format_signature,
)
from tokenspeed_kernel_base.variation import Variation, Want

E4M3 = torch.float8_e4m3fn
# By the dtype of an fp8 operand's scale: how many elements along k may share a scale. Blocks of 32 with e8m0 scales are mxfp8, not
# fp8.
FP8_BLOCKS = {torch.float32: (BLOCK_FP8, 64, 32), torch.uint8: (BLOCK_FP8, 64), torch.int32: (BLOCK_FP8,)}

FORMAT_NAMES = ("dense", "fp8", "mxfp8", "mxfp4", "nvfp4")
OUT_DTYPE_NAMES = dtype_names(SOURCE_DTYPES | {torch.float64})

_PAIRS = (
    "dense with dense of the same dtype, fp8 with fp8 (both with scales per block, of equally many elements along k, either "
    "float32 or e8m0; or neither), mxfp8 or mxfp4 with either, nvfp4 with nvfp4, dense float16 or bfloat16 with a scaled b"
)


def recognise(check: Checker, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> FormatSignature:
    """Returns the formats of both operands, under the roles ``a`` and ``b``.

    ======  ======================  =======  ==================================================================================
    format  operand                 scale    scale's shape
    ======  ======================  =======  ==================================================================================
    dense   a float dtype           none
    fp8     an 8-bit float          float32  per tensor ``[]`` or ``[1]``; else, with the leading sizes in front, for a per token
                                             ``[m, 1]`` or per block ``[m, ceil(k/s)]``, for b per channel ``[1, n]`` or per
                                             block ``[ceil(k/s), ceil(n/s)]`` or ``[ceil(k/s), n]``, where s is 128, 64 or 32
    fp8     float8_e4m3fn or _e5m2  e8m0     per block as above, where s is 128 or 64
    fp8     float8_e4m3fn or _e5m2  int32    per block as above, where s is 128; an int32 holds four scales along k
    mxfp8   float8_e4m3fn or _e5m2  e8m0     a ``[m, k/32]``, b ``[k/32, n]``, likewise; or in tiles of 128x4, a
                                             ``[ceil(m/128), ceil(k/128), 32, 4, 4]``, b ``[ceil(n/128), ceil(k/128), 32, 4, 4]``
    mxfp4   uint8, packed along k   e8m0     as mxfp8; the operands are ``[m, k/2]`` and ``[k/2, n]``
    nvfp4   uint8, packed along k   e4m3fn   as mxfp4, with 16 in place of 32 and 64 in place of 128 beside k
    ======  ======================  =======  ==================================================================================

    e8m0 scales are uint8 or float8_e8m0fnu. If a scale's shape fits several formats, all of these have the same meaning. The first
    format that is valid with the other operand is returned.

    Raises:
        TypeError, ValueError: an operand fits no format, sizes disagree, or the pair of formats is invalid.
    """
    lead = ["batch"] * (a.ndim == 3)
    check.tensor("a", a, " ".join([*lead, "m", "a_columns"]))
    check.tensor("b", b, " ".join([*lead, "b_rows", "n"]))
    a_formats, b_formats = _formats(check, "a", a, a_scale), _formats(check, "b", b, b_scale)
    k, b_k = _k("a", a), _k("b", b)
    if k != b_k:
        check.fail("b", f"such that its k is {k} like a's ({a_formats[0].format}, {describe(a)})", f"{b_k} ({describe(b)})")
    pairs = [(x, y) for x in a_formats for y in b_formats if _go_together(x, y)]
    if not pairs:
        check.fail("a and b", f"in formats that go together ({_PAIRS})", f"a: {a_formats[0]} and b: {b_formats[0]}", TypeError)
    return format_signature(a=pairs[0][0], b=pairs[0][1])


def check_alpha(check: Checker, signature: FormatSignature, alpha: Tensor | None) -> None:
    """Raises TypeError or ValueError if an operand is nvfp4 and alpha is missing, or if no operand is nvfp4 and alpha is given.
    Alpha is the product of the global scales of nvfp4 operands.
    """
    wanted = any(fmt.format == "nvfp4" for _, fmt in signature.roles)
    if alpha is None:
        check.require(not wanted, "alpha", "given with an operand in nvfp4: the product of the operands' global scales", "None")
        return
    check.require(wanted, "alpha", "None where no operand is nvfp4", alpha)
    check_scalar(check, "alpha", alpha)


def logical_k(a: Tensor) -> int:
    """Returns the k of the GEMM, in elements. ``a`` is a valid operand, which may hold two elements in a byte."""
    return _k("a", a)


def default_out_dtype(a: Tensor) -> torch.dtype:
    """Returns a's dtype if a is dense, else bfloat16."""
    return a.dtype if a.dtype in FLOATS else torch.bfloat16


def check_out_dtype(check: Checker, a: Tensor, out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None:
        allowed = {torch.float64} if a.dtype == torch.float64 else SOURCE_DTYPES
        check.one_of("out_dtype", out_dtype, sorted(allowed, key=str))


def decode_operands(operator: str, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dequantises both operands to ``[..., m, k]`` and ``[..., k, n]`` in float32 (float64 for float64 operands).

    nvfp4 operands are not multiplied by their global scales."""
    signature = recognise(Checker(operator), a, b, a_scale, b_scale)
    return _decode("a", a, a_scale, signature.format_for("a")), _decode("b", b, b_scale, signature.format_for("b"))


def vary_scales(variation: Variation, a: Tensor, b: Tensor, **scales: Tensor | None) -> dict[str, Tensor]:
    """For an operator's ``vary`` hook (see `variation`): returns new values of ``a_scale`` and ``b_scale``, by name. Scales that
    keep their values are omitted.

    Packed int32 scales of captured calls get random exponents. The padding of tiles and of packed int32 elements is poisoned."""
    changed = {}
    for (name, scale), role, operand in zip(scales.items(), "ab", (a, b), strict=True):
        if scale is None:
            continue
        if variation.want is Want.CAPTURED and scale.dtype == torch.int32:
            *lead, packed = scale.shape
            changed[name] = pack_e8m0(variation.draw.integers(120, 128, *lead, 4 * packed, dtype=torch.uint8))
        elif variation.want is Want.UNUSED and _swizzled(operand, scale):
            block = BLOCK_NVFP4 if scale.dtype == E4M3 else BLOCK_MX
            changed[name] = poison_padding(scale, _lines(role, operand), _k(role, operand) // block)
        elif variation.want is Want.UNUSED and scale.dtype == torch.int32:
            changed[name] = poison_packed(scale, blocks(_k(role, operand), BLOCK_FP8), -1 if role == "a" else -2)
    return changed


def _formats(check: Checker, role: str, operand: Tensor, scale: Tensor | None) -> list[TensorFormat]:
    """Returns the formats that match the operand and its scale, the preferred one first."""
    name = f"{role}_scale"
    if operand.dtype in FLOATS:
        if scale is not None:
            check.fail(name, f"None with {role} of a dense dtype", describe(scale))
        return [dense_tensor_format(operand.dtype)]
    check.dtype(role, operand, FLOATS | FP8 | {torch.uint8})
    if scale is None:
        check.fail(name, f"given with {role} of a scaled format ({describe(operand.dtype)})", "None")
    if operand.dtype == torch.uint8:
        check.dtype(name, scale, E8M0 | {E4M3})
        return [_packed_format(check, role, operand, scale)]
    if scale.dtype == torch.float32:
        return _fp8_formats(check, role, operand, scale)
    check.dtype(role, operand, MXFP8_DTYPES)
    check.dtype(name, scale, E8M0 | {torch.float32, torch.int32})
    return _fp8_formats(check, role, operand, scale)


def _fp8_formats(check: Checker, role: str, operand: Tensor, scale: Tensor) -> list[TensorFormat]:
    *lead, rows, columns = operand.shape
    k, dtype, given = _k(role, operand), operand.dtype, tuple(scale.shape)
    stored = torch.uint8 if scale.dtype in E8M0 else scale.dtype
    known: list[tuple[TensorFormat, tuple[int, ...]]] = []
    if stored == torch.float32:
        line, shape = ("token", (rows, 1)) if role == "a" else ("channel", (1, columns))
        tensor = fp8_format(dtype, "tensor")
        known = [(tensor, ()), (tensor, (1,)), (fp8_format(dtype, line), (*lead, *shape))]
    elif stored == torch.uint8 and k % BLOCK_MX == 0:
        known = list(_micro_shapes(role, operand, functools.partial(mxfp8_format, dtype), BLOCK_MX))
    for size in FP8_BLOCKS[stored]:
        along = blocks(k, size) if stored != torch.int32 else blocks(blocks(k, size), 4)
        if role == "a":
            known.append((fp8_format(dtype, "block", (1, size), stored), (*lead, rows, along)))
        else:
            known.extend(
                (fp8_format(dtype, "block", (size, across), stored), (*lead, along, blocks(columns, across)))
                for across in (size, 1)
            )
    found = list(dict.fromkeys(fmt for fmt, shape in known if shape == given))
    if not found:
        check.fail(f"{role}_scale", f"of {_shapes(known)} for {role} of shape {list(operand.shape)}", scale)
    return found


def _packed_format(check: Checker, role: str, operand: Tensor, scale: Tensor) -> TensorFormat:
    """Returns the format of an operand with two e2m1 values in a byte."""
    make, block = (nvfp4_format, BLOCK_NVFP4) if scale.dtype == E4M3 else (mxfp4_format, BLOCK_MX)
    k = _k(role, operand)
    if k % block:
        check.fail(
            role,
            f"such that k is a multiple of {block} in {make().format}; zeros may be appended to both operands",
            f"k = {k}, {describe(operand)}",
        )
    known = list(_micro_shapes(role, operand, make, block))
    found = [fmt for fmt, shape in known if shape == tuple(scale.shape)]
    if not found:
        check.fail(f"{role}_scale", f"of {_shapes(known)} for {role}: {describe(operand)}", scale)
    return found[0]


def _micro_shapes(
    role: str, operand: Tensor, make: Callable[[tuple[int, int], str], TensorFormat], block: int
) -> Iterator[tuple[TensorFormat, tuple[int, ...]]]:
    """Yields the format and shape of 1-byte scales for ``block`` elements along k, first linear, then in 128x4 tiles."""
    lead, lines, count = operand.shape[:-2], _lines(role, operand), _k(role, operand) // block
    block_shape, shape = ((1, block), (lines, count)) if role == "a" else ((block, 1), (count, lines))
    yield make(block_shape, "linear"), (*lead, *shape)
    yield make(block_shape, "128x4"), (*lead, *swizzled_shape(lines, count))


def _shapes(known: list[tuple[TensorFormat, tuple[int, ...]]]) -> str:
    """Describes formats and the shapes of their scales, each format once: ``shape [] or [1] (tensor), [2, 1] (token)``."""
    of: dict[str, list[str]] = {}
    for fmt, shape in known:
        assert fmt.scale is not None  # every format here has a scale
        size = "x".join(map(str, fmt.scale.block_shape or ()))
        name = f"blocks of {size}" if size else fmt.scale.granularity
        of.setdefault(name if fmt.scale.layout == "linear" else f"{name}, tiles of {fmt.scale.layout}", []).append(str(list(shape)))
    return "shape " + ", ".join(f"{' or '.join(shapes)} ({name})" for name, shapes in of.items())


def _k(role: str, operand: Tensor) -> int:
    return operand.shape[-1 if role == "a" else -2] * (2 if operand.dtype == torch.uint8 else 1)


def _lines(role: str, operand: Tensor) -> int:
    """Returns the number of rows of a, or of columns of b."""
    return operand.shape[-2 if role == "a" else -1]


def _swizzled(operand: Tensor, scale: Tensor) -> bool:
    return scale.ndim == operand.ndim + 3


def _go_together(a: TensorFormat, b: TensorFormat) -> bool:
    if a.format == "dense":
        return a == b or (b.format != "dense" and a.storage_dtype in HALVES)
    if a.format == "fp8":
        return b.format == "fp8" and _along_k(a.scale, -1) == _along_k(b.scale, 0)
    return b.format == "nvfp4" if a.format == "nvfp4" else b.format in ("mxfp8", "mxfp4")


def _along_k(scale: ScaleFormat | None, axis: int) -> tuple[int, bool] | None:
    """Returns how many elements along k share a scale, and whether that scale is float32; None if all of k shares one scale."""
    if scale is None or scale.block_shape is None:
        return None
    return scale.block_shape[axis], scale.storage_dtype == torch.float32


def _decode(role: str, operand: Tensor, scale: Tensor | None, fmt: TensorFormat) -> Tensor:
    if scale is None or fmt.scale is None:
        return operand if operand.dtype == torch.float64 else operand.float()
    if fmt.format == "fp8":
        return decode_fp8(operand, _fp8_scale(role, operand, scale), fmt.scale.block_shape or ())
    # The decoders expect blocks along the last axis. In b, blocks lie along k, the axis before the last.
    lines = operand if role == "a" else operand.mT
    if fmt.scale.layout == "128x4":
        scale = unswizzle(scale, lines.shape[-2], _k(role, operand) // max(fmt.scale.block_shape or ()))
    elif role == "b":
        scale = scale.mT
    if fmt.format == "nvfp4":
        values = decode_nvfp4(lines, scale, torch.ones((), device=scale.device))
    else:
        values = (decode_mxfp4 if fmt.format == "mxfp4" else decode_mxfp8)(lines, scale.view(torch.uint8))
    return values if role == "a" else values.mT


def _fp8_scale(role: str, operand: Tensor, scale: Tensor) -> Tensor:
    """Returns an fp8 operand's scales in float32, one for each block."""
    if scale.dtype == torch.float32:
        return scale
    if scale.dtype != torch.int32:
        return e8m0_to_float(scale.view(torch.uint8))
    along_k = scale if role == "a" else scale.mT
    exponents = e8m0_to_float(unpack_e8m0(along_k, blocks(_k(role, operand), BLOCK_FP8)))
    return exponents if role == "a" else exponents.mT
