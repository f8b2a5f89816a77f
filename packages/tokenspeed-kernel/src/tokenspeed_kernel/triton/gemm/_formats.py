"""Operand formats that the portable GEMMs declare."""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import FLOATS, FP8
from tokenspeed_kernel_base.ops.gemm.operands import FP8_BLOCKS
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.ops.quantization.mx import MXFP8_DTYPES
from tokenspeed_kernel_base.signature import (
    SCALE_LAYOUTS,
    FormatSignature,
    TensorFormat,
    dense_tensor_format,
    format_signature,
    format_signatures,
)


def _mx(block_shape: tuple[int, int]) -> list[TensorFormat]:
    return [
        *(mxfp4_format(block_shape, layout) for layout in SCALE_LAYOUTS),
        *(mxfp8_format(dtype, block_shape, layout) for dtype in MXFP8_DTYPES for layout in SCALE_LAYOUTS),
    ]


def _blocks(size: int, stored: torch.dtype, *across: int) -> list[TensorFormat]:
    """Returns the formats of 8-bit floats with a scale of dtype ``stored`` per ``size`` elements along k.

    ``across``: how many columns of b share a scale; empty for operand a.
    """
    dtypes = FP8 if stored == torch.float32 else MXFP8_DTYPES
    shapes = [(size, columns) for columns in across] or [(1, size)]
    return [fp8_format(dtype, "block", shape, stored) for dtype in dtypes for shape in shapes]


_MX_A, _MX_B = _mx((1, BLOCK_MX)), _mx((BLOCK_MX, 1))
_NV_A, _NV_B = (
    [nvfp4_format(block_shape, layout) for layout in SCALE_LAYOUTS] for block_shape in ((1, BLOCK_NVFP4), (BLOCK_NVFP4, 1))
)
_FP8_B = [fp8_format(dtype, granularity) for dtype in FP8 for granularity in ("tensor", "channel")]
_FP8_B_BLOCKS = [fmt for stored, sizes in FP8_BLOCKS.items() for size in sizes for fmt in _blocks(size, stored, size, 1)]
_FLOAT16_AND_BFLOAT16 = [dense_tensor_format(dtype) for dtype in (torch.float16, torch.bfloat16)]


def _pairs(a: list[TensorFormat], b: list[TensorFormat]) -> set[FormatSignature]:
    return {format_signature(a=x, b=y) for x in a for y in b}


SCALED = (
    _pairs([fp8_format(dtype, granularity) for dtype in FP8 for granularity in ("tensor", "token")], _FP8_B)
    | {
        pair
        for a_stored, a_sizes in FP8_BLOCKS.items()
        for b_stored, b_sizes in FP8_BLOCKS.items()
        if (a_stored == torch.float32) == (b_stored == torch.float32)
        for size in set(a_sizes) & set(b_sizes)
        for pair in _pairs(_blocks(size, a_stored), _blocks(size, b_stored, size, 1))
    }
    | _pairs(_MX_A, _MX_B)
    | _pairs(_NV_A, _NV_B)
    | _pairs(_FLOAT16_AND_BFLOAT16, [*_FP8_B, *_FP8_B_BLOCKS, *_MX_B, *_NV_B])
)
"""Operand formats of GEMMs in which one operand or both have scales."""

DENSE = format_signatures(("a", "b"), "dense", FLOATS)
"""Operand formats of GEMMs without scales: both operands are floats of the same dtype."""
