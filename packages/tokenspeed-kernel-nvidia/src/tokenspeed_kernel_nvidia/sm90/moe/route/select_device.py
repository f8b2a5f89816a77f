"""Selection of a token's experts by one warp."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.registers_device import float_of
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import exp2

NONE = -(1 << 31)  # for lanes without an expert, and for experts already chosen: below the sort key of every logit


def key_of(word: Uint32, expert: Int32) -> Int32:
    """Returns an int32 key by which a token's logits are ordered. If logits are equal, the smaller expert index has the larger key.

    The upper half has the order of the logits, which are bfloat16 in the upper half of ``word``: negative values have their bits
    inverted, and -0 equals 0.
    """
    number = Int32(word) >> 16
    number = cutlass.select_(number == -(1 << 15), Int32(0), number)
    return ((number ^ ((number >> 31) & 0x7FFF)) << 16) | (0xFFFF - expert)


def logit_of(key: Int32) -> Float32:
    """Returns the logit of a key."""
    number = key >> 16
    return float_of((number ^ ((number >> 31) & 0x7FFF)) << 16)


@cute.jit
def select_experts(keys: cute.Tensor, top_k: Int32) -> Any:
    """Selects the experts with the largest keys, one after another. All lanes of a warp call this function.

    Args:
        keys: int32, the keys of a lane's experts, see `key_of`; overwritten.
        top_k: the number of experts to select, at most 32.

    Returns:
        For lanes below ``top_k``, an expert, best first, and its weight. The weights are the softmax over the selected logits.
    """
    lane = cute.arch.lane_idx()
    largest, total, own = Float32(0.0), Float32(0.0), Float32(0.0)
    expert = Int32(-1)
    for slot in cutlass.range(top_k, unroll=1):
        best = keys[0]
        for each in cutlass.range_constexpr(1, cute.size(keys)):
            best = cutlass.max(best, keys[each])
        best = cute.arch.warp_redux_sync(best, "max")
        for each in cutlass.range_constexpr(cute.size(keys)):
            keys[each] = cutlass.select_(keys[each] == best, Int32(NONE), keys[each])
        logit = logit_of(best)
        largest = cutlass.select_(slot == 0, logit, largest)
        weight = exp2((logit - largest) * LOG2_E)
        total += weight
        own = cutlass.select_(lane == slot, weight, own)
        expert = cutlass.select_(lane == slot, 0xFFFF - (best & 0xFFFF), expert)
    return expert, own / total
