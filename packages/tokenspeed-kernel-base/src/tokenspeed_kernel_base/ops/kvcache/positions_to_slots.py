"""Converts positions in sequences to slots of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks
from tokenspeed_kernel_base.ops.kvcache.pages import draw_table
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "kvcache",
    "positions_to_slots",
    formats=("positions",),
    traits={"page_size": int, "one_position": bool},
    exact=True,
    in_place={"out": ("positions",)},
    varying=("tokens", "batch"),
    capacity=("max_pages",),
)
def positions_to_slots(
    positions: Tensor, page_table: Tensor, page_size: int, cu_seqlens_q: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Maps positions of each token's sequence to slots of the paged cache.

    ``slot = page_table[b, position // page_size] * page_size + position % page_size`` for a token of sequence b. The slot is -1
    if the position is negative, lies past the end of the page table, or its page table entry is negative.

    If each token has one position, which is its own, the result is the ``slot_mapping`` of `store_kv_cache` and of the other
    operators that write to the cache. With several positions per token, this operator converts the result of `top_k_indices` to the
    ``indices`` of `mla_sparse_with_kvcache`.

    Args:
        positions: int32 or int64 ``[tokens]`` or ``[tokens, top_k]``, tokens sequence by sequence. May be strided.
        page_table: int32 ``[batch, max_pages]``, page indices below ``2^31 / page_size``.
        page_size: tokens of a page, from 1 to ``2^31 - 1``.
        cu_seqlens_q: int32 ``[batch + 1]``, where the tokens of each sequence begin. None means that every sequence has
            ``tokens / batch`` tokens.
        out: receives the result; may be positions.

    Returns:
        Slots in the dtype and shape of positions.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Values of cu_seqlens_q are
            checked only if they lie in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import positions_to_slots
        >>> page_table = torch.tensor([[5, 2, -1]], dtype=torch.int32)
        >>> positions_to_slots(torch.tensor([[0, 1, 3, 4, -1]], dtype=torch.int32), page_table, page_size=2)
        tensor([[10, 11,  5, -1, -1]], dtype=torch.int32)

        The slot mapping of a batch: three new tokens of the first sequence, and one of the second.

        >>> page_table = torch.tensor([[5, 2], [7, 4]], dtype=torch.int32)
        >>> cu_seqlens_q = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> positions_to_slots(torch.tensor([0, 1, 2, 3]), page_table, page_size=2, cu_seqlens_q=cu_seqlens_q)
        tensor([10, 11,  4,  9])

    Safe in CUDA graphs.
    """
    tokens, (batch, max_pages) = len(positions), page_table.shape
    if not positions.numel() or not page_table.numel():
        return torch.full_like(positions, -1, memory_format=torch.contiguous_format)
    token = torch.arange(tokens, device=positions.device)
    if cu_seqlens_q is None:
        sequence = token // (tokens // batch)
    else:
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token.to(torch.int32), right=True)
    entry = torch.where(positions >= 0, positions // page_size, max_pages)
    page = page_table[sequence if positions.dim() == 1 else sequence.unsqueeze(1), entry.clamp(max=max_pages - 1)]
    return torch.where((entry < max_pages) & (page >= 0), page * page_size + positions % page_size, -1)


@positions_to_slots.traits
def _(positions: Tensor, page_size: int) -> dict[str, object]:
    return {"page_size": page_size, "one_position": positions.dim() == 1}


@positions_to_slots.check
def _(check: Checker, positions: Tensor, page_table: Tensor, page_size: int, cu_seqlens_q: Tensor | None) -> None:
    check.tensor("positions", positions, "tokens" if positions.dim() == 1 else "tokens top_k", INTS)
    check.tensor("page_table", page_table, "batch max_pages", torch.int32)
    check.require(1 <= page_size < 1 << 31, "page_size", "from 1 to 2^31 - 1", page_size)
    _checks.check_new_tokens_of(check, "positions", cu_seqlens_q)


@positions_to_slots.check_values(host=("cu_seqlens_q",))
def _(check: Checker, positions: Tensor, cu_seqlens_q: Tensor | None) -> None:
    _checks.check_values_offsets(check, "cu_seqlens_q", cu_seqlens_q, positions.shape[0], "positions")


@positions_to_slots.fake
def _(positions: Tensor) -> Tensor:
    return torch.empty_like(positions, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    tokens: int,
    top_k: int | None,
    batch: int,
    max_pages: int,
    page_size: int,
    q_lens: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int32,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws positions from -1 to one page past the last page. If ``top_k`` is None, each token has one position."""
    shape = (tokens,) if top_k is None else (tokens, top_k)

    def make(draw: Draw) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "positions": draw.integers(-1, max_pages * page_size + page_size, *shape, dtype=dtype),
            "page_table": draw_table(draw, batch, max_pages),
            "page_size": page_size,
        }
        return arguments if q_lens is None else {**arguments, "cu_seqlens_q": draw.cumulative(q_lens)}

    return make


@positions_to_slots.cases
def _() -> list[Case]:
    return [
        Case("one token, pages of 1", _inputs(1, 5, 1, 9, 1)),
        Case("pages of 64, two tokens of each", _inputs(6, 100, 3, 5, 64)),
        Case("pages of 24, tokens of none, one and more", _inputs(9, 33, 4, 7, 24, q_lens=[0, 5, 1, 3])),
        Case("no pages", _inputs(2, 9, 2, 0, 16)),
        Case("no tokens", _inputs(0, 9, 0, 3, 16)),
        Case("one position, pages of 16, int64", _inputs(5, None, 5, 7, 16, dtype=torch.int64)),
        Case("one position, tokens of none, one and many", _inputs(305, None, 4, 7, 24, q_lens=[0, 131, 1, 173])),
        Case("several positions, int64", _inputs(4, 3, 2, 5, 8, dtype=torch.int64)),
        Case("deepseek-v3.2 decode 128", _inputs(128, 2048, 128, 1024, 64), large=True),
        Case("deepseek-v3.2 prefill 4096", _inputs(4096, 2048, 2, 256, 64, q_lens=[1000, 3096]), large=True),
        Case("decode 128, one position", _inputs(128, None, 128, 1024, 64, dtype=torch.int64), large=True),
        Case("prefill 8 of 2048, one position", _inputs(16384, None, 8, 64, 64, q_lens=[2048] * 8, dtype=torch.int64), large=True),
    ]


@positions_to_slots.vary
def _(
    variation: Variation, positions: Tensor, page_table: Tensor, page_size: int, cu_seqlens_q: Tensor | None
) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        end = page_table.shape[1] * page_size
        changed = absent_ids(positions, (positions < 0) | (positions >= end), end)
        return {"positions": changed, "page_table": absent_ids(page_table, page_table < 0)}
    made = {"page_table": draw_table(variation.draw, *page_table.shape), "positions": positions}
    if variation.want is Want.CAPTURED:
        most = max(page_table.shape[1] * page_size, 1)
        made["positions"] = variation.draw.integers(-1, most, *positions.shape, dtype=positions.dtype)
        if cu_seqlens_q is not None:
            made["cu_seqlens_q"] = variation.draw.cumulative(variation.parts("q_lens", len(cu_seqlens_q) - 1, len(positions)))
    return made


@positions_to_slots.work
def _(cu_seqlens_q: Tensor | None) -> dict[str, list[int]]:
    return {} if cu_seqlens_q is None else {"q_lens": cu_seqlens_q.diff().tolist()}


@positions_to_slots.cost
def _(positions: Tensor, page_table: Tensor, cu_seqlens_q: Tensor | None) -> Cost:
    pages = min(page_table.numel(), positions.numel()) * 4
    return Cost(flops=2.0 * positions.numel(), bytes=float(2 * nbytes(positions) + nbytes(cu_seqlens_q) + pages))
