"""What a device can do at most, measured: the scale that kernels' rates are read against."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tokenspeed_kernel.workbench.benchmark.timing import Call, measure
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.signature import dtype_name

# Far beyond any cache, and small beside any device's memory.
_BYTES = 2 << 30
_MATRIX = 8192
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class Roofline:
    """Rates of plain PyTorch on a device, the best that a kernel can expect.

    Attributes:
        copy_gb_per_s: bytes read and written by a copy.
        read_gb_per_s: bytes read by a sum.
        tflops: by what is multiplied, a product of two 8192 x 8192 matrices of random numbers (zeros take less power, so they run
            faster): ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"``, ``"float32"``, and ``"tf32"``, which is float32 tensors
            rounded to TensorFloat-32. What the device or PyTorch cannot do is missing.
        date: when it was measured, in ISO 8601; empty if that is not known.
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    tflops: Mapping[str, float] = field(default_factory=dict)
    date: str = ""

    @property
    def memory_gb_per_s(self) -> float:
        """The faster of copy and read: kernels do both."""
        return max(self.copy_gb_per_s, self.read_gb_per_s)


@dataclass(frozen=True)
class Share:
    """How near a kernel is to what the device can do: the part of its rate (1 is all), and of which: ``"memory"`` or a dtype."""

    part: float
    bound: str


def share_of(cost: Cost, time_us: float, operands: Iterable[torch.dtype], roofline: Roofline) -> Share:
    """The larger of a kernel's shares in memory and arithmetic.

    Args:
        cost: of the call.
        time_us: that it took.
        operands: dtypes of what it multiplies. The widest of those that the device multiplies decides: a narrower operand is
            converted to it. Packed formats count nothing, their other operand decides.
        roofline: of the device.
    """
    memory = Share(cost.bytes / time_us / 1e3 / roofline.memory_gb_per_s, "memory")
    known = [dtype for dtype in operands if dtype_name(dtype) in roofline.tflops]
    if not known:
        return memory
    widest = dtype_name(max(known, key=lambda dtype: dtype.itemsize))
    return max(memory, Share(cost.flops / time_us / 1e6 / roofline.tflops[widest], widest), key=lambda share: share.part)


def measure_roofline(device: torch.device | str) -> Roofline:
    """Takes about two seconds and 4 GiB on a GPU. See `roofline_cache` for one that is measured once.

    Raises:
        ValueError: the device is a CPU, of which the numbers would say nothing.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"a roofline is measured on a GPU, got {where}")
    copy, read = _memory(where)
    return Roofline(copy, read, dict(_products(where)))


def _memory(device: torch.device) -> tuple[float, float]:
    """GB/s of a copy and of a sum."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, budget_s=0.1).median_us
    read = measure(lambda: source.sum(), device, budget_s=0.1).median_us
    return 2 * _BYTES / copy / 1e3, _BYTES / read / 1e3


def _products(device: torch.device) -> Iterator[tuple[str, float]]:
    """TFLOP/s by what is multiplied."""

    def rate(product: Call) -> float:
        return 2 * _MATRIX**3 / measure(product, device, budget_s=0.1).median_us / 1e6

    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(_MATRIX, _MATRIX, generator=draw, device=device) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float16):
        yield dtype_name(dtype), rate(functools.partial(torch.mm, a.to(dtype), b.to(dtype)))
    with _float32_products(tf32=False):
        yield "float32", rate(functools.partial(torch.mm, a, b))
    # NVIDIA's devices alone have it; elsewhere the switch does nothing.
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        with _float32_products(tf32=True):
            yield "tf32", rate(functools.partial(torch.mm, a, b))
    one = torch.ones((), device=device)
    for dtype in _FP8:
        try:
            # The second operand must be stored by columns.
            product = functools.partial(torch._scaled_mm, a.to(dtype), b.to(dtype).t(), one, one, out_dtype=torch.bfloat16)
            product()
        except (RuntimeError, ValueError):  # how PyTorch says that this device does not multiply this format
            continue
        yield dtype_name(dtype), rate(product)


@contextmanager
def _float32_products(*, tf32: bool) -> Iterator[None]:
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)
