"""Tests device functions of the MoE kernel for few tokens, as far as this needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from tokenspeed_kernel_nvidia.sm90.moe.stream import rows_device as rows
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import (
    MAX_EXPERTS,
    MAX_PAIRS,
    PARTS,
    SHARED_BYTES,
    Config,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import Entry, Shapes, entry_code, entry_of

from .snippets import bits, execute, floats

LARGEST = 256.0  # all elements of a scaled row are smaller than this


def scaled_numbers(dtype: torch.dtype) -> Tensor:
    """Returns all values that occur in a scaled row: the values of a dtype, times the powers of 2 by which rows are scaled."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    # The amax of a float16 row is from 2^-24 to 2^15. bfloat16 values have all relevant exponents without scaling.
    exponents = range(-8, 32) if dtype == torch.float16 else range(1)
    numbers = torch.cat([every * 2.0**exponent for exponent in exponents])
    return numbers[numbers.abs() < LARGEST]  # without NaN and infinity


def split(numbers: Tensor, others: Tensor, parts: int) -> Tensor:
    """Returns ``[parts, 2, n]``: the dequantised fp8 parts of pairs of values."""
    words = execute(rows._split(parts), bits(numbers), bits(others))
    assert len(words) == parts
    assert all((word >> 16 == 0).all() for word in words), "bytes are joined by or"
    pairs = [torch.stack((word & 0xFF, word >> 8)) for word in words]
    return torch.stack(pairs).to(torch.uint8).view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_of_a_row_sum_to_its_elements(dtype: torch.dtype) -> None:
    parts = PARTS[str(dtype).removeprefix("torch.")]
    numbers = scaled_numbers(dtype)
    others = numbers.flip(0)
    step = 2.0**-9 / rows.REST ** (parts - 1)  # the distance between the smallest values of the last part
    restored = sum(part / rows.REST**at for at, part in enumerate(split(numbers, others, parts)))
    assert isinstance(restored, Tensor)
    for got, given in zip(restored, (numbers, others), strict=True):
        error = (got - given.double()).abs()
        assert (error <= step / 2).all()
        assert (error[given.abs() >= step / torch.finfo(dtype).eps] == 0).all()


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_nan_and_infinity(parts: int) -> None:
    """Asserts that NaN stays NaN and affects only its own byte, and that infinity and values out of range become finite."""
    given = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6])
    found = split(given, torch.full((4,), 3.0), parts)
    assert found[:, 0, 0].isnan().all()
    assert found[:, 0, 1:].isfinite().all()
    assert (found[0, 1] == 3).all()
    assert (found[1:, 1] == 0).all()


def test_quotients_of_rounded_rows() -> None:
    """Asserts that quotients equal those of a division, although the hardware's approximate reciprocal may be off by one ulp."""
    generator = torch.Generator().manual_seed(1)
    y = 0.25 + 0.75 * torch.rand(1 << 20, generator=generator)
    x = (torch.rand(y.shape, generator=generator) * 2 - 1) * rows.LARGEST * y
    halves = torch.arange(17, 449, 2)  # includes the midpoints of neighbouring float8_e4m3fn values of at least 16
    x[: halves.numel()], y[: halves.numel()] = halves * 0.375, 0.375
    x[-3:] = torch.tensor([torch.nan, 0.0, -0.0])
    for ulps in (-1, 0, 1):
        approximate = bits(1 / y) + ulps
        (inverse,) = execute(rows._RECIPROCAL, bits(y), approximate)
        (found,) = execute(rows._QUOTIENT, bits(x), bits(y), inverse)
        assert torch.equal(found[:-3], bits(x / y)[:-3])
        assert floats(found[-3:]).isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("config", every_config(), ids=str)
def test_shared_memory(config: Config) -> None:
    assert Shapes(config).storage().size_in_bytes() <= SHARED_BYTES


def test_entries_as_integers() -> None:
    most = max(config.pairs for config in every_config())
    for expert in (0, 1, MAX_EXPERTS - 1):
        for first in (0, 7, MAX_PAIRS - 1):
            for count in (1, most):
                code = entry_code(expert, first, count)
                assert code < 1 << 31
                assert entry_of(code) == Entry(expert, first, count)
