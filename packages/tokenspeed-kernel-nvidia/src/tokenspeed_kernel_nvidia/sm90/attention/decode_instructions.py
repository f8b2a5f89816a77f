"""Instructions that decode is made of, one function each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32, cute


def mma(kind: str, c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> Any:
    """``c + a @ b``, of 16 x 16 and 16 x 8."""
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def ldmatrix(address: Any, transposed: bool) -> Any:
    """Four 8 x 8 matrices, whose rows the lanes name."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def pack(kind: str, low: Any, high: Any) -> Any:
    """Two numbers in 16 bits each."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def load_floats(space: str, address: Any, count: int) -> Any:
    """2 or 4 neighbours."""
    to = ", ".join(f"{{$w{at}}}" for at in range(count))
    return cute.arch.inline_ptx(
        f"ld.{space}.v{count}.f32 {{{to}}}, [{{$r0}}];", write_only_types=[Float32] * count, read_only_args=[address]
    )


def load_int(address: Any, early: bool) -> Any:
    """``early``: while others may still write it. What is read then is not kept where a later read would find it."""
    order = ".relaxed.gpu" if early else ""
    return cute.arch.inline_ptx(f"ld{order}.global.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address])


def touch_line(address: Any) -> None:
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def store_floats(space: str, address: Any, values: Sequence[Any]) -> None:
    given = ", ".join(f"{{$r{at + 1}}}" for at in range(len(values)))
    cute.arch.inline_ptx(f"st.{space}.v{len(values)}.f32 [{{$r0}}], {{{given}}};", read_only_args=[address, *values])


def here(x: Any) -> Any:
    """``x``, of which nothing is computed in advance, as that would take registers from the loop in between."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def larger(a: Any, b: Any) -> Any:
    return cute.arch.fmax(a, b)
