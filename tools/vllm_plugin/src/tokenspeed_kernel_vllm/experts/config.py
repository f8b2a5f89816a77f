"""The quantisation ``gpt_oss_mxfp4``: experts are served by the core's kernels where they can be, else by vLLM's.

The core's `mm` also serves products with weights that are not quantised, if `TOKENSPEED_VLLM_LINEAR` says so.
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

from tokenspeed_kernel_vllm.experts.method import BLOCK, GptOssExperts
from tokenspeed_kernel_vllm.experts.planning import NotServedError, find_plan
from tokenspeed_kernel_vllm.linear import Linear
from tokenspeed_kernel_vllm.settings import core_is_there, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# Of ``(up + beta) * gate * sigmoid(alpha * gate)``, gate and up cut at the limit: what vLLM's activation ``swigluoai`` means.
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0


class GptOssConfig(GptOssMxfp4Config):
    """vLLM's configuration, but for layers that a kernel of ours serves."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What serves a layer. One line of the log says why vLLM's own serves experts, where it does."""
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
    """The plan of a layer of experts: its sizes and the kernel that serves it.

    Args:
        layer: vLLM's `RoutedExperts`, of which the weights need not be there yet.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the core is not installed, the layer has a feature that is not served, or no kernel does it here.
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
    """The size of a rank's shard, in whole blocks: vLLM's loader gives each rank as many, and leaves the rest zero."""
    return -(-intermediate_size // BLOCK) * BLOCK


def _not_served(layer: Any) -> dict[str, bool]:
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
