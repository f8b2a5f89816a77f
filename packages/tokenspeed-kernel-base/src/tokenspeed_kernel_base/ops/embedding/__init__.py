"""Position embedding."""

from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope

__all__ = ["apply_rope"]
