"""The gates of the gated delta rule, shared by decode and prefill."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import softplus


@triton.jit
def log_decay(g, bias, A_log, head, GATES: tl.constexpr):
    """Returns the log decays for the gates of a value head.

    Args:
        g: float32, one gate per token or one per channel.
        bias: added to raw gates; 0 for none.
        A_log: a pointer to the logarithms of decay rates, one per value head.
        GATES: 0 if g is the log decay already, 1 if g is raw, 2 if g is raw and has a bias.
    """
    return g if GATES == 0 else -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(g + bias)


@triton.jit
def strength(beta, GATES: tl.constexpr):
    """Returns the write strength of the delta rule. The strength is beta, or the sigmoid of beta if gates are raw."""
    return beta if GATES == 0 else tl.sigmoid(beta)
