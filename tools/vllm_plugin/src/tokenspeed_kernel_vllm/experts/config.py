"""The quantisation ``gpt_oss_mxfp4``: experts run on the core's kernels if one is eligible, otherwise on vLLM's kernels.

With `TOKENSPEED_VLLM_LINEAR`, unquantised linear layers use the core's `mm`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.experts.method import BLOCK, GptOssExperts
from tokenspeed_kernel_vllm.experts.planning import find_plan
from tokenspeed_kernel_vllm.linear import Linear
from tokenspeed_kernel_vllm.settings import core_is_there, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# Constants of vLLM's activation ``swigluoai``: ``(up + beta) * gate * sigmoid(alpha * gate)``, with gate and up clamped at the
# limit.
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0


class GptOssConfig(GptOssMxfp4Config):
    """vLLM's configuration of GPT-OSS. Layers for which a kernel of ours is eligible run on this kernel."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer. If experts fall back to vLLM's own method, one line of the log gives the
        reason.
        """
        settings = read_settings()
        if isinstance(layer, LinearBase) and settings.linear and core_is_there():
            return Linear()
        if not isinstance(layer, RoutedExperts) or not settings.experts:
            return super().get_quant_method(layer, prefix)
        try:
            return GptOssExperts(layer.moe_config, plan_of(layer))
        except NotServedError as error:
            reason = " | ".join(line.strip() for line in str(error).splitlines())
            logger.warning_once("tokenspeed_kernel_vllm: vLLM's own MXFP4 experts, because %s", reason)
            return super().get_quant_method(layer, prefix)


def plan_of(layer: Any) -> Any:
    """Returns the plan of a layer of experts, which has the layer's sizes and the selected kernel.

    Args:
        layer: vLLM's `RoutedExperts`. The layer's weights need not be created yet.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the core is not installed, the layer has an unsupported feature, or no kernel is eligible here.
    """

    def given(name: str, default: float) -> float:
        value = getattr(layer, name)
        return default if value is None else float(value)

    moe = layer.moe_config
    return find_plan(
        moe,
        _not_served(layer),
        round_up(moe.intermediate_size_per_partition),
        weight_format="mxfp4",
        w13_interleaved=True,
        alpha=given("swiglu_alpha", ALPHA),
        limit=given("swiglu_limit", LIMIT),
        beta=given("swiglu_beta", BETA),
    )


def round_up(intermediate_size: int) -> int:
    """Returns the intermediate size of a rank's shard, rounded up to whole blocks. vLLM's loader zero-fills the additional
    features.
    """
    return -(-intermediate_size // BLOCK) * BLOCK


def _not_served(layer: Any) -> dict[str, bool]:
    """Returns the features of GPT-OSS's experts that our method lacks, each with whether the layer uses it."""
    moe = layer.moe_config
    return {
        f"activation {moe.activation.value}": moe.activation is not MoEActivation.SWIGLUOAI,
        "a routing other than the softmax over the chosen logits": (
            layer.scoring_func != "softmax"
            or not layer.renormalize
            or layer.use_grouped_topk
            or layer.custom_routing_function is not None
            or layer.e_score_correction_bias is not None
            or layer.routed_scaling_factor != 1.0
        ),
        "routing weights on the input": layer.apply_router_weight_on_input,
    }
