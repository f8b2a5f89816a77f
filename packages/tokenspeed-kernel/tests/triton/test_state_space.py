"""Kernels of state-space models where the cases that all kernels share do not look: layouts of caches, many sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.state_space import causal_conv1d_decode as conv_decode
from tokenspeed_kernel_base.ops.state_space import causal_conv1d_prefill as conv_prefill

DEVICE = default_device()
F32 = torch.float32


def _same(operator: Any, arguments: dict[str, Any], tolerance: float = 1e-5) -> None:
    """The result and the states, of which the reference gets a copy that is contiguous."""
    wanted_states = arguments["states"].clone(memory_format=torch.contiguous_format)
    got = operator(**arguments, solution="triton")
    wanted = operator(**{**arguments, "states": wanted_states}, solution="reference")
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(arguments["states"], wanted_states, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["channels first", "between others"])
def test_convolutions_of_caches_of_any_layout(layout: str) -> None:
    """As engines have them: a state's channels outermost, or states of several layers in one block of memory."""
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


def test_a_convolution_of_more_sequences_than_are_looked_at_together() -> None:
    lengths = [1, 0, 2, 0, 5, 0, 0] * 40
    _same(tk.causal_conv1d_prefill, conv_prefill._inputs(lengths, 8, 4, F32)(Draw(DEVICE)))


def test_a_convolution_writes_over_its_input_token_by_token() -> None:
    arguments = conv_decode._inputs(9, 24, 3, dtype=F32)(Draw(DEVICE))
    wanted = tk.causal_conv1d_decode(**{**arguments, "states": arguments["states"].clone()}, solution="reference")
    assert tk.causal_conv1d_decode(**arguments, out=arguments["x"], solution="triton") is arguments["x"]
    torch.testing.assert_close(arguments["x"], wanted)
