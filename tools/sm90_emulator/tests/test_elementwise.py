"""Tests elementwise instructions against NumPy and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sm90_emulator import UnknownInstruction
from sm90_emulator.memory import Memory

from .snippets import LANES, lanes, run

DRAW = np.random.default_rng(0)
INTEGERS = np.concatenate(
    [DRAW.integers(0, 2**32, 24, dtype=np.uint32), np.array([0, 1, 2**31, 2**31 - 1, 2**32 - 1, 7, 33, 64], np.uint32)]
)
OTHERS = INTEGERS[::-1].copy()
FLOATS = np.concatenate(
    [
        DRAW.normal(size=22) * 10.0 ** DRAW.integers(-6, 6, 22),
        [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 448.0, 65519.0, 1e-40],
    ]
).astype(np.float32)
Check = Callable[..., Any]


def signed(x: Any) -> Any:
    return x.view(np.int32).astype(object)


def wide(x: Any) -> Any:
    return x.astype(object)


def cut(x: Any) -> Any:
    return np.array([int(value) & 0xFFFFFFFF for value in x], np.uint32)


def quotient(a: int, b: int) -> int:
    """Returns the quotient, rounded towards zero."""
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else -1


BINARY: dict[str, Check] = {
    "add.s32": lambda x, y: wide(x) + wide(y),
    "sub.s32": lambda x, y: wide(x) - wide(y),
    "mul.lo.s32": lambda x, y: wide(x) * wide(y),
    "mul.hi.u32": lambda x, y: [a * b >> 32 for a, b in zip(wide(x), wide(y), strict=True)],
    "mul.hi.s32": lambda x, y: [a * b >> 32 for a, b in zip(signed(x), signed(y), strict=True)],
    "min.s32": lambda x, y: np.minimum(signed(x), signed(y)),
    "max.u32": lambda x, y: np.maximum(x, y),
    "min.relu.s32": lambda x, y: np.maximum(np.minimum(signed(x), signed(y)), 0),
    "div.u32": lambda x, y: [a // b if b else 0xFFFFFFFF for a, b in zip(wide(x), wide(y), strict=True)],
    "rem.u32": lambda x, y: [a % b if b else a for a, b in zip(wide(x), wide(y), strict=True)],
    "div.s32": lambda x, y: [quotient(a, b) for a, b in zip(signed(x), signed(y), strict=True)],
    "and.b32": lambda x, y: x & y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, y: [a << b if b < 32 else 0 for a, b in zip(wide(x), wide(y), strict=True)],
    "shr.u32": lambda x, y: [a >> b if b < 32 else 0 for a, b in zip(wide(x), wide(y), strict=True)],
    "shr.s32": lambda x, y: [a >> min(b, 31) for a, b in zip(signed(x), wide(y), strict=True)],
    "max.u16x2": lambda x, y: np.maximum(x.view(np.uint16), y.view(np.uint16)).view(np.uint32),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_integers(name: str) -> None:
    got = lanes(f"{name} %r100, %r10, %r11;", [INTEGERS, OTHERS], np.uint32)
    assert (got == cut(BINARY[name](INTEGERS, OTHERS))).all()


def test_integers_of_other_widths() -> None:
    got = lanes("mul.wide.s32 %d40, %r10, %r11;", [INTEGERS, OTHERS], np.int64)
    assert got.tolist() == [a * b for a, b in zip(signed(INTEGERS), signed(OTHERS), strict=True)]
    got = lanes("cvt.s64.s32 %d20, %r10; mad.lo.s64 %d40, %d20, 3, %d20;", [INTEGERS], np.int64)
    assert got.tolist() == [4 * a for a in signed(INTEGERS)]
    got = lanes("cvt.s8.s32 %h0, %r10; cvt.s32.s16 %r100, %h0;", [INTEGERS], np.int32)
    assert (got == INTEGERS.astype(np.uint8).view(np.int8)).all()
    got = lanes("cvt.u16.u32 %h0, %r10; mul.hi.u16 %h1, %h0, 1639; cvt.u32.u16 %r100, %h1;", [INTEGERS], np.uint32)
    assert (got == ((INTEGERS & 0xFFFF) * 1639 >> 16)).all()


def test_bits() -> None:
    x, y = INTEGERS, OTHERS
    assert (lanes("lop3.b32 %r100, %r10, %r11, 255, 0xEA;", [x, y], np.uint32) == (x & y | 255)).all()
    assert lanes("popc.b32 %r100, %r10;", [x], np.uint32).tolist() == [int(a).bit_count() for a in x]
    assert lanes("clz.b32 %r100, %r10;", [x], np.uint32).tolist() == [32 - int(a).bit_length() for a in x]
    assert (lanes("bfe.u32 %r100, %r10, 5, 9;", [x], np.uint32) == (x >> 5 & 511)).all()
    assert (lanes("bfi.b32 %r100, %r10, %r11, 8, 4;", [x, y], np.uint32) == (y & ~np.uint32(0xF00) | (x & 15) << 8)).all()
    assert (lanes("shf.l.wrap.b32 %r100, %r10, %r11, 4;", [x, y], np.uint32) == (y << 4 | x >> 28)).all()
    selected = lanes("prmt.b32 %r100, %r10, %r11, 0x8715;", [x, y], np.uint32)
    pairs = np.stack([x, y], 1).view(np.uint8)
    sign = np.where(pairs[:, 0] >> 7, 255, 0)
    assert (selected.view(np.uint8).reshape(-1, 4) == np.stack([pairs[:, 5], pairs[:, 1], pairs[:, 7], sign], 1)).all()


def field(x: int, at: int, count: int, bits: int, is_signed: bool) -> int:
    """Returns a bit field of ``x``, computed bit by bit by the ISA's definition. The field may be negative for signed types."""
    if not count:
        return 0
    top = x >> min(at + count - 1, bits - 1) & 1 if is_signed else 0
    taken = [x >> (at + index) & 1 if index < count and at + index < bits else top for index in range(bits)]
    return sum(bit << index for index, bit in enumerate(taken))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_fields_of_bits(kind: str) -> None:
    """Instructions on bits and bit fields follow the ISA, also for fields that begin or end outside of the register. Position and
    length are the lowest 8 bits of their registers."""
    bits, letter = int(kind[1:]), "r" if kind[1:] == "32" else "d"
    unsigned, result = np.dtype(f"u{bits // 8}"), "%r100" if bits == 32 else "%d40"
    x, y = (DRAW.integers(0, 2**bits, LANES, dtype=unsigned) for _ in range(2))
    places = DRAW.integers(0, bits + 9, LANES, dtype=np.uint32) + np.uint32(256)
    counts = DRAW.integers(0, bits + 9, LANES, dtype=np.uint32)
    counts[:4] = 0, 1, bits, 255
    got = lanes(f"bfe.{kind} {result}, %{letter}10, %r11, %r12;", [x, places, counts], unsigned)
    rows = list(zip(x.tolist(), y.tolist(), (places & 255).tolist(), counts.tolist(), strict=True))
    assert got.tolist() == [field(a, at, count, bits, kind[0] == "s") for a, _, at, count in rows]
    got = lanes(f"bfi.b{bits} {result}, %{letter}10, %{letter}11, %r12, %r13;", [x, y, places, counts], unsigned)
    masks = [((1 << count) - 1) << at & (1 << bits) - 1 for _, _, at, count in rows]
    assert got.tolist() == [b & ~mask | a << at & mask for (a, b, at, _), mask in zip(rows, masks, strict=True)]
    size = [(a ^ (1 << bits) - 1 if kind[0] == "s" and a >> bits - 1 else a).bit_length() - 1 & 0xFFFFFFFF for a in x.tolist()]
    assert lanes(f"bfind.{kind} %r100, %{letter}10;", [x], np.uint32).tolist() == size
    got = lanes(f"brev.b{bits} {result}, %{letter}10;", [x], unsigned)
    assert got.tolist() == [int(f"{a:0{bits}b}"[::-1], 2) for a in x.tolist()]
    assert lanes(f"popc.b{bits} %r100, %{letter}10;", [x], np.uint32).tolist() == [a.bit_count() for a in x.tolist()]
    x[::2] = 0
    assert (lanes(f"cnot.b{bits} {result}, %{letter}10;", [x], unsigned) == (x == 0)).all()


@pytest.mark.parametrize("kinds", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dot_products_of_bytes(kinds: str) -> None:
    x, y = (
        side.view(np.int8 if kind == "s32" else np.uint8) for side, kind in zip((INTEGERS, OTHERS), kinds.split("."), strict=True)
    )
    wanted = (x.astype(np.int64) * y).reshape(-1, 4).sum(1) + 5
    assert (lanes(f"dp4a.{kinds} %r100, %r10, %r11, 5;", [INTEGERS, OTHERS], np.uint32) == cut(wanted)).all()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_floats(name: str) -> None:
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        wanted = function(FLOATS, FLOATS[::-1])
    got = lanes(f"{name}.rn.f32 %r100, %r10, %r11;", [FLOATS, FLOATS[::-1].copy()], np.float32)
    np.testing.assert_array_equal(got, wanted)


def test_functions_of_floats() -> None:
    with np.errstate(all="ignore"):
        small = np.clip(np.nan_to_num(FLOATS), -20, 20)
        np.testing.assert_allclose(lanes("ex2.approx.ftz.f32 %r100, %r10;", [small], np.float32), np.exp2(small), 1e-6)
        size = np.abs(small) + np.float32(0.1)
        np.testing.assert_allclose(lanes("lg2.approx.f32 %r100, %r10;", [size], np.float32), np.log2(size), 1e-5, 1e-6)
        np.testing.assert_allclose(lanes("rsqrt.approx.f32 %r100, %r10;", [size], np.float32), 1 / np.sqrt(size), 1e-6)
        got = lanes("fma.rn.f32 %r100, %r10, %r10, 0fBF800000;", [small], np.float32)
        np.testing.assert_array_equal(got, (small.astype(np.float64) ** 2 - 1).astype(np.float32))
    other = FLOATS[::-1].copy()
    np.testing.assert_array_equal(lanes("max.f32 %r100, %r10, %r11;", [FLOATS, other], np.float32), np.fmax(FLOATS, other))
    np.testing.assert_array_equal(lanes("max.NaN.f32 %r100, %r10, %r11;", [FLOATS, other], np.float32), np.maximum(FLOATS, other))


def test_comparisons_and_selections() -> None:
    instructions = "setp.{} %p1, %r10, %r11; selp.b32 %r100, 1, 0, %p1;"
    other = FLOATS[::-1].copy()
    for word, function in (("lt.f32", np.less), ("ge.f32", np.greater_equal), ("eq.f32", np.equal), ("neu.f32", np.not_equal)):
        assert (lanes(instructions.format(word), [FLOATS, other], np.uint32) == function(FLOATS, other)).all()
    both = """
    setp.lt.u32 %p2, %r10, 1000; setp.gt.and.s32 %p1|%p3, %r10, %r11, !%p2;
    selp.b32 %r20, 2, 0, %p3; selp.b32 %r100, 1, %r20, %p1;
    """
    more, large = signed(INTEGERS) > signed(OTHERS), INTEGERS >= 1000
    assert (lanes(both, [INTEGERS, OTHERS], np.uint32) == np.where(more & large, 1, np.where(~more & large, 2, 0))).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves(kind: str) -> None:
    """A 16-bit operation rounds once, fused multiply-add included."""
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    draw = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(2 * LANES, generator=draw).to(dtype) for _ in range(3))
    words = [x.view(torch.int16).numpy().view(np.uint32) for x in (a, b, c)]
    got = torch.from_numpy(lanes(f"fma.rn.{kind}x2 %r100, %r10, %r11, %r12;", words, np.uint32).view(np.int16)).view(dtype)
    exact = a.double() * b.double() + c.double()
    near = torch.stack([exact.float().to(dtype).double(), got.double()])
    assert (near[1] - exact).abs().le((near[0] - exact).abs()).all()
    got = torch.from_numpy(lanes(f"mul.rn.{kind}x2 %r100, %r10, %r11;", words[:2], np.uint32).view(np.int16)).view(dtype)
    assert torch.equal(got, (a.float() * b.float()).to(dtype))
    floats = torch.from_numpy(FLOATS.copy())
    got = lanes(f"cvt.rn.{kind}x2.f32 %r100, %r10, %r11;", [FLOATS, np.zeros(LANES, np.float32)], np.uint32) >> 16
    got = torch.from_numpy(got.astype(np.uint16).view(np.int16)).view(dtype)
    torch.testing.assert_close(got, floats.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_eight_bits(kind: str) -> None:
    dtype, most = (torch.float8_e4m3fn, 448) if kind == "e4m3" else (torch.float8_e5m2, 57344)
    x = torch.cat([torch.from_numpy(FLOATS), torch.randn(480, generator=torch.Generator().manual_seed(2)) * 0.02])
    for part in x.split(LANES):
        code = lanes(f"cvt.rn.satfinite.{kind}x2.f32 %h0, 0f00000000, %r10; cvt.u32.u16 %r100, %h0;", [part.numpy()], np.uint32)
        got = torch.from_numpy(code.astype(np.uint8)).view(dtype)
        torch.testing.assert_close(got.float(), part.clamp(-most, most).to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    codes = np.arange(256, dtype=np.uint32)
    for first in range(0, 256, LANES):
        some = codes[first : first + LANES].copy()
        got = (
            lanes(f"cvt.u16.u32 %h0, %r10; cvt.rn.f16x2.{kind}x2 %r100, %h0;", [some], np.uint32).astype(np.uint16).view(np.float16)
        )
        wanted = torch.from_numpy(some.astype(np.uint8)).view(dtype).to(torch.float16).numpy()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
def test_floats_to_integers(mode: str, function: Check) -> None:
    got = lanes(f"cvt.{mode}.s32.f32 %r100, %r10;", [FLOATS], np.int32)
    wanted = np.clip(np.nan_to_num(function(FLOATS.astype(np.float64)), nan=0.0), -(2**31), 2**31 - 1)
    assert (got == wanted).all()


def test_packing() -> None:
    both = "mov.b64 %d20, {%r10, %r11}; mov.b64 {%r20, %r21}, %d20; mov.b32 {%h0, %h1}, %r21; mov.b32 %r100, {%h1, %h0};"
    assert (lanes(both, [INTEGERS, OTHERS], np.uint32) == (OTHERS >> 16 | OTHERS << 16)).all()


def test_lanes_that_diverge_come_together() -> None:
    """Each lane runs a loop as many times as its index, and all lanes reconverge after the loop."""
    loop = """
    mov.b32 %r20, 0; mov.b32 %r21, 0;
    again: setp.ge.u32 %p1, %r20, %r0; @%p1 bra done;
    add.u32 %r21, %r21, %r20; add.u32 %r20, %r20, 1; bra again;
    done: bar.warp.sync -1; vote.sync.ballot.b32 %r22, %p1, -1; add.u32 %r100, %r21, %r22;
    """
    numbers = np.arange(LANES)
    for seed in (0, 5):
        got = lanes(loop, [], np.uint32, seed=seed)
        assert (got == (numbers * (numbers - 1) // 2 - 1).astype(np.int64) % 2**32).all()


def test_scopes_of_inline_assembly() -> None:
    twice = """
    { .reg .b32 x; mov.b32 x, 5; L: add.u32 %r20, x, 1; }
    { .reg .b32 x; mov.b32 x, 7; bra L; add.u32 x, x, 100; L: add.u32 %r100, x, %r20; }
    """
    assert (lanes(twice, [], np.uint32) == 13).all()


def test_what_is_unknown_is_said_before_anything_runs() -> None:
    for text in ("frob.b32 %r1, %r2;", "add.sat.s32 %r1, %r2, %r3;", "setp.lt.s32 %p1, %r1, %nothing;"):
        with pytest.raises(UnknownInstruction, match=text.split()[0]):
            run(f"bra end; {text} end:", Memory(4096), [])
