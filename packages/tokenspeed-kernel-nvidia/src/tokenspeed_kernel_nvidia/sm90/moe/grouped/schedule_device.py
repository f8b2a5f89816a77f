"""The device code of the first kernel of `grouped`. One CTA or a cluster sorts (token, slot) pairs by expert and divides them into
tiles, each of some pairs of one expert.

The sort is a stable counting sort, so the order is deterministic. Each warp has a range of the pairs.

1. The warp counts the pairs of each expert in its own row of a table in shared memory. It stores each pair's index among the warp's
   pairs of the same expert in ``positions``.
2. The CTAs of a cluster exchange their counts. Prefix sums over the warps and over the experts give the start of each warp's pairs
of
   an expert in the sorted order. Each CTA computes these starts for itself, and CTA 0 lists the tiles.
3. The warp adds the starts to its pairs' indices, and stores the pairs' positions and tokens.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import ballot, load_int, store_words, warp_prefix_sum
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank, send_word
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import MAX_EXPERTS, RECORD, Schedule, least_columns

WARPS = 32
THREADS = 32 * WARPS
AT_ONCE = 8  # expert ids that a lane loads before it uses the first one
ID_BITS = (MAX_EXPERTS - 1).bit_length()  # bits of an expert id


def host(config: Schedule) -> Any:
    """Returns the host function that launches the kernel of ``config``."""
    return SchedulePairs(config)


def fake_arguments(config: Schedule) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    ids = arguments.ints(arguments.size(), arguments.size(), contiguous=False)
    return ids, *(Int64(0) for _ in range(4)), *(Int32(0) for _ in range(3)), arguments.stream()


@dataclass(frozen=True)
class Pairs:
    """The arguments of a launch. Arrays are given by their global addresses.

    Attributes:
        ids, token_stride, slot_stride: int32 ``[tokens, top_k]``, the expert of each pair, and the strides of the axes in elements.
        count: number of pairs, ``tokens * top_k``.
        top_k, experts: number of slots of a token, and number of experts.
        columns: the maximum number of pairs of a tile.
        group: each expert's pairs begin at a multiple of this number in the sorted order. With a number above 1, the order has
            gaps, which have indices too.
        sources: int32 ``[pairs]``, receives the token of each pair, in the sorted order of the pairs.
        positions: int32 ``[tokens, top_k]``, receives the index of each pair in the sorted order, -1 for pairs without an expert.
        tiles: int32 ``[tiles, RECORD]``, receives a record of each tile: its expert, the index of its first pair in the sorted
            order, its number of pairs, and a fourth word that no kernel reads. The tiles with the most pairs come first.
        tile_count: int32, receives the number of tiles.
    """

    ids: Int64
    token_stride: Int64
    slot_stride: Int64
    count: Int32
    top_k: Int32
    experts: Int32
    columns: Int32
    group: Int32
    sources: Int64
    positions: Int64
    tiles: Int64
    tile_count: Int64


class SchedulePairs:
    """The kernel for one configuration: one CTA of 32 warps, or a cluster of `SORTING_CTAS` such CTAs. The kernel is
    latency-bound."""

    def __init__(self, config: Schedule):
        self.config = config

    def storage(self) -> Any:
        @cute.struct
        class Storage:
            counts: cute.struct.MemRange[Int32, WARPS * MAX_EXPERTS]
            begins: cute.struct.MemRange[Int32, MAX_EXPERTS]
            # For each expert, ``4 * columns + tiles``: ``tiles`` is the number of the expert's tiles that are not full, ``columns``
            # is the number of pairs of the first such tile.
            rests: cute.struct.MemRange[Int32, MAX_EXPERTS]
            pair_sums: cute.struct.MemRange[Int32, WARPS]
            full_sums: cute.struct.MemRange[Int32, WARPS]
            # The number of pairs of each expert in each CTA's range of pairs, and the barrier on which these numbers arrive.
            of_ctas: cute.struct.MemRange[Int32, self.config.ctas * MAX_EXPERTS]
            arrived: cute.struct.MemRange[Int64, 1]

        return Storage

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        sources: Int64,
        positions: Int64,
        tiles: Int64,
        tile_count: Int64,
        experts: Int32,
        columns: Int32,
        group: Int32,
        stream: cuda.CUstream,
    ):
        tokens, top_k = ids.shape
        pairs = Pairs(
            ids.iterator.toint(),
            ids.stride[0],
            ids.stride[1],
            tokens * top_k,
            top_k,
            experts,
            columns,
            group,
            sources,
            positions,
            tiles,
            tile_count,
        )
        ctas = self.config.ctas
        self.kernel(pairs).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, pairs: Pairs):
        storage = SmemAllocator().allocate(self.storage())
        counts = storage.counts.data_ptr()
        threads = self.config.ctas * THREADS
        rank, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        for turn in cutlass.range_constexpr(WARPS * MAX_EXPERTS // THREADS):
            counts[turn * THREADS + thread] = Int32(0)
        if const_expr(self.config.ctas > 1):
            if thread == 0:
                cute.arch.mbarrier_init(storage.arrived.data_ptr(), 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(storage.arrived.data_ptr(), pairs.experts * (4 * self.config.ctas))
            # Other CTAs may send once the barrier is initialised. `exchange` waits for the cluster before it sends.
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        each_lane = (pairs.count + (threads - 1)) // threads
        begin = (rank * WARPS + warp) * each_lane * 32
        end = cutlass.min(begin + each_lane * 32, pairs.count)
        counts += warp * MAX_EXPERTS
        # Multiply-high by this inverse replaces division by top_k. Exact for fewer than 2^28 pairs, since top_k is at most 8.
        inverse = Int32((Int64(1) << 31) // pairs.top_k + 1)
        ids, indices = (cute.make_rmem_tensor((AT_ONCE,), Int32) for _ in range(2))
        for first in cutlass.range(begin, end, 32 * AT_ONCE, unroll=1):
            for each in cutlass.range_constexpr(AT_ONCE):
                ids[each] = self.read_id(pairs, first + 32 * each + lane, end, inverse)
            for each in cutlass.range_constexpr(AT_ONCE):
                if first + 32 * each < end:
                    index = self.count_pair(counts, ids[each], lane)
                    if ids[each] >= 0:
                        store_words(pairs.positions + Int64(first + 32 * each + lane) * 4, [index])
        cute.arch.sync_threads()
        self.scan_experts(pairs, storage, rank, thread, warp, lane)
        begins = storage.begins.data_ptr()
        for first in cutlass.range(begin, end, 32 * AT_ONCE, unroll=1):
            for each in cutlass.range_constexpr(AT_ONCE):
                pair = first + 32 * each + lane
                ids[each] = self.read_id(pairs, pair, end, inverse)
                if ids[each] >= 0:
                    indices[each] = load_int(pairs.positions + Int64(pair) * 4, False)
            for each in cutlass.range_constexpr(AT_ONCE):
                pair = first + 32 * each + lane
                if pair < end:
                    index = Int32(-1)
                    if ids[each] >= 0:
                        index = begins[ids[each]] + counts[ids[each]] + indices[each]
                        store_words(pairs.sources + Int64(index) * 4, [self.token_of(pair, inverse)])
                    store_words(pairs.positions + Int64(pair) * 4, [index])

    def token_of(self, pair: Int32, inverse: Int32) -> Int32:
        """Returns ``pair // top_k``."""
        return cute.arch.inline_ptx("mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[2 * pair, inverse])

    @cute.jit
    def read_id(self, pairs: Pairs, pair: Int32, end: Int32, inverse: Int32) -> Int32:
        """Returns the expert of a pair, or -1 if the pair has no valid expert or is not below ``end``."""
        result = Int32(-1)
        if pair < end:
            token = self.token_of(pair, inverse)
            slot = pair - token * pairs.top_k
            expert = load_int(pairs.ids + (Int64(token) * pairs.token_stride + Int64(slot) * pairs.slot_stride) * 4, False)
            if expert >= 0 and expert < pairs.experts:
                result = expert
        return result

    @cute.jit
    def count_pair(self, own: cute.Pointer, expert: Int32, lane: Int32) -> Int32:
        """Adds the pairs of a warp, one per lane, to ``own``, the warp's counts of pairs by expert. Returns the number of this
        warp's earlier pairs with the same expert as the lane's pair. All lanes of the warp call this method.
        """
        # A mask of the lanes whose pairs have the same expert as this lane's pair. A ballot for each bit of the expert is faster
        # than `match`, whose time grows with the number of different experts in a warp.
        same = Int32(-1)
        for bit in cutlass.range_constexpr(ID_BITS + 1):  # and the sign bit
            mine = expert << (31 - bit) >> 31 if bit < ID_BITS else expert >> 31
            same &= ~(ballot(mine != 0) ^ mine)
        below = cute.arch.popc(same & ((1 << lane) - 1))
        index = Int32(0)
        if expert >= 0:
            index = own[expert] + below
        cute.arch.sync_warp()
        if expert >= 0 and below == 0:
            own[expert] = index + cute.arch.popc(same)
        cute.arch.sync_warp()
        return index

    @cute.jit
    def scan_experts(self, pairs: Pairs, storage: Any, rank: Int32, thread: Int32, warp: Int32, lane: Int32):
        """Replaces the warps' counts of each expert's pairs by exclusive prefix sums over the warps. Computes the first index of
        this CTA's pairs of each expert in the sorted order, and lists the tiles. Thread i handles expert i. All threads of the CTA
        call this method.
        """
        counts = storage.counts.data_ptr()
        rests, pair_sums, full_sums = storage.rests.data_ptr(), storage.pair_sums.data_ptr(), storage.full_sums.data_ptr()
        count = Int32(0)
        if thread < pairs.experts:
            of_warps = [counts[other * MAX_EXPERTS + thread] for other in range(WARPS)]
            for other in cutlass.range_constexpr(WARPS):
                counts[other * MAX_EXPERTS + thread] = count
                count += of_warps[other]
        before = Int32(0)  # pairs of the expert in lower-ranked CTAs
        if const_expr(self.config.ctas > 1):
            before, count = self.exchange(pairs, storage, rank, thread, count)
        # All tiles of an expert except the last are full. If the last tile would have few pairs, it shares its pairs and those of
        # the tile before it about equally: `parts` is 2, and `rest` is half of these pairs, rounded up to a multiple of 8.
        columns = pairs.columns
        tiles = (count + (columns - 1)) // columns
        left = count - (tiles - 1) * columns  # pairs of the last tile
        parts, rest = cutlass.min(tiles, 1), left
        if tiles > 1 and left < least_columns(columns):
            parts = Int32(2)
            rest = (left + (columns + 15)) // 16 * 8
        full = tiles - parts
        room = (count + (pairs.group - 1)) // pairs.group * pairs.group
        pairs_end, full_end = warp_prefix_sum(room, lane), warp_prefix_sum(full, lane)
        if lane == 31:
            pair_sums[warp] = pairs_end
            full_sums[warp] = full_end
        if thread < pairs.experts:
            rests[thread] = rest * 4 + parts if parts > 0 else Int32(0)
        cute.arch.sync_threads()
        if thread < pairs.experts:
            start, full_at, all_full = pairs_end - room, full_end - full, Int32(0)
            for other in cutlass.range_constexpr(MAX_EXPERTS // 32):
                if other < warp:
                    start += pair_sums[other]
                    full_at += full_sums[other]
                all_full += full_sums[other]
            storage.begins.data_ptr()[thread] = start + before
            # Tiles with more pairs come first; ties are ordered by expert.
            rest_at, all_rest = all_full, Int32(0)
            for other in cutlass.range(pairs.experts, unroll=16):
                theirs = rests[other]
                if theirs // 4 > rest or (theirs // 4 == rest and other < thread):
                    rest_at += theirs % 4
                all_rest += theirs % 4
            if thread == 0 and rank == 0:
                store_words(pairs.tile_count, [all_full + all_rest])
            for tile in cutlass.range(full if rank == 0 else 0, unroll=1):
                self.write_tile(pairs, full_at + tile, thread, start + tile * columns, columns)
            if parts > 0 and rank == 0:
                begin = start + full * columns
                self.write_tile(pairs, rest_at, thread, begin, rest)
                if parts > 1:
                    self.write_tile(pairs, rest_at + 1, thread, begin + rest, start + count - begin - rest)
        cute.arch.sync_threads()

    @cute.jit
    def exchange(self, pairs: Pairs, storage: Any, rank: Int32, thread: Int32, count: Int32):
        """Sends this CTA's number of pairs of the thread's expert to all CTAs of the cluster. Returns the expert's number of pairs
        in the lower-ranked CTAs, and in all CTAs.
        """
        cute.arch.cluster_wait()
        here, barrier = storage.of_ctas.data_ptr().toint(), storage.arrived.data_ptr()
        if thread < pairs.experts:
            for to in cutlass.range_constexpr(self.config.ctas):
                there = of_rank(here + (rank * MAX_EXPERTS + thread) * 4, Int32(to))
                send_word(there, count, of_rank(barrier.toint(), Int32(to)))
        cute.arch.mbarrier_wait(barrier, 0)
        before, total = Int32(0), Int32(0)
        if thread < pairs.experts:
            of_ctas = storage.of_ctas.data_ptr()
            for other in cutlass.range_constexpr(self.config.ctas):
                if other == rank:
                    before = total
                total += of_ctas[other * MAX_EXPERTS + thread]
        return before, total

    @cute.jit
    def write_tile(self, pairs: Pairs, tile: Int32, expert: Int32, first: Int32, count: Int32):
        """Stores the record of a tile with ``count`` pairs, from the index ``first`` in the sorted order on. See `Pairs.tiles`."""
        at = pairs.tiles + Int64(tile) * (4 * RECORD)
        store_words(at, [expert, first, count, count])
