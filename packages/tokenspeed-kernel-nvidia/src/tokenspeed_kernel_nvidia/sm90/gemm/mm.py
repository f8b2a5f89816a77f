"""Products of a few rows of activations with weights, as in a decode step, on Hopper.

Memory decides the speed: each weight is read once, for at most 16 rows of activations. Every multiprocessor has one CTA and equally
many rows of the weights, to a row. Sums are added in a fixed order, so that the bits are the same in every run. There are two
programs:

- Where there are few rows of dense weights, as a router's, latency decides. The CTAs of a cluster share 8 rows, each with a part of
  them, and have little of the activations to read (`mm_split_device`). Behind an rmsnorm of one row, 1, 8 and 16 rows of 2880 x 128
  took 2.1, 2.3 and 2.4 microseconds on an H200, and through the ring 3.2, 3.5 and 3.6.
- Otherwise weights come through a ring in shared memory (`mm_device`). Where there are many activations, pairs of CTAs copy them
  for both: 16 rows of 2880 x 5120 took 10.2 microseconds, and 10.6 without pairs. Where rows of weights are few and too long for
  the first program, the CTAs of a cluster share them.

Weights may be what the kernel before writes: nothing in a call says that they are not. So they are read when it has ended. Until
then some are brought to the L2 cache, which is where everybody sees what is written. To go on with that while weights are read made
products slower: behind that rmsnorm a row of 2880 x 5120 took 10.3 to 11.2 microseconds instead of 9.3.

A CTA leaves room on its multiprocessor for one of the kernel before and one of the next. That is worth more than loads that need no
ring: a program that filled the registers of all multiprocessors with weights took 7.5 microseconds behind that rmsnorm where this
one takes 7.7 to 8.2 (a row of 4096 x 2880), but could not begin beside attention, nor the router beside it. Decode steps of
GPT-OSS-120B of 1, 2 and 4 tokens took 2.12 to 2.16, 2.64 and 3.49 ms with it, and take 2.10, 2.51 and 3.37.
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
from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES, KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import (
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
    layout_of,
    results_of,
    ring_bytes_of,
    sharing_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm_split_config import SplitConfig, every_split_config, is_split, split_numbers_of, split_of

E4M3 = torch.float8_e4m3fn
# Columns of results up to which a product with dense weights is preferred to PyTorch's. Behind a kernel that lets nothing begin
# early, 1 to 16 rows of 4096 x 2880 took 9.5 to 10.8 microseconds on an H200, and PyTorch's 12.3 to 12.6; but 1 and 16 rows of
# 2880 x 5120 took 10.9 and 12.0, and PyTorch's 10.6.
QUICK_N = 4096
# Rows of activations up to which a product with scaled weights is preferred to the portable kernel. Behind a kernel that lets
# nothing begin early, 4 and 8 rows of 2880 x 5120 took 9.7 and 10.7 microseconds with fp8 weights, and the portable kernel's 10.1
# and 10.1; 11.4 and 12.8 with mxfp4 weights, and 12.7 and 12.7; 8.9 and 9.9 with fp8 by fp8 in blocks, and 10.0 and 9.9. 16 rows
# took 13.2 with fp8 weights, and 10.2; 15.7 with mxfp4 weights, and 12.8; 10.3 with fp8 by fp8, and 9.4.
FEW_ROWS = 4

Launch = Callable[..., Any]
NO_SCALES = (0,) * 6  # two of `_table`


@program(arch="sm_90a", configs=every_config)
def mm_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm import mm_device

    return mm_device.host(config), mm_device.fake_arguments(config)


@program(arch="sm_90a", configs=every_split_config)
def split_program(config: SplitConfig) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm import mm_split_device

    return mm_split_device.host(config), mm_split_device.fake_arguments(config)


@functools.cache
def _launch_of(
    a: torch.dtype, weights: Weights, scales: Scales, out: torch.dtype, m: int, n: int, row_bytes: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    """The program, and the numbers of a launch that depend on sizes alone."""
    count = multiprocessors(device)
    if scales == "none" and is_split(m, n, row_bytes):
        split = split_of(dtype_name(a), dtype_name(out), m, row_bytes)
        return split_program(split), split_numbers_of(m, n)
    config = config_of(dtype_name(a), weights, scales, dtype_name(out), m, sharing_of(weights, m, n, row_bytes, count))
    numbers = numbers_of(config, m, n, row_bytes, count, ring_bytes_of(n, count))
    return mm_program(config), (*NO_SCALES, *numbers) if scales == "none" else numbers


def numbers_of(config: Config, m: int, n: int, row_bytes: int, count: int, ring_bytes: int = RING_BYTES) -> tuple[int, ...]:
    """How many CTAs, and where things are in shared memory.

    Args:
        row_bytes: of a row of weights.
        count: of multiprocessors.

    Raises:
        ValueError: it does not fit.
    """
    part = -(-row_bytes // (QUAD_BYTES * config.cluster)) * QUAD_BYTES
    ctas = ctas_of(config, n, count)
    rows = -(-n * config.cluster // ctas)
    stages = -(-rows // ROWS) * -(-min(part, row_bytes) // config.part_bytes)
    found = layout_of(config, m, min(part, row_bytes), ring_bytes, stages)
    if found is None:
        raise ValueError("wants more shared memory than there is")
    return ctas, found.chunk_bytes, found.stages, found.scales, found.activations, found.ring, found.size


def ctas_of(config: Config, n: int, count: int) -> int:
    """CTAs of a launch: no more than multiprocessors, whole clusters, and none without rows."""
    return config.together * min(n, count // config.together)


def _table(scale: Tensor | None) -> tuple[int, int, int]:
    """Where scales are: the first, and steps to the next row and column; 0 where one serves all."""
    if scale is None:
        return 0, 0, 0
    row, column = scale.stride() if scale.ndim == 2 else (0, 0)
    return scale.data_ptr(), row, column


def kinds_of(b: Tensor, b_scale: Tensor | None) -> tuple[Weights, Scales]:
    """How weights are stored, and what scales they have."""
    if b_scale is None:
        return "dense", "none"
    if b.dtype == torch.uint8:
        return "mxfp4", "mx"
    # A shape that is both means the same in both.
    return "float8_e4m3fn", "row" if b_scale.ndim < 2 or b_scale.shape == (1, b.shape[1]) else "block"


def arguments_of(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, numbers: tuple[int, ...]
) -> tuple[Any, ...]:
    """What a program takes. All tensors must live until it is launched.

    Args:
        numbers: what `_launch_of` gave.
    """
    if b.dtype == E4M3:  # programs take 8-bit floats as bytes, which every version of PyTorch hands over
        b = b.view(torch.uint8)
        if a.dtype == E4M3:
            a = a.view(torch.uint8)
    bias_at = kind = 0
    if bias is not None:
        bias_at, kind = bias.data_ptr(), KINDS[bias.dtype]
    if b_scale is None:
        return a, b, out, bias_at, kind, *numbers
    return a, b, out, bias_at, kind, *_table(a_scale), *_table(b_scale), *numbers


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> None:
    """``out = a @ b + bias``: launches on checked arguments.

    Args:
        a: ``[m, k]``, m at most 16.
        b: ``[k, n]``, or ``[k/2, n]`` in mxfp4; a transposed view of rows.
        bias: ``[n]`` in bfloat16, float16 or float32; contiguous.
        out: ``[m, n]``, in bfloat16, float16 or float32.
        a_scale, b_scale: as the operator has them.

    Raises:
        ValueError: rows of a or b do not begin at multiples of 16 bytes, or have gaps between their elements.
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
    """A product of at most 16 rows: launches on checked arguments.

    The public function is `tokenspeed_kernel_nvidia.mm`. Weights that do not lie in rows along k are copied, or go to PyTorch's own
    product where that does the same.
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
    """Registers the kernel for some calls.

    Args:
        step: what k is a multiple of.
        n, m: which columns and rows of results, if not all.
        quick: whether it has been measured to be quicker than others.
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
    """Registers the kernel for few rows of activations, for which it is preferred, and for more of them."""
    _declare(name, a, signatures, step, m=at_most(FEW_ROWS), quick=True)
    _declare(f"more_{name}", a, signatures, step, m=at_least(FEW_ROWS + 1) & at_most(max(TOKENS)))


for _dtype, _name in DTYPES.items():
    _a = dense_tensor_format(_dtype)
    _served = {format_signature(a=_a, b=_a)}
    _declare(_name, _dtype, _served, ELEMENTS["dense"], at_most(QUICK_N), quick=True)
    _declare(f"wide_{_name}", _dtype, _served, ELEMENTS["dense"], at_least(QUICK_N + 1))
    _rows = {format_signature(a=_a, b=b) for b in _FP8_ROWS}
    _declare_by_rows(f"fp8_weights_{_name}", _dtype, _rows, ELEMENTS["float8_e4m3fn"])
    # 1 and 2 rows of 2880 x 5120 took 9.9 and 10.0 microseconds, and the portable kernel's 9.7 and 9.8.
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
# Of a row of 32 a scale may leave float16's range, so that these are for bfloat16 alone.
_mxfp4 = {format_signature(a=dense_tensor_format(torch.bfloat16), b=mxfp4_format((32, 1)))}
_declare_by_rows("mxfp4_weights_bfloat16", torch.bfloat16, _mxfp4, ELEMENTS["mxfp4"])
