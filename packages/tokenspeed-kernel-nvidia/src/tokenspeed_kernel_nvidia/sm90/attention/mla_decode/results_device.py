"""Addresses of results in global memory: output, LSE, partial results and records. The epilogue and the merge kernel use them."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import store_floats
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LN2
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, RECORD_BYTES, ROWS, Config

RECORD = RECORD_BYTES // 4  # int32 words of a work item's record


@dataclass(frozen=True)
class Results:
    """Addresses of results in global memory. ``call`` is a `tile_device.Call`, or a `MergeCall`."""

    config: Config
    work: Any

    @cute.jit
    def partial_at(self, call: Any, first_group: Int32, nth: Int32):
        """Returns two addresses of a work item's ``nth`` partial result: that of its rows' max and sum, and that of its
        accumulators.

        ``first_group`` is the CTA group in which the item begins. A CTA group writes at most two partial results: one of an item
        that began in an earlier group, and one of an item that begins in this group and continues in the next one. Accumulators are
        in the order of their fragments, so a warp accesses 512 contiguous bytes: see `values_offset`.
        """
        slot = (first_group + nth) * 2 + cutlass.select_(nth == 0, Int32(1), Int32(0))
        at = (slot * self.config.ranks + call.rank) * ROWS
        rows = call.groups * (2 * self.config.ranks * ROWS)
        row_bytes = self.config.row_bytes
        return call.partial + Int64(rows) * row_bytes + Int64(at) * self.config.sums_bytes, call.partial + Int64(at) * row_bytes

    def values_offset(self, warp: Int32, chunk: Int32) -> Int32:
        """Returns the byte offset, among a partial result's accumulators, of a tile of 16 rows x `Config.chunk` columns: tile
        number ``chunk`` of the rows of warp ``warp``.

        Each lane stores 16 bytes of the tile. A lane has the columns ``lane % 4 * 2`` and ``lane % 4 * 2 + 1``. Two elements of row
        ``lane // 4`` come first, then two of row ``lane // 4 + 8``. With `Config.narrow`, the elements 8 columns further follow.
        """
        return (warp * (LATENT // self.config.chunk) + chunk) * (32 * 16)

    def row_sums_offset(self, row: Int32, half: Int32) -> Int32:
        """Returns the byte offset of a row's max and sum in a partial result. ``half``: the value warpgroup that stored the row's
        columns, which matters with `Config.narrow`.
        """
        return row * self.config.sums_bytes + (half * 8 if self.config.narrow else 0)

    @cute.jit
    def record(self, call: Any, index: Int32) -> cute.Pointer:
        """Returns the address of record number ``index``. A record holds a work item, the item's first CTA group, and the number of
        CTA groups among which the item is split.

        There is a record per work item. If items outnumber groups, there is a record per group instead: for the last item that
        begins in the group, if later groups continue that item.
        """
        rows = call.groups * (2 * self.config.ranks * ROWS)
        partial_bytes = self.config.row_bytes + self.config.sums_bytes
        address = call.partial + Int64(rows) * partial_bytes + Int64(index) * (RECORD * 4)
        return cute.make_ptr(Int32, address, cute.AddressSpace.gmem)

    @cute.jit
    def row_of(self, call: Any, item: Int32, row: Int32):
        """Returns the output address of a query row of a work item, and whether the item has this row."""
        first, first_head, tokens = self.work.tile_of(call, item)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        offset = Int64(first + token) * call.out.row + Int64(head) * call.out.column
        return call.out.address + offset * 2, token < tokens

    @cute.jit
    def write_lse(self, call: Any, item: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        """Writes a query row's LSE, if the call requests it."""
        if call.lse != 0:
            to, value = self.lse_of(call, item, row, row_max, row_sum)
            store_floats("global", to, [value])

    @cute.jit
    def lse_of(self, call: Any, item: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        """Returns the address of a query row's LSE, and the LSE (natural logarithm): -inf if no key is visible. ``row_max`` is a
        base-2 exponent."""
        first, first_head, _ = self.work.tile_of(call, item)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        value = (row_max + cute.math.log2(row_sum)) * LN2
        offset = Int64(first + token) * self.config.heads + head
        return call.lse + offset * 4, cutlass.select_(row_sum == 0.0, -Float32.inf, value)


@cute.jit
def factor_of(row_sum: Float32) -> Float32:
    """Returns the factor that normalises a row's accumulator: 1 / row_sum, or 0 if row_sum is 0."""
    return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(row_sum))
