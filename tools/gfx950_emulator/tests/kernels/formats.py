"""Helpers for the kernel tests: decoding of fp4 and e8m0, random operands, and the error relative to a reference."""

from __future__ import annotations

import torch

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Decodes the e2m1 elements in uint8 [..., n] to float32 [..., 2 n]. The low four bits are the first element of a byte."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return FP4_VALUES[pairs.long()].flatten(-2)


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Decodes uint8 e8m0 scales, which must not be NaN, to float64 2^(scale - 127)."""
    return torch.exp2(scale.double() - 127)


def integers(rng: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Returns random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=rng, dtype=dtype)


def random_operand(
    form: str, rows: int, k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns a random operand [rows, k] of a block-scaled matmul: its storage, its e8m0 scales [rows, k / 32] or None, and its
    float64 values.

    `form` is "e2m1" (uint8, two elements per byte), "e4m3", "e5m2", "bf16" or "fp16"; the last two have no scales.
    """
    if form in ("bf16", "fp16"):
        plain = torch.randn(rows, k, generator=generator).to(torch.bfloat16 if form == "bf16" else torch.float16)
        return plain, None, plain.double()
    if form == "e2m1":
        stored = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        values = decode_fp4(stored).double()
    else:
        dtype = torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2
        stored = torch.randn(rows, k, generator=generator).to(dtype)
        values = stored.double()
    scale = torch.randint(120, 134, (rows, k // 32), generator=generator, dtype=torch.uint8)
    return stored, scale, values * decode_e8m0(scale).repeat_interleave(32, dim=1)


def packed_across(packed: torch.Tensor) -> torch.Tensor:
    """Repacks fp4 elements [rows, k / 2], which are packed along k, as [k, rows / 2], packed along the rows."""
    elements = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return (elements[0::2] | elements[1::2] << 4).T.contiguous()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the Frobenius norm of actual - expected, divided by the norm of expected; infinite if an element of actual is not
    finite."""
    error = torch.linalg.norm(actual.double() - expected.double()) / torch.linalg.norm(expected.double())
    return float(error) if torch.isfinite(error) else float("inf")
