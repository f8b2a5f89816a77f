"""The device code of `mla_decode`: the launch, and the roles of the warps.

The kernel is persistent, warp-specialised and split-KV.

* CTAs: one per SM, with four warpgroups and nearly all shared memory. With 128 heads, two CTAs form a cluster. Each CTA computes 64
  heads, loads half of each block and multicasts this half to both.
* Warp 0 (`load_device`) runs the tile scheduler (`scheduler_device`), and loads queries and blocks of 64 tokens by TMA. Latents go
  to a ring of chunks of 128 columns, rotary parts to a ring of their own. The other warps of warpgroup 0 idle.
* Warpgroup 1 (`score_device`) holds most columns of Q in registers. It computes q @ k, masks (`mask_device`) and softmax. It stores
  a block's probabilities over the block's rotary part, and signals ``probs_full``.
* Warpgroups 2 and 3 (`value_device`) accumulate P @ V for half of the latent's columns each, and release the ring stages. They
  store results (`store_device`) at the addresses of `results_device`.
* In flight: 11 chunks of 16 KB, almost three blocks. With an fp8 cache: 21 to 24 chunks of 8 KB, more than five blocks. q @ k of a
  block overlaps P @ V of the preceding block.
* Synchronisation: *full* and *empty* mbarriers per latent chunk and per rotary stage, and ``probs_full`` per rotary stage. In a
  cluster, both CTAs' warps arrive on *empty*, because a multicast load overwrites the stage in both CTAs. Queries go through the
  same rings as blocks.
* Numerics: scores, softmax and accumulators are float32. P is rounded to 16 bits, or to e4m3 with an fp8 cache. The score warpgroup
  computes row max and row sum. It passes rescale factors to the value warpgroups (`Notes`), which rescale their accumulators. fp8
  MMAs truncate their sums, so long sums are continued in global memory (`Fp8Config.summed`).
* Limits: compute-bound with 128 heads, memory-bound with fewer heads.

A second kernel (`merge_device`) merges partial results of split-KV. With an fp8 cache, `fp8_score_device`, `fp8_value_device` and
`fp8_store_device` replace their counterparts; `kernel_of` chooses between them.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_score_device import Fp8QkMma
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_store_device import Fp8Store
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_sums_device import MemorySums
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_value_device import Fp8PvMma
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.load_device import Loader, load_queries, load_wide_queries, tma_views
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.mask_device import TokenMask, hide_later_tokens
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import DecodeWork, items_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.score_device import QkMma, QkMmas, ScoreWarpgroup, TmaArrival
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Epilogue, Store
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    READERS,
    SCORES,
    THREADS,
    VALUES,
    Blocks,
    Call,
    Table,
    shared_memory,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import PvMma, ValueWarpgroups

LOAD_WARP = 0


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MlaDecode(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns. e4m3
    tensors are passed as uint8."""
    size, ints = arguments.size, arguments.ints
    fp8 = isinstance(config, Fp8Config)
    tokens, batch = size(), size()
    q = _operand(config, fp8 and config.fp8_queries, tokens, config.heads, LATENT + ROPE)
    out = arguments.rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = _operand(config, fp8, size(), size(divisibility=ROWS), LATENT + ROPE)
    page_table = ints(batch, size(), contiguous=False)
    scales = [Int64(0) if fp8 else None for _ in range(2)]
    scalars = [*(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(3)), Float32(0), *scales]
    return q, kv_cache, out, page_table, ints(batch), *scalars, arguments.stream()


def _operand(config: Config, as_bytes: bool, *shape: Any) -> Any:
    return arguments.byte_rows(*shape) if as_bytes else arguments.rows(config.dtype, *shape)


class MlaDecode:
    """The host function that launches the attention kernel of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mla = kernel_of(config, DecodeWork(config), hide_later_tokens)

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
        q_scale: Optional[Int64],
        kv_scale: Optional[Int64],
        stream: cuda.CUstream,
    ):
        items = items_of(self.config, q_len)
        self.mla.launch(
            q, kv_cache, out, page_table, cache_seqlens, cache_seqlens.shape[0] * items, items, partial, lse, q_len, max_seqlen_k,
            groups, scale, q_scale, kv_scale, None, None, stream,
        )  # fmt: skip


def kernel_of(config: Config, work: Any, hide: Any) -> Mla:
    """Composes the kernel of a configuration from the roles of its warps.

    Args:
        work: the object that forms work items: `DecodeWork`, or an object with the same methods.
        hide: function that masks a block's scores, see `TokenMask`.
    """
    memory, results = shared_memory(config), Results(config, work)
    if isinstance(config, Fp8Config):
        sums = MemorySums(config, results)
        qk, pv, store = Fp8QkMma(config, memory), Fp8PvMma(config, memory, sums), Fp8Store(config, work, results, sums)
    else:
        qk, pv, store = QkMma(config, memory, TmaArrival()), PvMma(config, memory), Store(config, work, results)
    return Mla(
        config,
        memory,
        Loader(config, memory, work, load_wide_queries if config.wide_queries else load_queries),
        ScoreWarpgroup(config, memory, work, qk, TokenMask(config, memory, work, hide)),
        ValueWarpgroups(config, work, pv, Epilogue(config, work, results, store)),
    )


class Mla:
    """The attention kernel of one configuration.

    Attributes:
        memory: the layout of shared memory.
        loader, scores, values: the roles of the producer warp, the score warpgroup and the value warpgroups.
    """

    def __init__(self, config: Config, memory: Any, loader: Loader, scores: ScoreWarpgroup, values: ValueWarpgroups) -> None:
        self.config = config
        self.memory = memory
        self.loader = loader
        self.scores = scores
        self.values = values

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        batch: Int32,
        items: Int32,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        groups: Int32,
        scale: Float32,
        q_scale: Int64 | None,
        kv_scale: Int64 | None,
        cu_seqlens_q: Int64 | None,
        is_causal: Int32 | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel. Arguments: see `Call`."""
        c = self.config
        self.kernel(
            *tma_views(self.memory, q, kv_cache), Table(page_table.iterator.toint(), page_table.stride[0], page_table.stride[1]),
            cache_seqlens.iterator.toint(), batch, items, q_len, max_seqlen_k,
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), lse, partial, groups, cute.arch.popc(kv_cache.shape[1] - 1),
            scale, q_scale, kv_scale, cu_seqlens_q, is_causal, self.scores.qk.make_mmas(), self.values.pv.make_mma(),
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
        storage = SmemAllocator().allocate(self.memory.storage())
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
        # PDL: wait for the preceding kernel, which may have written this kernel's inputs. Then let the next kernel launch as soon
        # as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < SCORES * 4:
            cute.arch.setmaxregister_decrease(c.load_registers)
            if warp == LOAD_WARP:
                self.loader.load(call, q, kv)
        else:
            if warp < VALUES * 4:
                cute.arch.setmaxregister_increase(c.score_registers)
                self.scores.compute(call, qk)
            else:
                cute.arch.setmaxregister_increase(c.value_registers)
                self.values.compute(call, pv)
        if const_expr(c.cluster > 1):  # no CTA may exit while the other CTA still writes to this CTA's shared memory
            self.meet()

    @cute.jit
    def init_barriers(self, call: Call):
        """Initialises all mbarriers. In each CTA of the cluster, the four warps of one warpgroup release a latent chunk: of a value
        warpgroup, or of the score warpgroup if the chunk held queries. Both value warpgroups release a rotary stage. The four score
        warps signal ``probs_full`` of their CTA."""
        c = self.config
        for chunk in cutlass.range_constexpr(c.latent_chunks):
            call.latent_chunks.init(chunk, 4 * c.cluster)
        for stage in cutlass.range_constexpr(c.stages):
            call.ropes.init(stage, 4 * READERS * c.cluster)
            call.probs_full.init(stage, 4)

    @cute.jit
    def meet(self):
        """Synchronises all threads of the cluster, or of the CTA if there is no cluster."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
