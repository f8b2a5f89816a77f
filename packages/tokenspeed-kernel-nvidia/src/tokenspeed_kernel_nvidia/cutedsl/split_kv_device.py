"""Split-KV load balancing of the decode kernels: divides the KV tiles of all sequences evenly among CTA groups.

The division is computed on the device from the sequence lengths, so a captured CUDA graph stays balanced when lengths change.

A kernel passes an object ``work``, a frozen dataclass with four methods. ``length_of`` returns a sequence's length. ``visible``
returns a sequence's range of visible tiles. ``tiles_of`` returns the tile counts of some sequences (see the function `tiles_of`).
``tiles_per_group`` takes the call, the number of tiles of all sequences, and that of the first sequence. It returns the number of
tiles per group, and the fixed cost, in tiles, of starting a sequence. This cost counts as extra tiles ahead of each sequence's own
tiles, and is part of a group's range. A ``call`` holds the numbers of sequences and groups (``batch``, ``groups``), and this CTA's
``group``.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute


@cute.jit
def divide(work: Any, call: Any, at_once: cutlass.Constexpr[int]):
    """Finds the range of tiles of this CTA's group. Runs on one warp.

    The tiles of all sequences, concatenated, are split into ``groups`` equal ranges. A group has a CTA for each KV head.
    The function makes two passes over the sequence lengths. The first pass sums the tiles of all sequences. The second pass finds
    the sequence in which the range begins, by a warp prefix sum.

    Args:
        work, call: see the module.
        at_once: how many sequence lengths each lane loads per round.

    Returns:
        The sequence in which the range begins, that sequence's length, the range's offset in that sequence in tiles, the number of
        tiles of this range, the number of tiles of a full range, and the cost of starting a sequence in tiles.
    """
    lane = cute.arch.lane_idx()
    lengths, counts = (cute.make_rmem_tensor((at_once,), Int32) for _ in range(2))
    rounds = (call.batch + 32 * at_once - 1) // (32 * at_once)
    total = Int32(0)
    # Rounds run backwards, so that ``lengths`` and ``counts`` then hold the first sequences, with which the search below begins.
    for back in cutlass.range(rounds, unroll=1):
        total += cute.arch.warp_redux_sync(work.tiles_of(call, rounds - 1 - back, at_once, lengths, counts), "add")
    per_group, starting = work.tiles_per_group(call, total, cute.arch.shuffle_sync(counts[0], 0))
    total += starting * call.batch
    start = call.group * per_group
    before = Int32(0)
    found = Int32(-1)
    offset = Int32(0)
    length = Int32(0)
    step = Int32(0)
    while found < 0 and step < rounds and start < total:
        some = Int32(0)
        for each in cutlass.range_constexpr(at_once):
            some += counts[each] + starting
        ends = some
        for power in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(ends, 1 << power)
            ends += cutlass.select_(lane >= (1 << power), other, Int32(0))
        running = before + ends - some
        mine = Int32(-1)
        for each in cutlass.range_constexpr(at_once):
            if running <= start < running + counts[each] + starting:
                mine = (step * 32 + lane) * at_once + each
                offset = start - running
                length = lengths[each]
            running += counts[each] + starting
        found = cute.arch.warp_redux_sync(mine, "max")
        offset = cute.arch.warp_redux_sync(offset, "max")
        length = cute.arch.warp_redux_sync(length, "max")
        before += cute.arch.shuffle_sync(ends, 31)
        step += 1
        if found < 0 and step < rounds:
            work.tiles_of(call, step, at_once, lengths, counts)
    return cutlass.max(found, 0), length, offset, cutlass.max(cutlass.min(per_group, total - start), 0), per_group, starting


@cute.jit
def tiles_of(work: Any, call: Any, step: Int32, at_once: cutlass.Constexpr[int], lengths: cute.Tensor, counts: cute.Tensor):
    """Loads the lengths of this lane's ``at_once`` sequences of round ``step``, and computes their tile counts. Returns the sum of
    these counts."""
    some = Int32(0)
    for each in cutlass.range_constexpr(at_once):
        sequence = (step * 32 + cute.arch.lane_idx()) * at_once + each
        lengths[each] = work.length_of(call, sequence)
        _, _, count = work.visible(call, lengths[each])
        counts[each] = cutlass.select_(sequence < call.batch, count, Int32(0))
        some += counts[each]
    return some
