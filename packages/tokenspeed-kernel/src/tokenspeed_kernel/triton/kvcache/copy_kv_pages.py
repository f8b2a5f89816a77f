"""Copies whole pages. A program copies one block of a page."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel.triton.kvcache._pages import BLOCK, PAGES, WARPS, as_integers, page_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

pages_device = DeviceModule("tokenspeed_kernel.triton.kvcache._pages_device")


@register_kernel(
    "kvcache",
    "copy_kv_pages",
    solution="triton",
    capability=TRITON,
    signatures=PAGES,
    traits={"other_source": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def copy_kv_pages(cache: Tensor, source_pages: Tensor, target_pages: Tensor, source: Tensor | None) -> None:
    """Implements the operator `tokenspeed_kernel.copy_kv_pages`, which documents the arguments."""
    origin = cache if source is None else source
    if not source_pages.numel() or not cache.numel() or not origin.numel():
        return
    old, new = as_integers(origin, cache)
    page = page_of(new)
    pages_device.copy_pages_kernel[(len(source_pages) * cdiv(page.size, BLOCK),)](
        old,
        new,
        source_pages,
        target_pages,
        *old.stride(),
        *new.stride(),
        source_pages.stride(0),
        target_pages.stride(0),
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
