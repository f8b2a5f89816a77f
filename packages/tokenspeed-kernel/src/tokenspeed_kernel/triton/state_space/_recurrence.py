"""Operand formats and sizes that both launchers of state-space recurrences use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import at_most

# Step sizes and states have x's dtype or float32.
FORMATS = frozenset(
    format_signature(x=dense_tensor_format(x), dt=dense_tensor_format(dt), states=dense_tensor_format(states))
    for x in FLOATS
    for dt in {x, torch.float32}
    for states in {x, torch.float32}
)
TRAITS = {"D": any, "z": any, "dt_bias": any, "head_dim": at_most(256), "state_dim": at_most(256)}


class Shape(NamedTuple):
    """Sizes that a model fixes: heads, heads per group of B and C, head and state dimension; and whether softplus is applied to
    steps.
    """

    heads: int
    group: int
    head_dim: int
    state_dim: int
    softplus: bool


def shape_of(x: Tensor, B: Tensor, dt_softplus: bool) -> Shape:
    heads, head_dim = x.shape[-2:]
    groups, state_dim = B.shape[-2:]
    return Shape(heads, heads // groups, head_dim, state_dim, dt_softplus)
