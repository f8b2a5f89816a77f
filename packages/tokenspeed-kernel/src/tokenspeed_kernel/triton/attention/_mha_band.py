"""Causal attention in a narrow window. A program loads all keys that a tile of packed query rows sees, and computes the softmax
over all these keys at once.

A tile of few positions sees two ranges of keys: MAIN keys up to its first position, and at most TAIL keys at later positions. The
window's start masks only MAIN keys, and the causal diagonal only TAIL keys. A program computes one tile without a loop, so that all
its loads are in flight together.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.common import next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


class Band(NamedTuple):
    """The tunable part of a program's configuration.

    Attributes:
        block_m: query rows of a tile.
        num_warps: warps of a program.
    """

    block_m: int
    num_warps: int


class Tile(NamedTuple):
    """The kernel's compile-time constants: query rows, numbers of MAIN and TAIL keys, and padded columns of keys and of values.

    ``at_once``: how many sequences a program compares at a time when it searches for its sequence.
    """

    block_m: int
    main: int
    tail: int
    block_d: int
    block_w: int
    at_once: int


def band_widths(block_m: int, group: int, window_left: int) -> tuple[int, int]:
    """Returns ``(MAIN, TAIL)``, the numbers of keys of `band_kernel`'s two blocks. The kernel requires ``TAIL <= window_left + 1``.

    The TAIL keys are those after a tile's first position. The kernel does not mask TAIL keys that are before a row's window. So no
    row's window may start after the first TAIL key.
    """
    later = (block_m - 1) // group + (block_m % group != 0)  # positions of a tile after its first position
    return max(16, next_power_of_2(window_left + 1)), max(16, next_power_of_2(later))


def attend(band: Band, call: Call) -> None:
    """Launches `band_kernel` for a call."""
    slots = call.slots(band.block_m)
    if slots == 0:
        return
    main, tail = band_widths(band.block_m, call.group, call.window_left)
    device_code.band_kernel[(slots * call.kv_heads,)](
        *call.operands(),
        **call.constants(),
        TILE=Tile(
            block_m=band.block_m,
            main=main,
            tail=tail,
            block_d=max(16, next_power_of_2(call.q.shape[2])),
            block_w=max(16, next_power_of_2(call.v.shape[-1])),
            at_once=call.at_once,
        ),
        num_warps=band.num_warps,
        num_stages=1,
    )
