"""What tokenspeed-kernel imports: declarations, no kernels. The only module here that imports the core.

A kernel's module is imported when it is first selected, and CuteDSL when it has to be compiled. Our own kernels are preferred to
those of FlashInfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement, PlatformInfo
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import at_most, between
from tokenspeed_kernel_nvidia import _limits, _machine
from tokenspeed_kernel_nvidia.flashinfer import _package
from tokenspeed_kernel_nvidia.flashinfer._declarations import DECLARATIONS

_SM90 = "tokenspeed_kernel_nvidia.sm90.attention"


@dataclass(frozen=True)
class _Hopper(CapabilityRequirement):
    """An sm_90, and a CuteDSL that compiles the kernels."""

    def gap(self, platform: PlatformInfo) -> str | None:
        return super().gap(platform) or _machine.dsl_gap()


_HOPPER = _Hopper(ArchVersion(9, 0), ArchVersion(9, 0), vendors=frozenset({"nvidia"}))


@dataclass(frozen=True)
class _Kernel:
    """What one kernel can do.

    Attributes:
        mode: the operator, of the family attention.
        module: the last part of the name of the module that has a function of the operator's name.
        roles: the operator's formats, which all have one dtype.
        traits: constraints by trait, besides those of every kernel here.
    """

    mode: str
    module: str
    roles: tuple[str, ...]
    traits: Mapping[str, Any]

    @property
    def implementation(self) -> str:
        return f"{_SM90}.{self.module}:{self.mode}"


_EVERY = {"gqa_ratio": set(_limits.GQA_RATIOS), "return_lse": any, "sinks": any}
_RAGGED = ("q", "k", "v")
_PAGED = ("q", "k_cache", "v_cache")
_PAGES = {"page_size": set(_limits.PAGE_SIZES)}
_DECODE = {**_PAGES, "sliding_window": any, "multi_query": any}
# Only where there is a window, and it is short enough.
_WINDOW = {
    "sliding_window": {True},
    "window_left": at_most(_limits.LONGEST_WINDOW),
}


def _rows(least: int, most: int) -> dict[str, Any]:
    """As many query heads a key head, and as many new tokens as there are rows for."""
    return {"gqa_ratio": between(least, most), "new_tokens": at_most(_limits.MOST_ROWS // most)}


# By name.
_KERNELS = {
    "mha_prefill": _Kernel("mha_prefill", "prefill", _RAGGED, {}),
    "mha_prefill_window": _Kernel("mha_prefill", "window", _RAGGED, _WINDOW),
    "mha_extend_with_kvcache": _Kernel("mha_extend_with_kvcache", "prefill", _PAGED, {**_PAGES, "is_causal": any}),
    "mha_extend_with_kvcache_window": _Kernel(
        "mha_extend_with_kvcache", "window", _PAGED, {**_PAGES, **_WINDOW, "is_causal": {True}}
    ),
    "mha_decode_with_kvcache": _Kernel("mha_decode_with_kvcache", "decode", _PAGED, {**_DECODE, **_rows(1, 8)}),
    "mha_decode_with_kvcache_wide": _Kernel("mha_decode_with_kvcache", "decode", _PAGED, {**_DECODE, **_rows(9, 16)}),
}


@dataclass(frozen=True)
class _FlashInfer(CapabilityRequirement):
    """An architecture that the kernels are for, and FlashInfer with the functions that the adapters call."""

    def gap(self, platform: PlatformInfo) -> str | None:
        return super().gap(platform) or _package.gap()


def _signatures(roles: tuple[str, ...]) -> frozenset[FormatSignature]:
    return frozenset(format_signature(**{role: dense_tensor_format(dtype) for role in roles}) for dtype in _limits.HALVES)


def register() -> None:
    """Declares the kernels of this package. The entry point ``nvidia`` of the group ``tokenspeed_kernel.plugins``."""
    for name, kernel in _KERNELS.items():
        # Values are as wide as keys, so each width is a declaration of its own.
        for width in _limits.HEAD_DIMS:
            register_kernel(
                "attention",
                kernel.mode,
                name=f"cutedsl_{name}_{width}",
                solution="cutedsl",
                capability=_HOPPER,
                signatures=_signatures(kernel.roles),
                traits={"head_dim": width, "v_head_dim": width, **_EVERY, **kernel.traits},
                priority=Priority.SPECIALIZED,
                tags={"determinism"},
            )(kernel.implementation)
    for other in DECLARATIONS:
        first, last = (ArchVersion(*arch) for arch in other.arches)
        register_kernel(
            "attention",
            other.mode,
            name=other.name,
            solution="flashinfer",
            capability=_FlashInfer(first, last, vendors=frozenset({"nvidia"})),
            signatures=_signatures(other.roles),
            traits=other.traits,
            priority=other.priority,
            tags=other.tags,
        )(other.implementation)
