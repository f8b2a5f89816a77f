"""RMSNorm, QKV projection, rotary embedding and cache write for one or two tokens, in one kernel.

The kernel is memory-bound. Each program reads the weights of a few rotary pairs, computes these pairs for all tokens, and rotates
them in registers. Every program normalises all tokens itself, which costs little for few tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    TRITON,
    has_rows,
    launch_options,
    may_overlap,
    next_power_of_2,
)
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

MOST_TOKENS = 2
# The largest hidden size for which a program keeps a token in registers beside the weights.
MOST_HIDDEN = 8192
# Supported head dimensions. All columns of a head are rotated. Each head dimension has its own declaration, because a trait cannot
# refer to another trait.
HEAD_DIMS = (32, 64, 128)


class Program(NamedTuple):
    """Compile-time constants of `rmsnorm_qkv_rope_kernel`.

    Attributes:
        tokens: the number of tokens, padded to a power of two.
        pairs: rotary pairs per program.
        hidden: the hidden size, padded to a power of two.
        head_dim: columns of every head of q, k and v.
        has_residual: whether a residual is added to the tokens.
        early: whether the kernel is launched with PDL.
        interpreted: whether Triton's interpreter runs the kernel.
    """

    tokens: int
    pairs: int
    hidden: int
    head_dim: int
    has_residual: bool
    early: bool
    interpreted: bool


# A program of 8 warps holds 128 weights per thread, and loads them all at once. On an H200, in a decode step of GPT-OSS-120B, one
# bfloat16 token of hidden size 2880 with 5120 outputs takes 18.4 us. With MMAs on 16 rows of weights at a time: 54 to 58 us.
_ELEMENTS, _WARPS = 32768, 8


def rmsnorm_qkv_rope(
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    eps: float,
    residual: Tensor | None,
    bias: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.rmsnorm_qkv_rope`, which documents the arguments."""
    tokens, hidden = x.shape
    columns = qkv_weight.shape[1]
    heads = columns // head_dim - 2 * kv_heads
    qkv = out if out is not None and has_rows(out) else x.new_empty(tokens, columns)
    # The sum of x and the residual is stored while other programs may still read both. So the sum must alias neither.
    total = None if residual is None else residual.new_empty(tokens, hidden)
    x, added = (t if t.stride(1) == 1 else t.contiguous() for t in (x, x if residual is None else residual))
    weight = qkv_weight.t() if qkv_weight.stride(0) == 1 else qkv_weight.t().contiguous()
    table = cos_sin_cache if cos_sin_cache.stride(1) == 1 else cos_sin_cache.contiguous()
    cache_strides: tuple[int, ...] = (0,) * 8
    page_size, slots_stride = 1, 0
    write = k_cache is not None and v_cache is not None and slot_mapping is not None and k_cache.numel() > 0
    if write:
        assert k_cache is not None and v_cache is not None and slot_mapping is not None  # noqa: PT018
        cache_strides, page_size = (*k_cache.stride(), *v_cache.stride()), k_cache.shape[1]
        slots_stride = slot_mapping.stride(0)
    if tokens:
        padded = next_power_of_2(hidden)
        pairs = max(1, min(4, _ELEMENTS // (2 * padded)))
        early = may_overlap(x.device)
        device_code.rmsnorm_qkv_rope_kernel[(columns // 2 // pairs,)](
            x,
            added,
            norm_weight,
            weight,
            bias,
            positions,
            table,
            qkv,
            qkv if total is None else total,
            k_cache,
            v_cache,
            slot_mapping,
            tokens,
            hidden,
            heads,
            kv_heads,
            page_size,
            eps,
            x.stride(0),
            added.stride(0),
            norm_weight.stride(0),
            weight.stride(0),
            0 if bias is None else bias.stride(0),
            positions.stride(0),
            table.stride(0),
            qkv.stride(0),
            hidden,
            *cache_strides,
            slots_stride,
            BIAS=bias is not None,
            WRITE=write,
            TILE=Program(
                next_power_of_2(tokens),
                pairs,
                padded,
                head_dim,
                residual is not None,
                early,
                abilities(x.device).interpreted,
            ),
            num_warps=_WARPS,
            **launch_options(early),
        )
    if out is not None and out is not qkv:
        qkv = out.copy_(qkv)
    if total is None:
        return qkv
    return qkv, total if residual_out is None else residual_out.copy_(total)


def _signatures(*dtypes: torch.dtype) -> list[FormatSignature]:
    formats = map(dense_tensor_format, dtypes)
    return [format_signature(x=f, qkv_weight=f, **({"k_cache": f} if cached else {})) for f in formats for cached in (False, True)]


# On an H200 separate kernels were faster: 15.1 us with PyTorch's GEMM. So by default this kernel is selected only by name or by
# tuning. On AMD's GPUs the composition takes three launches instead of one. For a token of GPT-OSS-120B, the timing model of gfx950
# predicts 5.4 us for this kernel and 5.7 us for the three kernels, both without launch overhead. For two tokens it predicts 9.6 and
# 5.6 us, because the VALU computes the dot products, so there the composition is preferred.
_PLATFORMS = {
    "": (TRITON, _signatures(torch.bfloat16, torch.float32), MOST_TOKENS, Priority.COMPOSED - 1),
    "_amd": (dataclasses.replace(TRITON, vendors=frozenset({"amd"})), _signatures(torch.bfloat16), 1, Priority.PORTABLE),
}
for _head_dim, _suffix in itertools.product(HEAD_DIMS, _PLATFORMS):
    _capability, _supported, _most_tokens, _priority = _PLATFORMS[_suffix]
    register_kernel(
        "attention",
        "rmsnorm_qkv_rope",
        name=f"triton_rmsnorm_qkv_rope_{_head_dim}{_suffix}",
        solution="triton",
        capability=_capability,
        signatures=_supported,
        traits={
            "tokens": at_most(_most_tokens),
            "hidden": at_most(MOST_HIDDEN),
            "head_dim": _head_dim,
            "rotary_dim": _head_dim,
            "residual": any,
            "wide_residual": any,
            "bias": any,
            "cache_write": any,
        },
        priority=_priority,
        tags={"determinism"},
    )(rmsnorm_qkv_rope)
