"""Tests mla_prefill against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import mla_prefill as operator
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mla_prefill
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.attention._inputs import ragged

from .paging import cases, check, check_case, kernel_of, nothing_read_on_the_host, spills

DEEPSEEK: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128, "softmax_scale": 0.1352}


def inputs(device: torch.device, lengths: list[int], heads: int = 1, **options: Any) -> dict[str, Any]:
    return ragged(lengths, heads, heads, **{**DEEPSEEK, **options})(Draw(device, sum(lengths)))


def reference(arguments: dict[str, Any]) -> Any:
    """Returns the output and LSE of the operator's body, computed in fp32."""
    wide = {name: arguments[name].float() for name in ("q", "k", "v")}
    return operator(**{**arguments, **wide}, return_lse=True, solution="reference")


def _run(device: torch.device, lengths: list[int], **options: Any) -> None:
    arguments = inputs(device, lengths, **options)
    check(mla_prefill(**arguments, return_lse=True), reference(arguments))


def test_lengths(gfx950: torch.device) -> None:
    """Results are correct for sequences without tokens and with several tiles, with lengths at the edges of blocks and tiles."""
    _run(gfx950, [200, 0, 1, 63, 64, 65, 129])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"dtype": torch.float16, "logit_cap": 5.0},
        {"window_left": 0},
        {"window_left": 100},
        {"window_left": 100, "is_causal": False},
        {"kv_lengths": [300, 64, 3, 0]},
        {"kv_lengths": [300, 64, 3, 0], "is_causal": False},
        {"kv_lengths": [300, 64, 3, 0], "window_left": 70, "heads": 2},
    ],
    ids=str,
)
def test_options(gfx950: torch.device, options: dict[str, Any]) -> None:
    """Results are correct with more keys than queries, and with fewer."""
    _run(gfx950, [150, 64, 33, 2], **options)


@pytest.mark.slow
def test_nan_behind_a_sequence(gfx950: torch.device) -> None:
    """Rows that belong to no sequence are not read as keys or values, and their outputs are not written."""
    arguments = inputs(gfx950, [40, 70])
    wanted = reference(arguments)
    for name in ("q", "k", "v"):
        arguments[name] = torch.cat([arguments[name], torch.full_like(arguments[name][:9], torch.nan)])
    out = torch.full((119, 1, 128), 7.0, dtype=torch.bfloat16, device=gfx950)
    got, lse = mla_prefill(**arguments, return_lse=True, out=out)
    check((got[:110], lse[:110]), wanted)
    assert (out[110:] == 7).all()


@pytest.mark.slow
def test_one_sequence_is_longest(emulator: Any) -> None:
    """Sequences share the grid's slots."""
    _run(torch.device("cpu"), [140, *[3] * 7], heads=2)
    (launch,) = emulator.launches
    assert launch.grid[0] == 2 * (161 // 128 + 8)


@pytest.mark.slow
def test_other_strides(gfx950: torch.device) -> None:
    """Results are correct if operands and out are slices of wider tensors."""
    arguments = inputs(gfx950, [70], heads=2)
    wanted = reference(arguments)
    both = torch.cat([arguments["q"], arguments["k"], arguments["v"]], 2)
    arguments["q"], arguments["k"], arguments["v"] = both.split((192, 192, 128), 2)
    wide = torch.full((70, 4, 128), 7.0, dtype=torch.bfloat16, device=gfx950)
    check(mla_prefill(**arguments, return_lse=True, out=wide[:, 1:-1]), wanted)
    assert (wide[:, [0, -1]] == 7).all()


@pytest.mark.slow
def test_lengths_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.mla_prefill import mla_prefill as launch

    arguments = inputs(gfx950, [70, 9])
    wanted = reference(arguments)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(operator, launch)(**arguments, return_lse=True)
    check(got, wanted)


@pytest.mark.parametrize(
    ("options", "gate"),
    [({"head_dim": 128}, "traits"), ({"dtype": torch.float32}, "formats"), ({"dtype": torch.float8_e4m3fn}, "formats")],
    ids=str,
)
def test_calls_that_are_not_served(gfx950: torch.device, options: dict[str, Any], gate: str) -> None:
    with pytest.raises(NoKernelFoundError, match=f"gluon_mla_prefill +{gate}: "):
        mla_prefill(**inputs(gfx950, [20], **options))


# -- the operator's cases, and the conformance kit -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mla_prefill"))
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "mla_prefill", case)


@pytest.mark.slow
def test_the_kit_finds_nothing(gfx950: torch.device) -> None:
    findings = conform(kernel_of("mla_prefill"), gfx950, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "trait edges", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}


# -- compiled code -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_spills_and_bank_conflicts(emulator: Any) -> None:
    _run(torch.device("cpu"), [150])
    (launch,) = emulator.launches
    assert not any(spills(launch.program.assembly.text).values())
    assert launch.counters.total("lds_conflicts") == 0
