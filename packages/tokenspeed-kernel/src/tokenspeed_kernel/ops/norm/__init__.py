"""Normalisation."""

from tokenspeed_kernel.ops.norm import triton  # noqa: F401  (registers its kernels)
from tokenspeed_kernel.ops.norm.qk_rmsnorm import qk_rmsnorm
from tokenspeed_kernel.ops.norm.rmsnorm import rmsnorm

__all__ = ["qk_rmsnorm", "rmsnorm"]
