"""The portable kernels, in Triton."""

from tokenspeed_kernel.triton import activation, attention, embedding, gemm, kvcache, moe, norm, quantization, sampling

__all__ = ["activation", "attention", "embedding", "gemm", "kvcache", "moe", "norm", "quantization", "sampling"]
