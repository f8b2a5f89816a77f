"""What AITER's kernels for paged caches have in common, for their declarations."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.signature import format_signatures

SIGNATURES = format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16, torch.float16})
# One kernel is declared for each, because values must be as wide as keys, and traits are constrained one by one.
WIDTHS = (64, 128)


def traits(width: int, **others: Any) -> dict[str, Any]:
    """Traits of a kernel for heads of this width. ``paged_device`` says why small pages are not served."""
    return {"head_dim": width, "v_head_dim": width, "page_size": {128, 256}, "sliding_window": any, "sinks": any, **others}
