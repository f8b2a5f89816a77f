"""Tests that an unknown instruction raises an error that names the instruction, before the kernel runs. Also tests literals,
parameters and declarations of PTX."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from sm90_emulator import EmulationError, UnknownInstruction
from sm90_emulator.assembly import bits_of, parse, split_operands
from sm90_emulator.launching import launch, pack
from sm90_emulator.machine import merged
from sm90_emulator.memory import Memory
from sm90_emulator.program import load
from sm90_emulator.registers import immediate

from .snippets import kernel

D4 = "{%f0, %f1, %f2, %f3}"
BULK = "cp.async.bulk"
UNKNOWN = {
    "control": ["bra nowhere;", "call (%r1), f, (%r2);", "brx.idx %r1, table;"],
    "moves": [
        "mov.b32 %r1, {%h0, %h1, %h2};",
        "mov.b64 {%h0, %h1, %h2}, %d0;",
        "mov.b32 %nothing, %r1;",
        "mov.b32 5, %r1;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 3, %p2;",
    ],
    "arithmetic": [
        "add.sat.s32 %r1, %r2, %r3;",
        "add.cc.u32 %r1, %r2, %r3;",
        "add.rz.f64 %d1, %d2, %d3;",
        "add.rz.sat.f32 %f1, %f2, %f3;",
        "mul24.lo.s32 %r1, %r2, %r3;",
        "popc.sat.b32 %r1, %r2;",
        "ex2.approx.rz.f32 %f1, %f2;",
        "setp.lt.relu.s32 %p1, %r1, %r2;",
    ],
    "conversions": [
        "cvt.rn.up.f32.f64 %f1, %d1;",
        "cvt.rn.s8.s32 %r1, %r2;",
        "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
        "cvt.rz.e4m3x2.f32 %h0, %f0, %f1;",
    ],
    "memory": [
        "ld.param.u32 %r1, [nothing];",
        "st.shared.f16x2 [%r1], %r2;",
        "atom.global.frob.u32 %r1, [%d0], 1;",
        "red.async.shared.add.u32 [%r1], %r2, [%r3];",
        "atom.global.add.v2.f32 {%f1, %f2}, [%d0], 5;",
    ],
    "barriers": [
        "barrier.red.popc.u32 %r1, 0, %p1;",
        "mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1;",
        "mbarrier.pending_count.b64 %r1, [%r2];",
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "setmaxnreg.inc.sync.aligned.u32 264;",
    ],
    "copies": [
        f"{BULK}.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d0, {{1, 2, 3}}], [%r5], {{%h0}};",
        f"{BULK}.shared::cta.shared::cta.add.u32 [%r1], [%r2], 16, [%r3];",
        f"{BULK}.global.global [%d0], [%d1], 16;",
    ],
    "matrices": [
        f"wgmma.mma_async.sync.aligned.m64n8k8.f32.f16.f16 {D4}, %d0, %d1, 1, 1, 1, 0, 0;",
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {D4}, %d0, %d1, 1, 1, 1, 0, 0;",
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D4}, %d0, %d1, !%p1, 1, 1, 0, 0;",
        f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {D4}, %d0, %d1, %r1, 0, 1, 1, 1, 0, 0;",
        f"mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {D4}, {{%r1}}, {{%r2}}, {D4};",
        f"mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {D4}, {{%d1}}, {{%d2}}, {D4};",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1};",
    ],
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_unknown_forms(family: str) -> None:
    for text in UNKNOWN[family]:
        with pytest.raises(UnknownInstruction) as caught:
            load(kernel(f"bra end; {text} end:"), "snippet")
        assert text.split()[0] in str(caught.value)
        assert caught.value.kernel == "snippet"


def test_hints_do_nothing() -> None:
    hints = (
        "prefetch.global.L2 [%d0]; prefetchu.L1 [%d0]; discard.global.L2 [%d0], 128; cp.async.bulk.prefetch.L2.global [%d0], 16;"
    )
    assert len(load(kernel(hints), "snippet").code) == len(load(kernel(""), "snippet").code)


@pytest.mark.parametrize(
    ("text", "kind", "bits"),
    [
        ("7", "u32", 7), ("-7", "s32", -7), ("0x1F", "b32", 31), ("017", "u32", 15), ("7U", "u32", 7), ("1", "pred", 0xFFFFFFFF),
        ("0", "pred", 0), ("0f3F800000", "f32", 0x3F800000), ("0F3f800000", "f64", struct.unpack("<Q", struct.pack("<d", 1.0))[0]),
        ("0d3FF0000000000000", "f64", 0x3FF0000000000000), ("0D3FF0000000000000", "f32", 0x3F800000), ("2", "f32", 0x40000000),
        ("1.5", "f16", 0x3E00), ("1e3", "f32", 0x447A0000), ("%r1", "u32", None), ("1.5", "u32", None), ("0f3F", "f32", None),
    ],
)  # fmt: skip
def test_literals(text: str, kind: str, bits: int | None) -> None:
    assert immediate(text, kind) == bits


@pytest.mark.parametrize(
    ("kind", "bits"), [("pred", 1), ("b8", 8), ("u16", 16), ("bf16", 16), ("tf32", 32), ("f16x2", 32), ("e4m3x2", 16), ("f64", 64)]
)
def test_widths(kind: str, bits: int) -> None:
    assert bits_of(kind) == bits


def test_operands_are_split_outside_of_brackets() -> None:
    assert split_operands("{%r1, %r2}, [%d0, {1, 2}], %p1|%p2, f(a, b)") == ("{%r1, %r2}", "[%d0, {1, 2}]", "%p1|%p2", "f(a, b)")
    assert split_operands("") == ()


MODULE = """
.version 8.8 // a comment; {
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.shared .align 16 .b8 mine[40];
/* .visible .entry no() { ret; } */
.visible .entry first(.param .u8 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 c[128], .param .f32 d)
.reqntid 256, 1, 1
{
    .loc 1 12 3
    .shared .align 8 .b64 more[2][3];
    .local .align 4 .b8 own[20];
    .reg .b32 %r<3>, single;
    .reg .pred p;
    start: @!p bra start;
    { .reg .b64 %r<2>; inner: mov.b64 %r1, 5; bra start; }
    ret;
}
.entry second() .maxntid 1024 .minnctapersm 2 { ret; }
"""


def test_a_module() -> None:
    kernels = parse(MODULE)
    assert list(kernels) == ["first", "second"]
    first = kernels["first"]
    assert {name: (each.offset, each.size) for name, each in first.parameters.items()} == {
        "a": (0, 1), "b": (8, 8), "c": (64, 128), "d": (192, 4),
    }  # fmt: skip
    assert first.parameter_bytes == 196
    assert first.shared == {"mine": 0, "more": 40, "dynamic": 128}
    assert first.static_bytes == 128
    assert (first.local, first.local_bytes) == ({"own": 0}, 20)
    assert (first.registers, kernels["second"].registers) == (256, 32)
    branch, move, back, _ = first.statements
    assert (branch.name, branch.operands, branch.guard) == ("bra", ("start",), ("p", True))
    assert (branch.scope.label("start"), move.scope.label("inner"), branch.scope.label("inner")) == (0, 1, None)
    assert back.scope.label("start") == 0
    names = [(scope.register("%r1"), scope.register("single"), scope.register("%r9")) for scope in (branch.scope, move.scope)]
    assert [(r.name, r.kind, s.name, none) for r, s, none in names] == [
        ("%r1", "b32", "single", None), ("%r1#1", "b64", "single", None),
    ]  # fmt: skip
    with pytest.raises(KeyError, match="first, second, and not third"):
        load(MODULE, "third")


@pytest.mark.parametrize(("body", "message"), [("mov.b32 %r1, %r2", "no PTX"), (".reg .b32;", "no declaration")])
def test_what_is_no_ptx(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f".entry f() {{ {body} }}")


def test_arguments_are_packed() -> None:
    first = parse(MODULE.replace(", .param .align 64 .b8 c[128]", ""))["first"]
    assert pack(first, [300, 2**40, 1.5]) == struct.pack("<B7xQf", 300 & 255, 2**40, 1.5)
    for arguments, message in (([1, 2], "takes 3 arguments, 2"), ([1.5, 2, 3.0], "a of first has 1 bytes, 1.5")):
        with pytest.raises(TypeError, match=message):
            pack(first, arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 1025}, "1025 threads"), ({"threads": 0}, "0 threads"), ({"grid": (3,), "cluster": 2}, "in clusters of"),
        ({"grid": (0,)}, "a grid of"), ({"text": MODULE}, "the kernels .*first, second"), ({"text": ""}, "the kernels none"),
    ],
)  # fmt: skip
def test_launches_that_cannot_be(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"text": kernel("", 0), "arguments": [], "threads": 32, "grid": (1,), "memory": Memory(64)}
    with pytest.raises(EmulationError, match=message):
        launch(**given | options)


def test_ranges_are_merged() -> None:
    assert merged([]) == []
    assert merged([(8, 8)]) == []
    assert merged([(30, 40), (0, 10), (10, 12), (2, 5), (35, 50), (60, 61)]) == [(0, 12), (30, 50), (60, 61)]
