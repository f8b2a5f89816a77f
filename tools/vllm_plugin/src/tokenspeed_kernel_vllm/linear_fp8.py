"""fp8 linear layers that use the core's `linear`: checkpoints of the formats ``fp8`` and ``compressed-tensors``.

vLLM takes the first kernel in a list that supports a layer, and `register_linear_kernel` appends to this list. So a registered
kernel would never precede vLLM's own kernels. Therefore the configurations of these formats are replaced.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.parameter import BlockQuantScaleParameter, ChannelQuantScaleParameter, PerTensorScaleParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_vllm.settings import CORE, core_is_there, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")

BLOCK = 128  # number of rows and of columns of a scale block
_SCALES = {"tensor": PerTensorScaleParameter, "channel": ChannelQuantScaleParameter, "block": BlockQuantScaleParameter}
# The layer whose weight vLLM itself reads, to expand keys and values of latent attention.
_READ_BY_VLLM = "kv_b_proj"
_UNSET = torch.finfo(torch.float32).min  # the value that vLLM's loader leaves in scales that a checkpoint lacks


@register_weight_loader_v2_supported_method
class Fp8Linear(LinearMethodBase):
    """A linear layer with fp8 (e4m3) weights. Layers without an eligible kernel fall back to vLLM's method."""

    def __init__(self, own: LinearMethodBase, scales: str, static: bool, scale_name: str) -> None:
        """
        Args:
            own: vLLM's method.
            scales: the part of a weight that shares a scale: ``tensor``, ``channel`` or ``block``.
            static: whether the checkpoint has a static scale for the activations.
            scale_name: the weight scales' name in checkpoints.
        """
        self.own = own
        self.scales = scales
        self.static = static
        self.scale_name = scale_name
        self.plan: Any = None
        self.ops: Any = None
        self.weights: Any = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that vLLM's loader fills. If the layer falls back to vLLM's method, one line of the log gives the
        reason.
        """
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        try:
            self.plan = self._plan(input_size_per_partition, sum(output_partition_sizes), params_dtype)
        except NotServedError as error:
            reason = " | ".join(line.strip() for line in str(error).splitlines())
            logger.warning_once("tokenspeed_kernel_vllm: vLLM's own fp8 linear layers, because %s", reason)
            self.own.create_weights(layer, *sizes, **extra_weight_attrs)
            return
        self.ops = import_module(CORE)
        layer.logical_widths = output_partition_sizes
        layer.orig_dtype = params_dtype
        layer.weight_block_size = [BLOCK, BLOCK] if self.scales == "block" else None
        if self.scales == "block":
            fp8_utils.validate_fp8_block_shape(
                layer, input_size, output_size, input_size_per_partition, output_partition_sizes, layer.weight_block_size
            )
        loader = extra_weight_attrs.get("weight_loader")
        weight = fp8_utils.create_fp8_weight_parameter(sum(output_partition_sizes), input_size_per_partition, loader)
        layer.register_parameter("weight", weight)
        scale = fp8_utils.create_fp8_scale_parameter(
            _SCALES[self.scales], output_partition_sizes, input_size_per_partition, layer.weight_block_size, loader
        )
        layer.register_parameter(self.scale_name, scale)
        if self.static:
            layer.register_parameter("input_scale", fp8_utils.create_fp8_input_scale(output_partition_sizes, loader))
        switch = "TOKENSPEED_VLLM_FP8_LINEAR; off by default, because it was not measured"
        text = "tokenspeed_kernel_vllm: fp8 linear layers (scale per %s, activations %s) by %s (%s)"
        logger.info_once(text, self.scales, self.plan.activation_dtype, self.plan.kernel, switch)

    def _plan(self, in_features: int, out_features: int, dtype: torch.dtype) -> Any:
        if not core_is_there():
            raise NotServedError("tokenspeed-kernel, which chooses among kernels, is not installed")
        if current_platform.is_fp8_fnuz():
            raise NotServedError("this device's fp8 is e4m3fnuz, which linear does not support")
        from tokenspeed_kernel import get_operator

        device = torch.get_default_device()  # vLLM builds a model with the model's device as PyTorch's default device
        formats = {"weight_format": "fp8_channel", "activation_dtype": "fp8_static" if self.static else "fp8"}
        if self.scales == "block":
            formats = {"weight_format": "fp8_block", "activation_dtype": "fp8_block"}
        return plan_for(get_operator("linear").function, in_features, out_features, dtype=dtype, device=device, **formats)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Arranges the weights for the plan's kernel. A per-tensor scale is repeated for each row, which changes no value."""
        if self.plan is None:
            self.own.process_weights_after_loading(layer)
            return
        scale = getattr(layer, self.scale_name).data
        if self.scales == "tensor":
            # A fused layer has one scale for each of its parts. If the checkpoint stores the layer already fused, only the first
            # scale is loaded, and applies to all parts.
            each = torch.where(scale == _UNSET, scale[0], scale)
            scale = each.repeat_interleave(torch.tensor(layer.logical_widths, device=scale.device)).unsqueeze(1)
        input_scale = layer.input_scale.data.max().view(1) if self.static else None
        given = self.ops.LinearWeights(layer.weight.data, scale, input_scale=input_scale)
        self.weights = self.ops.linear.prepare(given, self.plan)
        if self.weights.weight.data_ptr() != layer.weight.data_ptr():  # the weight was rearranged, so the original is not needed
            replace_parameter(layer, "weight", layer.weight.data.new_empty(0))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes ``x @ weight.T``, rounds the result to x's dtype, and adds the bias.

        Args:
            layer: the layer.
            x: ``[..., in_features]``.
            bias: ``[out_features]``.

        Returns:
            ``[..., out_features]`` of x's dtype.
        """
        if self.plan is None:
            out: Tensor = self.own.apply(layer, x, bias)
            return out
        out = self.ops.linear(x.flatten(0, -2), self.weights, self.plan).view(*x.shape[:-1], self.plan.out_features)
        return out if bias is None else out + bias


def fp8_linear(own: QuantizeMethodBase | None, prefix: str, config: Any) -> QuantizeMethodBase | None:
    """Returns our method for a linear layer of the format ``fp8``. Returns ``own`` for other layers, or if the setting is off.

    Args:
        own: vLLM's method.
        prefix: the layer's name.
        config: vLLM's `Fp8Config`.
    """
    if not isinstance(own, Fp8LinearMethod) or not read_settings().fp8_linear or prefix.endswith(_READ_BY_VLLM):
        return own
    blocks = config.weight_block_size
    if blocks not in (None, [BLOCK, BLOCK]) or getattr(config, "is_scale_e8m0", False):
        reason = f"it serves float32 scales of blocks of {BLOCK} x {BLOCK}, not {'e8m0' if blocks == [BLOCK, BLOCK] else blocks}"
        logger.warning_once("tokenspeed_kernel_vllm: vLLM's own fp8 linear layers, because %s", reason)
        return own
    if blocks is None:
        return Fp8Linear(own, "tensor", config.activation_scheme == "static", "weight_scale")
    return Fp8Linear(own, "block", False, "weight_scale_inv")


class Fp8CompressedConfig(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors checkpoints, in which fp8 linear layers use the core's `linear`."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer."""
        own = super().get_quant_method(layer, prefix)
        scheme: Any = getattr(layer, "scheme", None)
        ours = type(own) is CompressedTensorsLinearMethod and isinstance(scheme, CompressedTensorsW8A8Fp8)
        if not ours or not read_settings().fp8_linear or prefix.endswith(_READ_BY_VLLM):
            return own
        if scheme.weight_block_size not in (None, [BLOCK, BLOCK]):
            return own
        scales = next(each for each in _SCALES if scheme.strategy == each)  # a string, or an enumeration of strings
        return Fp8Linear(own, scales, scheme.is_static_input_scheme, "weight_scale")
