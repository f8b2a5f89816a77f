"""Products of a few rows of activations with weights, as in a decode step, on Hopper.

Memory decides the speed: each weight is read once, for at most 16 rows of activations. Every multiprocessor has one CTA and equally
many rows of the weights, to a row. No row is divided among CTAs, so that nothing is to be added up afterwards, and the bits are the
same in every run. Much of what a CTA reads is on its way at once, see `mm_device`.

Weights may be what the kernel before writes: nothing in a call says that they are not. So they are brought to the L2 cache before
that kernel has ended, which is right whatever it does, and to the multiprocessors after. `multiply` reads them at once where its
caller knows better.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dtype_name, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_least, at_most, multiple_of
from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import aligned, is_aligned
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES, KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import ELEMENTS, TOKENS, Config, config_of, every_config

# Bytes of weights that a CTA brings to the L2 cache before it may read: all of them together are half of that.
AHEAD = 192 * 1024

Launch = Callable[..., Any]


@program(arch="sm_90a", configs=every_config)
def mm_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm import mm_device

    return mm_device.host(config), mm_device.fake_arguments(config)


@functools.cache
def _program_of(dtype: torch.dtype, out: torch.dtype, tokens: int, n: int, early: bool, device: int) -> tuple[Launch, int]:
    """The program and its CTAs."""
    count = multiprocessors(device)
    config = config_of(DTYPES[dtype], "dense", dtype_name(out), tokens, -(-n // count), early)
    return mm_program(config), min(n, config.resident * count)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, early: bool = False) -> None:
    """``out = a @ b + bias``: launches on checked arguments.

    Args:
        a: ``[m, k]``, m at most 16.
        b: ``[k, n]``; a transposed view of rows.
        bias: ``[n]`` in bfloat16, float16 or float32.
        out: ``[m, n]``, in a's dtype or float32.
        early: whether b is read before kernels that were queued before have ended. None of them may write it.

    Raises:
        ValueError: rows of a or b do not begin at multiples of 16 bytes, or have gaps between their elements.
    """
    device = a.get_device()
    tokens = TOKENS[0] if a.shape[0] <= TOKENS[0] else TOKENS[1]
    launch, ctas = _program_of(a.dtype, out.dtype, tokens, b.shape[1], early, device)
    bias_at = kind = 0
    if bias is not None:
        bias_at, kind = bias.data_ptr(), KINDS[bias.dtype]
    launch(a, b, out, bias_at, kind, ctas, 0 if early else AHEAD)


def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A product of at most 16 rows with dense weights: launches on checked arguments.

    The public function is `tokenspeed_kernel_nvidia.mm`. Weights that do not lie in rows along k go to PyTorch's own product, or
    are copied where that has not the result's dtype.
    """
    dtype = out_dtype or a.dtype
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    made = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device) if out is None else out
    try:
        multiply(a, b, bias, made)
    except ValueError:
        rows = b.mT
        if not is_aligned(rows) and dtype == a.dtype and (bias is None or bias.dtype == dtype):
            return torch.mm(a, b, out=made) if bias is None else torch.addmm(bias, a, b, out=made)
        multiply(aligned(a), aligned(rows).mT, bias, made)
    return made


for _dtype in DTYPES:
    register_kernel(
        "gemm",
        "mm",
        name=f"cutedsl_mm_{dtype_name(_dtype)}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=format_signatures(("a", "b"), "dense", [_dtype]),
        traits={
            "m": at_most(max(TOKENS)),
            "k": at_least(ELEMENTS["dense"]) & multiple_of(ELEMENTS["dense"]),
            "out_dtype": {dtype_name(_dtype), "float32"},
            "bias": any,
            "wide_bias": any,
        },
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(mm)
