"""Entries of checkpoints' configurations with MXFP4 and NVFP4 layers, as vLLM reads them."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers import quantization

BLOCKS = {"mxfp4": 32, "nvfp4": 16}


def _group(bits: int, size: int, dynamic: Any = False) -> dict[str, Any]:
    strategy = "tensor_group" if size == 16 else "group"
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "group_size": size,
        "symmetric": True,
        "dynamic": dynamic,
    }


def _compressed(name: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": name, "ignore": [], "config_groups": {"group_0": group}}
    return "compressed-tensors", config


def modelopt_checkpoint(algorithm: str) -> tuple[str, dict[str, Any]]:
    return "modelopt_fp4", {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": []}


def _mixed() -> tuple[str, dict[str, Any]]:
    layers = {f"model.layers.0.mlp.{name}_proj": {"quant_algo": "NVFP4", "group_size": 16} for name in ("gate", "up")}
    fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": [], "ignore": []}
    return "modelopt_mixed", {"quant_method": "modelopt", **fields}


def _quark(activations: str | None) -> tuple[str, dict[str, Any]]:
    block = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
    inputs = None if activations is None else {"dtype": activations, "is_dynamic": True, **block}
    weight = {"dtype": "fp4", "is_dynamic": False, **block}
    config = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    export = {"kv_cache_group": [], "pack_method": "reorder"}
    layers: dict[str, Any] = {"layer_type_quant_config": {}, "layer_quant_config": {}, "exclude": []}
    return "quark", {"quant_method": "quark", "export": export, **layers, "global_quant_config": config}


# Each kind of checkpoint: vLLM's name and configuration, the weights' format, and the format of activations.
KINDS: dict[str, tuple[tuple[str, dict[str, Any]], str, str]] = {
    "compressed nvfp4": (_compressed("nvfp4-pack-quantized", _group(4, 16), _group(4, 16, "local")), "nvfp4", "nvfp4"),
    "compressed nvfp4a16": (_compressed("nvfp4-pack-quantized", _group(4, 16), None), "nvfp4", "none"),
    "compressed mxfp4": (_compressed("mxfp4-pack-quantized", _group(4, 32), _group(4, 32, True)), "mxfp4", "mxfp4"),
    "compressed mxfp4a16": (_compressed("mxfp4-pack-quantized", _group(4, 32), None), "mxfp4", "none"),
    "modelopt nvfp4": (modelopt_checkpoint("NVFP4"), "nvfp4", "nvfp4"),
    "modelopt w4a16": (modelopt_checkpoint("W4A16_NVFP4"), "nvfp4", "none"),
    "modelopt mixed": (_mixed(), "nvfp4", "nvfp4"),
    "quark mxfp4": (_quark("fp4"), "mxfp4", "mxfp4"),
    "quark mxfp4a16": (_quark(None), "mxfp4", "none"),
}


# int4 weights in groups of 128, which no kernel has.
INT4 = _compressed("pack-quantized", {**_group(4, 128), "type": "int"}, None)


def config_of(kind: str) -> Any:
    """Returns vLLM's configuration of a kind of checkpoint, from the registry that our configurations are in."""
    name, given = INT4 if kind == "compressed int4" else KINDS[kind][0]
    config = quantization.get_quantization_config(name).from_config(given)
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return config
