"""Tests each error that the machine reports, with a kernel of a few instructions: the error's kind, message and instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sm90_emulator import SanitizerError
from sm90_emulator.memory import Memory
from sm90_emulator.tensor_maps import tensor_map

from .snippets import run

S = "mov.b32 %r1, shared;"
ONE = "setp.ne.u32 %p9, %r0, 0; @%p9 bra end;"  # only the first thread continues
INIT = f"{S} {ONE} mbarrier.init.shared.b64 [%r1+512], 1;"
ARRIVE = "barrier.cluster.arrive.aligned;"
MEET = f"{ARRIVE} barrier.cluster.wait.aligned;"
FIRST_WARP = "setp.lt.u32 %p1, %r0, 32; @%p1 bra first;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def reported(body: str, *addresses: int, memory: Memory | None = None, **options: Any) -> SanitizerError:
    """Returns the error that a kernel causes."""
    with pytest.raises(SanitizerError) as caught:
        run(f"{body} end:", memory or Memory(1 << 12), list(addresses), **options)
    assert caught.value.kernel == "snippet"
    return caught.value


@pytest.mark.parametrize(
    ("body", "kind", "message", "at"),
    [
        # Memory.
        ("mov.b64 %d1, 4096; ld.global.b32 %r1, [%d1];", "out-of-bounds", "4 bytes of global memory at 0x1000, below all", "ld"),
        ("mov.b32 %r1, 1020; ld.shared.b32 %r2, [%r1];", "out-of-bounds", "4 bytes of shared memory at 0x3fc", "ld"),
        (f"{S} st.shared.v4.b32 [%r1+4], {{%r0, %r0, %r0, %r0}};", "misaligned", "16 bytes at 0x404", "st"),
        (f"{S} atom.shared.add.u32 %r2, [%r1+2], 1;", "misaligned", "4 bytes at 0x402", "atom"),
        (f"{S} or.b32 %r1, %r1, 0x3000000; ld.shared::cluster.b32 %r2, [%r1];", "out-of-bounds", "CTA 3 of a cluster of 1", "ld"),
        (f"{S} mapa.shared::cluster.u32 %r2, %r1, 2;", "error", "CTA 2 of a cluster of 1", "mapa"),
        (".local .b32 mine[2]; ld.local.b32 %r1, [mine+8];", "out-of-bounds", "4 bytes of local memory at 0x8", "ld"),
        # Barriers of a CTA and a cluster.
        ("bar.sync 16;", "error", "barrier 16", "bar"),
        ("bar.sync 1, 48;", "error", "a barrier of 48 threads", "bar"),
        ("bar.arrive 1, 64; bar.arrive 1, 32;", "error", "this warp expects 32 threads, another one 64", "bar"),
        ("barrier.cluster.wait.aligned;", "error", "a wait without an arrival", "barrier"),
        # mbarriers.
        (f"{S} {ONE} mbarrier.init.shared.b64 [%r1+4], 1;", "misaligned", "an mbarrier at 0x404", "mbarrier"),
        (f"{S} mbarrier.arrive.shared.b64 _, [%r1+4];", "misaligned", "an mbarrier at 0x404", "mbarrier"),
        (f"{S} {ONE} mbarrier.init.shared.b64 [%r1], 0;", "error", "an mbarrier of 0 arrivals", "mbarrier"),
        (f"{INIT} mbarrier.inval.shared.b64 [%r1+512]; mbarrier.arrive.shared.b64 _, [%r1+512];", "error", "no mbar", "mbarrier"),
        (f"{INIT} mbarrier.expect_tx.shared.b64 [%r1+512], 1048576;", "error", "waits for 1048576 bytes", "mbarrier"),
        # Matrices.
        (f"{S} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r2}}, [%r1+8];", "misaligned", "a row of a matrix at 0x408", "ldmatrix"),
        (f"{S} stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1+8], {{%r0}};", "misaligned", "a row of a matrix at 0x408", "stmatrix"),
    ],
)  # fmt: skip
def test_a_warp(body: str, kind: str, message: str, at: str) -> None:
    error = reported(body)
    assert (error.kind, message in str(error)) == (kind, True), str(error)
    assert error.instruction.name.partition(".")[0] == at


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{FIRST_WARP} bar.sync 1, 64; bra end; first: bar.sync 1, 96;", "this warp expects"),
        ("bar.arrive 1, 32;", None),  # each warp completes a phase
        (f"{FIRST_WARP} bar.arrive 1, 96; bra end; first: bar.sync 1, 96;", "32 of 96|64 of 96"),
        (ARRIVE, None),
        (f"{FIRST_WARP} {MEET} bra end; first: {ARRIVE} {ARRIVE}", "a second arrival"),
    ],
)  # fmt: skip
def test_two_warps(body: str, message: str | None) -> None:
    if message is None:
        run(f"{body} end:", Memory(64), [], 64)
    else:
        assert any(part in str(reported(body, threads=64)) for part in message.split("|"))


@pytest.mark.parametrize(
    ("copy", "kind", "message"),
    [
        (f"{LOAD} [%r1], [%d0], 24, [%r1+512];", "misaligned", "a bulk copy of 24 bytes"),
        (f"{LOAD} [%r1+8], [%d0], 16, [%r1+512];", "misaligned", "shared 0x408"),
        (f"{LOAD} [%r1], [%d0], 0, [%r1+512];", "misaligned", "a bulk copy of 0 bytes"),
        (f"{LOAD}.multicast::cluster [%r1], [%d0], 16, [%r1+512], %h0;", "error", "multicast to CTAs 0x2 of a cluster of 1"),
        ("cp.async.cg.shared.global [%r1+8], [%d0], 16;", "misaligned", "cp.async of 16 bytes"),
        (f"{TILE} [%r1], [%d1, {{0, 0}}], [%r1+512];", "misaligned", "a tensor map at"),
        (f"{TILE} [%r1+64], [%d2, {{0, 0}}], [%r1+512];", "misaligned", "a tile at shared address 0x440"),
        (f"{TILE.replace('2d', '3d')} [%r1], [%d2, {{0, 0, 0}}], [%r1+512];", "error", "of rank 2, and 3 coordinates"),
        (f"{TILE} [%r1], [%d0, {{0, 0}}], [%r1+512];", "error", "no tensor map of tiles"),
        (f"{TILE} [%r1], [%d3, {{0, 0}}], [%r1+512];", "error", "a tensor map that interleaves"),
    ],
)  # fmt: skip
def test_copies(copy: str, kind: str, message: str) -> None:
    memory = Memory(1 << 13)
    data = memory.put(np.zeros((8, 16), np.float32))
    content = tensor_map(data, 7, (8, 16), (64, 4), (4, 4))
    described = memory.put(np.frombuffer(content.ljust(256, b"\0"), np.uint8))
    interleaved = bytearray(content.ljust(256, b"\0"))
    interleaved[9] |= 8
    other = memory.put(np.frombuffer(interleaved, np.uint8))
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 16; mov.b16 %h0, 2;"
    error = reported(f"{INIT} {expect} {copy}", data, described + 16, described, other, memory=memory)
    assert (error.kind, message in str(error)) == (kind, True), str(error)


def test_a_store_to_a_barrier_of_another_cta() -> None:
    send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r0, [%r2];"
    error = reported(f"{S} {ONE} mapa.shared::cluster.u32 %r2, %r1, 1; {send}", grid=(2,), cluster=2)
    assert "are in different CTAs" in str(error)


@pytest.mark.parametrize(
    ("before", "kinds", "flags", "threads", "message"),
    [
        ("setp.lt.u32 %p5, %r0, 7; mov.b64 %d10, 0;", "16.f32.f16.f16", "%p5, 1, 1, 0, 0", 128, "lanes do not agree"),
        ("mov.b64 %d10, 0x2000000000000;", "16.f32.f16.f16", "1, 1, 1, 0, 0", 128, "a base offset"),
        ("mov.b64 %d10, 64;", "16.f32.f16.f16", "1, 1, 1, 0, 0", 64, "no group of four"),
        ("mov.b64 %d10, 64;", "8.f32.tf32.tf32", "1, 1, 1, 1, 0", 128, "may lie across k"),
        ("mov.b64 %d10, 16383;", "16.f32.f16.f16", "1, 1, 1, 0, 0", 128, "of shared memory at"),
    ],
)
def test_tensor_cores(before: str, kinds: str, flags: str, threads: int, message: str) -> None:
    mma = f"wgmma.mma_async.sync.aligned.m64n8k{kinds} {{%f0, %f1, %f2, %f3}}, %d10, %d10, {flags};"
    wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    assert message in str(reported(f"{before} wgmma.fence.sync.aligned; {mma} {wait}", threads=threads))


def test_an_error_says_where() -> None:
    body = "mov.u32 %r1, %ctaid.y; setp.ne.u32 %p1, %r1, 2; @%p1 bra end; setp.lt.u32 %p2, %r0, 32; @%p2 bra end; trap;"
    error = reported(body, threads=64, grid=(1, 3))
    assert str(error) == "error: the kernel trapped\n  in CTA (0, 2, 0), warp 1\n  in kernel snippet: trap"


def test_what_the_kernel_does_after_an_error_is_not_done() -> None:
    memory = Memory(4096)
    out = memory.put(np.zeros(2, np.uint32))
    reported("st.global.b32 [%d0], 5; trap; st.global.b32 [%d0+4], 5;", out, memory=memory, threads=1)
    assert memory.get(out, np.uint32, 2).tolist() == [5, 0]
