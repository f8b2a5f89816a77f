"""Operand formats and sizes that both launchers of causal convolutions use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures

# A state holds a request's last inputs, in the inputs' dtype or widened to float32.
FORMATS = format_signatures(("x", "states"), "dense", FLOATS) | {
    format_signature(x=dense_tensor_format(dtype), states=dense_tensor_format(torch.float32)) for dtype in FLOATS
}
TRAITS = {"bias": any, "silu": any}


class Shape(NamedTuple):
    """Compile-time parameters: channels and kernel width, which a model fixes, and whether SiLU is applied to the result."""

    channels: int
    width: int
    silu: bool


def shape_of(weight: Tensor, activation: str | None) -> Shape:
    return Shape(weight.shape[0], weight.shape[1], activation == "silu")
