"""quantize_mxfp8 and quantize_mxfp4: a program holds a tile of whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import (
    abilities,
    encode_e2m1,
    encode_fp8,
    larger,
    largest,
    pack_e2m1,
    pack_scaled_e2m1,
)
from tokenspeed_kernel.triton.quantization._rows import config_for, finish, grid, groups_of, made_or, rows_of
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX

_BLOCK = tl.constexpr(BLOCK_MX)
# Exponents of the largest powers of two that elements have.
_EMAX_E4M3, _EMAX_E2M1 = tl.constexpr(8), tl.constexpr(2)


@triton.jit
def _quantize(
    x_ptr,
    q_ptr,
    scale_ptr,
    count,
    x_stride,
    x_outer_stride,
    BLOCKS: tl.constexpr,
    FP4: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """``BLOCKS`` blocks of one outer row; q and the scales are contiguous."""
    programs = tl.cdiv(count, BLOCKS)
    outer, first = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs * BLOCKS
    x_ptr += outer * x_outer_stride + first.to(tl.int64) * x_stride
    first_made = outer * count + first
    block = tl.arange(0, BLOCKS)
    inside = block < count - first
    if PAIRS:
        at = tl.arange(0, _BLOCK // 2)[None, :]
        pair_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        pairs = tl.load(pair_ptr + block[:, None] * (x_stride // 2) + at, mask=inside[:, None], other=0)
        low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        amax = largest(larger(tl.abs(low), tl.abs(high)), 1)
    else:
        at = tl.arange(0, _BLOCK)[None, :]
        x = tl.load(x_ptr + block[:, None] * x_stride + at, mask=inside[:, None], other=0.0).to(tl.float32)
        amax = largest(x, 1)
    # A float32's exponent field is floor(log2) + 127. Subnormal numbers have 0, and end up at the smallest scale either way.
    field = amax.to(tl.int32, bitcast=True) >> 23
    finite = field != 255
    scale = tl.where(finite, tl.maximum(field - (_EMAX_E2M1 if FP4 else _EMAX_E4M3), 0), 255)
    tl.store(scale_ptr + first_made + block, scale.to(tl.uint8), mask=inside)
    # The reciprocal, 2^(127 - byte), is normal for all bytes of finite blocks; in others all codes become those of +0.
    kept = tl.where(finite, 255, 0)[:, None]
    reciprocal = ((254 - scale) << 23)[:, None]
    if FP4:
        if PAIRS:
            code = pack_scaled_e2m1(pairs, reciprocal | (reciprocal >> 16))
        else:
            code = pack_e2m1(encode_e2m1(x * reciprocal.to(tl.float32, bitcast=True), x), BLOCKS, _BLOCK)
        at = tl.arange(0, _BLOCK // 2)[None, :]
        tl.store(
            q_ptr + first_made * (_BLOCK // 2) + block[:, None] * (_BLOCK // 2) + at,
            (code & kept).to(tl.uint8),
            mask=inside[:, None],
        )
    else:
        code = encode_fp8(x * reciprocal.to(tl.float32, bitcast=True), "e4m3fn", NATIVE)
        tl.store(q_ptr + first_made * _BLOCK + block[:, None] * _BLOCK + at, (code & kept).to(tl.uint8), mask=inside[:, None])


def quantize_mxfp8(x: Tensor, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, Tensor]:
    return _launch(x, made_or(out, tuple(x.shape), torch.float8_e4m3fn, x), out, scale_out)


def quantize_mxfp4(x: Tensor, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, Tensor]:
    return _launch(x, made_or(out, (*x.shape[:-1], x.shape[-1] // 2), torch.uint8, x), out, scale_out)


def _launch(x: Tensor, q: Tensor, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, Tensor]:
    scale = made_or(scale_out, (*x.shape[:-1], x.shape[-1] // BLOCK_MX), torch.uint8, x)
    if x.numel():
        rows = rows_of(x)
        groups = groups_of(rows, BLOCK_MX)
        config = config_for(x.numel())
        blocks = config.tile // BLOCK_MX
        able = abilities(x.device)
        fp4 = q.dtype == torch.uint8
        _quantize[grid(groups, blocks)](
            rows,
            q.view(torch.uint8),
            scale,
            groups.count,
            groups.stride,
            groups.outer_stride,
            BLOCKS=blocks,
            FP4=fp4,
            PAIRS=fp4 and able.bfloat16_pairs and _has_pairs(rows),
            NATIVE=able.native,
            num_warps=config.warps,
        )
    return finish(q, out), finish(scale, scale_out)


def _has_pairs(rows: Tensor) -> bool:
    """Whether two neighbouring elements are a bfloat16 pair that can be loaded as one."""
    return rows.dtype == torch.bfloat16 and rows.data_ptr() % 4 == 0 and rows.stride(0) % 2 == 0
