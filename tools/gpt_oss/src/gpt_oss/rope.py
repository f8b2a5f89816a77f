"""The cos/sin table of the rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt_oss.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the frequency of each pair of dimensions, in radians per position: float32 ``[head_dim / 2]``.

    YaRN keeps high frequencies, which distinguish adjacent tokens. It divides low frequencies, whose angles would leave the
    range seen in training, by the stretching factor. In between, YaRN mixes the kept and the divided frequencies linearly (Peng et
    al., 2023, arXiv:2309.00071).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    kept = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return kept

    def dimension(rotations: float) -> float:
        """Returns the (fractional) index of the dimension pair that makes this many rotations over the training context."""
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # makes the ramp a step; the division below would otherwise be by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return kept / rope.factor * stretched + kept * (1 - stretched)


def cos_sin_cache(rope: RopeConfig, head_dim: int, positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the cosines and sines of every position: float32 ``[positions, head_dim]``, ``head_dim / 2`` cosines, then as many
    sines.

    The cosines and sines are multiplied by YaRN's attention factor, so that q and k are each scaled by this factor.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.scale).to(device)
