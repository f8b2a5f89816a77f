"""Tests tensor-core instructions against PyTorch: mma and wgmma, and the layouts of their operands in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sm90_emulator.memory import Memory

from .snippets import LANES, run

TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# Copies the first array to shared memory, word by word, and waits for all threads.
FILL = """
mov.b32 %r1, shared; mov.b32 %r2, %r0; fill: setp.ge.u32 %p1, %r2, {words}; @%p1 bra filled; mad.wide.u32 %d50, %r2, 4, %d1;
ld.global.b32 %r3, [%d50]; mad.lo.u32 %r4, %r2, 4, %r1; st.shared.b32 [%r4], %r3;
mov.u32 %r5, %ntid.x; add.u32 %r2, %r2, %r5; bra fill;
filled: fence.proxy.async.shared::cta; bar.sync 0;
"""
SPREAD = 0, 32, 64, 128  # the width of the swizzle in bytes; the index is the swizzle's number of bits


def draw(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Returns small random integers, for which all dot products are exact."""
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return values.float().to(TYPES[kind])


def bytes_of(x: torch.Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy().reshape(-1)


def laid_out(x: torch.Tensor, swizzle: int, across: bool) -> tuple[Any, int, int]:
    """Returns the bytes of ``[rows, k]`` in shared memory, and the descriptor's leading and stride offsets.

    x has 32 bytes along k. Rows are in groups of 8. With ``across``, the row axis is contiguous, in groups as wide as the swizzle.
    """
    size = x.element_size()
    rows, depth = x.shape
    row, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    width = SPREAD[swizzle]
    if across and swizzle:
        per = width // size
        leading, stride = width * 16, width * 8  # a block has 16 elements of k
        places = row // per * leading + k // 8 * stride + k % 8 * width + row % per * size
    elif across:
        leading, stride = 128, 256
        places = row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * size
    elif swizzle:
        leading, stride = 16, 8 * width
        places = row // 8 * stride + row % 8 * width + k * size
    else:
        leading, stride = 128, 256
        places = row // 8 * stride + row % 8 * 16 + k * size // 16 * leading + k * size % 16
    places = places ^ ((places >> 7 & ((1 << swizzle) - 1)) << 4)
    room = np.zeros(-(-int(places.max() + 16) // 1024) * 1024, np.uint8)
    content = bytes_of(x).reshape(rows, depth, size)
    for byte in range(size):
        room[places + byte] = content[:, :, byte]
    return room, leading, stride


def descriptor(offset: int, leading: int, stride: int, swizzle: int) -> str:
    """Returns instructions that write the descriptor of the operand at ``shared + offset`` to ``%d10``."""
    high = (stride >> 4) | ({0: 0, 1: 3, 2: 2, 3: 1}[swizzle] << 30)
    return f"""
    add.u32 %r10, %r1, {offset}; shr.u32 %r10, %r10, 4; and.b32 %r10, %r10, 16383; or.b32 %r10, %r10, {leading >> 4 << 16};
    mov.b32 %r11, {high}; mov.b64 %d10, {{%r10, %r11}};
    """


def sums(memory: Memory, out: int, columns: int) -> torch.Tensor:
    """Returns the accumulator fragments that 128 threads stored, as ``[64, columns]``."""
    got = memory.get(out, np.float32, 128, columns // 2)
    thread, i = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
    result = np.zeros((64, columns), np.float32)
    result[thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + thread % 4 * 2 + i % 2] = got
    return torch.from_numpy(result)


def store_sums(columns: int) -> str:
    stores = "".join(f"st.global.f32 [%d40+{4 * i}], %f{i};" for i in range(columns // 2))
    return f"mul.wide.u32 %d41, %r0, {2 * columns}; add.s64 %d40, %d0, %d41; {stores}"


def product(kinds: str, columns: int, first: str, second: str, more: str) -> str:
    accumulators = ", ".join(f"%f{i}" for i in range(columns // 2))
    depth = 32 // TYPES[kinds.split(".")[0]].itemsize
    zero = "".join(f"mov.f32 %f{i}, 0f3F800000;" for i in range(columns // 2))
    issue = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kinds} {{{accumulators}}}, {first}, {second}, %p5, 1, 1{more};"
    )
    wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    return f"{zero} setp.eq.u32 %p5, 0, 0; wgmma.fence.sync.aligned; {issue} {wait}"


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_warpgroups(kind: str, swizzle: int) -> None:
    """A wgmma adds the exact product to accumulators of ones. Both operands are in shared memory with k innermost."""
    depth = 32 // TYPES[kind].itemsize
    a, b = draw(kind, 64, depth), draw(kind, 40, depth, seed=1)
    (a_room, *a_offsets), (b_room, *b_offsets) = laid_out(a, swizzle, False), laid_out(b, swizzle, False)
    room = np.concatenate([a_room, b_room])
    body = FILL.format(words=len(room) // 4) + descriptor(0, *a_offsets, swizzle) + "mov.b64 %d11, %d10;"
    across = ", 0, 0" if kind in ("f16", "bf16") else ""
    body += descriptor(len(a_room), *b_offsets, swizzle) + product(f"{kind}.{kind}", 40, "%d11", "%d10", across) + store_sums(40)
    for copies in ("early", "late"):
        memory = Memory(1 << 17)
        out, source = memory.put(np.zeros((128, 20), np.float32)), memory.put(room)
        run(body, memory, [out, source], 128, copies=copies)
        assert torch.equal(sums(memory, out, 40), a.float() @ b.float().T + 1)


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_operands_across_k(swizzle: int) -> None:
    a, b = draw("f16", 64, 16), draw("f16", 64, 16, seed=1)
    (a_room, *a_offsets), (b_room, *b_offsets) = laid_out(a, swizzle, True), laid_out(b, swizzle, True)
    room = np.concatenate([a_room, b_room])
    body = FILL.format(words=len(room) // 4) + descriptor(0, *a_offsets, swizzle) + "mov.b64 %d11, %d10;"
    body += descriptor(len(a_room), *b_offsets, swizzle) + product("f16.f16", 64, "%d11", "%d10", ", 1, 1") + store_sums(64)
    memory = Memory(1 << 17)
    out, source = memory.put(np.zeros((128, 32), np.float32)), memory.put(room)
    run(body, memory, [out, source], 128, seed=1)
    assert torch.equal(sums(memory, out, 64), a.float() @ b.float().T + 1)


def a_fragment(a: torch.Tensor) -> Any:
    """Returns the register fragments of ``[64, 32 bytes]`` in 128 threads, with four registers each."""
    words = bytes_of(a).reshape(64, 32).view(np.uint32)
    thread, i = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    return np.ascontiguousarray(words[thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2), thread % 4 + 4 * (i // 2)])


@pytest.mark.parametrize("limited", [False, True])
def test_the_left_operand_in_registers(limited: bool) -> None:
    """With limited accumulation, an FP8 wgmma keeps 13 fraction bits below the largest term of a sum. A small term beside a large
    term is lost."""
    a, b = draw("e4m3", 64, 32).float(), draw("e4m3", 8, 32, seed=1).float()
    a[0, 0], b[0, 0] = 256.0, 256.0
    a[0, 1:], b[0, 1:] = 0.0, 1.0
    a[0, 1] = 1.0
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    room, *offsets = laid_out(b8, 0, False)
    loads = "mul.wide.u32 %d42, %r0, 16; add.s64 %d42, %d42, %d2; ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d42];"
    body = FILL.format(words=len(room) // 4) + loads + descriptor(0, *offsets, 0)
    body += product("e4m3.e4m3", 8, "{%r20, %r21, %r22, %r23}", "%d10", "") + store_sums(8)
    memory = Memory(1 << 17)
    out, source, rows = memory.put(np.zeros((128, 4), np.float32)), memory.put(room), memory.put(a_fragment(a8))
    run(body, memory, [out, source, rows], 128, limited_fp8_accumulation=limited)
    wanted = a @ b.T + 1
    if limited:
        wanted[0, 0] = 65536.0  # the terms 1 and 1 are below 2 ** (16 - 13)
    assert torch.equal(sums(memory, out, 8), wanted)


@pytest.mark.parametrize(("kind", "depth"), [("f16", 16), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("e4m3", 32)])
def test_warps(kind: str, depth: int) -> None:
    a, b = draw(kind, 16, depth), draw(kind, 8, depth, seed=1)
    words = depth * TYPES[kind].itemsize // 4
    a_words, b_words = (bytes_of(x).reshape(len(x), -1).view(np.uint32) for x in (a, b))
    lane, i = np.meshgrid(np.arange(LANES), np.arange(words // 2), indexing="ij")
    a_given = a_words[lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)]
    lane, j = np.meshgrid(np.arange(LANES), np.arange(words // 4), indexing="ij")
    b_given = b_words[lane // 4, lane % 4 + 4 * j]
    memory = Memory(1 << 15)
    out, left, right = memory.put(np.zeros((LANES, 4), np.float32)), memory.put(a_given), memory.put(b_given)
    body = ""
    for base, count, first in ((1, words // 2, 20), (2, words // 4, 30)):
        body += f"mad.wide.u32 %d10, %r0, {4 * count}, %d{base};" + "".join(
            f"ld.global.b32 %r{first + at}, [%d10+{4 * at}];" for at in range(count)
        )
    registers = [", ".join(f"%r{first + at}" for at in range(count)) for first, count in ((20, words // 2), (30, words // 4))]
    operands = f"{{%f0, %f1, %f2, %f3}}, {{{registers[0]}}}, {{{registers[1]}}}, "
    body += f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {operands}"
    body += "{0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};"
    body += "mad.wide.u32 %d10, %r0, 16, %d0; st.global.v4.f32 [%d10], {%f0, %f1, %f2, %f3};"
    run(body, memory, [out, left, right])
    got = memory.get(out, np.float32, LANES, 4)
    lane, i = np.meshgrid(np.arange(LANES), np.arange(4), indexing="ij")
    wanted = (a.float() @ b.float().T + 1).numpy()
    assert (got == wanted[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]).all()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_fragments_come_and_go(trans: str) -> None:
    """``stmatrix`` restores the four matrices that ``ldmatrix`` loaded as fragments. Both instructions transpose, or neither
    does."""
    data = np.arange(256, dtype=np.uint16)
    body = FILL.format(words=128)
    body += f"""
    mad.lo.u32 %r10, %r0, 16, %r1; ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r10];
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r10+1024], {{%r20, %r21, %r22, %r23}}; bar.warp.sync -1;
    mad.wide.u32 %d10, %r0, 16, %d0; ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r10+1024];
    st.global.v4.b32 [%d10], {{%r30, %r31, %r32, %r33}}; st.global.v4.b32 [%d10+512], {{%r20, %r21, %r22, %r23}};
    """
    memory = Memory(1 << 15)
    out, source = memory.put(np.zeros(512, np.uint16)), memory.put(data)
    run(body, memory, [out, source])
    assert (memory.get(out, np.uint16, 256) == data).all()
    matrices = data.reshape(4, 8, 8)
    fragments = memory.get(out + 512, np.uint16, LANES, 4, 2)
    lane, i, e = np.meshgrid(np.arange(LANES), np.arange(4), np.arange(2), indexing="ij")
    row, column = lane // 4, lane % 4 * 2 + e
    assert (fragments == (matrices[i, column, row] if trans else matrices[i, row, column])).all()
