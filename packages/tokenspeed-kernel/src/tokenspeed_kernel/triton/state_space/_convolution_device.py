"""Device code for both causal convolutions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tap(weight, channel, inside, INDEX: tl.constexpr, SHAPE: tl.constexpr):
    """Loads tap number INDEX of the convolution's weights for the given channels, float32."""
    return tl.load(weight + channel * SHAPE.width + INDEX, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def bias_of(bias, channel, inside):
    """Loads the bias of the given channels, float32; 0 if there is no bias."""
    if bias is None:
        return tl.zeros(channel.shape, tl.float32)
    else:  # noqa: RET505 (the branch not taken must not be compiled)
        return tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def activated(total, SHAPE: tl.constexpr):
    # Returns ``silu(total)`` if SHAPE.silu, otherwise ``total``; float32.
    if SHAPE.silu:
        total = total / (1.0 + tl.exp(-total))
    return total
