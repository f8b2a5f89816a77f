"""Device code of `rmsnorm_moe_topk`: residual add, RMSNorm, the router's GEMM, and the selection of experts.

A cluster of eight CTAs has up to 16 or 32 tokens and all experts. The CTAs split the hidden size, which is k (`gemm.split_k`). A
router has so few weights that the ring holds all of a CTA's weights: all loads are in flight at once, no stage is reused, and the
kernel is latency-bound. Each CTA sends its partial logits to the CTA that selects the token's experts. So one warp has all logits
of a token, and no further exchange is needed. All clusters read the weights, which are in L2 after the first cluster has read them.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_floats, pack, store_floats, store_words
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector
from tokenspeed_kernel_nvidia.sm90.gemm.mm.norm_device import NormWork
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import BLOCK, CLUSTER, THREADS, TILE, WARPS
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.norm_device import CHUNKS, NormSplitK
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.tile_device import Call, send_four, weights_tma
from tokenspeed_kernel_nvidia.sm90.moe.route.config import TILES, RouteConfig
from tokenspeed_kernel_nvidia.sm90.moe.route.select_device import NONE, key_of, select_experts

# Groups of four logits of a tile for a pair of tokens: those of a lane, for two experts. A warpgroup has four warps of eight quads
# of lanes; one lane of each quad has the pair.
_QUADS = 4 * 8
_EXPERTS = 2 * TILES  # experts of a lane in the selection


def host(config: RouteConfig) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Route(config)


def fake_arguments(config: RouteConfig) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    tokens, hidden, experts = (arguments.size() for _ in range(3))
    x, router = (arguments.rows(config.dtype, count, hidden) for count in (tokens, experts))
    normed = make_fake_tensor(dtype_of(config.dtype), (tokens, hidden), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
    residual = Int64(0), Int64(0), Int64(0), Int64(0)
    vectors = Int64(0), Int32(0), Int64(0), Int32(0)
    chosen = *(Int64(0), Int64(0), Int64(0)), *(Int64(0), Int64(0), Int64(0))
    return x, router, normed, *residual, *vectors, *chosen, Int32(0), Float32(0), Int32(0), arguments.stream()


@dataclass(frozen=True)
class Tokens:
    """The operands and results of the prologue and of the selection. Rows are in global memory.

    Attributes:
        x: the cluster's tokens.
        work: the parameters of the norm. Rows are those of the cluster's tokens.
        normed: the normalised tokens of the cluster.
        weights, ids: the routing weights, float32, and the selected experts, int32, of all tokens.
        first: the cluster's first token.
        top_k: the number of experts to select.
    """

    x: Matrix
    work: NormWork
    normed: Matrix
    weights: Table
    ids: Table
    first: Int32
    top_k: Int32


class Route(NormSplitK):
    """The kernel of one configuration, with the warp roles of `SplitK`. The MMA warps normalise the tokens. Then warpgroup i
    computes the CTA's partial logits of experts 64 i to 64 i + 63. At last, the first two or four warps each select the experts of
    one token.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        router: cute.Tensor,
        normed: cute.Tensor,
        residual: Int64,
        residual_pitch: Int64,
        total: Int64,
        total_pitch: Int64,
        norm: Int64,
        norm_kind: Int32,
        bias: Int64,
        bias_kind: Int32,
        weights: Int64,
        weights_row: Int64,
        weights_column: Int64,
        ids: Int64,
        ids_row: Int64,
        ids_column: Int64,
        top_k: Int32,
        eps: Float32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        hidden = x.shape[1]
        work = NormWork(Matrix(residual, residual_pitch * 2), Matrix(total, total_pitch * 2), Vector(norm, norm_kind), eps, hidden)
        given = Tokens(
            Matrix(x.iterator.toint(), x.stride[0] * 2), work, Matrix(normed.iterator.toint(), normed.stride[0] * 2),
            Table(weights, weights_row, weights_column), Table(ids, ids_row, ids_column), Int32(0), top_k,
        )  # fmt: skip
        self.kernel(
            weights_tma(router), Matrix(router.iterator.toint(), router.stride[0] * 2), Vector(bias, bias_kind), x.shape[0],
            router.shape[0], given, self.mma(),
        ).launch(
            grid=(CLUSTER * clusters, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, router: Tma, rows: Matrix, bias: Vector, m: Int32, n: Int32, given: Tokens, mma: cute.TiledMma):
        storage = SmemAllocator().allocate(self.storage())
        cta, _, _ = cute.arch.block_idx()
        rank, first, work = cta % CLUSTER, cta // CLUSTER * self.config.tokens, given.work
        blocks = (work.hidden + (BLOCK - 1)) // BLOCK
        first_block = rank * blocks // CLUSTER
        # The prologue gets this cluster's tokens only, as if the launch had a single cluster and no other tokens.
        call = Call(
            router, rows, bias, given.weights, cutlass.min(m - first, self.config.tokens), n, work.hidden, mma, rank, Int32(0),
            Int32(1), Int32(0), (n + (TILE - 1)) // TILE, first_block, (rank + 1) * blocks // CLUSTER - first_block,
        )  # fmt: skip

        def behind(matrix: Matrix) -> Matrix:
            here = cutlass.select_(matrix.address != 0, matrix.row(first), Int64(0))
            return Matrix(here, matrix.pitch)

        work = NormWork(behind(work.residual), behind(work.total), work.norm, work.eps, work.hidden)
        own = Tokens(behind(given.x), work, behind(given.normed), given.weights, given.ids, first, given.top_k)
        self.run(call, storage, own)

    @cute.jit
    def compute(self, call: Call, storage: Any, given: Tokens, warp: Int32):
        """Runs an MMA warp: the prologue for some tokens, the MMAs, and the selection of a token's experts."""
        wg, work, lane = warp // 4, given.work, cute.arch.lane_idx()
        pipe, sums = self.pipe(storage), self.sums(storage)
        self.await_kernel_before(storage, warp)
        squares = cute.make_rmem_tensor((self.config.tokens // WARPS,), Float32)
        squares.fill(0.0)
        # Issue the loads of all chunks before the first use. The registers are used again in `keep_normed`.
        turns = -(-self.config.room * CHUNKS // 32)
        loaded = [self.load_tokens(call, work, given.x, warp, lane + 32 * turn) for turn in range(turns)]
        for turn in cutlass.range_constexpr(turns):
            raw, scales = loaded[turn]
            if lane + 32 * turn < call.blocks * CHUNKS:
                self.add_squares(call, work, warp, lane + 32 * turn, raw, scales, squares)
        self.exchange(call, storage, warp, squares)
        self.keep_normed(call, storage, work, given.normed, warp, loaded)
        if wg < call.tiles:
            mine = call.mma.get_slice(0)
            left = mine.make_fragment_A(mine.partition_A(self.ring.tiles(storage.ring)))
            right = mine.make_fragment_B(mine.partition_B(self.columns.tiles(storage.columns)))
            acc = cute.make_rmem_tensor(mine.partition_shape_C((TILE, self.config.tokens)), Float32)
            acc.fill(0.0)
            for block in cutlass.range(call.blocks, unroll=1):
                at = self.stage_of(call, wg, block)
                pipe.wait(at)
                start_mma(call.mma, acc, left[None, None, None, at.stage], right[None, None, None, block], True)
            warpgroup.wait_group(0)
            self.send(call, storage, acc, warp)
        if (warp < self.config.own) & (call.rank * self.config.own + warp < call.m):
            self.select(call, storage, given, warp)
        # Other CTAs send partial logits to this CTA's shared memory. So it must not exit before all of them have arrived.
        for tile in cutlass.range_constexpr(TILES):
            if tile < call.tiles:
                sums.wait(Cursor(Int32(tile), Int32(0)))

    # -- logits --------------------------------------------------------------------------------------------------------------------

    def logits_at(self, storage: Any, tile: Int32, pair: Int32) -> Int32:
        """Returns the shared address of the partial logits of a tile for a pair of this CTA's tokens, and the bytes from one
        sending CTA to the next. A tile's buffer is float32 ``[CTA of the cluster][pair][_QUADS][row, row + 8][token of the pair]``,
        where rows are experts."""
        floats = self.config.own // 2 * _QUADS * 4  # of one CTA of the cluster
        return storage.buffers.data_ptr().toint() + tile * (self.config.buffer_floats * 4) + pair * (_QUADS * 16), floats * 4

    @cute.jit
    def send(self, call: Call, storage: Any, acc: cute.Tensor, warp: Int32):
        """Sends each CTA of the cluster this CTA's partial logits of the tokens whose experts the receiver selects. One st.async
        has a lane's logits of two experts and two tokens."""
        lane, wg = cute.arch.lane_idx(), warp // 4
        barrier = self.sums(storage).full.of(Cursor(wg, Int32(0))).toint()
        pairs = self.config.own // 2
        for eight in cutlass.range_constexpr(self.config.tokens // 8):
            index = 4 * eight + lane % 4  # the index of the lane's pair of tokens in the cluster
            to, pitch = self.logits_at(storage, wg, index % pairs)
            to += call.rank * pitch + (warp % 4 * 8 + lane // 4) * 16
            values = [acc[4 * eight + at] for at in range(4)]
            send_four(of_rank(to, index // pairs), values, of_rank(barrier, index // pairs))

    @cute.jit
    def select(self, call: Call, storage: Any, given: Tokens, warp: Int32):
        """Selects the experts of a token of this CTA, and writes them and their weights."""
        lane = cute.arch.lane_idx()
        own = call.rank * self.config.own + warp  # the token's index in the cluster
        experts = [TILE * tile + lane // 8 * 16 + half * 8 + lane % 8 for tile in range(TILES) for half in range(2)]
        biases = [call.bias.load(expert, expert < call.n) for expert in experts]
        keys = cute.make_rmem_tensor((_EXPERTS,), Int32)
        keys.fill(NONE)
        for tile in cutlass.range_constexpr(TILES):
            if tile < call.tiles:
                self.sums(storage).wait(Cursor(Int32(tile), Int32(0)))
                at, pitch = self.logits_at(storage, Int32(tile), warp // 2)
                totals = [Float32(0.0)] * 2
                for rank in cutlass.range_constexpr(CLUSTER):
                    found = load_floats("shared", at + rank * pitch + lane * 16, 4)
                    for half in cutlass.range_constexpr(2):
                        totals[half] += cutlass.select_(warp % 2 == 0, found[2 * half], found[2 * half + 1])
                for half in cutlass.range_constexpr(2):
                    index = 2 * tile + half
                    logit = totals[half] + call.bias.number(biases[index])
                    key = key_of(pack(self.dtype, Float32(0.0), logit), experts[index])
                    keys[index] = cutlass.select_(experts[index] < call.n, key, Int32(NONE))
        expert, weight = select_experts(keys, given.top_k)
        if lane < given.top_k:
            store_floats("global", given.weights.at(given.first + own, lane, 4), [weight])
            store_words(given.ids.at(given.first + own, lane, 4), [Uint32(expert)])
