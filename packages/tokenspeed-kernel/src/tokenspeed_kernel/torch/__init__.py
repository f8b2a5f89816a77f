"""PyTorch's own kernels."""

from tokenspeed_kernel.torch import attention, gemm

__all__ = ["attention", "gemm"]
