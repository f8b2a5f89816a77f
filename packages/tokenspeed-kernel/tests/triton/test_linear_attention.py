"""Tests the kernels of the gated delta rule beyond the operators' cases: lengths around chunk ends, gates that reset the state,
equal keys, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.linear_attention import gated_delta_rule_decode as decoding
from tokenspeed_kernel_base.ops.linear_attention import gated_delta_rule_prefill as prefilling

DEVICE = default_device()
# The tolerance for float16. The kernel rounds a chunk's matrices to float16 on a GPU; in the interpreter they stay float32.
CLOSE = {"atol": 4e-3, "rtol": 4e-3}


def _compared(operator: Any, arguments: dict[str, Any], tolerance: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Compares the kernel's outputs and states with the reference's, and returns the kernel's. The reference gets contiguous
    states, the kernel the states with their own strides."""
    initial = arguments["states"].clone(memory_format=torch.contiguous_format)
    wanted_states = initial.clone()
    wanted = operator(**{**arguments, "states": wanted_states}, solution="reference")
    got = operator(**arguments, solution="triton")
    states = arguments["states"].clone(memory_format=torch.contiguous_format)
    arguments["states"].copy_(initial)
    for found, right in ((got, wanted), (states, wanted_states)):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, right, **tolerance)
    return got, states


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_sequences_that_end_around_chunks(gate: str) -> None:
    """Sequences of 0, 1, 63, 64, 65 and 129 tokens in one call, with and without an initial state."""
    lengths = [63, 0, 1, 64, 65, 0, 129]
    options: dict[str, Any] = {"heads": 1, "v_heads": 1, "k_dim": 16, "v_dim": 16, "dtype": torch.float16, "initial": True}
    arguments = prefilling._inputs(lengths, **options, gate=gate)(Draw(DEVICE))
    out, states = _compared(tk.gated_delta_rule_prefill, arguments, CLOSE)
    # A sequence that is run alone, in two calls that split it inside a chunk, must have the same results.
    bounds = arguments["cu_seqlens"].tolist()
    per_token = ("q", "k", "v", "g", "beta")
    for sequence in (4, 6):
        begin, end = bounds[sequence : sequence + 2]
        again = arguments["states"].clone()
        for first, last in ((begin, begin + 40), (begin + 40, end)):
            part = {name: arguments[name][first:last] for name in per_token}
            cu_seqlens = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
            started = torch.tensor([first > begin or bool(arguments["has_initial_state"][sequence])], device=DEVICE)
            slot = arguments["state_slots"][sequence : sequence + 1]
            call = {**part, "states": again, "cu_seqlens": cu_seqlens, "state_slots": slot, "has_initial_state": started}
            found = tk.gated_delta_rule_prefill(**call, solution="triton")
            torch.testing.assert_close(found, out[first:last], **CLOSE)
        torch.testing.assert_close(again[slot.long()], states[slot.long()], **CLOSE)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gates_that_reset_the_state_and_equal_keys(gate: str) -> None:
    """With these gates, exponentials of cumulative gates overflow or underflow inside a chunk. With equal keys, so do powers of the
    matrix of the chunk's triangular system."""
    arguments = prefilling._inputs([70], 1, 2, 32, 16, torch.float32, gate=gate, initial=True)(Draw(DEVICE))
    arguments["g"][10:20] = -30.0
    arguments["g"][40] = -1e4
    if gate == "channel":
        arguments["g"][:, :, ::2] = 0.0
    _compared(tk.gated_delta_rule_prefill, arguments, {"atol": 2e-5, "rtol": 2e-5})
    arguments["k"] = arguments["k"][:1].expand_as(arguments["k"])
    arguments["g"] = torch.full_like(arguments["g"], -1e-4)
    arguments["beta"] = torch.ones_like(arguments["beta"])
    _compared(tk.gated_delta_rule_prefill, arguments, {"atol": 1e-4, "rtol": 1e-4})


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_operands_and_states_with_gaps(gate: str) -> None:
    options: dict[str, Any] = {
        "heads": 1,
        "v_heads": 2,
        "k_dim": 24,
        "v_dim": 20,
        "dtype": torch.float32,
        "gate": gate,
        "raw_gates": True,
    }
    tight = {"atol": 1e-5, "rtol": 1e-5}
    for operator, make in (
        (tk.gated_delta_rule_prefill, prefilling._inputs([3, 35], **options, initial=True, qk_l2norm=True)),
        (tk.gated_delta_rule_decode, decoding._inputs(2, 2, **options, outputs=True, qk_l2norm=True)),
    ):
        arguments = make(Draw(DEVICE))
        for name in ("q", "k", "v", "g", "beta"):
            arguments[name] = arguments[name].repeat_interleave(2, dim=-1)[..., ::2]
        # States are stored column-major, as in vLLM and fla, with gaps between slots.
        states = torch.cat((arguments["states"],) * 2, dim=1).transpose(2, 3).contiguous().transpose(2, 3)[:, :2]
        assert states.stride()[1:] == (20 * 24, 1, 24)
        arguments["states"] = states
        _compared(operator, arguments, tight)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_state_of_many_channels_is_decoded_by_several_warps(gate: str) -> None:
    arguments = decoding._inputs(2, 3, 1, 1, 520, 9, torch.float32, gate=gate, outputs=True)(Draw(DEVICE))
    _compared(tk.gated_delta_rule_decode, arguments, {"atol": 2e-5, "rtol": 2e-5})


def test_gates_of_many_channels_in_shorter_chunks() -> None:
    arguments = prefilling._inputs([35], 1, 1, 136, 16, torch.float16, gate="channel", initial=True)(Draw(DEVICE))
    _compared(tk.gated_delta_rule_prefill, arguments, CLOSE)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_nan_gate_gives_nan(gate: str) -> None:
    arguments = prefilling._inputs([40], heads=1, v_heads=1, k_dim=16, v_dim=16, dtype=torch.float32, gate=gate)(Draw(DEVICE))
    arguments["g"][20] = torch.nan
    assert tk.gated_delta_rule_prefill(**arguments, solution="triton")[20:].isnan().all()
    assert arguments["states"][arguments["state_slots"].long()].isnan().all()
