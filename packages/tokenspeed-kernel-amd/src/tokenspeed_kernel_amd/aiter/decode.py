"""Declarations of AITER's kernels for mha_decode_with_kvcache. The adapter is in ``decode_device``."""

from __future__ import annotations

from tokenspeed_kernel_amd.aiter.package import UNTRIED
from tokenspeed_kernel_amd.aiter.paged import SIGNATURES, WIDTHS, traits
from tokenspeed_kernel_amd.capability import AITER
from tokenspeed_kernel_base.registry import register_kernel

for _width in WIDTHS:
    register_kernel(
        "attention",
        "mha_decode_with_kvcache",
        name=f"aiter_mha_decode_with_kvcache_{_width}",
        solution="aiter",
        capability=AITER,
        signatures=SIGNATURES,
        traits=traits(_width),
        priority=UNTRIED,
    )(f"{__name__}_device:mha_decode_with_kvcache")
