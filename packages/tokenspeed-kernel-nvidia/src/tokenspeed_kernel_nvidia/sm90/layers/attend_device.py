"""Attention of one token per sequence over the paged cache, in the persistent kernel.

The keys of a token and a key head are divided among ``splits`` CTAs (split-KV). Each of a CTA's 12 MMA warps computes every twelfth
tile of 16 keys, with an online softmax. The first MMA computes scores, q·k: its rows (m) are the query heads of the key head, and
its columns (n) are keys. Its accumulator layout is the layout of the left operand of the second MMA, weights by values. So a lane
uses its own scores, without a shuffle. Tiles are aligned to 16 keys, so a tile lies in one page.

Keys and values go directly from global memory into registers. The loads of a warp's first tile are issued before the wait for the
queries. The values of this tile are first copied to shared memory, because registers do not suffice. With 32,768 keys of a
sequence, an H200 reads them at 3.5 TB/s. It was not faster when warps also prefetched one to four further tiles into L2, or looked
up pages one tile ahead.

The CTA merges its warps' results. It stores a partial result for each query head as tagged numbers: the unnormalised output, the
row max of the scores, and the row sum of the exponentials. Then each of the ``splits`` CTAs merges all partial results for some of
the elements, and adds the sink.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.memory_device import copy_piece, load_words, store_number, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    load_floats,
    load_int,
    mma_m16n8k16,
    opt_barrier,
    pack,
    permute_bytes,
    quad_max,
    quad_sum,
    store_floats,
    store_words,
)
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import exp2
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import prefetch_bulk
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import load_words_if
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    ATTENDED,
    GROUP_HEADS,
    HEAD_DIM,
    KEYS,
    PARTIAL_WORDS,
    PARTIALS,
    Q_PITCH,
    SPLITS,
    WARP_BYTES,
)
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, store_tagged, value_of, warp_max, warp_sum
from tokenspeed_kernel_nvidia.sm90.layers.qkv_device import Qkv
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import (
    HEAD,
    K_CACHE,
    LENGTH,
    SINKS,
    SPLIT,
    TOKEN,
    V_CACHE,
    WINDOW,
    LayerCall,
)
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import FINISH_WARP, FINISHERS, MMA_WARPS

_HALF = HEAD_DIM // 2  # elements d and d + 32 of a head are rotated together
_NONE = -1e38  # the score of a masked key, and the row max of a head without keys; finite, so that a difference is never NaN
# Offsets in the memory of attention: of the new key, the new value, and the warps' results. The queries are at offset 0.
_K_AT = GROUP_HEADS * Q_PITCH
_V_AT = _K_AT + 2 * HEAD_DIM
_WARPS_AT = _V_AT + 2 * HEAD_DIM
_MAXIMA = 4 * GROUP_HEADS * HEAD_DIM  # offset in a warp's results: each head's row max, then each head's row sum
_COPY_BYTES = 512  # bytes of values that a warp copies at once
_ADDED_AT_ONCE = 4  # warps whose results are loaded at once; a divisor of the number of warps
_COMBINERS = 4  # warps that merge the splits' partial results


class Attend(Qkv):
    """The part of the kernel that computes attention. All MMA warps call these methods."""

    @cute.jit
    def prepare_attention(self, call: LayerCall):
        """Loads what all layers need for this CTA's token into shared memory. ``call``: the call of any layer."""
        attention = call.given.attention
        item, _, _ = cute.arch.block_idx()
        pair = item >> attention.split_bits
        token = pair // attention.kv_heads
        thread = self.thread()
        if token < call.tokens:
            length = load_int(attention.lengths + Int64(token) * 4, False)
            if thread == 0:
                call.kept[LENGTH], call.kept[TOKEN] = length, token
                call.kept[HEAD], call.kept[SPLIT] = pair - token * attention.kv_heads, item & (attention.splits - 1)
            if thread < HEAD_DIM:
                position = cutlass.max(length - 1, 0)  # a row that pads the batch may have no token
                angle = load_floats("global", attention.table + Int64(position * attention.table_pitch + thread) * 4, 1)
                store_floats("shared", call.angles + thread * 4, [angle])
            if thread < 2 * MMA_WARPS:
                call.known_tiles[thread] = Int32(-1)
        self.synchronise()

    def items_of(self, call: LayerCall) -> Int32:
        """Returns the number of CTAs that have a work item of attention: one for each token, key head and split. The number is
        computed at each use, so that it occupies no register."""
        attention = call.given.attention
        return opt_barrier(call.tokens) * attention.kv_heads << attention.split_bits

    @cute.jit
    def attend(self, call: LayerCall, warp: Int32):
        """Computes this CTA's work item of attention, if it has one: one split of one token and key head. If the token sees few
        keys, the first split has all of them, and the other splits have none."""
        item, _, _ = cute.arch.block_idx()
        items = self.items_of(call)
        if item < items:
            length, token, head, split = call.kept[LENGTH], call.kept[TOKEN], call.kept[HEAD], call.kept[SPLIT]
            first, begin, end, whole = self.share_of(call, length, split)
            if (not whole) | (split == 0):
                self.attend_to_keys(call, warp, token, head, split, length, first, begin, end, whole)
            # All tokens share the counter, so CTAs without a partial result increase it too.
            self.publish(call, PARTIALS)
            if not whole:
                self.await_all(call, warp, PARTIALS, items)
                if warp < _COMBINERS:
                    # Read these values again: held in registers, they would be spilled.
                    self.combine_splits(call, warp, call.kept[TOKEN], call.kept[HEAD], call.kept[SPLIT])
            self.publish(call, ATTENDED)
            # Keep the other warps here while the first warps merge. Otherwise they would poll the attention's output, and their
            # polls would delay all other loads.
            self.synchronise()

    def share_of(self, call: LayerCall, length: Int32, split: Int32) -> tuple:
        """Returns the first key that the token sees, the begin and the end of a split's keys, and ``whole``: whether the first
        split has all keys, which is so if each warp has at most one tile."""
        attention = call.given.attention
        first = cutlass.max(length - Int32(call.address(WINDOW)), 0)
        base = first - first % KEYS
        tiles = (length - base + KEYS - 1) // KEYS
        whole = tiles <= MMA_WARPS
        share = cutlass.select_(whole, tiles, tiles + attention.splits - 1 >> attention.split_bits) * KEYS
        begin = base + split * share
        return first, begin, cutlass.min(begin + share, length), whole

    @cute.jit
    def prefetch_cache(self, call: LayerCall, warp: Int32):
        """Prefetches the keys and values of the warps' first tiles into L2, early in the layer. Later, these loads would queue
        behind the loads of this layer's weights. All epilogue warps call this method."""
        attention = call.given.attention
        item, _, _ = cute.arch.block_idx()
        if item < self.items_of(call):
            length, token, head, split = call.kept[LENGTH], call.kept[TOKEN], call.kept[HEAD], call.kept[SPLIT]
            first, begin, end, whole = self.share_of(call, length, split)
            if (not whole) | (split == 0):
                end = cutlass.min(cutlass.min(end, length - 1), begin + MMA_WARPS * KEYS)
                key = cutlass.max(begin, first) + (warp - FINISH_WARP) * 32 + cute.arch.lane_idx()
                for each in cutlass.range(key, end, 32 * FINISHERS, unroll=1):
                    offset = (self.page_of(call, token, each) + Int64(head) * attention.head_pitch) * 2
                    prefetch_bulk(call.address(K_CACHE) + offset, 2 * HEAD_DIM)
                    prefetch_bulk(call.address(V_CACHE) + offset, 2 * HEAD_DIM)

    @cute.jit
    def attend_to_keys(
        self, call: LayerCall, warp: Int32, token: Int32, head: Int32, split: Int32, length: Int32, first: Int32, begin: Int32,
        end: Int32, whole: Boolean,
    ):  # fmt: skip
        """Computes and stores the partial result of a split, whose keys are those from ``begin`` to ``end`` that are not before
        ``first``. ``whole``: the split has all keys, so the result is the attention's output."""
        attention = call.given.attention
        lane = self.thread() % 32
        k = cute.make_rmem_tensor((16,), Uint32)
        v = cute.make_rmem_tensor((16,), Uint32)
        k.fill(0)
        v.fill(0)
        tile = begin + warp * KEYS
        # In `store_results`, warp w merges the results of query head w. Its sink is loaded early, to hide the latency.
        query = head * attention.group + cutlass.min(warp, attention.group - 1)
        sink = load_floats("global", call.address(SINKS) + Int64(query) * 4, 1)
        kind = cutlass.select_(first > 0, Int32(1), Int32(0))
        if tile < end:
            page_at = self.known_page_of(call, warp, token, tile, kind)
            self.load_keys(call, k, page_at, head, tile, first, length - 1, lane)
            self.copy_values(call, warp, page_at, head, tile, first, length - 1, lane)
        # Only the split that has the new key stores it in the cache.
        self.load_queries(call, token, head, (begin < length) & (end == length))
        self.synchronise()
        if tile < end:
            self.take_values(call, warp, v, lane)
        # The accumulators of the unnormalised output. Lane 4 g + t has elements 16 t to 16 t + 15 of query head g.
        sums = cute.make_rmem_tensor((16,), Float32)
        sums.fill(0.0)
        largest, total = Float32(_NONE), Float32(0.0)
        while tile < end:
            self.patch_keys(call, k, tile, length - 1, lane)
            self.patch_values(call, v, tile, length - 1, lane)
            scores = self.scores_of(call, k, lane)
            further = tile + MMA_WARPS * KEYS
            page_at = Int64(0)
            if further < end:
                page_at = self.page_of(call, token, further)
                self.load_keys(call, k, page_at, head, further, first, length - 1, lane)
            peak = largest
            for each in cutlass.range_constexpr(4):
                key = tile + each // 2 * 8 + lane % 4 * 2 + each % 2
                seen = (key >= first) & (key < length)
                scores[each] = cutlass.select_(seen, scores[each] * attention.scale, Float32(_NONE))
                peak = cute.arch.fmax(peak, scores[each])
            peak = quad_max(peak)
            factor = exp2(largest - peak)
            weights = []
            for each in cutlass.range_constexpr(4):
                # A masked key has the weight 0, also if all keys are masked and the row max is _NONE.
                weight = exp2(scores[each] - peak)
                weights.append(cutlass.select_(scores[each] > _NONE, weight, Float32(0.0)))
            total = total * factor + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
            largest = peak
            self.add_values(sums, factor, weights, v)
            if further < end:
                self.load_values(call, v, page_at, head, further, first, length - 1, lane)
            tile = further
        self.store_warp(call, warp, lane, sums, largest, quad_sum(total))
        self.synchronise()
        tiles = cutlass.max(end - begin + KEYS - 1, 0) // KEYS
        self.store_results(call, call.kept[TOKEN], call.kept[HEAD], call.kept[SPLIT], tiles, whole, sink)
        # `load_attended` will store the attention's output where the warps' results are.
        self.synchronise()

    # -- the cache ---------------------------------------------------------------------------------------------------------------

    def page_of(self, call: LayerCall, token: Int32, key: Int32) -> Int64:
        """Returns the offset of a key in the caches, in elements, for the first head."""
        attention = call.given.attention
        index = key // attention.page_size
        page = load_int(attention.pages + Int64(token * attention.pages_pitch + index) * 4, False)
        return Int64(page) * attention.page_pitch + Int64(key - index * attention.page_size) * attention.token_pitch

    @cute.jit
    def known_page_of(self, call: LayerCall, warp: Int32, token: Int32, tile: Int32, kind: Int32) -> Int64:
        """Returns `page_of` of a warp's first tile. The tile is the same in all layers of a kind (1: with a window, 0: without), so
        later layers do not wait for the load of the page table."""
        place = kind * MMA_WARPS + warp
        offset = Int64(0)
        if call.known_tiles[place] == tile:
            offset = call.known_offsets[place]
        else:
            offset = self.page_of(call, token, tile)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                call.known_tiles[place] = tile
                call.known_offsets[place] = offset
        return offset

    @cute.jit
    def load_keys(
        self, call: LayerCall, k: cute.Tensor, page_at: Int64, head: Int32, tile: Int32, first: Int32, newest: Int32, lane: Int32
    ):
        """Loads a tile of keys. Lane 4 g + t gets 16 bytes of each half of the head, of keys g and g + 8. The order of the head's
        elements within an MMA does not matter, because queries are loaded in the same order.

        Keys before ``first`` are zeros. So are the newest key, which comes from shared memory (see `patch_keys`), and keys after
        it.
        """
        attention = call.given.attention
        lane = opt_barrier(lane)  # otherwise the rows' offsets would occupy registers in the loop over tiles
        base = call.address(K_CACHE) + (page_at + Int64(head) * attention.head_pitch) * 2 + lane % 4 * 16
        for each in cutlass.range_constexpr(4):
            row = each // 2 * 8 + lane // 4
            cached = (tile + row >= first) & (tile + row < newest)
            words = load_words_if(base + Int64(row) * attention.token_pitch * 2 + each % 2 * 64, cached)
            for number in cutlass.range_constexpr(4):
                k[4 * each + number] = words[number]

    @cute.jit
    def load_values(
        self, call: LayerCall, v: cute.Tensor, page_at: Int64, head: Int32, tile: Int32, first: Int32, newest: Int32, lane: Int32
    ):
        """Loads a tile of values. Lane 4 g + t gets elements 8 g to 8 g + 7 of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: the keys
        whose scores the lane has."""
        attention = call.given.attention
        lane = opt_barrier(lane)
        base = call.address(V_CACHE) + (page_at + Int64(head) * attention.head_pitch) * 2 + lane // 4 * 16
        for each in cutlass.range_constexpr(4):
            row = each // 2 * 8 + lane % 4 * 2 + each % 2
            cached = (tile + row >= first) & (tile + row < newest)
            words = load_words_if(base + Int64(row) * attention.token_pitch * 2, cached)
            for number in cutlass.range_constexpr(4):
                v[4 * each + number] = words[number]

    @cute.jit
    def copy_values(
        self, call: LayerCall, warp: Int32, page_at: Int64, head: Int32, tile: Int32, first: Int32, newest: Int32, lane: Int32
    ):
        """Issues cp.async copies of the values that `load_values` would load. They go to the shared memory of the warp's results,
        which is free until `store_warp`."""
        attention = call.given.attention
        base = call.address(V_CACHE) + (page_at + Int64(head) * attention.head_pitch) * 2 + lane // 4 * 16
        to = call.rows + _WARPS_AT + warp * WARP_BYTES + lane * 16
        for each in cutlass.range_constexpr(4):
            row = each // 2 * 8 + lane % 4 * 2 + each % 2
            cached = (tile + row >= first) & (tile + row < newest)
            count = cutlass.select_(cached, Int32(16), Int32(0))
            copy_piece(to, each * _COPY_BYTES, base + Int64(row) * attention.token_pitch * 2, count)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def take_values(self, call: LayerCall, warp: Int32, v: cute.Tensor, lane: Int32):
        """Waits for this lane's copies of `copy_values`, and loads them into registers."""
        cute.arch.cp_async_wait_group(0)
        source = call.rows + _WARPS_AT + warp * WARP_BYTES + lane * 16
        for each in cutlass.range_constexpr(4):
            for number, word in enumerate(load_words("shared", source + each * _COPY_BYTES, 4)):
                v[4 * each + number] = word
        cute.arch.sync_warp()  # in `store_warp`, other lanes overwrite this memory

    @cute.jit
    def patch_keys(self, call: LayerCall, k: cute.Tensor, tile: Int32, newest: Int32, lane: Int32):
        """Replaces the newest key, if it is in the tile, by the key in shared memory. It was not in the cache when the tile's loads
        were issued."""
        for row in cutlass.range_constexpr(2):
            if tile + row * 8 + lane // 4 == newest:
                for half in cutlass.range_constexpr(2):
                    words = load_words("shared", call.rows + _K_AT + lane % 4 * 16 + half * 64, 4)
                    for number in cutlass.range_constexpr(4):
                        k[8 * row + 4 * half + number] = words[number]

    @cute.jit
    def patch_values(self, call: LayerCall, v: cute.Tensor, tile: Int32, newest: Int32, lane: Int32):
        """Replaces the newest value, if it is in the tile, by the value in shared memory; see `patch_keys`."""
        for each in cutlass.range_constexpr(4):
            if tile + each // 2 * 8 + lane % 4 * 2 + each % 2 == newest:
                words = load_words("shared", call.rows + _V_AT + lane // 4 * 16, 4)
                for number in cutlass.range_constexpr(4):
                    v[4 * each + number] = words[number]

    # -- queries, and the new key and value --------------------------------------------------------------------------------------

    @cute.jit
    def load_queries(self, call: LayerCall, token: Int32, head: Int32, stores: Any):
        """Waits for the queries, the key and the value of a token and a key head. Rotates queries and key, and stores all in shared
        memory. If ``stores``, also stores key and value in the cache.

        Eight threads have a query head or the key: each thread has elements d to d + 3, and d + 32 to d + 35. Eight threads have
        the value: each thread has eight consecutive elements.
        """
        attention = call.given.attention
        thread = self.thread()
        row, place = thread // 8, thread % 8
        is_key, is_value = row == GROUP_HEADS, row == GROUP_HEADS + 1
        if row < GROUP_HEADS + 2:
            of_query = head * attention.group + cutlass.min(row, attention.group - 1)
            source = cutlass.select_(is_key, attention.heads + head, of_query)
            source = cutlass.select_(is_value, attention.heads + attention.kv_heads + head, source)
            column = cutlass.select_(is_value, place * 8, place * 4)
            gap = cutlass.select_(is_value, Int32(4), Int32(_HALF))
            cos = [*load_floats("shared", call.angles + place * 16, 4)]
            sin = [*load_floats("shared", call.angles + place * 16 + 4 * _HALF, 4)]
            words = cute.make_rmem_tensor((8,), Uint32)
            words.fill(0)
            at = attention.qkv + Int64(token * attention.qkv_rows + source * HEAD_DIM + column) * 4
            self.load_words_of_all(call, [at, at + Int64(gap) * 4], words, call.tag)
            packed = cute.make_rmem_tensor((4,), Uint32)
            for pair in cutlass.range_constexpr(4):
                packed[pair] = both_values(words[2 * pair], words[2 * pair + 1])
            if row <= GROUP_HEADS:
                x, y = [value_of(words[each]) for each in range(4)], [value_of(words[4 + each]) for each in range(4)]
                low = [x[each] * cos[each] - y[each] * sin[each] for each in range(4)]
                high = [y[each] * cos[each] + x[each] * sin[each] for each in range(4)]
                for pair in cutlass.range_constexpr(2):
                    packed[pair] = pack(self.dtype, low[2 * pair], low[2 * pair + 1])
                    packed[2 + pair] = pack(self.dtype, high[2 * pair], high[2 * pair + 1])
            if (row < GROUP_HEADS) & (row >= attention.group):
                packed.fill(0)
            to = call.rows + cutlass.select_(is_value, Int32(_V_AT), row * Q_PITCH) + column * 2
            store_words_shared(to, [packed[0], packed[1]])
            store_words_shared(to + gap * 2, [packed[2], packed[3]])
            slot_at = attention.slots + Int64(token * attention.slot_words) * 4
            slot = load_int(slot_at, False)
            sign = load_int(slot_at + Int64(attention.slot_words - 1) * 4, False)  # the high word has the sign of an int64
            if stores & (row >= GROUP_HEADS) & (sign >= 0):
                page = slot // attention.page_size
                offset = Int64(page) * attention.page_pitch + Int64(slot - page * attention.page_size) * attention.token_pitch
                cache = cutlass.select_(is_value, call.address(V_CACHE), call.address(K_CACHE))
                cached_at = cache + (offset + Int64(head) * attention.head_pitch + column) * 2
                store_words(cached_at, [packed[0], packed[1]])
                store_words(cached_at + Int64(gap) * 2, [packed[2], packed[3]])

    # -- one tile ----------------------------------------------------------------------------------------------------------------

    def scores_of(self, call: LayerCall, k: cute.Tensor, lane: Int32) -> list:
        """Returns the scores of a tile: for lane 4 g + t, those of query head g and keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The
        queries are loaded again for each tile, because in registers they would be spilled between tiles."""
        at = call.rows + lane // 4 * Q_PITCH + lane % 4 * 16
        q = [*load_words("shared", at, 4), *load_words("shared", at + 64, 4)]
        scores = []
        for row in range(2):
            acc = [Float32(0.0)] * 4
            for each in range(4):
                at = 8 * row + 2 * each
                acc = mma_m16n8k16(self.dtype, acc, (q[2 * each], Uint32(0), q[2 * each + 1], Uint32(0)), (k[at], k[at + 1]))
            scores += [acc[0], acc[1]]
        return scores

    @cute.jit
    def add_values(self, sums: cute.Tensor, factor: Float32, weights: list, v: cute.Tensor):
        """Rescales the accumulators, because the row max may have grown, and adds a tile's values times their weights."""
        left = (pack(self.dtype, weights[0], weights[1]), Uint32(0), pack(self.dtype, weights[2], weights[3]), Uint32(0))
        for element in cutlass.range_constexpr(8):
            order = 0x7632 if element % 2 else 0x5410
            right = [permute_bytes(v[8 * half + element // 2], v[8 * half + 4 + element // 2], order) for half in range(2)]
            acc = [sums[element] * factor, sums[8 + element] * factor, Float32(0.0), Float32(0.0)]
            acc = mma_m16n8k16(self.dtype, acc, left, right)
            sums[element], sums[8 + element] = acc[0], acc[1]

    # -- partial results ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_warp(self, call: LayerCall, warp: Int32, lane: Int32, sums: cute.Tensor, largest: Float32, total: Float32):
        """Stores a warp's results in shared memory: for each query head the unnormalised output, the row max and the row sum."""
        to = call.rows + _WARPS_AT + warp * WARP_BYTES
        for each in cutlass.range_constexpr(4):
            values = [sums[4 * each + number] for number in range(4)]
            store_floats("shared", to + (lane // 4 * HEAD_DIM + lane % 4 * 16 + 4 * each) * 4, values)
        if lane % 4 == 0:
            store_floats("shared", to + _MAXIMA + lane // 4 * 4, [largest])
            store_floats("shared", to + _MAXIMA + (GROUP_HEADS + lane // 4) * 4, [total])

    @cute.jit
    def store_results(self, call: LayerCall, token: Int32, head: Int32, split: Int32, tiles: Int32, whole: Boolean, sink: Float32):
        """Merges the results of the warps that had a tile. Each warp merges one query head, two elements per thread. Stores the
        CTA's partial result, or the attention's output if ``whole``."""
        attention = call.given.attention
        thread = self.thread()
        row, column = thread // 32, thread % 32 * 2
        warps = cutlass.min(tiles, MMA_WARPS)
        if row < attention.group:
            query = head * attention.group + row
            sink = cutlass.select_(whole, sink * LOG2_E, Float32(_NONE))
            source = call.rows + _WARPS_AT
            # Lane w loads the row max and the row sum of warp w.
            lane = thread % 32
            has_keys = lane < warps
            own_at = source + cutlass.min(lane, MMA_WARPS - 1) * WARP_BYTES + _MAXIMA + row * 4
            peak = cutlass.select_(has_keys, load_floats("shared", own_at, 1), Float32(_NONE))
            total = load_floats("shared", own_at + GROUP_HEADS * 4, 1)
            largest = cute.arch.fmax(warp_max(peak), sink)
            factor = cutlass.select_(has_keys, exp2(peak - largest), Float32(0.0))
            total = warp_sum(cutlass.select_(has_keys, total * factor, Float32(0.0)))
            if whole:
                total += exp2(sink - largest)
            low, high = Float32(0.0), Float32(0.0)
            for begin in cutlass.range(0, warps, _ADDED_AT_ONCE, unroll=1):
                for some in cutlass.range_constexpr(_ADDED_AT_ONCE):
                    each = begin + some
                    both = load_floats("shared", source + each * WARP_BYTES + (row * HEAD_DIM + column) * 4, 2)
                    factor_of = cute.arch.shuffle_sync(factor, each)
                    # A warp without keys has stored nothing, and uninitialised memory may hold NaN.
                    low += cutlass.select_(each < warps, both[0] * factor_of, Float32(0.0))
                    high += cutlass.select_(each < warps, both[1] * factor_of, Float32(0.0))
            if whole:
                inverse = 1.0 / total
                to = attention.attended + Int64(token * call.given.width + query * HEAD_DIM + column) * 4
                store_tagged(to, self.rounded(low * inverse), call.tag)
                store_tagged(to + 4, self.rounded(high * inverse), call.tag)
            else:
                to = self.partial_at(call, token, query, split)
                store_number(to + column * 8, low, call.tag)
                store_number(to + column * 8 + 8, high, call.tag)
                if column == 0:
                    store_number(to + HEAD_DIM * 8, largest, call.tag)
                    store_number(to + HEAD_DIM * 8 + 8, total, call.tag)

    def partial_at(self, call: LayerCall, token: Int32, head: Int32, split: Int32) -> Int64:
        """Returns the address of a partial result. ``head``: the query head."""
        attention = call.given.attention
        return attention.partials + Int64(((token * attention.heads + head) << attention.split_bits) + split) * (PARTIAL_WORDS * 8)

    def element_of(self, call: LayerCall, warp: Int32, split: Int32) -> Int32:
        """Returns the first of the four consecutive elements that a lane merges. Elements are counted over all query heads of the
        key head."""
        bits = call.given.attention.split_bits
        own = Int32(GROUP_HEADS * HEAD_DIM) >> bits  # elements of a CTA
        return split * own + warp * (own // _COMBINERS) + (self.thread() % 32 >> bits) * 4

    @cute.jit
    def combine_splits(self, call: LayerCall, warp: Int32, token: Int32, head: Int32, split: Int32):
        """Merges the partial results of all splits, and stores words of the attention's output. A group of ``splits`` lanes merges
        four elements of a query head: each lane loads those of one split, and shuffles add them. A warp has 32 / splits groups."""
        attention = call.given.attention
        lane = self.thread() % 32
        splits = attention.splits
        element = self.element_of(call, warp, split)
        row, column = element // HEAD_DIM, element % HEAD_DIM
        query = head * attention.group + cutlass.min(row, attention.group - 1)
        sink = load_floats("global", call.address(SINKS) + Int64(query) * 4, 1) * LOG2_E
        numbers = cute.make_rmem_tensor((6,), Float32)
        numbers.fill(0.0)
        at = self.partial_at(call, token, query, lane & (splits - 1))
        self.load_numbers_of_all(call, [at + column * 8, at + column * 8 + 16, at + HEAD_DIM * 8], numbers)
        largest = numbers[4]
        for power in cutlass.range_constexpr(SPLITS.bit_length() - 1):
            other = cute.arch.shuffle_sync_bfly(largest, offset=1 << power)
            largest = cutlass.select_(1 << power < splits, cute.arch.fmax(largest, other), largest)
        largest = cute.arch.fmax(largest, sink)
        factor = exp2(numbers[4] - largest)
        results = [numbers[each] * factor for each in range(4)] + [numbers[5] * factor]
        for power in cutlass.range_constexpr(SPLITS.bit_length() - 1):
            for each in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_bfly(results[each], offset=1 << power)
                results[each] += cutlass.select_(1 << power < splits, other, Float32(0.0))
        inverse = 1.0 / (results[4] + exp2(sink - largest))
        if ((lane & (splits - 1)) == 0) & (row < attention.group):
            to = attention.attended + Int64(token * call.given.width + query * HEAD_DIM + column) * 4
            for each in cutlass.range_constexpr(4):
                store_tagged(to + 4 * each, self.rounded(results[each] * inverse), call.tag)
