"""From logits to the next token."""

from tokenspeed_kernel_base.ops.sampling.argmax import argmax
from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import sample_top_k_top_p

__all__ = ["argmax", "sample_top_k_top_p"]
