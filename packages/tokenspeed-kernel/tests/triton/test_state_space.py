"""Tests the kernels of state-space models beyond the shared cases: layouts of caches, many sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel.triton.state_space import causal_conv1d_prefill as convolution
from tokenspeed_kernel.triton.state_space import ssd_prefill as launcher
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.state_space import causal_conv1d_decode as conv_decode
from tokenspeed_kernel_base.ops.state_space import causal_conv1d_prefill as conv_prefill
from tokenspeed_kernel_base.ops.state_space import ssd_decode, ssd_prefill

DEVICE = default_device()
F32 = torch.float32


def _same(operator: Any, arguments: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compares results and states with the reference's. The reference gets a contiguous copy of the states."""
    wanted_states = arguments["states"].clone(memory_format=torch.contiguous_format)
    got = operator(**arguments, solution="triton")
    wanted = operator(**{**arguments, "states": wanted_states}, solution="reference")
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(arguments["states"], wanted_states, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["channels first", "between others"])
def test_convolutions_of_caches_of_any_layout(layout: str) -> None:
    """Tests two layouts of engines: channels are the outer axis of a state, or states of several layers share an allocation."""
    prefill = conv_prefill._inputs([5, 0, 2, 70], 40, 3, F32, bias=True)(Draw(DEVICE))
    decode = conv_decode._inputs(5, 40, 3, 3, F32, kept=True, padding=1)(Draw(DEVICE))
    for operator, arguments in ((tk.causal_conv1d_prefill, prefill), (tk.causal_conv1d_decode, decode)):
        states = arguments["states"]
        if layout == "channels first":
            arguments["states"] = states.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            arguments["states"] = torch.stack((states, states), dim=1)[:, 1]
        arguments["x"] = arguments["x"].mT.contiguous().mT
        _same(operator, arguments)


def test_a_convolution_of_more_sequences_than_one_chunk_of_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_AT_ONCE", 8)
    lengths = [1, 0, 2, 0, 5, 0, 0] * 3
    _same(tk.causal_conv1d_prefill, conv_prefill._inputs(lengths, 8, 4, F32)(Draw(DEVICE)))


def test_a_convolution_writes_over_its_input_token_by_token() -> None:
    arguments = conv_decode._inputs(9, 24, 3, dtype=F32)(Draw(DEVICE))
    wanted = tk.causal_conv1d_decode(**{**arguments, "states": arguments["states"].clone()}, solution="reference")
    assert tk.causal_conv1d_decode(**arguments, out=arguments["x"], solution="triton") is arguments["x"]
    torch.testing.assert_close(arguments["x"], wanted)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
def test_recurrences_across_chunks_and_segments(chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests sequences that end at the ends of chunks and segments, and one token before or after. Segments have few chunks, so
    there are many segments."""
    monkeypatch.setattr(launcher, "_SEGMENT_CHUNKS", chunks)
    monkeypatch.setattr(launcher, "sm_count_of", lambda device: 1 << 20)
    chunk = launcher.tile_for(dtype, 4, 4, for_architecture(launcher._LIMITS, DEVICE)).chunk
    lengths = [2 * chunk * chunks + 1, chunk * chunks - 1, 0, chunk * chunks, 1, chunk * chunks + 1]
    arguments = ssd_prefill._inputs(lengths, 1, 4, 4, dtype=dtype, padding=1)(Draw(DEVICE))
    arguments["has_initial_state"][:2] = True
    _same(tk.ssd_prefill, arguments, 1e-4 if dtype == F32 else 3e-2)


def test_recurrences_of_tensors_and_caches_of_any_layout() -> None:
    """Tests layouts of engines: x, B and C are slices of a convolution's output, and states of several layers share an
    allocation."""
    prefill = ssd_prefill._inputs([20, 0, 7], 4, 8, 16, 2, F32)(Draw(DEVICE))
    decode = ssd_decode._inputs(3, 4, 8, 16, 2, 2, F32, kept=True)(Draw(DEVICE))
    for operator, arguments in ((tk.ssd_prefill, prefill), (tk.ssd_decode, decode)):
        leading = arguments["x"].shape[:-2]
        both = torch.cat([arguments[name].flatten(-2) for name in ("x", "B", "C")], dim=-1)
        for name, slice in zip(("x", "B", "C"), both.split((32, 32, 32), dim=-1), strict=True):
            arguments[name] = slice.unflatten(-1, arguments[name].shape[-2:])
            assert arguments[name].shape[:-2] == leading
        arguments["z"], arguments["dt"] = (arguments[name].mT.contiguous().mT for name in ("z", "dt"))
        arguments["states"] = torch.stack((arguments["states"],) * 2, dim=1)[:, 1].transpose(2, 3).contiguous().transpose(2, 3)
        _same(operator, arguments, 1e-4)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("log", "every"), [(-105.0, 2), (-1e6, 10)])
def test_a_token_that_resets_the_state_does_not_blur_its_neighbours(log: float, every: int, dtype: torch.dtype) -> None:
    """Compares with float64. Most tokens' log decays are -0.4 to -0.004, some tokens' -105 or -1e6, which resets the state."""
    assert torch.tensor(-104.0).exp() == 0, "the kernel takes smaller logs for this one"
    arguments = ssd_prefill._inputs([70], 1, 16, 16, dtype=dtype, full=False, initial=True)(Draw(DEVICE))
    arguments["A"] = torch.full_like(arguments["A"], -4.0)
    outliers = arguments["dt"][::every]
    arguments["x"][::every] *= 0.05 / (log / -4.0)  # no token's step dominates the others
    outliers.fill_(log / -4.0)
    wanted = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in arguments.items()}
    got = tk.ssd_prefill(**arguments, solution="triton")
    exact = tk.ssd_prefill(**wanted, solution="reference")
    slot = arguments["state_slots"].long()
    for result, truth in ((got, exact), (arguments["states"][slot], wanted["states"][slot])):
        difference = (result.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        assert difference.max() < (1e-5 if dtype == F32 else 0.01)


def test_a_nan_step_gives_nan() -> None:
    arguments = ssd_prefill._inputs([40], 1, 4, 4, dtype=F32, full=False)(Draw(DEVICE))
    arguments["dt"][20] = torch.nan
    assert tk.ssd_prefill(**arguments, solution="triton")[20:].isnan().all()
    assert arguments["states"][arguments["state_slots"].long()].isnan().all()


@pytest.mark.parametrize(("dt", "softplus"), [(-30.0, True), (-7.0, True), (-0.1, True), (0.1, True), (30.0, True), (0.0, False)])
def test_steps_of_any_size(dt: float, softplus: bool) -> None:
    """Steps of every size must have full relative precision in float32, because the state is computed from them."""
    arguments = ssd_decode._inputs(1, 2, 4, 4, dtype=F32, full=False)(Draw(DEVICE))
    arguments |= {"dt": torch.full_like(arguments["dt"], dt), "dt_softplus": softplus}
    arguments["states"] = torch.zeros_like(arguments["states"])
    wanted = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in arguments.items()}
    tk.ssd_decode(**arguments, solution="triton")
    tk.ssd_decode(**wanted, solution="reference")
    torch.testing.assert_close(arguments["states"].double(), wanted["states"], rtol=2e-6, atol=0.0)
