"""Tests how threads cooperate (lanes of a warp, warps of a CTA, CTAs of a cluster and of a grid), and the errors that the emulator
finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sm90_emulator import EmulationError, UnknownInstruction
from sm90_emulator.memory import Memory

from .snippets import LANES, lanes, run

NUMBERS = np.random.default_rng(1).integers(0, 2**32, LANES, dtype=np.uint32)
ME = np.arange(LANES)
STORE = "mad.wide.u32 %d50, %r0, 4, %d0; st.global.b32 [%d50], %r100;"


def zeros(memory: Memory, count: int) -> int:
    return memory.put(np.zeros(count, np.uint32))


# -- lanes -------------------------------------------------------------------------------------------------------------------------


def test_shuffles() -> None:
    def shuffled(mode: str, by: int, clamp: int) -> Any:
        return lanes(f"shfl.sync.{mode}.b32 %r100|%p1, %r10, {by}, {clamp}, -1;", [NUMBERS], np.uint32)

    assert (shuffled("idx", 5, 31) == NUMBERS[5]).all()
    assert (shuffled("bfly", 3, 31) == NUMBERS[ME ^ 3]).all()
    assert (shuffled("up", 2, 0) == NUMBERS[np.where(ME >= 2, ME - 2, ME)]).all()
    assert (shuffled("down", 4, 31) == NUMBERS[np.where(ME < 28, ME + 4, ME)]).all()
    assert (shuffled("idx", 1, 0x181F) == NUMBERS[ME & 24 | 1]).all()  # segments of 8


def test_votes_and_sums() -> None:
    few = (NUMBERS % 5).astype(np.uint32)
    even = int(sum(1 << lane for lane in ME if few[lane] % 2 == 0))
    vote = "and.b32 %r20, %r10, 1; setp.eq.u32 %p1, %r20, 0; "
    assert (lanes(vote + "vote.sync.ballot.b32 %r100, %p1, -1;", [few], np.uint32) == even).all()
    assert (lanes(vote + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r100, 1, 0, %p2;", [few], np.uint32) == 1).all()
    assert (lanes(vote + "vote.sync.all.pred %p2, %p1, -1; selp.b32 %r100, 1, 0, %p2;", [few], np.uint32) == 0).all()
    same = [sum(1 << other for other in ME if few[other] == mine) for mine in few]
    assert lanes("match.any.sync.b32 %r100, %r10, -1;", [few], np.uint32).tolist() == same
    signed = NUMBERS.view(np.int32)
    assert (lanes("redux.sync.max.s32 %r100, %r10, -1;", [NUMBERS], np.int32) == signed.max()).all()
    assert (lanes("redux.sync.add.u32 %r100, %r10, -1;", [NUMBERS], np.uint32) == NUMBERS.sum(dtype=np.uint32)).all()
    assert (lanes("elect.sync %r20|%p1, -1; selp.b32 %r100, 1, 0, %p1;", [], np.uint32) == (ME == 0)).all()


# -- warps -------------------------------------------------------------------------------------------------------------------------

# Threads of two warps exchange values through shared memory.
EXCHANGE = """
mov.b32 %r1, shared; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0;
{barrier}
xor.b32 %r3, %r0, 32; mad.lo.u32 %r4, %r3, 4, %r1; ld.shared.b32 %r100, [%r4];
"""


def exchanged(barrier: str, **options: Any) -> Any:
    memory = Memory(4096)
    out = zeros(memory, 64)
    run(EXCHANGE.format(barrier=barrier) + STORE, memory, [out], 64, **options)
    return memory.get(out, np.uint32, 64)


def test_a_barrier() -> None:
    for seed in range(4):
        assert (exchanged("bar.sync 0;", seed=seed) == np.arange(64) ^ 32).all()
    assert (exchanged("bar.sync 3, 64;") == np.arange(64) ^ 32).all()


def test_a_barrier_that_is_missing_shows() -> None:
    assert any((exchanged("", seed=seed) != np.arange(64) ^ 32).any() for seed in range(1, 5))
    with pytest.raises(EmulationError, match="nobody has written byte 0") as caught:
        exchanged("", uninitialised=True)
    assert caught.value.kind == "uninitialised"
    assert caught.value.instruction.name.startswith("ld.shared")


def test_a_barrier_that_some_do_not_reach() -> None:
    with pytest.raises(EmulationError, match="barrier 0, 32 of 64 threads have arrived") as caught:
        exchanged("setp.lt.u32 %p1, %r0, 32; @%p1 bra.uni skip; bar.sync 0; skip:")
    assert caught.value.kind == "deadlock"


def test_mbarriers() -> None:
    """Three warps pass two phases of an mbarrier: they wait for the first by parity, for the second by state."""
    body = """
    mov.b32 %r1, shared; setp.ne.u32 %p1, %r0, 0; @%p1 bra go;
    mbarrier.init.shared.b64 [%r1], 96;
    go: bar.sync 0;
    mbarrier.arrive.shared.b64 %d1, [%r1]; first: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0; @!%p3 bra first;
    mbarrier.arrive.shared.b64 %d1, [%r1], 1; second: mbarrier.test_wait.shared.b64 %p3, [%r1], %d1; @!%p3 bra second;
    mov.b32 %r100, 9;
    """
    for seed in range(4):
        memory = Memory(4096)
        out = zeros(memory, 96)
        run(body + STORE, memory, [out], 96, seed=seed)
        assert (memory.get(out, np.uint32, 96) == 9).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, shared; mbarrier.arrive.shared.b64 _, [%r1];", "no mbarrier at 0x400"),
        ("mov.b32 %r1, shared; mbarrier.init.shared.b64 [%r1], 4; mbarrier.arrive.shared.b64 _, [%r1], 5;", "one too many"),
        ("st.shared.b32 [shared+4094], %r0;", "misaligned"),
        ("mov.b32 %r1, shared; add.u32 %r1, %r1, 232448; st.shared.b32 [%r1], %r0;", "out-of-bounds: 4 bytes of shared memory"),
        ("ld.global.b32 %r1, [%d0+4];", "out-of-bounds: 4 bytes of global memory .* ends 0 bytes before"),
        ("ld.global.b32 %r1, [%d0+2];", "misaligned"),
        ("trap;", "trapped"),
    ],
)
def test_what_hardware_would_not_allow(body: str, message: str) -> None:
    memory = Memory(4096)
    with pytest.raises(EmulationError, match=message):
        run(body, memory, [memory.put(np.zeros(1, np.uint32))])


def test_a_deadlock_says_who_waits_for_what() -> None:
    body = """
    mov.b32 %r1, shared; setp.ne.u32 %p1, %r0, 0; @%p1 bra go; mbarrier.init.shared.b64 [%r1], 3;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 48; go: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra again;
    """
    for seed in (0, 1):
        with pytest.raises(EmulationError, match="0x400 phase 0, 2 of 3 arrivals and 48 bytes") as caught:
            run(body, Memory(4096), [], seed=seed)
        assert caught.value.kind == "deadlock"
        assert "mbarrier.try_wait" in str(caught.value)


def take_registers(loads: int, computes: int, directives: str, **options: Any) -> None:
    """Runs a kernel with four warps that release registers (setmaxnreg.dec) and eight that acquire them (setmaxnreg.inc)."""
    body = f"setp.lt.u32 %p1, %r0, 128; @%p1 bra few; setmaxnreg.inc.sync.aligned.u32 {computes}; bra.uni end; "
    run(body + f"few: setmaxnreg.dec.sync.aligned.u32 {loads}; end:", Memory(64), [], 384, directives=directives, **options)


def test_registers_that_warps_leave_others() -> None:
    for seed in range(4):
        take_registers(40, 232, ".reqntid 384, 1, 1 .minnctapersm 1", seed=seed)  # requests 504 of 3 * 168 registers
    take_registers(64, 224, "")  # the number of registers is unknown
    take_registers(24, 80, ".maxntid 384 .minnctapersm 2")  # requests 184 of 3 * 80 registers
    take_registers(64, 224, ".maxnreg 176")


def test_registers_that_nobody_leaves() -> None:
    """Three warpgroups request 64 + 224 + 224 = 512 registers per lane, but a launch of 384 threads has only 3 * 168 = 504
    registers."""
    with pytest.raises(EmulationError, match=r"for 224 registers: it has 168, .* others") as caught:
        take_registers(64, 224, ".reqntid 384, 1, 1 .minnctapersm 1")
    assert caught.value.kind == "deadlock"
    with pytest.raises(EmulationError, match="168 registers asks to fall to 176"):
        take_registers(176, 232, ".maxntid 384")
    with pytest.raises(UnknownInstruction, match="24 to 256 registers, in steps of 8"):
        take_registers(40, 230, ".maxntid 384")


# -- CTAs --------------------------------------------------------------------------------------------------------------------------


def test_atomics_of_a_grid() -> None:
    memory = Memory(4096)
    counter, values = zeros(memory, 1), memory.put(np.zeros(3, np.float32))
    body = """
    atom.add.global.u32 %r1, [%d0], 1; red.add.global.f32 [%d1], 0f3F000000; atom.global.exch.b32 %r2, [%d1+4], 0f40000000;
    again: ld.relaxed.gpu.global.b32 %r3, [%d1+8]; add.u32 %r4, %r3, 1; atom.cas.global.b32 %r5, [%d1+8], %r3, %r4;
    setp.ne.u32 %p1, %r5, %r3; @%p1 bra again;
    """
    run(body, memory, [counter, values], grid=(3, 2), seed=3)
    assert memory.get(counter, np.uint32, 1) == 192
    assert memory.get(values, np.float32, 2).tolist() == [96.0, 2.0]
    assert memory.get(values + 8, np.uint32, 1) == 192


def test_ctas_that_wait_for_later_ones() -> None:
    """A CTA may wait for a CTA that has not started. The awaited CTA starts when no running CTA can proceed. If no further CTA may
    start, the wait is a deadlock."""
    body = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 3; @%p1 bra waits; st.release.gpu.global.b32 [%d0], 1;
    waits: ld.acquire.gpu.global.b32 %r2, [%d0]; setp.eq.u32 %p1, %r2, 0; @%p1 bra waits;
    """
    memory = Memory(4096)
    run(body, memory, [zeros(memory, 1)], grid=(4,))
    with pytest.raises(EmulationError, match="no progress"):
        run(body, memory, [zeros(memory, 1)], grid=(4,), resident=3)


def test_clusters() -> None:
    """Each CTA writes to the next CTA's shared memory, and sends a value to the first CTA's mbarrier."""
    body = """
    mov.b32 %r1, shared; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank; setp.ne.u32 %p1, %r0, 0;
    @%p1 bra go; mbarrier.init.shared.b64 [%r1+64], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+64], 16;
    go: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p1 bra meet;
    add.u32 %r4, %r2, 1; rem.u32 %r4, %r4, %r3; mapa.shared::cluster.u32 %r5, %r1, %r4; st.shared::cluster.b32 [%r5], %r2;
    mapa.shared::cluster.u32 %r6, %r1, 0; mad.lo.u32 %r7, %r2, 4, %r6;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7+32], %r2, [%r6+64];
    meet: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared.b32 %r100, [%r1];
    setp.ne.u32 %p2, %r2, 0; @%p2 bra end;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+64], 0; @!%p3 bra W; ld.shared.b32 %r8, [%r1+44]; add.u32 %r100, %r100, %r8;
    end: mov.u32 %r9, %ctaid.x; mad.lo.u32 %r0, %r9, 32, %r0;
    """
    for seed in range(4):
        memory = Memory(8192)
        out = zeros(memory, 8 * LANES)
        run(body + STORE, memory, [out], grid=(8,), cluster=4, seed=seed)
        assert memory.get(out, np.uint32, 8, LANES)[:, 0].tolist() == [6, 0, 1, 2] * 2


def test_memory_of_a_cta_that_ended() -> None:
    body = """
    mov.b32 %r1, shared; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r2, 1; @%p1 bra end; mapa.shared::cluster.u32 %r3, %r1, 1;
    mov.b32 %r4, 0; again: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 100000; @%p2 bra again;
    ld.shared::cluster.b32 %r5, [%r3]; end:
    """
    with pytest.raises(EmulationError, match="after it ended"):
        run(body, Memory(4096), [], grid=(2,), cluster=2)
