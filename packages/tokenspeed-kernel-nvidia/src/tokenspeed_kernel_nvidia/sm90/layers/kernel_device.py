"""Device code of the persistent kernel: the launch, the warp roles over layers, the producer warp, and the output.

The kernel is a chain of classes, one for each step, each in a file of its own. Each class derives from the preceding one:
`Stream` (the kernel of the experts, `sm90.moe.stream`), `exchange_device`, `split_device`, `gemm_device`, `qkv_device`,
`attend_device`, `project_device`, `route_device`, and `Persistent` in this file. There is no grid-wide barrier between steps. CTAs
exchange activations through global memory, and a reader waits for the data itself, see `exchange_device`.

Forward progress. All CTAs of a launch must run at once. There is one CTA per SM, no more CTAs than SMs, and each fits on an empty
SM. CTAs of a preceding kernel do not wait for this launch, so they exit, and all CTAs get an SM. Another launch that also needs all
SMs at once must not run beside this one, unless both are cooperative. Under these conditions, no wait is circular:

* a CTA's producer warp waits for its own CTA only: for empty stages, and for the lists of pairs;
* a CTA's MMA warps process stages in the order in which the producer fills them: qkv, projection, w13, w2, and the output. They
  wait for other CTAs' words or counters of an earlier step in this order, never for a later step;
* the epilogue warps wait for another CTA only at the last panel of w13 or of w2, if it is split. They wait for the partial sums of
  the next CTA's first panel of the same GEMM. To compute these, the next CTA needs only earlier steps;
* the producer fills the stages of an earlier step before those of a later step. So a later step never holds the stages that an
  earlier step needs.

So the earliest unfinished step of all CTAs always proceeds. This also holds for the CTAs of several GPUs that share the layers,
once each GPU has begun the launch: a CTA waits for another GPU's words of the same step or of an earlier step, and at the end of
the launch for the words of the last step. Waits for other CTAs also end after a number of polls, see `exchange_device`.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import exchange_add
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import (
    Cursor,
    advance,
    first_to_fill,
    first_to_read,
    issued_before,
    pipeline,
)
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_int, opt_barrier, pack, store_words, widened
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    CHUNK_BYTES,
    HEAD_WORDS,
    LAYER_COUNTERS,
    LEFT,
    OUT,
    PART_BYTES,
    TAG,
    TILE,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, load_tagged, store_tagged, value_of
from tokenspeed_kernel_nvidia.sm90.layers.route_device import Route
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import (
    COLUMNS,
    END_QUAD,
    EXPERT_COUNT,
    FIRST_QUAD,
    FIRST_ROW,
    GIVEN_UP,
    LAST_TAG,
    PART,
    PROJECTION,
    QKV_FIRST_ROW,
    QKV_PART,
    QKV_ROW_COUNT,
    QKV_WEIGHT,
    ROUTER,
    ROW_COUNT,
    Attention,
    Given,
    LayerCall,
    call_of_layer,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, FINISHERS, GROUPS, LOAD_WARP, MMA_WARPS, THREADS
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import PREPARING_THREADS
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import COMBINE, END, ENTRIES, W2, W13, Layer, item_code

_NANS = 0x7FFF7FFF  # two bfloat16 NaNs


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Persistent(config)


def part_bytes_of(row_bytes: Int32) -> Int32:
    """Returns `config.part_bytes` of a row."""
    parts = (row_bytes + PART_BYTES - 1) // PART_BYTES
    return (row_bytes + parts * CHUNK_BYTES - 1) // (parts * CHUNK_BYTES) * CHUNK_BYTES


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    rows, size = arguments.rows, arguments.size
    tokens, hidden = size(), size(divisibility=32)
    residual, out = rows(config.dtype, tokens, hidden), rows(config.dtype, size(), tokens, hidden)
    numbers = [*(Int64(0) for _ in range(8)), *(Int32(0) for _ in range(6)), *(Float32(0) for _ in range(4))]
    numbers += [*(Int64(0) for _ in range(10)), *(Int32(0) for _ in range(7)), Float32(0), Int32(0), Int64(0)]
    return residual, out, *numbers, arguments.stream()


class Persistent(Route):
    """The kernel of one configuration. Each CTA has the 15 warps of the kernel of `stream`. For each layer:

    * warps 0-11, the MMA warps, compute queries, keys and values, attention, the projection and the router, and then run `stream`'s
      MMAs. They write the layer's output;
    * warp 12, the producer, streams this CTA's rows of the weights of qkv and of the projection into the ring buffer. It loads this
      CTA's rows of the router into a separate buffer. Once the experts are known, it streams panels of w13 and w2 through the same
      ring buffer. Then it continues with the next layer's weights of qkv, while the MMA warps still compute this layer;
    * warps 13-14, the epilogue warps, run `stream`'s epilogue.

    Shared memory holds the ring buffer (18 stages for one token), the rows of the router, and the tokens. The experts' weights
    cannot be loaded before the experts are known. The number of copies in flight is limited, because the MMA warps' loads of
    activations queue behind these copies, and the MMA warps wait for those loads.
    """

    @cute.jit
    def __call__(
        self,
        residual: cute.Tensor,
        out: cute.Tensor,
        table: Int64,
        head: Int64,
        outputs: Int64,
        totals: Int64,
        logits: Int64,
        activated: Int64,
        slots: Int64,
        sent: Int64,
        width: Int32,
        experts: Int32,
        intermediate: Int32,
        top_k: Int32,
        ctas: Int32,
        polls: Int32,
        eps: Float32,
        alpha: Float32,
        limit: Float32,
        beta: Float32,
        qkv: Int64,
        partials: Int64,
        attended: Int64,
        lengths: Int64,
        pages: Int64,
        slots_at: Int64,
        rope_table: Int64,
        page_pitch: Int64,
        token_pitch: Int64,
        head_pitch: Int64,
        pages_pitch: Int32,
        slot_words: Int32,
        table_pitch: Int32,
        page_size: Int32,
        kv_heads: Int32,
        group: Int32,
        split_bits: Int32,
        scale: Float32,
        rank: Int32,
        others: Int64,
        stream: cuda.CUstream,
    ):
        layers, tokens, hidden = out.shape
        w13_blocks, w2_blocks = (hidden + BLOCK - 1) // BLOCK, (intermediate + BLOCK - 1) // BLOCK
        w13_strips, w2_strips = intermediate * 2 // STRIP, hidden // STRIP
        w13_bytes, w2_bytes = (PANEL_HEAD_BYTES + blocks * PANEL_BLOCK_BYTES for blocks in (w13_blocks, w2_blocks))
        w13_panels, w2_panels = ((strips + PANEL_STRIPS - 1) // PANEL_STRIPS for strips in (w13_strips, w2_strips))
        layer = Layer(
            Int64(0), Int64(0), w13_strips, w2_strips, w13_bytes, w2_bytes, w13_blocks, w2_blocks, w13_panels, w2_panels, Int32(1),
            experts, hidden, intermediate, top_k, alpha, limit, beta,
        )  # fmt: skip
        attention = Attention(
            qkv, partials, attended, lengths, pages, slots_at, rope_table, page_pitch, token_pitch, head_pitch, pages_pitch,
            slot_words, table_pitch, page_size, kv_heads, group, split_bits, scale,
        )  # fmt: skip
        given = Given(
            table, residual.iterator.toint(), out.iterator.toint(), head, outputs, totals, logits, activated, slots, sent, tokens,
            width, layers, polls, eps, layer, attention, rank, others,
        )  # fmt: skip
        self.run(given).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=not self.config.cooperative,
            cooperative=self.config.cooperative, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def run(self, given: Given):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        storage = SmemAllocator().allocate(self.storage())
        rows_at, hidden = storage.rows.data_ptr().toint(), given.layer.hidden
        call = LayerCall(
            given.layer, Int64(rows_at + self.config.rows_bytes), Int64(self.config.normed_pitch // 2), Int64(0),
            Int64(storage.weights.data_ptr().toint()), given.out, Int64(hidden), given.tokens, given.activated, given.slots,
            given.head + 4 * HEAD_WORDS, pipeline(storage.full, storage.empty),
            pipeline(storage.partial_full, storage.partial_empty), storage.ring.data_ptr().toint(), rows_at,
            storage.maxima.data_ptr().toint(), storage.small.data_ptr().toint(), storage.factors.data_ptr().toint(),
            storage.items.data_ptr(), storage.partial_items.data_ptr(), storage.sums.data_ptr().toint(),
            storage.heads.data_ptr().toint(), storage.sizes.data_ptr(), storage.entries.data_ptr(), storage.entries.data_ptr(),
            storage.order.data_ptr(), storage.experts_of_pairs.data_ptr(), given, Int32(0), Int32(0), rows_at,
            storage.partials.data_ptr().toint(), storage.router.data_ptr().toint(), storage.squares.data_ptr().toint(),
            storage.chosen.data_ptr(), storage.kept.data_ptr(), storage.table.data_ptr(), storage.angles.data_ptr().toint(),
            storage.known_tiles.data_ptr(), storage.known_offsets.data_ptr(), storage.others.data_ptr(),
            storage.router_full.data_ptr(), storage.routed.data_ptr(),
        )  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range(thread, given.layers * COLUMNS, THREADS, unroll=1):
            call.table[place] = cute.make_ptr(Int64, given.table, cute.AddressSpace.gmem)[place]
        if const_expr(self.config.ranks > 1):
            if thread < self.config.ranks - 1:
                call.others[thread] = cute.make_ptr(Int64, given.others, cute.AddressSpace.gmem)[thread]
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    call.pipe.init(stage, PANEL_STRIPS)
                for buffer in cutlass.range_constexpr(BUFFERS):
                    call.partial.full.init(buffer, MMA_WARPS)
                    call.partial.empty.init(buffer, FINISHERS)
                for barrier in (call.router_full, call.routed):
                    cute.arch.mbarrier_init(barrier, 1)
                call.kept[FIRST_ROW] = cta * hidden // ctas
                call.kept[ROW_COUNT] = (cta + 1) * hidden // ctas - cta * hidden // ctas
                call.kept[EXPERT_COUNT] = cutlass.max(given.layer.experts - cta + ctas - 1, 0) // ctas
                call.kept[GIVEN_UP] = Int32(0)
                quads = given.tokens * (hidden // 4)
                call.kept[FIRST_QUAD], call.kept[END_QUAD] = cta * quads // ctas, (cta + 1) * quads // ctas
                qkv_rows = given.attention.qkv_rows
                call.kept[QKV_FIRST_ROW] = cta * qkv_rows // ctas
                call.kept[QKV_ROW_COUNT] = (cta + 1) * qkv_rows // ctas - cta * qkv_rows // ctas
                each = self.config.dense_bytes
                call.kept[QKV_PART], call.kept[PART] = part_bytes_of(hidden * each), part_bytes_of(given.width * each)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == LOAD_WARP:
            # Weights are constants, so the producer does not wait for the preceding kernel (PDL).
            self.produce(call)
        else:
            if const_expr(not self.config.cooperative):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            tag = load_int(given.head + 4 * TAG, False)
            if warp > LOAD_WARP:
                self.finish_layers(call, warp, tag)
            else:
                self.consume_layers(call, warp, tag)

    @cute.jit
    def consume_layers(self, call: LayerCall, warp: Int32, tag: Int32):
        """Runs the MMA warps' steps of all layers."""
        at, to = Cursor(warp // PANEL_STRIPS, Int32(0)), first_to_fill()
        self.store_input(call_of_layer(call, Int32(0), tag))
        if self.thread() == 0:
            call.kept[LAST_TAG] = tag
        self.prepare_attention(call)
        for index in cutlass.range(call.given.layers, unroll=1):
            of_layer = call_of_layer(call, index, call.kept[LAST_TAG])
            at = self.project_qkv(of_layer, warp, at)
            self.attend(of_layer, warp)
            ahead = self.load_route_operands(of_layer)
            at = self.project(of_layer, warp, at)
            self.route(of_layer, warp, *ahead)
            at, to = self.consume(of_layer, warp, at, to)
        if const_expr(self.config.ranks > 1):
            self.store_output(call_of_layer(call, call.given.layers - 1, call.kept[LAST_TAG]))
        if warp == 0:
            self.leave_layers(call, call.kept[LAST_TAG])

    @cute.jit
    def finish_layers(self, call: LayerCall, warp: Int32, tag: Int32):
        """Runs the epilogue warps' steps of all layers."""
        at = first_to_read()
        for index in cutlass.range(call.given.layers, unroll=1):
            of_layer = call_of_layer(call, index, tag)
            # `prefetch_cache` reads what `prepare_attention` has stored. The wait for the first layer's `routed` orders the two. So
            # the first layer has no prefetch.
            if index > 0:
                self.prefetch_cache(of_layer, warp)
            cute.arch.mbarrier_wait(call.routed, index & 1)
            at = self.finish(of_layer, warp, at)
            # `finish` does not release the buffer that held the END message, because the kernel of `stream` ends with this message.
            # Here another layer follows, so release the buffer.
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                call.partial.empty.arrive(Cursor((at.stage + BUFFERS - 1) % BUFFERS, Int32(0)))

    # -- weights -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, call: LayerCall):
        """Streams the weights of all layers."""
        given = call.given
        at = first_to_fill()
        for index in cutlass.range(given.layers, unroll=1):
            of_layer = call_of_layer(call, index, Int32(0))
            self.load_router(of_layer)
            qkv_rows, hidden = of_layer.qkv_row_count, of_layer.layer.hidden
            each = self.config.dense_bytes
            at = self.load_tiles(of_layer, at, QKV_WEIGHT, of_layer.qkv_first_row, qkv_rows, hidden * each)
            at = self.load_tiles(of_layer, at, PROJECTION, of_layer.first_row, of_layer.row_count, given.width * each)
            at = self.load_experts(of_layer, at)
            # Messages in the order of the stages: write the output, then end this layer.
            at = self.tell(of_layer, at, item_code(COMBINE))
            at = self.tell(of_layer, at, item_code(END))

    @cute.jit
    def load_router(self, call: LayerCall):
        """Loads this CTA's rows of the router. The buffer is free: this warp has waited until the preceding layer was routed, and
        by then all warps had read that layer's rows."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        size = call.layer.hidden * 2
        count = call.expert_count
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(call.router_full, count * size)
            source = call.address(ROUTER)
            for index in cutlass.range(count, unroll=1):
                from_ = source + Int64(cta + index * ctas) * size
                bulk_load(call.router_at + index * size, from_, size, call.router_full.toint(), once=False)

    @cute.jit
    def load_tiles(
        self, call: LayerCall, at: Any, column: cutlass.Constexpr[int], first_row: Int32, row_count: Int32, row_bytes: Int32
    ):
        """Streams this CTA's rows of dense weights, which have the layout of `layout`. Returns the next position in the ring
        buffer.

        Args:
            column: the weights' column of the table of layers.
            first_row, row_count: this CTA's rows.
            row_bytes: bytes of a row.
        """
        first = call.address(column) + Int64(first_row) * row_bytes
        part_bytes = call.kept[QKV_PART if column == QKV_WEIGHT else PART]
        stages = Int32(0)
        for tile in cutlass.range(0, row_count, TILE, unroll=1):
            count = cutlass.min(row_count - tile, TILE)
            for part in cutlass.range(0, row_bytes, part_bytes, unroll=1):
                size = cutlass.min(row_bytes - part, part_bytes)
                # While the ring buffer is filled for the first time, the MMA warps may still load activations. So few copies may
                # be in flight. Later, a stage becomes empty only if the MMA warps have used it. By then all activations are in
                # shared memory, no warp waits for other loads, and more copies may be in flight.
                most = self.config.in_flight[0 if column == QKV_WEIGHT else 1]
                if stages < self.stages:
                    self.acquire_below(call, at, most)
                else:
                    self.acquire_below(call, at, self.config.begun_in_flight)
                if cute.arch.lane_idx() == 0:
                    call.pipe.commit(at, count * size)
                    to, source = call.ring + at.stage * self.config.stage_bytes, first + (tile * row_bytes + part * count)
                    bulk_load(to, source, count * size, call.pipe.full.of(at).toint())
                at = advance(at, self.stages)
                stages += 1
        # Pad with empty stages, so that each warpgroup gets the same number of stages, and the next GEMM begins with warpgroup 0.
        for _ in cutlass.range((GROUPS - stages % GROUPS) % GROUPS, unroll=1):
            at = self.tell_one(call, at, item_code(COMBINE))
        return at

    def acquire(self, call: LayerCall, at: Any, kind: int) -> None:
        """Waits until the next stage may be filled with a slab of w13 or w2. `Stream.load_range` calls this method."""
        self.acquire_below(call, at, self.config.in_flight[2 + kind])

    def acquire_below(self, call: LayerCall, at: Any, most: int) -> None:
        """Waits until the next stage may be filled, and fewer than ``most`` stages have copies in flight."""
        call.pipe.acquire(at)
        if most < self.stages:
            call.pipe.full.wait(issued_before(at, most, self.stages))

    @cute.jit
    def load_experts(self, call: LayerCall, at: Any):
        """Streams this CTA's slabs of w13, then of w2. Returns the next position in the ring buffer."""
        layer = call.layer
        # Integer divisions take long. So compute the range before the experts are known, with the guess that all pairs have
        # different experts. For one token, this guess is always right.
        guess = call.tokens * layer.top_k
        first, end = self.range_of(call, guess * layer.w13_items, layer.w13_blocks)
        place = self.place_of(first, layer.w13_items, layer.w13_blocks)
        cute.arch.mbarrier_wait(call.routed, call.index & 1)
        entries = call.sizes[ENTRIES]
        if entries != guess:
            first, end = self.range_of(call, entries * layer.w13_items, layer.w13_blocks)
            place = self.place_of(first, layer.w13_items, layer.w13_blocks)
        if end > first:
            at = self.load_range(call, at, W13, place, end - first)
        first, end = self.range_of(call, entries * layer.w2_items, layer.w2_blocks)
        if end > first:
            place = self.place_of(first, layer.w2_items, layer.w2_blocks)
            at = self.load_range(call, at, W2, place, end - first)
        return at

    # -- the output --------------------------------------------------------------------------------------------------------------

    @cute.jit
    def combine(self, call: LayerCall, warp: Int32):
        """Stores this CTA's range of the layer's output: the sum over a token's slots, plus ``totals``, the residual stream before
        the experts. The output is stored twice: as bfloat16 for the caller, and as tagged words for the next layer.

        If ranks share the layer, stores this rank's addends as words instead; only the first rank adds ``totals``. If a wait of
        this CTA has given up, the output is NaN. All MMA warps call this method."""
        layer = call.layer
        thread = self.thread()
        width = layer.hidden // 4
        quad, end = call.kept[FIRST_QUAD] + thread, call.kept[END_QUAD]
        to = call.output_of(opt_barrier(call.index))
        while quad < end:
            token = quad // width
            column = (quad - token * width) * 4
            before = self.quad_of_totals(call, quad)
            expert = self.sum_of_slots(call, token, column)
            gave_up = call.kept[GIVEN_UP] != 0
            if const_expr(self.config.ranks == 1):
                words = []
                for half in cutlass.range_constexpr(2):
                    # Round like the operator's result, then add the residual stream.
                    low, high = widened(self.dtype, pack(self.dtype, expert[2 * half], expert[2 * half + 1]))
                    both = pack(self.dtype, low + value_of(before[2 * half]), high + value_of(before[2 * half + 1]))
                    words.append(cutlass.select_(gave_up, Uint32(_NANS), both))
                store_words(to + Int64(quad) * 8, words)
                words_at = call.given.outputs + Int64(quad) * 16
                for half in cutlass.range_constexpr(2):
                    # A tagged word has its value in the upper half.
                    store_tagged(words_at + 8 * half, words[half] << 16, call.tag)
                    store_tagged(words_at + 8 * half + 4, words[half], call.tag)
            else:
                first = call.given.rank == 0
                addends = []
                for number in cutlass.range_constexpr(4):
                    addend = expert[number] + cutlass.select_(first, value_of(before[number]), Float32(0.0))
                    addends.append(cutlass.select_(gave_up, Float32(math.nan), addend))
                self.send(call, call.given.outputs, quad * 4, addends, call.tag)
            quad += PREPARING_THREADS
        self.publish(call, OUT)

    @cute.jit
    def store_output(self, call: LayerCall):
        """Waits for all ranks' addends of this CTA's range of the last layer's output, and stores the sums. So when the launch
        ends, no rank's stores to this GPU are in flight. ``call``: the call of the last layer."""
        ranks = range(self.config.ranks)
        words = cute.make_rmem_tensor((4 * self.config.ranks,), Uint32)
        words.fill(0)
        quad, end = call.kept[FIRST_QUAD] + self.thread(), call.kept[END_QUAD]
        to = call.output_of(call.given.layers - 1)
        while quad < end:
            addresses = [[self.addends_at(call, call.given.outputs, quad * 4, rank)] for rank in ranks]
            self.load_addends(call, addresses, words, call.tag)
            sums = [self.sum_of([words[4 * rank + each] for rank in ranks]) for each in range(4)]
            gave_up = call.kept[GIVEN_UP] != 0
            both = [both_values(sums[2 * half], sums[2 * half + 1]) for half in range(2)]
            store_words(to + Int64(quad) * 8, [cutlass.select_(gave_up, Uint32(_NANS), each) for each in both])
            quad += PREPARING_THREADS

    def quad_of_totals(self, call: LayerCall, quad: Int32) -> list:
        """Returns four consecutive elements of ``totals``, as words. This method does not wait: `route` has waited until all words
        of ``totals`` had arrived."""
        found = [load_tagged(self.addends_at(call, call.given.totals, quad * 4, rank)) for rank in range(self.config.ranks)]
        return [self.sum_of([each[number] for each in found]) for number in range(4)]

    @cute.jit
    def leave_layers(self, call: LayerCall, tag: Int32):
        """If this CTA is the last one to leave, resets all counters for the next launch, and stores the last tag, from which the
        next launch continues. Warp 0 calls this method."""
        lane = cute.arch.lane_idx()
        ctas, _, _ = cute.arch.grid_dim()
        head = call.given.head
        before = Int32(0)
        if lane == 0:
            before = exchange_add(head + 4 * LEFT, Int32(1))
        before = cute.arch.shuffle_sync(before, 0)
        if before == ctas - 1:
            words = cute.make_ptr(Int32, head, cute.AddressSpace.gmem)
            if lane == 0:
                words[LEFT] = Int32(0)
                words[TAG] = tag + 1 + call.given.layers
            each = HEAD_WORDS + lane
            while each < HEAD_WORDS + (call.given.layers + 1) * LAYER_COUNTERS:
                words[each] = Int32(0)
                each += 32
