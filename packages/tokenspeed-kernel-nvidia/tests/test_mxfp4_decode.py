"""Tests the instructions that dequantise mxfp4 weights. They are executed one by one, and compared with the layout's definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import decode_device as device
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import OCTAVES

from .snippets import HALVES, execute, halves
from .test_mxfp4_layout import MAGNITUDE_OF, MAGNITUDES, SIGN_OF


def words(count: int) -> Tensor:
    random = torch.Generator().manual_seed(3)
    every = torch.arange(1 << 16)  # all values of one half of a word, with random bits in the other half
    other = torch.randint(0, 1 << 16, (count, 2, 1 << 16), generator=random)
    return torch.cat(((every | other[:, 0] << 16).flatten(), (every << 16 | other[:, 1]).flatten()))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_word(kind: str) -> None:
    """Tests all e2m1 values with all scales that a row can have."""
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
    """Tests the fp8 values of all words. Each value must be in the byte that the docstring of `decode_e5m2` states."""
    word = words(2)
    rows = execute(device.E5M2, word)
    for register in range(4):
        for element in range(2):
            bits = word >> 16 * element
            sign = 1 - 2 * ((bits >> SIGN_OF[register]) & 1)
            wanted = sign * MAGNITUDES[(bits >> MAGNITUDE_OF[register]) & 7] * 2.0**-14
            place = 2 * element + register // 2  # the byte's index: the bytes hold elements 0, 8, 1, 9
            got = (rows[register % 2] >> 8 * place & 0xFF).to(torch.uint8).view(torch.float8_e5m2).float()
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("pairs", [device.FLOAT16_PAIRS, device.NEAR_FLOAT16_PAIRS], ids=["all", "near"])
def test_scaled_bytes(pairs: str) -> None:
    """Tests `decode_scaled_e5m2` with all scales for which it is exact, and with zero."""
    word = words(1)
    random = torch.Generator().manual_seed(5)
    fields = torch.randint(252 - OCTAVES, 254, (4, len(word)), generator=random)
    fields[fields == 252 - OCTAVES] = 0
    scales = fields[0] | fields[1] << 8 | fields[2] << 16 | fields[3] << 24
    both = [execute(device.BOTH, pair) for pair in execute(pairs, scales)]  # [row][half]
    for half in range(2):
        rows = execute(device.SCALED_E5M2, word, both[0][half], both[1][half])
        for register in range(4):
            field = fields[2 * half + register % 2].double()
            for element in range(2):
                bits = word >> 16 * element
                sign = 1 - 2 * ((bits >> SIGN_OF[register]) & 1)
                wanted = sign * MAGNITUDES[(bits >> MAGNITUDE_OF[register]) & 7].double() * torch.exp2(field - 253)
                wanted = torch.where(field > 0, wanted, 0.0)
                place = 2 * element + register // 2  # the byte's index: the bytes hold elements 0, 8, 1, 9
                got = (rows[register % 2] >> 8 * place & 0xFF).to(torch.uint8).view(torch.float8_e5m2).double()
                assert torch.equal(got, wanted)
