"""Operand formats that the portable matrix products declare."""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import FLOATS, FP8
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature, format_signatures

_MX_A = [mxfp4_format(), mxfp8_format(torch.float8_e4m3fn), mxfp8_format(torch.float8_e5m2)]
_MX_B = [mxfp4_format((32, 1)), *(mxfp8_format(dtype, (32, 1)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))]
_FP8_B = [fp8_format(dtype, granularity) for dtype in FP8 for granularity in ("tensor", "channel")]
_FP8_B_BLOCKS = [fp8_format(dtype, "block", (128, 128)) for dtype in FP8]
_HALVES = [dense_tensor_format(dtype) for dtype in (torch.float16, torch.bfloat16)]


def _pairs(a: list[TensorFormat], b: list[TensorFormat]) -> set[FormatSignature]:
    return {format_signature(a=x, b=y) for x in a for y in b}


SCALED = (
    _pairs([fp8_format(dtype, granularity) for dtype in FP8 for granularity in ("tensor", "token")], _FP8_B)
    | _pairs([fp8_format(dtype, "block", (1, 128)) for dtype in FP8], _FP8_B_BLOCKS)
    | _pairs(_MX_A, _MX_B)
    | _pairs(_HALVES, [*_FP8_B, *_FP8_B_BLOCKS, *_MX_B])
)
"""Products in which one operand or both have scales."""

DENSE = format_signatures(("a", "b"), "dense", FLOATS)
"""Products of floats of one dtype."""
