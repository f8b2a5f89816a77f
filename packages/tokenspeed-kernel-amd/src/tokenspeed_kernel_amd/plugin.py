"""What tokenspeed-kernel imports: declarations, no kernels. The only module here that imports the core.

A kernel is one entry of ``_KERNELS``. Its module, and Triton with it, is imported when it is first selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_amd import _machine
from tokenspeed_kernel_amd.aiter import _package
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement, PlatformInfo
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, format_signature

_HALVES = (torch.bfloat16, torch.float16)
_ATTENTION = "tokenspeed_kernel_amd.gfx950.attention"
# Of attention to a paged cache: caches alone may be fp8.
_PAGED = tuple({"q": q, "k_cache": cache, "v_cache": cache} for q in _HALVES for cache in (q, torch.float8_e4m3fn))


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
        formats=_PAGED,
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "page_size": {16, 32, 64, 128, 256},
            "scaled": any,
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
        formats=_PAGED,
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "page_size": {16, 32, 64, 128, 256},
            "scaled": any,
            "logit_cap": any,
            "return_lse": any,
            "sliding_window": any,
            "sinks": any,
            "multi_query": any,
        },
    ),
    _Kernel(
        "mha_with_kvcache",
        f"{_ATTENTION}.mixed:mha_with_kvcache",
        formats=_PAGED,
        traits={
            "head_dim": {64, 128},
            "v_head_dim": {64, 128},
            "page_size": {16, 32, 64, 128, 256},
            "scaled": any,
            "logit_cap": any,
            "return_lse": any,
            "sliding_window": any,
            "sinks": any,
        },
    ),
)


@dataclass(frozen=True)
class _Aiter(CapabilityRequirement):
    """A gfx942 or gfx950, and AITER with the functions that the adapters call."""

    def gap(self, platform: PlatformInfo) -> str | None:
        return super().gap(platform) or _package.gap()


_AITER = _Aiter(ArchVersion(9, 4), ArchVersion(9, 5), vendors=frozenset({"amd"}))
_AITER_MODULES = "tokenspeed_kernel_amd.aiter"
_AITER_RAGGED = tuple({"q": dtype, "k": dtype, "v": dtype} for dtype in _HALVES)
_AITER_PAGED = tuple({"q": dtype, "k_cache": dtype, "v_cache": dtype} for dtype in _HALVES)


def _aiter_paged(mode: str, module: str, **traits: Any) -> dict[str, _Kernel]:
    """One kernel a width, because that of values must be that of keys. See ``aiter._paged`` for the pages."""
    implementation = f"{_AITER_MODULES}.{module}:{mode}"
    served = {"page_size": {128, 256}, "sliding_window": any, "sinks": any, **traits}
    return {
        f"aiter_{mode}_{width}": _Kernel(mode, implementation, _AITER_PAGED, {"head_dim": width, "v_head_dim": width, **served})
        for width in (64, 128)
    }


# By name. No logit cap: its tanh is a quotient of exponentials, which is no number where a score is many times the cap; and
# without compiled kernels the cap of a prefill is not looked at. No log-sum-exp with sinks: whether the sink is in it is not
# documented. At head_dim 128 its prefill has assembly kernels that know neither sinks nor a window of the token alone, and are
# taken for either.
_AITER_KERNELS = {
    "aiter_mha_prefill_64": _Kernel(
        "mha_prefill",
        f"{_AITER_MODULES}.prefill:mha_prefill",
        _AITER_RAGGED,
        {"head_dim": 64, "v_head_dim": 64, "sliding_window": any, "return_lse": any},
    ),
    "aiter_mha_prefill_64_sinks": _Kernel(
        "mha_prefill",
        f"{_AITER_MODULES}.prefill:mha_prefill",
        _AITER_RAGGED,
        {"head_dim": 64, "v_head_dim": 64, "sliding_window": any, "sinks": {True}},
    ),
    "aiter_mha_prefill_128": _Kernel(
        "mha_prefill",
        f"{_AITER_MODULES}.prefill:mha_prefill",
        _AITER_RAGGED,
        {"head_dim": 128, "v_head_dim": 128, "return_lse": any},
    ),
    **_aiter_paged("mha_extend_with_kvcache", "extend", is_causal={True}),
    **_aiter_paged("mha_decode_with_kvcache", "decode"),
    **_aiter_paged("mha_with_kvcache", "mixed"),
}


def _signatures(kernel: _Kernel) -> frozenset[FormatSignature]:
    return frozenset(
        format_signature(**{role: dense_tensor_format(dtype) for role, dtype in formats.items()}) for formats in kernel.formats
    )


def register() -> None:
    """Declares the kernels of this package. The entry point ``amd`` of the group ``tokenspeed_kernel.plugins``."""
    for kernel in _KERNELS:
        register_kernel(
            "attention",
            kernel.mode,
            solution="gluon",
            capability=_GFX950,
            signatures=_signatures(kernel),
            traits=kernel.traits,
            priority=Priority.SPECIALIZED,
            tags={"determinism"},
        )(kernel.implementation)
    for name, kernel in _AITER_KERNELS.items():
        register_kernel(
            "attention",
            kernel.mode,
            name=name,
            solution="aiter",
            capability=_AITER,
            signatures=_signatures(kernel),
            traits=kernel.traits,
            priority=Priority.PERFORMANT,
        )(kernel.implementation)
