"""Tests mha_decode_with_kvcache against the core's reference in float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tokenspeed_kernel import mha_decode_with_kvcache as operator
from tokenspeed_kernel_amd import mha_decode_with_kvcache
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked

from .paging import (
    cases,
    check,
    check_case,
    check_compiled,
    check_copied_cache,
    check_other_strides,
    check_padded_slots,
    inputs,
    nothing_read_on_the_host,
    pretend_compute_units,
    reference,
)


def _run(device: torch.device, kv_lens: list[int], **options: Any) -> None:
    arguments = inputs(device, kv_lens, **options)
    check(mha_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


@pytest.mark.parametrize("page_size", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_lengths(gpu: torch.device, page_size: int) -> None:
    """Results are correct for a batch of sequences of length 0, of length 1, and with lengths at the edges of pages and blocks."""
    _run(gpu, [1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200], page_size=page_size)


@pytest.mark.parametrize("page_size", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_divided_sequences(gpu: torch.device, page_size: int) -> None:
    """Results are correct for a batch of sequences with many splits, with one split, and without keys."""
    _run(gpu, [1500, 1, 0, 700, 64, 65, 257], page_size=page_size, sinks=True)


def test_one_divided_sequence(gpu: torch.device) -> None:
    """Results are correct for a batch of one sequence, whose splits the kernel finds without a search."""
    _run(gpu, [2300], page_size=64)


def test_much_work(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are correct if the batch is large for the device, so that splits are long and waves have one block in flight."""
    pretend_compute_units(monkeypatch, 2)
    _run(gpu, [700, 0, 330, 1, 90], page_size=16)


@pytest.mark.slow
def test_more_pages_than_are_listed_together(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_compute_units(monkeypatch, 1)
    _run(gpu, [5000], heads=1, kv_heads=1)


def test_more_sequences_than_lanes(gpu: torch.device) -> None:
    _run(gpu, [1, 0, 3, 300] * 20, heads=1, kv_heads=1)


@pytest.mark.parametrize("window_left", [0, 127, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 128, 1000))])
def test_windows(gpu: torch.device, window_left: int) -> None:
    _run(gpu, [1, 127, 128, 129, 130, 0, 1300], window_left=window_left, sinks=True, page_size=16 if window_left < 2 else 64)


@pytest.mark.parametrize(
    ("page_size", "options"), [(16, {"window_left": 100, "max_seqlen_q": 2}), (64, {"window_left": 127, "sinks": True})], ids=str
)
def test_freed_pages(gpu: torch.device, page_size: int, options: dict[str, Any]) -> None:
    """Results are correct if the window hides whole pages and these pages were freed."""
    _run(gpu, [5, 128, 805, 0, 400], page_size=page_size, freed=True, **options)


# Most other tests have a ratio of 4.
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 4), (8, 1), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((8, 2), (40, 1)))]
)
def test_head_ratios(gpu: torch.device, heads: int, kv_heads: int) -> None:
    _run(gpu, [70, 140], heads=heads, kv_heads=kv_heads, dtype=torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(128, 128), *(pytest.param(*dims, marks=pytest.mark.slow) for dims in ((128, 64), (64, 128)))]
)
def test_head_dims(gpu: torch.device, head_dim: int, v_head_dim: int) -> None:
    _run(gpu, [37, 365], head_dim=head_dim, v_head_dim=v_head_dim, page_size=64)


@pytest.mark.parametrize("new", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)])
def test_several_new_tokens(gpu: torch.device, new: int) -> None:
    """Results are correct if some sequences have more new tokens than tokens in the cache."""
    _run(gpu, [1, 20, 400, 0, 64], max_seqlen_q=new, page_size=64, sinks=True)


@pytest.mark.slow
def test_everything_together(gpu: torch.device) -> None:
    options = {"max_seqlen_q": 3, "window_left": 310, "logit_cap": 5.0, "softmax_scale": 0.2, "sinks": True}
    _run(gpu, [190, 1, 900], page_size=64, dtype=torch.float16, **options)


def test_other_strides(gpu: torch.device) -> None:
    check_other_strides(mha_decode_with_kvcache, operator, inputs(gpu, [140, 9]))


def test_a_cache_that_is_copied(gpu: torch.device) -> None:
    check_copied_cache(mha_decode_with_kvcache, operator, inputs(gpu, [140, 9]))


def test_slots_that_are_padded(gpu: torch.device) -> None:
    check_padded_slots(mha_decode_with_kvcache, operator, inputs(gpu, [140, 9]))


def test_lengths_are_not_read_on_the_host(gpu: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module(f"tokenspeed_kernel_amd.{arch}.attention.decode").mha_decode_with_kvcache
    arguments = inputs(gpu, [700, 9], sinks=True)
    wanted = reference(operator, arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


@pytest.mark.parametrize(("page_size", "dtype", "gate"), [(8, torch.bfloat16, "traits"), (16, torch.float8_e5m2, "formats")])
def test_caches_that_are_not_served(gpu: torch.device, page_size: int, dtype: torch.dtype, gate: str) -> None:
    arguments = inputs(gpu, [20], page_size=page_size, cache_dtype=dtype)
    with pytest.raises(NoKernelFoundError, match=rf"gluon_mha_decode_with_kvcache\w* +{gate}: "):
        mha_decode_with_kvcache(**arguments)


# -- the operator's cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mha_decode_with_kvcache"))
def test_a_case_of_the_operator(gpu: torch.device, case: Case) -> None:
    """Results of the operator's cases are correct, with and without out=."""
    check_case(gpu, "mha_decode_with_kvcache", case)


# -- compiled code -------------------------------------------------------------------------------------------------------------

GPT_OSS = {"heads": 64, "kv_heads": 8, "sinks": True}


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 64},
        pytest.param({"page_size": 16}, marks=pytest.mark.slow),
        pytest.param({"page_size": 64, "window_left": 127}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resources(emulator: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """No register is spilled, and four waves fit on a SIMD. There is no bank conflict and no loop around a buffer instruction, and
    the hot loop is short."""
    pretend_compute_units(monkeypatch, 1)  # the batch is now large for the device: one block in flight
    mha_decode_with_kvcache(**inputs(torch.device("cpu"), [600], **GPT_OSS, **options))
    check_compiled(emulator.launches[0], 4, 319)


@pytest.mark.parametrize("arch", ["gfx942"], indirect=True)
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"page_size": 64}, 200),
        pytest.param({"page_size": 16}, 305, marks=pytest.mark.slow),
        pytest.param({"page_size": 64, "window_left": 127}, 215, marks=pytest.mark.slow),
        pytest.param({"page_size": 64, "head_dim": 128}, 158, marks=pytest.mark.slow),
        pytest.param({"page_size": 64, "cache_dtype": torch.float8_e4m3fnuz}, 210, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resources_of_gfx942(counting: Any, options: dict[str, Any], most: int) -> None:
    """The conditions of `test_resources` hold for two waves per SIMD, and keys and values do not enter LDS."""
    mha_decode_with_kvcache(**inputs(torch.device("cpu"), [600], **GPT_OSS, **options))
    check_compiled(counting.launches[0], 2, most)
    assert "ds_write" not in counting.launches[0].program.assembly.text
