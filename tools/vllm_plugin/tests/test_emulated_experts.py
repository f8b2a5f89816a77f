"""Tests GPT-OSS's experts in vLLM's runner, with the AMD wheel's kernels on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="experts are served by the core's kernels")
pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
pytest.importorskip("tokenspeed_kernel_amd", reason="needs a wheel that an emulator can run")
emulator = pytest.importorskip("gfx950_emulator", reason="needs the emulator")

from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm_experts import checkpoint, inputs, load, make_layer, run

from tokenspeed_kernel_vllm.experts import planning


@pytest.fixture
def emulated(one_process: Any) -> Iterator[None]:
    with emulator.emulated_gfx950():
        yield


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about layers that our kernels run."""
    found: list[str] = []
    monkeypatch.setattr(planning.logger, "info_once", lambda text, *args: found.append(text % args))
    return found


LINE = (
    "tokenspeed_kernel_vllm: MXFP4 experts by gluon_moe_apply_mxfp4; routing fused, by gluon_moe_topk_apply_mxfp4; "
    "activations %s (TOKENSPEED_VLLM_ACTIVATIONS)"
)


def test_activations_are_unrounded_unless_asked_for(emulated: None, one_process: Any, said: list[str]) -> None:
    load(make_layer(96), checkpoint(96))
    assert said == [LINE % "unrounded"]


def test_one_kernel_routes_and_computes(one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With routing in the gate/up projection, a small batch takes two launches. Without, it takes three. The top-k weights may
    differ in their last bit, which changes a result by at most one rounding to bf16."""
    monkeypatch.setenv("TOKENSPEED_VLLM_ACTIVATIONS", "fp8")
    tensors, (x, logits) = checkpoint(96), inputs()
    reference = make_layer(96, prefix="model.layers.1.mlp.experts")
    load(reference, tensors)
    wanted = run(one_process, reference, x, logits)
    with emulator.emulated_gfx950() as running:
        layer = make_layer(96)
        load(layer, tensors)
        method, results, launches = layer.routed_experts.quant_method, [], []
        assert method.routed
        for routed in (True, False):
            method.routed = routed
            del running.launches[:]
            results.append(run(one_process, layer, x, logits))
            launches.append(len(running.launches))
    assert said[1:] == [LINE % "rounded to fp8"]
    assert launches == [2, 3]
    torch.testing.assert_close(*results, rtol=2**-7, atol=0)
    # A different order of summation moves some activations to the neighbouring fp8 value. The bound is that of the wheel's own
    # tests.
    assert (results[0].float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()


def test_experts_of_a_rank_are_routed_separately(
    emulated: None, one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused kernel would route among this rank's experts only, so under expert parallelism routing is a separate call."""
    one_process.parallel_config.enable_expert_parallel = True
    monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda: 0)
    layer = make_layer(96, tp_size=2)
    load(layer, checkpoint(96), experts=slice(0, 4))
    assert not layer.routed_experts.quant_method.routed
    assert "routing separate" in said[0]
