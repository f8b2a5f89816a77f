"""Tests address spaces, atomics, special registers, and the memory of launches of PTX text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sm90_emulator.memory import Memory

from .snippets import LANES, lanes, run

DRAW = np.random.default_rng(4)
ME = np.arange(LANES, dtype=np.uint32)


def test_memory_is_nan_and_has_gaps() -> None:
    memory = Memory(1 << 12)
    first, second = (memory.put(np.arange(3, dtype=np.float32)) for _ in range(2))
    assert first % 256 == second % 256 == 0
    assert second - first == 512
    assert memory.ranges == [(first, first + 12), (second, second + 12)]
    assert np.isnan(memory.get(first + 12, np.float32, 2)).all()
    copy = memory.get(first, np.float32, 3)
    copy[:] = 9
    assert memory.get(first, np.float32, 3).tolist() == [0, 1, 2]
    with pytest.raises(MemoryError, match="4096 bytes"):
        memory.put(np.zeros(4096, np.uint8))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_shared_memory_is_nan(dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    memory = Memory(1 << 12)
    out = memory.put(np.zeros(1, dtype))
    run(f"mov.b32 %r1, shared; ld.shared.b{8 * size} %d1, [%r1]; st.global.b{8 * size} [%d0], %d1;", memory, [out], 1)
    assert np.isnan(memory.get(out, dtype, 1))


def test_generic_addresses() -> None:
    """Accesses shared, local and global memory through generic addresses, which determine the address space."""
    body = """
    .local .align 8 .b32 own[4];
    cvt.u64.u32 %d10, shared; cvta.shared.u64 %d11, %d10; mad.wide.u32 %d12, %r0, 4, %d11; st.b32 [%d12], %r0;
    mov.u64 %d13, own; cvta.local.u64 %d14, %d13; add.u32 %r1, %r0, 1; st.b32 [%d14+8], %r1; ld.local.b32 %r2, [own+8];
    cvta.to.shared.u64 %d15, %d12; cvt.u32.u64 %r3, %d15; ld.shared.b32 %r4, [%r3];
    isspacep.shared %p1, %d12; isspacep.local %p2, %d14; isspacep.global %p3, %d0; isspacep.shared %p4, %d0;
    selp.b32 %r5, 1000, 0, %p1; selp.b32 %r6, 2000, 0, %p2; selp.b32 %r7, 4000, 0, %p3; selp.b32 %r8, 8000, 0, %p4;
    add.u32 %r100, %r2, %r4; add.u32 %r5, %r5, %r6; add.u32 %r7, %r7, %r8; add.u32 %r5, %r5, %r7; add.u32 %r100, %r100, %r5;
    """
    assert (lanes(body, [], np.uint32) == 2 * ME + 1 + 7000).all()


def test_parameters_have_addresses() -> None:
    body = (
        "mov.b64 %d10, p0; cvta.param.u64 %d11, %d10; ld.b64 %d12, [%d11]; setp.eq.u64 %p1, %d12, %d0; selp.b32 %r100, 1, 0, %p1;"
    )
    assert (lanes(body, [], np.uint32) == 1).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_addresses(rank: int) -> None:
    body = f"""
    mov.b32 %r1, shared; mapa.shared::cluster.u32 %r2, %r1, {rank}; getctarank.shared::cluster.u32 %r3, %r2;
    cvt.u64.u32 %d10, %r1; cvta.shared.u64 %d11, %d10; mapa.u64 %d12, %d11, {rank}; getctarank.u64 %r4, %d12;
    mad.lo.u32 %r100, %r3, 10, %r4; mad.wide.u32 %d50, %r0, 4, %d0; st.global.b32 [%d50], %r100;
    """
    memory = Memory(1 << 12)
    out = memory.put(np.zeros(LANES, np.uint32))
    run(body, memory, [out], grid=(2,), cluster=2)
    assert (memory.get(out, np.uint32, LANES) == 11 * rank).all()


# -- atomics -----------------------------------------------------------------------------------------------------------------------


def wrap_inc(old: int, most: int) -> int:
    return 0 if old >= most else old + 1


def wrap_dec(old: int, most: int) -> int:
    return most if old == 0 or old > most else old - 1


def signed(bits: int) -> Callable[[int], int]:
    return lambda x: x - (x >> bits - 1 << bits)


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda a, b: a + b & 2**32 - 1,
    "add.u64": lambda a, b: a + b & 2**64 - 1,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda a, b: min(a, b, key=signed(32)),
    "max.s64": lambda a, b: max(a, b, key=signed(64)),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b64": lambda a, b: a ^ b,
    "inc.u32": wrap_inc,
    "dec.u32": wrap_dec,
    "exch.b32": lambda a, b: b,
    "exch.b64": lambda a, b: b,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str, space: str) -> None:
    """The lanes of a warp execute an atomic one after another. Each lane receives the value that the preceding lane stored."""
    bits = int(name[-2:])
    values = DRAW.integers(0, 2**bits, LANES, dtype=np.dtype(f"u{bits // 8}"))
    letter, result = ("r", "%r100") if bits == 32 else ("d", "%d40")
    place = {"global": "[%d1]", "shared": "[shared]"}[space]
    setup = "" if space == "global" else f"ld.global.b{bits} %{letter}20, [%d1]; st.shared.b{bits} [shared], %{letter}20;"
    got = lanes(f"{setup} bar.warp.sync -1; atom.{space}.{name} {result}, {place}, %{letter}10;", [values], values.dtype)
    held, wanted = int(values[0]), []
    for value in values.tolist():
        wanted.append(held)
        held = ATOMICS[name](held, value)
    assert got.tolist() == wanted


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_atomic_sums_of_two_halves(kind: str) -> None:
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    values = torch.arange(1, 2 * LANES + 1).to(dtype)
    memory = Memory(1 << 12)
    out, given = memory.put(np.zeros(1, np.uint32)), memory.put(values.view(torch.int16).numpy())
    body = f"mad.wide.u32 %d50, %r0, 4, %d1; ld.global.b32 %r1, [%d50]; red.global.add.noftz.{kind} [%d0], %r1;"
    run(body, memory, [out, given])
    wanted = torch.zeros(2, dtype=dtype)
    for pair in values.view(LANES, 2):
        wanted += pair
    assert memory.get(out, np.int16, 2).tolist() == wanted.view(torch.int16).tolist()


def test_a_vector_is_added_element_by_element() -> None:
    memory = Memory(1 << 12)
    out = memory.put(np.zeros(4, np.float32))
    body = "cvt.rn.f32.u32 %f0, %r0; red.global.add.v4.f32 [%d0], {%f0, 0f3F800000, %f0, 0f40000000};"
    run(body, memory, [out])
    assert memory.get(out, np.float32, 4).tolist() == [496.0, 32.0, 496.0, 64.0]


# -- special registers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("register", "wanted"),
    [
        ("%laneid", ME), ("%warpid", 0 * ME), ("%nwarpid", 0 * ME + 1), ("%lanemask_lt", (1 << ME) - 1), ("%lanemask_eq", 1 << ME),
        ("%lanemask_le", (2 << ME.astype(np.uint64)) - 1), ("%lanemask_gt", 2**32 - (2 << ME.astype(np.uint64))),
        ("%lanemask_ge", 2**32 - (1 << ME.astype(np.uint64))), ("WARP_SZ", 0 * ME + 32), ("%nsmid", 0 * ME + 132),
        ("%dynamic_smem_size", 0 * ME + 4096), ("%cluster_nctarank", 0 * ME + 1), ("%cluster_ctarank", 0 * ME),
    ],
)  # fmt: skip
def test_registers_of_a_warp(register: str, wanted: Any) -> None:
    got = lanes(f"mov.u32 %r100, {register};", [], np.uint32, shared_bytes=4096)
    assert (got == wanted.astype(np.uint32)).all()


def test_registers_of_a_grid() -> None:
    """Each CTA of a grid of 2 x 3 x 2, in clusters of two, writes its position."""
    names = ["ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z", "clusterid.x", "nclusterid.x", "cluster_ctaid.x"]
    stores = " ".join(f"mov.u32 %r2, %{name}; st.global.b32 [%d51+{4 * at}], %r2;" for at, name in enumerate(names))
    body = f"""
    mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y; mov.u32 %r12, %ctaid.z; mad.lo.u32 %r13, %r12, 3, %r11;
    mad.lo.u32 %r13, %r13, 2, %r10; mad.wide.u32 %d51, %r13, {4 * len(names)}, %d0; {stores}
    """
    memory = Memory(1 << 12)
    out = memory.put(np.zeros(12 * len(names), np.uint32))
    run(body, memory, [out], 1, grid=(2, 3, 2), cluster=2, seed=2)
    wanted = [[x, y, z, 2, 3, 2, 0, 1, x] for z in range(2) for y in range(3) for x in range(2)]
    assert memory.get(out, np.uint32, 12, len(names)).tolist() == wanted


def test_clocks_go_on() -> None:
    for clock in ("mov.u32 %r{}, %clock;", "mov.u64 %d{0}, %clock64; cvt.u32.u64 %r{0}, %d{0};"):
        body = f"{clock.format(20)} {clock.format(21)} sub.u32 %r100, %r21, %r20;"
        assert (lanes(body, [], np.int32) > 0).all()
