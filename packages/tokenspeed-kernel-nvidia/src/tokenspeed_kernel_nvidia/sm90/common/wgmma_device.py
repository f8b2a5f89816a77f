"""Warpgroup MMAs (wgmma) with the operand layouts of attention. GEMMs of 16-bit or fp8 operands use those of ``q @ k.T``."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Numeric, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup


def make_qk_mma(dtype: type[Numeric], keys: int, warpgroups: int = 1) -> cute.TiledMma:
    """Makes the tiled MMA of ``q @ k.T`` for 64 query rows per warpgroup and ``keys`` keys. Both operands are in shared memory."""
    operands = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
    if dtype.width == 8:
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, (64, keys, 32), *operands)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, keys, 16), *operands)
    return cute.make_tiled_mma(op, cute.make_layout((warpgroups, 1, 1)))


def make_pv_mma(dtype: type[Numeric], head_dim: int, warpgroups: int = 1) -> cute.TiledMma:
    """Makes the tiled MMA of P @ V for 64 query rows per warpgroup. P is in registers and V in shared memory; fp8 V must be
    transposed there (K-major).
    """
    if dtype.width == 8:
        operands = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, (64, head_dim, 32), *operands)
    else:
        operands = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, head_dim, 16), *operands)
    return cute.make_tiled_mma(op, cute.make_layout((warpgroups, 1, 1)))


@cute.jit
def start_mma(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr[bool] = False,
    steps: cutlass.Constexpr[int] = 0,
    first: cutlass.Constexpr[int] = 0,
) -> None:
    """Issues ``acc = a @ b``, or ``acc += a @ b`` if ``accumulate``, as one wgmma group. The operands and ``acc`` are in use until
    a wait for this group returns.

    Args:
        steps: the number of k-steps (MMAs of 32 bytes along k); 0 for all.
        first: the first k-step.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for i in cutlass.range_constexpr(steps or cute.size(b.shape[2])):
        cute.gemm(atom, acc, a[None, None, first + i], b[None, None, first + i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
