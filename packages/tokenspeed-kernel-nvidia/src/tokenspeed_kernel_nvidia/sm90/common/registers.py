"""Registers of warpgroups that leave each other some (``setmaxnreg``)."""

from __future__ import annotations

REGISTERS = 65536  # that a multiprocessor has


def left_by(threads: int, warpgroups: int, registers: int) -> int:
    """Returns how many registers a thread of a CTA's last warpgroup may have, a multiple of 8.

    A launch gives all threads of a CTA the same multiple of 8. Where that is less than all that a multiprocessor has, the rest is
    lost: 384 threads get 168 each, which is 504 for the threads of three warpgroups and not 512. A warpgroup that asks for more
    than others have left waits for ever.

    Args:
        threads: of the CTA.
        warpgroups: how many of its warpgroups have ``registers`` a thread.
    """
    given = REGISTERS // threads // 8 * 8 * threads
    return (given // 128 - warpgroups * registers) // 8 * 8
