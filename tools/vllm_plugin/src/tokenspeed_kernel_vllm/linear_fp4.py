"""MXFP4 and NVFP4 linear layers that use the core's `linear`: checkpoints of compressed-tensors, ModelOpt and Quark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.linear_planned import READ_BY_VLLM, PlannedLinear
from tokenspeed_kernel_vllm.settings import is_on, read_settings

SWITCH = "TOKENSPEED_VLLM_FP4_LINEAR"
BLOCKS = {"mxfp4": 32, "nvfp4": 16}  # number of weights of a row that share a scale


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores a linear layer, or a layer of experts, after vLLM's loader. The names of experts' parameters have
    ``w13_`` or ``w2_`` before them.

    Attributes:
        checkpoint: the checkpoint's format, for the log.
        weight_format: ``mxfp4`` or ``nvfp4``.
        activations: the format that the checkpoint wants activations rounded to: ``none`` or a format of the core's `LinearPlan`.
        weight: the parameter with the e2m1 values, two in a byte.
        global_scale: the parameter with the global scales of the parts of a fused layer; only in nvfp4.
        input_scale: the parameter with the global scales of activations.
        inverse: whether global scales are stored as divisors.
        block: number of weights of a row that share a scale, if checkpoints may choose it.
    """

    checkpoint: str
    weight_format: str
    activations: str
    weight: str = "weight"
    global_scale: str = ""
    input_scale: str = ""
    inverse: bool = False
    block: int | None = None

    @property
    def unmeasured(self) -> str:
        """Why measurements do not apply to the checkpoint, see `default_of`."""
        return "" if self.checkpoint == "compressed-tensors" else f"not measured in checkpoints of {self.checkpoint}"

    def check_block(self) -> None:
        """Raises NotServedError if the blocks have another size than the format's."""
        size = BLOCKS[self.weight_format]
        if self.block not in (None, size):
            raise NotServedError(f"it serves blocks of {size} weights, not {self.block}")

    def multipliers(self, scales: Tensor) -> Tensor:
        """Returns global scales as float32 multipliers."""
        values = scales.data.float()
        return 1 / values if self.inverse else values


@register_weight_loader_v2_supported_method
class Fp4Linear(PlannedLinear):
    """A linear layer with MXFP4 or NVFP4 weights. vLLM's own method adds the parameters and names them."""

    def __init__(self, own: LinearMethodBase, stored: Stored, unmeasured: str) -> None:
        """
        Args:
            own: vLLM's method.
            stored: how the checkpoint stores the layer.
            unmeasured: see `default_of`.
        """
        super().__init__(own, stored.weight_format, SWITCH, unmeasured)
        self.layout = stored
        self.rounded = read_settings().fp4_activations

    def formats(self) -> dict[str, str]:
        """Returns the plan's formats. Activations are rounded only if the setting says so.

        Raises:
            NotServedError: the blocks have another size than the format's.
        """
        self.layout.check_block()
        return {
            "weight_format": self.layout.weight_format,
            "activation_dtype": self.layout.activations if self.rounded else "none",
        }

    def kind(self) -> str:
        """Returns the checkpoint's format, and the format that it wants activations rounded to."""
        return f"{self.layout.checkpoint} with {self.layout.activations} activations"

    def stored(self) -> tuple[str, ...]:
        """Returns the names of weight and scales."""
        return (self.layout.weight, "weight_scale")

    def add_parameters(self, layer: Any, sizes: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        """Adds the parameters of vLLM's own method. vLLM must not pass activations that a preceding kernel has rounded for its own
        kernel.
        """
        self.own.create_weights(layer, *sizes, **attributes)
        layer.requires_unquantized_input = True
        vars(layer).pop("input_quant_key", None)  # vLLM 0.26 reads this attribute instead

    def loaded(self, layer: Any) -> Any:
        """Returns the loaded weights.

        Raises:
            NotServedError: the parts of a fused layer have different global scales, scales were not loaded, or vLLM itself reads
                the weight.
        """
        if getattr(layer, "_retain_weight_for_gather", False):
            raise NotServedError("vLLM itself reads the weights of such a layer")
        weight, scale = getattr(layer, self.layout.weight).data, layer.weight_scale.data
        whole = inputs = None
        if self.layout.weight_format == "nvfp4":
            whole = self.layout.multipliers(getattr(layer, self.layout.global_scale))
            if (whole != whole[0]).any():
                raise NotServedError("the parts of a fused layer have different global scales")
            if scale.isnan().any():
                raise NotServedError("a weight scale is NaN: the checkpoint lacks it")
            whole = whole[:1]
        if self.plan.activation_dtype == "nvfp4":
            scales = self.layout.multipliers(getattr(layer, self.layout.input_scale))
            inputs = scales.max().view(1)  # no part's activations saturate
        return self.ops.LinearWeights(weight, scale, whole, input_scale=inputs)


def fp4_linear(
    own: QuantizeMethodBase | None, layer: torch.nn.Module, prefix: str, stored: Stored | None
) -> QuantizeMethodBase | None:
    """Returns our method for a linear layer. Returns ``own`` for other layers and formats, or if the part is off for the
    format.

    Args:
        own: vLLM's method.
        layer: the layer.
        prefix: the layer's name.
        stored: how the checkpoint stores the layer; None for other formats.
    """
    if stored is None or not isinstance(layer, LinearBase) or not isinstance(own, LinearMethodBase):
        return own
    unmeasured = stored.unmeasured or _without_experts()
    if prefix.endswith(READ_BY_VLLM) or not is_on(read_settings().fp4_linear, SWITCH, stored.weight_format, unmeasured):
        return own
    return Fp4Linear(own, stored, unmeasured)


def _without_experts() -> str:
    """Returns why measurements do not apply to a model without experts; empty for a model with experts."""
    config = get_current_vllm_config().model_config
    return "" if config is not None and config.get_num_experts() else "measured only in a model with experts"
