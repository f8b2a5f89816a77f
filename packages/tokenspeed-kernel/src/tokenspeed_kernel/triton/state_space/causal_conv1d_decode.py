"""The causal convolution for decode. A program computes a range of channels of a few requests, token after token."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, launch_options, may_overlap, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.state_space._convolution import FORMATS, TRAITS, shape_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# A thread computes two neighbouring channels of a request. For each channel, a thread holds four inputs, four weights and the bias.
_CHANNELS, _WARPS = 256, 4
# Requests per program, if every SM/CU then still has at least two programs. Requests of a program share its loaded weights. On an
# H200, 64 requests of qwen3-next take 4.4 us, and 5.5 us with one request per program.
_REQUESTS, _PROGRAMS = 4, 2


@register_kernel(
    "state_space",
    "causal_conv1d_decode",
    solution="triton",
    capability=TRITON,
    signatures=FORMATS,
    traits={**TRAITS, "output_slots": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def causal_conv1d_decode(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None,
    activation: str | None,
    output_slots: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.causal_conv1d_decode`, which documents the arguments."""
    batch, tokens, channels = x.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    block = min(_CHANNELS, next_power_of_2(channels))
    programs = cdiv(channels, block) * cdiv(batch, _REQUESTS)
    requests = _REQUESTS if programs >= _PROGRAMS * sm_count_of(x.device) else 1
    early = may_overlap(x.device)
    device_code.causal_conv1d_decode_kernel[(cdiv(batch, requests), cdiv(channels, block))](
        x,
        dense(weight),
        dense(bias),
        states,
        state_slots,
        output_slots,
        out,
        batch,
        tokens,
        *x.stride(),
        *states.stride(),
        state_slots.stride(0),
        *((0, 0) if output_slots is None else output_slots.stride()),
        *out.stride(),
        SHAPE=shape_of(weight, activation),
        REQUESTS=requests,
        BLOCK=block,
        EARLY=early,
        num_warps=_WARPS,
        **launch_options(early),
    )
    return out
