"""The device code of `stream`: the launch, the warp roles, and the producer warp.

The kernel is a class in several files. `tile_device` has the arguments, the work items and the shared memory, `schedule_device` the
prologue that sorts pairs by expert, `rows_device` the preparation of B operands, and `mma_device` the MMA warps and the epilogue.
`exact_device` recomputes rows that fp8 parts cannot represent. The kernels of `sm90.layers` are subclasses of this kernel.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import take_ticket
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import (
    Cursor,
    advance,
    first_to_fill,
    first_to_read,
    last_filled,
    pipeline,
)
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import (
    BUFFERS,
    FINISH_WARP,
    FINISHERS,
    GROUPS,
    LOAD_WARP,
    MMA_WARPS,
    THREADS,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.mma_device import Consumers
from tokenspeed_kernel_nvidia.sm90.moe.stream.schedule_device import Schedule
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import (
    COMBINE,
    END,
    ENTRIES,
    TICKET,
    W2,
    W13,
    Call,
    Layer,
    Place,
    ahead_of,
    entry_of,
    item_code,
)


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Stream(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    rows, size = arguments.rows, arguments.size
    tokens, hidden = size(), size(divisibility=32)
    x, out = (rows(config.dtype, tokens, hidden) for _ in range(2))
    numbers = [*(Int64(0) for _ in range(7)), *(Int32(0) for _ in range(5)), *(Float32(0) for _ in range(3))]
    return x, out, *numbers, arguments.stream()


class Stream(Schedule, Consumers):
    """The kernel of one configuration.

    There is one persistent CTA of 15 warps per SM. Each CTA first sorts the pairs by expert, for its own use. Then:

    * warps 0-11, three warpgroups: MMA. A warpgroup computes every third slab of a panel, and each of its warps one strip of 16
      rows. Weights become float8_e5m2 A fragments in registers, without their scales. Before the first panel of an entry, the
      twelve warps together prepare the entry's rows in shared memory: they split each element into float8_e4m3 parts, or quantise
      it to float8_e4m3;
    * warp 12: the producer. It takes ranges from the global counter, and keeps the ring buffer full with slabs of panels;
    * warps 13-14: the epilogue. They add the warpgroups' partial sums. In the first GEMM they apply factors, bias and activation;
      in the second, factors, bias and routing weight. They store the results in global memory.

    Two pipelines connect the roles: the ring buffer of slabs, from the producer to the MMA warps, and two buffers of partial sums,
    from the MMA warps to the epilogue. Each stage has a work item, or a message such as COMBINE. The MMA warps pass END on to the
    epilogue.

    Shared memory also holds the lists of pairs, and the rows of one entry. The ring buffer of up to 24 slabs takes the remaining
    memory (227 KB in all). Its bytes in flight hide the latency of global memory.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        w13: Int64,
        w2: Int64,
        ids: Int64,
        weights: Int64,
        activated: Int64,
        slots: Int64,
        counters: Int64,
        experts: Int32,
        intermediate: Int32,
        top_k: Int32,
        ctas: Int32,
        turns: Int32,
        alpha: Float32,
        limit: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        hidden = x.shape[1]
        w13_blocks, w2_blocks = (hidden + BLOCK - 1) // BLOCK, (intermediate + BLOCK - 1) // BLOCK
        w13_strips, w2_strips = intermediate * 2 // STRIP, hidden // STRIP
        w13_bytes, w2_bytes = (PANEL_HEAD_BYTES + blocks * PANEL_BLOCK_BYTES for blocks in (w13_blocks, w2_blocks))
        w13_panels, w2_panels = ((strips + PANEL_STRIPS - 1) // PANEL_STRIPS for strips in (w13_strips, w2_strips))
        layer = Layer(
            w13, w2, w13_strips, w2_strips, w13_bytes, w2_bytes, w13_blocks, w2_blocks, w13_panels, w2_panels, turns, experts,
            hidden, intermediate, top_k, alpha, limit, beta,
        )  # fmt: skip
        self.kernel(
            layer, x.iterator.toint(), x.stride[0], ids, weights, out.iterator.toint(), out.stride[0], x.shape[0], activated, slots,
            counters,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        layer: Layer,
        x: Int64,
        x_stride: Int64,
        ids: Int64,
        weights: Int64,
        out: Int64,
        out_stride: Int64,
        tokens: Int32,
        activated: Int64,
        slots: Int64,
        counters: Int64,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage())
        call = Call(
            layer, x, x_stride, ids, weights, out, out_stride, tokens, activated, slots, counters,
            pipeline(storage.full, storage.empty), pipeline(storage.partial_full, storage.partial_empty),
            storage.ring.data_ptr().toint(),
            storage.rows.data_ptr().toint(), storage.maxima.data_ptr().toint(), storage.small.data_ptr().toint(),
            storage.factors.data_ptr().toint(),
            storage.items.data_ptr(), storage.partial_items.data_ptr(), storage.sums.data_ptr().toint(),
            storage.heads.data_ptr().toint(), storage.sizes.data_ptr(), storage.starts.data_ptr(), storage.entries.data_ptr(),
            storage.order.data_ptr(), storage.experts_of_pairs.data_ptr(),
        )  # fmt: skip
        counts = storage.counts.data_ptr()
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    call.pipe.init(stage, PANEL_STRIPS)
                for buffer in cutlass.range_constexpr(BUFFERS):
                    call.partial.full.init(buffer, MMA_WARPS)
                    call.partial.empty.init(buffer, FINISHERS)
            cute.arch.mbarrier_init_fence()
        self.clear(counts)
        # The experts, and so the weights to load, are known only when the preceding kernel has ended (PDL).
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        ticket = Int32(0)
        if warp == LOAD_WARP:
            ticket = self.next_ticket(call)
        if tokens * layer.top_k <= LANES:  # one pair per lane: a single warp makes the lists, without barriers
            if warp == FINISH_WARP:
                self.sort_few_pairs(call)
            cute.arch.sync_threads()
        else:
            self.sort_pairs(call, counts, storage.totals.data_ptr())
        if warp == LOAD_WARP:
            self.load(call, ticket)
        elif warp > LOAD_WARP:
            self.finish(call, warp, first_to_read())
        else:
            self.consume(call, warp, Cursor(warp // PANEL_STRIPS, Int32(0)), first_to_fill())

    @cute.jit
    def next_ticket(self, call: Call):
        """Takes the index of the next range from the global counter, and returns it in all lanes of the warp."""
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = take_ticket(call.counter(TICKET))
        return cute.arch.shuffle_sync(ticket, 0)

    @cute.jit
    def load(self, call: Call, ticket: Int32):
        """Runs the producer warp: takes ranges and streams their panels into the ring buffer until no range is left. Then sends
        COMBINE and END to the MMA warps. ``ticket``: the index of the CTA's first range."""
        layer = call.layer
        ctas, _, _ = cute.arch.grid_dim()
        entries = call.sizes[ENTRIES]
        w13_items, w2_items = entries * layer.w13_items, entries * layer.w2_items
        w13_ranges = self.ranges_of(w13_items, ctas * layer.turns, entries)
        w2_ranges = self.ranges_of(w2_items, ctas * layer.turns, entries)
        at = first_to_fill()
        while ticket < w13_ranges + w2_ranges:
            if ticket < w13_ranges:
                first, end = ticket * w13_items // w13_ranges, (ticket + 1) * w13_items // w13_ranges
                at = self.load_panels(call, at, W13, first, end, layer.w13_items, layer.w13_blocks)
            else:
                index = ticket - w13_ranges
                first, end = index * w2_items // w2_ranges, (index + 1) * w2_items // w2_ranges
                at = self.load_panels(call, at, W2, first, end, layer.w2_items, layer.w2_blocks)
                if layer.turns == 1:
                    # There is one range of w2 for each CTA. So wait until the MMA warps have released all stages. Otherwise a CTA
                    # that started early would take a second range while its MMA warps still compute the first one.
                    call.pipe.acquire(last_filled(at, self.stages))
            ticket = self.next_ticket(call)
        at = self.tell(call, at, item_code(COMBINE))
        self.tell(call, at, item_code(END))

    def ranges_of(self, items: Int32, most: Int32, entries: Int32) -> Int32:
        """Returns the number of equal ranges into which ``items`` panels are divided, about ``most``.

        With at least eight ranges per entry, the number is rounded down to a multiple of ``entries``. Then no range crosses
        entries, so no CTA prepares the rows of two entries for one range. At most one range in eight is lost.
        """
        ranges = cutlass.min(items, most)
        aligned = ranges - ranges % cutlass.max(entries, 1)
        return cutlass.select_(ranges >= 8 * entries, aligned, ranges)

    def acquire(self, call: Call, at: Any, kind: int) -> None:
        """Waits until the next stage may be filled with a slab of a GEMM."""
        call.pipe.acquire(at)

    def slabs_of(self, blocks: Int32) -> Int32:
        """Returns the number of slabs of a panel."""
        return (blocks + self.slab - 1) // self.slab

    def load_panels(self, call: Call, at: Any, kind: int, first: Int32, end: Int32, items: Int32, blocks: Int32) -> Any:
        """Streams whole panels. ``first``, ``end``: indices among the panels of all entries."""
        index = first // items
        place = Place(index, first - index * items, Int32(0))
        return self.load_range(call, at, kind, place, (end - first) * self.slabs_of(blocks))

    def place_of(self, first: Int32, items: Int32, blocks: Int32) -> Place:
        """Returns the place of a slab, for kernels that split panels. ``first``: the index among the slabs of all entries."""
        slabs = self.slabs_of(blocks)
        panel = first // slabs
        index = panel // items
        return Place(index, panel - index * items, first - panel * slabs)

    @cute.jit
    def load_range(self, call: Call, at: Any, kind: cutlass.Constexpr[int], place: Place, left: Int32):
        """Streams consecutive slabs into the ring buffer. Returns the next position in the ring buffer. The slabs may belong to
        several panels and entries. Before each entry's slabs, a message announces the entry, see `ahead_of`.

        Args:
            kind: the GEMM, W13 or W2.
            place: the first slab.
            left: the number of slabs.
        """
        layer = call.layer
        items, size, blocks, weights = layer.w13_items, layer.w13_bytes, layer.w13_blocks, layer.w13
        if const_expr(kind == W2):
            items, size, blocks, weights = layer.w2_items, layer.w2_bytes, layer.w2_blocks, layer.w2
        slabs = self.slabs_of(blocks)
        index, panel, begin = place.index, place.panel, place.slab
        expert = entry_of(call.entries[index]).expert
        at = self.tell(call, at, ahead_of(item_code(kind, index)))
        while left > 0:
            source = weights + (Int64(expert) * items + panel) * size
            head = Int32(PANEL_HEAD_BYTES)  # the head is copied with the first slab
            last = cutlass.select_(left <= slabs - begin or panel == items - 1, Int32(1), Int32(0))
            item, stop = item_code(kind, index, panel, last), slabs
            first_block, end_block = Int32(0), blocks
            if const_expr(self.splits):
                stop = cutlass.min(begin + left, slabs)
                is_head = cutlass.select_(stop < slabs, Int32(1), Int32(0))
                item = item_code(kind, index, panel, last, cutlass.select_(stop < slabs, stop, begin), is_head)
                first_block, end_block = begin * self.slab, cutlass.min(stop * self.slab, blocks)
                if begin > 0:
                    source += PANEL_HEAD_BYTES + begin * (self.slab * PANEL_BLOCK_BYTES)
                    head = Int32(0)
            for block in cutlass.range(first_block, end_block, self.slab, unroll=1):
                count = cutlass.min(blocks - block, self.slab) * PANEL_BLOCK_BYTES + head
                self.acquire(call, at, kind)
                if cute.arch.lane_idx() == 0:
                    call.items[at.stage] = item
                    call.pipe.commit(at, count)
                    to = call.ring + at.stage * self.config.stage_bytes + PANEL_HEAD_BYTES - head
                    bulk_load(to, source, count, call.pipe.full.of(at).toint())
                source += count
                head = Int32(0)
                at = advance(at, self.stages)
            # Pad with empty stages, so that each warpgroup gets the same number of stages of an item.
            for _ in cutlass.range((GROUPS - (stop - begin) % GROUPS) % GROUPS, unroll=1):
                at = self.tell_one(call, at, item)
            left -= stop - begin
            begin = Int32(0)
            panel += 1
            if panel == items and left > 0:
                panel = Int32(0)
                index += 1
                expert = entry_of(call.entries[index]).expert
                at = self.tell(call, at, ahead_of(item_code(kind, index)))
        return at

    @cute.jit
    def tell(self, call: Call, at: Any, item: Int32):
        """Sends a message to all warpgroups: fills one stage for each warpgroup, with an item code but without data. Returns the
        next position in the ring buffer."""
        for _ in cutlass.range_constexpr(GROUPS):
            at = self.tell_one(call, at, item)
        return at

    @cute.jit
    def tell_one(self, call: Call, at: Any, item: Int32):
        """Fills a stage with an item code, but without data. Returns the next position in the ring buffer."""
        call.pipe.acquire(at)
        if cute.arch.lane_idx() == 0:
            call.items[at.stage] = item
            call.pipe.full.arrive(at)
        return advance(at, self.stages)
