"""The device code of `mla_sparse`: the launch, and which warps do what.

`mla_sparse_load_device` divides the work and gathers keys. What computes and stores is `mla_decode_device`'s: a token is a sequence
of its own, whose keys are those that it chose.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_score_device import Products, Scorer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import PIECES, READERS, SCORES, THREADS, VALUES, Call, Table
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_value_device import Valuer
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse_config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse_load_device import WARPS, Gatherer
from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, advance


def host(config: Config) -> Any:
    """The function that launches a program."""
    return MlaSparse(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for what `host` takes."""
    size, rows = arguments.size, arguments.rows
    tokens = size()
    q = rows(config.dtype, tokens, config.heads, LATENT + ROPE)
    out = rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = rows(config.dtype, size(), size(), LATENT + ROPE)
    indices = arguments.ints(tokens, size())
    return q, kv_cache, out, indices, *(Int64(0) for _ in range(3)), Int32(0), Float32(0), arguments.stream()


class MlaSparse(Gatherer, Scorer, Valuer):
    """The kernel of one configuration."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        indices: cute.Tensor,
        topk_length: Int64,
        partial: Int64,
        lse: Int64,
        groups: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        c = self.config
        self.kernel(
            Table(q.iterator.toint(), q.stride[0], q.stride[1]),
            Table(kv_cache.iterator.toint(), kv_cache.stride[0], kv_cache.stride[1]),
            Table(indices.iterator.toint(), indices.stride[0], Int64(1)), topk_length, indices.shape[0], indices.shape[1],
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), lse, partial, groups,
            cute.arch.popc(kv_cache.shape[1] - 1), scale, self.make_qk_mmas(), self.make_pv_mma(),
        ).launch(
            grid=(c.ranks * groups, 1, 1), block=(THREADS, 1, 1), cluster=(c.neighbours, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Table,
        kv: Table,
        indices: Table,
        topk_length: Int64,
        tokens: Int32,
        top_k: Int32,
        out: Table,
        lse: Int64,
        partial: Int64,
        groups: Int32,
        page_shift: Int32,
        scale: Float32,
        qk: Products,
        pv: cute.TiledMma,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.storage())
        call = Call(
            indices, topk_length, tokens, Int32(1), Int32(1), top_k, out, lse, partial, groups, page_shift, scale,
            cta // c.ranks, cta % c.ranks, storage.plan.data_ptr(), storage,
        )  # fmt: skip
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                self.init_barriers(call)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Whatever ran before may have written what is read here; what runs next may begin once there is room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < SCORES * 4:
            cute.arch.setmaxregister_decrease(c.load_registers)
            self.gather(call, q, kv, warp)
        elif warp < VALUES * 4:
            cute.arch.setmaxregister_increase(c.score_registers)
            self.score(call, qk)
        else:
            cute.arch.setmaxregister_increase(c.value_registers)
            self.take_values(call, pv)

    @cute.jit
    def init_barriers(self, call: Call):
        """The copies of each thread arrive at a barrier, and for what is written beside rotary parts so does each warp."""
        c = self.config
        for piece in cutlass.range_constexpr(c.pieces):
            call.pieces.full.init(piece, 32 * WARPS)
            call.pieces.empty.init(piece, 4)
        for stage in cutlass.range_constexpr(c.stages):
            call.ropes.full.init(stage, 32 * WARPS + WARPS)
            call.ropes.empty.init(stage, 4 * READERS)
            call.probs_full.init(stage, 4)

    @cute.jit
    def wait_for_block(self, call: Call, at: Cursor, rope_at: Cursor):
        """Waits until all of a block is there for products to read.

        Threads have copied it, and tensor cores see what threads have written only behind a fence. The products with values come
        behind this one too, because probabilities do. There is one for all pieces, because each takes time while products run: one
        for each piece made a prefill 5% slower on an H200 than none at all, which would not be safe.
        """
        call.ropes.wait(rope_at)
        for _ in cutlass.range_constexpr(PIECES):
            call.pieces.wait(at)
            at = advance(at, self.config.pieces)
        cute.arch.fence_view_async_shared()

    def wait_for_piece(self, call: Call, at: Cursor) -> None:
        """It is there since the block is."""

    @cute.jit
    def leave_out(self, call: Call, scores: cute.Tensor, unit: Int32, valid: Int32, end: Cursor, rope_at: Cursor):
        """Leaves out rows that are no keys."""
        chosen = call.notes(rope_at).chosen(Uint32)
        low, high = chosen[0], chosen[1]
        if (low & high) != 0xFFFFFFFF:
            thread = self.thread_of_scores()
            words = [word >> ((thread & 3) * 2) for word in (low, high)]
            for j in cutlass.range_constexpr(cute.size(scores) // 4):
                for c in cutlass.range_constexpr(2):
                    is_key = (words[j // 4] >> (j % 4 * 8 + c)) & 1
                    for r in cutlass.range_constexpr(2):
                        at = 4 * j + 2 * r + c
                        scores[at] = scores[at] if is_key != 0 else -Float32.inf
