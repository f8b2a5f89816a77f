"""Checkpoints of Quark: MXFP4 linear layers and experts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig, QuarkLinearMethod
from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkOCP_MX_MoEMethod
from vllm.model_executor.layers.quantization.quark.schemes import QuarkOCP_MX

from tokenspeed_kernel_vllm.experts.packed import fp4_experts
from tokenspeed_kernel_vllm.linear_fp4 import Stored, fp4_linear

# vLLM's name of a format of activations -> the core's.
_ACTIVATIONS = {"mxfp4": "mxfp4", "mxfp8_e4m3": "mxfp8"}


class QuarkMxfp4Config(QuarkConfig):
    """vLLM's configuration of Quark's checkpoints."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer."""
        own = super().get_quant_method(layer, prefix)
        if isinstance(own, QuarkOCP_MX_MoEMethod):
            packed = own.weight_dtype == "mxfp4" and not getattr(own, "dynamic_mxfp4_quant", False)
            method: QuantizeMethodBase | None = fp4_experts(own, Stored("Quark", "mxfp4", "none") if packed else None)
            return method
        stored = _stored(getattr(layer, "scheme", None)) if isinstance(own, QuarkLinearMethod) else None
        return fp4_linear(own, layer, prefix, stored)


def _stored(scheme: Any) -> Stored | None:
    """Returns how a layer is stored; None for formats other than MXFP4, and for weights that vLLM rounds when it loads them.

    Args:
        scheme: vLLM's scheme of the layer.
    """
    if not isinstance(scheme, QuarkOCP_MX) or scheme.weight_dtype != "mxfp4" or getattr(scheme, "dynamic_mxfp4_quant", False):
        return None
    return Stored("Quark", "mxfp4", _ACTIVATIONS.get(scheme.input_dtype, "none"))
