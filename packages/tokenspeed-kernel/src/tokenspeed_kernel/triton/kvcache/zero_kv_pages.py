"""Clears whole pages. A program clears one block of a page."""

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
    "zero_kv_pages",
    solution="triton",
    capability=TRITON,
    signatures=PAGES,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def zero_kv_pages(cache: Tensor, pages: Tensor) -> None:
    """Implements the operator `tokenspeed_kernel.zero_kv_pages`, which documents the arguments."""
    if not pages.numel() or not cache.numel():
        return
    (stored,) = as_integers(cache)
    page = page_of(stored)
    pages_device.zero_pages_kernel[(len(pages) * cdiv(page.size, BLOCK),)](
        stored, pages, *stored.stride(), pages.stride(0), PAGE=page, BLOCK=BLOCK, num_warps=WARPS
    )
