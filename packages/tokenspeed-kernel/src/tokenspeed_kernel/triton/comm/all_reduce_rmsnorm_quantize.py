"""All-reduce, residual add, RMSNorm and quantisation fused into one launch over peer memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._exchange import exchange
from tokenspeed_kernel.triton.comm.all_reduce_rmsnorm import LONGEST_ROW, SIGNATURES
from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel.triton.quantization._quantised_rows import GROUPS
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, TWO_SHOT
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL
from tokenspeed_kernel_base.ops.quantization.value import Quantization, kind_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

_OPERATOR = "all_reduce_rmsnorm_quantize"


def _launcher(protocol: str) -> Callable[..., Any]:
    def all_reduce_rmsnorm_quantize(
        x: Tensor,
        weight: Tensor,
        group: ProcessGroup,
        quantization: Quantization,
        eps: float,
        residual: Tensor | None,
        out: Tensor | None,
        scale_out: Tensor | None,
        residual_out: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Implements the operator `tokenspeed_kernel.all_reduce_rmsnorm_quantize`, which documents the arguments."""
        granularity, block_size, kind = quantization.granularity, quantization.block_size, kind_of(quantization)
        if kind != "fp8" or granularity not in ("token", "block") or (granularity == "block" and block_size not in GROUPS):
            raise ValueError(
                f"{_OPERATOR}: quantization must be fp8 of granularity 'token', or 'block' with block_size one of "
                f"{sorted(GROUPS)}, for this kernel, got {kind}, {granularity!r} and {block_size}"
            )
        hidden = x.shape[-1]
        length = 0 if granularity == "token" else block_size
        scales = *x.shape[:-1], cdiv(hidden, length) if length else 1
        source = x.contiguous()
        made = [source.new_empty(x.shape, dtype=quantization.dtype), source.new_empty(scales, dtype=torch.float32)]
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

    return all_reduce_rmsnorm_quantize


for _protocol in (ONE_SHOT, TWO_SHOT):
    register_kernel(
        "comm",
        _OPERATOR,
        name=f"triton_{_protocol}_{_OPERATOR}_fp8",
        solution="triton",
        capability=TRITON,
        signatures=SIGNATURES,
        # Each group size in GROUPS is a power-of-two number of vectors, for every dtype.
        traits={
            "quantization": "fp8",
            "protocol": _protocol,
            "hidden": at_most(LONGEST_ROW),
            "residual": any,
            "granularity": {"token", "block"},
            "block_size": GROUPS,
        },
        priority=Priority.PORTABLE,
        tags={"determinism"},
    )(_launcher(_protocol))
