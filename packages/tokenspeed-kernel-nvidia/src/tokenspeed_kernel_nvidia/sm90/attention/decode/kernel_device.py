"""The device code of paged decode: the launch, and the roles of the warps.

`scheduler_device` has the tile scheduler, and `load_device` the producer warp (`gather_device` for pages of one token).
`mma_device` has the consumer warps (`swap_ab_device` for swap-AB). `merge_device` has the epilogue, which merges the partial
results of warps and CTAs.
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
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, first_to_read, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, prefetch_line
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import CONSUMERS, Config
from tokenspeed_kernel_nvidia.sm90.attention.decode.gather_device import CacheRows, Gatherer
from tokenspeed_kernel_nvidia.sm90.attention.decode.load_device import Loader
from tokenspeed_kernel_nvidia.sm90.attention.decode.merge_device import Merger
from tokenspeed_kernel_nvidia.sm90.attention.decode.mma_device import Consumers
from tokenspeed_kernel_nvidia.sm90.attention.decode.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.decode.swap_ab_device import SwapAb
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import THREADS, Call, PageTable, Rows, Shapes
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, make_tma, tokens_first

LOAD_WARP = CONSUMERS  # the producer warp
PREFETCH_WARP = 0  # the consumer warp that prefetches K/V into L2 before it computes


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Decode(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows, ints = arguments.size, arguments.rows, arguments.ints
    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    pages, page_size = size(), size(divisibility=config.box)
    shape = pages, page_size, kv_heads
    widths = config.head_dim, config.v_head_dim
    k_cache, v_cache = (arguments.byte_rows(*shape, x) if config.fp8 else rows(config.dtype, *shape, x) for x in widths)
    q, out = (rows(config.dtype, tokens, heads, x) for x in widths)
    page_table = ints(batch, size(), contiguous=False)
    scalars = [*(Int64(0) for _ in range(4)), *(Int32(0) for _ in range(5)), Float32(0)]
    scalars += [Int64(0), Int32(0)] * 2 + [Float32(0) if config.capped else None]
    return q, k_cache, v_cache, out, page_table, ints(batch), *scalars, arguments.stream()


class Decode:
    """The decode kernel of one configuration.

    * CTAs: the grid is (CTAs that cover all KV heads, CTA groups), with `Config.resident` CTAs per SM. A CTA has four consumer
      warps and one producer warp.
    * The producer warp finds the CTA's range of K/V tiles, and publishes the range in shared memory (``plan``). It then fills a
      ring of K/V tiles by TMA, or by cp.async if a page holds one token.
    * The consumer warps compute scores, online softmax and P @ V with mma.sync from the ring. They merge their partial results
      through shared memory. Partial results of several CTAs are merged through a workspace in global memory.
    * Shared memory: the ring takes all that is left by the partial results, so that as many tiles as possible are in flight. A
      stage has a tile's keys, then its values, in panels with swizzled rows of 128 or 64 bytes (`Row`, `Panels`).
    * Synchronisation: *full* and *empty* mbarriers per stage. Named barriers: PLANNED when the plan has been written, MERGE for the
      consumer warps in the epilogue.
    * Numerics: scores, softmax and accumulators are float32. P is rounded to 16 bits for P @ V. Partial results are float32, and
      merged in a fixed order, so results are bitwise deterministic.
    * Limits: memory-bound; in short windows, the latency of dependent loads (length, page index, keys).
    """

    def __init__(self, config: Config) -> None:
        shapes = Shapes(config)
        work, merger = Work(config, shapes), Merger(shapes)
        self.config = config
        self.shapes = shapes
        self.producer = Gatherer(shapes, work) if config.gathered else Loader(shapes, work)
        self.consumers = Consumers(shapes, merger, SwapAb(shapes, merger))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        partial: Int64,
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        q_len: Int32,
        max_seqlen_k: Int32,
        window_left: Int32,
        groups: Int32,
        scale: Float32,
        k_scales: Int64,
        k_apart: Int32,
        v_scales: Int64,
        v_apart: Int32,
        cap_scale: Optional[Float32],
        stream: cuda.CUstream,
    ):
        c = self.config
        if const_expr(c.gathered):
            k, v = (CacheRows(x.iterator.toint(), x.stride[0], x.stride[2]) for x in (k_cache, v_cache))
        else:
            load = cpasync.CopyBulkTensorTileG2SOp()
            k = make_tma(load, self.abreast_heads(k_cache), (self.shapes.box, self.shapes.keys.columns, c.heads))
            v = make_tma(load, self.abreast_heads(v_cache), (self.shapes.box, self.shapes.values.columns, c.heads))
        kv_heads = k_cache.shape[2]
        gqa_ratio = q.shape[1] // kv_heads
        kv_heads //= c.abreast
        self.kernel(
            k, v, Rows(q.iterator.toint(), q.stride[0], q.stride[1]), Rows(out.iterator.toint(), out.stride[0], out.stride[1]),
            PageTable(page_table.iterator.toint(), page_table.stride[0], page_table.stride[1]), cache_seqlens.iterator.toint(),
            cache_seqlens.shape[0], partial, counters, lse, Sinks(sinks, sinks_kind), q_len, gqa_ratio, kv_heads,
            max_seqlen_k, window_left, groups, cute.arch.popc(k_cache.shape[1] - 1), scale,
            Scales(k_scales, k_apart), Scales(v_scales, v_apart), cap_scale,
        ).launch(
            grid=(kv_heads // c.heads, groups, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=c.resident,
            preferred_smem_carveout=100,
        )  # fmt: skip

    def abreast_heads(self, cache: cute.Tensor) -> cute.Tensor:
        """Returns a view of a K or V cache in which `Config.abreast` KV heads are merged into one: ``(page_size, abreast *
        head_dim, kv_heads / abreast, pages)``."""
        c = self.config
        rows = tokens_first(cache, True)
        if c.abreast == 1:
            return rows
        (page_size, width, heads, pages), (token, one, head, page) = rows.shape, rows.stride
        shape = page_size, c.abreast * width, heads // c.abreast, pages
        return cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=(token, one, c.abreast * head, page)))

    @cute.kernel
    def kernel(
        self,
        k: Tma | CacheRows,
        v: Tma | CacheRows,
        q: Rows,
        out: Rows,
        page_table: PageTable,
        cache_seqlens: Int64,
        batch: Int32,
        partial: Int64,
        counters: Int64,
        lse: Int64,
        sinks: Sinks,
        q_len: Int32,
        gqa_ratio: Int32,
        kv_heads: Int32,
        max_seqlen_k: Int32,
        window_left: Int32,
        groups: Int32,
        page_shift: Int32,
        scale: Float32,
        k_scales: Scales,
        v_scales: Scales,
        cap_scale: Optional[Float32],
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kv_head, group, _ = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.shapes.storage())
        call = Call(
            q, out, page_table, cache_seqlens, batch, partial, counters, lse, sinks, q_len, gqa_ratio, kv_heads, max_seqlen_k,
            window_left, groups, page_shift, scale, k_scales, v_scales, cap_scale, group,
            kv_head * c.heads, pipeline(storage.full, storage.empty),
            storage.plan.data_ptr(), storage.sums.data_ptr(), storage.results.data_ptr(), storage.sinks.data_ptr(),
            storage.tiles.data_ptr(),
        )  # fmt: skip
        begun = Barriers(storage.begun.data_ptr())  # completes when the preceding kernel has ended; stops the L2 prefetch
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                for stage in cutlass.range_constexpr(c.stages):
                    call.pipe.full.init(stage, LANES if c.gathered else 1)
                    call.pipe.empty.init(stage, c.readers)
                begun.init(0, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            if const_expr(not c.gathered):
                cpasync.prefetch_descriptor(k.atom)
                cpasync.prefetch_descriptor(v.atom)
        else:
            self.prefetch_lines(call)
        if const_expr(not c.split):
            # The prefetch below polls `begun`, so its initialisation must be visible. With split-KV there is no early prefetch, and
            # PLANNED orders the initialisation of all barriers before their use by consumers.
            cute.arch.sync_threads()
            if const_expr(not c.gathered):
                if warp == PREFETCH_WARP:
                    self.producer.prefetch_l2(call, begun, k, v)
        # PDL: wait for the preceding kernel, which may have written this kernel's inputs. Then let the next kernel launch as soon
        # as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                begun.arrive(first_to_read())
            self.producer.load(call, k, v)
        else:
            self.consumers.consume(call)

    @cute.jit
    def prefetch_lines(self, call: Call):
        """Prefetches one cache line of each small tensor. The prefetch also caches the tensor's address translation. Otherwise, K/V
        traffic would evict the translation.
        """
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            prefetch_line(call.q.address)
            prefetch_line(call.out.address)
            if call.sinks.kind != 0:
                prefetch_line(call.sinks.address)
            if const_expr(self.config.split):
                prefetch_line(call.counters)
                sums_at, results_at = self.shapes.partial_at(call, call.group, call.group < 0, Int32(0))
                prefetch_line(sums_at)
                prefetch_line(results_at)
