"""Products of matrices."""

from tokenspeed_kernel.ops.gemm import torch  # noqa: F401  (registers its kernels)
from tokenspeed_kernel.ops.gemm.bmm import bmm
from tokenspeed_kernel.ops.gemm.mm import mm

__all__ = ["bmm", "mm"]
