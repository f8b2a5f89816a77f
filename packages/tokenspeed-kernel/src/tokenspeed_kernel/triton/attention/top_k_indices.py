"""Finds the top-k positions of each row. A sample of the row gives a lower bound of its k-th largest score. Slightly more than k
scores are >= the bound; these scores are listed and searched.

1. `list_scores_kernel` runs if rows are few, with several programs per row. Each program samples the whole row. It then lists, in
order of position, the scores of one span of the row that are >= the bound.
2. `top_k_indices_kernel`, with one program per row, finds the threshold among the listed scores and writes the positions. If rows
   are many, this kernel makes the list itself. If rows are short, it holds all scores in registers, without a list.

A row is therefore read once, and its sample twice. Prefix sums instead of atomics determine all positions, so a row always gives
the same lists. If a bound is too high, or so low that a list overflows, `_top_k_search_device` searches the whole row. Such rows
are rare, because the bound allows for sampling error, and a list holds at most ``top_k`` scores equal to the bound.
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
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Search(NamedTuple):
    """The parameters of the search for a row's top-k.

    Attributes:
        lanes: scores or list entries that a program holds at once, at least 16.
        spans: the number of spans of a row, each listed by its own program. 1 if the row's own program makes the list, 0 without a
            list.
        segment: the largest number of scores that a span's list holds.
        block: scores per step of the listing loop.
        run: number of adjacent scores of a block that one thread holds.
        sample: the largest number of a row's scores in its sample.
        deviations: margin of the bound, in standard deviations of the threshold's rank in a sample.
        stages: pipeline stages of the listing loop.
        warps: warps of a program.
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


# _LANES: the number of list entries that a program holds in registers, 16 per thread. A list needs at most 2 * top_k entries: top_k
# scores above the threshold, and top_k scores that equal it. So lists of _LANES entries are enough up to top_k = _LANES / 2.
_LANES, _WARPS, _FEWEST_LANES, _LANES_A_WARP = 4096, 8, 64, 512
_BLOCK, _RUN = 4096, 4
# Of 65536 scores, one in 32 is in the sample. About 3,100 scores are then listed for a top_k of 2,048.
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLED = 1024, 4096, 32
_DEVIATIONS = 4.0
_STAGES = {"nvidia": 3, "any": 1}
# Register limit for two CTAs per SM.
_REGISTERS: dict[str, dict[str, int]] = {"nvidia": {"maxnreg": 128}, "any": {}}
_MOST_SPANS, _PROGRAMS = 16, 2  # the largest numbers of spans per row and of programs per SM/CU


def search_of(rows: int, keys: int, top_k: int, device: torch.device) -> Search:
    """Returns the search parameters for ``rows`` rows of ``keys`` scores."""
    lanes = min(max(next_power_of_2(keys), _FEWEST_LANES), _LANES)
    warps = max(1, min(lanes // _LANES_A_WARP, _WARPS))
    sample = min(max(next_power_of_2(keys // _SAMPLED), _LEAST_SAMPLE), _MOST_SAMPLE)
    spans = 0
    if keys > lanes and top_k <= lanes // 2:
        spans = 1
        while spans < _MOST_SPANS and spans * _BLOCK < keys and 2 * spans * rows <= _PROGRAMS * sm_count_of(device):
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
    """Implements the operator `tokenspeed_kernel.top_k_indices`, which documents the arguments."""
    rows, keys = scores.shape
    if out is None:
        out = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    search = search_of(rows, keys, top_k, scores.device)
    # PDL only if both kernels fit on the device at once: waiting programs would otherwise occupy the SMs of the first kernel.
    early = may_overlap(scores.device) and rows * (search.spans + 1) <= sm_count_of(scores.device)
    lengths = dense(lengths)
    room = 0 if keys <= search.lanes else max(search.spans, 1) * search.segment
    entries = torch.empty(rows, room, dtype=torch.int64, device=scores.device)
    counts = torch.empty(rows, search.spans, 3, dtype=torch.int32, device=scores.device)
    wanted = (keys, top_k)
    options: dict[str, Any] = {"SEARCH": search, "EARLY": early, "num_warps": search.warps, **launch_options(early)}
    options.update(for_architecture(_REGISTERS, scores.device))
    if search.spans > 1:
        device_code.list_scores_kernel[(rows * search.spans,)](
            scores, lengths, entries, counts, *scores.stride(), *wanted, **options
        )
    device_code.top_k_indices_kernel[(rows,)](
        scores, lengths, entries, counts, out, *scores.stride(), room, *out.stride(), *wanted, **options
    )
    return out
