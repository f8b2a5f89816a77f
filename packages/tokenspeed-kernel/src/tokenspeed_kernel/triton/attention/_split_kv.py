"""Paged decode with the keys of a sequence split over programs, planned on the device.

A *unit* is one program's share of one sequence: some blocks of keys, for one key head (or tile of query rows). How many units a
sequence has follows from all lengths, which only the device knows; the grid is fixed by what the host knows (`SplitPlan`), and
programs beyond the last unit return at once. So a captured graph stays right, and evenly loaded, when lengths change.

All units have at most ``share`` blocks, the same number for every sequence (`blocks_a_unit`), and the units of one sequence differ
by one block at most. Each leaves a normalised partial output and its log-sum-exp in float32; `merge_units` makes them one, in a
fixed order. A sequence of a single unit needs none of that: its program writes the result itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, launch_options, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")

_LENGTHS_AT_ONCE = 1024
_MERGED_AT_ONCE = 2048  # elements of partial outputs: 16 a thread
_FEW = 4  # programs of a multiprocessor that take no longer together than one
_MANY = 256  # the same of programs that return at once


class Walk(NamedTuple):
    """How keys are cut into blocks; known when a kernel is compiled.

    Attributes:
        q_len: new tokens of a sequence, at most.
        windowed: whether queries see a window of the keys only.
        block_n: keys of a block.
        at_once: lengths that are looked at together.
    """

    q_len: int
    windowed: bool
    block_n: int
    at_once: int


class Merge(NamedTuple):
    """How `merge_units_kernel` is compiled.

    Attributes:
        heads, group, width: key heads, query heads of each, columns of a value.
        units, rows, block_w: partial results at once, rows of a tile, and ``width`` as a power of two.
        early: whether it may start before the units are made.
    """

    heads: int
    group: int
    width: int
    units: int
    rows: int
    block_w: int
    early: bool


class SplitPlan(NamedTuple):
    """What the host decides from capacities. Lengths are in blocks.

    Attributes:
        batch: sequences.
        units: bounds the units of all sequences together (for one head): the grid.
        most: bounds the units of one sequence; 1 if there is nothing to merge, ever.
        least: blocks of a unit, at least.
        wave: units that run at once; a batch with little work is cut into as many.
        waves_units: units that a batch with much work is cut into.
        long: blocks that make a unit long enough: shares between that and ``1 / wave`` of the work are not cut further.
        at_once: lengths that are looked at together.
    """

    batch: int
    units: int
    most: int
    least: int
    wave: int
    waves_units: int
    long: int
    at_once: int

    def walk(self, q_len: int, window_left: int, block_n: int) -> Walk:
        """How kernels that follow the plan walk the keys of sequences of ``q_len`` new tokens at most."""
        return Walk(q_len, window_left >= 0, block_n, self.at_once)

    def partials(self, heads: int, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for partial outputs ``[units, heads, rows, width]`` and their log-sum-exps ``[units, heads, rows]``."""
        units = self.units if self.most > 1 else 0
        return (
            torch.empty((units, heads, rows, width), dtype=torch.float32, device=device),
            torch.empty((units, heads, rows), dtype=torch.float32, device=device),
        )


def plan_units(
    batch: int, blocks: int, heads: int, at_once: int, waves: int, long: int, least: int = 1, whole: int = 1
) -> SplitPlan:
    """A plan.

    Args:
        blocks: that the longest sequence can have.
        heads: programs of one unit: key heads times tiles of query rows.
        at_once: programs that the device runs at once.
        waves: how often the device is filled where there is much work.
        long, least: see `SplitPlan`.
        whole: no sequence is split where none can have more blocks than this.
    """
    wave = max(1, at_once // heads)
    waves_units = wave * waves
    most = 1 if blocks <= whole else max(1, min(cdiv(blocks, least), waves_units))
    units = batch if most == 1 else min(batch + waves_units, batch * most)
    lengths = min(_LENGTHS_AT_ONCE, max(16, next_power_of_2(batch)))
    return SplitPlan(batch, units, most, least, wave, waves_units, long, lengths)


def merge_units(
    plan: SplitPlan,
    walk: Walk,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    cache_seqlens: Tensor,
    capacity: int,
    window_left: int,
    multiprocessors: int,
    early: bool = False,
    cu_seqlens_q: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """Merges the units of every sequence that has several, and adds the sinks.

    Args:
        walk: what the units were made with, as were ``capacity`` and ``window_left``.
        partial, partial_lse: as `SplitPlan.partials` made them; filled, the log-sum-exp in base 2 and without sinks. Row r of
            head h is token ``r // group`` and query head ``h * group + r % group`` of the sequence.
        capacity: bounds lengths, in tokens.
        lse: contiguous.
        cu_seqlens_q: where a sequence may have fewer than ``walk.q_len`` queries; or, without parts, more: those are passed over.
        parts: int32 ``[batch, 2]``, the first partial result of a sequence and their number (1: there is none), where another
            kernel has decided that.
        early: whether to launch before the kernel that fills the partials has ended; the device waits for it.
    """
    _, heads, rows, width = partial.shape
    block_w = next_power_of_2(width)
    # With few sequences a program merges one row, all of its units at once; with more, all rows of a head. With many, of which few
    # are split, a program takes several heads: most programs only find that their sequence is not split, which is quicker to find
    # where ``parts`` says so.
    programs = (_FEW if parts is None else _MANY) * multiprocessors
    few = plan.batch * heads * rows < programs
    at_once = 1 if few else min(next_power_of_2(rows), max(1, _MERGED_AT_ONCE // (2 * block_w)))
    units = min(next_power_of_2(plan.most), max(2, (2 if few else 1) * _MERGED_AT_ONCE // (block_w * at_once)))
    items = heads * cdiv(rows, at_once)
    device_code.merge_units_kernel[(plan.batch, items if few else min(items, max(1, programs // plan.batch)))](
        partial,
        partial_lse,
        out,
        lse,
        sinks,
        cache_seqlens,
        cu_seqlens_q,
        parts,
        plan.batch,
        capacity,
        window_left,
        plan.least,
        plan.wave,
        plan.waves_units,
        plan.long,
        *out.stride(),
        WALK=walk,
        MERGE=Merge(heads, rows // walk.q_len, width, units, at_once, block_w, early),
        num_warps=4,
        **launch_options(early),
    )
