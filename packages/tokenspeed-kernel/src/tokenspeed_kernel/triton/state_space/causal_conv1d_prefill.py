"""The causal convolution for prefill. A program computes a block of tokens of one sequence for a range of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, next_power_of_2
from tokenspeed_kernel.triton.state_space._convolution import FORMATS, TRAITS, shape_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# A thread computes four neighbouring channels. A block of 32 tokens rereads the last 3 tokens of the preceding block (for width 4).
# On an H200, 8192 tokens of qwen3-next take 81 us, 86 us with 2 channels per thread, and 82 us with 64 tokens per block.
_TOKENS, _CHANNELS, _WARPS = 32, 256, 2
# Sequences that a program compares at a time when it searches for its sequence.
_AT_ONCE = 256


@register_kernel(
    "state_space",
    "causal_conv1d_prefill",
    solution="triton",
    capability=TRITON,
    signatures=FORMATS,
    traits={**TRAITS, "has_initial_state": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None,
    has_initial_state: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.causal_conv1d_prefill`, which documents the arguments."""
    (tokens, channels), batch = x.shape, len(state_slots)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not batch or not channels:
        return out
    block = min(_CHANNELS, next_power_of_2(channels))
    # The programs of sequence b are numbered from cu_seqlens[b] // _TOKENS + b on. So each sequence has as many programs as blocks,
    # or one more. The host needs no lengths.
    device_code.causal_conv1d_prefill_kernel[(cdiv(channels, block) * (tokens // _TOKENS + batch),)](
        x,
        dense(weight),
        dense(bias),
        dense(cu_seqlens),
        states,
        state_slots,
        has_initial_state,
        out,
        batch,
        *x.stride(),
        *states.stride(),
        state_slots.stride(0),
        0 if has_initial_state is None else has_initial_state.stride(0),
        *out.stride(),
        SHAPE=shape_of(weight, activation),
        TOKENS=_TOKENS,
        BLOCK=block,
        AT_ONCE=_AT_ONCE,
        num_warps=_WARPS,
    )
    return out
