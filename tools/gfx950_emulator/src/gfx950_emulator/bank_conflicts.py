"""Bank conflicts of LDS accesses.

A wave's access runs in *phases*: groups of lanes that access the banks together. Banks are 4 bytes wide. A bank accesses one dword
per cycle, for any number of lanes that read (or write) it. The cycles of a phase are the number of different dwords in its
busiest bank, at least one. Every cycle after the first counts as a conflict, as in the hardware counter SQ_LDS_BANK_CONFLICT (ROCm
Compute Profiler, "Local data share").

The lanes of each phase (sources: `gfx950_emulator.hardware`):

=====================  =====  ==========================================================  =============================
gfx950                 banks  lanes of a phase                                            from
=====================  =====  ==========================================================  =============================
read, 1 to 4 bytes     64     0-63                                                        TRITON 9662, by rule
read, 8 bytes          64     0-31, 32-63                                                 HK, measured
read, 12 bytes         32     0-3 20-23, 4-7 16-19, 8-11 28-31, 12-15 24-27, and + 32     HK, measured
read, 16 bytes         64     0-3 12-15 20-23 24-27, 4-7 8-11 16-19 28-31, and + 32       HK, measured; TRITON 11365
write, 1 to 4 bytes    32     0-31, 32-63                                                 CK's rule for 32 banks
write, 8 bytes         32     0-15, 16-31, ...                                            HK, measured
write, 12 and 16       32     0-7, 8-15, ...                                              CK (16 bytes; 12 by analogy)
=====================  =====  ==========================================================  =============================

gfx942 writes in the same phases, and has 32 banks for reads:

=====================  ==========================================================  =============================
gfx942                 lanes of a phase                                            from
=====================  ==========================================================  =============================
read, 1 to 4 bytes     0-31, 32-63                                                 CK's rule for 32 banks
read, 8 bytes          0-15, 16-31, ...                                            the same rule
read, 12 and 16 bytes  0-3 20-23, 4-7 16-19, 8-11 28-31, 12-15 24-27, and + 32     CK (16 bytes; 12 by analogy)
=====================  ==========================================================  =============================

ds_read2 and ds_write2 are two accesses. Transposing reads (8 bytes) count as 8-byte reads, because no other facts about them are
published. Atomics count as writes, and lanes that change the same dword are serialised (ROCPROF, "address conflict").
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gfx950_emulator.constants import WAVE
from gfx950_emulator.hardware import LDS_WRITE_BANKS, MI355X, Device


def _both_halves(*groups: tuple[int, ...]) -> list[list[int]]:
    """Returns phases that consist of runs of four adjacent lanes. Each entry of ``groups`` lists the first lanes of one phase's
    runs, among lanes 0 to 31. Lanes 32 to 63 have the same phases.
    """
    return [[half + first + i for first in group for i in range(4)] for half in (0, 32) for group in groups]


def _consecutive(lanes: int) -> list[list[int]]:
    return [list(range(first, first + lanes)) for first in range(0, WAVE, lanes)]


@lru_cache(maxsize=32)
def phases(size: int, store: bool, device: Device = MI355X) -> tuple[int, np.ndarray]:
    """Returns the number of banks, and the lanes of each phase, int64 [phases, lanes], for an access of ``size`` bytes per lane."""
    few = device.lds_read_banks == 32
    if store:
        banks, groups = LDS_WRITE_BANKS, _consecutive(32 if size <= 4 else 16 if size == 8 else 8)
    elif size == 12 or (few and size == 16):
        banks, groups = 32, _both_halves((0, 20), (4, 16), (8, 28), (12, 24))
    elif size == 16:
        banks, groups = device.lds_read_banks, _both_halves((0, 12, 20, 24), (4, 8, 16, 28))
    else:
        banks, groups = device.lds_read_banks, _consecutive((WAVE if size <= 4 else 32) // (2 if few else 1))
    return banks, np.array(groups)


def phase_count(size: int, store: bool, device: Device = MI355X) -> int:
    """Returns the number of cycles that the LDS banks need for an access without conflicts."""
    return len(phases(size, store, device)[1])


def conflict_cycles(offsets: np.ndarray, size: int, store: bool, atomic: bool = False, device: Device = MI355X) -> np.ndarray:
    """Returns the extra cycles that each wave needs because of LDS bank conflicts.

    Args:
        offsets: int64 [waves, 64], byte offsets in LDS; negative for inactive lanes.
        size: bytes per lane: 1, 2, 4, 8, 12 or 16.
        store: whether the access writes.
        atomic: whether lanes that access the same dword also conflict.
        device: the device, which determines banks and phases.

    Returns:
        int64 [waves].
    """
    banks, lanes = phases(size, store, device)
    waves, words = len(offsets), max(1, size // 4)
    dwords = (offsets >> 2)[:, lanes][..., None] + np.arange(words)
    idle = (offsets < 0)[:, lanes]
    rows = waves * len(lanes)
    dwords = np.where(idle[..., None], -1, dwords).reshape(rows, -1)
    dwords.sort(axis=1)
    counted = dwords >= 0
    if not atomic:
        counted[:, 1:] &= dwords[:, 1:] != dwords[:, :-1]
    row, column = np.nonzero(counted)
    load = np.bincount(row * banks + dwords[row, column] % banks, minlength=rows * banks).reshape(rows, banks)
    return np.maximum(load.max(axis=1) - 1, 0).reshape(waves, -1).sum(axis=1)


class ConflictCache:
    """Memoises `conflict_cycles`, because loops access LDS in few patterns."""

    KEPT = 4096

    def __init__(self, device: Device = MI355X) -> None:
        self._device, self._period = device, 4 * device.lds_read_banks  # banks repeat after this many bytes
        self._known: dict[tuple[int, bool, bool, bytes], np.ndarray] = {}

    def cycles(self, offsets: np.ndarray, size: int, store: bool, atomic: bool) -> np.ndarray:
        # Banks repeat. So patterns whose offsets differ by a multiple of the period have the same conflicts.
        base = int(offsets.max()) // self._period * self._period
        key = (size, store, atomic, np.where(offsets < 0, np.iinfo(np.int64).min, offsets - base).tobytes())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self.KEPT:
                self._known.clear()
            known = self._known[key] = conflict_cycles(offsets, size, store, atomic, self._device)
        return known
