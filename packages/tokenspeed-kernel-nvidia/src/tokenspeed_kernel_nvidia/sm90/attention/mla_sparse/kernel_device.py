"""The device code of `mla_sparse`: the launch, and the roles of the warps.

The roles of the warps are those of `mla_decode.kernel_device`, except for loads. A token counts as a sequence of its selected keys.
All four warps of warpgroup 0 gather keys (`load_device`) by cp.async, which cannot multicast. So with 128 heads, both CTAs of a
group gather all keys. MMAs and epilogue are those of `mla_decode`.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import DecodeWork
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.score_device import QkMma, QkMmas, ScoreWarpgroup
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Epilogue, Store
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    READERS,
    SCORES,
    THREADS,
    VALUES,
    Call,
    Table,
    shared_memory,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import PvMma, ValueWarpgroups
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.load_device import WARPS, GatherArrival, Gatherer, selected_length
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.mask_device import GatherMask


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MlaSparse(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows = arguments.size, arguments.rows
    tokens = size()
    q = rows(config.dtype, tokens, config.heads, LATENT + ROPE)
    out = rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = rows(config.dtype, size(), size(), LATENT + ROPE)
    indices = arguments.ints(tokens, size())
    return q, kv_cache, out, indices, *(Int64(0) for _ in range(3)), Int32(0), Float32(0), arguments.stream()


class MlaSparse:
    """The sparse MLA kernel of one configuration, composed of the roles of its warps."""

    def __init__(self, config: Config) -> None:
        work, memory = DecodeWork(config, selected_length), shared_memory(config)
        results = Results(config, work)
        self.config = config
        self.memory = memory
        self.gatherer = Gatherer(config, memory, work)
        self.scores = ScoreWarpgroup(config, memory, work, QkMma(config, memory, GatherArrival(config)), GatherMask())
        store = Store(config, work, results)
        self.values = ValueWarpgroups(config, work, PvMma(config, memory), Epilogue(config, work, results, store))

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
            cute.arch.popc(kv_cache.shape[1] - 1), scale, self.scores.qk.make_mmas(), self.values.pv.make_mma(),
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
        storage = SmemAllocator().allocate(self.memory.storage())
        # The arguments of `mla_decode`, as this kernel uses them: indices for the page table, topk_length for cache_seqlens, a work
        # item and a new token per sequence, and the number of indices for max_seqlen_k.
        call = Call(
            indices, topk_length, tokens, Int32(1), Int32(1), top_k, out, lse, partial, groups, page_shift, scale,
            cta // c.ranks, cta % c.ranks, storage.plan.data_ptr(), storage,
        )  # fmt: skip
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                self.init_barriers(call)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # PDL: wait for the preceding kernel, which may have written this kernel's inputs. Then let the next kernel launch as soon
        # as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < SCORES * 4:
            cute.arch.setmaxregister_decrease(c.load_registers)
            self.gatherer.gather(call, q, kv, warp)
        elif warp < VALUES * 4:
            cute.arch.setmaxregister_increase(c.score_registers)
            self.scores.compute(call, qk)
        else:
            cute.arch.setmaxregister_increase(c.value_registers)
            self.values.compute(call, pv)

    @cute.jit
    def init_barriers(self, call: Call):
        """Initialises the rings' barriers. The copies of each producer thread arrive at the full barriers. In addition, each
        producer warp arrives at the full barriers of ``ropes`` when it has stored its mask of valid rows.
        """
        c = self.config
        for chunk in cutlass.range_constexpr(c.latent_chunks):
            call.latent_chunks.full.init(chunk, 32 * WARPS)
            call.latent_chunks.empty.init(chunk, 4)
        for stage in cutlass.range_constexpr(c.stages):
            call.ropes.full.init(stage, 32 * WARPS + WARPS)
            call.ropes.empty.init(stage, 4 * READERS)
            call.probs_full.init(stage, 4)
