"""The device code of `prefill`: the launch, and the roles of the warps.

The kernel is persistent and warp-specialised, with a dynamic tile scheduler (`scheduler_device`).

* CTAs: one per SM, with a producer warpgroup and two or three consumer warpgroups.
* Warp 0 (`load_device`) schedules tiles, and loads Q, K and V by TMA. `q_load_device` has the loads of Q.
* Warps 1 to 3 (`convert_device`) convert fp8 blocks: they transpose V, or convert an fp8 cache's K and V to float16. Without fp8
  K/V, these warps idle.
* Consumer warpgroups (`mma_device`) compute 64 query rows each: wgmma, masks (`mask_device`), online softmax (`softmax_device`, or
  `fp8_softmax_device` with e4m3 probabilities), epilogue (`store_device`). With an fp8 cache, they first convert bfloat16
  queries to float16 (`queries_device`).
* Shared memory: rings of Q tiles, of K blocks and of V blocks; a ring of raw fp8 blocks before conversion; and an output tile
  unless outputs are stored from registers. Each Q stage has a `Record` of its tile's parameters.
* Synchronisation: *full* and *empty* mbarriers per ring stage. TMA completes *full*, or the converter warps do. Each consumer warp
  arrives on *empty*. Named barriers: of ping-pong scheduling, of the warps of a warpgroup, and of the converter warps.
* Numerics: scores, softmax and accumulators are float32. P is rounded to 16 bits, or to e4m3 with fp8 operands. The row max is
  raised lazily (`Config.lazy`), so accumulators are seldom rescaled. The sink joins the row sum in the epilogue. A row without
  visible keys and without a sink gets the output 0 and the LSE -inf.
* In flight: one or two Q tiles, and two to four blocks each of K and V. P @ V of a block overlaps the softmax of the next block.
  With ping-pong scheduling, the softmax of a warpgroup overlaps the MMAs of another warpgroup.
* Limits: compute-bound, at the clock rate that the power limit allows; see `Config`.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.convert_device import CONVERTERS, Converters
from tokenspeed_kernel_nvidia.sm90.attention.prefill.fp8_softmax_device import Fp8Softmax
from tokenspeed_kernel_nvidia.sm90.attention.prefill.load_device import Loader
from tokenspeed_kernel_nvidia.sm90.attention.prefill.mask_device import Masks
from tokenspeed_kernel_nvidia.sm90.attention.prefill.mma_device import Consumers, Mmas, PingPong
from tokenspeed_kernel_nvidia.sm90.attention.prefill.q_load_device import QLoader, SplitQLoader
from tokenspeed_kernel_nvidia.sm90.attention.prefill.queries_device import QueryConverter
from tokenspeed_kernel_nvidia.sm90.attention.prefill.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.prefill.softmax_device import Softmax
from tokenspeed_kernel_nvidia.sm90.attention.prefill.store_device import Epilogue, Output, RowStore, TileStore
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Cursors, Sequences, Shared, rings_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, gqa_packed, make_tma, tokens_first
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma, make_qk_mma


def host(config: Config):
    """Returns the host function that launches the kernel of a configuration."""
    return Prefill(config)


def fake_arguments(config: Config):
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, ints = arguments.size, arguments.ints
    of_q, of_kv = (
        arguments.byte_rows if fp8 else functools.partial(arguments.rows, config.dtype) for fp8 in (config.fp8, config.converts)
    )
    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    q, out = of_q(tokens, heads, config.head_dim), arguments.rows(config.dtype, tokens, heads, config.widths[1])
    if config.paged:
        pages, page_size = size(), size() if config.holds_blocks else config.page_size
        k, v = (of_kv(pages, page_size, kv_heads, width) for width in config.widths)
        paging = ints(batch), ints(batch, size())
    else:
        kv_tokens = size()
        k, v = (of_kv(kv_tokens, kv_heads, width) for width in config.widths)
        paging = ints(size()) if config.own_kv else None, None
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Float32(0), Int32(0), Int32(0), *([Int64(0), Int32(0)] * 3), Int32(0))
    scalars = *scalars, Float32(0) if config.capped else None
    return q, k, v, out, ints(size()), *paging, *scalars, arguments.stream()


class Prefill:
    """The prefill kernel of one configuration."""

    def __init__(self, config: Config) -> None:
        rings, work, cursors = rings_of(config), Work(config), Cursors(config)
        self.config = config
        self.rings = rings
        load_q = SplitQLoader(config, rings) if config.splits_q else QLoader(config, rings)
        self.loader = Loader(config, rings, work, cursors, load_q)
        self.converters = Converters(config, rings, work, cursors)
        store = RowStore(config, rings) if config.stores_from_registers else TileStore(config, rings)
        softmax = Fp8Softmax(config) if config.fp8 else Softmax(config, rings.mma_dtype)
        self.consumers = Consumers(
            config, rings, cursors, PingPong(config), QueryConverter(config, rings), Masks(config, work), softmax,
            Epilogue(config, store),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        cu_seqlens: cute.Tensor,
        cache_seqlens: Optional[cute.Tensor],
        page_table: Optional[cute.Tensor],
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        causal: Int32,
        sms: Int32,
        q_scales: Int64,
        q_apart: Int32,
        k_scales: Int64,
        k_apart: Int32,
        v_scales: Int64,
        v_apart: Int32,
        window_left: Int32,
        to_cap: Optional[Float32],
        stream: cuda.CUstream,
    ):
        c = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_tma = make_tma(load, gqa_packed(q), ((c.gqa_ratio, c.q_positions), c.panel))
        k_tma = make_tma(load, tokens_first(k, c.paged), (c.box, (self.rings.raw if c.fp8_cache else self.rings.k).columns))
        v_tma = make_tma(load, tokens_first(v, c.paged), (c.box, (self.rings.raw if c.converts else self.rings.v).columns))
        out_tma = None
        if const_expr(c.store_by_tma):
            out_tma = make_tma(store, gqa_packed(out), ((c.gqa_ratio, 64 // c.gqa_ratio), PANEL))
        mmas = Mmas(
            make_qk_mma(self.rings.mma_dtype, c.block_n, c.warpgroups),
            make_qk_mma(self.rings.mma_dtype, c.block_n // 2, c.warpgroups),
            make_pv_mma(self.rings.mma_dtype, c.v_columns, c.warpgroups),
        )
        kv_heads = k.shape[2] if const_expr(c.paged) else k.shape[1]
        counter = cute.make_tensor(cute.make_ptr(Int32, counters, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(2))
        # An upper bound of the number of tiles: each sequence may end with a partial tile.
        most = (cute.ceil_div(q.shape[0], c.positions) + cu_seqlens.shape[0] - 1) * kv_heads
        self.kernel(
            q_tma, k_tma, v_tma, out_tma, out, Sequences(cu_seqlens, cache_seqlens, page_table), counter, lse,
            Sinks(sinks, sinks_kind), scale, causal, kv_heads, mmas,
            (Scales(q_scales, q_apart), Scales(k_scales, k_apart), Scales(v_scales, v_apart)), window_left, to_cap,
        ).launch(
            grid=(cutlass.min(most, sms), 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Tma,
        k: Tma,
        v: Tma,
        out_tma: Optional[Tma],
        out: cute.Tensor,
        sequences: Sequences,
        counter: cute.Tensor,
        lse: Int64,
        sinks: Sinks,
        scale: Float32,
        causal: Int32,
        kv_heads: Int32,
        mmas: Mmas,
        scales: tuple,
        window_left: Int32,
        to_cap: Optional[Float32],
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = Shared(SmemAllocator().allocate(self.rings.storage()), self.config.splits_q)
        if warp_index == 0:
            cpasync.prefetch_descriptor(q.atom)
            cpasync.prefetch_descriptor(k.atom)
            cpasync.prefetch_descriptor(v.atom)
            if const_expr(self.config.store_by_tma):
                cpasync.prefetch_descriptor(out_tma.atom)
            with cute.arch.elect_one():
                if const_expr(self.config.splits_q):
                    for wg in cutlass.range_constexpr(self.config.warpgroups):
                        shared.q_pipe.init(wg, 4)
                else:
                    for stage in cutlass.range_constexpr(self.config.q_stages):
                        shared.q_pipe.init(stage, 4 * self.config.warpgroups)
                for stage in cutlass.range_constexpr(self.config.kv_stages):
                    shared.k_pipe.init(stage, 4 * self.config.warpgroups)
                    shared.v_pipe.init(stage, 4 * self.config.warpgroups)
                    if const_expr(self.config.converts):
                        shared.v_pipe.full.init(stage, CONVERTERS)
                    if const_expr(self.config.fp8_cache):
                        shared.k_pipe.full.init(stage, CONVERTERS)
                if const_expr(self.config.converts):
                    for stage in cutlass.range_constexpr(self.config.raw_stages):
                        shared.raw_pipe.init(stage, CONVERTERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # PDL: everything above overlaps with the tail of the preceding kernel.
        cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.loader.load(shared, q, k, v, sequences, counter, causal, kv_heads, scales, window_left)
            elif const_expr(self.config.converts):
                self.converters.convert(shared, warp_index - 1, causal, window_left)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumers.consume(shared, Output(out_tma, out, lse, sinks), scale, causal, window_left, to_cap, mmas)
