"""Configurations of the `silu` kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES


@dataclass(frozen=True)
class Config:
    """Identifies a compiled program.

    Attributes:
        dtype: the dtype of x and of the output.
    """

    dtype: str


def every_config() -> list[Config]:
    """Returns all configurations."""
    return [Config(dtype) for dtype in DTYPES.values()]
