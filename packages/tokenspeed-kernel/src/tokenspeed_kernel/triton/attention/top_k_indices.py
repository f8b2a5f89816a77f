"""The largest scores of each row: a sample brackets the least of them, and few scores lie in the bracket. One program a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, dense, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Search(NamedTuple):
    """How a row is searched.

    Attributes:
        block: scores at once.
        sample: scores of a sample, at most.
        candidates: scores of a bracket, at most; rows that are no longer need no sample.
        warps: of a program.
    """

    block: int
    sample: int
    candidates: int
    warps: int


# A program reads its row from the L2 cache but for the first time, and waits for each block: 8 warps with 32 scores a thread keep
# 32 KB on the way. 16 warps with half of that each have too few registers, and spill. The counts of a block take 16 bits each.
_BLOCK, _WARPS = 8192, 8
_SHORT_ROW, _FEW_WARPS = 2048, 4  # 16 scores a thread
_LEAST_BLOCK = 64  # is divided by 16 parts
# One score in 64 is in the sample, so that with top 2048 of 65536 the bracket reaches from the 9th to the 55th of 1024: it holds
# 2,900 scores on average.
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLED = 1024, 4096, 64
_CANDIDATES = 4096  # 16 a thread


def search_of(keys: int) -> Search:
    """The search in rows of so many scores."""
    block = min(max(next_power_of_2(keys), _LEAST_BLOCK), _BLOCK)
    sample = min(max(next_power_of_2(keys // _SAMPLED), _LEAST_SAMPLE), _MOST_SAMPLE)
    if keys <= _SHORT_ROW:
        return Search(block, sample, block, _FEW_WARPS)
    return Search(block, sample, _CANDIDATES, _WARPS)


@register_kernel(
    "attention",
    "top_k_indices",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("scores", "dense", FLOATS),
    traits={"top_k": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def top_k_indices(scores: Tensor, top_k: int, lengths: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `tokenspeed_kernel.top_k_indices`."""
    rows, keys = scores.shape
    if out is None:
        out = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    search = search_of(max(keys, 1))
    candidates = torch.empty(rows, search.candidates, dtype=torch.int32, device=scores.device)
    device_code.top_k_indices_kernel[(rows,)](
        scores,
        dense(lengths),
        candidates,
        out,
        *scores.stride(),
        *out.stride(),
        keys,
        top_k,
        SEARCH=search,
        num_warps=search.warps,
    )
    return out
