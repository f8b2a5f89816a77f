"""RMSNorm, router and top-k of the persistent kernel.

Every CTA normalises all tokens, because each CTA needs all tokens for the experts. A CTA computes the logits of some experts only,
and the CTAs exchange the logits. Then every CTA selects the experts of all tokens, one warp per token. So all CTAs have the same
lists of (token, slot) pairs without exchanging them.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, relaxed_add, store_number, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, opt_barrier, pack, store_floats, widened
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.layers.config import ACTIVATED, LOGITS, TOTALS
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, store_tagged, value_of, warp_sum
from tokenspeed_kernel_nvidia.sm90.layers.gemm_device import BFLOAT16, CHUNK
from tokenspeed_kernel_nvidia.sm90.layers.project_device import Project
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import NORM, ROUTER_BIAS, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.route import select_device
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import FINISHERS, MAX_TOP_K, MMA_WARPS
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import CHUNK as ROW_CHUNK
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import ROW_THREADS, ROW_WARPS, Rows, shared_int
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import ENTRIES, W13, entry_code, entry_of, index_of, kind_of

_SPLITTING = 3  # the named barrier of the warps that prepare a row for the experts while another warp waits for the logits
_SLOTS_AT_ONCE = 2  # slots of a token whose results a thread loads at once


class Route(Project):
    """The part of the kernel that normalises and routes. All MMA warps call these methods."""

    @cute.jit
    def load_route_operands(self, call: LayerCall):
        """Loads a thread's part of the norm's weights and the bias of its logit, unconverted. These loads are issued before the
        projection, which hides their latency.
        """
        thread = self.thread()
        hidden = call.layer.hidden
        norm = [*load_words("global", call.address(NORM) + cutlass.min(thread * CHUNK, hidden - CHUNK) * 2, 4)]
        live = thread < call.tokens * call.expert_count
        _, expert = self.logit_of_thread(call, thread)
        return norm, Vector(call.address(ROUTER_BIAS), Int32(BFLOAT16)).load(expert, live)

    @cute.jit
    def logit_of_thread(self, call: LayerCall, thread: Int32):
        """Returns the token and the expert of a thread's logit."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        experts = cutlass.max(call.expert_count, 1)
        token = thread // experts
        return token, cta + (thread - token * experts) * ctas

    @cute.jit
    def route(self, call: LayerCall, warp: Int32, norm: list, bias: Uint32):
        """Makes the lists of pairs in shared memory, from the words of ``totals``.

        Args:
            norm, bias: this thread's part of the norm's weights, and the bias of its logit, from `load_route_operands`.
        """
        ctas, _, _ = cute.arch.grid_dim()
        self.await_all(call, warp, TOTALS, ctas)
        # `load_rows` overwrites the projection's operands. All warps have synchronised since their last read of these operands.
        self.load_rows(call, warp, call.given.totals, call.tag, self.normed_at(call, Int32(0)), self.config.normed_pitch)
        self.synchronise()
        self.normalise(call, warp, norm)
        self.synchronise()
        self.store_logits(call, bias)
        self.publish(call, LOGITS)
        if const_expr(self.config.tokens == 1):
            # The last `ROW_WARPS` warps prepare the only row for the experts, while warp 0 waits for the logits.
            if warp >= MMA_WARPS - ROW_WARPS:
                self.split_token(call)
            elif warp == 0:
                if const_expr(LOGITS in self.config.counted):
                    self.await_count(call, call.counter(LOGITS), ctas)
                self.select_experts(call, warp)
        else:
            self.await_all(call, warp, LOGITS, ctas)
            if warp < call.tokens:
                self.select_experts(call, warp)
        self.synchronise()
        if warp == 0:
            lane = cute.arch.lane_idx()
            expert = Int32(-1)
            if lane < call.tokens * call.layer.top_k:
                expert = call.chosen[lane]
            if const_expr(self.config.tokens == 1):
                self.list_slots(call, expert)
            else:
                self.list_few_pairs(call, expert)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(call.routed)
        cute.arch.mbarrier_wait(call.routed, call.index & 1)

    def normed_at(self, call: LayerCall, token: Int32) -> Int32:
        """Returns the shared-memory address of a normalised token."""
        return Int32(call.x) + token * self.config.normed_pitch

    @cute.jit
    def normalise(self, call: LayerCall, warp: Int32, norm: list):
        """Normalises the tokens in shared memory, and stores the warps' partial sums of this CTA's logits."""
        thread = self.thread()
        hidden = call.layer.hidden
        live = thread * CHUNK < hidden
        column = cutlass.min(thread * CHUNK, hidden - CHUNK)
        factors = []
        for word in norm:
            factors += [*widened(self.dtype, word)]
        experts = call.expert_count
        cute.arch.mbarrier_wait(call.router_full, call.index & 1)
        for token in cutlass.range(call.tokens, unroll=1):
            scale = self.scale_of(call, token)
            at = self.normed_at(call, token) + column * 2
            words, values = [], []
            for pair, word in enumerate(load_words("shared", at, 4)):
                low, high = widened(self.dtype, word)
                normed = pack(self.dtype, low * scale * factors[2 * pair], high * scale * factors[2 * pair + 1])
                words.append(normed)
                values += [*widened(self.dtype, normed)]
            if live:
                store_words_shared(at, words)
            for index in cutlass.range(experts, unroll=1):
                total = Float32(0.0)
                for pair, word in enumerate(load_words("shared", call.router_at + (index * hidden + column) * 2, 4)):
                    low, high = widened(self.dtype, word)
                    total += low * values[2 * pair]
                    total += high * values[2 * pair + 1]
                total = warp_sum(cutlass.select_(live, total, Float32(0.0)))
                if cute.arch.lane_idx() == 0:
                    store_floats("shared", call.partials_at + ((token * experts + index) * MMA_WARPS + warp) * 4, [total])

    @cute.jit
    def store_logits(self, call: LayerCall, bias: Uint32):
        """Adds the warps' partial sums and the bias, and stores the words of this CTA's logits."""
        thread = self.thread()
        if thread < call.tokens * call.expert_count:
            token, expert = self.logit_of_thread(call, thread)
            total = Float32(0.0)
            for each in cutlass.range_constexpr(MMA_WARPS // 4):
                for part in load_floats("shared", call.partials_at + (thread * MMA_WARPS + 4 * each) * 4, 4):
                    total += part
            word = self.rounded(total + Vector(Int64(0), Int32(BFLOAT16)).number(bias))
            store_tagged(call.given.logits + Int64(token * call.layer.experts + expert) * 4, word, call.tag)

    @cute.jit
    def load_logits(self, call: LayerCall, token: Int32, words: cute.Tensor):
        """Waits for a lane's four logits of a token, and loads their words."""
        experts = call.layer.experts
        first = cutlass.min(cute.arch.lane_idx() * 4, experts - 4)
        self.load_words_of_all(call, [call.given.logits + Int64(token * experts + first) * 4], words, call.tag)

    @cute.jit
    def select_experts(self, call: LayerCall, token: Int32):
        """Selects a token's experts, and stores them and their weights in shared memory. One warp calls this method.

        The weights are the softmax over the selected logits.
        """
        lane = cute.arch.lane_idx()
        experts, top_k = call.layer.experts, call.layer.top_k
        first = cutlass.min(lane * 4, experts - 4)
        words = cute.make_rmem_tensor((4,), Uint32)
        words.fill(0)
        self.load_logits(call, token, words)
        keys = cute.make_rmem_tensor((4,), Int32)
        for each in cutlass.range_constexpr(4):
            key = select_device.key_of(words[each], first + each)
            keys[each] = cutlass.select_(lane * 4 < experts, key, Int32(select_device.NONE))
        expert, weight = select_device.select_experts(keys, top_k)
        if lane < top_k:
            call.chosen[token * top_k + lane] = expert
            store_floats("shared", Int32(call.weights) + (token * top_k + lane) * 4, [weight])

    @cute.jit
    def list_slots(self, call: LayerCall, expert: Int32):
        """Makes the lists of `list_few_pairs` for one token, whose experts are distinct. ``expert``: of this lane's slot, or -1."""
        lane = cute.arch.lane_idx()
        call.experts_of_pairs[lane] = expert
        if expert >= 0:
            call.order[lane] = lane
            call.entries[lane] = entry_code(expert, lane, Int32(1))
        if lane == 0:
            call.sizes[ENTRIES] = call.layer.top_k

    @cute.jit
    def split_token(self, call: LayerCall):
        """Splits the elements of the only token's row into fp8 parts, the operand of w13's MMAs, see `rows_device` of `stream`. The
        row is the same for all entries of w13, so it is split once. `ROW_WARPS` warps call this method."""
        thread = self.thread() % ROW_THREADS
        numbers = [Uint32(0)] * self.chunk_words
        if thread * ROW_CHUNK < call.layer.hidden:
            at = self.normed_at(call, Int32(0)) + thread * (2 * ROW_CHUNK)
            numbers = [*load_words("shared", at, 4), *load_words("shared", at + 16, 4)]
        largest = cute.arch.warp_redux_sync(self.largest_of(numbers), "max")
        maxima = shared_int(call.maxima)
        if thread % 32 == 0:
            maxima[thread // 32] = largest
        cute.arch.barrier(barrier_id=_SPLITTING, number_of_threads=ROW_THREADS)
        largest = cute.arch.warp_redux_sync(maxima[cute.arch.lane_idx() % ROW_WARPS], "max")
        self.store_row(call, Int32(0), call.layer.w13_blocks * (BLOCK // ROW_CHUNK), largest, numbers)

    # -- methods that `stream` calls ---------------------------------------------------------------------------------------------

    @cute.jit
    def prepare_rows(self, call: LayerCall, item: Int32, factors: cute.Tensor):
        if const_expr(self.config.tokens == 1):
            if kind_of(item) == W13:  # see `split_token`
                self.take_rows(call, item, entry_of(call.entries[index_of(item)]), factors)
            else:
                Rows.prepare_rows(self, call, item, factors)
        else:
            Rows.prepare_rows(self, call, item, factors)

    @cute.jit
    def await_activations(self, call: LayerCall, warp: Int32, item: Int32):
        if const_expr(ACTIVATED in self.config.counted):
            self.meet(call, warp, call.counter(ACTIVATED + index_of(item)), call.layer.w13_items * FINISHERS)

    @cute.jit
    def count(self, call: LayerCall, item: Int32, items: Int32):
        # Results of w2 need no counter: few threads of a CTA read them, so these threads poll the results themselves.
        if const_expr(ACTIVATED in self.config.counted):
            if kind_of(item) == W13:
                relaxed_add(call.counter(ACTIVATED + index_of(item)), items)

    def store_activated(self, call: LayerCall, place: Int64, value: Float32) -> None:
        store_tagged(call.activated + place * 4, self.rounded(value), call.tag)

    def store_slot(self, call: LayerCall, place: Int64, value: Float32) -> None:
        store_number(call.slots + place * 8, value, call.tag)

    def address_of_row(self, call: LayerCall, first: Any, pair: Int32) -> Int64:
        """Returns the address of a pair's row of activations.

        Args:
            first: whether the row is an operand of w13: the normalised token, in shared memory. The operand of w2 is the activated
                result of w13: tagged words in global memory.
        """
        token_at = call.x + Int64(pair // call.layer.top_k) * (call.x_stride * 2)
        return cutlass.select_(first, token_at, call.activated + Int64(pair) * (call.layer.intermediate * 4))

    @cute.jit
    def words_of_row(self, call: LayerCall, row_at: Int64, at: Int32, first: Any) -> Any:
        """Loads sixteen elements of a row, see `address_of_row`. Waits until the words of w13's result have arrived."""
        words = [Uint32(0)] * 8
        at = opt_barrier(at)  # otherwise addresses would be computed before the loop over layers, and would occupy registers
        if first:
            address = Int32(row_at) + at * 2
            words = [*load_words("shared", address, 4), *load_words("shared", address + 16, 4)]
        else:
            tagged = cute.make_rmem_tensor((16,), Uint32)
            tagged.fill(0)
            self.load_words_of_all(call, [row_at + Int64(at) * 4 + 16 * each for each in range(4)], tagged, call.tag)
            words = [both_values(tagged[2 * each], tagged[2 * each + 1]) for each in range(8)]
        return words

    @cute.jit
    def two_numbers(self, row: Int64, first: Any, at: Int32):
        """Returns two consecutive elements of a row, as float32. This method does not wait: the MMA warps have waited for the whole
        row in `words_of_row`."""
        numbers = [Float32(0.0), Float32(0.0)]
        if first:
            numbers = [*widened(self.dtype, load_words("shared", Int32(row) + at * 2, 1))]
        else:
            numbers = [value_of(word) for word in load_words("relaxed.gpu.global", row + Int64(at) * 4, 2)]
        return numbers

    @cute.jit
    def sum_of_slots(self, call: LayerCall, token: Int32, column: Int32):
        """Waits for the results of w2 of all of a token's slots, and returns four consecutive elements of their sum. Slots are
        added in order, so the result has the same bits in every run."""
        top_k = call.layer.top_k
        total = [Float32(0.0)] * 4
        for first in cutlass.range_constexpr(0, MAX_TOP_K, _SLOTS_AT_ONCE):
            if first < top_k:
                numbers = cute.make_rmem_tensor((_SLOTS_AT_ONCE * 4,), Float32)
                numbers.fill(0.0)
                addresses = []
                for some in cutlass.range_constexpr(_SLOTS_AT_ONCE):
                    # Beyond the last slot, load the last slot again without adding it, so that there is no branch.
                    pair = token * top_k + cutlass.min(first + some, top_k - 1)
                    at = call.slots + (Int64(pair) * call.layer.hidden + column) * 8
                    addresses += [at, at + 16]
                self.load_numbers_of_all(call, addresses, numbers)
                for some in cutlass.range_constexpr(_SLOTS_AT_ONCE):
                    for each in cutlass.range_constexpr(4):
                        total[each] += cutlass.select_(first + some < top_k, numbers[4 * some + each], Float32(0.0))
        return total

    def routing_weight(self, call: LayerCall, pair: Int32) -> Float32:
        return load_floats("shared", Int32(call.weights) + pair * 4, 1)
