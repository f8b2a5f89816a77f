"""All-reduce, residual add, RMSNorm and fp8 quantisation fused into one launch over peer memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._exchange import exchange
from tokenspeed_kernel.triton.comm.all_reduce_rmsnorm import LONGEST_ROW, SIGNATURES
from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, TWO_SHOT
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

_OPERATOR = "all_reduce_rmsnorm_quantize_fp8"
# In elements. Each is a power of two of 16-byte vectors for every dtype.
_BLOCK_SIZES = frozenset({8, 16, 32, 64, 128, 256, 512, 1024})


def _registered(protocol: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return register_kernel(
        "comm",
        _OPERATOR,
        name=f"triton_{protocol}_{_OPERATOR}",
        solution="triton",
        capability=TRITON,
        signatures=SIGNATURES,
        traits={
            "protocol": protocol,
            "hidden": at_most(LONGEST_ROW),
            "residual": any,
            "granularity": {"token", "block"},
            "block_size": _BLOCK_SIZES,
        },
        priority=Priority.PORTABLE,
        tags={"determinism"},
    )


def _launch(
    protocol: str,
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    if granularity not in ("token", "block") or (granularity == "block" and block_size not in _BLOCK_SIZES):
        raise ValueError(
            f"{_OPERATOR}: granularity must be 'token', or 'block' with block_size one of {sorted(_BLOCK_SIZES)}, for this kernel, "
            f"got {granularity!r} and {block_size}"
        )
    hidden = x.shape[-1]
    length = 0 if granularity == "token" else block_size
    scales = *x.shape[:-1], cdiv(hidden, length) if length else 1
    source = x.contiguous()
    made = [source.new_empty(x.shape, dtype=dtype), source.new_empty(scales, dtype=torch.float32)]
    if residual is not None:
        made.append(torch.empty_like(source))
    given = (out, scale_out, residual_out)[: len(made)]
    written = [g if g is not None and g.is_contiguous() else m for g, m in zip(given, made, strict=True)]
    if x.numel():
        added, total = (None, None) if residual is None else (residual.contiguous(), written[2])
        exchange(
            _OPERATOR, protocol, source, group, written[0], hidden, weight.contiguous(), eps, added, total,
            scale_out=written[1], group_size=length,
        )  # fmt: skip
    else:
        written[1].fill_(SMALLEST_NORMAL)
    return tuple(w if g is None or g is w else g.copy_(w) for g, w in zip(given, written, strict=True))


@_registered(ONE_SHOT)
def one_shot_all_reduce_rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.all_reduce_rmsnorm_quantize_fp8`."""
    return _launch(ONE_SHOT, x, weight, group, eps, residual, granularity, block_size, dtype, out, scale_out, residual_out)


@_registered(TWO_SHOT)
def two_shot_all_reduce_rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup,
    eps: float,
    residual: Tensor | None,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.all_reduce_rmsnorm_quantize_fp8`."""
    return _launch(TWO_SHOT, x, weight, group, eps, residual, granularity, block_size, dtype, out, scale_out, residual_out)
