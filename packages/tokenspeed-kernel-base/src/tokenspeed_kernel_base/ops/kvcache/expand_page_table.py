"""Converts page tables of large pages to page tables of small pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.pages import draw_table
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "kvcache",
    "expand_page_table",
    formats=("page_table",),
    traits={"factor": int},
    exact=True,
    varying=("batch",),
    capacity=("max_pages",),
)
def expand_page_table(page_table: Tensor, factor: int, out: Tensor | None = None) -> Tensor:
    """Computes the page table of a cache in which each page is split into ``factor`` equal smaller pages.

    ``out[b, j * factor + i] = page_table[b, j] * factor + i``, and -1 where ``page_table[b, j]`` is negative. An engine that
    manages pages of 256 tokens can call a kernel for pages of 64 tokens: it uses ``factor=4`` and the view
    ``cache.view(-1, 64, kv_heads, head_dim)`` of its cache.

    Args:
        page_table: int32 ``[batch, max_pages]``, page indices below ``2^31 / factor``; larger ones give unspecified entries. May
            be strided.
        factor: number of small pages in a large page, from 1 to 2^20.
        out: receives the result.

    Returns:
        int32 ``[batch, max_pages * factor]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import expand_page_table
        >>> expand_page_table(torch.tensor([[5, 2, -1]], dtype=torch.int32), factor=2)
        tensor([[10, 11,  4,  5, -1, -1]], dtype=torch.int32)

    Safe in CUDA graphs.
    """
    small = page_table.unsqueeze(2) * factor + torch.arange(factor, dtype=torch.int32, device=page_table.device)
    return torch.where(page_table.unsqueeze(2) >= 0, small, -1).flatten(1)


@expand_page_table.traits
def _(factor: int) -> dict[str, object]:
    return {"factor": factor}


@expand_page_table.check
def _(check: Checker, page_table: Tensor, factor: int) -> None:
    check.tensor("page_table", page_table, "batch max_pages", torch.int32)
    check.require(1 <= factor <= 1 << 20, "factor", "1 to 2^20", factor)


@expand_page_table.fake
def _(page_table: Tensor, factor: int) -> Tensor:
    return page_table.new_empty(page_table.shape[0], page_table.shape[1] * factor)


@recipe
def _inputs(batch: int, max_pages: int, factor: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"page_table": draw_table(draw, batch, max_pages), "factor": factor}


@expand_page_table.cases
def _() -> list[Case]:
    return [
        Case("one page", _inputs(1, 1, 4)),
        Case("pages of 256 as pages of 64", _inputs(9, 33, 4)),
        Case("as they are", _inputs(3, 7, 1)),
        Case("pages of 96 as pages of 32", _inputs(5, 100, 3)),
        Case("no sequences", _inputs(0, 8, 2)),
        Case("no pages", _inputs(4, 0, 2)),
        Case("256 sequences of 131072 tokens, pages of 256 as pages of 16", _inputs(256, 512, 16), large=True),
    ]


@expand_page_table.vary
def _(variation: Variation, page_table: Tensor) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        return {"page_table": absent_ids(page_table, page_table < 0)}
    return {"page_table": draw_table(variation.draw, *page_table.shape)}


@expand_page_table.cost
def _(page_table: Tensor, factor: int) -> Cost:
    return Cost(flops=1.0 * page_table.numel() * factor, bytes=nbytes(page_table) * (1.0 + factor))
