"""Register budgets of warpgroups that reallocate registers (``setmaxnreg``)."""

from __future__ import annotations

REGISTERS = 65536  # 32-bit registers of an SM


def left_by(threads: int, warpgroups: int, registers: int) -> int:
    """Returns how many registers per thread are left for a CTA's last warpgroup, a multiple of 8.

    A launch gives every thread of a CTA the same number of registers: an SM's registers divided by the threads, rounded down to a
    multiple of 8. The remainder is lost. With 384 threads, each gets 168 registers, so the three warpgroups' numbers sum to 504,
    not 512. A warpgroup that requests more registers than the others have released waits forever.

    Args:
        threads: threads per CTA.
        warpgroups: the number of the CTA's other warpgroups.
        registers: registers per thread of these other warpgroups.
    """
    given = REGISTERS // threads // 8 * 8 * threads
    return (given // 128 - warpgroups * registers) // 8 * 8
