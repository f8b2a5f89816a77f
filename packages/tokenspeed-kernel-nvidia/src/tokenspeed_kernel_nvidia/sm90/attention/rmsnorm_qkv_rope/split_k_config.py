"""Configurations of the kernel of `split_k_device`, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import HEAD_DIMS
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import Weights
from tokenspeed_kernel_nvidia.sm90.gemm.split_k import config as split_k


@dataclass(frozen=True)
class SplitKConfig(split_k.Config):
    """Configuration of one kernel variant.

    Attributes:
        head_dim: elements of a head. All of them are rotated (RoPE).
    """

    head_dim: int = HEAD_DIMS[0]

    @property
    def weights(self) -> Weights:
        """The storage format of the weights."""
        return "dense"


def split_k_config_of(dtype: str, head_dim: int, tokens: int, hidden: int) -> SplitKConfig:
    """Returns the configuration for tokens of ``hidden`` elements.

    Raises:
        ValueError: there are too many tokens, or they have too many elements.
    """
    return SplitKConfig(dtype, split_k.tokens_of(tokens), split_k.room_of(hidden), head_dim=head_dim)


def every_split_k_config() -> list[SplitKConfig]:
    """Returns all configurations that calls use."""
    return [
        SplitKConfig("bfloat16", tokens, room, head_dim=head_dim)
        for head_dim in HEAD_DIMS
        for tokens in split_k.TOKENS
        for room in split_k.ROOMS
    ]
