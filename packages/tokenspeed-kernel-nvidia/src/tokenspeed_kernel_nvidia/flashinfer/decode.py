"""mha_decode_with_kvcache by FlashInfer: the declarations. The adapter is in ``decode_device``.

On sm_100 and sm_103, FlashInfer calls TensorRT-LLM's generated kernels. On sm_90, sm_120 and sm_121, it calls its XQA kernels. The
generated kernels return an LSE, but FlashInfer does not document whether this LSE includes a sink. XQA returns no LSE. The declared
page sizes and GQA ratios are those that FlashInfer tests. XQA replaces slots past the end of a sequence by zeros when it loads
them.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia.capability import blackwell, blackwell_workstation, flashinfer_gap, hopper

_SIGNATURES = format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16, torch.float16})
_ADAPTER = f"{__name__}_device:mha_decode_with_kvcache"
# On sm_90, XQA is ranked below the portable kernels, which were faster in every measurement. Microseconds on an H200, XQA and
# portable (64 query heads and 8 KV heads of 64, pages of 64, sinks, in a graph): 13.0 and 7.3 (1 x 1024 tokens), 79.4 and 74.3 (16
# x 8192), 171 and 138 (256 x 1024), 32.4 and 8.7 (64 x 8192 in a window of 128). XQA was not measured on sm_120.
_XQA_PRIORITY_SM90 = 2

for _width in (64, 128):
    for _suffix, _traits in (("", {"return_lse": any}), ("_sinks", {"sinks": {True}})):
        register_kernel(
            "attention",
            "mha_decode_with_kvcache",
            name=f"flashinfer_mha_decode_with_kvcache_{_width}{_suffix}",
            solution="flashinfer",
            capability=blackwell(flashinfer_gap),
            signatures=_SIGNATURES,
            traits={
                "head_dim": _width,
                "v_head_dim": _width,
                "page_size": {16, 32, 64},
                "sliding_window": any,
                **_traits,
            },
            priority=Priority.PERFORMANT,
        )(_ADAPTER)
    for _arch, _capability, _priority in (
        ("sm90", hopper(flashinfer_gap), _XQA_PRIORITY_SM90),
        ("sm120", blackwell_workstation(flashinfer_gap), Priority.PERFORMANT),
    ):
        register_kernel(
            "attention",
            "mha_decode_with_kvcache",
            name=f"flashinfer_xqa_mha_decode_with_kvcache_{_width}_{_arch}",
            solution="flashinfer",
            capability=_capability,
            signatures=_SIGNATURES,
            traits={
                "head_dim": _width,
                "v_head_dim": _width,
                "page_size": {16, 32, 64, 128},
                "gqa_ratio": {1, 2, 4, 8, 16},
                "sliding_window": any,
                "sinks": any,
            },
            priority=_priority,
        )(_ADAPTER)
