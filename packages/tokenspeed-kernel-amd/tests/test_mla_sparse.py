"""Tests mla_sparse_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tokenspeed_kernel import mla_sparse_with_kvcache as operator
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mla_sparse_with_kvcache
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import _inputs as chosen

from .latents import E4M3, FP8_ERROR, reference
from .paging import ERROR, cases, check, check_case, kernel_of, nothing_read_on_the_host, pretend_compute_units, spills

SHARDED: dict[str, Any] = {"heads": 16, "kv_lora_rank": 512, "rope_dim": 64, "page_size": 64, "top_k": 160, "softmax_scale": 0.1352}


def inputs(device: torch.device, kv_lens: Sequence[int], **options: Any) -> dict[str, Any]:
    """Returns the operator's arguments, with NaN in cache slots that no index names."""
    arguments = chosen(kv_lens, **{**SHARDED, **options})(Draw(device, sum(kv_lens)))
    indices, lengths = arguments["indices"], arguments.get("topk_length")
    counted = indices >= 0
    if lengths is not None:
        counted &= torch.arange(indices.shape[1], device=device) < lengths[:, None]
    slots = arguments["kv_cache"].view(-1, arguments["kv_cache"].shape[-1])
    unnamed = torch.ones(len(slots), dtype=torch.bool, device=device)
    unnamed[indices[counted].long()] = False
    slots[unnamed] = float("nan")
    return arguments


def _run(device: torch.device, kv_lens: Sequence[int], error: float = ERROR, **options: Any) -> None:
    arguments = inputs(device, kv_lens, **options)
    check(mla_sparse_with_kvcache(**arguments, return_lse=True), reference(operator, arguments), error)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": True},
        pytest.param({"holes": True, "lengths": True}, marks=pytest.mark.slow),
        pytest.param({"dtype": torch.float16, "page_size": 24}, marks=pytest.mark.slow),
        pytest.param({"heads": 128, "top_k": 96}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lengths(gfx950: torch.device, options: dict[str, Any]) -> None:
    """Results are correct for tokens with fewer keys than top_k, and with negative indices at the end and in between."""
    _run(gfx950, [700, 1, 63, 64, 65, 130], **options)


@pytest.mark.parametrize("units", [1, pytest.param(256, marks=pytest.mark.slow)])
def test_more_slots_than_are_listed_at_once(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Results are correct with several lists per token, of which one has no key, and for tokens without keys."""
    pretend_compute_units(monkeypatch, units)
    arguments = inputs(gfx950, [2300, 1200, 5], top_k=2200)
    arguments["indices"][1, :1100] = -1
    arguments["indices"][2] = -1
    check(mla_sparse_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


def test_a_slot_that_occurs_twice(gfx950: torch.device) -> None:
    arguments = inputs(gfx950, [90])
    arguments["indices"][0, 40:] = arguments["indices"][0, :1]
    check(mla_sparse_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


@pytest.mark.slow
@pytest.mark.parametrize("units", [2, 256])
def test_prefill(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Results are correct for several tokens of a sequence, with splits and without."""
    pretend_compute_units(monkeypatch, units)
    _run(gfx950, [300, 9], q_lens=[5, 3], heads=40)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dtype": E4M3, "scales": ("kv_scale",)},
        pytest.param({"dtype": E4M3, "scales": ("q_scale", "kv_scale")}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8(gfx950: torch.device, options: dict[str, Any]) -> None:
    arguments = chosen([700, 129, 1], **{**SHARDED, "stale": True, **options})(Draw(gfx950, 3))
    check(mla_sparse_with_kvcache(**arguments, return_lse=True), reference(operator, arguments), FP8_ERROR)


@pytest.mark.slow
def test_other_strides(gfx950: torch.device) -> None:
    """Results are correct if q, the cache and the indices are slices of wider tensors."""
    arguments = inputs(gfx950, [340, 9])
    wanted = reference(operator, arguments)
    heads = arguments["q"].shape[1]
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, heads:]
    arguments["kv_cache"] = torch.nn.functional.pad(arguments["kv_cache"], (0, 8))[..., :-8]
    arguments["indices"] = torch.nn.functional.pad(arguments["indices"], (3, 0))[:, 3:]
    check(mla_sparse_with_kvcache(**arguments, return_lse=True), wanted)


def test_indices_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.mla_sparse import mla_sparse_with_kvcache as launch

    arguments = inputs(gfx950, [90])
    wanted = reference(operator, arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


@pytest.mark.parametrize("case", cases("mla_sparse_with_kvcache"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "mla_sparse_with_kvcache", case)


@pytest.mark.slow
def test_the_kit_finds_nothing(gfx950: torch.device) -> None:
    small = Case("small", chosen([70, 9, 200], **{**SHARDED, "top_k": 70}, lengths=True, stale=True))
    findings = conform(kernel_of("mla_sparse_with_kvcache"), gfx950, Options(shrink_seconds=0), [small])
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, pytest.param(E4M3, marks=pytest.mark.slow)])
def test_one_launch_without_spills(emulator: Any, cache_dtype: torch.dtype) -> None:
    arguments = chosen([300, 90], **SHARDED, cache_dtype=cache_dtype)(Draw(torch.device("cpu"), 1))
    mla_sparse_with_kvcache(**arguments)
    (launch,) = emulator.launches
    assert not any(spills(launch.program.assembly.text).values())
