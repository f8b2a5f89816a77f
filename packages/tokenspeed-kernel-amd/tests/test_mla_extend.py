"""Tests mla_extend_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import mla_extend_with_kvcache as operator
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mla_extend_with_kvcache
from tokenspeed_kernel_base.cases import Case, Recipe
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.attention._inputs import paged

from .latents import DEEPSEEK, E4M3, FP8_ERROR, inputs, reference
from .paging import ERROR, cases, check, check_case, kernel_of, nothing_read_on_the_host, pretend_compute_units, spills

EXTEND, SPLIT = ["mla_extend_kernel"], ["mla_decode_kernel"]
KV_LENS, NEW = [200, 1, 0, 64, 65, 130], [40, 1, 0, 64, 2, 7]


def _run(device: torch.device, kv_lens: list[int], new: list[int], **options: Any) -> None:
    arguments = inputs(device, kv_lens, new, **{"is_causal": True, **options})
    error = FP8_ERROR if arguments["kv_cache"].dtype == E4M3 else ERROR
    check(mla_extend_with_kvcache(**arguments, return_lse=True), reference(operator, arguments), error)


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
def test_one_workgroup_for_all_keys(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Results are correct for tiles of 32 rows, with lengths at the edges of pages and blocks."""
    pretend_compute_units(monkeypatch, 8)
    _run(gfx950, KV_LENS, NEW, page_size=page_size)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"cache_dtype": E4M3}, {"dtype": E4M3, "is_causal": False}], ids=str)
def test_few_new_tokens_of_long_sequences(gfx950: torch.device, options: dict[str, Any]) -> None:
    """Results are correct if keys are divided into splits, and sequences have different numbers of new tokens."""
    _run(gfx950, [1500, 3, 0, 64, 700], [2, 3, 0, 1, 5], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"cache_dtype": E4M3, "scales": ("kv_scale",), "page_size": 32},
        {"dtype": E4M3, "scales": ("q_scale", "kv_scale"), "heads": 20, "page_size": 256},
        {"cache_dtype": E4M3, "is_causal": False, "logit_cap": 5.0},
        {"dtype": torch.float16, "heads": 5, "logit_cap": 5.0},
        {"window_left": 33, "freed": True, "page_size": 16},
        {"window_left": 0, "is_causal": False},
        {"dtype": E4M3, "window_left": 130},
    ],
    ids=str,
)
@pytest.mark.parametrize("units", [6, 256])
def test_options(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, units: int, options: dict[str, Any]) -> None:
    pretend_compute_units(monkeypatch, units)
    _run(gfx950, KV_LENS, NEW, **options)


@pytest.mark.slow
@pytest.mark.parametrize("units", [6, 256])
def test_freed_pages(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Pages that no new token sees are not read, although another sequence has more new tokens."""
    pretend_compute_units(monkeypatch, units)
    _run(gfx950, [900, 400, 100], [1, 60, 3], window_left=150, freed=True, page_size=16)


@pytest.mark.slow
def test_more_pages_than_are_listed_together(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_compute_units(monkeypatch, 1)
    _run(gfx950, [2300], [3], page_size=16)


@pytest.mark.slow
def test_one_sequence_has_most_new_tokens(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share the grid's slots."""
    pretend_compute_units(monkeypatch, 8)
    _run(torch.device("cpu"), [90, 5, 5, 5, 5, 5, 5], [50, 1, 1, 0, 1, 1, 1])
    (launch,) = emulator.launches
    assert launch.grid[0] == 55 * 16 // 32 + 7


@pytest.mark.slow
def test_other_strides(gfx950: torch.device) -> None:
    """Results are correct if q, the cache and out are slices of wider tensors and the page table is not contiguous."""
    arguments = inputs(gfx950, [340, 9], [5, 9], is_causal=True)
    wanted = reference(operator, arguments)
    tokens, heads = arguments["q"].shape[:2]
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, heads:]
    arguments["kv_cache"] = torch.nn.functional.pad(arguments["kv_cache"], (0, 8))[..., :-8]
    arguments["page_table"] = arguments["page_table"].T.contiguous().T
    wide = torch.full((tokens, heads + 2, 512), 7.0, dtype=torch.bfloat16, device=gfx950)
    check(mla_extend_with_kvcache(**arguments, return_lse=True, out=wide[:, 1:-1]), wanted)
    assert (wide[:, [0, -1]] == 7).all()


@pytest.mark.slow
def test_lengths_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.mla_extend import mla_extend_with_kvcache as launch

    arguments = inputs(gfx950, [70, 9], [6, 9], is_causal=True)
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
    with pytest.raises(NoKernelFoundError, match=f"gluon_mla_extend_with_kvcache +{gate}: "):
        mla_extend_with_kvcache(**inputs(gfx950, [20], [3], is_causal=True, **options))


# -- the operator's cases, and the conformance kit -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mla_extend_with_kvcache"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "mla_extend_with_kvcache", case)


def _small(kv_lens: list[int], new: list[int], **options: Any) -> Recipe:
    return paged(kv_lens, new, **{**DEEPSEEK, "is_causal": True, **options})


# On a device of 8 CUs, the first call has a workgroup for each tile of 32 rows. The calls with fewer tiles have splits.
SMALL = [
    Case("tiles", _small([90, 33, 20], [7, 1, 20], padding=9, page_size=16, window_left=50, freed=True, return_lse=True)),
    Case("fp8 q and cache", _small([150, 3, 0, 65], [2, 3, 0, 1], dtype=E4M3, scales=("q_scale", "kv_scale"), return_lse=True)),
    Case("fp8 cache, all seen", _small([130, 3], [2, 3], is_causal=False, cache_dtype=E4M3, scales=("kv_scale",))),
    Case("splits", _small([300, 3, 0], [2, 1, 0])),
    Case("no sequences", _small([], [], padding=20)),
]


@pytest.mark.slow
def test_the_kit_finds_nothing(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's own cases have up to 1024 workgroups, which take 10 minutes in the kit. `test_a_case_of_the_operator` runs
    them once."""
    pretend_compute_units(monkeypatch, 8)
    findings = conform(kernel_of("mla_extend_with_kvcache"), gfx950, Options(shrink_seconds=0), SMALL)
    assert_none_wrong(findings)
    assert {"values", "trait edges", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}


@pytest.mark.parametrize("case", SMALL[:-1], ids=lambda case: case.name)
def test_the_kits_calls_launch_both_kernels(emulator: Any, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    pretend_compute_units(monkeypatch, 8)
    mla_extend_with_kvcache(**case.build("cpu"))
    assert [launch.kernel for launch in emulator.launches] == (EXTEND if case.name == "tiles" else SPLIT)


# -- compiled code -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"cache_dtype": E4M3}, {"dtype": E4M3}, {"window_left": 50, "logit_cap": 5.0}], ids=str)
@pytest.mark.parametrize(("units", "kernels"), [(2, EXTEND), (256, SPLIT)])
def test_no_spills_and_few_bank_conflicts(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, units: int, kernels: list[str], options: dict[str, Any]
) -> None:
    pretend_compute_units(monkeypatch, units)
    _run(torch.device("cpu"), [150, 3], [10, 3], **options)
    assert [launch.kernel for launch in emulator.launches] == kernels
    (launch,) = emulator.launches
    assert not any(spills(launch.program.assembly.text).values())
    # Tiles of 32 rows and 16-bit elements have a few conflicts: 1792 cycles beside 46,000 instructions.
    allowed = 0.05 * launch.wave_instructions if kernels == EXTEND else 0
    assert launch.counters.total("lds_conflicts") <= allowed
