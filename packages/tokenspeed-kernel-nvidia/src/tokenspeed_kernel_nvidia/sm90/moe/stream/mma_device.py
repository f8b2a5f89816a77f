"""The MMA and epilogue warps of `kernel_device`: MMAs of panels, activation or weighting, and the sums over slots.

A panel of weights has four strips of 16 rows, one for each warp of a warpgroup. A slab is some k blocks (64 elements each) of a
panel, which fill a stage. The panel's slabs alternate between the warpgroups, which thus split k. Weights are the A operand,
converted to float8_e5m2 in registers. The B operand, the rows of an entry, stays in shared memory for all of the entry's panels.

A wgmma m64nNk32 multiplies a half block: the 32 elements of k that share a scale in each row of weights. The MMAs of different half
blocks have separate accumulators, because the lanes scale these partial sums before they add them, in float32 registers. To hide
the latency of wgmma, the MMAs of several blocks are issued together, before one wait. The accumulator registers limit how many. The
accumulators are half as large if n is half as large. So an entry of few pairs uses narrow MMAs, see `Config.narrow`.

The warpgroups store their partial sums of a panel in shared memory, where the epilogue warps add them in a fixed order.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, release_add, store_half, wait_for
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import decode_e5m2
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import (
    BLOCK_BYTES,
    CODE_BYTES,
    HEAD_BYTES,
    PANEL_BLOCK_BYTES,
    PANEL_HEAD_BYTES,
    PANEL_STRIPS,
)
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import advance, skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, pack, store_floats, store_words
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import exp2
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import (
    BUFFERS,
    FINISH_WARP,
    FINISHERS,
    GROUPS,
    MAX_TOP_K,
    MMA_WARPS,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.exact_device import ExactDotProducts
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import CORE_BYTES, PREPARING_THREADS, REST, as_float, shared_int
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import (
    COMBINE,
    DONE,
    END,
    ENTRIES,
    READY,
    W2,
    W13,
    Call,
    beyond_bit,
    entry_of,
    index_of,
    is_ahead,
    is_head,
    is_last,
    is_tail,
    kind_of,
    pair_of,
    panel_of,
    rows_of,
    split_of,
)

CONSUMING = 1  # a named barrier of the MMA warps, for `meet`
# The fp8 weights are 2^-14 times the e2m1 values, and a row's largest scale is 2^62. This factor undoes both scalings.
SUM_FACTOR = 2.0 ** (14 - 62)
# Converts four scales to float32: of rows g and g + 8 in the first half of a block, then in the second. The constant subtracts 64
# from the exponent field, because an exponent field of 253 would make sums overflow.
_SCALES = (
    "{ .reg .b32 a;"
    + "".join(
        f"bfe.u32 a, {{$r0}}, {8 * byte}, 8; mad.lo.u32 a, a, 0x00800000, 0xE0000000; mov.b32 {{$w{byte}}}, a;" for byte in range(4)
    )
    + "}"
)


def scales_of(scales: Uint32) -> Any:
    """Converts a lane's four scale bytes to float32."""
    return cute.arch.inline_ptx(_SCALES, write_only_types=[Float32] * 4, read_only_args=[scales])


class Consumers(ExactDotProducts):
    """The MMA and epilogue warps of the kernel."""

    # -- MMAs --------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, call: Call, warp: Int32, at: Any, to: Any):
        """Runs an MMA warp, which loops over the stages that the producer fills. A warpgroup processes every third stage.

        Args:
            at: the warpgroup's next position in the ring buffer.
            to: the next position in the buffers of partial sums.

        Returns:
            Both positions after the last stage.
        """
        factors = cute.make_rmem_tensor((self.tiles,), Float32)
        factors.fill(0.0)
        group = warp // PANEL_STRIPS
        kind = Int32(COMBINE)
        while kind != END:
            call.pipe.wait(at)
            item = call.items[at.stage]
            kind = kind_of(item)
            if kind == COMBINE or is_ahead(item):  # a message, whose stage has no data
                self.release(call, at)
                at = skip(at, GROUPS, self.stages)
                if kind == COMBINE:
                    self.combine(call, warp)
                else:
                    if kind == W2:
                        self.await_activations(call, warp, item)
                    self.prepare_rows(call, item, factors)
            else:
                at = self.multiply(call, warp, group, at, to, item, factors)
                to = advance(to, BUFFERS)
        return at, to

    @cute.jit
    def release(self, call: Call, at: Any):
        """Releases a stage of the ring buffer that this warp has read."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            call.pipe.empty.arrive(at)

    @cute.jit
    def meet(self, call: Call, warp: Int32, flag: Int64, value: Int32):
        """Makes all MMA warps wait until a flag in global memory has a value. Only one warp polls, because polling by many warps
        slows down the CTAs that increase the flag.

        Args:
            flag: the global address of the flag.
            value: the value to wait for.
        """
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                wait_for(flag, value)
            cute.arch.sync_warp()
        cute.arch.barrier(barrier_id=CONSUMING, number_of_threads=PREPARING_THREADS)

    @cute.jit
    def await_activations(self, call: Call, warp: Int32, item: Int32):
        """Waits until all results of the first GEMM for an item's entry are stored. All MMA warps call this method."""
        self.meet(call, warp, call.counter(READY + index_of(item)), call.layer.w13_items * FINISHERS)

    @cute.jit
    def multiply(self, call: Call, warp: Int32, group: Int32, at: Any, to: Any, item: Int32, factors: cute.Tensor):
        """Computes this warpgroup's partial sums of an item, and stores them in a buffer. Returns the next position in the ring
        buffer. END takes this path too, as an item without blocks: so the epilogue warps receive it.

        Args:
            group: the index of the warpgroup.
            at: the position of the item's first stage of this warpgroup, for which `consume` has waited.
            to: the position in the buffers of partial sums.
            factors: the factors of the sums of this lane's columns, from `prepare_rows`.
        """
        lane = cute.arch.lane_idx()
        strip = warp % PANEL_STRIPS
        kind = kind_of(item)
        blocks = cutlass.select_(kind == W13, call.layer.w13_blocks, call.layer.w2_blocks)
        blocks = cutlass.select_(kind == END, Int32(0), blocks)
        # A lane has rows lane / 4 and lane / 4 + 8 of its strip, and pair lane % 4 of each tile of 4 pairs.
        sums = cute.make_rmem_tensor((self.tiles, 2), Float32)
        sums.fill(0.0)
        start = Int32(0)  # the item's first slab
        if const_expr(self.splits):
            if is_head(item):
                blocks = split_of(item) * self.slab
            else:
                start = split_of(item)
        # Whether the entry's pairs all are in the first half of the tiles. The sums of the other tiles then remain 0, and the
        # epilogue ignores them, as it does for all columns without a pair.
        narrow = Boolean(False)
        if const_expr(self.config.narrow):
            narrow = entry_of(call.entries[index_of(item)]).count <= self.config.pairs // 2
        # This warpgroup has slabs start + group, start + group + GROUPS, and so on. Its last stage may be empty, because the
        # producer pads an item to the same number of stages for each warpgroup.
        step = Int32(0)
        head = Uint32(0)
        while (start + step) * self.slab < cutlass.max(blocks, 1):
            if step > 0:
                call.pipe.wait(at)
            stage_at = call.ring + at.stage * self.config.stage_bytes
            if start + step + group == 0:
                head = load_words("shared", stage_at + strip * HEAD_BYTES + lane * 4, 1)
                # No instruction of the mainloop uses the loaded factors and biases, so none waits for this load. The fence makes
                # the load complete before the stage is released, because then a bulk copy may overwrite it.
                cute.arch.fence_view_async_shared()
            first = (start + step + group) * self.slab
            count = cutlass.min(blocks - first, self.slab)
            block_at = stage_at + PANEL_HEAD_BYTES + strip * BLOCK_BYTES
            if const_expr(self.config.narrow):
                if narrow:
                    self.multiply_slab(call, block_at, first, count, True, lane, sums)
                else:
                    self.multiply_slab(call, block_at, first, count, False, lane, sums)
            else:
                self.multiply_slab(call, block_at, first, count, False, lane, sums)
            self.release(call, at)
            at = skip(at, GROUPS, self.stages)
            step += GROUPS
        call.partial.acquire(to)
        for tile in cutlass.range_constexpr(self.tiles):
            # Multiply in this order. Sums are about 2^60, so a row factor above 2^67, applied first, would make them infinite.
            results = [sums[tile, row] * SUM_FACTOR * factors[tile] for row in range(2)]
            store_floats("shared", self.sums_at(call, to, group, strip, lane, tile), results)
        if group == 0:
            shared_int(call.heads + (to.stage * PANEL_STRIPS + strip) * HEAD_BYTES)[lane] = Int32(head)
            if warp == 0 and lane == 0:
                call.partial_items[to.stage] = item
        cute.arch.sync_warp()
        if lane == 0:
            call.partial.full.arrive(to)
        return at

    @cute.jit
    def multiply_slab(
        self,
        call: Call,
        block_at: Int32,
        first: Int32,
        count: Int32,
        narrow: cutlass.Constexpr[bool],
        lane: Int32,
        sums: cute.Tensor,
    ):
        """Accumulates a slab in this lane's sums. The MMAs of a slab with fewer blocks, the last of a panel, are issued block by
        block.

        Args:
            block_at: the shared-memory address of this strip's rows of the slab's first block.
            first: the first block, counted over all of k.
            count: the number of blocks; negative if the panel ends before this slab.
            narrow: whether the MMAs have only the first half of the columns.
        """
        group = self.config.narrow_group if narrow else self.group  # blocks of a full slab whose MMAs are issued together
        if count == self.slab:
            for begin in cutlass.range_constexpr(0, self.slab, group):
                some = min(group, self.slab - begin)
                self.multiply_blocks(call, block_at + begin * PANEL_BLOCK_BYTES, first + begin, some, narrow, lane, sums)
        else:
            for each in cutlass.range(count, unroll=1):
                self.multiply_blocks(call, block_at + each * PANEL_BLOCK_BYTES, first + each, 1, narrow, lane, sums)

    @cute.jit
    def multiply_blocks(
        self,
        call: Call,
        block_at: Int32,
        block: Int32,
        count: cutlass.Constexpr[int],
        narrow: cutlass.Constexpr[bool],
        lane: Int32,
        sums: cute.Tensor,
    ):
        """Accumulates ``count`` consecutive blocks in this lane's sums. Their MMAs are issued together, with a single wait.
        ``block``: the first block, counted over all of k. For the other arguments see `multiply_slab`.
        """
        scales, operands = [], []
        for each in cutlass.range_constexpr(count):
            words = load_words("shared", block_at + (each * PANEL_BLOCK_BYTES + lane * 16), 4)
            scales.append(scales_of(load_words("shared", block_at + (each * PANEL_BLOCK_BYTES + CODE_BYTES + lane // 4 * 4), 1)))
            # For each 16 elements of k: the values of the lane's two rows.
            rows = [decode_e5m2(word) for word in words]
            operands += [(*rows[0], *rows[1]), (*rows[2], *rows[3])]
        rows_at = call.rows + block * (4 * self.mma_tiles * CORE_BYTES)
        share = 2 if narrow else 1  # narrow MMAs have one of two halves of the columns
        partials = self.multiply_halves(rows_at, operands, self.mma_tiles // share)
        for half in cutlass.range_constexpr(2 * count):
            for tile in cutlass.range_constexpr(self.tiles // share):
                for row in cutlass.range_constexpr(2):
                    number = self.joined(partials[half], tile, row)
                    sums[tile, row] += number * scales[half // 2][2 * (half % 2) + row]

    def joined(self, partials: list, tile: int, row: int) -> Float32:
        """Returns a pair's partial sum for one of the lane's two rows: adds its columns, one for each fp8 part, with the parts'
        factors. ``tile``: the tile of 4 pairs; ``partials``: the accumulators of a half block."""
        if self.config.parts == 1:
            return partials[4 * (tile // 2) + 2 * row + tile % 2]
        at = 4 * self.layers * tile + 2 * row
        number, rest = partials[at], partials[at + 1]
        if self.layers == 2:
            rest += partials[at + 4] * (1.0 / REST)
        return number + rest * (1.0 / REST)

    def multiply_halves(self, rows_at: Int32, operands: Any, tiles: int) -> Any:
        """Issues the wgmmas of consecutive half blocks as one group, waits for them, and returns the accumulators of each half
        block: 64 rows of a warpgroup by ``tiles`` times eight columns. Each lane has four values for every 8 columns.

        Args:
            rows_at: the shared-memory address of the first half block of the B operand.
            operands: the A fragment of each half block, four registers.
            tiles: the number of 8-column tiles to multiply. Narrow MMAs take the first half of the B operand's tiles.
        """
        each = 4 * tiles
        pitch = self.mma_tiles * CORE_BYTES  # bytes to the next 16 elements of k, also for narrow MMAs
        # Matrix descriptor: the address, and the strides in bytes to the next 16 elements of k and to the next eight columns, all
        # divided by 16.
        low = (pitch // 16) << 16
        # The predicate `none` is false, so each wgmma overwrites its accumulators.
        lines = [
            "{ .reg .pred none; .reg .b64 rows; .reg .b32 at;",
            "setp.ne.b32 none, 0, 0;",
            f"shr.u32 at, {{$r0}}, 4; or.b32 at, at, {low};",
            "wgmma.fence.sync.aligned;",
        ]
        for half in range(len(operands)):
            to = ", ".join(f"{{$w{half * each + number}}}" for number in range(each))
            left = ", ".join(f"{{$r{1 + half * 4 + number}}}" for number in range(4))
            lines.append(f"mov.b64 rows, {{at, {CORE_BYTES // 16}}}; add.u32 at, at, {2 * pitch // 16};")
            shape = f"m64n{8 * tiles}k32"
            lines.append(f"wgmma.mma_async.sync.aligned.{shape}.f32.e5m2.e4m3 {{{to}}}, {{{left}}}, rows, none, 1, 1;")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        results = cute.arch.inline_ptx(
            "\n".join(lines),
            write_only_types=[Float32] * (each * len(operands)),
            read_only_args=[rows_at, *(register for operand in operands for register in operand)],
        )
        return [results[half * each : (half + 1) * each] for half in range(len(operands))]

    # -- epilogue: activation and weighting --------------------------------------------------------------------------------------

    @cute.jit
    def finish(self, call: Call, warp: Int32, at: Any):
        """Runs an epilogue warp: adds the warpgroups' partial sums of each panel, applies the activation (first GEMM) or the
        routing weights (second GEMM), and stores the results in global memory. A warp processes every other strip of a panel. After
        the last item of an entry in a range, it adds the number of finished items to the entry's global counter.

        Args:
            at: the next position in the buffers of partial sums.

        Returns:
            The position after the last panel.
        """
        lane = cute.arch.lane_idx()
        pairs = cute.make_rmem_tensor((self.tiles,), Int32)
        beyond = cute.make_rmem_tensor((self.tiles,), Int32)
        weights = cute.make_rmem_tensor((self.tiles,), Float32)
        pairs.fill(-1)
        beyond.fill(0)
        weights.fill(0.0)
        received = cute.make_rmem_tensor((PANEL_STRIPS // FINISHERS * self.tiles * 4,), Uint32)
        received.fill(0)
        known, done = Int32(-1), Int32(0)
        item = Int32(0)
        kind = Int32(COMBINE)
        while kind != END:
            call.partial.wait(at)
            item = call.partial_items[at.stage]
            kind = kind_of(item)
            if kind != END:
                if rows_of(item) != known:
                    known = rows_of(item)
                    self.load_pairs(call, item, pairs, beyond, weights)
                if const_expr(self.splits):
                    if is_head(item):
                        self.join_sums(call, at, warp, item, received)
                for strip in cutlass.range(warp - FINISH_WARP, PANEL_STRIPS, FINISHERS, unroll=1):
                    self.finish_strip(call, at, item, strip, lane, pairs, beyond, weights)
                cute.arch.sync_warp()
                if lane == 0:
                    call.partial.empty.arrive(at)
                if const_expr(self.splits):
                    # The CTA that has the first part of a panel finishes it. So the second part does not count.
                    done += cutlass.select_(is_tail(item), Int32(0), Int32(1))
                    # Load another CTA's partial sums early, for the first part of a panel, the last item of its GEMM in this CTA.
                    self.load_sums(call, warp, kind, received)
                else:
                    done += 1
                if is_last(item):
                    if lane == 0:
                        self.count(call, item, done)
                    done = Int32(0)
            at = advance(at, BUFFERS)
        return at

    @cute.jit
    def load_pairs(self, call: Call, item: Int32, pairs: cute.Tensor, beyond: cute.Tensor, weights: cute.Tensor):
        """Loads what the epilogue needs of an entry, for this lane's pair of each tile: to ``pairs`` the pair, or -1 if there is
        none; to ``beyond`` a nonzero value if the fp8 parts do not represent the pair's row; and for the second GEMM, to
        ``weights`` the routing weight.
        """
        entry = entry_of(call.entries[index_of(item)])
        for tile in cutlass.range_constexpr(self.tiles):
            column = tile * 4 + cute.arch.lane_idx() % 4
            pairs[tile], beyond[tile] = Int32(-1), Int32(0)
            if column < entry.count:
                place = call.order[entry.first + column]
                pair = pair_of(place)
                pairs[tile], beyond[tile] = pair, place & beyond_bit(item)
                if kind_of(item) == W2:
                    weights[tile] = self.routing_weight(call, pair)

    def routing_weight(self, call: Call, pair: Int32) -> Float32:
        """Loads a pair's routing weight."""
        return cute.make_ptr(Float32, call.weights, cute.AddressSpace.gmem)[pair]

    @cute.jit
    def finish_strip(
        self,
        call: Call,
        at: Any,
        item: Int32,
        strip: Int32,
        lane: Int32,
        pairs: cute.Tensor,
        beyond: cute.Tensor,
        weights: cute.Tensor,
    ):
        """Runs the epilogue of a strip, unless the strip is padding of the expert's last panel. Each lane has two rows of the
        strip. For the other arguments see `load_pairs`.

        Args:
            at: the position of the panel in the buffers of partial sums.
            strip: the index of the strip in its panel.
        """
        layer = call.layer
        whole = panel_of(item) * PANEL_STRIPS + strip  # the index of the strip in the expert's weights
        first = kind_of(item) == W13
        finishes = whole < cutlass.select_(first, layer.w13_strips, layer.w2_strips)
        if const_expr(self.splits):
            if is_tail(item):
                finishes = Boolean(False)
                self.send_sums(call, at, item, strip)
        if finishes:
            head_at = call.heads + (at.stage * PANEL_STRIPS + strip) * HEAD_BYTES + lane // 4 * 4
            heads = [as_float(load_words("shared", head_at + each * 32, 1)) for each in range(4)]
            for tile in cutlass.range_constexpr(self.tiles):
                # Only the first tile is sure to have a pair, and most entries leave the other tiles empty. Skip empty tiles,
                # because the time of the epilogue delays the second GEMM.
                present = Boolean(True)
                if const_expr(tile > 0):
                    present = cute.arch.vote_any_sync(pairs[tile] >= 0)
                if present:
                    self.finish_tile(call, at, item, strip, lane, tile, pairs, beyond, weights, heads)

    @cute.jit
    def finish_tile(
        self,
        call: Call,
        at: Any,
        item: Int32,
        strip: Int32,
        lane: Int32,
        tile: cutlass.Constexpr[int],
        pairs: cute.Tensor,
        beyond: cute.Tensor,
        weights: cute.Tensor,
        heads: Any,
    ):
        """Runs the epilogue of a strip for a tile of four pairs. ``heads``: the factors of the lane's two rows, then their biases.
        In w13, the two rows are gate and up of a feature."""
        layer = call.layer
        whole = panel_of(item) * PANEL_STRIPS + strip
        first = kind_of(item) == W13
        upper, lower = self.sum_of_groups(call, at, strip, lane, tile)
        if const_expr(not self.config.rounded):  # quantised rows are fp8 already, so they have no inexact elements
            if cute.arch.vote_any_sync(beyond[tile] != 0):
                for column in cutlass.range(4, unroll=1):
                    if cute.arch.shuffle_sync(beyond[tile], column) != 0:
                        exact = self.exact_dot_products(call, item, strip, cute.arch.shuffle_sync(pairs[tile], column))
                        if lane % 4 == column:
                            upper, lower = exact
        factor, factor8, bias, bias8 = heads
        upper = upper * factor + bias
        lower = lower * factor8 + bias8
        pair = pairs[tile]
        if pair >= 0:
            if first:
                feature = whole * 8 + lane // 4
                place = Int64(pair) * layer.intermediate + feature
                self.store_activated(call, place, self.activate(call, upper, lower))
            else:
                place = Int64(pair) * layer.hidden + whole * 16 + lane // 4
                self.store_slot(call, place, upper * weights[tile])
                self.store_slot(call, place + 8, lower * weights[tile])

    @cute.jit
    def count(self, call: Call, item: Int32, items: Int32):
        """Adds the number of items of an entry whose results this warp has stored to the global counter for which other CTAs wait:
        the entry's counter after the first GEMM, DONE after the second. ``item``: the last of these items."""
        flag = cutlass.select_(kind_of(item) == W13, READY + index_of(item), Int32(DONE))
        release_add(call.counter(flag), items)

    def store_activated(self, call: Call, place: Int64, value: Float32) -> None:
        """Stores a result of the first GEMM. ``place``: the index of the element."""
        if self.wide:
            store_floats("global", call.activated + place * 4, [value])
        else:
            store_half(call.activated + place * 2, pack(self.dtype, value, value))

    def store_slot(self, call: Call, place: Int64, value: Float32) -> None:
        """Stores a weighted result of the second GEMM. ``place``: the index of the element."""
        store_floats("global", call.slots + place * 4, [value])

    def sum_of_groups(self, call: Call, at: Any, strip: Int32, lane: Int32, tile: int) -> list:
        """Returns the sums over the warpgroups, in a fixed order, for a lane's two rows of a strip and its pair of a tile."""
        total = [Float32(0.0), Float32(0.0)]
        for group in range(GROUPS):
            part = load_floats("shared", self.sums_at(call, at, group, strip, lane, tile), 2)
            total = [total[row] + part[row] for row in range(2)]
        return total

    def sums_at(self, call: Call, at: Any, group: Any, strip: Int32, lane: Int32, tile: int) -> Int32:
        """Returns the shared-memory address of a warpgroup's partial sums for a lane's two rows of a strip and its pair of a tile.
        ``at``: the position among the buffers."""
        return call.sums + ((at.stage * GROUPS + group) * PANEL_STRIPS + strip) * (self.tiles * 256) + tile * 256 + lane * 8

    @cute.jit
    def activate(self, call: Call, gate: Float32, up: Float32) -> Float32:
        """Returns ``(up + beta) * gate * sigmoid(alpha * gate)``, with both clamped to the limit."""
        layer = call.layer
        # Comparisons, unlike minima, keep NaN as NaN.
        gate = cutlass.select_(gate > layer.limit, layer.limit, gate)
        up = cutlass.select_(up > layer.limit, layer.limit, up)
        up = cutlass.select_(up < -layer.limit, -layer.limit, up)
        return (up + layer.beta) * gate / (1.0 + exp2(gate * (layer.alpha * -LOG2_E)))

    # -- the output --------------------------------------------------------------------------------------------------------------

    @cute.jit
    def combine(self, call: Call, warp: Int32):
        """Waits until the second GEMM is done, and writes this CTA's part of the output: sums over slots, in slot order.

        The elements of the output are divided evenly among the CTAs. All MMA warps call this method.
        """
        layer = call.layer
        self.meet(call, warp, call.counter(DONE), call.sizes[ENTRIES] * layer.w2_items * FINISHERS)
        if warp == MMA_WARPS - 1:
            self.leave(call)
        ctas, _, _ = cute.arch.grid_dim()
        part, _, _ = cute.arch.block_idx()
        width = layer.hidden // 4
        quads = call.tokens * width
        share = (quads + ctas - 1) // ctas
        quad = part * share + warp * 32 + cute.arch.lane_idx()
        end = cutlass.min((part + 1) * share, quads)
        while quad < end:
            token = quad // width
            column = (quad - token * width) * 4
            total = self.sum_of_slots(call, token, column)
            to = call.out + (Int64(token) * call.out_stride + column) * 2
            store_words(to, [pack(self.dtype, total[0], total[1]), pack(self.dtype, total[2], total[3])])
            quad += PREPARING_THREADS

    @cute.jit
    def sum_of_slots(self, call: Call, token: Int32, column: Int32):
        """Returns four consecutive elements of a token's sum over slots, in slot order."""
        layer = call.layer
        parts_of = cute.make_rmem_tensor((MAX_TOP_K, 4), Float32)
        parts_of.fill(0.0)
        for slot in cutlass.range_constexpr(MAX_TOP_K):
            if slot < layer.top_k:
                pair = token * layer.top_k + slot
                if call.experts_of_pairs[pair] >= 0:
                    found = load_floats("global.cg", call.slots + (Int64(pair) * layer.hidden + column) * 4, 4)
                    for each in cutlass.range_constexpr(4):
                        parts_of[slot, each] = found[each]
        total = [Float32(0.0)] * 4
        for slot in cutlass.range_constexpr(MAX_TOP_K):
            total = [total[each] + parts_of[slot, each] for each in range(4)]
        return total
