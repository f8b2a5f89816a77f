"""Which program attends to which keys, for sequences whose rows fill tiles of their own: decided on the device, by a kernel.

Programs are large here: one a multiprocessor, and a last wave of few of them takes as long as a full one. So several shares (blocks
of keys of a unit, see `_split_kv`) are tried, and the one taken for which the waves take least. What was decided is a table that
the programs read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._split_kv import SplitPlan
from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


_SHARES = 16
_WAVES = 3  # units that work is cut into at most: so many waves
_LEAST = 2  # blocks of a unit, at least
_LENGTHS_AT_ONCE = 256


class Schedule(NamedTuple):
    """Units of sequences.

    Attributes:
        units: int32 ``[units, 4]``: sequence (-1: no unit), first block, block behind the last, and where the partial result goes
            (-1: there is but this unit, whose result is not partial).
        parts: int32 ``[batch, 2]``: where the first partial result of a sequence is, and how many it has (1: none).
        plan: how many partial results there can be, in all and of a sequence.
    """

    units: Tensor
    parts: Tensor
    plan: SplitPlan


def schedule_units(
    cache_seqlens: Tensor, capacity: int, reach: int, tiles: int, multiprocessors: int, block_n: int, early: bool
) -> Schedule | None:
    """Units for sequences of at most ``capacity`` tokens with ``tiles`` tiles of rows each; None where all remain whole.

    ``reach``: of how many last tokens of a sequence some query sees one, where there is a window; -1 where there is none.
    """
    batch = cache_seqlens.shape[0]
    longest = capacity if reach < 0 else min(capacity, reach + block_n)
    if longest <= _LEAST * block_n or tiles >= multiprocessors or batch * tiles >= 16 * multiprocessors:
        return None
    wave = max(1, multiprocessors // tiles)
    finest_units = wave * _WAVES
    most = min(cdiv(longest, _LEAST * block_n), finest_units)
    count = min(batch + finest_units, batch * most)
    units = torch.empty((count, 4), dtype=torch.int32, device=cache_seqlens.device)
    parts = torch.empty((batch, 2), dtype=torch.int32, device=cache_seqlens.device)
    at_once = min(_LENGTHS_AT_ONCE, max(16, next_power_of_2(batch)))
    device_code.schedule_kernel[(batch,)](
        cache_seqlens,
        units,
        parts,
        batch,
        capacity,
        reach,
        wave,
        finest_units,
        count,
        LEAST=_LEAST,
        BLOCK_N=block_n,
        SHARES=_SHARES,
        AT_ONCE=at_once,
        EARLY=early,
        num_warps=4,
    )
    # A sequence that is split has more blocks than a share, and there are no more of such than shares.
    partials = min(finest_units + min(batch, finest_units), count)
    return Schedule(units, parts, SplitPlan(batch, partials, most, _LEAST, wave, finest_units, 1, at_once))
