"""Normalisation, the product for q, k and v, rotation and the write to the cache for a few tokens, in one kernel.

Memory decides the speed: each program reads the weights of a few pairs of elements that turn together, for all tokens, and turns
them where it has them. Tokens are normalised on the way, by every program again, which costs little while they are few.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    TRITON,
    common_device,
    for_architecture,
    has_rows,
    launch_options,
    may_overlap,
    next_power_of_2,
)
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

MOST_TOKENS = 16  # of a tile of a matrix unit
# Heads that are turned as a whole; one kernel is declared for each, because traits are constrained one by one.
HEAD_DIMS = (32, 64, 128)


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        tokens: all of them, as a power of two.
        pairs: of elements that turn together.
        whole: whether rows of weights lie in registers as a whole; if not, the matrix units multiply a block after the other.
        block_k: of the hidden size, at a time: a power of two.
        ahead: of the hidden size, how much of each row of weights is fetched to the L2 cache before the kernel in front has ended.
        stages: of blocks on their way at once: with residual and cache 38 KB of shared memory.
        warps: of the program.
    """

    tokens: int
    pairs: int
    whole: bool
    block_k: int
    ahead: int
    stages: int
    warps: int


class Program(NamedTuple):
    """A `Tile` as the kernel has it, and what else is known when it is compiled."""

    tokens: int
    pairs: int
    whole: bool
    block_k: int
    ahead: int
    stages: int
    head_dim: int
    has_residual: bool
    dtype: Any  # of the matrix units' operands, Triton's
    early: bool
    interpreted: bool


_WHOLE_TOKENS = 2
# Weights that a program of a few whole rows holds in registers, 128 a thread.
_WHOLE_ELEMENTS, _WHOLE_WARPS = 32768, 8


@functools.cache
def tile_for(tokens: int, hidden: int) -> Tile:
    """The tile for so many tokens of this size."""
    padded = next_power_of_2(hidden)
    pairs = min(4, _WHOLE_ELEMENTS // padded // 2)
    if tokens <= _WHOLE_TOKENS and pairs >= 1:
        return Tile(next_power_of_2(tokens), pairs, True, padded, padded, 1, _WHOLE_WARPS)
    return Tile(MOST_TOKENS, 8, False, 128, 1024, 4, 2)


def rmsnorm_qkv_rope(
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    interleaved: bool = False,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.rmsnorm_qkv_rope`."""
    tokens, hidden = x.shape
    columns = qkv_weight.shape[1]
    heads = columns // head_dim - 2 * kv_heads
    qkv = out if out is not None and has_rows(out) else x.new_empty(tokens, columns)
    # Other programs read x and the residual when the first ones write their sum, so it may not lie in either.
    total = None if residual is None else x.new_empty(tokens, hidden)
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
        tile = tile_for(tokens, hidden)
        early = may_overlap(x.device)
        # Interpreted products of bfloat16 are wrong.
        dtype = for_architecture({"cpu": torch.float32, "any": x.dtype}, x.device)
        device_code.rmsnorm_qkv_rope_kernel[(columns // 2 // tile.pairs,)](
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
                *tile[:-1],
                head_dim=head_dim,
                has_residual=residual is not None,
                dtype=common_device.DTYPES[dtype],
                early=early,
                interpreted=abilities(x.device).interpreted,
            ),
            num_warps=tile.warps,
            **launch_options(early),
        )
    if out is not None and out is not qkv:
        qkv = out.copy_(qkv)
    if total is None:
        return qkv
    return qkv, total if residual_out is None else residual_out.copy_(total)


_SERVED = [
    format_signature(x=d, qkv_weight=d, **({"k_cache": d} if cached else {}))
    for d in map(dense_tensor_format, (torch.bfloat16, torch.float32))
    for cached in (False, True)
]
for _head_dim in HEAD_DIMS:
    register_kernel(
        "attention",
        "rmsnorm_qkv_rope",
        name=f"triton_rmsnorm_qkv_rope_{_head_dim}",
        solution="triton",
        capability=TRITON,
        signatures=_SERVED,
        traits={
            "tokens": at_most(MOST_TOKENS),
            "head_dim": _head_dim,
            "rotary_dim": _head_dim,
            "residual": any,
            "bias": any,
            "cache_write": any,
        },
        priority=Priority.COMPOSED - 1,  # until it has been measured to be quicker than its parts; ask for it by name, or tune
        tags={"determinism"},
    )(rmsnorm_qkv_rope)
