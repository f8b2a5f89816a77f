"""Normalisation, the product for q, k and v, rotation and the write to the cache for a few tokens, in one kernel.

Memory decides the speed: each program reads the weights of a few pairs of elements that turn together, for all tokens, and turns
them where it has them. Tokens are normalised on the way, by every program again, which costs little while they are few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, common_device, for_architecture, has_rows
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
    """What a program takes. Nothing of it has been measured.

    Attributes:
        pairs: of elements that turn together; a product of matrix units has 16 columns.
        block_k: of the hidden size, at a time.
        stages: of these on their way at once: with residual and cache 38 KB of shared memory.
        warps: of the program.
    """

    pairs: int = 8
    block_k: int = 128
    stages: int = 4
    warps: int = 2


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
        tile = Tile()
        dtype = for_architecture({"cpu": torch.float32, "any": x.dtype}, x.device)  # interpreted products of bfloat16 are wrong
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
            DTYPE=common_device.DTYPES[dtype],
            INTERPRETED=abilities(x.device).interpreted,
            HAS_RESIDUAL=residual is not None,
            BIAS=bias is not None,
            WRITE=write,
            HEAD_DIM=head_dim,
            PAIRS=tile.pairs,
            TOKENS=MOST_TOKENS,
            BLOCK_K=tile.block_k,
            STAGES=tile.stages,
            num_warps=tile.warps,
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
