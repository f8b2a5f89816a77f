"""The device code of `mla_sparse`: the launch, and the roles of the warps.

`load_device` splits the work and gathers keys. MMAs and epilogue are those of `mla_decode.kernel_device`, where a token counts
as a sequence of its selected keys.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.score_device import QkMmas, Scorer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    LATENT_CHUNKS,
    READERS,
    SCORES,
    THREADS,
    VALUES,
    Call,
    Table,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import Valuer
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.load_device import WARPS, Gatherer


def host(config: Config) -> Any:
    """The host function that launches the kernel of a configuration."""
    return MlaSparse(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `host` with."""
    size, rows = arguments.size, arguments.rows
    tokens = size()
    q = rows(config.dtype, tokens, config.heads, LATENT + ROPE)
    out = rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = rows(config.dtype, size(), size(), LATENT + ROPE)
    indices = arguments.ints(tokens, size())
    return q, kv_cache, out, indices, *(Int64(0) for _ in range(3)), Int32(0), Float32(0), arguments.stream()


class MlaSparse(Gatherer, Scorer, Valuer):
    """The sparse MLA kernel of one configuration: `mla_decode.kernel_device.MlaDecode` with a gathering producer warpgroup."""

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
        qk: QkMmas,
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
        # PDL: the preceding kernel may have written our inputs; the next kernel may launch as soon as SMs have room.
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
        """Each producer thread's copies arrive at the full barriers; for its row mask each warp arrives at those of `ropes`."""
        c = self.config
        for chunk in cutlass.range_constexpr(c.latent_chunks):
            call.latent_chunks.full.init(chunk, 32 * WARPS)
            call.latent_chunks.empty.init(chunk, 4)
        for stage in cutlass.range_constexpr(c.stages):
            call.ropes.full.init(stage, 32 * WARPS + WARPS)
            call.ropes.empty.init(stage, 4 * READERS)
            call.probs_full.init(stage, 4)

    @cute.jit
    def wait_for_block(self, call: Call, at: Cursor, rope_at: Cursor):
        """Waits until a whole block is loaded and visible to MMAs.

        cp.async writes through the generic proxy, so wgmma, which reads through the async proxy, needs a fence. P @ V is covered as
        well, because probabilities are signalled after the fence. There is one fence per block, because a fence is slow while MMAs
        run: with one per chunk a prefill was 5% slower on an H200 than without any, which would be unsafe.
        """
        call.ropes.wait(rope_at)
        for _ in cutlass.range_constexpr(LATENT_CHUNKS):
            call.latent_chunks.wait(at)
            at = advance(at, self.config.latent_chunks)
        cute.arch.fence_view_async_shared()

    def wait_for_chunk(self, call: Call, at: Cursor) -> None:
        """Does nothing: `wait_for_block` has waited for all chunks."""

    @cute.jit
    def mask_scores(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Cursor, rope_at: Cursor):
        """Masks the scores of rows that hold no key."""
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
