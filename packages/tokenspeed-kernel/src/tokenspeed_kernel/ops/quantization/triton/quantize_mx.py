"""quantize_mxfp8 and quantize_mxfp4: a program holds a tile of whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel.ops.quantization.triton._encode import abilities, encode_e2m1, encode_fp8, largest, pack_e2m1
from tokenspeed_kernel.ops.quantization.triton._rows import config_for, finish, grid, groups_of, made_or, rows_of

_BLOCK = tl.constexpr(BLOCK_MX)
# Exponents of the largest powers of two that elements have.
_EMAX_E4M3, _EMAX_E2M1 = tl.constexpr(8), tl.constexpr(2)


@triton.jit
def _quantize(
    x_ptr, q_ptr, scale_ptr, count, x_stride, x_outer_stride, BLOCKS: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr
):
    """``BLOCKS`` blocks of one outer row; q and the scales are contiguous."""
    programs = tl.cdiv(count, BLOCKS)
    outer = (tl.program_id(0) // programs).to(tl.int64)
    block = ((tl.program_id(0) % programs) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    inside = (block < count)[:, None]
    at = tl.arange(0, _BLOCK)[None, :]
    x = tl.load(x_ptr + outer * x_outer_stride + block[:, None] * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    # A float32's exponent field is floor(log2) + 127. Subnormal numbers have 0, and end up at the smallest scale either way.
    field = largest(x, 1).to(tl.int32, bitcast=True) >> 23
    finite = field != 255
    scale = tl.where(finite, tl.maximum(field - (_EMAX_E2M1 if FP4 else _EMAX_E4M3), 0), 255)
    # The reciprocal, 2^(127 - byte), is normal for all bytes of finite blocks; in others all elements become +0.
    reciprocal = tl.where(finite, (254 - scale) << 23, 0).to(tl.float32, bitcast=True)
    kept = tl.where(finite, -1, 0)[:, None]
    x = (x.to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
    scaled = x * reciprocal[:, None]
    block += outer * count
    tl.store(scale_ptr + block, scale.to(tl.uint8), mask=(tl.program_id(0) % programs) * BLOCKS + tl.arange(0, BLOCKS) < count)
    if FP4:
        packed = pack_e2m1(encode_e2m1(scaled, x), BLOCKS, _BLOCK)
        tl.store(q_ptr + block[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :], packed, mask=inside)
    else:
        tl.store(q_ptr + block[:, None] * _BLOCK + at, encode_fp8(scaled, "e4m3fn", NATIVE), mask=inside)


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
        _quantize[grid(groups, blocks)](
            rows,
            q.view(torch.uint8),
            scale,
            groups.count,
            groups.stride,
            groups.outer_stride,
            BLOCKS=blocks,
            FP4=q.dtype == torch.uint8,
            NATIVE=abilities(x.device).native,
            num_warps=config.warps,
        )
    return finish(q, out), finish(scale, scale_out)
