"""Checkpoints of the format ``compressed-tensors``: fp8, MXFP4 and NVFP4 linear layers, MXFP4 and NVFP4 experts. If a switch of
linear layers is on and they have another format, such as int4, one line of the log says that vLLM's own method runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4 import (
    CompressedTensorsW4A4Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW4A4Mxfp4,
    CompressedTensorsW8A8Fp8,
)

from tokenspeed_kernel_vllm.experts.packed import CompressedFp4Experts, fp4_experts
from tokenspeed_kernel_vllm.linear_fp4 import BLOCKS, Stored, fp4_linear
from tokenspeed_kernel_vllm.linear_fp8 import fp8_compressed
from tokenspeed_kernel_vllm.linear_planned import say_own
from tokenspeed_kernel_vllm.settings import read_settings

_NVFP4: dict[str, Any] = {"weight": "weight_packed", "global_scale": "weight_global_scale", "input_scale": "input_global_scale"}
# How experts are stored, by vLLM's method. Their activations are rounded as the settings say, not as the checkpoint says.
_EXPERTS = {
    CompressedTensorsW4A4Mxfp4MoEMethod: Stored("compressed-tensors", "mxfp4", "none", weight="weight_packed"),
    CompressedTensorsW4A4Nvfp4MoEMethod: Stored("compressed-tensors", "nvfp4", "none", inverse=True, **_NVFP4),
}


class CompressedConfig(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors checkpoints."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer."""
        own = super().get_quant_method(layer, prefix)
        for kind, layout in _EXPERTS.items():
            if isinstance(own, kind):
                return fp4_experts(own, layout, CompressedFp4Experts)
        if type(own) is not CompressedTensorsLinearMethod:  # a layer of another kind, or with a transform
            return own
        scheme: Any = getattr(layer, "scheme", None)
        stored = _stored(scheme, (self.get_scheme_dict(layer, prefix) or {}).get("input_activations"))
        if stored is not None:
            return fp4_linear(own, layer, prefix, stored)
        if isinstance(scheme, CompressedTensorsW8A8Fp8):
            return fp8_compressed(own, prefix, scheme)
        settings = read_settings()
        if settings.fp8_linear or settings.fp4_linear:
            say_own("compressed-tensors", f"no kernel has the format of {type(scheme).__name__}")
        return own


def _stored(scheme: Any, activations: Any) -> Stored | None:
    """Returns how a layer is stored; None for formats other than MXFP4 and NVFP4.

    Args:
        scheme: vLLM's scheme of the layer.
        activations: the checkpoint's ``QuantizationArgs`` of activations, or None.
    """
    if isinstance(scheme, CompressedTensorsW4A4Fp4):
        return Stored("compressed-tensors", "nvfp4", "none" if scheme.use_a16 else "nvfp4", inverse=True, **_NVFP4)
    if isinstance(scheme, CompressedTensorsW4A4Mxfp4):  # vLLM's scheme of MXFP4 weights with any activations
        blocks = activations is not None and activations.type == "float" and activations.group_size == BLOCKS["mxfp4"]
        rounded = {4: "mxfp4", 8: "mxfp8"}.get(activations.num_bits, "none") if blocks else "none"
        return Stored("compressed-tensors", "mxfp4", rounded, weight="weight_packed")
    return None
