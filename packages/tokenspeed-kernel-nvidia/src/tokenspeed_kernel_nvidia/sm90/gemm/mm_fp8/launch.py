"""fp8 by fp8 GEMMs with many rows of activations, as in prefill, on Hopper. `kernel_device` describes the kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_least, multiple_of
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver, to_write
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.config import (
    BLOCK,
    FEWEST_K,
    PAIR,
    SIZES,
    SUPPORTED,
    Config,
    Scales,
    Stored,
    Supported,
    clusters_of,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

E4M3 = torch.float8_e4m3fn
BLOCKS = (BLOCK, 64)  # supported sizes of scale blocks along k, and along the columns of b
Launch = Callable[..., Any]


@program(arch=ARCH, configs=every_config)
def mm_fp8_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8 import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


def kind_of(b: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Scales, Stored, int, int]:
    """Determines the granularity and the storage format of a call's scales from their shapes and dtypes.

    Returns:
        The scales' granularity and storage format, as in `Config`; the number of elements along k per scale; and the number of
        columns of ``b`` per scale.
    """
    k, n = b.shape
    packed = b_scale.dtype == torch.int32
    # If k or n is small, the shape of the scales may fit several sizes. All these sizes then give every element the same scale.
    along = BLOCK if packed else next(size for size in BLOCKS if a_scale.shape[1] == -(-k // size))
    lines = next(size for size in (*BLOCKS, 1) if b_scale.shape[1] == -(-n // size))
    stored: Stored = "float32" if b_scale.dtype == torch.float32 else "byte"
    return "block" if (along, lines) == (BLOCK, BLOCK) else "column", stored, along, lines


def steps_of(scale: Tensor, k_axis: int) -> tuple[int, int, int, int]:
    """Returns the address and the strides of scales, the fields of `sum_device.Scales`. ``k_axis``: the axis of the blocks along
    k."""
    size = scale.element_size()
    step = scale.stride(k_axis) * size
    # Packed scales hold four exponents in an int32.
    four, one = (step, 1) if scale.dtype == torch.int32 else (4 * step, step)
    return scale.data_ptr(), scale.stride(1 - k_axis) * size, four, one


@functools.lru_cache(maxsize=1024)  # bounded, because m differs from prefill to prefill
def _launch_of(scales: Scales, stored: Stored, block: int, m: int, n: int, device: int) -> tuple[Launch, int]:
    """Returns the compiled kernel for a call, and the number of clusters to launch."""
    count = sm_count_of(device)
    config = config_of(scales, stored, block, m, n, count)
    return mm_fp8_program(config), min(clusters_of(config, m, n), count // PAIR)


def mm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,  # bfloat16 or None, as the traits require
    out: Tensor | None,
) -> Tensor:
    """Computes ``a @ b + bias`` of fp8 operands: launches the kernel on arguments that the operator has checked. Returns ``out``,
    or a new tensor.

    The public function is `tokenspeed_kernel_nvidia.mm`. Operands are copied if their rows are not contiguous along k or not
    16-byte aligned. If the rows of ``out`` are not contiguous or not aligned, the result is copied to ``out`` at the end.

    Args:
        a: float8_e4m3fn ``[m, k]``.
        b: float8_e4m3fn ``[k, n]``, a transposed view of rows.
        a_scale, b_scale: float32, e8m0 bytes as uint8, or four e8m0 bytes in an int32, as the operator defines them.
        bias: ``[n]`` in bfloat16, float16 or float32, or None.
        out: bfloat16 ``[m, n]``, receives the result, if given.
    """
    m, n = a.shape[0], b.shape[1]
    written = to_write(out, a.new_empty((), dtype=torch.bfloat16), (m, n))
    if not written.numel():
        return deliver(written, out)
    if bias is not None:
        bias = bias.contiguous()
    rows, weights = aligned(a).view(torch.uint8), aligned(b.mT).view(torch.uint8)
    *kind, lines = kind_of(b, a_scale, b_scale)
    launch, clusters = _launch_of(*kind, m, n, a.get_device())
    given = (0, 0) if bias is None else (bias.data_ptr(), KINDS[bias.dtype])
    launch(rows, weights, written, *given, *steps_of(a_scale, 1), *steps_of(b_scale, 0), lines, clusters)
    return deliver(written, out)


_STORED = {"float32": (torch.float32,), "byte": (torch.uint8, torch.int32)}


def signatures_of(kind: Supported) -> set[FormatSignature]:
    """Returns the formats of the operands of calls with this kind of scales."""
    block = kind.block
    # The numbers of columns of weights per scale. 128 columns with blocks of 128 along k are the granularity "block".
    several = (block,) if kind.scales == "block" else (1,) if block == BLOCK else (block, 1)
    return {
        format_signature(a=fp8_format(E4M3, "block", (1, block), stored), b=fp8_format(E4M3, "block", (block, lines), stored))
        for stored in _STORED[kind.stored]
        for lines in several
    }


for _supported in SUPPORTED:
    for _place, (_rows, _columns) in enumerate(SIZES):
        # All entries of SIZES but the last are declared for exactly their m (a power of two), because selection rounds a varying m
        # up to a power of two. The last entry is declared for all larger m too.
        _last = _place == len(SIZES) - 1
        register_kernel(
            "gemm", "mm", name=f"cutedsl_mm_fp8_{_supported.name}_{_rows}_rows", solution="cutedsl", capability=CUTEDSL_HOPPER,
            signatures=signatures_of(_supported),
            traits={
                "m": at_least(_rows) if _last else _rows,
                "k": at_least(FEWEST_K) & multiple_of(16),
                "n": at_least(_columns) & multiple_of(8),
                "out_dtype": "bfloat16",
                "bias": any,
                "wide_bias": any,
            },
            priority=Priority.PERFORMANT, tags={"determinism"},
        )(mm_fp8)  # fmt: skip
