"""mha_prefill by FlashInfer: the declarations. The adapter is in ``prefill_device``.

An LSE with sinks is not supported, because FlashInfer does not document whether its LSE includes the sink.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia.capability import blackwell, flashinfer_gap

# Pairs (head_dim, v_head_dim) that FlashInfer's function supports.
_WIDTHS = ((128, 128), (192, 128), (256, 256))

for _width, _v_width in _WIDTHS:
    for _suffix, _traits in (("", {"return_lse": any}), ("_sinks", {"sinks": {True}})):
        register_kernel(
            "attention",
            "mha_prefill",
            name=f"flashinfer_mha_prefill_{_width}{_suffix}",
            solution="flashinfer",
            capability=blackwell(flashinfer_gap),
            signatures=format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16}),
            traits={"head_dim": _width, "v_head_dim": _v_width, "sliding_window": any, **_traits},
            priority=Priority.PERFORMANT,
            tags={"waits"},  # waits for the device if cu_seqlens_cpu is not given
        )(f"{__name__}_device:mha_prefill")
