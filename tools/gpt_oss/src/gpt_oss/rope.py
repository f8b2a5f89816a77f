"""The table of cosines and sines that the rotary embedding looks positions up in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt_oss.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 ``[head_dim / 2]``.

    YaRN keeps the fast ones, which tell neighbours apart, and divides the slow ones, which would leave the trained range, by
    the stretching factor; between the two it mixes linearly.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    kept = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return kept

    def dimension(rotations: float) -> float:
        """The pair that turns this often over the trained context."""
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return kept / rope.factor * stretched + kept * (1 - stretched)


def cos_sin_cache(rope: RopeConfig, head_dim: int, positions: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 ``[positions, head_dim]``: for each position the cosines, then the sines, each ``head_dim / 2`` of them.

    YaRN's attention factor is in both, so that q and k are each scaled by it.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.scale).to(device)
