"""Computes, on the device, the split-KV schedule of MLA: which program attends to which keys of which sequence.

MLA's programs are so large that only one fits on an SM/CU. So a last wave of few programs takes as long as a full wave. The
kernel therefore compares several sizes of a work item (in blocks of keys, see `_split_kv`), and uses the size whose waves take the
least time. The schedule is a table that the attention programs read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._split_kv import SplitPlan
from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


_CANDIDATES = 16
_WAVES = 3  # the largest number of waves of work items
_LEAST = 2  # the fewest key blocks of a work item
_LENGTHS_AT_ONCE = 256


class Schedule(NamedTuple):
    """The work items into which the keys of a batch's sequences are split.

    Attributes:
        work_items: int32 ``[work items, 4]``: the sequence (-1: unused), the first key block, the end block (exclusive), and the
            index of the partial result. Index -1 marks the only work item of its sequence, which writes the final result.
        parts: int32 ``[batch, 2]``: index of a sequence's first partial result, and the number of its partial results (1: not
            split).
        plan: upper bounds of the number of partial results, in total and per sequence.
    """

    work_items: Tensor
    parts: Tensor
    plan: SplitPlan


def schedule_work_items(
    cache_seqlens: Tensor, capacity: int, reach: int, tiles: int, sm_count: int, block_n: int, early: bool
) -> Schedule | None:
    """Launches `schedule_kernel` for sequences of at most ``capacity`` keys, with ``tiles`` tiles of query rows each.

    Returns None, without a launch, if no sequence is split.

    ``reach``: with a window, how many of a sequence's last keys some query sees; else -1.
    """
    batch = cache_seqlens.shape[0]
    longest = capacity if reach < 0 else min(capacity, reach + block_n)
    if longest <= _LEAST * block_n or tiles >= sm_count or batch * tiles >= 16 * sm_count:
        return None
    wave = max(1, sm_count // tiles)
    finest_work_items = wave * _WAVES
    most = min(cdiv(longest, _LEAST * block_n), finest_work_items)
    count = min(batch + finest_work_items, batch * most)
    work_items = torch.empty((count, 4), dtype=torch.int32, device=cache_seqlens.device)
    parts = torch.empty((batch, 2), dtype=torch.int32, device=cache_seqlens.device)
    at_once = min(_LENGTHS_AT_ONCE, max(16, next_power_of_2(batch)))
    device_code.schedule_kernel[(batch,)](
        cache_seqlens,
        work_items,
        parts,
        batch,
        capacity,
        reach,
        wave,
        finest_work_items,
        count,
        LEAST=_LEAST,
        BLOCK_N=block_n,
        CANDIDATES=_CANDIDATES,
        AT_ONCE=at_once,
        EARLY=early,
        num_warps=4,
    )
    # A split sequence has more blocks than one work item, so at most ``finest_work_items`` sequences are split.
    partials = min(finest_work_items + min(batch, finest_work_items), count)
    return Schedule(work_items, parts, SplitPlan(batch, partials, most, _LEAST, wave, finest_work_items, 1, at_once))
