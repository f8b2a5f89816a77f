"""fp8 linear layers that use the core's `linear`: checkpoints of the formats ``fp8`` and ``compressed-tensors``."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.parameter import BlockQuantScaleParameter, ChannelQuantScaleParameter, PerTensorScaleParameter
from vllm.platforms import current_platform

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.linear_planned import READ_BY_VLLM, PlannedLinear, say_own
from tokenspeed_kernel_vllm.settings import read_settings

BLOCK = 128  # number of rows and of columns of a scale block
_SCALES = {"tensor": PerTensorScaleParameter, "channel": ChannelQuantScaleParameter, "block": BlockQuantScaleParameter}
_UNSET = torch.finfo(torch.float32).min  # the value that vLLM's loader leaves in scales that a checkpoint lacks


@register_weight_loader_v2_supported_method
class Fp8Linear(PlannedLinear):
    """A linear layer with fp8 (e4m3) weights."""

    def __init__(self, own: LinearMethodBase, scales: str, static: bool, scale_name: str) -> None:
        """
        Args:
            own: vLLM's method.
            scales: the part of a weight that shares a scale: ``tensor``, ``channel`` or ``block``.
            static: whether the checkpoint has a static scale for the activations.
            scale_name: the weight scales' name in checkpoints.
        """
        super().__init__(own, "fp8", "TOKENSPEED_VLLM_FP8_LINEAR")
        self.scales = scales
        self.static = static
        self.scale_name = scale_name

    def formats(self) -> dict[str, str]:
        """Returns the plan's formats: activations are rounded as by vLLM's own method."""
        if current_platform.is_fp8_fnuz():
            raise NotServedError("this device's fp8 is e4m3fnuz, which linear does not support")
        if self.scales == "block":
            return {"weight_format": "fp8_block", "activation_dtype": "fp8_block"}
        return {"weight_format": "fp8_channel", "activation_dtype": "fp8_static" if self.static else "fp8"}

    def kind(self) -> str:
        """Returns what shares a scale."""
        return f"scale per {self.scales}"

    def stored(self) -> tuple[str, ...]:
        """Returns the weight's name. Scales are small and stay."""
        return ("weight",)

    def add_parameters(self, layer: Any, sizes: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        """Adds the parameters of vLLM's own method, without the selection of a vLLM kernel."""
        in_shard, parts, in_features, out_features, dtype = sizes
        layer.logical_widths = parts
        layer.orig_dtype = dtype
        layer.weight_block_size = [BLOCK, BLOCK] if self.scales == "block" else None
        if self.scales == "block":
            fp8_utils.validate_fp8_block_shape(layer, in_features, out_features, in_shard, parts, layer.weight_block_size)
        loader = attributes.get("weight_loader")
        layer.register_parameter("weight", fp8_utils.create_fp8_weight_parameter(sum(parts), in_shard, loader))
        kind = _SCALES[self.scales]
        scale = fp8_utils.create_fp8_scale_parameter(kind, parts, in_shard, layer.weight_block_size, loader)
        layer.register_parameter(self.scale_name, scale)
        if self.static:
            layer.register_parameter("input_scale", fp8_utils.create_fp8_input_scale(parts, loader))

    def loaded(self, layer: Any) -> Any:
        """Returns the loaded weights. A per-tensor scale is repeated for each row, which changes no value."""
        scale = getattr(layer, self.scale_name).data
        if self.scales == "tensor":
            # A fused layer has one scale for each of its parts. If the checkpoint stores the layer already fused, only the first
            # scale is loaded, and applies to all parts.
            each = torch.where(scale == _UNSET, scale[0], scale)
            scale = each.repeat_interleave(torch.tensor(layer.logical_widths, device=scale.device)).unsqueeze(1)
        input_scale = layer.input_scale.data.max().view(1) if self.static else None
        return self.ops.LinearWeights(layer.weight.data, scale, input_scale=input_scale)


def fp8_linear(own: QuantizeMethodBase | None, prefix: str, config: Any) -> QuantizeMethodBase | None:
    """Returns our method for a linear layer of the format ``fp8``. Returns ``own`` for other layers, or if the setting is off.

    Args:
        own: vLLM's method.
        prefix: the layer's name.
        config: vLLM's `Fp8Config`.
    """
    if not isinstance(own, Fp8LinearMethod) or not read_settings().fp8_linear or prefix.endswith(READ_BY_VLLM):
        return own
    blocks = config.weight_block_size
    if blocks not in (None, [BLOCK, BLOCK]) or getattr(config, "is_scale_e8m0", False):
        say_own(
            "fp8", f"it serves float32 scales of blocks of {BLOCK} x {BLOCK}, not {'e8m0' if blocks == [BLOCK, BLOCK] else blocks}"
        )
        return own
    if blocks is None:
        return Fp8Linear(own, "tensor", config.activation_scheme == "static", "weight_scale")
    return Fp8Linear(own, "block", False, "weight_scale_inv")


def fp8_compressed(own: LinearMethodBase, prefix: str, scheme: Any) -> LinearMethodBase:
    """Returns our method for a linear layer of the format ``compressed-tensors``. Returns ``own`` for other layers, or if the
    setting is off.

    Args:
        own: vLLM's method.
        prefix: the layer's name.
        scheme: vLLM's scheme of the layer.
    """
    if not isinstance(scheme, CompressedTensorsW8A8Fp8) or not read_settings().fp8_linear or prefix.endswith(READ_BY_VLLM):
        return own
    if scheme.weight_block_size not in (None, [BLOCK, BLOCK]):
        return own
    scales = next(each for each in _SCALES if scheme.strategy == each)  # a string, or an enumeration of strings
    return Fp8Linear(own, scales, scheme.is_static_input_scheme, "weight_scale")
