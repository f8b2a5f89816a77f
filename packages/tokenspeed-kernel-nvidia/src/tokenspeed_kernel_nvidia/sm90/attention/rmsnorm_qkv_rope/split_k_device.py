"""Device code of `rmsnorm_qkv_rope` for up to 64 tokens: the GEMM of `gemm.split_k` with residual add, RMSNorm and RoPE.

The CTAs of a cluster split the hidden size. A CTA adds tokens and residual for its blocks only, and keeps these sums, times the
norm's weights, in shared memory as an operand of the wgmmas. It sends the tokens' sums of squares to all CTAs of the cluster. The
epilogue divides a token's results by the root mean square, so no wgmma waits for the root mean square.

The two halves of a tile are the two halves of 32 rotary pairs of a head. So one thread of the epilogue has both results of a pair.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.ends_device import Ends, Work, fake_arguments
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.split_k_config import SplitKConfig
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector, load_float_if
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import CLUSTER, HALF, THREADS, TILE, WARPS
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.norm_device import CHUNKS, NormSplitK
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.tile_device import Call, weights_tma

__all__ = ["fake_arguments", "host"]


def host(config: SplitKConfig) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return QkvSplitK(config)


@dataclass(frozen=True)
class Tokens:
    """What only this kernel's prologue and epilogue read: the tokens, and their other arguments."""

    x: Matrix
    work: Work


class QkvSplitK(Ends, NormSplitK):
    """The kernel of one configuration, with the warps of `SplitK`. The MMA warps load the tokens: warp i loads tokens i, i + 8,
    and so on."""

    def __init__(self, config: SplitKConfig) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        self.half = config.head_dim // 2

    @cute.jit
    def start(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        out: Table,
        bias: Vector,
        scale: Table,
        work: Work,
        ctas: Int32,
        sizes: Any,
        stream: cuda.CUstream,
    ):
        """Launches the kernel. ``scale`` and ``sizes`` belong to other kernels."""
        rows = cute.make_tensor(weights.iterator, cute.select(weights.layout, mode=[1, 0]))
        self.kernel(
            weights_tma(rows), Matrix(weights.iterator.toint(), weights.stride[1] * 2), bias, out, x.shape[0], rows.shape[0],
            Tokens(Matrix(x.iterator.toint(), x.stride[0] * 2), work), self.mma(),
        ).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        weights: Tma,
        rows: Matrix,
        bias: Vector,
        out: Table,
        m: Int32,
        n: Int32,
        given: Tokens,
        mma: cute.TiledMma,
    ):
        storage = SmemAllocator().allocate(self.storage())
        self.run(self.call_of(weights, rows, bias, out, m, n, given.work.hidden, n // TILE, mma), storage, given)

    def row_of(self, tile: Int32, half: Int32) -> Int32:
        """Returns the first row of weights of half a tile. The halves have the first and the second elements of rotary pairs."""
        tiles = self.head_dim // TILE  # of a head
        return tile // tiles * self.head_dim + tile % tiles * HALF + half * self.half

    # -- prologue ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def begin(self, call: Call, storage: Any, given: Tokens, warp: Int32):
        """Stores the CTA's blocks of the tokens in shared memory, and sends their sums of squares to all CTAs of the cluster.

        Returns:
            The positions and the cache slots of the thread's tokens; slots are negative if no cache is written.
        """
        work = given.work
        self.await_kernel_before(storage, warp)
        lane = cute.arch.lane_idx()
        # The epilogue needs a token's position and slot. Load both here, to hide the latency of the loads.
        tokens = [cute.arch.thread_idx()[0] % 128 // 4 + 32 * each for each in range(self.turns)]
        positions = [work.positions.load(token, token < call.m) for token in tokens]
        writes = work.slots.address != 0
        slots = [work.slots.load(token, (token < call.m) & writes) for token in tokens]
        slots = [cutlass.select_(writes, slot, Int64(-1)) for slot in slots]
        squares = cute.make_rmem_tensor((self.config.tokens // WARPS,), Float32)
        squares.fill(0.0)
        for chunk in cutlass.range(lane, call.blocks * CHUNKS, 32, unroll=1):
            raw, scales = self.load_tokens(call, work, given.x, warp, chunk)
            self.keep_tokens(call, storage, work, warp, chunk, raw, scales, squares)
        self.exchange(call, storage, warp, squares)
        return positions, slots

    # -- epilogue ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def prepare(
        self,
        call: Call,
        storage: Any,
        given: Tokens,
        kept: Any,
        row: Int32,
        other: Int32,
        token: Int32,
        turn: cutlass.Constexpr[int],
    ):
        """Returns the bias of both rows, cosine and sine, and the reciprocal root mean square of the token."""
        work, live = given.work, token < call.m
        biases = [call.bias.load(each, live) for each in (row, other)]
        angle = work.table.at(Int32(kept[0][turn]), row % self.head_dim, 4)
        rotates = live & (row // self.head_dim < work.heads + work.kv_heads)
        turned = [load_float_if(angle + half * (4 * self.half), rotates) for half in range(2)]
        return biases, turned, self.factor_of(storage, work, token)

    @cute.jit
    def finish(
        self,
        call: Call,
        given: Tokens,
        kept: Any,
        row: Int32,
        other: Int32,
        token: Int32,
        turn: cutlass.Constexpr[int],
        both: Any,
        operands: Any,
    ):
        """Divides by the root mean square, adds the bias, applies RoPE, and writes the results, also to the cache."""
        biases, turned, factor = operands
        if token < call.m:
            pair = [both[half] * factor + call.bias.number(biases[half]) for half in range(2)]
            self.rotate(call.out, given.work, token, row, pair, turned[0], turned[1], kept[1][turn])
