"""Tests mha_extend_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import mha_extend_with_kvcache as operator
from tokenspeed_kernel_amd import mha_extend_with_kvcache
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.launchers import unchecked

from .paging import cases, check, check_case, check_compiled, check_padded_slots, inputs, nothing_read_on_the_host, reference


def _run(device: torch.device, kv_lens: list[int], q_lens: list[int], **options: Any) -> None:
    arguments = inputs(device, kv_lens, q_lens, **{"is_causal": True, **options})
    check(mha_extend_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page_size", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("longest", [1, 8, 16, pytest.param(40, marks=pytest.mark.slow)])
def test_lengths(gfx950: torch.device, longest: int, page_size: int) -> None:
    """Results are correct for tiles of 16 to 128 rows, and for caches that end at edges of pages and blocks. Some sequences have no
    new token, some have one, and some have only new tokens."""
    kv_lens, q_lens = [63, 64, 65, 0, 1, 200], [min(longest, 7), 1, longest, 0, 1, longest]
    _run(gfx950, kv_lens, q_lens, page_size=page_size)


@pytest.mark.parametrize(("page_size", "options"), [(16, {"window_left": 30}), (64, {"window_left": 127, "sinks": True})], ids=str)
def test_freed_pages(gfx950: torch.device, page_size: int, options: dict[str, Any]) -> None:
    """Results are correct if the window hides whole pages and these pages were freed."""
    _run(gfx950, [200, 63, 9, 300], [40, 7, 9, 1], page_size=page_size, freed=True, **options)


def test_uneven_stretches(gfx950: torch.device) -> None:
    """Results are correct if lengths differ so much that sequences share slots of the grid. The sequences end at tile edges. Some
    sequences have no row in their last slot."""
    _run(gfx950, [33, 200, 64, 9, 5, 31], [33, 100, 32, 0, 1, 31])


@pytest.mark.slow
def test_more_uneven_stretches_than_lanes(gfx950: torch.device) -> None:
    _run(gfx950, [200, *[1, 0, 3] * 30], [200, *[1, 0, 3] * 30], heads=4, kv_heads=1)


@pytest.mark.parametrize("longest", [8, *(pytest.param(longest, marks=pytest.mark.slow) for longest in (1, 3, 16))])
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_divided_sequences(gfx950: torch.device, longest: int, is_causal: bool) -> None:
    """Results are correct if long sequences have several splits, and others have one split or no new tokens."""
    _run(gfx950, [900, 64, 0, 65, 700], [longest, 1, 0, 0, min(longest, 2)], page_size=64, is_causal=is_causal, sinks=True)


@pytest.mark.parametrize("window_left", [0, 127, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 128, 1000))])
def test_windows(gfx950: torch.device, window_left: int) -> None:
    _run(gfx950, [300, 129, 5], [70, 1, 5], window_left=window_left, sinks=True, page_size=64)


@pytest.mark.parametrize("window_left", [-1, pytest.param(13, marks=pytest.mark.slow)])
def test_not_causal(gfx950: torch.device, window_left: int) -> None:
    """Without causal masking, results are correct if some sequences have more queries than keys, or no keys."""
    _run(gfx950, [100, 5, 0], [9, 8, 2], window_left=window_left, is_causal=False)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_head_ratios(gfx950: torch.device, heads: int, kv_heads: int) -> None:
    _run(gfx950, [70, 140], [9, 33], heads=heads, kv_heads=kv_heads, dtype=torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(128, 128), *(pytest.param(*dims, marks=pytest.mark.slow) for dims in ((128, 64), (64, 128)))]
)
def test_head_dims(gfx950: torch.device, head_dim: int, v_head_dim: int) -> None:
    _run(gfx950, [37, 300, 4], [20, 33, 4], head_dim=head_dim, v_head_dim=v_head_dim, page_size=64)


@pytest.mark.slow
def test_everything_together(gfx950: torch.device) -> None:
    options = {"window_left": 31, "logit_cap": 5.0, "softmax_scale": 0.2, "sinks": True}
    _run(gfx950, [190, 1, 131], [60, 1, 131], page_size=64, dtype=torch.float16, **options)


@pytest.mark.slow
def test_more_pages_than_are_listed_together(gfx950: torch.device) -> None:
    _run(gfx950, [4500], [20], heads=1, kv_heads=1)


def test_slots_that_are_padded(gfx950: torch.device) -> None:
    check_padded_slots(mha_extend_with_kvcache, operator, inputs(gfx950, [140, 9], [33, 9], is_causal=True))


def test_lengths_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.extend import mha_extend_with_kvcache as launch

    arguments = inputs(gfx950, [100, 9], [3, 4], is_causal=True)
    wanted = reference(operator, arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


# -- the operator's cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mha_extend_with_kvcache"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    """Results of the operator's cases are correct, with and without out=."""
    check_case(gfx950, "mha_extend_with_kvcache", case)


# -- compiled code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (8, {}),
        *(
            pytest.param(new, options, marks=pytest.mark.slow)
            for new, options in ((1, {}), (4, {}), (32, {}), (8, {"window_left": 127}), (32, {"head_dim": 128}))
        ),
    ],
    ids=str,
)
def test_resources(emulator: Any, new: int, options: dict[str, Any]) -> None:
    """No register is spilled, and two waves fit on a SIMD. There is no bank conflict and no loop around a buffer instruction, and
    the hot loop is short."""
    shape = {"heads": 16, "kv_heads": 2, "sinks": True, "page_size": 64, "is_causal": True, **options}
    mha_extend_with_kvcache(**inputs(torch.device("cpu"), [400], [new], **shape))
    check_compiled(emulator.launches[0], 2, 412)
