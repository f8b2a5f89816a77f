"""Tests MXFP4 and NVFP4 linear layers of vLLM with our method: checkpoints of compressed-tensors, ModelOpt and Quark, loaded by
vLLM's loader, and compared with vLLM's own dequantised layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("compressed_tensors.quantization", reason="vLLM reads compressed-tensors checkpoints with it")
core = pytest.importorskip("tokenspeed_kernel", reason="GEMMs are the core's")

from vllm.model_executor.kernels import linear as vllms
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes, run_nvfp4_emulations
from vllm.platforms import current_platform
from vllm_checkpoints import BLOCKS, KINDS, config_of, modelopt_checkpoint
from vllm_linear import check_compiled_whole

import tokenspeed_kernel_vllm
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_vllm import linear_planned, settings, sizes
from tokenspeed_kernel_vllm.linear_fp4 import Fp4Linear
from tokenspeed_kernel_vllm.settings import WHY_OFF, WHY_ON

IN, PARTS, PREFIX = 64, (32, 48), "model.layers.0.mlp.gate_up_proj"
INPUT_SCALE, SCALE = 3 / 2048, 5 / 4096  # global scales, as multipliers


@pytest.fixture
def fp4(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Enables this part of the plugin. vLLM's tables are restored after the test. vLLM selects its kernels by the GPU; here it
    gets its emulated NVFP4 kernel, and may select Marlin's, which it does not run here."""
    marlins = (vllms.MarlinNvFp4LinearKernel, vllms.MarlinMxFp4LinearKernel)
    for each in marlins:
        monkeypatch.setattr(each, "is_supported", classmethod(lambda cls, compute_capability=None: (True, None)))
    monkeypatch.setitem(vllms._POSSIBLE_NVFP4_KERNELS, current_platform._enum, [vllms.EmulationNvFp4LinearKernel])
    monkeypatch.setitem(vllms._POSSIBLE_MXFP4_KERNELS, current_platform._enum, [vllms.MarlinMxFp4LinearKernel])
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(
        one_process, "model_config", SimpleNamespace(dtype=torch.bfloat16, quantization_config=None, get_num_experts=lambda: 8)
    )
    monkeypatch.setenv("TOKENSPEED_VLLM_FP4_LINEAR", "1")
    tokenspeed_kernel_vllm.register()
    return one_process


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about linear layers."""
    found: list[str] = []
    for level in ("info_once", "warning_once"):
        monkeypatch.setattr(linear_planned.logger, level, lambda text, *args: found.append(text % args))
    return found


def make_layer(kind: str, prefix: str = PREFIX, **options: Any) -> Any:
    return MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=config_of(kind), prefix=prefix, **options)


def checkpoint(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the packed weight and the block scales of each part of a fused layer."""
    draw, fmt = torch.Generator().manual_seed(1), KINDS[kind][1]
    made = []
    for rows in PARTS:
        weight = torch.randint(256, (rows, IN // 2), generator=draw, dtype=torch.uint8)
        shape = (rows, IN // BLOCKS[fmt])
        if fmt == "mxfp4":
            scale = torch.randint(118, 124, shape, generator=draw, dtype=torch.uint8)
        else:
            scale = (torch.rand(shape, generator=draw) * 20 + 4).to(torch.float8_e4m3fn)
        made.append((weight, scale))
    return made


def load(layer: Any, kind: str, parts: list[tuple[Tensor, Tensor]], wholes: tuple[float, ...] = (SCALE, SCALE)) -> None:
    """Loads each part by vLLM's loader, with the names and conventions of the checkpoint's format."""
    compressed = kind.startswith("compressed")
    names = {"weight": "weight_packed" if compressed else "weight", "scale": "weight_scale"}
    values: dict[str, Any] = {"whole": "weight_global_scale", "input": "input_global_scale"}
    if not compressed:
        values = {"whole": "weight_scale_2", "input": "input_scale"}
    for part, (weight, scale) in enumerate(parts):
        given: dict[str, Tensor] = {names["weight"]: weight, names["scale"]: scale}
        for key, value in (("whole", wholes[part]), ("input", INPUT_SCALE * (1 - 0.25 * part))):
            given[values[key]] = torch.tensor(1 / value if compressed else value, dtype=torch.float32)
        for name, tensor in given.items():
            if hasattr(layer, name):
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, part)
    layer.quant_method.process_weights_after_loading(layer)


def weights_of(kind: str, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the dequantised weight in float32; vLLM decodes the e2m1 values."""
    fmt, rows = KINDS[kind][1], []
    for weight, scale in parts:
        wide = torch.exp2(scale.float() - 127) if fmt == "mxfp4" else scale.float() * SCALE
        rows.append(break_fp4_bytes(weight, torch.float32) * wide.repeat_interleave(BLOCKS[fmt], 1))
    return torch.cat(rows)


def near(got: Tensor, wanted: Tensor, bound: float = 0.01) -> bool:
    return bool(((got.float() - wanted.float()).norm(dim=-1) <= bound * wanted.float().norm(dim=-1)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(fp4: Any, said: list[str], kind: str) -> None:
    layer, parts = make_layer(kind), checkpoint(kind)
    assert type(layer.quant_method) is Fp4Linear
    load(layer, kind, parts)
    for tokens in (1, 5):
        x = torch.randn(tokens, IN, dtype=torch.bfloat16)
        assert near(layer(x)[0], x.float() @ weights_of(kind, parts).t())
    assert layer(torch.ones(2, 3, IN, dtype=torch.bfloat16))[0].shape == (2, 3, sum(PARTS))
    assert layer.requires_unquantized_input
    format_of = {"compressed": "compressed-tensors", "modelopt": "ModelOpt", "quark": "Quark"}[kind.split()[0]]
    _, fmt, activations = KINDS[kind]
    reason = "not measured on cpu" if fmt == "mxfp4" else WHY_OFF["TOKENSPEED_VLLM_FP4_LINEAR"]
    assert said == [
        f"tokenspeed_kernel_vllm: {fmt} linear layers ({format_of} with {activations} activations, activations none) by "
        f"{layer.quant_method.plan.kernel} (TOKENSPEED_VLLM_FP4_LINEAR; off by default: {reason})"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_rounded_if_asked_for(fp4: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TOKENSPEED_VLLM_FP4_ACTIVATIONS", "1")
    layer, parts, (_, _, activations) = make_layer(kind), checkpoint(kind), KINDS[kind]
    load(layer, kind, parts)
    assert layer.quant_method.plan.activation_dtype == activations
    x = torch.randn(5, IN, dtype=torch.bfloat16)
    rounded = x.float()
    if activations == "mxfp4":
        rounded = core.dequantize_mxfp4(*core.quantize_mxfp4(x), out_dtype=torch.float32)
    elif activations == "nvfp4":
        whole = torch.tensor([INPUT_SCALE], dtype=torch.float32)
        rounded = core.dequantize_nvfp4(*core.quantize_nvfp4(x, whole), whole, out_dtype=torch.float32)
    assert near(layer(x)[0], rounded @ weights_of(kind, parts).t())


@pytest.mark.parametrize("kind", ["compressed nvfp4", "modelopt nvfp4"])
def test_rounded_layers_compute_what_vllms_own_do(fp4: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """vLLM's emulated kernel rounds activations in the same way, and dequantises weights to bf16. Where a block's scale is near the
    middle of two fp8 values, the kernels may choose different ones, which changes a row by about 3%."""
    monkeypatch.setenv("TOKENSPEED_VLLM_FP4_ACTIVATIONS", "1")
    layer, parts = make_layer(kind), checkpoint(kind)
    load(layer, kind, parts)
    x = torch.randn(7, IN, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed, scales = (torch.cat([part[index].view(torch.uint8) for part in parts]) for index in (0, 1))
    wholes = (torch.tensor(value, dtype=torch.float32) for value in (1 / INPUT_SCALE, SCALE))
    theirs = run_nvfp4_emulations(x, next(wholes), packed, scales.view(torch.float8_e4m3fn), next(wholes), swizzle=False)
    assert near(layer(x)[0], theirs, 0.05)


def test_a_shard_of_the_features(fp4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is divided along its input features: vLLM loads this rank's columns, and its blocks' scales."""
    monkeypatch.setattr("vllm.model_executor.layers.linear.get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr("vllm.model_executor.layers.linear.get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 1)
    kind = "compressed nvfp4a16"
    options: dict[str, Any] = {"bias": False, "quant_config": config_of(kind), "prefix": "model.layers.0.mlp.down_proj"}
    layer = RowParallelLinear(IN, PARTS[0], input_is_parallel=True, reduce_results=False, **options)
    weight, scale = checkpoint(kind)[0]
    for name, tensor in {
        "weight_packed": weight,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor(1 / SCALE, dtype=torch.float32),
    }.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, IN // 2, dtype=torch.bfloat16)
    assert near(layer(x)[0], x.float() @ weights_of(kind, [(weight, scale)])[:, IN // 2 :].t())


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "quark mxfp4"])
def test_a_layer_is_compiled_whole_and_once(fp4: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TOKENSPEED_VLLM_FP4_ACTIVATIONS", "1")
    layer = make_layer(kind)
    load(layer, kind, checkpoint(kind))
    check_compiled_whole(layer, IN)


def test_it_is_warmed_up_once_and_recorded(fp4: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """On a GPU, a layer runs in all sizes below the largest batch when it is loaded. The receipt then has its kernels."""
    folder = tmp_path / "receipts"
    monkeypatch.setenv("TOKENSPEED_VLLM_RECEIPTS", str(folder))
    monkeypatch.setattr(sizes, "_warmed", set())
    layer = make_layer("compressed nvfp4")
    load(layer, "compressed nvfp4", checkpoint("compressed nvfp4"))
    assert not folder.exists()  # kernels for a CPU are not compiled
    method, called = layer.quant_method, []
    linear = method.ops.linear

    def counted(x: Tensor, *rest: Any) -> Tensor:
        called.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr(method, "ops", SimpleNamespace(linear=counted))
    largest = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=12))
    monkeypatch.setattr(sizes, "get_current_vllm_config", lambda: largest)
    for _ in range(2):
        sizes.warm_once("linear layers", method.plan, torch.device("cuda"), lambda tokens: method.warm(tokens, torch.device("cpu")))
    assert called == [1, 2, 4, 8]
    from tokenspeed_kernel.workbench.receipts import read_receipt

    (file,) = folder.iterdir()
    assert {"gemm.linear", "gemm.mm"} <= {row.operator for row in read_receipt(file).rows}


# -- fallback to vLLM -----------------------------------------------------------------------------------------------------------


# The names of vLLM's own methods. ModelOpt's formats have one method in 0.33, and one each in 0.26.
OWN = {
    "compressed": {"CompressedTensorsLinearMethod"},
    "modelopt": {"ModelOptLinearMethod", "ModelOptNvFp4LinearMethod", "ModelOptNvFp4W4A16LinearMethod"},
    "quark": {"QuarkLinearMethod"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_off_by_default(fp4: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On devices on which no format was measured, such as a CPU."""
    unset(monkeypatch)
    assert type(make_layer(kind).quant_method).__name__ in OWN[kind.split()[0]]
    assert not said


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the plugin as by default."""
    monkeypatch.delenv("TOKENSPEED_VLLM_FP4_LINEAR")
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    tokenspeed_kernel_vllm.register()


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_is_on_by_default_on_hopper(fp4: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The platform is replaced by an H200, so that its defaults apply. The layers run on CPU kernels. The default is off for Quark
    and for models without experts, because these were not measured."""
    monkeypatch.setattr(settings, "current_platform", lambda: named_platform("h200"))
    unset(monkeypatch)
    layer, parts = make_layer(kind), checkpoint(kind)
    if KINDS[kind][1] != "mxfp4" or kind.startswith("quark"):
        assert type(layer.quant_method).__name__ in OWN[kind.split()[0]]
        assert not said
        return
    load(layer, kind, parts)
    x = torch.randn(5, IN, dtype=torch.bfloat16)
    assert near(layer(x)[0], x.float() @ weights_of(kind, parts).t())
    assert len(said) == 1
    assert said[0].endswith(f"(TOKENSPEED_VLLM_FP4_LINEAR; on by default: {WHY_ON})")
    monkeypatch.setattr(fp4.model_config, "get_num_experts", lambda: 0)
    assert type(make_layer(kind).quant_method).__name__ in OWN[kind.split()[0]]
    monkeypatch.setattr(fp4.model_config, "get_num_experts", lambda: 8)
    monkeypatch.setenv("TOKENSPEED_VLLM_FP4_LINEAR", "0")
    assert type(make_layer(kind).quant_method).__name__ in OWN[kind.split()[0]]
    assert len(said) == 1


def test_formats_without_a_kernel_are_named_only_if_a_switch_asks(
    fp4: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unset(monkeypatch)
    layer = ReplicatedLinear(256, 128, bias=False, prefix="model.layers.0.mlp.gate_proj")
    method = config_of("compressed int4").get_quant_method(layer, "model.layers.0.mlp.gate_proj")
    assert type(method).__name__ in OWN["compressed"]
    assert not said


def test_a_format_without_a_kernel_is_refused_by_name(fp4: Any, said: list[str]) -> None:
    layer = ReplicatedLinear(256, 128, bias=False, prefix="model.layers.0.mlp.gate_proj")
    method = config_of("compressed int4").get_quant_method(layer, "model.layers.0.mlp.gate_proj")
    assert type(method).__name__ in OWN["compressed"]
    assert said == [
        "tokenspeed_kernel_vllm: vLLM's own compressed-tensors linear layers, because no kernel has the format of "
        "CompressedTensorsWNA16"
    ]


def test_the_expansion_of_latents_is_vllms(fp4: Any) -> None:
    layer = make_layer("modelopt nvfp4", prefix="model.layers.0.self_attn.kv_b_proj")
    assert type(layer.quant_method).__name__ in OWN["modelopt"]


def test_an_excluded_layer_is_vllms(fp4: Any) -> None:
    config = config_of("modelopt nvfp4")
    config.exclude_modules = [PREFIX]
    layer = MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=config, prefix=PREFIX)
    assert type(layer.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize("kind", ["compressed nvfp4", "modelopt nvfp4"])
def test_parts_with_different_global_scales_are_vllms(fp4: Any, said: list[str], kind: str) -> None:
    """The core's `linear` has one global scale for a layer. vLLM's method takes one of the parts' scales, and warns."""
    layer, parts = make_layer(kind), checkpoint(kind)
    load(layer, kind, parts, wholes=(SCALE, 2 * SCALE))
    reason = "the parts of a fused layer have different global scales"
    assert said == [f"tokenspeed_kernel_vllm: vLLM's own nvfp4 linear layers, because {reason}"]
    assert layer.quant_method.weights is None
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    own = layer.quant_method.own
    assert torch.equal(layer(x)[0], own.apply(layer, x))  # by vLLM's emulated kernel


def test_scales_that_a_checkpoint_lacks(fp4: Any, said: list[str]) -> None:
    kind = "modelopt nvfp4"
    layer, parts = make_layer(kind), checkpoint(kind)
    broken = [(weight, torch.full_like(scale.float(), float("nan")).to(scale.dtype)) for weight, scale in parts]
    with_check = hasattr(layer.quant_method.own, "spec")  # vLLM 0.33 refuses such a checkpoint itself
    if with_check:
        with pytest.raises(RuntimeError, match="never loaded"):
            load(layer, kind, broken)
    else:
        load(layer, kind, broken)
    assert said == [
        "tokenspeed_kernel_vllm: vLLM's own nvfp4 linear layers, because a weight scale is NaN: the checkpoint lacks it"
    ]


def test_weights_that_vllm_reads_are_vllms(fp4: Any, said: list[str]) -> None:
    layer = make_layer("modelopt w4a16")
    layer._retain_weight_for_gather = True
    assert layer.quant_method.plan is not None
    with pytest.raises(Exception, match=r".*"):  # Marlin's kernel, which vLLM selected, needs a GPU
        load(layer, "modelopt w4a16", checkpoint("modelopt w4a16"))
    assert said == ["tokenspeed_kernel_vllm: vLLM's own nvfp4 linear layers, because vLLM itself reads the weights of such a layer"]


def test_vllm_serves_what_no_kernel_does(fp4: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_planned, "core_is_there", lambda: False)
    layer = make_layer("compressed nvfp4")
    assert layer.quant_method.plan is None
    assert len(said) == 1
    assert said[0].startswith("tokenspeed_kernel_vllm: vLLM's own nvfp4 linear layers, because tokenspeed-kernel, which chooses")
    load(layer, "compressed nvfp4", checkpoint("compressed nvfp4"))
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    assert torch.equal(layer(x)[0], layer.quant_method.own.apply(layer, x))


def test_other_blocks_are_vllms(fp4: Any, said: list[str]) -> None:
    name, given = modelopt_checkpoint("NVFP4")
    config = quantization.get_quantization_config(name).from_config({**given, "group_size": 32})
    layer = MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=config, prefix=PREFIX)
    assert layer.quant_method.plan is None
    assert said == ["tokenspeed_kernel_vllm: vLLM's own nvfp4 linear layers, because it serves blocks of 16 weights, not 32"]


def test_a_shard_of_a_part_of_a_block_is_refused_by_name(fp4: Any, said: list[str]) -> None:
    config = config_of("compressed mxfp4")
    layer = MergedColumnParallelLinear(48, list(PARTS), bias=False, quant_config=config, prefix=PREFIX)
    assert layer.quant_method.plan is None
    assert "in_features must be a multiple of 32" in said[0]
