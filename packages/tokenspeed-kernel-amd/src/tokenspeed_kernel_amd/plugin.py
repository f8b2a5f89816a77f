"""What tokenspeed-kernel imports: declarations, no kernels. The only module here that imports the core.

A kernel is one entry of ``_KERNELS``. Its module, and Triton with it, is imported when it is first selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, PlatformInfo
from tokenspeed_kernel.registry import Priority, register_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_amd import _machine

_HALVES = (torch.bfloat16, torch.float16)
_ATTENTION = "tokenspeed_kernel_amd.gfx950.attention"


@dataclass(frozen=True)
class _Gfx950(CapabilityRequirement):
    """A gfx950, and a Triton with the Gluon that the kernels are written in."""

    def gap(self, platform: PlatformInfo) -> str | None:
        return super().gap(platform) or _machine.triton_gap()


_GFX950 = _Gfx950(ArchVersion(9, 5), ArchVersion(9, 5), frozenset({"triton"}), frozenset({"amd"}))


@dataclass(frozen=True)
class _Kernel:
    """What one kernel can do.

    Attributes:
        mode: the operator, of the family attention.
        implementation: ``"module:function"``.
        formats: the storage dtypes of the operator's formats, by role; one mapping for each combination that is served.
        traits: constraints by trait.
    """

    mode: str
    implementation: str
    formats: tuple[Mapping[str, torch.dtype], ...]
    traits: Mapping[str, Any]


_KERNELS = (
    _Kernel(
        "mha_prefill",
        f"{_ATTENTION}.prefill:mha_prefill",
        formats=tuple({"q": dtype, "k": dtype, "v": dtype} for dtype in _HALVES),
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "logit_cap": any,
            "return_lse": any,
            "sliding_window": any,
            "sinks": any,
        },
    ),
    _Kernel(
        "mha_extend_with_kvcache",
        f"{_ATTENTION}.extend:mha_extend_with_kvcache",
        formats=tuple({"q": dtype, "k_cache": dtype, "v_cache": dtype} for dtype in _HALVES),
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "page_size": {16, 32, 64, 128, 256},
            "logit_cap": any,
            "return_lse": any,
            "sliding_window": any,
            "sinks": any,
            "is_causal": any,
        },
    ),
    _Kernel(
        "mha_decode_with_kvcache",
        f"{_ATTENTION}.decode:mha_decode_with_kvcache",
        formats=tuple({"q": dtype, "k_cache": dtype, "v_cache": dtype} for dtype in _HALVES),
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "page_size": {16, 32, 64, 128, 256},
            "logit_cap": any,
            "return_lse": any,
            "sliding_window": any,
            "sinks": any,
            "multi_query": any,
        },
    ),
)


def register() -> None:
    """Declares the kernels of this package. The entry point ``amd`` of the group ``tokenspeed_kernel.plugins``."""
    for kernel in _KERNELS:
        signatures = (
            format_signature(**{role: dense_tensor_format(dtype) for role, dtype in formats.items()}) for formats in kernel.formats
        )
        register_kernel(
            "attention",
            kernel.mode,
            solution="gluon",
            capability=_GFX950,
            signatures=frozenset(signatures),
            traits=kernel.traits,
            priority=Priority.SPECIALIZED,
            tags={"determinism"},
        )(kernel.implementation)
