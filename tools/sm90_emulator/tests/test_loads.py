"""Tests loads and stores of all widths, and loads that are in flight when an arrival at another CTA's mbarrier releases the loaded
memory."""

from __future__ import annotations

import numpy as np
import pytest

from sm90_emulator import SanitizerError
from sm90_emulator.memory import Memory

from .snippets import LANES, run

MATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];"
VECTOR = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];"
# CTA 0 loads 512 bytes of its shared memory, and then arrives at the first mbarrier of CTA `to`. CTA `by` waits at its own first
# mbarrier, and then starts a multicast copy, which overwrites those 512 bytes in both CTAs. Both CTAs wait for the copy at their
# second mbarrier.
BODY = """
mov.b32 %r1, shared; mad.lo.u32 %r2, %r0, 16, %r1; mov.u32 %r30, %cluster_ctarank; setp.ne.u32 %p1, %r0, 0;
@%p1 bra made; mbarrier.init.shared.b64 [%r1+8192], 1; mbarrier.init.shared.b64 [%r1+8200], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8200], 512; made:
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.ne.u32 %p2, %r30, 0; @%p2 bra loaded; {load} {between} bar.warp.sync -1;
mapa.shared::cluster.u32 %r40, %r1, {to}; @%p1 bra loaded;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r40+8192]; loaded:
setp.ne.u32 %p3, %r30, {by}; @%p3 bra copied; @%p1 bra copied;
A: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+8192], 0; @!%p4 bra A; mov.b16 %h0, 3;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d0], 512, [%r1+8200], %h0; copied:
B: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+8200], 0; @!%p4 bra B;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


def give_back(load: str, between: str = "", to: int = 1, by: int = 1) -> None:
    memory = Memory(1 << 15)
    source = memory.put(np.arange(128, dtype=np.uint32))
    body = BODY.format(load=load, between=between, to=to, by=by)
    run(body, memory, [source], grid=(2,), cluster=2, seed=3)


@pytest.mark.parametrize("load", [MATRIX, VECTOR], ids=["matrix", "vector"])
def test_a_load_that_nobody_waits_for(load: str) -> None:
    with pytest.raises(SanitizerError, match="overwritten: a copy of CTA 1 of the cluster") as raised:
        give_back(load)
    assert raised.value.kind == "overwritten"
    assert load.split()[0] in str(raised.value)  # the faulty instruction


@pytest.mark.parametrize("load", [MATRIX, VECTOR], ids=["matrix", "vector"])
@pytest.mark.parametrize(
    "between",
    [
        "fence.proxy.async.shared::cta;",
        "membar.cta;",
        "barrier.sync 1, 32;",
        "add.u32 %r14, %r12, 1;",
        "st.shared.b32 [%r2+4096], %r11;",
    ],
)
def test_a_load_that_is_waited_for(load: str, between: str) -> None:
    """A fence, a barrier, or the use of the load's result waits for the load."""
    give_back(load, between)


def test_results_come_in_the_order_of_loads() -> None:
    give_back(MATRIX, "ld.shared.b32 %r20, [%r1+4096]; add.u32 %r21, %r20, 1;")


def test_a_cta_of_its_own() -> None:
    """An arrival at the CTA's own mbarrier is ordered after the load."""
    give_back(MATRIX, to=0, by=0)


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_stores_from_registers_of_64_bits(space: str, bits: int) -> None:
    """Stores write the lowest bits of each lane's register; loads extend the loaded value to the register's width."""
    memory, size = Memory(1 << 15), bits // 8
    given = np.arange(LANES, dtype=np.uint64) * np.uint64(0x0102030405060789) ^ np.uint64(2**63)
    source, out, loaded = memory.put(given), memory.put(np.zeros(2 * LANES * size, np.uint8)), memory.put(np.zeros(LANES, np.int64))
    base = {"global": "mov.b64 %d20, %d1;", "shared": "cvt.u64.u32 %d20, shared;"}[space]
    body = f"""
    {base} mad.wide.u32 %d21, %r0, {2 * size}, %d20; mad.wide.u32 %d22, %r0, 8, %d0; ld.global.b64 %d10, [%d22];
    st.{space}.v2.b{bits} [%d21], {{%d10, %d10}}; ld.{space}.s{bits} %d11, [%d21+{size}];
    mad.wide.u32 %d22, %r0, 8, %d2; st.global.b64 [%d22], %d11;
    """
    run(body, memory, [source, out, loaded])
    low = given.astype(f"u{size}")
    if space == "global":
        assert (memory.get(out, low.dtype, LANES, 2) == low[:, None]).all()
    assert (memory.get(loaded, np.int64, LANES) == low.astype(f"i{size}")).all()
