"""Tests MXFP4 and NVFP4 experts of compressed-tensors, ModelOpt and Quark checkpoints in vLLM's layer, loaded by vLLM's loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("compressed_tensors.quantization", reason="vLLM reads compressed-tensors checkpoints with it")
pytest.importorskip("tokenspeed_kernel", reason="experts are served by the core's kernels")

from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
)
from vllm.model_executor.layers.quantization.quark import quark_moe
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm_checkpoints import BLOCKS, KINDS, config_of
from vllm_routed import EXPERTS, HIDDEN, INTERMEDIATE, check, inputs, layer_of, run, weighted

import tokenspeed_kernel_vllm
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_vllm import settings
from tokenspeed_kernel_vllm.experts import planning, routed
from tokenspeed_kernel_vllm.experts.packed import CompressedFp4Experts, Fp4Experts, ModelOptFp4Experts
from tokenspeed_kernel_vllm.settings import WHY_OFF, WHY_ON

OURS = {"compressed": CompressedFp4Experts, "modelopt": ModelOptFp4Experts, "quark": Fp4Experts}
EXPERT_KINDS = [kind for kind in KINDS if kind not in ("modelopt mixed", "compressed mxfp4a16")]
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def registered(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables this part of the plugin. vLLM's tables are restored after the test. vLLM's own methods are kept from selecting a
    kernel, which needs a GPU."""
    none = (SimpleNamespace(value="none"), SimpleNamespace(is_monolithic=lambda: False))
    for module in (modelopt, nvfp4):
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda **_: none)
        monkeypatch.setattr(module, "is_global_sf_supported_for_nvfp4_backend", lambda _: False)
    monkeypatch.setattr(quark_moe, "select_mxfp4_moe_backend", lambda *_, **__: none)
    monkeypatch.setattr(quark_moe, "backend_to_kernel_cls", lambda _: [none[1]])
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    model = SimpleNamespace(dtype=torch.bfloat16, quantization_config=None, hf_config=SimpleNamespace())
    monkeypatch.setattr(one_process, "model_config", model)
    monkeypatch.setenv("TOKENSPEED_VLLM_OTHER_EXPERTS", "1")
    tokenspeed_kernel_vllm.register()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about layers of experts."""
    found: list[str] = []
    monkeypatch.setattr(planning.logger, "info_once", lambda text, *args: found.append(text % args))
    monkeypatch.setattr(routed.logger, "warning_once", lambda text, *args: found.append(text % args))
    return found


def checkpoint(kind: str, intermediate: int = INTERMEDIATE) -> dict[str, Tensor]:
    """Returns packed weights, block scales and global scales under the names of checkpoints: w1 is the gate, w3 is up, w2 is
    down. Global scales are multipliers."""
    draw, fmt = torch.Generator().manual_seed(1), KINDS[kind][1]
    shapes = {"w1": (intermediate, HIDDEN), "w3": (intermediate, HIDDEN), "w2": (HIDDEN, intermediate)}
    made = {}
    for name, (rows, columns) in shapes.items():
        made[name] = torch.randint(256, (EXPERTS, rows, columns // 2), generator=draw, dtype=torch.uint8)
        shape = (EXPERTS, rows, columns // BLOCKS[fmt])
        if fmt == "mxfp4":
            made[f"{name}_scale"] = torch.randint(121, 124, shape, generator=draw, dtype=torch.uint8)
        else:
            made[f"{name}_scale"] = (torch.rand(shape, generator=draw) * 20 + 4).to(torch.float8_e4m3fn)
    if fmt == "nvfp4":
        made["w1_whole"] = made["w3_whole"] = torch.rand(EXPERTS, generator=draw, dtype=torch.float32) * 1e-3 + 2e-3
        made["w2_whole"] = torch.rand(EXPERTS, generator=draw, dtype=torch.float32) * 1e-3 + 2e-3
    return made


def decoded(kind: str, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Returns dequantised weights in float32; vLLM decodes the e2m1 values."""
    packed, scale = tensors[name], tensors[f"{name}_scale"]
    values = break_fp4_bytes(packed.flatten(0, 1), torch.float32).view(*packed.shape[:2], -1)
    if KINDS[kind][1] == "mxfp4":
        return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    return values * scale.float().repeat_interleave(16, -1) * tensors[f"{name}_whole"].view(-1, 1, 1)


def expected(kind: str, tensors: dict[str, Tensor], x: Tensor, logits: Tensor) -> Tensor:
    return weighted(*(decoded(kind, tensors, name) for name in ("w1", "w3", "w2")), x, logits)


def make_layer(kind: str, **options: Any) -> Any:
    return layer_of(config_of(kind), **options)


def load(layer: Any, kind: str, tensors: dict[str, Tensor]) -> None:
    """Loads weights like vLLM's models: one expert's tensor at a time, by the parameter's own loader."""
    compressed = kind.startswith("compressed")
    experts = layer.routed_experts
    for name in ("w1", "w2", "w3"):
        target = "w2" if name == "w2" else "w13"
        whole = tensors.get(f"{name}_whole")
        given = {"weight_packed" if compressed else "weight": tensors[name], "weight_scale": tensors[f"{name}_scale"]}
        if whole is not None:
            given["weight_global_scale" if compressed else "weight_scale_2"] = 1 / whole if compressed else whole
        for part, values in given.items():
            parameter = getattr(experts, f"{target}_{part}")
            for expert in range(EXPERTS):
                parameter.weight_loader(parameter, values[expert], f"experts.{target}_{part}", shard_id=name, expert_id=expert)
    model = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)
    process_weights_after_loading(layer, model, torch.device("cpu"))


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_a_layer(one_process: Any, said: list[str], kind: str) -> None:
    """vLLM's loader loads the layer, and vLLM's runner and router run it."""
    layer, tensors = make_layer(kind), checkpoint(kind)
    method = layer.routed_experts.quant_method
    assert type(method) is OURS[kind.split()[0]]
    load(layer, kind, tensors)
    x, logits = inputs()
    check(run(one_process, layer, x, logits), expected(kind, tensors, x, logits))
    assert method.get_fused_moe_quant_config(layer.routed_experts) is None
    reason = "not measured on cpu" if "mxfp4" in kind else WHY_OFF["TOKENSPEED_VLLM_OTHER_EXPERTS"]
    assert said == [
        f"tokenspeed_kernel_vllm: {KINDS[kind][1]} (TOKENSPEED_VLLM_OTHER_EXPERTS; off by default: {reason}) "
        f"experts by {method.served.plan.kernel}; "
        "routing separate; activations unrounded (TOKENSPEED_VLLM_ACTIVATIONS)"
    ]


@pytest.mark.parametrize("kind", ["compressed nvfp4", "modelopt nvfp4", "quark mxfp4"])
def test_experts_of_two_ranks(one_process: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    one_process.parallel_config.enable_expert_parallel = True
    tensors = checkpoint(kind)
    x, logits = inputs()
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(kind, tp_size=2, prefix=f"model.layers.{rank}.mlp.experts")
        load(layer, kind, tensors)
        total += run(one_process, layer, x, logits).float()
    check(total, expected(kind, tensors, x, logits))


@pytest.mark.parametrize("kind", ["compressed nvfp4", "modelopt nvfp4", "quark mxfp4"])
def test_shards_of_two_ranks(one_process: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tensors = checkpoint(kind, 2 * INTERMEDIATE)
    x, logits = inputs()
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make_layer(kind, tp_size=2, intermediate_size=2 * INTERMEDIATE, prefix=f"model.layers.{rank}.mlp.experts")
        load(layer, kind, tensors)
        total += run(one_process, layer, x, logits).float()
    check(total, expected(kind, tensors, x, logits))


def test_activations_are_rounded_if_asked_for(one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_VLLM_ACTIVATIONS", "fp8")
    kind = "modelopt nvfp4"
    layer, tensors = make_layer(kind), checkpoint(kind)
    load(layer, kind, tensors)
    x, logits = inputs()
    got, wanted = run(one_process, layer, x, logits).float(), expected(kind, tensors, x, logits)
    assert 0.01 < (got - wanted).norm() / wanted.norm() <= 0.06
    assert said[0].endswith("routing separate; activations rounded to fp8 (TOKENSPEED_VLLM_ACTIVATIONS)")


# -- fallback to vLLM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_it_is_off_unless_asked_for(said: list[str], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On devices on which no format was measured, such as a CPU."""
    unset(monkeypatch)
    assert not isinstance(make_layer(kind).routed_experts.quant_method, Fp4Experts)
    assert not said


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the plugin as by default."""
    monkeypatch.delenv("TOKENSPEED_VLLM_OTHER_EXPERTS")
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    tokenspeed_kernel_vllm.register()


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_mxfp4_is_on_by_default_on_hopper(one_process: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The platform is replaced by an H200, so that its defaults apply. The layers run on CPU kernels."""
    monkeypatch.setattr(settings, "current_platform", lambda: named_platform("h200"))
    unset(monkeypatch)
    layer, tensors = make_layer(kind), checkpoint(kind)
    method = layer.routed_experts.quant_method
    if kind != "compressed mxfp4":
        assert not isinstance(method, Fp4Experts)
        assert not said
        return
    assert type(method) is OURS[kind.split()[0]]
    load(layer, kind, tensors)
    x, logits = inputs()
    check(run(one_process, layer, x, logits), expected(kind, tensors, x, logits))
    assert len(said) == 1
    assert f"mxfp4 (TOKENSPEED_VLLM_OTHER_EXPERTS; on by default: {WHY_ON}) experts by" in said[0]
    monkeypatch.setenv("TOKENSPEED_VLLM_OTHER_EXPERTS", "0")
    assert not isinstance(make_layer(kind, prefix="model.layers.1.mlp.experts").routed_experts.quant_method, Fp4Experts)
    assert len(said) == 1


def test_a_layer_that_is_refused_by_default_is_vllms(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "current_platform", lambda: named_platform("h200"))
    unset(monkeypatch)
    layer = make_layer("compressed mxfp4", activation="gelu")
    assert not isinstance(layer.routed_experts.quant_method, Fp4Experts)
    assert said == ["tokenspeed_kernel_vllm: vLLM's own mxfp4 experts, because it does not serve activation gelu"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "gelu"}, "activation gelu"),
        ({"swiglu_limit": 7.0}, "clamped or scaled activations"),
        ({"intermediate_size": 24}, "intermediate_size must be a multiple of 16"),
    ],
)
def test_vllm_serves_what_is_refused(said: list[str], options: dict[str, Any], reason: str) -> None:
    layer = make_layer("modelopt nvfp4", **options)
    assert type(layer.routed_experts.quant_method) is modelopt.ModelOptNvFp4FusedMoE
    assert len(said) == 1
    assert said[0].startswith("tokenspeed_kernel_vllm: vLLM's own nvfp4 experts, because")
    assert reason in said[0]


def test_gate_and_up_with_different_global_scales(one_process: Any) -> None:
    kind = "compressed nvfp4"
    tensors = checkpoint(kind)
    tensors["w3_whole"] = tensors["w1_whole"] * 2
    with pytest.raises(ValueError, match="different global scales; unset TOKENSPEED_VLLM_OTHER_EXPERTS"):
        load(make_layer(kind), kind, tensors)
