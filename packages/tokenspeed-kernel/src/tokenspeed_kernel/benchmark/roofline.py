"""What a device can do at most, measured: the scale that kernels' rates are read against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed_kernel.benchmark.timing import measure

# Far beyond any cache, and small beside any device's memory.
_BYTES = 2 << 30
_MATRIX = 8192


@dataclass(frozen=True)
class Roofline:
    """Rates of plain PyTorch on a device, the best that a kernel can expect.

    Attributes:
        copy_gb_per_s: bytes read and written by a copy.
        read_gb_per_s: bytes read by a sum.
        bf16_tflops: a product of two 8192 x 8192 matrices of random bfloat16 numbers (zeros take less power, so they run faster).
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    bf16_tflops: float


def measure_roofline(device: torch.device | str) -> Roofline:
    """Takes about a second and 4 GiB on a GPU.

    Raises:
        ValueError: the device is a CPU, of which the numbers would say nothing.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"a roofline is measured on a GPU, got {where}")
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device=where)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), where, budget_s=0.1).median_us
    read = measure(lambda: source.sum(), where, budget_s=0.1).median_us
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=where) for _ in range(2))
    product = measure(lambda: a @ b, where, budget_s=0.2).median_us
    return Roofline(2 * _BYTES / copy / 1e3, _BYTES / read / 1e3, 2 * _MATRIX**3 / product / 1e6)
