"""`mm` of 17 to 32 rows of activations by dense weights, as in a decode step, on Hopper.

The CTAs of a cluster of eight split k (`tile_device`), so each CTA reads an eighth of the activations' elements.

The kernel is declared for sizes at which PyTorch's GEMM is slow. Only one of them has been measured: 32 bfloat16 rows by the
output projection of GPT-OSS-120B (k 4096, n 2880), with a bias, on an H200 with cold weights. There, a call takes 10.8 us back to
back, and 12.0 us after a kernel that does not trigger an early launch (PDL). PyTorch 2.11's GEMM takes 13.1 us in both cases. For
other numbers of rows, variants of this kernel were slower than the kernels that selection prefers: 10.2 against 9.3 us for 9 rows,
10.2 against 9.5 us for 16 rows, and 12.5 against 10.9 us for 64 rows. With more columns, PyTorch's GEMM may be faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import between, multiple_of
from tokenspeed_kernel_nvidia._machine import clusters_at_once
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES, KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import (
    CLUSTER,
    MAX_K,
    MAX_TOKENS,
    THREADS,
    TILE,
    Config,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

# The sizes of eligible calls: the least number of rows of activations, the range of n, and the least k. They contain the measured
# call, see above. No CTA has more work than in the measured call.
LEAST_ROWS, N, LEAST_K = 17, (2048, 2880), 3080


@program(arch=ARCH, configs=every_config)
def mm_split_k_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.split_k import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


def clusters_of(config: Config, n: int, device: int) -> int:
    """Returns the number of clusters of a launch for n rows of weights: at most those that run at once."""
    return min(-(-n // TILE), clusters_at_once(device, CLUSTER, THREADS, config.shared_bytes))


@functools.cache
def _launch_of(dtype: torch.dtype, n: int, device: int) -> tuple[Callable[..., Any], int]:
    """Returns the compiled kernel for a call, and the number of clusters."""
    config = Config(dtype_name(dtype))
    return mm_split_k_program(config), clusters_of(config, n, device)


def mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,  # a's dtype or None, as the traits require
    out: Tensor | None,
) -> Tensor:
    """Computes ``a @ b + bias``: launches the kernel on arguments that the operator has checked. Returns ``out``, or a new tensor.

    The public function is `tokenspeed_kernel_nvidia.mm`. Weights that are not contiguous along k are copied.

    Args:
        a: bfloat16 or float16 ``[m, k]``, m at most 32.
        b: ``[k, n]`` in a's dtype, a transposed view of rows.
        bias: ``[n]`` in bfloat16, float16 or float32, or None.
        out: ``[m, n]`` in a's dtype, receives the result, if given.
    """
    m, n = a.shape[0], b.shape[1]
    made = a.new_empty(m, n) if out is None else out
    if made.numel() == 0:
        return made
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    launch, clusters = _launch_of(a.dtype, n, a.get_device())
    launch(aligned(a), aligned(b.mT), made, *((0, 0) if bias is None else (bias.data_ptr(), KINDS[bias.dtype])), clusters)
    return made


for _dtype, _name in DTYPES.items():
    _operand = dense_tensor_format(_dtype)
    register_kernel(
        "gemm",
        "mm",
        name=f"cutedsl_mm_split_k_{_name}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={format_signature(a=_operand, b=_operand)},
        traits={
            "m": between(LEAST_ROWS, MAX_TOKENS),
            "n": between(*N),
            "k": between(LEAST_K, MAX_K) & multiple_of(8),
            "out_dtype": _name,
            "bias": any,
            "wide_bias": any,
        },
        priority=Priority.PERFORMANT,
        tags={"determinism"},
    )(mm)
