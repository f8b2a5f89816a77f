"""Device code of decode: what warps compute of the tiles that they are given, and what becomes of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute

from tokenspeed_kernel_nvidia.sm90.attention.decode import CONSUMERS, PIECES, Config
from tokenspeed_kernel_nvidia.sm90.attention.decode_instructions import (
    here,
    larger,
    ldmatrix,
    load_floats,
    load_int,
    mma,
    pack,
    store_floats,
    touch_line,
)
from tokenspeed_kernel_nvidia.sm90.attention.registers import LN2, LOWEST, exp2, sink_of

THREADS = 32 * (CONSUMERS + 1)
MERGERS = 32 * CONSUMERS
LAZY = 8.0  # a row's maximum may grow by so many powers of 2 before its sums are scaled anew
PLANNED = 1  # named barriers
MERGE = 2
# Where a CTA is, in shared memory: its sequence, the tile there, tiles (or sequences, undivided) that are left, tiles that are
# done. And the tiles of a group, and what a counter was.
SEQUENCE, OFFSET, LEFT, DONE, SHARE, BEFORE = range(6)


@dataclass(frozen=True)
class Rows:
    """Where rows of q or out are: the address of the first, and how many elements further those of tokens and heads are."""

    address: Int64
    token: Int64
    head: Int64


@dataclass(frozen=True)
class Call:
    """What a CTA is asked for, and its shared memory. What is far away is given by its address."""

    q: Rows
    out: Rows
    page_table: Int64
    table_row: Int64
    table_page: Int64
    cache_seqlens: Int64
    batch: Int32
    partial: Int64
    counters: Int64
    lse: Int64
    sinks: Int64
    sinks_kind: Int32
    q_len: Int32
    ratio: Int32
    kv_heads: Int32
    capacity: Int32
    window_left: Int32
    groups: Int32
    page_shift: Int32
    scale: Float32
    group: Int32
    head: Int32
    full: cute.Pointer
    empty: cute.Pointer
    plan: cute.Pointer
    sums: cute.Pointer
    results: cute.Pointer
    sink_values: cute.Pointer
    tiles: cute.Pointer


class Warps:
    """The part of a kernel that computes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
        self.kind = {"bfloat16": "bf16", "float16": "f16"}[config.dtype]
        self.head_dim = config.head_dim
        self.block = config.block
        self.box = config.box
        self.boxes = config.block // config.box
        self.halves = config.head_dim // 64
        self.stages = config.stages
        self.rows = config.rows
        self.row_warps = config.row_warps
        self.parts = config.parts
        self.heads = config.heads
        self.tiles = max(1, config.rows // config.row_warps // 16)  # of 16 rows, of a warp
        self.used = 1 if config.rows == 8 else 2  # rows of a tile that a lane has
        self.fours = config.head_dim // 4  # lanes of a row, where each has 4 numbers
        self.width = config.head_dim + 8  # of a row of results: a lane's stores go to other banks than its neighbours'

    # -- what there is to do -----------------------------------------------------------------------------------------------------

    @cute.jit
    def length_of(self, call: Call, sequence: Int32, early: cutlass.Constexpr[bool] = False):
        """Of a sequence, or of the last one where there is none."""
        length = load_int(call.cache_seqlens + Int64(cutlass.min(sequence, call.batch - 1)) * 4, early)
        return cutlass.min(cutlass.max(length, 0), call.capacity)

    @cute.jit
    def shown(self, call: Call, length: Int32):
        """The first position that a query sees, the first tile, and how many tiles; one where there is nothing to see."""
        low = cutlass.select_(call.window_left >= 0, cutlass.max(length - call.q_len - call.window_left, 0), Int32(0))
        first = low // self.block
        return low, first, cutlass.max((length + self.block - 1) // self.block - first, 1)

    @cute.jit
    def row_address(self, rows: Rows, token: Int32, head: Int32):
        return rows.address + 2 * (Int64(token) * rows.token + Int64(head) * rows.head)

    @cute.jit
    def touch(self, call: Call):
        """Has addresses translated before they are needed: by then, keys have driven them from the multiprocessor's buffers."""
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            touch_line(call.q.address)
            touch_line(call.out.address)
            if call.sinks_kind != 0:
                touch_line(call.sinks)
            if cutlass.const_expr(self.config.split):
                touch_line(call.counters)
                sums_at, results_at = self.piece(call, call.group, call.group < 0, Int32(0))
                touch_line(sums_at)
                touch_line(results_at)

    @cute.jit
    def consume(self, call: Call):
        """Computes the tiles that the loader brings."""
        thread, _, _ = cute.arch.thread_idx()
        queries = cute.make_rmem_tensor((self.tiles, self.head_dim // 16, 4), Uint32)
        acc = cute.make_rmem_tensor((self.tiles, self.head_dim // 8, 2 * self.used), Float32)
        top = cute.make_rmem_tensor((self.tiles, self.used), Float32)
        total = cute.make_rmem_tensor((self.tiles, self.used), Float32)
        if cutlass.const_expr(self.heads > 1):
            self.consume_heads(call, thread // 32, queries, acc, top, total)
        else:
            self.consume_tiles(call, thread, queries, acc, top, total)

    @cute.jit
    def consume_tiles(
        self, call: Call, thread: Int32, queries: cute.Tensor, acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor
    ):
        """All warps for one key head: a warp has every so manieth tile, and results meet at the end of a sequence."""
        first_row = thread // 32 // self.parts * (16 * self.tiles)
        sink = -Float32.inf
        if thread < self.rows:
            sink = sink_of(call.sinks, call.sinks_kind, call.head * call.ratio + thread % call.ratio)
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=THREADS)
        if thread < self.rows:
            call.sink_values[thread] = sink
        while call.plan[LEFT] > 0:
            sequence, offset, at = call.plan[SEQUENCE], call.plan[OFFSET], call.plan[DONE]
            length = self.length_of(call, sequence)
            low, first, count = self.shown(call, length)
            count -= offset
            if cutlass.const_expr(self.config.split):
                count = cutlass.min(count, call.plan[LEFT])
            self.begin(call, sequence, call.head, first_row, queries, acc, top, total)
            # The next of this warp's tiles. Remainders have the sign of what was divided.
            place = at + cute.arch.make_warp_uniform((here(thread) // 32 % self.parts - at % self.parts + self.parts) % self.parts)
            self.walk(call, Int32(0), place, at + count, first + offset - at, length, low, first_row, queries, acc, top, total)
            self.leave(call, acc, top, total)
            self.finish(call)

    @cute.jit
    def consume_heads(self, call: Call, warp: Int32, queries: cute.Tensor, acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor):
        """A key head for each warp, which has all tiles: no result of another warp is waited for."""
        head = call.head + warp
        sinks = cute.make_rmem_tensor((self.tiles, self.used), Float32)
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(self.used):
                row = cute.arch.lane_idx() // 4 + tile * 16 + other * 8
                sinks[tile, other] = sink_of(call.sinks, call.sinks_kind, head * call.ratio + row % call.ratio)
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=THREADS)
        sequence, at = call.group, Int32(0)
        while sequence < call.batch:
            length = self.length_of(call, sequence)
            low, first, count = self.shown(call, length)
            self.begin(call, sequence, head, Int32(0), queries, acc, top, total)
            tiles_at = warp * (self.box * 128)
            self.walk(call, tiles_at, at, at + count, first - at, length, low, Int32(0), queries, acc, top, total)
            self.conclude(call, sequence, head, acc, top, total, sinks)
            at += count
            sequence += call.groups

    @cute.jit
    def begin(
        self,
        call: Call,
        sequence: Int32,
        head: Int32,
        first_row: Int32,
        queries: cute.Tensor,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
    ):
        """Loads the queries of a warp's rows, and has no sums yet."""
        lane = cute.arch.lane_idx()
        own_row = here(first_row + lane // 4)
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(2):
                for each in cutlass.range_constexpr(self.head_dim // 8):
                    queries[tile, each // 2, each % 2 * 2 + other] = Uint32(0)
                if cutlass.const_expr(other < self.used):
                    row = own_row + tile * 16 + other * 8
                    token = row // call.ratio
                    top[tile, other] = Float32(LOWEST)
                    total[tile, other] = Float32(0.0)
                    if token < call.q_len:
                        source = self.row_address(
                            call.q, sequence * call.q_len + token, head * call.ratio + row - token * call.ratio
                        )
                        for each in cutlass.range_constexpr(self.head_dim // 8):
                            queries[tile, each // 2, each % 2 * 2 + other] = cute.arch.inline_ptx(
                                "ld.global.b32 {$w0}, [{$r0}];",
                                write_only_types=[Uint32],
                                read_only_args=[source + (each * 16 + lane % 4 * 4)],
                            )
            for column in cutlass.range_constexpr(self.head_dim // 8):
                for each in cutlass.range_constexpr(2 * self.used):
                    acc[tile, column, each] = Float32(0.0)

    @cute.jit
    def walk(
        self,
        call: Call,
        tiles_at: Int32,
        place: Int32,
        end: Int32,
        shift: Int32,
        length: Int32,
        low: Int32,
        first_row: Int32,
        queries: cute.Tensor,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
    ):
        """Takes a warp's tiles of a sequence, the ``place``-th of the CTA and later ones, into its sums.

        Args:
            tiles_at: where its tiles begin in a stage, in bytes.
            shift: from places of tiles to their numbers in the sequence.
        """
        while place < end:
            stage = place % self.stages
            cute.arch.mbarrier_wait(call.full + stage, place // self.stages % 2)
            self.attend(
                call, call.tiles.toint() + tiles_at + stage * (2 * self.config.stage_numbers), queries, acc, top, total,
                (place + shift) * self.block, length, low, first_row,
            )  # fmt: skip
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(call.empty + stage)
            place += self.parts

    def row_at(self, row: Any) -> Any:
        """Where a row of a tile is, in bytes: a box holds some rows of a head, then those of the next head of the CTA."""
        return row // self.box * (self.heads * self.box * 128) + row % self.box * 128

    @cute.jit
    def attend(
        self,
        call: Call,
        tile_at: Int32,
        queries: cute.Tensor,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
        start: Int32,
        length: Int32,
        low: Int32,
        first_row: Int32,
    ):
        """Takes one tile of keys and values into a warp's sums."""
        lane = cute.arch.lane_idx()
        lane_row = lane % 8
        lane_matrix = lane // 8
        keys = self.block // 8
        half_bytes = self.heads * self.block * 128  # of 64 numbers of each row
        values_at = tile_at + half_bytes * self.halves
        # Slots that hold no token may hold NaN, and 0 * NaN is not 0.
        if start < low or start + self.block > length:
            for each in cutlass.range_constexpr((self.block * self.halves + 31) // 32):
                row = each * 32 + lane
                position = start + row % self.block
                if row < self.block * self.halves and (position < low or position >= length):
                    for piece in cutlass.range_constexpr(8):
                        at = row // self.block * half_bytes + self.row_at(row % self.block)
                        store_floats("shared", values_at + at + piece * 16, [Float32(0.0)] * 4)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()

        scores = cute.make_rmem_tensor((self.tiles, keys, 4), Float32)
        for key in cutlass.range_constexpr(keys):
            products = [[Float32(0.0)] * 4 for _ in range(self.tiles)]
            for chunk in cutlass.range_constexpr(0, self.head_dim // 8, 4):
                b = ldmatrix(
                    tile_at + lane_row * 128 + ((lane_matrix ^ lane_row) * 16 ^ (chunk % 8 * 16))
                    + (self.row_at(key * 8) + chunk // 8 * half_bytes),
                    False,
                )  # fmt: skip
                for tile in cutlass.range_constexpr(self.tiles):
                    for half in cutlass.range_constexpr(2):
                        a = [queries[tile, chunk // 2 + half, each] for each in range(4)]
                        products[tile] = mma(self.kind, products[tile], a, b[2 * half : 2 * half + 2])
            for tile in cutlass.range_constexpr(self.tiles):
                for each in cutlass.range_constexpr(4):
                    scores[tile, key, each] = products[tile][each]

        windowed = call.window_left >= 0
        if start + self.block > length - call.q_len + 1 or (windowed and start < length - 1 - call.window_left):
            own_row = here(first_row + lane // 4)
            for tile in cutlass.range_constexpr(self.tiles):
                for other in cutlass.range_constexpr(self.used):
                    end = length - call.q_len + (own_row + tile * 16 + other * 8) // call.ratio + 1
                    begin = cutlass.select_(windowed, end - 1 - call.window_left, Int32(0))
                    for key in cutlass.range_constexpr(keys):
                        for each in cutlass.range_constexpr(2):
                            position = start + key * 8 + lane % 4 * 2 + each
                            if position < begin or position >= end:
                                scores[tile, key, 2 * other + each] = -Float32.inf

        highest = cute.make_rmem_tensor((self.tiles, self.used), Float32)
        rise = Float32(0.0)
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(self.used):
                own = larger(scores[tile, 0, 2 * other], scores[tile, 0, 2 * other + 1])
                for key in cutlass.range_constexpr(1, keys):
                    own = larger(own, larger(scores[tile, key, 2 * other], scores[tile, key, 2 * other + 1]))
                highest[tile, other] = own
                rise = larger(rise, (own - top[tile, other]) * call.scale)
        if cute.arch.vote_any_sync(rise > LAZY):
            for tile in cutlass.range_constexpr(self.tiles):
                for other in cutlass.range_constexpr(self.used):
                    own = larger(highest[tile, other], top[tile, other])
                    own = larger(own, cute.arch.shuffle_sync_bfly(own, 1))
                    own = larger(own, cute.arch.shuffle_sync_bfly(own, 2))
                    decay = exp2((top[tile, other] - own) * call.scale)
                    top[tile, other] = own
                    total[tile, other] *= decay
                    for column in cutlass.range_constexpr(self.head_dim // 8):
                        acc[tile, column, 2 * other] *= decay
                        acc[tile, column, 2 * other + 1] *= decay

        weights = cute.make_rmem_tensor((self.tiles, keys, 2), Uint32)
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(2):
                if cutlass.const_expr(other < self.used):
                    shift = top[tile, other] * call.scale
                    some = Float32(0.0)
                    for key in cutlass.range_constexpr(keys):
                        even = exp2(scores[tile, key, 2 * other] * call.scale - shift)
                        odd = exp2(scores[tile, key, 2 * other + 1] * call.scale - shift)
                        some += even + odd
                        weights[tile, key, other] = pack(self.kind, even, odd)
                    total[tile, other] += some
                else:
                    for key in cutlass.range_constexpr(keys):
                        weights[tile, key, other] = Uint32(0)

        matrix_at = values_at + lane_row * 128 + lane_matrix % 2 * 1024 + ((lane_matrix // 2) ^ lane_row) * 16
        for chunk in cutlass.range_constexpr(0, self.head_dim // 8, 2):
            sums = [[[Float32(0.0)] * 4, [Float32(0.0)] * 4] for _ in range(self.tiles)]
            for tile in cutlass.range_constexpr(self.tiles):
                for half in cutlass.range_constexpr(2):
                    for each in cutlass.range_constexpr(2 * self.used):
                        sums[tile][half][each] = acc[tile, chunk + half, each]
            for key in cutlass.range_constexpr(0, keys, 2):
                b = ldmatrix((matrix_at ^ (chunk % 8 * 16)) + (self.row_at(key * 8) + chunk // 8 * half_bytes), True)
                for tile in cutlass.range_constexpr(self.tiles):
                    a = [weights[tile, key + each // 2, each % 2] for each in range(4)]
                    for half in cutlass.range_constexpr(2):
                        sums[tile][half] = mma(self.kind, sums[tile][half], a, b[2 * half : 2 * half + 2])
            for tile in cutlass.range_constexpr(self.tiles):
                for half in cutlass.range_constexpr(2):
                    for each in cutlass.range_constexpr(2 * self.used):
                        acc[tile, chunk + half, each] = sums[tile][half][each]

    # -- results -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def leave(self, call: Call, acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor):
        """Puts a warp's sums where all warps find them."""
        thread, _, _ = cute.arch.thread_idx()
        thread = here(thread)
        lane = thread % 32
        warp = thread // 32
        first_row = warp % self.parts * self.rows + warp // self.parts * (16 * self.tiles)
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(self.used):
                every = total[tile, other]
                every += cute.arch.shuffle_sync_bfly(every, 1)
                every += cute.arch.shuffle_sync_bfly(every, 2)
                row = first_row + tile * 16 + other * 8 + lane // 4
                if lane % 4 == 0:
                    store_floats("shared", call.sums.toint() + row * 8, [top[tile, other] * call.scale, every])
                to = call.results.toint() + (row * self.width + lane % 4 * 2) * 4
                for column in cutlass.range_constexpr(self.head_dim // 8):
                    store_floats("shared", to + column * 32, [acc[tile, column, 2 * other], acc[tile, column, 2 * other + 1]])

    @cute.jit
    def finish(self, call: Call):
        """Merges what the warps have of a sequence, and leaves it as the output, or as a piece that the last CTA merges."""
        thread, _, _ = cute.arch.thread_idx()
        thread = here(thread)
        sequence, offset, left, at = call.plan[SEQUENCE], call.plan[OFFSET], call.plan[LEFT], call.plan[DONE]
        _, _, whole = self.shown(call, self.length_of(call, sequence))
        # Now all have put down their sums, and know where they are, which is changed below.
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
        first_group = call.group
        pieces = Int32(1)
        if cutlass.const_expr(self.config.split):
            share = call.plan[SHARE]
            start = call.group * share + at - offset  # of the sequence
            first_group = start // share
            pieces = (start + whole - 1) // share - first_group + 1
        for item in cutlass.range((self.rows * self.fours + MERGERS - 1) // MERGERS, unroll=1):
            index = item * MERGERS + thread
            row = index // self.fours
            column = index % self.fours * 4
            sums = [load_floats("shared", call.sums.toint() + (each * self.rows + row) * 8, 2) for each in range(self.parts)]
            highest = sums[0][0]
            for each in cutlass.range_constexpr(1, self.parts):
                highest = larger(highest, sums[each][0])
            every = Float32(0.0)
            merged = [Float32(0.0)] * 4
            for each in cutlass.range_constexpr(self.parts):
                weight = exp2(sums[each][0] - highest)
                every += weight * sums[each][1]
                result = load_floats("shared", call.results.toint() + ((each * self.rows + row) * self.width + column) * 4, 4)
                merged = [merged[place] + weight * result[place] for place in range(4)]
            if row < call.ratio * call.q_len:
                if pieces > 1:
                    sums_at, results_at = self.piece(call, call.group, offset == 0, row)
                    store_floats("global", results_at + column * 4, merged)
                    if column == 0:
                        store_floats("global", sums_at, [highest, every])
                else:
                    self.write(call, sequence, row, column, highest, every, merged)
        if cutlass.const_expr(self.config.split):
            self.join(call, sequence, first_group, pieces)
        if thread == 0:
            if cutlass.const_expr(self.config.split):
                count = cutlass.min(whole - offset, left)
                call.plan[SEQUENCE] = sequence + 1
                call.plan[LEFT] = left - count
                call.plan[DONE] = at + count
            else:
                call.plan[SEQUENCE] = sequence + call.groups
                call.plan[LEFT] = left - 1
                call.plan[DONE] = at + whole
            call.plan[OFFSET] = Int32(0)
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)

    @cute.jit
    def piece(self, call: Call, group: Int32, begins: Any, row: Int32):
        """Where a row of a partial result lies: its maximum and sum, and its values.

        A group leaves two results at most: of the sequence that it begins in the middle of, and of one that it begins.
        """
        slot = group * 2 + cutlass.select_(begins, Int32(1), Int32(0))
        at = (slot * call.kv_heads + call.head) * self.rows + row
        sums = call.partial + Int64(call.groups * call.kv_heads * 2 * self.rows) * (self.head_dim * 4)
        return sums + Int64(at * 8), call.partial + Int64(at * (self.head_dim * 4))

    @cute.jit
    def join(self, call: Call, sequence: Int32, first_group: Int32, pieces: Int32):
        """Counts the pieces of a sequence, if it has several, and merges them if this was the last.

        A group begins one such sequence at most, whose counter is the group's.
        """
        thread, _, _ = cute.arch.thread_idx()
        if pieces > 1:
            cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
            if thread == 0:
                counter = cute.make_ptr(Int32, call.counters, cute.AddressSpace.gmem) + (first_group * call.kv_heads + call.head)
                before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                call.plan[BEFORE] = before
                if before == pieces - 1:
                    counter[0] = Int32(0)
            cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
            if call.plan[BEFORE] == pieces - 1:
                self.combine(call, sequence, first_group, pieces)

    @cute.jit
    def combine(self, call: Call, sequence: Int32, first_group: Int32, pieces: Int32):
        """Merges the pieces of a sequence, in their order."""
        thread, _, _ = cute.arch.thread_idx()
        thread = here(thread)
        for item in cutlass.range((self.rows * self.fours + MERGERS - 1) // MERGERS, unroll=1):
            index = item * MERGERS + thread
            row = index // self.fours
            column = index % self.fours * 4
            if row < call.ratio * call.q_len:
                highest = Float32(LOWEST)
                every = Float32(0.0)
                merged = cute.make_rmem_tensor((4,), Float32)
                merged.fill(0.0)
                for begin in cutlass.range(0, pieces, PIECES, unroll=1):
                    sums = []
                    results = []
                    for each in cutlass.range_constexpr(PIECES):
                        piece = cutlass.min(begin + each, pieces - 1)
                        sums_at, results_at = self.piece(call, first_group + piece, piece == 0, row)
                        sums.append(load_floats("global.cg", sums_at, 2))
                        results.append(load_floats("global.cg", results_at + column * 4, 4))
                    risen = highest
                    for each in cutlass.range_constexpr(PIECES):
                        risen = larger(risen, sums[each][0])
                    decay = exp2(highest - risen)
                    every *= decay
                    for place in cutlass.range_constexpr(4):
                        merged[place] *= decay
                    for each in cutlass.range_constexpr(PIECES):
                        weight = cutlass.select_(begin + each < pieces, exp2(sums[each][0] - risen), Float32(0.0))
                        every += weight * sums[each][1]
                        for place in cutlass.range_constexpr(4):
                            merged[place] += weight * results[each][place]
                    highest = risen
                self.write(call, sequence, row, column, highest, every, [merged[place] for place in range(4)])

    @cute.jit
    def write(self, call: Call, sequence: Int32, row: Int32, column: Int32, highest: Float32, every: Float32, merged: Any):
        """Adds the sink, divides, and stores four numbers of a row of the output."""
        token = row // call.ratio
        q_head = call.head * call.ratio + row - token * call.ratio
        factor, logarithm = self.close(highest, every, call.sink_values[row])
        cute.arch.inline_ptx(
            "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[
                self.row_address(call.out, sequence * call.q_len + token, q_head) + column * 2,
                pack(self.kind, merged[0] * factor, merged[1] * factor),
                pack(self.kind, merged[2] * factor, merged[3] * factor),
            ],
        )
        if call.lse != 0 and column == 0:
            self.write_lse(call, sequence, token, q_head, logarithm)

    @cute.jit
    def close(self, highest: Float32, every: Float32, sink: Float32):
        """What a row's sums are multiplied by, its sink included, and the logarithm of what they are divided by."""
        risen = larger(highest, sink)
        decay = exp2(highest - risen)
        total = every * decay + exp2(sink - risen)
        return cutlass.select_(total == 0.0, Float32(0.0), decay / total), (risen + cute.math.log2(total)) * LN2

    @cute.jit
    def write_lse(self, call: Call, sequence: Int32, token: Int32, q_head: Int32, logarithm: Float32):
        place = (Int64(sequence) * call.q_len + token) * (call.kv_heads * call.ratio) + q_head
        cute.make_ptr(Float32, call.lse, cute.AddressSpace.gmem)[place] = logarithm

    @cute.jit
    def conclude(
        self, call: Call, sequence: Int32, head: Int32, acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor, sinks: cute.Tensor
    ):
        """Writes the output of a sequence and a key head from one warp's sums."""
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.tiles):
            for other in cutlass.range_constexpr(self.used):
                every = total[tile, other]
                every += cute.arch.shuffle_sync_bfly(every, 1)
                every += cute.arch.shuffle_sync_bfly(every, 2)
                factor, logarithm = self.close(top[tile, other] * call.scale, every, sinks[tile, other])
                row = lane // 4 + tile * 16 + other * 8
                token = row // call.ratio
                q_head = head * call.ratio + row - token * call.ratio
                if token < call.q_len:
                    to = self.row_address(call.out, sequence * call.q_len + token, q_head) + lane % 4 * 4
                    for column in cutlass.range_constexpr(self.head_dim // 8):
                        even, odd = acc[tile, column, 2 * other] * factor, acc[tile, column, 2 * other + 1] * factor
                        cute.arch.inline_ptx(
                            "st.global.b32 [{$r0}], {$r1};", read_only_args=[to + column * 16, pack(self.kind, even, odd)]
                        )
                    if call.lse != 0 and lane % 4 == 0:
                        self.write_lse(call, sequence, token, q_head, logarithm)
