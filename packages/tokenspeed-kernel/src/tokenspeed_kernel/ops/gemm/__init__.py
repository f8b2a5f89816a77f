"""Products of matrices."""

from tokenspeed_kernel.ops.gemm import torch, triton  # noqa: F401  (they register their kernels)
from tokenspeed_kernel.ops.gemm.bmm import bmm
from tokenspeed_kernel.ops.gemm.mm import mm

__all__ = ["bmm", "mm"]
