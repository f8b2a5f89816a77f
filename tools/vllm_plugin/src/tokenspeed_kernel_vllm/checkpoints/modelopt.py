"""Checkpoints of ModelOpt: NVFP4 linear layers and experts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

from tokenspeed_kernel_vllm.experts.packed import ModelOptFp4Experts, fp4_experts
from tokenspeed_kernel_vllm.linear_fp4 import Stored, fp4_linear

# vLLM 0.26 has a method for each of ModelOpt's formats. For the methods of NVFP4: whether the checkpoint rounds activations.
_METHODS = {"ModelOptNvFp4LinearMethod": True, "ModelOptNvFp4W4A16LinearMethod": False}


class ModelOptConfig(ModelOptNvFp4Config):
    """vLLM's configuration of ModelOpt's NVFP4 checkpoints."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer."""
        own = super().get_quant_method(layer, prefix)
        return _served(own, layer, prefix)


class ModelOptMixedConfig(ModelOptMixedPrecisionConfig):
    """vLLM's configuration of ModelOpt's checkpoints whose layers have different formats."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer."""
        own = super().get_quant_method(layer, prefix)
        return _served(own, layer, prefix)


def _served(own: QuantizeMethodBase | None, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
    """Returns our method for a layer, or vLLM's own."""
    if isinstance(own, ModelOptNvFp4FusedMoE):
        block = own.quant_config.group_size
        stored = Stored("ModelOpt", "nvfp4", "none", global_scale="weight_scale_2", block=block)
        method: QuantizeMethodBase | None = fp4_experts(own, stored, ModelOptFp4Experts)
        return method
    return fp4_linear(own, layer, prefix, _stored(own))


def _stored(own: Any) -> Stored | None:
    """Returns how a layer is stored; None for formats other than NVFP4.

    Args:
        own: vLLM's method of the layer, or None.
    """
    spec = getattr(own, "spec", None)
    if spec is not None:  # vLLM's one method for all of ModelOpt's formats
        rounds = spec.activation is not None if spec.weight == kNvfp4Static else None
        block = own.ctx.group_size
    else:
        rounds = _METHODS.get(type(own).__name__)
        block = None if rounds is None else own.quant_config.group_size
    if rounds is None:
        return None
    return Stored(
        "ModelOpt",
        "nvfp4",
        "nvfp4" if rounds else "none",
        global_scale="weight_scale_2",
        input_scale="input_scale",
        block=block,
    )
