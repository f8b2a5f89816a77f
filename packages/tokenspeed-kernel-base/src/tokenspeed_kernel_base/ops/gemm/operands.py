"""The operands of a matrix product: their formats, and their decoded values.

An operand's format follows from its dtype, its scale's dtype and its scale's shape; `recognise` says how, and which formats go
together. ``a`` is ``[..., m, k]`` and ``b`` is ``[..., k, n]`` with the same leading sizes: none for `mm`, the batch for `bmm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FLOATS, FP8, HALVES, Checker, describe
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_FP8,
    BLOCK_MX,
    SOURCE_DTYPES,
    decode_fp8,
    decode_mxfp4,
    decode_mxfp8,
)
from tokenspeed_kernel_base.ops.quantization.formats import blocks, fp8_format, mxfp4_format, mxfp8_format
from tokenspeed_kernel_base.ops.quantization.mx import MXFP8_DTYPES
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature

_PAIRS = (
    "dense with dense of the same dtype, fp8 with fp8 (both with scales per block, or neither), mxfp8 or mxfp4 with either, "
    "dense float16 or bfloat16 with a scaled b"
)


def recognise(check: Checker, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> FormatSignature:
    """The formats of both operands, under the roles ``a`` and ``b``.

    ======  ======================  =======  ==================================================================================
    format  operand                 scale    scale's shape
    ======  ======================  =======  ==================================================================================
    dense   a float dtype           none
    fp8     an 8-bit float          float32  per tensor ``[]`` or ``[1]``; else, with the leading sizes in front, for a per token
                                             ``[m, 1]`` or per block ``[m, ceil(k/128)]``, for b per channel ``[1, n]`` or per
                                             block ``[ceil(k/128), ceil(n/128)]``
    mxfp8   float8_e4m3fn or _e5m2  uint8    a ``[m, k/32]``, b ``[k/32, n]``, likewise
    mxfp4   uint8, packed along k   uint8    as mxfp8; the operands are ``[m, k/2]`` and ``[k/2, n]``
    ======  ======================  =======  ==================================================================================

    Where an fp8 scale's shape fits more than one, they mean the same; the first that goes with the other operand is its name.

    Raises:
        TypeError, ValueError: an operand fits no format, sizes disagree, or the formats do not go together.
    """
    lead = ["batch"] * (a.ndim == 3)
    check.tensor("a", a, " ".join([*lead, "m", "a_columns"]))
    check.tensor("b", b, " ".join([*lead, "b_rows", "n"]))
    a_formats, b_formats = _formats(check, "a", a, a_scale), _formats(check, "b", b, b_scale)
    k, b_k = _k("a", a, a_formats[0]), _k("b", b, b_formats[0])
    if k != b_k:
        check.fail("b", f"such that its k is {k} like a's ({a_formats[0].format}, {describe(a)})", f"{b_k} ({describe(b)})")
    pairs = [(x, y) for x in a_formats for y in b_formats if _go_together(x, y)]
    if not pairs:
        check.fail("a and b", f"in formats that go together ({_PAIRS})", f"a: {a_formats[0]} and b: {b_formats[0]}", TypeError)
    return format_signature(a=pairs[0][0], b=pairs[0][1])


def logical_k(a: Tensor) -> int:
    """k of the product, for a valid ``a``."""
    return a.shape[-1] * (2 if a.dtype == torch.uint8 else 1)


def default_out_dtype(a: Tensor) -> torch.dtype:
    """a's dtype where it is dense, else bfloat16."""
    return a.dtype if a.dtype in FLOATS else torch.bfloat16


def check_out_dtype(check: Checker, a: Tensor, out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None:
        allowed = {torch.float64} if a.dtype == torch.float64 else SOURCE_DTYPES
        check.one_of("out_dtype", out_dtype, sorted(allowed, key=str))


def decode_operands(operator: str, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values of both operands, ``[..., m, k]`` and ``[..., k, n]``, in float32 (float64 where they are float64)."""
    signature = recognise(Checker(operator), a, b, a_scale, b_scale)
    return _decode(a, a_scale, signature.format_for("a")), _decode(b, b_scale, signature.format_for("b"))


def _formats(check: Checker, role: str, operand: Tensor, scale: Tensor | None) -> list[TensorFormat]:
    """The formats that the operand and its scale fit, the preferred one first."""
    name = f"{role}_scale"
    if operand.dtype in FLOATS:
        if scale is not None:
            check.fail(name, f"None with {role} of a dense dtype", describe(scale))
        return [dense_tensor_format(operand.dtype)]
    check.dtype(role, operand, FLOATS | FP8 | {torch.uint8})
    if scale is None:
        check.fail(name, f"given with {role} of a scaled format ({describe(operand.dtype)})", "None")
    if operand.dtype in FP8 and scale.dtype == torch.float32:
        return _fp8_formats(check, role, operand, scale)
    check.dtype(role, operand, MXFP8_DTYPES | {torch.uint8})
    check.dtype(name, scale, {torch.uint8} if operand.dtype == torch.uint8 else {torch.uint8, torch.float32})
    return [_mx_format(check, role, operand, scale)]


def _fp8_formats(check: Checker, role: str, operand: Tensor, scale: Tensor) -> list[TensorFormat]:
    *lead, rows, columns = operand.shape
    if role == "a":
        line, shape = "token", (*lead, rows, 1)
        block_shape, block = (1, BLOCK_FP8), (*lead, rows, blocks(columns, BLOCK_FP8))
    else:
        line, shape = "channel", (*lead, 1, columns)
        block_shape, block = (BLOCK_FP8, BLOCK_FP8), (*lead, blocks(rows, BLOCK_FP8), blocks(columns, BLOCK_FP8))
    given = tuple(scale.shape)
    found = []
    if given in ((), (1,)):
        found.append(fp8_format(operand.dtype, "tensor"))
    if given == shape:
        found.append(fp8_format(operand.dtype, line))
    if given == block:
        found.append(fp8_format(operand.dtype, "block", block_shape))
    if not found:
        expected = f"of shape [] or [1] (tensor), {list(shape)} ({line}) or {list(block)} (blocks of {BLOCK_FP8})"
        check.fail(f"{role}_scale", f"{expected} for {role} of shape {list(operand.shape)}", scale)
    return found


def _mx_format(check: Checker, role: str, operand: Tensor, scale: Tensor) -> TensorFormat:
    axis, block_shape = (-1, (1, BLOCK_MX)) if role == "a" else (-2, (BLOCK_MX, 1))
    packed = operand.dtype == torch.uint8
    found = mxfp4_format(block_shape) if packed else mxfp8_format(operand.dtype, block_shape)
    k = _k(role, operand, found)
    if k % BLOCK_MX:
        check.fail(role, f"such that k is a multiple of {BLOCK_MX} in {found.format}", f"k = {k}, {describe(operand)}")
    shape = list(operand.shape)
    shape[axis] = k // BLOCK_MX
    check.require(list(scale.shape) == shape, f"{role}_scale", f"of shape {shape} for {role}: {describe(operand)}", scale)
    return found


def _k(role: str, operand: Tensor, fmt: TensorFormat) -> int:
    return operand.shape[-1 if role == "a" else -2] * (2 if fmt.format == "mxfp4" else 1)


def _go_together(a: TensorFormat, b: TensorFormat) -> bool:
    if a.format == "dense":
        return a == b or (b.format != "dense" and a.storage_dtype in HALVES)
    if a.format == "fp8":
        return b.format == "fp8" and _per_block(a) == _per_block(b)
    return b.format in ("mxfp8", "mxfp4")


def _per_block(fmt: TensorFormat) -> bool:
    return fmt.scale is not None and fmt.scale.granularity == "block"


def _decode(operand: Tensor, scale: Tensor | None, fmt: TensorFormat) -> Tensor:
    if scale is None or fmt.scale is None:
        return operand if operand.dtype == torch.float64 else operand.float()
    if fmt.format == "fp8":
        return decode_fp8(operand, scale, fmt.scale.block_shape or ())
    decode = decode_mxfp4 if fmt.format == "mxfp4" else decode_mxfp8
    # Blocks run along the last axis there; in b they run along k, the one before it.
    return decode(operand.mT, scale.mT).mT if fmt.scale.block_shape == (BLOCK_MX, 1) else decode(operand, scale)
