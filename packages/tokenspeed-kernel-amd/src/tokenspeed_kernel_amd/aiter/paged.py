"""Signatures and traits that the declarations of AITER's paged-cache kernels share."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.signature import format_signatures

SIGNATURES = format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16, torch.float16})
# Each head_dim has its own kernel, because v_head_dim must equal head_dim and a trait cannot refer to another trait.
WIDTHS = (64, 128)


def traits(width: int, **others: Any) -> dict[str, Any]:
    """Returns the traits of a paged-cache kernel whose head_dim is ``width``. ``paged_device`` says why small pages are not
    supported."""
    return {"head_dim": width, "v_head_dim": width, "page_size": {128, 256}, "sliding_window": any, "sinks": any, **others}
