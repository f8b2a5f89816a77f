"""The device code of `mla_decode`: the launch, and the roles of the warps.

`load_device` has the tile scheduler and the producer warp, `score_device` the score warpgroup (q @ k and
softmax), `value_device` the value warpgroups (P @ V), and `store_device` their epilogue.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.load_device import Loader
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.score_device import QkMmas, Scorer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import READERS, SCORES, THREADS, VALUES, Blocks, Call, Table
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import Valuer
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, gqa_packed, make_tma

LOAD_WARP = 0


def host(config: Config) -> Any:
    """The host function that launches the kernel of a configuration."""
    return MlaDecode(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `host` with."""
    size, rows, ints = arguments.size, arguments.rows, arguments.ints
    tokens, batch = size(), size()
    q = rows(config.dtype, tokens, config.heads, LATENT + ROPE)
    out = rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = rows(config.dtype, size(), size(divisibility=ROWS), LATENT + ROPE)
    page_table = ints(batch, size(), contiguous=False)
    scalars = [*(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(3)), Float32(0)]
    return q, kv_cache, out, page_table, ints(batch), *scalars, arguments.stream()


def slots_first(kv_cache: cute.Tensor) -> cute.Tensor:
    """A view of ``[pages, page_size, width]`` as ``(page_size, width, pages)``."""
    return cute.make_tensor(kv_cache.iterator, cute.select(kv_cache.layout, mode=[1, 2, 0]))


class MlaDecode(Loader, Scorer, Valuer):
    """The MLA decode kernel of one configuration: persistent and warp-specialised, one CTA of four warpgroups per SM.

    A warp of the first warpgroup finds the CTA's work items, and loads queries and blocks by TMA into two rings in shared memory:
    latent chunks and rotary parts. The score warpgroup computes q @ k and softmax, stores probabilities over the block's rotary
    part, and signals ``probs_full``. The two value warpgroups accumulate P @ V for half of the columns each, and release the
    stages. With 128 heads two CTAs form a cluster: each loads half of a block and multicasts it to both.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        groups: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        blocks = self.blocks_of(q, kv_cache)
        self.launch(
            *blocks, kv_cache, out, page_table, cache_seqlens, partial, lse, q_len, max_seqlen_k, groups, scale, None, None, stream
        )

    def blocks_of(self, q: cute.Tensor, kv_cache: cute.Tensor) -> tuple[Blocks, Blocks]:
        """Returns the TMA views of queries and cache."""
        c = self.config
        return (
            Blocks(make_tma(self.load_once, gqa_packed(q), ((c.heads_of_tile, c.tokens_of_tile), PANEL)), None),
            Blocks(make_tma(self.load_shared, slots_first(kv_cache), (ROWS, PANEL)), None),
        )

    @property
    def load_once(self) -> Any:
        """TMA load to one CTA."""
        return cpasync.CopyBulkTensorTileG2SOp()

    @property
    def load_shared(self) -> Any:
        """TMA load to all CTAs of the cluster (multicast)."""
        return self.load_once if self.config.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()

    @cute.jit
    def launch(
        self,
        q: Blocks,
        kv: Blocks,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        groups: Int32,
        scale: Float32,
        q_scale: Int64 | None,
        kv_scale: Int64 | None,
        stream: cuda.CUstream,
    ):
        c = self.config
        items = (q_len + (c.tokens_of_tile - 1)) // c.tokens_of_tile
        self.kernel(
            q, kv, Table(page_table.iterator.toint(), page_table.stride[0], page_table.stride[1]), cache_seqlens.iterator.toint(),
            cache_seqlens.shape[0] * items, items, q_len, max_seqlen_k, Table(out.iterator.toint(), out.stride[0], out.stride[1]),
            lse, partial, groups, cute.arch.popc(kv_cache.shape[1] - 1), scale, q_scale, kv_scale, None, None, self.make_qk_mmas(),
            self.make_pv_mma(),
        ).launch(
            grid=(c.cluster * groups, 1, 1), block=(THREADS, 1, 1), cluster=(c.cluster, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Blocks,
        kv: Blocks,
        page_table: Table,
        cache_seqlens: Int64,
        batch: Int32,
        items: Int32,
        q_len: Int32,
        max_seqlen_k: Int32,
        out: Table,
        lse: Int64,
        partial: Int64,
        groups: Int32,
        page_shift: Int32,
        scale: Float32,
        q_scale: Int64 | None,
        kv_scale: Int64 | None,
        cu_seqlens_q: Int64 | None,
        is_causal: Int32 | None,
        qk: QkMmas,
        pv: cute.TiledMma,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.storage())
        call = Call(
            page_table, cache_seqlens, batch, items, q_len, max_seqlen_k, out, lse, partial, groups, page_shift, scale,
            cta // c.cluster, cta % c.cluster, storage.plan.data_ptr(), storage, q_scale, kv_scale, cu_seqlens_q, is_causal,
        )  # fmt: skip
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                self.init_barriers(call)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            for blocks in (q, kv):
                cpasync.prefetch_descriptor(blocks.latents.atom)
                if const_expr(blocks.others is not None):
                    cpasync.prefetch_descriptor(blocks.others.atom)
        self.meet()
        # PDL: the preceding kernel may have written our inputs; the next kernel may launch as soon as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < SCORES * 4:
            cute.arch.setmaxregister_decrease(c.load_registers)
            if warp == LOAD_WARP:
                self.load(call, q, kv)
        else:
            if warp < VALUES * 4:
                cute.arch.setmaxregister_increase(c.score_registers)
                self.score(call, qk)
            else:
                cute.arch.setmaxregister_increase(c.value_registers)
                self.take_values(call, pv)
        if const_expr(c.cluster > 1):  # no CTA may exit while another one still writes to its shared memory
            self.meet()

    @cute.jit
    def init_barriers(self, call: Call):
        c = self.config
        for chunk in cutlass.range_constexpr(c.latent_chunks):
            call.latent_chunks.init(chunk, 4 * c.cluster)
        for stage in cutlass.range_constexpr(c.stages):
            call.ropes.init(stage, 4 * READERS * c.cluster)
            call.probs_full.init(stage, 4)

    @cute.jit
    def meet(self):
        """Barrier of all threads of the cluster."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
