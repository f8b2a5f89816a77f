"""Gates, and the lengths of queries and keys, as both kernels of the gated delta rule compute them."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import softplus


@triton.jit
def log_decay(g, bias, A_log, head, GATES: tl.constexpr):
    """Logarithms of what is kept, for gates of a value head.

    Args:
        g: float32, one a token or one a channel.
        bias: what raw gates are shifted by, 0 for none.
        A_log: a pointer to logarithms of rates, one a value head.
        GATES: 0 where g is the logarithm already, 1 where it is raw, 2 where it is raw and has a bias.
    """
    return g if GATES == 0 else -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(g + bias)


@triton.jit
def strength(beta, GATES: tl.constexpr):
    """To which part a value is replaced: beta, or its sigmoid if gates are raw."""
    return beta if GATES == 0 else tl.sigmoid(beta)
