"""Register budgets of warpgroups that reallocate registers (``setmaxnreg``)."""

from __future__ import annotations

REGISTERS = 65536  # 32-bit registers of an SM


def left_by(threads: int, warpgroups: int, registers: int) -> int:
    """Returns how many registers a thread of the CTA's last warpgroup may have, a multiple of 8.

    A launch gives every thread of a CTA the same number of registers, a multiple of 8. The remainder of this division is lost. With
    384 threads, each gets 168 registers, so three warpgroups have 504 per thread slot, not 512. A warpgroup that requests more than
    the others have released waits forever.

    Args:
        threads: threads of the CTA.
        warpgroups: how many of its warpgroups have ``registers`` registers a thread.
    """
    given = REGISTERS // threads // 8 * 8 * threads
    return (given // 128 - warpgroups * registers) // 8 * 8
