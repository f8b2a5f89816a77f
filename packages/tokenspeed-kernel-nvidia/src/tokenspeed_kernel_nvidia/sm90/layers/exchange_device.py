"""Exchange of activations among all CTAs through tagged words and numbers in global memory, and waits that give up.

A tagged word has 32 bits: a bfloat16 in the upper half, and the layer's tag in the lower half. A tagged number has 64 bits: a
float32 and the tag. One instruction stores both the value and the tag. So a reader that polls the word until it has the layer's tag
also has the value, and the writer needs no fence and no flag. The tag counts layers, over launches too. Every word is written in
every layer. So the former tag of a word is always the preceding layer's, and 16 bits suffice.

Polls of many threads delay the writers' stores. So most readers first wait for a counter, and then load the words. Writers increase
the counter without a fence, because a fence waits for all stores: fences took 3 us of a layer. So the counter does not prove that
the words have arrived; it says when to begin polling them. Only the tags prove it.

If several GPUs share the layers, a layer has two sums over ranks: projection plus input, and the layer's output. Each rank stores
its addends in the memory of every rank, and each CTA that reads a row adds the addends itself. So a sum needs only this one
exchange. All ranks add in the order of ranks, and get the same bits. A word of an addend keeps more precision than bfloat16: it has
the upper 24 bits of a float32, and 8 bits of the tag.

No addend is overwritten before all CTAs have read it. The two sums alternate. Before a CTA stores its addends of a sum again, it
has read the addends of the other sum from all CTAs of all ranks. Each of those CTAs stored them after it had read the former
addends of the first sum. So a former tag is the preceding layer's here too, and 8 bits suffice.

Counters count this GPU's CTAs only: counters of the other ranks' stores made a layer of one token 0.7 us slower. A thread first
loads the words of all ranks, then only those ranks' words that have not arrived. For one token this is 0.5 us faster than loading
all ranks' words again.

A wait that polls too often sets the error flag and continues with the words that it has read. After that no wait of the CTA polls
more than once. So a launch always ends, for example if another GPU fails. The launch's results are then NaN.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_number, load_words, relaxed_add, release_add
from tokenspeed_kernel_nvidia.cutedsl.registers_device import opt_barrier, pack, permute_bytes, widened
from tokenspeed_kernel_nvidia.sm90.layers.config import FAILED
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import GIVEN_UP, LayerCall, storage_of
from tokenspeed_kernel_nvidia.sm90.moe.stream.kernel_device import Stream
from tokenspeed_kernel_nvidia.sm90.moe.stream.mma_device import CONSUMING
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import PREPARING_THREADS, as_float


def load_tagged(address: Any, scope: str = "gpu") -> Any:
    """Loads four words that other CTAs may be writing. ``scope``: ``"sys"`` if these CTAs may be on other GPUs."""
    return load_words(f"relaxed.{scope}.global", address, 4)


def store_tagged(address: Any, value: Any, tag: Any) -> None:
    """Stores a tagged word. ``value``: the bfloat16 in the upper half, any bits in the lower half."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a; lop3.b32 a, {$r1}, 0xFFFF0000, {$r2}, 0xEA; st.relaxed.gpu.global.b32 [{$r0}], a; }",
        read_only_args=[address, value, tag],
    )


def store_addend(address: Any, value: Float32, tag: Any) -> None:
    """Stores an addend of a sum over ranks, rounded toward zero, with 8 bits of the tag."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a, b; and.b32 a, {$r2}, 0xFF; mov.b32 b, {$r1}; lop3.b32 a, b, 0xFFFFFF00, a, 0xEA;"
        " st.relaxed.sys.global.b32 [{$r0}], a; }",
        read_only_args=[address, value, tag],
    )


def value_of(word: Uint32) -> Float32:
    """Returns the value of a tagged word."""
    return widened(cutlass.BFloat16, word)[1]


def both_values(first: Uint32, second: Uint32) -> Uint32:
    """Packs the values of two tagged words into one register."""
    return permute_bytes(first, second, 0x7632)


class Exchange(Stream):
    """The part of the kernel that waits for other CTAs."""

    def storage(self) -> Any:
        return storage_of(self.config)

    @cute.jit
    def synchronise(self):
        """Synchronises all MMA warps."""
        cute.arch.barrier(barrier_id=CONSUMING, number_of_threads=PREPARING_THREADS)

    @cute.jit
    def thread(self) -> Int32:
        """Returns the thread's index, opaque to the compiler. Otherwise values of each step would be computed before the loop over
        layers, and would occupy registers in all steps.
        """
        thread, _, _ = cute.arch.thread_idx()
        return opt_barrier(thread)

    @cute.jit
    def polls_of(self, call: LayerCall) -> Int32:
        """Returns how often a warp may poll: once, if a wait of this CTA has given up before."""
        return cutlass.select_(call.kept[GIVEN_UP] == 0, call.given.polls, Int32(1))

    @cute.jit
    def give_up(self, call: LayerCall):
        """Sets the error flag."""
        call.kept[GIVEN_UP] = Int32(1)
        release_add(call.given.head + 4 * FAILED, Int32(1))

    @cute.jit
    def meet(self, call: LayerCall, warp: Int32, flag: Int64, value: Int32):
        """Makes all MMA warps wait for a counter, like `Stream.meet`, but with a limited number of polls and relaxed loads. So the
        method does not order other accesses; readers of words check the words' tags anyway."""
        if warp == 0:
            self.await_count(call, flag, value)
        self.synchronise()

    @cute.jit
    def await_count(self, call: LayerCall, counter: Int64, value: Int32):
        """Makes one warp wait for a counter; see `meet`."""
        if cute.arch.lane_idx() == 0:
            left = self.polls_of(call)
            found = Int32(load_words("relaxed.gpu.global", counter, 1))
            while (found != value) & (left > 0):
                found = Int32(load_words("relaxed.gpu.global", counter, 1))
                left -= 1
            if found != value:
                self.give_up(call)
        cute.arch.sync_warp()

    @cute.jit
    def tell_all(self, call: LayerCall, index: cutlass.Constexpr[int]):
        """Adds 1 to a counter of the layer, when all MMA warps have stored their words. All MMA warps call this method."""
        self.synchronise()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            relaxed_add(call.counter(index), Int32(1))

    @cute.jit
    def publish(self, call: LayerCall, index: cutlass.Constexpr[int]):
        """Announces this CTA's stores of words, after these stores. Does nothing if readers poll the words themselves."""
        if const_expr(index in self.config.counted):
            self.tell_all(call, index)

    @cute.jit
    def await_all(
        self, call: LayerCall, warp: Int32, index: cutlass.Constexpr[int], value: Int32, behind: cutlass.Constexpr[int] = 0
    ):
        """Waits until the counter of an exchange equals ``value``, before loads of words. Does nothing if the loads themselves poll
        the words. ``behind``: how many layers earlier the words were stored."""
        if const_expr(index in self.config.counted):
            self.meet(call, warp, call.counter_of(opt_barrier(call.index) - behind, index), value)

    @cute.jit
    def load_words_of_all(self, call: LayerCall, addresses: list, words: cute.Tensor, tag: Int32):
        """Loads four words at each address, and repeats all loads until all words have the tag."""
        left = self.polls_of(call)
        missing = Int32(1)
        while (missing != 0) & (left > 0):
            missing = Int32(0)
            for each in cutlass.range_constexpr(len(addresses)):
                four = load_tagged(addresses[each])
                for number in cutlass.range_constexpr(4):
                    words[4 * each + number] = four[number]
                    missing |= (Int32(four[number]) ^ tag) & 0xFFFF
            left -= 1
        if missing != 0:
            self.give_up(call)

    @cute.jit
    def load_numbers_of_all(self, call: LayerCall, addresses: list, numbers: cute.Tensor):
        """Loads two tagged numbers at each address, and repeats all loads until all numbers have the layer's tag."""
        left = self.polls_of(call)
        missing = Int32(1)
        while (missing != 0) & (left > 0):
            missing = Int32(0)
            for each in cutlass.range_constexpr(len(addresses)):
                words = load_number(addresses[each])
                for number in cutlass.range_constexpr(2):
                    numbers[2 * each + number] = as_float(words[2 * number])
                    missing |= Int32(words[2 * number + 1]) ^ call.tag
            left -= 1
        if missing != 0:
            self.give_up(call)

    # -- sums over ranks ---------------------------------------------------------------------------------------------------------

    def addends_at(self, call: LayerCall, row: Int64, element: Any, rank: Any) -> Int64:
        """Returns the address of a rank's word. ``row``: the address of the words of rank 0 ``[tokens, hidden]``; ``element``: an
        index in these words."""
        return row + (Int64(rank) * (call.given.tokens * call.layer.hidden) + element) * 4

    @cute.jit
    def load_addends(self, call: LayerCall, addresses: list, words: cute.Tensor, tag: Int32):
        """Loads four words of each rank at each address, see `addends_at`, until all have the tag.

        Args:
            addresses: for each rank, the addresses of its words.
            words: receives the words, in the order of ranks and addresses.
        """
        ranks = len(addresses)
        left = self.polls_of(call)
        missing = cute.make_rmem_tensor((ranks,), Int32)
        lacks = Int32(0)
        for rank in cutlass.range_constexpr(ranks):
            missing[rank] = self.load_words_of(addresses, rank, words, tag)
            lacks |= missing[rank]
        while (lacks != 0) & (left > 0):
            lacks = Int32(0)
            for rank in cutlass.range_constexpr(ranks):
                if missing[rank] != 0:
                    missing[rank] = self.load_words_of(addresses, rank, words, tag)
                lacks |= missing[rank]
            left -= 1
        if lacks != 0:
            self.give_up(call)

    def load_words_of(self, addresses: list, rank: int, words: cute.Tensor, tag: Int32) -> Int32:
        """Loads four words of a rank at each address, see `load_addends`. The result is not 0 if a word lacks the tag."""
        missing, count = Int32(0), len(addresses[rank])
        for each, address in enumerate(addresses[rank]):
            for number, word in enumerate(load_tagged(address, "sys")):
                words[4 * (rank * count + each) + number] = word
                missing |= (Int32(word) ^ tag) & 0xFF
        return missing

    def sum_of(self, words: list) -> Uint32:
        """Returns the sum of the ranks' words of an element, rounded to bfloat16. Both halves of the result hold the sum."""
        if const_expr(self.config.ranks == 1):
            return words[0]
        total = as_float(words[0] & Uint32(0xFFFFFF00))
        for word in words[1:]:
            total += as_float(word & Uint32(0xFFFFFF00))
        return self.rounded(total)

    @cute.jit
    def send(self, call: LayerCall, row: Int64, element: Any, values: list, tag: Int32):
        """Stores this rank's addends of consecutive elements in the memory of all ranks, see `addends_at`."""
        own = self.addends_at(call, row, element, call.given.rank)
        for number, value in enumerate(values):
            store_addend(own + 4 * number, value, tag)
        for other in cutlass.range_constexpr(self.config.ranks - 1):
            to = own + call.others[other]
            for number, value in enumerate(values):
                store_addend(to + 4 * number, value, tag)

    def token_and_row(self, thread: Int32, rows: Int32) -> Any:
        """Returns the token and the row (among this CTA's rows of weights) of the result that a thread stores. For one token, this
        avoids an integer division, which takes about 0.05 us."""
        if const_expr(self.config.tokens == 1):
            return Int32(0), thread
        token = thread // cutlass.max(rows, 1)
        return token, thread - token * rows

    def rounded(self, x: Float32) -> Uint32:
        """Rounds to bfloat16. Both halves of the result hold the value."""
        return pack(self.dtype, x, x)


@cute.jit
def warp_sum(x: Float32) -> Float32:
    """Returns the sum over all lanes, in a fixed order."""
    for power in cutlass.range_constexpr(5):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << power)
    return x


@cute.jit
def warp_max(x: Float32) -> Float32:
    """Returns the maximum over all lanes."""
    for power in cutlass.range_constexpr(5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << power))
    return x
