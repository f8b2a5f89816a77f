"""Placeholder arguments with which kernels are compiled: types and layouts without memory. They fix dtypes, ranks and alignments.
Sizes are symbols, and equal sizes share a symbol, so that one compiled kernel is valid for all sizes.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of

size = cute.sym_int  # makes the symbol of a size


def rows(dtype: str, *shape: Any) -> Any:
    """Returns a placeholder tensor of 16-bit or float32 elements, the last axis contiguous. Rows are 16-byte aligned, as bulk
    copies require."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in shape[:-1])
    return make_fake_tensor(dtype_of(dtype), shape, (*strides, 1), assumed_align=16)


def byte_rows(*shape: Any) -> Any:
    """Like `rows`, for uint8 elements."""
    strides = tuple(cute.sym_int64(divisibility=16) for _ in shape[:-1])
    return make_fake_tensor(Uint8, shape, (*strides, 1), assumed_align=16)


def ints(*shape: Any, contiguous: bool = True) -> Any:
    """Returns a placeholder tensor of int32, such as lengths, offsets, or a page table.

    Args:
        contiguous: whether the last axis is contiguous; the other axes may have any strides.
    """
    strides = tuple(cute.sym_int64() for _ in shape[:-1])
    return make_fake_tensor(Int32, shape, (*strides, 1 if contiguous else cute.sym_int64()), assumed_align=4)


def stream() -> Any:
    """Returns a placeholder for PyTorch's current stream at the launch."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
