"""The largest scores of each row: a sample tells a bound that a few more than are wanted reach, and these are listed and searched.

1. `list_scores_kernel`, where rows are so few that each has several programs: a program takes a sample of the whole row and lists
   what reaches the sample's bound in one span of it, in order of position.
2. `top_k_indices_kernel`, a program a row, finds the threshold among what is listed and writes the positions. Of many rows it
   makes the list itself; of short rows it holds all scores and needs none.

So a row is read once, and a small part of it twice. Sums along a row place everything, never atomic operations: a row always gives
the same lists. Where a bound turns out to be too high, or so low that a list overflows, the row is searched as a whole,
`_top_k_search_device`: seldom, for the bound leaves room for what chance does to a sample, and scores that equal the bound are
listed no more often than they may be chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    FLOATS,
    TRITON,
    cdiv,
    dense,
    for_architecture,
    launch_options,
    may_overlap,
    multiprocessors,
    next_power_of_2,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Search(NamedTuple):
    """How rows are searched.

    Attributes:
        lanes: scores or entries of lists that a program holds at once, at least 16.
        spans: of a row, each of which has a program that lists its large scores; 1 where the row's own program does, 0 where
            nothing is listed.
        segment: entries of a span's list, at most.
        block: scores at once that go into a list.
        run: of these, scores side by side that a thread takes.
        sample: scores of a sample, at most.
        deviations: standard deviations of the threshold's rank in a sample for which a list has room.
        stages: blocks on the way to a list, the one at work included.
        warps: of a program.
    """

    lanes: int
    spans: int
    segment: int
    block: int
    run: int
    sample: int
    deviations: float
    stages: int
    warps: int


# What a program holds, 16 a thread. A list of that many serves top_k of up to half of it: there is room for a threshold of as many
# ties as are wanted, behind as many larger scores.
_LANES, _WARPS, _FEWEST_LANES, _LANES_A_WARP = 4096, 8, 64, 512
_BLOCK, _RUN = 4096, 4
# Of 65536 scores one in 32 is in the sample, so that about 3,100 are listed where 2,048 are wanted.
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLED = 1024, 4096, 32
_DEVIATIONS = 4.0
_STAGES = {"nvidia": 3, "any": 1}
# Two programs share a multiprocessor.
_REGISTERS: dict[str, dict[str, int]] = {"nvidia": {"maxnreg": 128}, "any": {}}
_MOST_SPANS, _PROGRAMS = 16, 2  # of a row; of a multiprocessor


def search_of(rows: int, keys: int, top_k: int, device: torch.device) -> Search:
    """The search in rows of so many scores."""
    lanes = min(max(next_power_of_2(keys), _FEWEST_LANES), _LANES)
    warps = max(1, min(lanes // _LANES_A_WARP, _WARPS))
    sample = min(max(next_power_of_2(keys // _SAMPLED), _LEAST_SAMPLE), _MOST_SAMPLE)
    spans = 0
    if keys > lanes and top_k <= lanes // 2:
        spans = 1
        while spans < _MOST_SPANS and spans * _BLOCK < keys and 2 * spans * rows <= _PROGRAMS * multiprocessors(device):
            spans *= 2
    segment = min(next_power_of_2(cdiv(keys, max(spans, 1) * _BLOCK)) * _BLOCK, lanes)
    return Search(lanes, spans, segment, _BLOCK, _RUN, sample, _DEVIATIONS, for_architecture(_STAGES, device), warps)


@register_kernel(
    "attention",
    "top_k_indices",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("scores", "dense", FLOATS),
    traits={"top_k": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def top_k_indices(scores: Tensor, top_k: int, lengths: Tensor | None, out: Tensor | None) -> Tensor:
    """See `tokenspeed_kernel.top_k_indices`."""
    rows, keys = scores.shape
    if out is None:
        out = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    search = search_of(rows, keys, top_k, scores.device)
    # Programs that wait for others would take the room of those.
    early = may_overlap(scores.device) and rows * (search.spans + 1) <= multiprocessors(scores.device)
    lengths = dense(lengths)
    room = 0 if keys <= search.lanes else max(search.spans, 1) * search.segment
    entries = torch.empty(rows, room, dtype=torch.int64, device=scores.device)
    counts = torch.empty(rows, search.spans, 3, dtype=torch.int32, device=scores.device)
    asked = (keys, top_k)
    options: dict[str, Any] = {"SEARCH": search, "EARLY": early, "num_warps": search.warps, **launch_options(early)}
    options.update(for_architecture(_REGISTERS, scores.device))
    if search.spans > 1:
        device_code.list_scores_kernel[(rows * search.spans,)](
            scores, lengths, entries, counts, *scores.stride(), *asked, **options
        )
    device_code.top_k_indices_kernel[(rows,)](
        scores, lengths, entries, counts, out, *scores.stride(), room, *out.stride(), *asked, **options
    )
    return out
