"""Finds an eligible kernel of the core for a layer of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_vllm.settings import core_is_there, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")


def find_plan(moe: Any, refused: Mapping[str, bool], intermediate_size: int, **options: Any) -> Any:
    """Returns the plan of a layer of experts, which has the layer's sizes and the selected kernel. The settings say to which format
    activations are rounded.

    Args:
        moe: vLLM's `FusedMoEConfig`.
        refused: features that the layer's quantisation method does not support, each with whether the layer uses it. This function
            adds features that no method supports: parallelism other than tensor and expert parallelism, LoRA, ``--moe-backend``.
        intermediate_size: the intermediate size on this rank.
        options: further arguments of the core's `moe_apply.plan`.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the core is not installed, the layer has an unsupported feature, or no kernel is eligible here.
    """
    if not core_is_there():
        raise NotServedError("tokenspeed-kernel, which chooses among kernels, is not installed")
    found = [feature for feature, asked in {**refused, **_never_served(moe)}.items() if asked]
    if found:
        raise NotServedError(f"it does not serve {', '.join(found)}")
    from tokenspeed_kernel import get_operator

    return plan_for(
        get_operator("moe_apply").function,
        moe.num_local_experts,
        moe.experts_per_token,
        moe.hidden_dim,
        intermediate_size,
        dtype=moe.in_dtype,
        device=torch.device(moe.device),
        bias=moe.has_bias,
        activation_dtype=read_settings().activations,
        **options,
    )


def find_routed(ops: Any, plan: Any, weights: Any) -> str | None:
    """Returns the fused kernel of `moe_topk_apply` for a layer with prepared weights; None if there is no such kernel.

    Without a fused kernel, the operator would call `moe_topk` and `moe_apply`. The layer then calls these two itself.

    Args:
        ops: the core's Python module.
        plan: the core's plan.
        weights: the layer's weights, prepared for the plan.
    """
    device = weights.w13_weight.device
    x = torch.zeros(1, plan.hidden_size, dtype=plan.dtype, device=device)
    logits = torch.zeros(1, plan.num_experts, dtype=plan.dtype, device=device)
    chosen = ops.moe_topk_apply.explain(x=x, logits=logits, weights=weights, plan=plan).chosen
    fused = chosen is not None and chosen.solution not in ("composed", "reference") and "waits" not in chosen.tags
    return str(chosen.name) if fused else None


def say_served(what: str, plan: Any, routed: str | None = None) -> None:
    """Logs, once per kind of layer, which kernel computes the experts, which kernel routes, and how activations are rounded."""
    routing = "separate" if routed is None else f"fused, by {routed}"
    rounding = "unrounded" if plan.activation_dtype == "none" else f"rounded to {plan.activation_dtype}"
    text = "tokenspeed_kernel_vllm: %s experts by %s; routing %s; activations %s (TOKENSPEED_VLLM_ACTIVATIONS)"
    logger.info_once(text, what, plan.kernel, routing, rounding)


def _never_served(moe: Any) -> dict[str, bool]:
    """Returns the features that none of our methods has, each with whether the layer uses it."""
    parallel = moe.moe_parallel_config
    return {
        f"--moe-backend {moe.moe_backend}": moe.moe_backend != "auto",
        "LoRA": moe.is_lora_enabled,
        "balancing of experts (EPLB)": parallel.enable_eplb,
        "data parallel tokens": parallel.dp_size > 1,
        "sequence parallel tokens": parallel.sp_size > 1,
        "prefills divided among ranks": parallel.pcp_size > 1,
        # AITER's integration replaces the map from global to local expert ids with a mask of another length.
        "expert parallel layers that AITER has prepared": parallel.use_ep and moe.rocm_aiter_fmoe_enabled,
    }
