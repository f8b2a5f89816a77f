"""The quantisation ``gpt_oss_mxfp4``: experts are served by the core's kernels where they can be, else by vLLM's.

The core's `mm` also serves products with weights that are not quantised, if `TOKENSPEED_VLLM_LINEAR` says so.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from tokenspeed_kernel_vllm.experts.method import BLOCK, GptOssExperts
from tokenspeed_kernel_vllm.linear import Linear
from tokenspeed_kernel_vllm.settings import CORE, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# Of ``(up + beta) * gate * sigmoid(alpha * gate)``, gate and up cut at the limit: what vLLM's activation ``swigluoai`` means.
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0


class GptOssConfig(GptOssMxfp4Config):
    """vLLM's configuration, but for layers that a kernel of ours serves."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What serves a layer. One line of the log says why vLLM's own serves experts, where it does."""
        settings = read_settings()
        if isinstance(layer, LinearBase) and settings.linear and find_spec(CORE) is not None:
            return Linear()
        if not isinstance(layer, RoutedExperts) or not settings.experts:
            return super().get_quant_method(layer, prefix)
        try:
            return GptOssExperts(layer.moe_config, plan_of(layer))
        except NotServedError as error:
            reason = " | ".join(line.strip() for line in str(error).splitlines())
            logger.warning_once("tokenspeed_kernel_vllm: vLLM's own MXFP4 experts, because %s", reason)
            return super().get_quant_method(layer, prefix)


class NotServedError(ValueError):
    """No kernel of ours serves a layer of experts; the message says why."""


def plan_of(layer: Any) -> Any:
    """The plan of a layer of experts: its sizes and the kernel that serves it.

    Args:
        layer: vLLM's `RoutedExperts`, of which the weights need not be there yet.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the core is not installed, the layer has a feature that is not served, or no kernel does it here.
    """
    if find_spec(CORE) is None:
        raise NotServedError("tokenspeed-kernel, which chooses among kernels, is not installed")
    refused = [feature for feature, asked in _not_served(layer).items() if asked]
    if refused:
        raise NotServedError(f"it does not serve {', '.join(refused)}")
    from tokenspeed_kernel import KernelRegistry, NoKernelFoundError, get_operator, moe_plan
    from tokenspeed_kernel_base.platform import platform_of

    moe = layer.moe_config
    device = torch.device(moe.device)

    def given(name: str, default: float) -> float:
        value = getattr(layer, name)
        return default if value is None else float(value)

    try:
        plan = moe_plan(
            moe.num_local_experts,
            moe.experts_per_token,
            moe.hidden_dim,
            round_up(moe.intermediate_size_per_partition),
            dtype=moe.in_dtype,
            device=device,
            weight_format="mxfp4",
            w13_interleaved=True,
            bias=moe.has_bias,
            alpha=given("swiglu_alpha", ALPHA),
            limit=given("swiglu_limit", LIMIT),
            beta=given("swiglu_beta", BETA),
        )
    except (NoKernelFoundError, TypeError, ValueError) as error:
        raise NotServedError(str(error)) from error
    spec, platform = KernelRegistry.get().get_by_name(plan.kernel), platform_of(device)
    # The layer lies inside captured graphs, for which a kernel may not wait.
    if not platform.is_cpu and ("waits" in spec.tags or spec.solution == "reference"):
        explanation = get_operator("moe_apply").consider_plan(plan, platform, solution=None, override=None, package=None)
        raise NotServedError(f"only {spec.name} would serve it, which waits for the device:\n{explanation}")
    return plan


def round_up(intermediate_size: int) -> int:
    """The size of a rank's shard, in whole blocks: vLLM's loader gives each rank as many, and leaves the rest zero."""
    return -(-intermediate_size // BLOCK) * BLOCK


def _not_served(layer: Any) -> dict[str, bool]:
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
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
        f"--moe-backend {moe.moe_backend}": moe.moe_backend != "auto",
        "LoRA": moe.is_lora_enabled,
        "balancing of experts (EPLB)": parallel.enable_eplb,
        "data parallel tokens": parallel.dp_size > 1,
        "sequence parallel tokens": parallel.sp_size > 1,
        "prefills divided among ranks": parallel.pcp_size > 1,
        # AITER's integration puts a mask of another length in the place of the map from experts to this rank's.
        "expert parallel layers that AITER has prepared": parallel.use_ep and moe.rocm_aiter_fmoe_enabled,
    }
