"""Measures the roofline of a device: peak rates, to compare kernels' rates with."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tokenspeed_kernel.workbench.benchmark.timing import Call, measure
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.signature import dtype_name

# Bytes of a measured copy or sum: much larger than any cache, and small compared with any device's memory.
_BYTES = 2 << 30
_MATRIX = 8192
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class Roofline:
    """Peak rates of plain PyTorch on a device, which approximate a kernel's best possible rates.

    Attributes:
        copy_gb_per_s: rate of a copy, which counts bytes read and bytes written.
        read_gb_per_s: rate of a sum, which counts bytes read.
        tflops: rate of a GEMM of two random 8192 x 8192 matrices, by operand dtype (zeros would take less power and run faster):
            ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"``, ``"float32"``, and ``"tf32"``, which is float32 tensors rounded to
            TensorFloat-32. Dtypes that the device or PyTorch does not support are missing.
        date: when it was measured, in ISO 8601; empty if unknown.
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    tflops: Mapping[str, float] = field(default_factory=dict)
    date: str = ""

    @property
    def memory_gb_per_s(self) -> float:
        """The peak memory rate: the faster of copy and read, because kernels do both."""
        return max(self.copy_gb_per_s, self.read_gb_per_s)


@dataclass(frozen=True)
class Share:
    """The fraction of the roofline that a kernel reaches (``part``; 1 is the roofline), and what bounds the kernel: ``"memory"``,
    or the dtype whose peak arithmetic rate bounds it.
    """

    part: float
    bound: str


def share_of(cost: Cost, time_us: float, operands: Iterable[torch.dtype], roofline: Roofline) -> Share:
    """Returns the larger of a kernel's fractions of peak bandwidth and of peak arithmetic.

    Args:
        cost: the call's cost.
        time_us: the call's time in microseconds.
        operands: dtypes of the operands. The widest dtype with a known peak decides, because narrower operands are converted to it.
            Packed formats have no known peak, so with one packed operand the other operand's dtype decides.
        roofline: the device's roofline.
    """
    memory = Share(cost.bytes / time_us / 1e3 / roofline.memory_gb_per_s, "memory")
    known = [dtype for dtype in operands if dtype_name(dtype) in roofline.tflops]
    if not known:
        return memory
    widest = dtype_name(max(known, key=lambda dtype: dtype.itemsize))
    return max(memory, Share(cost.flops / time_us / 1e6 / roofline.tflops[widest], widest), key=lambda share: share.part)


def measure_roofline(device: torch.device | str) -> Roofline:
    """Measures the roofline of a GPU in about two seconds, with 4 GiB of memory. `roofline_cache` keeps the result.

    Raises:
        ValueError: the device is not a CUDA device.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"a roofline is measured on a GPU, got {where}")
    copy, read = _memory(where)
    return Roofline(copy, read, dict(_matmuls(where)))


def _memory(device: torch.device) -> tuple[float, float]:
    """Measures the memory rates of a copy and of a sum, in GB/s."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, budget_s=0.1).median_us
    read = measure(lambda: source.sum(), device, budget_s=0.1).median_us
    return 2 * _BYTES / copy / 1e3, _BYTES / read / 1e3


def _matmuls(device: torch.device) -> Iterator[tuple[str, float]]:
    """Measures GEMMs, and yields each operand dtype's name and its rate in TFLOP/s."""

    def rate(product: Call) -> float:
        return 2 * _MATRIX**3 / measure(product, device, budget_s=0.1).median_us / 1e6

    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(_MATRIX, _MATRIX, generator=draw, device=device) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float16):
        yield dtype_name(dtype), rate(functools.partial(torch.mm, a.to(dtype), b.to(dtype)))
    with _float32_matmuls(tf32=False):
        yield "float32", rate(functools.partial(torch.mm, a, b))
    # Only NVIDIA devices have TF32; on other devices the precision setting has no effect.
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        with _float32_matmuls(tf32=True):
            yield "tf32", rate(functools.partial(torch.mm, a, b))
    one = torch.ones((), device=device)
    for dtype in _FP8:
        try:
            # The second operand must be column-major.
            product = functools.partial(torch._scaled_mm, a.to(dtype), b.to(dtype).t(), one, one, out_dtype=torch.bfloat16)
            product()
        except (RuntimeError, ValueError):  # PyTorch or this device lacks this format
            continue
        yield dtype_name(dtype), rate(product)


@contextmanager
def _float32_matmuls(*, tf32: bool) -> Iterator[None]:
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)
