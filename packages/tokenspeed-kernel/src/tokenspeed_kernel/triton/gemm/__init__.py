"""What the portable Triton matrix product kernels can do. Declarations only: a kernel's module, and Triton with it, is imported
when the kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature, format_signatures

_HERE = __name__

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
_MX_A = [mxfp4_format(), mxfp8_format(torch.float8_e4m3fn), mxfp8_format(torch.float8_e5m2)]
_MX_B = [mxfp4_format((32, 1)), *(mxfp8_format(dtype, (32, 1)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))]
_FP8_B = [fp8_format(dtype, granularity) for dtype in _FP8 for granularity in ("tensor", "channel")]
_FP8_B_BLOCKS = [fp8_format(dtype, "block", (128, 128)) for dtype in _FP8]
_HALVES = [dense_tensor_format(dtype) for dtype in (torch.float16, torch.bfloat16)]


def _pairs(a: list[TensorFormat], b: list[TensorFormat]) -> set[FormatSignature]:
    return {format_signature(a=x, b=y) for x in a for y in b}


_SCALED = (
    _pairs([fp8_format(dtype, granularity) for dtype in _FP8 for granularity in ("tensor", "token")], _FP8_B)
    | _pairs([fp8_format(dtype, "block", (1, 128)) for dtype in _FP8], _FP8_B_BLOCKS)
    | _pairs(_MX_A, _MX_B)
    | _pairs(_HALVES, [*_FP8_B, *_FP8_B_BLOCKS, *_MX_B])
)
_DENSE = format_signatures(("a", "b"), "dense", (torch.float16, torch.bfloat16, torch.float32))

# -- mm ------------------------------------------------------------------------------------------------------------------------

register_kernel(
    "gemm",
    "mm",
    solution="triton",
    capability=TRITON,
    signatures=_SCALED,
    traits={"bias": any, "wide_bias": any},
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.mm:mm")

# Where the operands' dtype is the result's, solution torch comes first.
register_kernel(
    "gemm",
    "mm",
    name="triton_mm_dense",
    solution="triton",
    capability=TRITON,
    signatures=_DENSE,
    traits={"bias": any, "wide_bias": any},
    priority=Priority.PORTABLE - 1,
    tags={"portability", "determinism"},
)(f"{_HERE}.mm:mm")

# -- bmm -----------------------------------------------------------------------------------------------------------------------

register_kernel(
    "gemm",
    "bmm",
    solution="triton",
    capability=TRITON,
    signatures=_SCALED,
    priority=Priority.PORTABLE,
    tags={"portability", "determinism"},
)(f"{_HERE}.mm:bmm")

register_kernel(
    "gemm",
    "bmm",
    name="triton_bmm_dense",
    solution="triton",
    capability=TRITON,
    signatures=_DENSE,
    priority=Priority.PORTABLE - 1,
    tags={"portability", "determinism"},
)(f"{_HERE}.mm:bmm")
