"""Configurations of the `silu` kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES


@dataclass(frozen=True)
class Config:
    """Identifies a compiled program.

    Attributes:
        dtype: of x and the output.
    """

    dtype: str


def every_config() -> list[Config]:
    """All configurations."""
    return [Config(dtype) for dtype in DTYPES.values()]
