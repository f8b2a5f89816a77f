"""Normalisation."""

from tokenspeed_kernel.ops.norm.rmsnorm import rmsnorm

__all__ = ["rmsnorm"]
