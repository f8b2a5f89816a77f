"""Position embedding."""

from tokenspeed_kernel.ops.embedding import triton  # noqa: F401  (registers its kernels)
from tokenspeed_kernel.ops.embedding.apply_rope import apply_rope

__all__ = ["apply_rope"]
