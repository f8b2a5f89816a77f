"""Tests unquantised experts and fp8 experts with block scales in vLLM's layer. Results are compared with plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="experts are served by the core's kernels")

from vllm.model_executor import custom_op
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm_routed import EXPERTS, HIDDEN, INTERMEDIATE, check, inputs, layer_of, run, weighted

import tokenspeed_kernel_vllm
from tokenspeed_kernel_vllm import parts
from tokenspeed_kernel_vllm.experts import planning, routed

DENSE, FP8 = "dense", "fp8"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables this part of the plugin. vLLM's tables are restored after the test."""
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(custom_op, "op_registry_oot", table := {})
    monkeypatch.setattr(fp8, "Fp8MoEMethod", Own)
    monkeypatch.setattr(routed, "Fp8MoEMethod", Own)
    monkeypatch.setenv("TOKENSPEED_VLLM_OTHER_EXPERTS", "1")
    tokenspeed_kernel_vllm.register()
    tokenspeed_kernel_vllm.register()
    assert table == {parts.DENSE: routed.DenseExperts}


class Own(routed.BlockFp8Experts):
    """Replaces vLLM's own fp8 method, which needs a GPU."""

    def __init__(self, config: Any, layer: Any) -> None:
        super(routed.ServedExperts, self).__init__(layer.moe_config)


def make_layer(kind: str, **options: Any) -> Any:
    config = None
    if kind == FP8:
        config = quantization.get_quantization_config("fp8").from_config(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]}
        )
    return layer_of(config, **options)


def checkpoint(kind: str, intermediate: int = INTERMEDIATE) -> dict[str, Tensor]:
    """Returns weights of experts under the names of checkpoints: w1 is the gate, w3 is up, w2 is down."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"w1": (intermediate, HIDDEN), "w3": (intermediate, HIDDEN), "w2": (HIDDEN, intermediate)}
    made = {}
    for name, (rows, columns) in shapes.items():
        values = torch.randn(EXPERTS, rows, columns, generator=draw) * columns**-0.5
        if kind == DENSE:
            made[name] = values.bfloat16()
            continue
        scale = torch.rand(EXPERTS, -(-rows // 128), -(-columns // 128), generator=draw) * 1e-3 + 1e-3
        made[name] = (values / spread(scale, values)).to(torch.float8_e4m3fn)
        made[f"{name}_scale"] = scale
    return made


def spread(scale: Tensor, values: Tensor) -> Tensor:
    return scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : values.shape[1], : values.shape[2]]


def decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    values = tensors[name].float()
    return values * spread(tensors[f"{name}_scale"], values) if f"{name}_scale" in tensors else values


def load(layer: Any, tensors: dict[str, Tensor], scale: str = "weight_scale_inv") -> None:
    """Loads weights like vLLM's models: one expert's tensor at a time, by the parameter's own loader."""
    experts = layer.routed_experts
    for name in ("w1", "w2", "w3"):
        target = "w2" if name == "w2" else "w13"
        kinds = {"weight": tensors[name], **({scale: tensors[f"{name}_scale"]} if f"{name}_scale" in tensors else {})}
        for kind, values in kinds.items():
            parameter = getattr(experts, f"{target}_{kind}")
            for expert in range(EXPERTS):
                parameter.weight_loader(parameter, values[expert], f"experts.{name}.{kind}", shard_id=name, expert_id=expert)
    model = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)
    process_weights_after_loading(layer, model, torch.device("cpu"))


def expected(tensors: dict[str, Tensor], x: Tensor, logits: Tensor) -> Tensor:
    return weighted(*(decoded(tensors, name) for name in ("w1", "w3", "w2")), x, logits)


@pytest.mark.parametrize("kind", [DENSE, FP8])
def test_a_layer(one_process: Any, kind: str) -> None:
    """vLLM's loader loads the layer, and vLLM's runner and router run it."""
    layer, tensors = make_layer(kind), checkpoint(kind)
    method = layer.routed_experts.quant_method
    assert type(method) is (routed.DenseExperts if kind == DENSE else routed.BlockFp8Experts)
    load(layer, tensors)
    x, logits = inputs()
    check(run(one_process, layer, x, logits), expected(tensors, x, logits))
    assert method.get_fused_moe_quant_config(layer.routed_experts) is None


@pytest.mark.parametrize("kind", [DENSE, FP8])
def test_experts_of_two_ranks(one_process: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    one_process.parallel_config.enable_expert_parallel = True
    tensors = checkpoint(kind)
    x, logits = inputs()
    total = torch.zeros(x.shape)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(kind, tp_size=2, prefix=f"model.layers.{rank}.mlp.experts")
        load(layer, tensors)
        assert layer.routed_experts.w2_weight.shape[0] in (EXPERTS // 2, 0)
        total += run(one_process, layer, x, logits).float()
    check(total, expected(tensors, x, logits))


@pytest.mark.parametrize("kind", [DENSE, FP8])
def test_shards_of_two_ranks(one_process: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tensors = checkpoint(kind, 2 * INTERMEDIATE)
    x, logits = inputs()
    total = torch.zeros(x.shape)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(kind, tp_size=2, intermediate_size=2 * INTERMEDIATE, prefix=f"model.layers.{rank}.mlp.experts")
        load(layer, tensors)
        total += run(one_process, layer, x, logits).float()
    check(total, expected(tensors, x, logits))


@pytest.mark.parametrize("kind", [DENSE, FP8])
def test_activations_are_rounded_if_asked_for(one_process: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """vLLM's own fp8 experts round activations, too. A line of the log says which kernel runs, and how activations are rounded."""
    said: list[str] = []
    monkeypatch.setattr(planning.logger, "info_once", lambda text, *args: said.append(text % args))
    monkeypatch.setenv("TOKENSPEED_VLLM_ACTIVATIONS", "fp8")
    layer, tensors = make_layer(kind), checkpoint(kind)
    load(layer, tensors)
    x, logits = inputs()
    got, wanted = run(one_process, layer, x, logits).float(), expected(tensors, x, logits)
    assert 0.01 < (got - wanted).norm() / wanted.norm() <= 0.06
    assert len(said) == 1
    assert said[0].endswith("routing separate; activations rounded to fp8 (TOKENSPEED_VLLM_ACTIVATIONS)")


def test_all_sizes_are_called_before_the_first_request(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(DENSE)
    load(layer, checkpoint(DENSE))
    served, sizes = layer.routed_experts.quant_method.served, []
    apply = served.ops.moe_apply

    def call(x: Tensor, *args: Any) -> Tensor:
        sizes.append(len(x))
        out: Tensor = apply(x, *args)
        assert out.isfinite().all()
        return out

    monkeypatch.setattr(served, "ops", SimpleNamespace(moe_apply=call))
    served.warm(layer.routed_experts, 40, torch.device("cpu"))
    assert sizes == [1, 2, 4, 8, 15, 16, 31, 32]


# -- fallback to vLLM -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about layers that fall back to vLLM. vLLM's own unquantised method is kept from selecting a kernel,
    which needs a GPU."""
    found: list[str] = []
    monkeypatch.setattr(routed.logger, "warning_once", lambda text, *args: found.append(text % args))
    none = SimpleNamespace(is_monolithic=lambda: False)
    monkeypatch.setattr(unquantized, "select_unquantized_moe_backend", lambda *_, **__: (None, none))
    return found


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (DENSE, {"activation": "gelu"}, "activation gelu"),
        (FP8, {"activation": "gelu"}, "activation gelu"),
        (FP8, {"swiglu_limit": 7.0}, "clamped or scaled activations"),
        (FP8, {"intermediate_size": 64}, "64 features a rank, which are not whole blocks"),
    ],
)
def test_vllm_serves_what_is_refused(
    one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], reason: str
) -> None:
    layer = make_layer(kind, **options)
    method = layer.routed_experts.quant_method
    assert type(method) is (routed.DenseExperts if kind == DENSE else Own)
    assert getattr(method, "served", None) is None
    assert len(said) == 1
    assert reason in said[0]


def test_other_blocks_are_vllms(one_process: Any, said: list[str]) -> None:
    config = quantization.get_quantization_config("fp8").from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
    )
    assert type(make_layer(DENSE, quant_config=config).routed_experts.quant_method) is Own
    assert "it serves scales of blocks of 128 x 128, not [64, 128]" in said[0]


def test_it_is_off_unless_asked_for(one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_VLLM_OTHER_EXPERTS")
    assert make_layer(DENSE).routed_experts.quant_method.served is None
    assert type(make_layer(FP8, prefix="model.layers.1.mlp.experts").routed_experts.quant_method) is Own
    assert said == []
    monkeypatch.setattr(custom_op, "op_registry_oot", table := {})
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    tokenspeed_kernel_vllm.register()
    assert table == {}
    assert quantization.get_quantization_config("fp8") is fp8.Fp8Config


def test_another_plugin_keeps_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(parts.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(custom_op, "op_registry_oot", table := {parts.DENSE: object})
    tokenspeed_kernel_vllm.register()
    assert table == {parts.DENSE: object}
    assert said == [
        "tokenspeed_kernel_vllm: no unquantised experts, because <class 'object'> replaces UnquantizedFusedMoEMethod already"
    ]
