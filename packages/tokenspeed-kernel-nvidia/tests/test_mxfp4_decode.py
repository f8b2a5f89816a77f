"""The instructions that decode mxfp4 weights, executed one by one, against what the layout says that words mean."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from tokenspeed_kernel_nvidia.sm90.moe import mxfp4_decode_device as device

from .test_mxfp4_layout import MAGNITUDE_OF, MAGNITUDES, SIGN_OF

MASK = 0xFFFFFFFF
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def halves(register: Tensor) -> Tensor:
    """int64 to int16 ``[..., 2]``, lower half first."""
    parts = torch.stack((register & 0xFFFF, register >> 16), -1)
    return (parts - ((parts >> 15) << 16)).to(torch.int16)


def joined(parts: Tensor) -> Tensor:
    wide = parts.view(torch.int16).long() & 0xFFFF
    return wide[..., 0] | wide[..., 1] << 16


def multiply(kind: str, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a, b = (halves(x).view(HALVES[kind]).double() for x in (a, b))
    product = a * b
    if c is not None:
        product = product + halves(c).view(HALVES[kind]).double()
    return joined(product.to(HALVES[kind]))


def execute(code: str, *given: Tensor) -> list[Tensor]:
    """What the instructions write to their outputs, of those instructions that occur."""
    registers = {f"{{$r{at}}}": value for at, value in enumerate(given)}

    def read(name: str) -> Tensor:
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
        if name == "mov.b32":
            value = a
        elif name == "and.b32":
            value = a & rest[0]
        elif name == "shl.b32":
            value = a << rest[0]
        elif name == "shr.u32":
            value = a >> rest[0]
        elif name == "mul.lo.u32":
            value = a * rest[0]
        elif name == "lop3.b32":
            assert rest[2] == 0xEA  # (a and b) or c
            value = a & rest[0] | rest[1]
        else:
            assert name in ("fma.rn.bf16x2", "mul.rn.f16x2")
            value = multiply(name.split(".")[-1].removesuffix("x2"), a, *rest)
        registers[target] = value & MASK
    return [registers[f"{{$w{at}}}"] for at in range(4) if f"{{$w{at}}}" in registers]


def words(count: int) -> Tensor:
    random = torch.Generator().manual_seed(3)
    every = torch.arange(1 << 16)  # in one half, with anything in the other
    other = torch.randint(0, 1 << 16, (count, 2, 1 << 16), generator=random)
    return torch.cat(((every | other[:, 0] << 16).flatten(), (every << 16 | other[:, 1]).flatten()))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_word(kind: str) -> None:
    """All codes with all scales that a row can have."""
    word = words(2)
    random = torch.Generator().manual_seed(4)
    fields = torch.randint(0, 254, (4, len(word)), generator=random)
    fields[:, ::3] = torch.randint(215, 254, (4, len(word)), generator=random)[:, ::3]
    scales = fields[0] | fields[1] << 8 | fields[2] << 16 | fields[3] << 24
    pairs, code = (device.BFLOAT16_PAIRS, device.BFLOAT16) if kind == "bf16" else (device.FLOAT16_PAIRS, device.FLOAT16)
    both = [execute(device.BOTH, pair) for pair in execute(pairs, scales)]  # [row][half]
    for half in range(2):
        decoded = execute(code, word, both[0][half], both[1][half])
        for register in range(4):
            field = fields[2 * half + register % 2].double()
            got = halves(decoded[register]).view(HALVES[kind]).double()
            for element in range(2):
                bits = word >> 16 * element
                sign = 1 - 2 * ((bits >> SIGN_OF[register]) & 1)
                value = sign * MAGNITUDES[(bits >> MAGNITUDE_OF[register]) & 7].double() * torch.exp2(field - 253)
                if kind == "bf16":
                    wanted = torch.where(field > 0, value, 0.0).to(torch.bfloat16)
                else:
                    wanted = torch.where(field >= 225, value, 0.0).to(torch.float16)
                assert torch.equal(got[:, element], wanted.double())


def test_bytes_of_e5m2() -> None:
    """All words' codes, each in the byte that `decode_e5m2` names."""
    word = words(2)
    rows = execute(device.E5M2, word)
    for register in range(4):
        for element in range(2):
            bits = word >> 16 * element
            sign = 1 - 2 * ((bits >> SIGN_OF[register]) & 1)
            wanted = sign * MAGNITUDES[(bits >> MAGNITUDE_OF[register]) & 7] * 2.0**-14
            place = 2 * element + register // 2  # of elements 0, 8, 1, 9
            got = (rows[register % 2] >> 8 * place & 0xFF).to(torch.uint8).view(torch.float8_e5m2).float()
            assert torch.equal(got, wanted)
