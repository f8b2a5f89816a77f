"""GEMMs of 8-bit floats by ``torch._scaled_mm``, which calls the vendor's library: no dequantisation.

Fast accumulation is off: the tensor cores' partial sums are added in float32 along k. The library requires operands that are
contiguous along k, with rows at multiples of 16 bytes. Row scales must be contiguous, and block scales of neighbouring rows must be
adjacent. Tensors in another layout are copied, because no trait describes layouts. Such copies are small (scales) or rare (models'
operands already have the required layout).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenspeed_kernel_base.ops.quantization.formats import fp8_format
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_least, multiple_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # bytes
# With block scales, m must be a multiple of this constant, so that a column of m float32 scales is a multiple of 16 bytes long.
# PyTorch 2.11 with CUDA 13.0 rejects any other m.
ROWS_OF_SCALES = 4
# Dtypes of (a, b). The library has no GEMM of e5m2 with e5m2.
DTYPES = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))


def _is_aligned(x: Tensor) -> bool:
    """Returns whether x has a contiguous last axis and rows that begin at multiples of 16 bytes, as the library requires.

    The length of a row needs no check, because the traits make k and n multiples of 16.
    """
    if x.data_ptr() % ALIGNMENT:
        return False
    if x.is_contiguous():
        return True
    if x.ndim != 2:
        return False
    between, step = x.stride()
    return step == 1 and between >= x.shape[1] and between * x.element_size() % ALIGNMENT == 0


def _aligned(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _vector(x: Tensor) -> Tensor:
    """Returns a vector of scales or biases, contiguous and aligned to 16 bytes, as the library requires: x itself or a copy."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _are_blocks(b: Tensor, b_scale: Tensor) -> bool:
    # Block scales of shape [1, n] have a single block along k, so they mean the same as per-column scales.
    return b_scale.ndim == 2 and b_scale.shape != (1, b.shape[1])


def torch_scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    dtype = out_dtype or torch.bfloat16
    m, n = a.shape[0], b.shape[1]
    lines, rows = _aligned(b.mT), m
    if _are_blocks(b, b_scale):
        rows += -m % ROWS_OF_SCALES
        if rows > m:
            # Pad a with rows of zeros. The output rows of this padding are dropped.
            a = pad(a.view(torch.uint8), (0, 0, 0, rows - m)).view(a.dtype)
            a_scale = pad(a_scale.mT, (0, rows - m)).mT
        a_scale, b_scale = _vector(a_scale.mT).mT, _vector(b_scale.mT).mT
    elif a_scale.numel() > 1 or b_scale.numel() > 1:
        # If a and b do not both have one scale per tensor, the library requires one scale per row of a and one per column of b.
        a_scale, b_scale = _vector(a_scale.expand(m, 1)), _vector(b_scale.expand(1, n))
    written = out if out is not None and rows == m and _is_aligned(out) else a.new_empty((rows, n), dtype=dtype)
    given = None if bias is None else _vector(bias)
    torch._scaled_mm(
        _aligned(a), lines.mT, a_scale, b_scale, given, out_dtype=dtype, use_fast_accum=False, out=written
    )  # fmt: skip
    if out is None or written is out:
        return written[:m] if rows > m else written
    return out.copy_(written[:m])


@functools.cache
def _gap() -> str | None:
    """Returns why the installed PyTorch lacks these GEMMs, or None if it has them. Also returns None for a PyTorch without CUDA,
    which never launches these GEMMs.
    """
    cuda = torch.version.cuda
    if cuda is None:
        return None
    if _numbers(cuda) < (12, 9):
        return f"needs PyTorch for CUDA 12.9 or later, this one is for {cuda}"
    if _numbers(torch.__version__) < (2, 9):
        return f"needs PyTorch 2.9 or later, this is {torch.__version__}"
    return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _nvidia(first: tuple[int, int], last: tuple[int, int] | None = None) -> CapabilityRequirement:
    highest = None if last is None else ArchVersion(*last)
    return CapabilityRequirement(ArchVersion(*first), highest, vendors=frozenset({"nvidia"}), probe=_gap)


class _Support(NamedTuple):
    """The calls that the kernel supports for one granularity of scales: devices, operand formats, the fewest rows of a, and the
    divisors of k and n.
    """

    capability: CapabilityRequirement
    signatures: set[FormatSignature]
    fewest_rows: int
    k: int
    n: int


def _pairs(a: tuple[str, ...], b: tuple[str, ...]) -> set[FormatSignature]:
    return {format_signature(a=fp8_format(of_a, x), b=fp8_format(of_b, y)) for of_a, of_b in DTYPES for x in a for y in b}


_TENSORS = _pairs(("tensor",), ("tensor",))
# ``fewest_rows``: with this many rows of a or more, this kernel is faster than the portable kernel at most of the sizes below.
# Times in microseconds on one H100: this kernel, then the portable kernel. In the column "rows", a has one scale per row and b has
# one scale per column.
#
# | rows of a | k x n       | rows          | blocks        |    | rows of a | k x n       | tensors       |
# |-----------|-------------|---------------|---------------|    |-----------|-------------|---------------|
# | 256       | 7168 x 2048 | 20.8    17.5  | 25.0    17.5  |    | 64        | 4096 x 4096 | 10.4    12.3  |
# |           | 4096 x 7168 | 17.5    21.4  | 18.9    22.1  |    | 128       |             | 10.2    15.6  |
# |           | 2048 x 7168 | 11.5    14.1  | 13.4    13.7  |    | 512       |             | 15.3    20.0  |
# | 512       | 7168 x 2048 | 20.5    22.6  | 25.4    25.0  |    | 2048      |             | 52.7    72.8  |
# |           | 4096 x 7168 | 27.6    38.7  | 30.3    40.6  |
# |           | 2048 x 7168 | 17.5    24.7  | 19.9    24.1  |
# | 1024      | 7168 x 2048 | 23.4    32.0  | 27.4    34.4  |
# |           | 4096 x 7168 | 53.9    74.8  | 57.6    80.3  |
# |           | 2048 x 7168 | 32.5    30.4  | 35.2    45.8  |
# | 4096      | 7168 x 2048 | 93.2   133.8  | 104.2  147.5  |
# |           | 4096 x 7168 | 192.3  304.4  | 212.5  318.9  |
# |           | 2048 x 7168 | 101.3   97.7  | 107.6  163.5  |
_SUPPORTED = {
    "tensors": _Support(_nvidia((8, 9)), _TENSORS, fewest_rows=64, k=16, n=16),
    # On later architectures PyTorch uses its own kernel instead of the library's.
    "rows": _Support(
        _nvidia((9, 0), (9, 0)), _pairs(("tensor", "token"), ("tensor", "channel")) - _TENSORS, fewest_rows=512, k=16, n=16
    ),
    # The library's stride between columns of b's scales is rounded up to a multiple of four blocks along k. With PyTorch 2.11 and
    # CUDA 13.0, results are wrong for five blocks and for a partial block. For m and n, the library itself accepts partial blocks.
    "blocks": _Support(
        _nvidia((9, 0), (9, 0)),
        {format_signature(a=fp8_format(of_a, "block", (1, 128)), b=fp8_format(of_b, "block", (128, 128))) for of_a, of_b in DTYPES},
        fewest_rows=512,
        k=512,
        n=128,
    ),
}
# PyTorch adds only a bias of the result's dtype. It adds no bias to a float32 result.
_RESULTS: dict[str, tuple[set[str], Any]] = {"halves": ({"bfloat16", "float16"}, any), "float32": ({"float32"}, False)}

for _name, _kind in _SUPPORTED.items():
    for _result, (_dtypes, _bias) in _RESULTS.items():
        register_kernel(
            "gemm",
            "mm",
            name=f"torch_mm_fp8_{_name}_to_{_result}",
            solution="torch",
            capability=_kind.capability,
            signatures=_kind.signatures,
            traits={
                "m": at_least(_kind.fewest_rows),  # a power of two, because the value of trait m is rounded up to a power of two
                "k": at_least(_kind.k) & multiple_of(_kind.k),
                "n": at_least(_kind.n) & multiple_of(_kind.n),
                "out_dtype": _dtypes,
                "bias": _bias,
                "wide_bias": False,
            },
            priority=Priority.PORTABLE + 1,
        )(torch_scaled_mm)
