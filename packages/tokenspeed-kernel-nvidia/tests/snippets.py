"""Executes inline PTX on tensors. A register is represented by an int64 tensor that holds the register's bits, with one element for
each lane.

Only the instructions of the tested snippets are supported.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def halves(register: Tensor) -> Tensor:
    """Splits the low 32 bits of an int64 register into int16 ``[..., 2]``, the lower half first."""
    parts = torch.stack((register & 0xFFFF, register >> 16), -1)
    return (parts - ((parts >> 15) << 16)).to(torch.int16)


def joined(parts: Tensor) -> Tensor:
    wide = parts.view(torch.int16).long() & 0xFFFF
    return wide[..., 0] | wide[..., 1] << 16


def floats(register: Tensor) -> Tensor:
    """Returns the float32 with this bit pattern."""
    return (register - ((register >> 31) << 32)).to(torch.int32).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    """Returns the bit pattern of a float32."""
    return x.view(torch.int32).long() & MASK


def _multiply(kind: str, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a, b = (halves(x).view(HALVES[kind]).double() for x in (a, b))
    product = a * b
    if c is not None:
        product = product + halves(c).view(HALVES[kind]).double()
    return joined(product.to(HALVES[kind]))


def _convert(name: str, a: Tensor, *rest: Tensor) -> Tensor:
    if name == "cvt.rn.satfinite.e4m3x2.f32":  # the first operand goes to the upper byte
        high, low = (floats(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).long() for x in (a, *rest))
        return low | high << 8
    if name == "cvt.rn.f16x2.e4m3x2":
        parts = torch.stack((a & 0xFF, a >> 8 & 0xFF), -1).to(torch.uint8)
        return joined(parts.view(torch.float8_e4m3fn).to(torch.float16))
    if name == "cvt.f32.f16":
        return bits(halves(a)[..., 0].contiguous().view(torch.float16).float())
    assert name == "cvt.u32.u16", name
    return a & 0xFFFF


def _result(name: str, a: Tensor, rest: list[Tensor]) -> Tensor:
    if name in ("mov.b32", "mov.f32"):
        return a
    if name == "and.b32":
        return a & rest[0]
    if name == "shl.b32":
        return a << rest[0]
    if name == "shr.u32":
        return a >> rest[0]
    if name == "mul.lo.u32":
        return a * rest[0]
    if name == "sub.f32":
        return bits(floats(a) - floats(rest[0]))
    if name in ("mul.f32", "mul.rn.f32"):
        return bits(floats(a) * floats(rest[0]))
    if name == "neg.f32":
        return a ^ 1 << 31
    if name == "fma.rn.f32":  # float64 holds the result of a float32 multiplication exactly
        return bits((floats(a).double() * floats(rest[0]).double() + floats(rest[1]).double()).float())
    if name == "prmt.b32":
        selected = [((a | rest[0] << 32) >> 8 * (int(rest[1]) >> 4 * byte & 7) & 0xFF) << 8 * byte for byte in range(4)]
        return selected[0] | selected[1] | selected[2] | selected[3]
    if name == "lop3.b32":
        assert rest[2] == 0xEA  # 0xEA: (a and b) or c
        return a & rest[0] | rest[1]
    if name.startswith("cvt."):
        return _convert(name, a, *rest)
    assert name in ("fma.rn.bf16x2", "mul.rn.f16x2"), name
    return _multiply(name.split(".")[-1].removesuffix("x2"), a, *rest)


def execute(code: str, *given: Tensor) -> list[Tensor]:
    """Executes the supported instructions, and returns the outputs."""
    registers = {f"{{$r{at}}}": value for at, value in enumerate(given)}

    def read(name: str) -> Tensor:
        if name.startswith("0f"):
            return torch.tensor(int(name[2:], 16))
        return torch.tensor(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in re.findall(r"[^;{}\s][^;]*(?=;)", code.strip()[1:-1]):
        name, operands = line.split(None, 1)
        if name == ".reg":
            continue
        pair = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", operands)
        if pair is not None:
            registers[pair[1]], registers[pair[2]] = read(pair[3]) & 0xFFFF, read(pair[3]) >> 16
            continue
        joint = re.fullmatch(r"(\S+), \{(\w+), (\w+)\}", operands)
        if joint is not None:
            registers[joint[1]] = read(joint[2]) | read(joint[3]) << 16
            continue
        target, *sources = operands.split(", ")
        a, *rest = map(read, sources)
        registers[target] = _result(name, a, rest) & MASK
    return [registers[f"{{$w{at}}}"] for at in range(4) if f"{{$w{at}}}" in registers]
