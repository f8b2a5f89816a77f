"""The operators. Importing this package declares all of them."""

from tokenspeed_kernel_base.ops import activation, attention, embedding, gemm, kvcache, moe, norm, quantization, sampling

__all__ = ["activation", "attention", "embedding", "gemm", "kvcache", "moe", "norm", "quantization", "sampling"]
