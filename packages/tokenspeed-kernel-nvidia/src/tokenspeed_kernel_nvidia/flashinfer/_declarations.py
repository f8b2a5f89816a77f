"""What the adapters serve, as data. Imports neither FlashInfer nor the core: ``plugin`` makes declarations of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MODULES = "tokenspeed_kernel_nvidia.flashinfer"
_RAGGED, _PAGED = ("q", "k", "v"), ("q", "k_cache", "v_cache")


@dataclass(frozen=True)
class Declaration:
    """One kernel.

    Attributes:
        name: among all kernels.
        mode: the operator, of the family attention.
        implementation: ``"module:function"``.
        arches: first and last architecture, both included, as (major, minor).
        roles: the operator's formats, which all have one dtype, bfloat16 or float16.
        traits: constraints by trait, as a declaration in the core takes them.
        tags: likewise.
        priority: likewise. 8 is above the portable kernels and below our own.
    """

    name: str
    mode: str
    implementation: str
    arches: tuple[tuple[int, int], tuple[int, int]]
    roles: tuple[str, ...]
    traits: Mapping[str, Any]
    tags: frozenset[str] = frozenset()
    priority: int = 8


# sm_100 and sm_103 have the generated kernels of TensorRT-LLM; XQA was written for sm_90, and is what sm_120 and sm_121 have.
_GENERATED = ((10, 0), (10, 3))
_XQA = (((9, 0), (9, 0)), ((12, 0), (12, 1)))
# On sm_90 XQA is below the portable kernels, which are faster wherever both were measured. On an H200, 64 query and 8 key heads of
# 64, pages of 64, sinks, in a graph, microseconds: 13.0 where the portable one takes 7.3 (1 x 1024 tokens), 79.4 and 74.3
# (16 x 8192), 171 and 138 (256 x 1024), 32.4 and 8.7 (64 x 8192 in a window of 128). On sm_120 nothing was measured.
_XQA_PRIORITY_SM90 = 2


def _prefill() -> list[Declaration]:
    """Widths that FlashInfer's function takes. No log-sum-exp with sinks: whether the sink is in it is not documented."""
    made = []
    for width, v_width in ((128, 128), (192, 128), (256, 256)):
        for suffix, traits in (("", {"return_lse": any}), ("_sinks", {"sinks": {True}})):
            made.append(
                Declaration(
                    f"flashinfer_mha_prefill_{width}{suffix}",
                    "mha_prefill",
                    f"{_MODULES}.prefill:mha_prefill",
                    _GENERATED,
                    _RAGGED,
                    {"head_dim": width, "v_head_dim": v_width, "sliding_window": any, **traits},
                    # For the lengths, if the host does not have them.
                    frozenset({"waits"}),
                )
            )
    return made


def _extend() -> list[Declaration]:
    """See ``extend`` for the trait that no request states."""
    return [
        Declaration(
            f"flashinfer_mha_extend_with_kvcache_{width}",
            "mha_extend_with_kvcache",
            f"{_MODULES}.extend:mha_extend_with_kvcache",
            _GENERATED,
            _PAGED,
            {
                "head_dim": width,
                "v_head_dim": width,
                "page_size": {16, 32, 64},
                "sliding_window": any,
                "sinks": any,
                "is_causal": {True},
                "unused_slots_are_finite": {True},
            },
        )
        for width in (64, 128)
    ]


def _decode() -> list[Declaration]:
    """The generated kernels give a log-sum-exp, of which nothing is said where there are sinks; XQA gives none.

    Pages and numbers of query heads a key head are those that FlashInfer tests. XQA fills slots behind the end of a sequence with
    zeros when it loads them.
    """
    made = []
    implementation, shared = f"{_MODULES}.decode:mha_decode_with_kvcache", {"sliding_window": any}
    for width in (64, 128):
        heads = {"head_dim": width, "v_head_dim": width}
        for suffix, traits in (("", {"return_lse": any}), ("_sinks", {"sinks": {True}})):
            name = f"flashinfer_mha_decode_with_kvcache_{width}{suffix}"
            served = {**heads, **shared, "page_size": {16, 32, 64}, **traits}
            made.append(Declaration(name, "mha_decode_with_kvcache", implementation, _GENERATED, _PAGED, served))
        for arches in _XQA:
            priority = _XQA_PRIORITY_SM90 if arches[0] == (9, 0) else Declaration.priority
            name = f"flashinfer_xqa_mha_decode_with_kvcache_{width}_sm{arches[0][0]}0"
            served = {**heads, **shared, "page_size": {16, 32, 64, 128}, "gqa_ratio": {1, 2, 4, 8, 16}, "sinks": any}
            made.append(Declaration(name, "mha_decode_with_kvcache", implementation, arches, _PAGED, served, priority=priority))
    return made


DECLARATIONS = (*_prefill(), *_extend(), *_decode())
