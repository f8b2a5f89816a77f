"""Products of matrices."""

from tokenspeed_kernel_base.ops.gemm.bmm import bmm
from tokenspeed_kernel_base.ops.gemm.mm import mm

__all__ = ["bmm", "mm"]
