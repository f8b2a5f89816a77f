"""mha_extend_with_kvcache by FlashInfer: the declarations. The adapter is in ``extend_device``."""

from __future__ import annotations

import torch

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia.capability import blackwell, flashinfer_gap

for _width in (64, 128):
    register_kernel(
        "attention",
        "mha_extend_with_kvcache",
        name=f"flashinfer_mha_extend_with_kvcache_{_width}",
        solution="flashinfer",
        capability=blackwell(flashinfer_gap),
        signatures=format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16, torch.float16}),
        traits={
            "head_dim": _width,
            "v_head_dim": _width,
            "page_size": {16, 32, 64},
            "sliding_window": any,
            "sinks": any,
            "is_causal": {True},
        },
        priority=Priority.PERFORMANT,
        only_by_name="slots of the last pages that hold no token must be finite, which no trait says",
    )(f"{__name__}_device:mha_extend_with_kvcache")
