"""The device code that makes the output of `mla_decode`'s partial results, which CTAs leave of units that several groups share.

It is a launch of its own, behind the one that computes. So no CTA ever waits for another one, which might not run yet.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_store_device import Storer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import Table
from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats_if, pack, store_words
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LOWEST, exp2

COLUMNS = 4  # of a thread
TOGETHER = 2  # rows of a CTA at once
MERGERS = TOGETHER * LATENT // COLUMNS  # threads of a CTA
BATCH = 16  # partial results that are loaded at once
CTAS = 512  # at most, where there are so many units that each CTA has several rows: most units have nothing to merge


def host(config: Config) -> Any:
    """The function that launches a program."""
    return MlaMerge(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for what `host` takes."""
    out = arguments.rows(config.dtype, arguments.size(), config.heads, LATENT)
    return out, *(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(2)), arguments.stream()


@dataclass(frozen=True)
class MergeCall:
    """What a CTA is asked for; see `mla_decode_tile_device.Call`."""

    units: Int32
    q_len: Int32
    out: Table
    lse: Int64
    partial: Int64
    groups: Int32
    rank: Int32


class MlaMerge(Storer):
    """The kernel of one configuration."""

    @cute.jit
    def __call__(self, out: cute.Tensor, partial: Int64, lse: Int64, q_len: Int32, groups: Int32, stream: cuda.CUstream):
        c = self.config
        units = (q_len + (c.tokens_of_tile - 1)) // c.tokens_of_tile
        records = cutlass.min(out.shape[0] // q_len * units, groups)
        shares = cutlass.max(cutlass.min(CTAS // (c.cluster * records), ROWS // TOGETHER), 4)
        to = Table(out.iterator.toint(), out.stride[0], out.stride[1])
        self.kernel(units, q_len, to, lse, partial, groups, shares).launch(
            grid=(shares, c.cluster, records), block=(MERGERS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, units: Int32, q_len: Int32, out: Table, lse: Int64, partial: Int64, groups: Int32, shares: Int32):
        """Merges a CTA's share of the rows of a unit."""
        share, rank, index = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        call = MergeCall(units, q_len, out, lse, partial, groups, rank)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        record = self.record(call, index)
        unit, group, pieces = record[0], record[1], record[2]
        if pieces > 1:
            row = share * TOGETHER + thread // (MERGERS // TOGETHER)
            while row < ROWS:
                to, exists = self.row_of(call, unit, row)
                if exists:
                    self.merge(call, unit, group, pieces, row, thread % (MERGERS // TOGETHER) * COLUMNS, to)
                row += shares * TOGETHER

    @cute.jit
    def merge(self, call: MergeCall, unit: Int32, group: Int32, pieces: Int32, row: Int32, column: Int32, to: Int64):
        """Merges partial results in their order, scaled to the largest maximum of those so far."""
        row_max, row_sum = Float32(LOWEST), Float32(0.0)
        merged = cute.make_rmem_tensor(COLUMNS, Float32)
        merged.fill(0.0)
        for first in cutlass.range(0, pieces, BATCH, unroll=1):
            sums, values = [], []
            for each in cutlass.range_constexpr(BATCH):
                sums_at, values_at = self.piece(call, group, first + each, row)
                exists = first + each < pieces
                sums.append(load_floats_if(exists, sums_at, 2))
                values.append(load_floats_if(exists, values_at + column * 4, COLUMNS))
            raised = row_max
            for each in cutlass.range_constexpr(BATCH):
                raised = cutlass.select_(first + each < pieces, cute.arch.fmax(raised, sums[each][0]), raised)
            decay = exp2(row_max - raised)
            row_max = raised
            row_sum *= decay
            for place in cutlass.range_constexpr(COLUMNS):
                merged[place] *= decay
            for each in cutlass.range_constexpr(BATCH):
                # Where there is none, sum and values are 0, but its maximum may be too large.
                weight = exp2(cute.arch.fmin(sums[each][0], raised) - raised)
                row_sum += weight * sums[each][1]
                for place in cutlass.range_constexpr(COLUMNS):
                    merged[place] += weight * values[each][place]
        factor = self.factor_of(row_sum)
        words = [pack(self.dtype, merged[at] * factor, merged[at + 1] * factor) for at in range(0, COLUMNS, 2)]
        store_words(to + column * 2, words)
        if column == 0:
            self.write_lse(call, unit, row, row_max, row_sum)
