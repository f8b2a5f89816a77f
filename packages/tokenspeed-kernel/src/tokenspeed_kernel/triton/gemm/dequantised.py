"""`mm` of many rows of bfloat16 by weights in narrow formats: the weights are dequantised to memory, then multiplied by PyTorch's
GEMM, which calls the vendor's library.

Up to 64 MiB of weights are dequantised at once, into a workspace that all calls of a stream share. So most of what the GEMM reads
is in L2. The scales multiply the weights before these are rounded to bfloat16. With e8m0 scales the rounding is exact. With float32
scales it adds an error as large as that of rounding the result: with random weights per channel and k = 2880, the relative error is
2.3e-3 instead of 1.7e-3. Quantising the same weights causes 2.6e-2. The kernels of `once` round no weights, because they multiply
the accumulator by the scales. But they need a GEMM of their own, and more host time.

A call makes one launch of Triton, which repeats (`triton.repeated`), and one of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FP8
from tokenspeed_kernel.triton.quantization.dequantize import decode_blocks, dequantize_fp8
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format
from tokenspeed_kernel_base.ops.quantization.mx import MXFP8_DTYPES
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import SCALE_LAYOUTS, TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import Constraint, at_least, at_most, multiple_of
from tokenspeed_kernel_base.workspace import keeper

# Bytes of dequantised weights per GEMM. Such a GEMM has several waves of tiles on a large device.
_SLICE_BYTES = 64 << 20
# Columns of b per slice are a multiple of this number, because a tile of swizzled scales is for so many columns.
_SLICE_COLUMNS = 128


def mm(a: Tensor, b: Tensor, b_scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Computes ``a @ b + bias`` for bfloat16 ``a`` and a scaled ``b`` without block scales in float32."""
    assert b_scale is not None  # every format of b has scales
    n, k = b.shape[1], a.shape[1]
    made = a.new_empty((a.shape[0], n)) if out is None else out
    columns = min(n, max(_SLICE_BYTES // (a.element_size() * k) // _SLICE_COLUMNS * _SLICE_COLUMNS, _SLICE_COLUMNS))
    device = a.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
    nbytes = columns * k * a.element_size()
    buffer = keeper.get(device, stream, nbytes, 0).memory[:nbytes].view(a.dtype)
    if columns == n:
        values = _dequantised(b, b_scale, buffer, k)
        return torch.mm(a, values, out=made) if bias is None else torch.addmm(bias, a, values, out=made)
    for first in range(0, n, columns):
        last = min(first + columns, n)
        values = _dequantised(b[:, first:last], _scales_of(b_scale, first, last), buffer, k)
        if bias is None:
            torch.mm(a, values, out=made[:, first:last])
        else:
            torch.addmm(bias[first:last], a, values, out=made[:, first:last])
    return made


def _dequantised(b: Tensor, b_scale: Tensor, buffer: Tensor, k: int) -> Tensor:
    """Returns b ``[k, n]``, dequantised to the start of ``buffer``."""
    values = buffer.as_strided((b.shape[1], k), (k, 1))
    if b_scale.dtype == torch.float32:
        dequantize_fp8(b.mT, b_scale if b_scale.ndim < 2 else b_scale.mT, buffer.dtype, BLOCK_MX, values)
    else:
        scale = b_scale.mT if b_scale.ndim == 2 else b_scale
        decode_blocks(b.mT, scale, None, BLOCK_MX, buffer.dtype, values)
    return values.mT


def _scales_of(b_scale: Tensor, first: int, last: int) -> Tensor:
    """Returns the scales of columns ``first`` to ``last``. ``first`` is a multiple of `_SLICE_COLUMNS`."""
    if b_scale.ndim < 2:
        return b_scale
    if b_scale.ndim == 2:
        return b_scale[:, first:last]
    return b_scale[first // _SLICE_COLUMNS : -(-last // _SLICE_COLUMNS)]


_FP8_FORMATS = [fp8_format(dtype, granularity) for dtype in FP8 for granularity in ("tensor", "channel")]
_MX_FORMATS = [
    *(mxfp4_format((BLOCK_MX, 1), layout) for layout in SCALE_LAYOUTS),
    *(mxfp8_format(dtype, (BLOCK_MX, 1), layout) for dtype in MXFP8_DTYPES for layout in SCALE_LAYOUTS),
]
_ACCURACY = {"fp8": "a weight times its scale has a relative error of at most 2^-9", "mx": ""}


def _declare(name: str, formats: list[TensorFormat], rows: Constraint, priority: int, accuracy: str) -> None:
    """Registers the kernel for weights of some formats and some numbers of rows of a."""
    a = dense_tensor_format(torch.bfloat16)
    register_kernel(
        "gemm",
        "mm",
        name=f"triton_mm_dequantised_{name}",
        solution="triton",
        capability=CapabilityRequirement(required_features=frozenset({"triton"}), vendors=frozenset({"nvidia", "amd"})),
        signatures={format_signature(a=a, b=b) for b in formats},
        traits={
            "m": rows,
            "k": at_least(16) & multiple_of(16),
            "bias": any,
            "wide_bias": False,
            "out_dtype": "bfloat16",
        },
        priority=priority,
        accuracy=accuracy,
    )(mm)


# The value of trait m is rounded up to a power of two. For fewer rows, dequantising in registers is as fast or faster: with 512
# rows and 8192 x 8192 mxfp4 weights, `words` took 130 us and `once` 162 us on an H200.
for _name, _formats in (("fp8", _FP8_FORMATS), ("mx", _MX_FORMATS)):
    _declare(_name, _formats, at_least(1024), Priority.PORTABLE + 1, _ACCURACY[_name])
    _declare(f"more_{_name}", _formats, at_least(128) & at_most(512), Priority.PORTABLE - 1, _ACCURACY[_name])
