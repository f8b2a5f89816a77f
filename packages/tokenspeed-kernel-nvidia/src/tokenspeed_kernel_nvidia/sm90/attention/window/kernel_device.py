"""The device code of `window`: the launch, and the roles of the warps.

The kernel is persistent and warp-specialised, with a static round-robin schedule of work items (`scheduler_device`).

* CTAs: one per SM, with a producer warpgroup and three consumer warpgroups.
* Warp 0 (`load_device`) loads K and V of a work item by TMA, and writes the item's record. Warp 1 (`load_device`) loads Q tiles.
  Warp 2 (`clear_device`) zeroes rows of V before and after the sequence. Warp 3 idles.
* Warpgroups 1 to 3 (`mma_device`) take the CTA's tiles round-robin. Each warpgroup computes a tile from q @ k through the softmax
  (`softmax_device`) to the store of O (`store_device`). The warpgroups never wait for each other.
* Shared memory: a ring of K and V with a work item per stage, a ring of Q tiles, and an output tile per warpgroup. All tiles of a
  work item use the item's one copy of K and V.
* Synchronisation: a K/V stage has ``k_full``, ``v_full`` (loaded), ``v_ready`` (cleared) and ``kv_empty`` (read by all consumers).
  A Q stage has *full* and *empty*, and belongs to one warpgroup.
* Numerics: float32 scores, softmax and accumulators; P is rounded to 16 bits. The row max of all visible keys and the sink is known
  before the first exponential.
* In flight: K and V of two work items (of one with head_dim 128, of three in the variant for short sequences), and one or three Q
  tiles per warpgroup. q @ k of a tile overlaps the previous tile's epilogue if registers suffice (`Config.ahead`).
* Limits: for long sequences, the memory traffic of q and the output (3.4 TB/s for 16 sequences of 8192, see `config`); for few new
  tokens, the latency of dependent loads.

Slower alternatives were measured with 64 sequences of 8192 tokens, 16 of them new, in graphs of 7 calls with another kernel after
each. This kernel takes 15.8 us:
* separate load warps for K and V: 16.4 us;
* separate load warps, and an L2 prefetch of the first keys before the PDL wait: 16.7 us. In back-to-back calls, this alternative
  takes 14.3 us, and this kernel 14.5 us;
* a scheduler warp that prefetches page indices ahead of the other warps: 16.4 us;
* the KV heads of a sequence one after another in one CTA instead of in several CTAs: 17.9 us.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any, Optional

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.window.clear_device import ValueClearer
from tokenspeed_kernel_nvidia.sm90.attention.window.config import WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.load_device import KvLoader, QLoader
from tokenspeed_kernel_nvidia.sm90.attention.window.mma_device import Consumers
from tokenspeed_kernel_nvidia.sm90.attention.window.scheduler_device import Sequences, Work
from tokenspeed_kernel_nvidia.sm90.attention.window.softmax_device import TileSoftmax
from tokenspeed_kernel_nvidia.sm90.attention.window.store_device import Epilogue, Output
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Shared, rings_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, gqa_packed, make_tma, tokens_first
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma, make_qk_mma

PRODUCERS = 128  # threads of the producer warpgroup


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Window(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows, ints = arguments.size, arguments.rows, arguments.ints
    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    keys = (size(), size()) if config.paged else (tokens,)
    k, v = (rows(config.dtype, *keys, kv_heads, config.head_dim) for _ in range(2))
    q, out = (rows(config.dtype, tokens, heads, config.head_dim) for _ in range(2))
    paging = (ints(batch, size()), ints(batch)) if config.paged else (None, None)
    scalars = Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), Float32(0), Float32(0) if config.capped else None, Int32(0)
    return q, k, v, out, ints(size()), *paging, *scalars, arguments.stream()


class Window:
    """The sliding-window kernel of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rings = rings_of(config)
        work = Work(config)
        self.kv_loader = KvLoader(config, self.rings, work)
        self.q_loader = QLoader(config, self.rings, work)
        self.clearer = ValueClearer(config, self.rings)
        tile_softmax = TileSoftmax(config, self.rings.dtype, work)
        self.consumers = Consumers(config, self.rings, work, tile_softmax, Epilogue(config, self.rings))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        cu_seqlens: cute.Tensor,
        page_table: Optional[cute.Tensor],
        cache_seqlens: Optional[cute.Tensor],
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        window_left: Int32,
        block: Int32,
        scale: Float32,
        cap_scale: Optional[Float32],
        grid: Int32,
        stream,
    ):
        c = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_tma = make_tma(load, gqa_packed(q), ((c.heads, c.positions), PANEL))
        out_tma = make_tma(store, gqa_packed(out), ((c.heads, c.positions), PANEL))
        k_tma = make_tma(load, tokens_first(k, c.paged), (c.box, PANEL))
        v_tma = make_tma(load, tokens_first(v, c.paged), (c.box, PANEL))
        page_size = k.shape[1] if const_expr(c.paged) else Int32(1)
        kv_heads = k.shape[2] if const_expr(c.paged) else k.shape[1]
        self.kernel(
            q_tma, k_tma, v_tma, out_tma, out, Sequences(cu_seqlens, page_table, cache_seqlens), lse, Sinks(sinks, sinks_kind),
            window_left, block, scale, cap_scale, page_size, kv_heads, q.shape[1], make_qk_mma(self.rings.dtype, c.keys),
            make_pv_mma(self.rings.dtype, c.head_dim),
        ).launch(
            grid=[grid, 1, 1], block=[PRODUCERS + WARPGROUPS * 128, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Tma,
        k: Tma,
        v: Tma,
        out_tma: Tma,
        out: cute.Tensor,
        sequences: Sequences,
        lse: Int64,
        sinks: Sinks,
        window_left: Int32,
        block: Int32,
        scale: Float32,
        cap_scale: Optional[Float32],
        page_size: Int32,
        kv_heads: Int32,
        heads: Int32,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % LANES
        shared = Shared(SmemAllocator().allocate(self.rings.storage()))
        if warp_index == 0:
            for tma in (q, k, v, out_tma):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.config.q_stages):
                    shared.q_pipe.init(stage, 4)
                for stage in cutlass.range_constexpr(self.config.kv_stages):
                    shared.k_full.init(stage, 1)
                    shared.v_full.init(stage, 1)
                    shared.v_ready.init(stage, 1)
                    shared.kv_empty.init(stage, WARPGROUPS * 4)
            cute.arch.mbarrier_init_fence()

        value_words = self.rings.value_words(shared)
        self.clearer.clear_after_stages(value_words, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        # PDL: wait for the preceding kernel, which may still write this kernel's inputs or read its outputs. Then let the next
        # kernel launch as soon as SMs have room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.kv_loader.load(shared, k, v, sequences, block, page_size, kv_heads, lane)
            elif warp_index == 1:
                self.q_loader.load(shared, q, sequences, block, kv_heads, lane)
            elif warp_index == 2:
                self.clearer.clear(shared, value_words, lane)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consumers.consume(shared, Output(out_tma, out, lse, heads, sinks), window_left, scale, cap_scale, qk, pv, thread)
