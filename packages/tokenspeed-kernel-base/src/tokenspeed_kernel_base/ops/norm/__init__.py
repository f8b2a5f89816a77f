"""Normalisation."""

from tokenspeed_kernel_base.ops.norm.qk_rmsnorm import qk_rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm

__all__ = ["qk_rmsnorm", "rmsnorm"]
