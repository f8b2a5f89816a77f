"""Tests mla_decode_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import mla_decode_with_kvcache as operator
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mla_decode_with_kvcache
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked

from .latents import E4M3, FP8_ERROR, inputs, reference
from .paging import ERROR, cases, check, check_case, kernel_of, nothing_read_on_the_host, pretend_compute_units, spills


def _run(device: torch.device, kv_lens: list[int], **options: Any) -> None:
    arguments = inputs(device, kv_lens, **options)
    check(mla_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
def test_lengths(gfx950: torch.device, page_size: int) -> None:
    """Results are correct for a batch of sequences with many splits, with one split and without keys, with lengths at the edges of
    pages and blocks."""
    _run(gfx950, [1500, 1, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700], page_size=page_size)


@pytest.mark.slow
def test_more_splits_than_are_merged_at_once(gfx950: torch.device) -> None:
    """Results are correct for a sequence with more than 16 splits, of which the merge loads 8 at once."""
    _run(gfx950, [3600, 5, 11000])


@pytest.mark.slow
def test_one_sequence(gfx950: torch.device) -> None:
    """Results are correct for a batch of one sequence, whose splits the kernel finds without a search."""
    _run(gfx950, [2300])


@pytest.mark.slow
def test_much_work(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are correct if the batch is large for the device, so that a workgroup computes all columns and splits are long."""
    pretend_compute_units(monkeypatch, 2)
    _run(gfx950, [1700, 0, 330, 1, 90])


@pytest.mark.slow
def test_more_sequences_than_are_loaded_at_once(gfx950: torch.device) -> None:
    _run(gfx950, [1, 0, 3, 130] * 260, heads=1)


@pytest.mark.slow
def test_more_pages_than_are_listed_together(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_compute_units(monkeypatch, 1)
    monkeypatch.setattr("tokenspeed_kernel_amd.gfx950.attention.mla_decode.CONFIG.__class__.least", 4096)
    _run(gfx950, [5000], page_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [5, 64, 128])
def test_heads(gfx950: torch.device, heads: int) -> None:
    _run(gfx950, [700, 65], heads=heads)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_seqlen_q": 2}, {"dtype": E4M3}, {"cache_dtype": E4M3}], ids=str)
@pytest.mark.parametrize("units", [2, 30])
def test_tiles_of_32_rows(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, units: int, options: dict[str, Any]) -> None:
    """Results are correct if tiles of 16 rows would be more than the CUs, with splits and without."""
    pretend_compute_units(monkeypatch, units)
    arguments = inputs(gfx950, [700, 0, 129, 1], **{"heads": 130, **options})
    found = mla_decode_with_kvcache(**arguments, return_lse=True)
    check(found, reference(operator, arguments), FP8_ERROR if arguments["kv_cache"].dtype == E4M3 else ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("window_left", [0, 127, 1000])
def test_windows(gfx950: torch.device, window_left: int) -> None:
    _run(gfx950, [1, 127, 128, 129, 130, 0, 1300], window_left=window_left, page_size=16 if window_left < 2 else 64)


@pytest.mark.slow
def test_everything_together(gfx950: torch.device) -> None:
    """Results are correct if some sequences have more new tokens than tokens in the cache, and the window hides whole pages, which
    were freed."""
    options = {"max_seqlen_q": 3, "window_left": 310, "logit_cap": 5.0, "freed": True, "dtype": torch.float16}
    _run(gfx950, [190, 1, 900, 0], heads=12, page_size=16, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dtype": E4M3, "scales": ("kv_scale",)},
        pytest.param({"dtype": E4M3, "scales": ("q_scale", "kv_scale"), "page_size": 16}, marks=pytest.mark.slow),
        pytest.param({"cache_dtype": E4M3, "page_size": 256, "max_seqlen_q": 2, "window_left": 200}, marks=pytest.mark.slow),
        pytest.param({"dtype": E4M3, "heads": 64, "page_size": 32, "logit_cap": 5.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8(gfx950: torch.device, options: dict[str, Any]) -> None:
    arguments = inputs(gfx950, [700, 129, 0, 1], **options)
    check(mla_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments), FP8_ERROR)


@pytest.mark.slow
def test_magnitudes_of_queries_with_an_fp8_cache(gfx950: torch.device) -> None:
    """Rows of q of all magnitudes keep 8 significant bits."""
    arguments = inputs(gfx950, [150], cache_dtype=E4M3)
    scale = 2.0 ** torch.linspace(-100, 20, 16, device=gfx950).round()[:, None]
    arguments["q"] = (arguments["q"].float() * scale).bfloat16()
    arguments["softmax_scale"] = 2.0**-18
    check(mla_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments), FP8_ERROR)


@pytest.mark.slow
def test_other_strides(gfx950: torch.device) -> None:
    """Results are correct if q, the cache and out are slices of wider tensors and the page table is not contiguous."""
    arguments = inputs(gfx950, [340, 9])
    wanted = reference(operator, arguments)
    heads = arguments["q"].shape[1]
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, heads:]
    arguments["kv_cache"] = torch.nn.functional.pad(arguments["kv_cache"], (0, 8))[..., :-8]
    arguments["page_table"] = arguments["page_table"].T.contiguous().T
    wide = torch.full((2, heads + 2, 512), 7.0, dtype=torch.bfloat16, device=gfx950)
    got = mla_decode_with_kvcache(**arguments, return_lse=True, out=wide[:, 1:-1])
    check(got, wanted)
    assert (wide[:, [0, -1]] == 7).all()


@pytest.mark.slow
def test_lengths_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.mla_decode import mla_decode_with_kvcache as launch

    arguments = inputs(gfx950, [700, 9])
    wanted = reference(operator, arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


@pytest.mark.parametrize(
    ("options", "gate"),
    [({"page_size": 8}, "traits"), ({"head_dim": 320, "kv_lora_rank": 256}, "traits"), ({"dtype": torch.float32}, "formats")],
    ids=str,
)
def test_calls_that_are_not_served(gfx950: torch.device, options: dict[str, Any], gate: str) -> None:
    with pytest.raises(NoKernelFoundError, match=f"gluon_mla_decode_with_kvcache +{gate}: "):
        mla_decode_with_kvcache(**inputs(gfx950, [20], **options))


# -- the operator's cases, and the conformance kit -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mla_decode_with_kvcache"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "mla_decode_with_kvcache", case)


@pytest.mark.slow
def test_the_kit_finds_nothing(gfx950: torch.device) -> None:
    findings = conform(kernel_of("mla_decode_with_kvcache"), gfx950, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "trait edges", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}


# -- compiled code -------------------------------------------------------------------------------------------------------------


def test_one_launch_without_spills_and_bank_conflicts(emulator: Any) -> None:
    """One launch computes and merges the splits, and leaves the counters zero."""
    arguments = inputs(torch.device("cpu"), [700, 3])
    check(mla_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))
    (launch,) = emulator.launches
    assert not any(spills(launch.program.assembly.text).values())
    assert launch.counters.total("lds_conflicts") == 0
    check(mla_decode_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))
