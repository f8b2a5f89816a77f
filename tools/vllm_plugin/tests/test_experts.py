"""Tests vLLM's layer of experts with our method, from loading to output. Results are compared with plain PyTorch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="experts are served by the core's kernels")

from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import mxfp4
from vllm_experts import EXPERTS, HIDDEN, check, checkpoint, expected, inputs, load, make_layer, run

from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_vllm.experts import config as ours
from tokenspeed_kernel_vllm.experts import planning
from tokenspeed_kernel_vllm.experts.method import GptOssExperts


def test_a_layer(one_process: Any) -> None:
    """vLLM's runner computes the layer: routing, experts, biases, and activation."""
    layer, tensors = make_layer(96), checkpoint(96)
    assert isinstance(layer.routed_experts.quant_method, GptOssExperts)
    load(layer, tensors)
    x, logits = inputs()
    check(run(one_process, layer, x, logits), expected(tensors, x, logits))


def test_shards_of_a_size_that_is_no_multiple_of_a_block(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's count, each of two ranks has 80 of 160 features. The loader gives 96 features to the first rank, and 64 to the
    second."""
    tensors = checkpoint(160)
    x, logits = inputs()
    total = torch.zeros(x.shape)
    for rank, shard in enumerate((slice(0, 96), slice(96, 160))):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(160, tp_size=2, prefix=f"model.layers.{rank}.mlp.experts")
        assert layer.routed_experts.w2_weight.shape == (EXPERTS, HIDDEN, 48)
        load(layer, tensors, shard=shard, first=rank == 0)
        total += run(one_process, layer, x, logits).float()
    check(total, expected(tensors, x, logits), 0.02)


def test_experts_of_two_ranks(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank routes among all experts, and computes only its own experts."""
    one_process.parallel_config.enable_expert_parallel = True
    tensors = checkpoint(96)
    x, logits = inputs()
    total = torch.zeros(x.shape)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(96, tp_size=2, prefix=f"model.layers.{rank}.mlp.experts")
        assert layer.routed_experts.expert_map.tolist() == ([0, 1, 2, 3] + [-1] * 4 if rank == 0 else [-1] * 4 + [0, 1, 2, 3])
        load(layer, tensors, experts=slice(4 * rank, 4 * rank + 4))
        total += run(one_process, layer, x, logits).float()
    check(total, expected(tensors, x, logits), 0.02)


def test_weights_that_were_arranged_are_not_kept_twice(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenspeed_kernel

    layer, tensors = make_layer(96), checkpoint(96)
    kept_bias = layer.routed_experts.w2_bias.data

    def arrange(weights: Any, plan: Any) -> Any:
        copies = {name: value.clone() for name, value in vars(weights).items() if isinstance(value, Tensor)}
        return tokenspeed_kernel.MoEWeights(**copies | {"w2_weight_bias": weights.w2_weight_bias})

    monkeypatch.setattr(tokenspeed_kernel.moe_apply, "prepare", arrange)
    load(layer, tensors)
    assert layer.routed_experts.w13_weight.numel() == 0
    assert layer.routed_experts.w2_bias.data_ptr() == kept_bias.data_ptr()
    x, logits = inputs()
    check(run(one_process, layer, x, logits), expected(tensors, x, logits))


def test_experts_are_called_before_the_first_request(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up calls the layer in all sizes below the largest batch; vLLM itself runs the largest batch. Experts of other ranks
    are skipped."""
    layer, tensors = make_layer(96), checkpoint(96)
    load(layer, tensors)
    method, sizes = layer.routed_experts.quant_method, []
    apply = method.ops.moe_apply

    def call(x: Tensor, *args: Any) -> Tensor:
        sizes.append(len(x))
        out: Tensor = apply(x, *args)
        assert out.isfinite().all()
        return out

    monkeypatch.setattr(method, "ops", SimpleNamespace(moe_topk=method.ops.moe_topk, moe_apply=call))
    method.warm(layer.routed_experts, 40, torch.device("cpu"))
    assert sizes == [1, 2, 4, 8, 15, 16, 31, 32]


# -- fallback to vLLM -----------------------------------------------------------------------------------------------------------


class Own(GptOssExperts):
    """Replaces vLLM's own method, which needs a GPU."""

    def __init__(self, moe: Any) -> None:
        plan = SimpleNamespace(hidden_size=moe.hidden_dim, intermediate_size=moe.intermediate_size_per_partition)
        super().__init__(moe, plan)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about layers that fall back to vLLM."""
    said: list[str] = []
    monkeypatch.setattr(mxfp4, "GptOssMxfp4MoEMethod", Own)
    monkeypatch.setattr(ours.logger, "warning_once", lambda text, *args: said.append(text % args))
    return said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "silu"}, "activation silu"),
        ({"renormalize": False}, "a routing other than"),
        ({"scoring_func": "sigmoid"}, "a routing other than"),
        ({"apply_router_weight_on_input": True}, "routing weights on the input"),
    ],
)
def test_vllm_serves_what_is_refused(one_process: Any, own: list[str], options: dict[str, Any], reason: str) -> None:
    layer = make_layer(96, **options)
    assert isinstance(layer.routed_experts.quant_method, Own)
    assert len(own) == 1
    assert own[0].startswith("tokenspeed_kernel_vllm: vLLM's own MXFP4 experts, because it does not serve")
    assert reason in own[0]
    assert "\n" not in own[0]


def test_the_reason_of_every_kernel_is_logged(one_process: Any, own: list[str]) -> None:
    """On a device without eligible kernels, the log line is the output of `explain`."""
    without_triton = dataclasses.replace(named_platform("sm_50"), features=frozenset())
    with use_platform(without_triton):
        layer = make_layer(96)
    assert isinstance(layer.routed_experts.quant_method, Own)
    assert "only reference_moe_apply is eligible, and it waits for the device" in own[0]
    assert "moe.moe_apply on sm_50" in own[0]
    assert "needs triton, which " in own[0]


def test_without_the_core(one_process: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "core_is_there", lambda: False)
    make_layer(96)
    assert "tokenspeed-kernel, which chooses among kernels, is not installed" in own[0]


def test_other_layers_are_vllms(one_process: Any) -> None:
    linear = LinearBase(8, 8)
    assert isinstance(ours.GptOssConfig().get_quant_method(linear, "lm_head"), UnquantizedLinearMethod)
