"""Tests mha_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import mha_with_kvcache as operator
from tokenspeed_kernel_amd import mha_with_kvcache
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked

from .paging import (
    cases,
    check,
    check_case,
    check_compiled,
    check_other_strides,
    check_padded_slots,
    inputs,
    nothing_read_on_the_host,
    pretend_compute_units,
    reference,
)


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the device has one CU. Small inputs then keep the device busy, so that long and short sequences get separate
    launches."""
    pretend_compute_units(monkeypatch, 1)


def _inputs(device: torch.device, kv_lens: list[int], q_lens: list[int], **options: Any) -> dict[str, Any]:
    return inputs(device, kv_lens, q_lens, running_sums=False, **options)


def _run(device: torch.device, kv_lens: list[int], q_lens: list[int], **options: Any) -> None:
    arguments = _inputs(device, kv_lens, q_lens, **options)
    check(mha_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


# With a gqa_ratio of 4, four new tokens fit into the small tile, and 32 new tokens into the large tile.
EDGES = {1: 1, 63: 0, 64: 4, 65: 5, 0: 0, 31: 31, 33: 32, 34: 33, 128: 1, 130: 2, 200: 64, 129: 3}


@pytest.mark.parametrize("page_size", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_lengths(gfx950: torch.device, small_device: None, page_size: int) -> None:
    """Results are correct for lengths of 0, of 1, and at edges of tiles and pages. Sequences prefill, extend and decode, in any
    order."""
    _run(gfx950, list(EDGES), list(EDGES.values()), page_size=page_size)


@pytest.mark.parametrize("longest", [5, *(pytest.param(longest, marks=pytest.mark.slow) for longest in (8, 16, 40))])
def test_every_tile(gfx950: torch.device, small_device: None, longest: int) -> None:
    """Results are correct for extend's tiles of 32 to 128 rows."""
    _run(gfx950, [70, 40, 90, 0, 33], [1, longest, 4, 0, 2], page_size=64)


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
def test_divided_sequences(gfx950: torch.device, small_device: None, page_size: int) -> None:
    """Results are correct for a batch of decode sequences with many splits, with one split and without keys. The batch also has
    extend sequences, which are not split."""
    _run(gfx950, [900, 40, 0, 1300, 64, 700, 65, 500], [1, 40, 0, 33, 4, 2, 65, 0], page_size=page_size, sinks=True)


def test_room_for_all_at_once(gfx950: torch.device) -> None:
    """Results are correct if there are so few keys that one launch computes everything."""
    _run(gfx950, [70, 200, 9, 0, 33], [1, 64, 9, 0, 2])


def test_few_tokens_of_few_sequences(gfx950: torch.device) -> None:
    """Results are correct for few new tokens of few sequences, all of which the decode kernel computes."""
    _run(gfx950, [800, 300, 0, 500], [1, 9, 0, 5], page_size=64)


# The tests of decode and extend run the same device code with windows, head ratios, head dims and page sizes whose cases are slow
# here.


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_freed_pages(gfx950: torch.device, page_size: int) -> None:
    """Results are correct if one decode launch computes sequences with many, few and no new tokens, and each sequence's window
    hides freed pages."""
    _run(gfx950, [805, 300, 0, 500, 461], [1, 9, 0, 5, 4], page_size=page_size, window_left=100, freed=True)


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 0, 1, 1], pytest.param([2, 1, 0, 4], marks=pytest.mark.slow)], ids=str)
def test_only_short_ones(gfx950: torch.device, q_lens: list[int]) -> None:
    _run(gfx950, [300, 0, 17, 64] if q_lens[1] == 0 else [300, 1, 17, 64], q_lens, page_size=64)


def test_one_sequence(gfx950: torch.device) -> None:
    _run(gfx950, [300], [130], page_size=64)


@pytest.mark.parametrize("batch", [100, pytest.param(1100, marks=pytest.mark.slow)])
def test_more_sequences_than_lanes(gfx950: torch.device, small_device: None, batch: int) -> None:
    """Results are correct if the batch has more sequences than the number of lengths that a workgroup loads at once."""
    kv_lens = [300, *[1, 0, 25, 3, 40] * (batch // 5)]
    q_lens = [1, *[1, 0, 25, 2, 1] * (batch // 5)]
    _run(gfx950, kv_lens, q_lens, heads=4, kv_heads=1)


def test_loose_bounds(gfx950: torch.device, small_device: None) -> None:
    """Results are correct if max_seqlen_q and max_seqlen_k are almost the page table's capacity, which exceeds all lengths."""
    arguments = _inputs(gfx950, [70, 1, 40, 300], [1, 1, 33, 2], sinks=True)
    wanted = reference(operator, arguments)
    room = arguments["page_table"].shape[1] * 16 - 1
    check(mha_with_kvcache(**{**arguments, "max_seqlen_q": room, "max_seqlen_k": room}, return_lse=True), wanted)


def test_order(gfx950: torch.device, small_device: None) -> None:
    """A sequence's result is bitwise the same at any position in the batch."""
    kv_lens, q_lens = [900, 40, 0, 130, 64, 700, 5], [1, 40, 0, 33, 4, 2, 5]
    arguments = _inputs(gfx950, kv_lens, q_lens, sinks=True)
    places = [3, 6, 0, 5, 2, 4, 1]
    tokens = torch.arange(sum(q_lens), device=gfx950).split(q_lens)
    rows = torch.cat([tokens[place] for place in places])
    order = torch.tensor(places, device=gfx950)
    moved = {name: arguments[name][order].contiguous() for name in ("page_table", "cache_seqlens")}
    moved["q"] = arguments["q"][rows]
    lengths = torch.tensor([0, *(q_lens[place] for place in places)], device=gfx950)
    moved["cu_seqlens_q"] = lengths.cumsum(0).to(torch.int32)
    for first, second in zip(
        mha_with_kvcache(**arguments, return_lse=True), mha_with_kvcache(**{**arguments, **moved}, return_lse=True), strict=True
    ):
        assert torch.equal(first[rows], second)


@pytest.mark.parametrize("window_left", [127, *(pytest.param(w, marks=pytest.mark.slow) for w in (0, 1, 128, 1000))])
def test_windows(gfx950: torch.device, small_device: None, window_left: int) -> None:
    kv_lens, q_lens = [300, 129, 40, 130, 128, 1300], [70, 1, 40, 2, 1, 1]
    _run(gfx950, kv_lens, q_lens, window_left=window_left, sinks=True, page_size=64)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(20, 1), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((4, 4), (8, 1), (40, 1)))]
)
def test_head_ratios(gfx950: torch.device, small_device: None, heads: int, kv_heads: int) -> None:
    """Results are correct for several GQA ratios. With 20 and 40, one new token has more rows than the smallest tile."""
    _run(gfx950, [70, 340, 30, 18], [1, 33, 2, 17], heads=heads, kv_heads=kv_heads, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(128, 128), (128, 64), (64, 128)])
def test_head_dims(gfx950: torch.device, small_device: None, head_dim: int, v_head_dim: int) -> None:
    _run(gfx950, [37, 365, 100], [1, 33, 2], head_dim=head_dim, v_head_dim=v_head_dim, page_size=64)


@pytest.mark.parametrize(
    ("head_dim", "window_left"), [(128, -1), *(pytest.param(64, window, marks=pytest.mark.slow) for window in (-1, 310))]
)
def test_everything_together(gfx950: torch.device, small_device: None, head_dim: int, window_left: int) -> None:
    options = {"window_left": window_left, "logit_cap": 5.0, "softmax_scale": 0.2, "sinks": True, "head_dim": head_dim}
    _run(gfx950, [190, 1, 131, 600], [60, 1, 131, 3], page_size=64, dtype=torch.float16, **options)


def test_other_strides(gfx950: torch.device, small_device: None) -> None:
    check_other_strides(mha_with_kvcache, operator, _inputs(gfx950, [140, 9, 300], [33, 9, 1]))


def test_slots_that_are_padded(gfx950: torch.device, small_device: None) -> None:
    check_padded_slots(mha_with_kvcache, operator, _inputs(gfx950, [140, 9, 300], [33, 9, 1]))


def test_lengths_are_not_read_on_the_host(gfx950: torch.device, small_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.mixed import mha_with_kvcache as launch

    arguments = _inputs(gfx950, [100, 9, 300], [33, 4, 1], sinks=True)
    wanted = reference(operator, arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


@pytest.mark.parametrize(("page_size", "dtype", "gate"), [(8, torch.bfloat16, "traits"), (16, torch.float8_e5m2, "formats")])
def test_caches_that_are_not_served(gfx950: torch.device, page_size: int, dtype: torch.dtype, gate: str) -> None:
    arguments = _inputs(gfx950, [20, 9], [1, 9], page_size=page_size, cache_dtype=dtype)
    with pytest.raises(NoKernelFoundError, match=f"gluon_mha_with_kvcache +{gate}: "):
        mha_with_kvcache(**arguments)


# -- the operator's cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mha_with_kvcache"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    """Results of the operator's cases are correct, with and without out=."""
    check_case(gfx950, "mha_with_kvcache", case)


# -- what is launched ----------------------------------------------------------------------------------------------------------

EXTEND, DECODE, MERGE = "extend_kernel", "decode_kernel", "merge_kernel"


@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "options", "kernels"),
    [
        ([300, 45, 20], [1, 33, 3], {}, [EXTEND, DECODE, MERGE]),
        ([400, 60, 90], [1, 60, 33], {"window_left": 63}, [EXTEND]),
        ([40, 60, 90], [1, 60, 33], {}, [EXTEND]),
        ([401, 60, 90], [1, 4, 0], {}, [DECODE, MERGE]),
        ([40, 60, 90], [1, 1, 1], {}, [DECODE]),
        ([400, 60, 90], [1, 30, 4], {}, [DECODE, MERGE]),
        ([400], [60], {}, [EXTEND]),
        ([9, 9], [0, 0], {}, []),
        ([], [], {}, []),
    ],
    ids=str,
)
def test_launches(emulator: Any, kv_lens: list[int], q_lens: list[int], options: dict[str, Any], kernels: list[str]) -> None:
    mha_with_kvcache(**_inputs(torch.device("cpu"), kv_lens, q_lens, **options))
    assert [launch.kernel for launch in emulator.launches] == kernels


def test_a_long_sequence_among_short_ones(emulator: Any) -> None:
    """The length of the longest sequence does not affect the number of tiles of other sequences."""
    mha_with_kvcache(**_inputs(torch.device("cpu"), [300] * 40, [1] * 20 + [290] + [1] * 19, heads=4, kv_heads=1))
    assert emulator.launches[0].grid == (329 * 4 // 128 + 40, 1, 1)


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({"window_left": 127}, {"head_dim": 128}))], ids=str
)
def test_resources(emulator: Any, small_device: None, options: dict[str, Any]) -> None:
    """Checks the compiled code of extend and of decode. With a window, a tile of 128 rows needs more SGPRs than there are, so some
    are spilled."""
    shape = {"heads": 16, "kv_heads": 2, "sinks": True, "page_size": 64, **options}
    mha_with_kvcache(**_inputs(torch.device("cpu"), [400, 300, 60], [1, 100, 2], **shape))
    extend, decode = emulator.launches[:2]
    check_compiled(extend, 2, 412, scalar_spills=40 if "window_left" in options else 0)
    check_compiled(decode, 2 if "head_dim" in options else 4, 319)
