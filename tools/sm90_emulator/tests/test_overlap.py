"""Tests which accesses of a PDL launch, before its wait, are errors. A PDL launch may start before the preceding kernel has
ended."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from sm90_emulator import EmulationError
from sm90_emulator.memory import Memory

from .snippets import run

WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
# WRITE: a thread writes its index to %d1. READ: a thread reads this index and writes it to %d0.
WRITE = "mad.wide.u32 %d51, %r0, 4, %d1; st.global.b32 [%d51], %r0;"
READ = """
mad.wide.u32 %d51, %r0, 4, %d1; ld{order}.global.b32 %r100, [%d51];
mad.wide.u32 %d50, %r0, 4, %d0; st.global.b32 [%d50], %r100;
"""
LOAD = READ.format(order="")
# The first thread copies 16 bytes to shared memory.
COPIES = {
    "bulk": """
mov.b32 %r1, shared; add.u32 %r2, %r1, 1024; mbarrier.init.shared.b64 [%r2], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 16, [%r2];
LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra LOOP;
""",
    "cp.async": "mov.b32 %r1, shared; cp.async.cg.shared.global [%r1], [%d1], 16; cp.async.wait_all;",
}


class Kernels:
    """Launches consecutive kernels on the same memory."""

    def __init__(self) -> None:
        self.memory = Memory(1 << 16)
        self.out, self.between, self.other = (self.memory.put(np.zeros(64, np.uint32)) for _ in range(3))

    def run(self, body: str, *, early: bool = True, to: int | None = None, threads: int = 32, seed: int = 0) -> None:
        run(body, self.memory, [self.out, self.between if to is None else to], threads, early=early, seed=seed)


def refused(first: str, second: str, threads: int = 32) -> bool:
    """Returns whether the second kernel causes an ``overlap`` error if it follows the first kernel."""
    kernels = Kernels()
    kernels.run(first, threads=threads)
    try:
        kernels.run(second, threads=threads)
    except EmulationError as error:
        if error.kind != "overlap":
            raise
        return True
    return False


def test_what_is_read_early() -> None:
    assert refused(WRITE + TRIGGER, LOAD)
    assert refused(TRIGGER + WRITE, LOAD)
    assert refused(WRITE + TRIGGER, TRIGGER + LOAD + WAIT)
    assert refused(WRITE + TRIGGER, WRITE)  # the second write may happen before the first
    assert not refused(WRITE + TRIGGER, WAIT + LOAD)
    assert not refused(WRITE, LOAD)  # without a trigger, the second kernel starts after the first one has ended
    # Loads of memory that another kernel may write at the same time are no errors if they are volatile or relaxed.
    for order in (".relaxed.gpu", ".acquire.gpu", ".volatile"):
        assert not refused(WRITE + TRIGGER, READ.format(order=order))


@pytest.mark.parametrize("kind", COPIES)
def test_what_is_copied_early(kind: str) -> None:
    assert refused(WRITE + TRIGGER, COPIES[kind], threads=1)
    assert not refused(WRITE + TRIGGER, WAIT + COPIES[kind], threads=1)


def test_other_memory_and_ordinary_launches() -> None:
    kernels = Kernels()
    kernels.run(WRITE + TRIGGER)
    kernels.run(LOAD, to=kernels.other)
    kernels.run(WRITE + TRIGGER)
    kernels.run(LOAD, early=False)


def test_a_barrier_is_met_with_warps_that_have_waited() -> None:
    second_waits = f"setp.lt.u32 %p1, %r0, 32; @%p1 bra ON; {WAIT} ON: "
    for seed in range(3):
        kernels = Kernels()
        kernels.run(WRITE + TRIGGER, threads=64)
        kernels.run(second_waits + "bar.sync 0;" + LOAD, threads=64, seed=seed)
    assert refused(WRITE + TRIGGER, second_waits + LOAD, threads=64)
    assert refused(WRITE + TRIGGER, "bar.sync 0;" + second_waits + LOAD, threads=64)


def test_a_kernel_in_between_that_lets_the_next_begin_before_it_has_waited() -> None:
    for between, allowed in ((TRIGGER + WAIT, False), (WAIT + TRIGGER, True)):
        kernels = Kernels()
        kernels.run(WRITE + TRIGGER)
        kernels.run(between, to=kernels.other)
        if allowed:
            kernels.run(LOAD)
        else:
            with pytest.raises(EmulationError, match="overlap"):
                kernels.run(LOAD)


def test_work_of_others_in_between_ends_the_overlap() -> None:
    kernels = Kernels()
    kernels.run(WRITE + TRIGGER)
    ctypes.memset(kernels.between, 7, 256)
    kernels.run(LOAD)
    assert (kernels.memory.get(kernels.out, np.uint32, 32) == 0x07070707).all()
