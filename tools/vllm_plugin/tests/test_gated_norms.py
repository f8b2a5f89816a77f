"""Compares vLLM's gated norm, run on the core's kernel, with vLLM's own method."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="gated norms are the core's")

from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNormGated

from tokenspeed_kernel_vllm import gated_norms, parts
from tokenspeed_kernel_vllm.gated_norms import GatedNorm
from tokenspeed_kernel_vllm.settings import Settings

HIDDEN = 32


@pytest.fixture(autouse=True)
def _registered(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    parts.register_parts(Settings(attention=False, experts=False, gated_norms=True))


def make(**options: Any) -> Any:
    norm = RMSNormGated(HIDDEN, eps=1e-6, **options)
    assert type(norm) is GatedNorm
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)))
    return norm


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, z = (torch.randn(5, 3, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    return x, z


@torch.inference_mode()
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_results_are_vllms_own(norm_before_gate: bool, activation: str) -> None:
    norm = make(norm_before_gate=norm_before_gate, activation=activation)
    norm.own = None  # not called
    x, z = inputs()
    out = norm(x, z)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    torch.testing.assert_close(out, norm.forward_native(x, z))


@torch.inference_mode()
def test_what_is_not_served_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, z = inputs()
    norm = make()
    norm.own = norm.forward_native
    torch.testing.assert_close(norm(x), norm.forward_native(x))  # no gate
    torch.testing.assert_close(norm(x, z.float()), norm.forward_native(x, z.float()))
    groups = make(group_size=16)
    assert groups._forward_method is groups.own

    def refuse(*_: Any) -> Any:
        raise gated_norms.NotServedError("no kernel")

    monkeypatch.setattr(gated_norms, "kernel_for", refuse)
    refused = make()
    assert refused._forward_method is refused.own


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    parts.register_parts(Settings(attention=False, experts=False))
    assert type(RMSNormGated(HIDDEN)) is RMSNormGated
