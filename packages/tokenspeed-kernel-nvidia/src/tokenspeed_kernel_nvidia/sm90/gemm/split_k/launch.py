"""`mm` of up to 64 rows of activations by dense weights, as in a decode step, on Hopper.

The CTAs of a cluster of eight split k (`tile_device`), so each CTA reads an eighth of the activations' elements.
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
from tokenspeed_kernel_base.traits import Constraint, at_least, at_most, multiple_of
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
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

# The calls that other kernels leave room for, and this kernel's priority for them: rows of activations, and columns of the result.
# The priority is below that of all other kernels, because the kernel has not been measured yet. `Priority.SPECIALIZED` prefers it.
FEWEST_ROWS, N, PRIORITY = 9, (1024, 8192), Priority.PORTABLE - 3


def usual_configs() -> list[Config]:
    """Returns the configurations that calls use which name no kernel: none while other kernels are preferred."""
    return every_config() if PRIORITY >= Priority.PERFORMANT else []


@program(arch=ARCH, configs=every_config, usual=usual_configs)
def mm_split_k_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.split_k import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


def clusters_of(config: Config, n: int, device: int) -> int:
    """Returns the number of clusters of a launch for n rows of weights: at most those that run at once."""
    return min(-(-n // TILE), clusters_at_once(device, CLUSTER, THREADS, config.shared_bytes))


@functools.cache
def _launch_of(dtype: torch.dtype, m: int, n: int, k: int, device: int) -> tuple[Callable[..., Any], int]:
    """Returns the compiled kernel for a call, and the number of clusters."""
    config = config_of(dtype_name(dtype), m, k)
    return mm_split_k_program(config), clusters_of(config, n, device)


def mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,  # a's dtype or None, as the traits require
    out: Tensor | None,
) -> Tensor:
    """Computes a GEMM of at most 64 rows by dense weights: launches the kernel on arguments that the operator has checked.

    The public function is `tokenspeed_kernel_nvidia.mm`. Weights that are not contiguous along k are copied.

    Raises:
        ValueError: a has too many rows or columns.
    """
    (m, k), n = a.shape, b.shape[1]
    made = a.new_empty(m, n) if out is None else out
    if made.numel() == 0:
        return made
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    launch, clusters = _launch_of(a.dtype, m, n, k, a.get_device())
    launch(aligned(a), aligned(b.mT), made, *((0, 0) if bias is None else (bias.data_ptr(), KINDS[bias.dtype])), clusters)
    return made


def _declare(name: str, dtype: torch.dtype, priority: int, **sizes: Constraint) -> None:
    """Registers the kernel for calls of some sizes: constraints on m and n."""
    operand = dense_tensor_format(dtype)
    register_kernel(
        "gemm",
        "mm",
        name=f"cutedsl_mm_split_k_{name}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={format_signature(a=operand, b=operand)},
        traits={
            "k": at_least(8) & at_most(MAX_K) & multiple_of(8),
            "out_dtype": dtype_name(dtype),
            "bias": any,
            "wide_bias": any,
            **sizes,
        },
        priority=priority,
        tags={"determinism"},
    )(mm)


for _dtype, _name in DTYPES.items():
    _rows = at_least(FEWEST_ROWS) & at_most(MAX_TOKENS)
    _declare(_name, _dtype, PRIORITY, m=_rows, n=at_least(N[0]) & at_most(N[1]))
    _declare(f"few_{_name}", _dtype, Priority.PORTABLE - 3, m=at_most(FEWEST_ROWS - 1))
    _declare(f"narrow_{_name}", _dtype, Priority.PORTABLE - 3, m=_rows, n=at_most(N[0] - 1))
    _declare(f"wide_{_name}", _dtype, Priority.PORTABLE - 3, m=_rows, n=at_least(N[1] + 1))
