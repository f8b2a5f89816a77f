"""The device code of `mla_extend`: work items of many new tokens, and how they follow from lengths.

Loads, MMAs, epilogue and merge are those of `mla_decode.kernel_device`. A work item is the tokens that a cluster computes together.
Its index is ``sequence * items + tile``, where ``items`` is the upper bound of a sequence's items. Indices beyond a sequence's
last item are skipped.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl.registers_device import ballot, load_int
from tokenspeed_kernel_nvidia.cutedsl.split_kv_device import SplitKv
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import fp8_kernel_device as mla_decode_fp8_device
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import kernel_device as mla_decode_device
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import merge_device as mla_decode_merge_device
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LEAST_BLOCKS, ROWS, STARTING_BLOCKS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_kernel_device import MlaDecodeFp8
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.kernel_device import MlaDecode
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.merge_device import WARPS, MlaMerge
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import THREADS, Call, Table, Tiles
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import Config, Fp8Config


def host(config: Config | Fp8Config) -> Any:
    """The host function that launches the kernel of a configuration."""
    return MlaExtendFp8(config) if isinstance(config, Fp8Config) else MlaExtend(config)


def fake_arguments(config: Config | Fp8Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `host` with."""
    decode = mla_decode_fp8_device if isinstance(config, Fp8Config) else mla_decode_device
    tensors = decode.fake_arguments(config)[:5]
    scalars = [*(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(4)), Float32(0), *(Int64(0) for _ in range(2))]
    return *tensors, arguments.ints(arguments.size()), *scalars, arguments.stream()


def merge_host(config: Config) -> Any:
    """The host function that launches the merge kernel of a configuration."""
    return MlaExtendMerge(config)


def fake_merge_arguments(config: Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `merge_host` with."""
    out, *scalars, stream = mla_decode_merge_device.fake_arguments(config)
    return out, arguments.ints(arguments.size()), *scalars, stream


class Extender(Tiles):
    """Mixin that maps work items to tokens, and computes what they see.

    Here a call's ``q_len`` is the upper bound of a sequence's new tokens, and ``batch`` the number of sequences.
    """

    @cute.jit
    def queries_of(self, call: Any, sequence: Int32):
        """Returns a sequence's first new token, and its number of new tokens."""
        at = call.cu_seqlens_q + Int64(sequence) * 4
        begin = load_int(at, False)
        return begin, cutlass.max(cutlass.min(load_int(at + 4, False) - begin, call.q_len), 0)

    @cute.jit
    def tokens_of(self, call: Any, item: Int32):
        sequence = item // call.items
        first = (item - sequence * call.items) * self.config.tokens_of_item
        _, count = self.queries_of(call, sequence)
        return sequence, first, cutlass.min(count - first, self.config.tokens_of_item)

    @cute.jit
    def tile_of(self, call: Any, item: Int32):
        sequence, first, tokens = self.tokens_of(call, item)
        begin, _ = self.queries_of(call, sequence)
        own = self.tokens_before(call)
        head = call.rank * ROWS if self.config.heads > ROWS else Int32(0)
        return begin + first + own, head, cutlass.max(cutlass.min(tokens - own, self.config.tokens_of_tile), 0)

    def tokens_before(self, call: Any) -> Int32:
        """Returns the index, in a work item, of this CTA's first token."""
        return call.rank * self.config.tokens_of_tile if self.config.heads <= ROWS else Int32(0)

    @cute.jit
    def next_item(self, call: Call, item: Int32) -> Int32:
        sequence, after = item // call.items, item + 1
        _, count = self.queries_of(call, sequence)
        if (after - sequence * call.items) * self.config.tokens_of_item >= count:
            sequence += 1
            is_empty = Boolean(True)
            while is_empty and sequence < call.batch:
                _, count = self.queries_of(call, sequence)
                is_empty = count == 0
                if is_empty:
                    sequence += 1
            after = sequence * call.items
        return after

    def most_items(self, call: Call) -> Int32:
        """Returns more than the number of groups: the true number depends on lengths, which are on the device."""
        return call.groups + 1

    @cute.jit
    def length_of(self, call: Call, item: Int32):
        sequence = cutlass.min(item // call.items, call.batch - 1)
        first = (item - item // call.items * call.items) * self.config.tokens_of_item
        length, before, count = self.lengths_of(call, sequence)
        end = before + cutlass.min(first + self.config.tokens_of_item, count)
        return cutlass.select_(call.is_causal != 0, end, length)

    @cute.jit
    def lengths_of(self, call: Call, sequence: Int32):
        """Returns a sequence's tokens in the cache, those before its new tokens, and the number of new tokens."""
        length = cutlass.min(load_int(call.cache_seqlens + Int64(sequence) * 4, False), call.max_seqlen_k)
        length = cutlass.max(length, 0)
        _, count = self.queries_of(call, sequence)
        return length, cutlass.max(length - count, 0), count

    # -- tile scheduler --------------------------------------------------------------------------------------------------------

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, blocks: Int32):
        """Returns the queue positions per group, and 0: `positions_of` already counts the starting cost of each work item."""
        return cutlass.max((total + call.groups - 1) // call.groups, LEAST_BLOCKS + STARTING_BLOCKS), Int32(0)

    @cute.jit
    def tiles_of(self, call: Call, step: Int32, at_once: cutlass.Constexpr[int], lengths: cute.Tensor, counts: cute.Tensor):
        """Computes the queue positions of this lane's sequences of a round. Returns their sum."""
        some = Int32(0)
        for each in cutlass.range_constexpr(at_once):
            sequence = (step * 32 + cute.arch.lane_idx()) * at_once + each
            length, before, count = self.lengths_of(call, cutlass.min(sequence, call.batch - 1))
            tiles = (count + (self.config.tokens_of_item - 1)) // self.config.tokens_of_item
            positions = self.positions_of(call, length, before, count, tiles)
            lengths[each] = length
            counts[each] = cutlass.select_(sequence < call.batch, positions, Int32(0))
            some += counts[each]
        return some

    @cute.jit
    def positions_of(self, call: Call, length: Int32, before: Int32, count: Int32, items: Int32):
        """Returns the queue positions of a sequence's first ``items`` work items: their blocks, and `STARTING_BLOCKS` each.

        With causal attention, item i, if it has all its T tokens, ends at ``before + (i + 1) * T``. So it has
        ``(before + 63 + (i + 1) * T) // 64`` blocks. As T divides 64, this equals ``(start + i) // (64 / T)``.

        Args:
            length, before, count: see `lengths_of`.
        """
        tokens = self.config.tokens_of_item
        all_items = (count + (tokens - 1)) // tokens
        whole = cutlass.min(items, all_items - 1)
        start = (before + (ROWS - 1 + tokens)) // tokens
        blocks = self.sum_of_quotients(start + whole) - self.sum_of_quotients(start)
        blocks += cutlass.select_(items == all_items, (before + count + (ROWS - 1)) // ROWS, Int32(0))
        alike = items * cutlass.max((length + (ROWS - 1)) // ROWS, 1)
        positions = cutlass.select_(call.is_causal != 0, blocks, alike) + items * STARTING_BLOCKS
        return cutlass.select_(items > 0, positions, Int32(0))

    @cute.jit
    def sum_of_quotients(self, end: Int32):
        """Returns the sum of ``n // (64 / T)`` for all n from 0 to ``end - 1``."""
        each = ROWS // self.config.tokens_of_item
        parts = end // each
        return parts * (parts - 1) // 2 * each + (end - parts * each) * parts

    @cute.jit
    def divide(self, call: Call, at_once: cutlass.Constexpr[int]):
        """`SplitKv.divide` finds the sequence; then a 32-way search finds the work item in it."""
        sequence, _, offset, left, per_group, _ = SplitKv.divide(self, call, at_once)
        lane = cute.arch.lane_idx()
        length, before, count = self.lengths_of(call, sequence)
        first = Int32(0)
        width = (count + (self.config.tokens_of_item - 1)) // self.config.tokens_of_item
        while width > 1:
            step = (width + 31) // 32
            skipped = lane * step
            positions = self.positions_of(call, length, before, count, first + cutlass.min(skipped, width))
            found = cute.arch.popc(ballot((skipped < width) & (positions <= offset))) - 1
            first += found * step
            width = cutlass.min(width - found * step, step)
        offset -= self.positions_of(call, length, before, count, first)
        item = sequence * call.items + first
        return item, self.length_of(call, item), offset, left, per_group, Int32(STARTING_BLOCKS)

    # -- masks -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def mask_scores(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Any, rope_at: Any):
        if valid < ROWS + (self.config.tokens_of_item - 1):
            self.hide(call, scores, item, valid)
            self.clear_beyond(call, end, valid)

    @cute.jit
    def hide(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32):
        c = self.config
        thread = self.thread_of_scores()
        row = (thread >> 5) * 16 + ((thread & 31) >> 2)
        limit = valid
        if cutlass.const_expr(c.tokens_of_item > 1):
            _, _, tokens = self.tokens_of(call, item)
            # End of what the first token of this CTA's tile sees.
            limit = cutlass.select_(call.is_causal != 0, valid - (tokens - 1) + self.tokens_before(call), valid)
        for r in cutlass.range_constexpr(2):
            seen = limit
            if cutlass.const_expr(c.tokens_of_tile > 1):
                seen = limit + cutlass.select_(call.is_causal != 0, (row + 8 * r) // c.heads_of_tile, Int32(0))
            masks.hide_from(scores, r, seen - (thread & 3) * 2)

    # -- the launch ------------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        is_causal: Int32,
        groups: Int32,
        scale: Float32,
        q_scale: Int64,
        kv_scale: Int64,
        stream: cuda.CUstream,
    ):
        c = self.config
        self.kernel(
            *self.blocks_of(q, kv_cache), Table(page_table.iterator.toint(), page_table.stride[0], page_table.stride[1]),
            cache_seqlens.iterator.toint(), cache_seqlens.shape[0], items_of(c, q_len), q_len, max_seqlen_k,
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), lse, partial, groups, cute.arch.popc(kv_cache.shape[1] - 1),
            scale, q_scale, kv_scale, cu_seqlens_q.iterator.toint(), is_causal, self.make_qk_mmas(), self.make_pv_mma(),
        ).launch(
            grid=(c.cluster * groups, 1, 1), block=(THREADS, 1, 1), cluster=(c.cluster, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip


def items_of(config: Config, q_len: Int32) -> Int32:
    """Returns the upper bound of a sequence's work items."""
    return (q_len + (config.tokens_of_item - 1)) // config.tokens_of_item


class MlaExtend(Extender, MlaDecode):
    """The MLA extend kernel of one configuration: `MlaDecode` over work items of many new tokens."""


class MlaExtendFp8(Extender, MlaDecodeFp8):
    """The MLA extend kernel of one configuration for an e4m3 cache."""


class MlaExtendMerge(Extender, MlaMerge):
    """The kernel that merges partial results; the grid has a record per group."""

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        ctas = self.ctas_of_item(groups)
        to = Table(out.iterator.toint(), out.stride[0], out.stride[1])
        self.kernel(items_of(c, q_len), q_len, to, lse, partial, groups, ctas, cu_seqlens_q.iterator.toint()).launch(
            grid=(ctas, c.ranks, groups), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )
