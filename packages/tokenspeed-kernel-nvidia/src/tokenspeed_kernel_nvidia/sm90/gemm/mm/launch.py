"""`mm` of a few rows of activations by weights, as in a decode step, on Hopper.

Each weight is read once, for at most 16 rows of activations. Partial sums are added in a fixed order, so results are bitwise
deterministic. There are two kernels:

- GEMMs with few rows of dense weights, such as a router's, are latency-bound. The CTAs of a cluster split k of 8 rows, so each CTA
  reads little of the activations (`split_device`). After an rmsnorm of one row, 1, 8 and 16 rows by 2880 x 128 weights took 2.1,
  2.3 and 2.4 us on an H200. With the ring buffer they took 3.2, 3.5 and 3.6 us.
- All other GEMMs are memory-bound. There is one CTA per SM, and the rows of weights are divided evenly among the CTAs, to within
  one row. Weights stream through a ring buffer in shared memory (`kernel_device`). With many activations, pairs of CTAs multicast
  them to each other: 16 rows by 2880 x 5120 weights took 10.2 us, and 10.6 us without pairs. If weights have few rows that are too
  long for the first kernel, the CTAs of a cluster split k.

A call does not say whether the preceding kernel writes the weights. So weights are read only after that kernel has ended (PDL
wait). Until then, some weights are prefetched into L2, which is coherent. A prefetch that continued while weights are read was
slower. After the same rmsnorm, one row by 2880 x 5120 weights took 10.3 to 11.2 us instead of 9.3 us.

A CTA leaves registers and shared memory of its SM to a CTA of the preceding or of the next kernel, so that launches overlap (PDL).
This overlap is worth more than loads directly to registers. A former kernel that filled the registers of all SMs with weights took
7.5 us for one row by 4096 x 2880 weights after that rmsnorm; this kernel takes 7.7 to 8.2 us. But the former kernel could not
overlap attention, nor could the router overlap the former kernel. Decode steps of GPT-OSS-120B of 1, 2 and 4 tokens took 2.12 to
2.16, 2.64 and 3.49 ms with the former kernel. They take 2.10, 2.51 and 3.37 ms with this kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned, is_aligned
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import Constraint, at_least, at_most, multiple_of
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES, KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import (
    ELEMENTS,
    QUAD_BYTES,
    RING_BYTES,
    ROWS,
    TOKENS,
    Config,
    Scales,
    Weights,
    config_of,
    every_config,
    is_long,
    layout_of,
    results_of,
    ring_bytes_of,
    sharing_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import SplitConfig, every_split_config, is_split, split_numbers_of, split_of
from tokenspeed_kernel_nvidia.sm90.target import ARCH

E4M3 = torch.float8_e4m3fn
# Up to this n, this kernel is preferred to PyTorch's GEMM with dense weights. After a kernel that does not trigger an early launch
# (PDL), 1 to 16 rows by 4096 x 2880 weights took 9.5 to 10.8 us on an H200. PyTorch's GEMM took 12.3 to 12.6 us. But 1 and 16 rows
# by 2880 x 5120 weights took 10.9 and 12.0 us, and PyTorch's GEMM took 10.6 us.
QUICK_N = 4096
# From this n on, and up to `FEW_ROWS` rows of activations, this kernel is preferred too: all GEMMs of so many columns are long
# (`config.is_long`). 201088 x 2880 weights took 259 us with one row, and 261 to 269 us with four; PyTorch's GEMM took 277 us.
LONG_N = 65536
# Up to this many rows of activations, this kernel is preferred to the portable kernel with scaled weights. Microseconds after a
# kernel that does not trigger an early launch, 2880 x 5120, for this kernel and the portable kernel. fp8 weights 9.7 and 10.1 (4
# rows), 10.7 and 10.1 (8), 13.2 and 10.2 (16). mxfp4 weights 11.4 and 12.7 (4), 12.8 and 12.7 (8), 15.7 and 12.8 (16). Block-scaled
# fp8 by fp8 8.9 and 10.0 (4), 9.9 and 9.9 (8), 10.3 and 9.4 (16).
FEW_ROWS = 4

Launch = Callable[..., Any]
NO_SCALES = (0,) * 6  # for calls without scales: address, row stride and column stride of a_scale, then of b_scale


@program(arch=ARCH, configs=every_config)
def mm_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.mm import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_split_config)
def split_program(config: SplitConfig) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.mm import split_device

    return split_device.host(config), split_device.fake_arguments(config)


@functools.cache
def _launch_of(
    a: torch.dtype, weights: Weights, scales: Scales, out: torch.dtype, m: int, n: int, row_bytes: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    """Returns the compiled kernel for a call, and the launch arguments that depend on the call's sizes only."""
    count = sm_count_of(device)
    if scales == "none" and is_split(m, n, row_bytes):
        split = split_of(dtype_name(a), dtype_name(out), m, row_bytes)
        return split_program(split), split_numbers_of(m, n)
    sharing = sharing_of(weights, m, n, row_bytes, count)
    config = config_of(dtype_name(a), weights, scales, dtype_name(out), m, sharing, row_bytes, is_long(n, count))
    numbers = numbers_of(config, m, n, row_bytes, count, ring_bytes_of(n, count))
    return mm_program(config), (*NO_SCALES, *numbers) if scales == "none" else numbers


def numbers_of(config: Config, m: int, n: int, row_bytes: int, count: int, ring_bytes: int = RING_BYTES) -> tuple[int, ...]:
    """Returns the number of CTAs, and the fields of the shared-memory `Layout`, as the kernel's last arguments.

    Args:
        m, n: rows of activations and of weights.
        row_bytes: bytes of a row of weights.
        count: number of SMs.

    Raises:
        ValueError: the layout does not fit into shared memory.
    """
    part = -(-row_bytes // (QUAD_BYTES * config.cluster)) * QUAD_BYTES
    ctas = ctas_of(config, n, count)
    rows = -(-n * config.cluster // ctas)
    stages = -(-rows // ROWS) * -(-min(part, row_bytes) // config.part_bytes)
    found = layout_of(config, m, min(part, row_bytes), ring_bytes, stages)
    if found is None:
        raise ValueError(f"mm: {m} rows of activations need more shared memory than a CTA has")
    return ctas, found.chunk_bytes, found.stages, found.scales, found.activations, found.ring, found.size


def ctas_of(config: Config, n: int, count: int) -> int:
    """Returns the number of CTAs of a launch: whole clusters, at most one CTA per SM, and no cluster without rows of weights."""
    return config.together * min(n, count // config.together)


def table_of(scale: Tensor | None) -> tuple[int, int, int]:
    """Returns the address of the scales, and their strides along rows and columns. The strides are 0 if there is only one scale."""
    if scale is None:
        return 0, 0, 0
    row, column = scale.stride() if scale.ndim == 2 else (0, 0)
    return scale.data_ptr(), row, column


def kinds_of(b: Tensor, b_scale: Tensor | None) -> tuple[Weights, Scales]:
    """Returns the storage format of the weights ``b``, and the granularity of their scales."""
    if b_scale is None:
        return "dense", "none"
    if b.dtype == torch.uint8:
        return "mxfp4", "mx"
    # If a scale's shape fits both granularities, the scaling is the same in both.
    return "float8_e4m3fn", "row" if b_scale.ndim < 2 or b_scale.shape == (1, b.shape[1]) else "block"


def arguments_of(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, numbers: tuple[int, ...]
) -> tuple[Any, ...]:
    """Returns the kernel's arguments. All tensors must stay alive until the launch.

    Args:
        numbers: the launch arguments that `_launch_of` returns.
    """
    if b.dtype == E4M3:  # kernels take fp8 as uint8, which every version of PyTorch can pass
        b = b.view(torch.uint8)
        if a.dtype == E4M3:
            a = a.view(torch.uint8)
    bias_at = kind = 0
    if bias is not None:
        bias_at, kind = bias.data_ptr(), KINDS[bias.dtype]
    if b_scale is None:
        return a, b, out, bias_at, kind, *numbers
    return a, b, out, bias_at, kind, *table_of(a_scale), *table_of(b_scale), *numbers


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> None:
    """Computes ``out = a @ b + bias``: launches the kernel on arguments that the operator has checked.

    Args:
        a: ``[m, k]``, m at most 16.
        b: ``[k, n]``, or ``[k/2, n]`` in mxfp4; a transposed view of rows.
        bias: ``[n]`` in bfloat16, float16 or float32, contiguous; or None.
        out: ``[m, n]``, in bfloat16, float16 or float32.
        a_scale, b_scale: as the operator defines them.

    Raises:
        ValueError: rows of a or b are not 16-byte aligned or not contiguous.
    """
    k, n = b.shape
    launch, numbers = _launch_of(
        a.dtype, *kinds_of(b, b_scale), out.dtype, a.shape[0], n, k * b.element_size(), a.get_device()
    )  # fmt: skip
    launch(*arguments_of(a, b, bias, out, a_scale, b_scale, numbers))


def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """Computes a GEMM of at most 16 rows: launches the kernel on arguments that the operator has checked.

    The public function is `tokenspeed_kernel_nvidia.mm`. Weights that are not contiguous along k are copied, unless PyTorch's GEMM
    supports the call. In that case PyTorch's GEMM is called.
    """
    dtype = out_dtype or (torch.bfloat16 if a.dtype == E4M3 else a.dtype)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    made = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device) if out is None else out
    if made.numel() == 0:
        return made
    try:
        multiply(a, b, bias, made, a_scale, b_scale)
    except ValueError:
        rows = b.mT
        if b_scale is None and not is_aligned(rows) and dtype == a.dtype and (bias is None or bias.dtype == dtype):
            return torch.mm(a, b, out=made) if bias is None else torch.addmm(bias, a, b, out=made)
        multiply(aligned(a), aligned(rows).mT, bias, made, a_scale, b_scale)
    return made


_FP8_ROWS = [fp8_format(E4M3, granularity) for granularity in ("tensor", "channel")]
_FP8_BLOCKS = fp8_format(E4M3, "block", (128, 128))


def _declare(
    name: str,
    a: torch.dtype,
    signatures: set[FormatSignature],
    step: int,
    n: Constraint | None = None,
    m: Constraint | None = None,
    quick: bool = False,
) -> None:
    """Registers the kernel for calls of some formats and sizes.

    Args:
        a: dtype of the activations.
        step: k must be a multiple of this number.
        n, m: trait constraints on the number of columns and rows of the result, or None.
        quick: whether measurements showed this kernel to be faster than the alternatives for these calls.
    """
    traits: dict[str, Any] = {
        "m": at_most(max(TOKENS)) if m is None else m,
        "k": at_least(step) & multiple_of(step),
        "out_dtype": {*results_of(dtype_name(a))},
        "bias": any,
        "wide_bias": any,
    }
    if n is not None:
        traits["n"] = n
    register_kernel(
        "gemm", "mm", name=f"cutedsl_mm_{name}", solution="cutedsl", capability=CUTEDSL_HOPPER, signatures=signatures,
        traits=traits, priority=Priority.PERFORMANT if quick else Priority.PORTABLE - 2, tags={"determinism"},
    )(mm)  # fmt: skip


def _declare_by_rows(name: str, a: torch.dtype, signatures: set[FormatSignature], step: int) -> None:
    """Registers the kernel twice: preferred for few rows of activations, and with low priority for more."""
    _declare(name, a, signatures, step, m=at_most(FEW_ROWS), quick=True)
    _declare(f"more_{name}", a, signatures, step, m=at_least(FEW_ROWS + 1) & at_most(max(TOKENS)))


for _dtype, _name in DTYPES.items():
    _a = dense_tensor_format(_dtype)
    _supported = {format_signature(a=_a, b=_a)}
    _declare(_name, _dtype, _supported, ELEMENTS["dense"], at_most(QUICK_N), quick=True)
    _declare(f"wide_{_name}", _dtype, _supported, ELEMENTS["dense"], at_least(QUICK_N + 1))
    _declare(f"long_{_name}", _dtype, _supported, ELEMENTS["dense"], at_least(LONG_N), at_most(FEW_ROWS), quick=True)
    _rows = {format_signature(a=_a, b=b) for b in _FP8_ROWS}
    _declare_by_rows(f"fp8_weights_{_name}", _dtype, _rows, ELEMENTS["float8_e4m3fn"])
    # Low priority: 1 and 2 rows by 2880 x 5120 weights took 9.9 and 10.0 us, and 9.7 and 9.8 us with the portable kernel.
    _blocks = {format_signature(a=_a, b=_FP8_BLOCKS)}
    _declare(f"fp8_block_weights_{_name}", _dtype, _blocks, ELEMENTS["float8_e4m3fn"])
_declare_by_rows(
    "fp8",
    E4M3,
    {
        *(format_signature(a=fp8_format(E4M3, granularity), b=b) for granularity in ("tensor", "token") for b in _FP8_ROWS),
        format_signature(a=fp8_format(E4M3, "block", (1, 128)), b=_FP8_BLOCKS),
    },
    ELEMENTS["float8_e4m3fn"],
)
# The scale of 32 elements of a row may exceed float16's range, so only bfloat16 is supported.
_mxfp4 = {format_signature(a=dense_tensor_format(torch.bfloat16), b=mxfp4_format((32, 1)))}
_declare_by_rows("mxfp4_weights_bfloat16", torch.bfloat16, _mxfp4, ELEMENTS["mxfp4"])
