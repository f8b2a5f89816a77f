"""MXFP4 and NVFP4 experts of compressed-tensors, ModelOpt and Quark checkpoints. vLLM does the routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.experts.routed import ServedExperts, say_own, wanted
from tokenspeed_kernel_vllm.linear_fp4 import Stored


class Fp4Experts(ServedExperts):
    """Experts with MXFP4 or NVFP4 weights. vLLM's own method adds the parameters and names them. Unlike with some of vLLM's
    kernels, inputs are not quantised unless the settings say so.
    """

    def __init__(self, own: Any, stored: Stored) -> None:
        """
        Args:
            own: vLLM's method.
            stored: how the checkpoint stores the layer.

        Raises:
            NotServedError: no kernel is eligible, or the blocks have another size than the format's.
        """
        stored.check_block()
        super().__init__(own.moe, stored.weight_format, "weight_scale", stored.weight, stored.unmeasured)
        self.own = own
        self.stored = stored
        # vLLM's loader reads this: whether scales of activations are those of all ranks' experts.
        self.use_global_sf = getattr(own, "use_global_sf", False)

    def uses_weight_scale_2_pattern(self) -> bool:
        """Returns what vLLM's own method returns. vLLM's loader asks for it."""
        answer: bool = self.own.uses_weight_scale_2_pattern()
        return answer

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters of vLLM's own method."""
        sizes = (num_experts, hidden_size, intermediate_size_per_partition, params_dtype)
        self.own.create_weights(layer, *sizes, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rearranges the weights for the plan's kernel.

        Raises:
            ValueError: the gate and up projections of an expert have different global scales.
        """
        more: dict[str, Tensor] = {}
        if self.stored.weight_format == "nvfp4":
            for part in ("w13", "w2"):
                scale = self.stored.multipliers(getattr(layer, f"{part}_{self.stored.global_scale}"))
                scale = scale.view(len(scale), -1)
                if (scale != scale[:, :1]).any():
                    raise ValueError(
                        "tokenspeed_kernel_vllm: the gate and up projections of an expert have different global scales; "
                        "unset TOKENSPEED_VLLM_OTHER_EXPERTS to use vLLM's method, which takes one of the two"
                    )
                more[f"{part}_weight_global_scale"] = scale[:, 0].contiguous()
        self.served.arrange(layer, **more)


class CompressedFp4Experts(Fp4Experts):
    """Experts of compressed-tensors checkpoints. vLLM's loader tells formats apart by words in the names of such classes."""


class ModelOptFp4Experts(Fp4Experts):
    """Experts of ModelOpt checkpoints. See `CompressedFp4Experts` for the class's name."""


def fp4_experts(own: QuantizeMethodBase | None, stored: Stored | None, method: type[Fp4Experts] = Fp4Experts) -> Any:
    """Returns our method for a layer of experts. Returns ``own`` for other layers and formats, if the part is off for the format,
    or if no kernel is eligible. In the last case, one line of the log gives the reason.

    Args:
        own: vLLM's method.
        stored: how the checkpoint stores the layer; None for other formats.
        method: our method's class.
    """
    if stored is None or not isinstance(own, FusedMoEMethodBase) or not wanted(stored.weight_format, stored.unmeasured):
        return own
    try:
        return method(own, stored)
    except NotServedError as error:
        say_own(stored.weight_format, error)
        return own
