"""Residual add and RMSNorm as the prologue of a GEMM whose k the CTAs of a cluster split.

A CTA adds tokens and residual for its own blocks only, and sends the tokens' sums of squares of these blocks to all CTAs of the
cluster. It stores the normalised tokens in shared memory as the B operand of the wgmmas. So the wgmmas wait for the exchange of the
sums of squares. If the epilogue divided by the root mean square instead, the operands would be rounded before the division, and a
router would sometimes select other experts.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.registers_device import bits_of, load_floats, store_words
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank, send_word
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import LOAD_BYTES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, load_words_if
from tokenspeed_kernel_nvidia.sm90.gemm.mm.norm_device import Norm, NormWork
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import BLOCK, CLUSTER, WARPS
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.tile_device import COMPUTING, Call, SplitK

CHUNKS = BLOCK * 2 // LOAD_BYTES  # 16-byte chunks of a token in a block


class NormSplitK(Norm, SplitK):
    """The prologue, which the MMA warps run. MMA warp i has tokens i, i + 8, and so on. Each lane has the same 16-byte chunks of
    all of them."""

    squared = True

    def load_tokens(self, call: Call, work: NormWork, x: Matrix, warp: Int32, chunk: Int32) -> tuple:
        """Loads a lane's chunk of the warp's tokens.

        Args:
            x: the tokens; ``call.m`` of them exist.
            chunk: the index of the chunk in the CTA's blocks.

        Returns:
            The words, ``raw[token, 0, word]``, with the residual's at ``raw[token, 1, word]``; and the norm's weights, float32.
        """
        count = self.config.tokens // WARPS
        along = call.first_block * CHUNKS + chunk  # in the token
        live = along * (LOAD_BYTES // 2) < work.hidden
        raw = cute.make_rmem_tensor((count, 2, 4), Uint32)
        _, _, *norm_at = self.sources_of(x, work, Int32(0), along, live)
        norm = [word for from_, wanted in norm_at for word in load_words_if(from_, wanted)]
        for each in range(count):
            token = warp + WARPS * each
            sources = self.sources_of(x, work, token, along, live & (token < call.m))
            for which in range(2):
                for word, loaded in enumerate(load_words_if(*sources[which])):
                    raw[each, which, word] = loaded
        return raw, self.norm_weights(work, norm)

    @cute.jit
    def add_squares(
        self, call: Call, work: NormWork, warp: Int32, chunk: Int32, raw: cute.Tensor, scales: Any, squares: cute.Tensor
    ):
        """Adds the squares of a lane's chunk of the warp's tokens plus residual to ``squares``, which has one sum for each of these
        tokens. All clusters compute the sums of token and residual. So only cluster i writes those of tokens i, i + the number of
        clusters, and so on."""
        along = call.first_block * CHUNKS + chunk
        writes = (along * (LOAD_BYTES // 2) < work.hidden) & (work.total.address != 0)
        for each in cutlass.range_constexpr(self.config.tokens // WARPS):
            token = warp + WARPS * each
            _, sums, squares[each] = self.scaled_chunk(raw[each, None, None], scales, squares[each])
            if writes & (token < call.m) & (token % call.clusters == call.cluster):
                store_words(work.total.row(token) + Int64(along * LOAD_BYTES), sums)

    @cute.jit
    def keep_normed(self, call: Call, storage: Any, work: NormWork, normed: Matrix, warp: Int32, loaded: Any):
        """Writes the CTA's blocks of the warp's normalised tokens to global memory, and stores them as operands of the wgmmas in
        shared memory, with zeros beyond the hidden size. Returns when all MMA warps have stored theirs.

        Args:
            normed: the normalised tokens in global memory.
            loaded: the results of `load_tokens`.
        """
        tokens = self.config.tokens
        for each in cutlass.range_constexpr(tokens // WARPS):
            token = warp + WARPS * each
            factor = self.factor_of(storage, work, token)
            for turn in cutlass.range_constexpr(len(loaded)):
                raw, scales = loaded[turn]
                chunk = cute.arch.lane_idx() + 32 * turn
                along = call.first_block * CHUNKS + chunk
                words = self.normed_chunk(raw[each, None, None], scales, factor)
                if (chunk < call.blocks * CHUNKS) & (token < call.m):
                    # In a block, a token is a row of 128 bytes in the 128-byte swizzle. The row's index modulo 8 is the warp's.
                    to = storage.columns.data_ptr().toint() + chunk // CHUNKS * (tokens * BLOCK * 2) + token * (BLOCK * 2)
                    store_words_shared(to + ((chunk % CHUNKS) ^ warp) * LOAD_BYTES, words)
                    if along * (LOAD_BYTES // 2) < work.hidden:
                        store_words(normed.row(token) + Int64(along * LOAD_BYTES), words)
        # Order the stores before the wgmmas' reads (async proxy).
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=32 * WARPS)

    @cute.jit
    def exchange(self, call: Call, storage: Any, warp: Int32, squares: cute.Tensor):
        """Adds the lanes' sums of squares of the warp's tokens, and sends the sums to all CTAs of the cluster.

        Args:
            squares: a lane's sums of squares of the warp's tokens.
        """
        lane = cute.arch.lane_idx()
        cute.arch.cluster_wait()  # the barriers of all CTAs are initialised
        for each in cutlass.range_constexpr(self.config.tokens // WARPS):
            square = squares[each]
            for power in cutlass.range_constexpr(5):
                square += cute.arch.shuffle_sync_bfly(square, offset=1 << power)
            if lane < CLUSTER:
                place = call.rank * self.config.tokens + warp + WARPS * each
                there = of_rank(storage.squares.data_ptr().toint() + place * 4, lane)
                send_word(there, bits_of(square), of_rank(storage.squared.data_ptr().toint(), lane))

    @cute.jit
    def factor_of(self, storage: Any, work: NormWork, token: Int32):
        """Waits for the sums of squares of all CTAs of the cluster, and returns a token's reciprocal root mean square."""
        cute.arch.mbarrier_wait(storage.squared.data_ptr(), 0)
        square = Float32(0.0)
        at = storage.squares.data_ptr().toint() + cutlass.min(token, self.config.tokens - 1) * 4
        for rank in cutlass.range_constexpr(CLUSTER):
            square += load_floats("shared", at + rank * self.config.tokens * 4, 1)
        return cute.math.rsqrt(square / Float32(work.hidden) + work.eps)
