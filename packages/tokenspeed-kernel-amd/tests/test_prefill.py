"""Tests mha_prefill against the core's reference in float32."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import mha_prefill as operator
from tokenspeed_kernel_amd import mha_prefill
from tokenspeed_kernel_amd.gluon import prefill
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.launchers import unchecked

from .paging import ERROR, LSE_ERROR, cases, check_case


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def _inputs(
    lengths: Sequence[int],
    device: torch.device,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(sum(lengths) * 31 + heads)
    tokens = sum(lengths)
    sizes = {"q": (heads, head_dim), "k": (kv_heads, head_dim), "v": (kv_heads, v_head_dim or head_dim)}
    tensors = {name: torch.randn(tokens, *size, generator=draw).to(dtype).to(device) for name, size in sizes.items()}
    offsets = [0, *itertools.accumulate(lengths)]
    return {**tensors, "cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device=device)}


def _reference(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    wide = {name: inputs[name].float() for name in ("q", "k", "v")}
    return operator(**wide, cu_seqlens=inputs["cu_seqlens"], return_lse=True, solution="reference", **options)


def _check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    error = (out.float() - wanted_out).norm() / wanted_out.norm()
    assert error <= ERROR
    # The rows are also compared one by one, because one wrong row hardly changes the norm of the whole output.
    rows = (out.float() - wanted_out).norm(dim=-1) / wanted_out.norm(dim=-1).clamp(min=1e-6)
    assert rows.max() <= 4 * ERROR
    assert (lse - wanted_lse).abs().max() <= LSE_ERROR


def _run(device: torch.device, lengths: Sequence[int], shape: dict[str, Any] | None = None, **options: Any) -> None:
    inputs = _inputs(lengths, device, **(shape or {}))
    _check(mha_prefill(**inputs, return_lse=True, **options), _reference(inputs, **options))


@pytest.mark.parametrize(
    "lengths", [[1], _slow([127]), [128], _slow([129, 0, 0, 1]), [0, 1, 64, 65, 127, 128, 129, 0, 260], [400]], ids=str
)
def test_lengths(gpu: torch.device, lengths: list[int]) -> None:
    """Results are correct for one sequence and for several, with lengths of 0 and 1, and of one more and one less than a tile or a
    block of keys."""
    _run(gpu, lengths)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (10, 2), _slow(8, 8), _slow(3, 3), _slow(32, 8)])
def test_heads(gpu: torch.device, heads: int, kv_heads: int) -> None:
    """Results are correct for GQA ratios of 1, 4, 5 and 8, and for numbers of heads that are and are not a multiple of the 8
    XCDs."""
    _run(gpu, [70, 140], {"heads": heads, "kv_heads": kv_heads})


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(128, 128), _slow(128, 64), _slow(64, 128)])
def test_head_dims(gpu: torch.device, head_dim: int, v_head_dim: int) -> None:
    _run(gpu, [37, 265], {"heads": 2, "kv_heads": 1, "head_dim": head_dim, "v_head_dim": v_head_dim})


@pytest.mark.parametrize("window_left", [0, _slow(1), _slow(63), _slow(126), 127, _slow(128), _slow(200)])
def test_windows(gpu: torch.device, window_left: int) -> None:
    _run(gpu, [300, 5], {"heads": 2, "kv_heads": 1}, window_left=window_left, sinks=torch.tensor([-2.0, 3.0], device=gpu))


@pytest.mark.parametrize("lengths", [[800, 5], _slow([1300]), _slow([1023, 200])], ids=str)
def test_a_window_of_several_steps(gpu: torch.device, lengths: list[int]) -> None:
    """Results are correct if a tile has blocks at the window's edge, unmasked blocks, and blocks on the diagonal."""
    _run(gpu, lengths, {"heads": 2, "kv_heads": 1}, window_left=500, sinks=torch.tensor([-2.0, 3.0], device=gpu))


@pytest.mark.slow
@pytest.mark.parametrize("window_left", [0, 127, 1000])
def test_windows_of_heads_of_128(gpu: torch.device, window_left: int) -> None:
    _run(gpu, [1200, 70], {"heads": 2, "kv_heads": 1, "head_dim": 128}, window_left=window_left)


def test_float16_and_logit_cap(gpu: torch.device) -> None:
    _run(gpu, [150, 20], {"dtype": torch.float16}, logit_cap=30.0, softmax_scale=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_everything_together(gpu: torch.device, head_dim: int) -> None:
    sinks = torch.linspace(-2, 3, 8, device=gpu).bfloat16()
    shape = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    _run(gpu, [190, 1, 131], shape, window_left=31, logit_cap=5.0, sinks=sinks, softmax_scale=0.2)


def test_scores_far_from_zero(gpu: torch.device) -> None:
    """Scores reach several hundred, and fall and rise along the keys. The result needs the running row max, and nothing
    overflows."""
    inputs = _inputs([300, 200], gpu, heads=2, kv_heads=2)
    tokens = torch.arange(500, device=gpu).view(-1, 1, 1)
    inputs["k"] = (inputs["k"] * torch.where(tokens < 300, 300 - tokens, tokens - 300) / 10).bfloat16()
    sinks = torch.tensor([-200.0, 200.0], device=gpu)
    got = mha_prefill(**inputs, sinks=sinks, return_lse=True)
    wanted = _reference(inputs, sinks=sinks)
    assert (got[0].float() - wanted[0]).norm() <= ERROR * wanted[0].norm()
    assert ((got[1] - wanted[1]).abs() <= LSE_ERROR + 1e-6 * wanted[1].abs()).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("far", [[40, 41, 240], [240]], ids=str)
@pytest.mark.parametrize("options", [{}, {"window_left": 150, "sinks": True}, _slow({"logit_cap": 90.0})], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_that_grow_too_large(gpu: torch.device, dtype: torch.dtype, options: dict[str, Any], far: list[int]) -> None:
    """Results are correct if scores far from the diagonal exceed scores on the diagonal by 60, so that tiles are computed again.
    Other heads have no such scores."""
    inputs = _inputs([400, 70], gpu, dtype=dtype)
    inputs["q"][:, 0] = 1.0
    inputs["k"][:, 0] *= 0.1
    inputs["k"][far, 0] = 7.5  # a score of 7.5 * 64 / 8
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor([50.0, -3.0, 0.0, 1.0], device=gpu)}
    _check(mha_prefill(**inputs, return_lse=True, **options), _reference(inputs, **options))


def _instructions(counting: Any, inputs: dict[str, Tensor]) -> int:
    """Returns how many instructions a prefill executes, and checks its results."""
    counting.launches.clear()
    _check(mha_prefill(**inputs, return_lse=True), _reference(inputs))
    (launch,) = counting.launches
    return int(launch.counters.instructions)


@pytest.mark.parametrize(("dtype", "score"), [(torch.bfloat16, 40.0), (torch.float16, 12.0)], ids=str)
def test_a_large_score_of_the_first_token(counting: Any, dtype: torch.dtype, score: float) -> None:
    """No tile is computed again if the first token's scores are far above all others."""
    inputs = _inputs([400], torch.device("cpu"), heads=1, kv_heads=1, dtype=dtype)
    inputs["q"][..., 0] = 4.0
    inputs["k"][..., 0] = 0.0
    usual = _instructions(counting, inputs)
    inputs["k"][0] = 0.0
    inputs["k"][0, :, 0] = 2 * score
    assert _instructions(counting, inputs) == usual


def test_only_tiles_with_large_sums_are_computed_again(counting: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workgroups compute eight tiles, of two sequences of one head. A tile with large sums is computed again, but not the
    other tiles of its workgroup: one such tile adds far fewer instructions than six."""
    monkeypatch.setattr(prefill, "current_compute_units", lambda: 1)
    counts = []
    for rows in ((), (slice(900, 912),), (slice(130, 512), slice(640, 1024))):
        inputs = _inputs([512, 512], torch.device("cpu"), heads=1, kv_heads=1)
        inputs["q"][..., 0] = 0.0
        inputs["k"][..., 0] = 0.0
        for some in rows:
            inputs["q"][some, 0, 0] = 4.0
        inputs["k"][[0, 512], :, 0] = 120.0  # a score of 60 with these queries
        counts.append(_instructions(counting, inputs))
        assert counting.launches[0].grid[0] <= 3
    none, one, six = counts
    assert none < one < none + (six - none) / 3


def test_slices_of_a_fused_tensor(gpu: torch.device) -> None:
    """Results are correct if q, k, v and out are slices of wider tensors. Only the slice of out is written."""
    inputs = _inputs([140, 9], gpu)
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], 1)
    q, k, v = fused.split(4, 1)
    wide = torch.full((149, 6, 64), 7.0, dtype=torch.bfloat16, device=gpu)
    out = wide[:, 1:5]
    got = mha_prefill(q, k, v, inputs["cu_seqlens"], return_lse=True, out=out)
    assert got[0] is out
    _check(got, _reference(inputs))
    assert (wide[:, [0, 5]] == 7).all()


def test_rows_that_are_padded(gpu: torch.device) -> None:
    """Results are correct if the strides of tokens and heads are multiples of 8 elements, but not of 16."""
    inputs = _inputs([140], gpu, heads=3, kv_heads=1)
    padded = {name: torch.nn.functional.pad(inputs[name], (0, 8))[..., :-8] for name in ("q", "k", "v")}
    assert all(each.stride(0) % 16 == each.stride(1) % 16 == 8 for each in padded.values())
    _check(mha_prefill(**{**inputs, **padded}, return_lse=True), _reference(inputs))


def test_rows_that_begin_anywhere(gpu: torch.device) -> None:
    """Results are correct if rows of k are not aligned to 16 bytes, and the last axis of v, sinks, offsets and out is not
    contiguous."""
    inputs = _inputs([77, 63], gpu, heads=2, kv_heads=2)
    shifted = torch.empty(140, 2, 65, dtype=torch.bfloat16, device=gpu)
    shifted[..., 1:] = inputs["k"]
    strided = torch.empty(140, 2, 128, dtype=torch.bfloat16, device=gpu)
    strided[..., ::2] = inputs["v"]
    sinks = torch.tensor([1.0, 9.0, -1.0, 9.0], device=gpu)[::2]
    offsets = torch.tensor([0, 9, 77, 9, 140, 9], dtype=torch.int32, device=gpu)[::2]
    changed = {**inputs, "k": shifted[..., 1:], "v": strided[..., ::2], "cu_seqlens": offsets, "sinks": sinks}
    out = torch.empty(140, 64, 2, dtype=torch.bfloat16, device=gpu).mT
    got = mha_prefill(**changed, return_lse=True, out=out)
    assert got[0] is out
    _check(got, _reference(inputs, sinks=sinks))


def test_sequences_do_not_see_each_other(gpu: torch.device) -> None:
    """NaN and infinity in a sequence change no result of the sequence before, although a block of keys may contain keys of both
    sequences."""
    inputs = _inputs([70, 90, 50], gpu)
    clean, _ = mha_prefill(**inputs, return_lse=True)
    for name, value in (("k", float("nan")), ("v", float("inf"))):
        inputs[name][70:160] = value
    out, _ = mha_prefill(**inputs, return_lse=True)
    others = torch.arange(210, device=gpu) // 10
    others = (others < 7) | (others >= 16)
    assert torch.equal(out[others], clean[others])
    assert not out[70:160].isfinite().any()


@pytest.mark.parametrize("lengths", [_slow([700]), _slow([500, 1, 129, 300]), [150, 1, 129]], ids=str)
@pytest.mark.parametrize("compute_units", [4, _slow(8), _slow(12)])
def test_more_tiles_than_workgroups(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, lengths: list[int], compute_units: int
) -> None:
    """Results do not depend on the number of workgroups, to which tiles are assigned. Some workgroups compute several tiles."""
    inputs = _inputs(lengths, gpu, heads=8, kv_heads=2)
    many = mha_prefill(**inputs, return_lse=True)
    monkeypatch.setattr(prefill, "current_compute_units", lambda: compute_units)
    few = mha_prefill(**inputs, return_lse=True)
    assert all(map(torch.equal, many, few))
    _check(few, _reference(inputs))


def test_more_sequences_than_lanes(gpu: torch.device) -> None:
    _run(gpu, [1, 0, 3, 130] * 20, {"heads": 1, "kv_heads": 1})


def test_lengths_are_not_read_on_the_host(gpu: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module(f"tokenspeed_kernel_amd.{arch}.attention.prefill").mha_prefill
    inputs = _inputs([140, 9], gpu)
    wanted = _reference(inputs)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a value of a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "__int__", "__bool__", "__index__"):
            patch.setattr(Tensor, name, refuse)
        got = unchecked(operator, launch)(**inputs, return_lse=True)
    _check(got, wanted)


def test_nothing_to_do(gpu: torch.device) -> None:
    for lengths in ([], [0], [0, 0, 0]):
        out, lse = mha_prefill(**_inputs(lengths, gpu), return_lse=True)
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)


# -- the operator's cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("mha_prefill"))
def test_a_case_of_the_operator(gpu: torch.device, case: Case) -> None:
    check_case(gpu, "mha_prefill", case)


# -- compiled code -------------------------------------------------------------------------------------------------------------


def _launch(emulator: Any, length: int, head_dim: int, **options: Any) -> Any:
    inputs = _inputs([length], torch.device("cpu"), heads=1, kv_heads=1, head_dim=head_dim)
    mha_prefill(**inputs, **options)
    return emulator.launches[-1]


VARIANTS = [
    (64, {}),
    pytest.param(64, {"window_left": 127, "sinks": torch.zeros(1)}, marks=pytest.mark.slow),
    pytest.param(64, {"window_left": 50, "sinks": torch.zeros(1), "logit_cap": 5.0, "return_lse": True}, marks=pytest.mark.slow),
    pytest.param(128, {}, marks=pytest.mark.slow),
    pytest.param(128, {"window_left": 50, "sinks": torch.zeros(1), "logit_cap": 5.0, "return_lse": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("head_dim", "options"), VARIANTS)
def test_resources(counting: Any, arch: str, head_dim: int, options: dict[str, Any]) -> None:
    """No VGPRs and few SGPRs are spilled, and three waves fit on a SIMD (two with head_dim 128, one on gfx942, which has less LDS).
    There is no scratch, no bank conflict, and no loop around a buffer instruction."""
    from gfx950_emulator.occupancy import occupancy

    launch = _launch(counting, 300, head_dim, **options)
    text = launch.program.assembly.text
    spills = dict(re.findall(r"\.(sgpr_spill_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", text))
    assert int(spills["vgpr_spill_count"]) == 0
    assert int(spills["private_segment_fixed_size"]) == 0
    assert int(spills["sgpr_spill_count"]) <= 40
    waves = 3 if head_dim == 64 else 2 if arch == "gfx950" else 1
    assert occupancy(launch.program.assembly, launch.waves, launch.lds).waves_per_simd >= waves
    assert launch.counters.total("lds_conflicts") == 0
    # A waterfall loop removes the lanes that it has handled from EXEC, and repeats while lanes remain.
    assert not re.search(r"s_(xor|andn2)_b64 exec, exec,.*\n(\s*[.;].*\n)*\s*s_cbranch_execnz", text)


STEPS = [("gfx950", 64, 172), pytest.param("gfx950", 128, 120, marks=pytest.mark.slow), ("gfx942", 64, 116)]


@pytest.mark.parametrize(("arch", "head_dim", "most"), STEPS, indirect=["arch"])
def test_instructions_of_a_step(counting: Any, head_dim: int, most: int) -> None:
    """Counts the executed instructions per 16 MFMAs of the unmasked loop, copies, branches and waits included.

    The tiles of a sequence of n tiles run n - 1, n - 2, ... steps of the loop. So the second difference of the total
    over n is the number of instructions of one tile's step.
    """
    counts = []
    for tiles in (2, 3, 4):
        counters = _launch(counting, 128 * tiles, head_dim).counters
        matrix = sum(line.executions for line in counters.lines() if line.instruction.mnemonic.startswith("v_mfma"))
        counts.append((counters.instructions, matrix))
    (a, x), (b, y), (c, z) = counts
    assert z - 2 * y + x > 0
    assert 16 * (c - 2 * b + a) / (z - 2 * y + x) <= most
