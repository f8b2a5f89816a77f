"""Tests asynchronous copies: bulk copies, TMA tiles, and cp.async."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sm90_emulator import EmulationError
from sm90_emulator.memory import Memory
from sm90_emulator.tensor_maps import tensor_map

from .snippets import LANES, run

BEGIN = """
mov.b32 %r1, shared; setp.ne.u32 %p1, %r0, 0; @%p1 bra go; mbarrier.init.shared.b64 [%r1+8192], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8192], {bytes};
{copy}
go: bar.warp.sync -1;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+8192], 0; @!%p3 bra W;"
# Each thread copies words of shared memory to the output.
DRAIN = """
mov.b32 %r20, %r0; drain: setp.ge.u32 %p4, %r20, {words}; @%p4 bra drained; mad.lo.u32 %r21, %r20, 4, %r1;
ld.shared.b32 %r22, [%r21]; mad.wide.u32 %d50, %r20, 4, %d0; st.global.b32 [%d50], %r22; add.u32 %r20, %r20, 32; bra drain; drained:
"""
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 512, [%r1+8192];"
TILE = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
HARDWARE = {np.uint8: 0, np.float16: 6, np.float32: 7}


def described(array: Any, address: int, box: tuple[int, ...], swizzle: int = 0) -> Any:
    """Returns the tensor map of an array whose last axis is contiguous. The map is padded to 192 bytes."""
    content = tensor_map(address, HARDWARE[array.dtype.type], array.shape, array.strides, box, swizzle)
    return np.frombuffer(content.ljust(192, b"\0"), np.uint8)


def test_a_bulk_copy() -> None:
    data = np.arange(128, dtype=np.uint32)
    for copies in ("early", "random", "late"):
        memory = Memory(1 << 15)
        out, source = memory.put(np.zeros(128, np.uint32)), memory.put(data)
        body = BEGIN.format(bytes=512, copy=BULK) + WAIT + DRAIN.format(words=128)
        report = run(body, memory, [out, source], copies=copies, seed=2)
        assert (memory.get(out, np.uint32, 128) == data).all()
        assert report.copied_bytes == 512


def test_who_does_not_wait_finds_nothing() -> None:
    memory = Memory(1 << 15)
    out, source = memory.put(np.zeros(128, np.uint32)), memory.put(np.arange(128, dtype=np.uint32))
    with pytest.raises(EmulationError, match="ended while 1 of its copies"):
        run(BEGIN.format(bytes=512, copy=BULK) + DRAIN.format(words=128), memory, [out, source], copies="late")
    assert (memory.get(out, np.uint32, 128) == 0xFFFFFFFF).all()


def test_a_copy_that_is_not_aligned() -> None:
    memory = Memory(1 << 15)
    addresses = [memory.put(np.zeros(128, np.uint32)), memory.put(np.arange(256, dtype=np.uint32)) + 8]
    with pytest.raises(EmulationError, match="multiples of 16"):
        run(BEGIN.format(bytes=512, copy=BULK), memory, addresses)


def test_too_few_bytes_expected_is_a_deadlock() -> None:
    memory = Memory(1 << 15)
    addresses = [memory.put(np.zeros(128, np.uint32)), memory.put(np.arange(128, dtype=np.uint32))]
    with pytest.raises(EmulationError, match="0 of 1 arrivals and -256 bytes are missing"):
        run(BEGIN.format(bytes=256, copy=BULK) + WAIT, memory, addresses)


def swizzled(rows: Any, mode: int) -> Any:
    """Returns rows of bytes in the swizzled layout of a tile: 16-byte chunks are permuted within each 128 bytes."""
    flat = rows.reshape(-1)
    places = np.arange(len(flat))
    out = np.zeros_like(flat)
    out[places ^ ((places >> 7 & ((1 << mode) - 1)) << 4)] = flat
    return out


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [(0, 0), (3, 8), (-2, -8), (30, 120)])
def test_tiles(swizzle: int, at: tuple[int, int]) -> None:
    """Loads fill the out-of-bounds part of a tile with zeros. Stores do not write out of bounds."""
    array = np.random.default_rng(3).normal(size=(32, 128)).astype(np.float16)
    columns = 8 << swizzle
    padded = np.zeros((96, 256), np.float16)
    padded[32:64, 64:192] = array
    tile = padded[32 + at[0] : 48 + at[0], 64 + at[1] : 64 + at[1] + columns]
    memory = Memory(1 << 17)
    source, out = memory.put(array), memory.put(np.zeros(tile.size // 2, np.uint32))
    target_array = np.zeros_like(array)
    target = memory.put(target_array)
    maps = [memory.put(described(array, place, (16, columns), swizzle)) for place in (source, target)]
    copy = f"{TILE.format(2)} [%r1], [%d1, {{{at[1]}, {at[0]}}}], [%r1+8192];"
    store = f"""
    @%p1 bra end; cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{{at[1]}, {at[0]}}}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; end:
    """
    body = BEGIN.format(bytes=tile.size * 2, copy=copy) + WAIT + DRAIN.format(words=tile.size // 2) + store
    run(body, memory, [out, *maps], copies="late")
    got = memory.get(out, np.uint8, tile.size * 2)
    assert (got == swizzled(np.ascontiguousarray(tile).view(np.uint8), swizzle)).all()
    left = np.zeros((96, 256), np.float16)
    left[32 + at[0] : 48 + at[0], 64 + at[1] : 64 + at[1] + columns] = tile
    assert (memory.get(target, np.float16, 32, 128) == left[32:64, 64:192]).all()


def test_a_tile_of_three_axes_for_a_whole_cluster() -> None:
    array = np.arange(4 * 6 * 32, dtype=np.float32).reshape(4, 6, 32)
    memory = Memory(1 << 17)
    out, source = memory.put(np.zeros((2, 128), np.uint32)), memory.put(array)
    place = memory.put(described(array, source, (2, 4, 16)))
    tensor = f"{TILE.format(3)}.multicast::cluster [%r1], [%d1, {{8, 1, 2}}], [%r1+8192], %h0;"
    copy = f"mov.u32 %r30, %cluster_ctarank; setp.ne.u32 %p2, %r30, 1; @%p2 bra go; mov.b16 %h0, 3; {tensor}"
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    begin = BEGIN.format(bytes=512, copy="bra go;").replace(
        "go:", f"go: {meet} @%p1 bra there; {copy.replace('go;', 'there;')} there:"
    )
    where = "mov.u32 %r30, %ctaid.x; mul.wide.u32 %d49, %r30, 512; add.s64 %d0, %d0, %d49;"
    run(begin + WAIT + where + DRAIN.format(words=128) + meet, memory, [out, place], grid=(2,), cluster=2, seed=1)
    assert (memory.get(out, np.float32, 2, 2, 4, 16) == array[2:4, 1:5, 8:24]).all()


def test_copies_of_threads() -> None:
    """Each thread copies 16 bytes, some of which are zero-filled. All threads wait for the copies, directly or through an
    mbarrier."""
    data = np.arange(4 * LANES, dtype=np.uint32) + 1
    copy = """
    mov.b32 %r1, shared; mad.lo.u32 %r2, %r0, 16, %r1; mad.wide.u32 %d10, %r0, 16, %d1; and.b32 %r3, %r0, 16;
    cp.async.cg.shared.global [%r2], [%d10], 16, %r3;
    """
    ends = {
        "group": "cp.async.commit_group; cp.async.wait_group 0; bar.warp.sync -1;",
        "all": "cp.async.wait_all; bar.warp.sync -1;",
        "mbarrier": f"cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+8192]; {WAIT}",
    }
    init = (
        "mov.b32 %r1, shared; setp.ne.u32 %p1, %r0, 0; @%p1 bra go; mbarrier.init.shared.b64 [%r1+8192], 32; go: bar.warp.sync -1;"
    )
    wanted = np.where(np.arange(4 * LANES) // 64 == 1, data, 0)
    for end in ends.values():
        memory = Memory(1 << 15)
        out, source = memory.put(np.zeros(128, np.uint32)), memory.put(data)
        run(init + copy + end + DRAIN.format(words=128), memory, [out, source], copies="late")
        assert (memory.get(out, np.uint32, 128) == wanted).all()


def test_sums_in_global_memory() -> None:
    memory = Memory(1 << 15)
    target = memory.put(np.ones(32, np.float32))
    body = """
    mov.b32 %r1, shared; mad.lo.u32 %r2, %r0, 4, %r1; cvt.rn.f32.u32 %r3, %r0; st.shared.b32 [%r2], %r3;
    fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %p1, %r0, 0; @%p1 bra end;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r1], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; end:
    """
    run(body, memory, [target])
    assert (memory.get(target, np.float32, 32) == 1 + np.arange(32)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "an address"), ({"strides": (72, 4)}, "strides of"), ({"strides": (64, 8)}, "a last axis"),
        ({"box": (257, 4)}, "a tile of"), ({"box": (4, 3)}, "a tile of"), ({"sizes": (0, 16)}, "sizes"),
        ({"sizes": (4,) * 6}, "6 axes"), ({"swizzle": 1, "box": (4, 16)}, "rows of 64 bytes in tiles swizzled by 32"),
    ],
)  # fmt: skip
def test_tensor_maps_that_the_driver_refuses(change: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {"address": 4096, "kind": 7, "sizes": (8, 16), "strides": (64, 4), "box": (4, 4)}
    assert len(tensor_map(**fitting)) == 128
    with pytest.raises(EmulationError, match=f"no tensor map with {message}"):
        tensor_map(**fitting | change)
