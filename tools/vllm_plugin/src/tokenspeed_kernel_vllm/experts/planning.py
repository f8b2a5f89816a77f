"""Whether a kernel of the core serves a layer of experts, and which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel_vllm.settings import core_is_there


class NotServedError(ValueError):
    """No kernel of ours serves a layer of experts; the message says why."""


def find_plan(moe: Any, refused: Mapping[str, bool], intermediate_size: int, **options: Any) -> Any:
    """The plan of a layer of experts: its sizes and the kernel that serves it.

    Args:
        moe: vLLM's `FusedMoEConfig`.
        refused: features of the layer that its method does not serve, and whether they are asked for. What nothing here serves is
            added: other ways to divide tokens and experts than tensor and expert parallelism, LoRA, ``--moe-backend``.
        intermediate_size: of this rank.
        options: what else the core's `moe_plan` is told.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the core is not installed, the layer has a feature that is not served, or no kernel does it here.
    """
    if not core_is_there():
        raise NotServedError("tokenspeed-kernel, which chooses among kernels, is not installed")
    found = [feature for feature, asked in {**refused, **_never_served(moe)}.items() if asked]
    if found:
        raise NotServedError(f"it does not serve {', '.join(found)}")
    from tokenspeed_kernel import KernelRegistry, NoKernelFoundError, get_operator, moe_plan
    from tokenspeed_kernel_base.platform import platform_of

    device = torch.device(moe.device)
    try:
        plan = moe_plan(
            moe.num_local_experts,
            moe.experts_per_token,
            moe.hidden_dim,
            intermediate_size,
            dtype=moe.in_dtype,
            device=device,
            bias=moe.has_bias,
            **options,
        )
    except (NoKernelFoundError, TypeError, ValueError) as error:
        raise NotServedError(str(error)) from error
    spec, platform = KernelRegistry.get().get_by_name(plan.kernel), platform_of(device)
    # The layer lies inside captured graphs, for which a kernel may not wait.
    if not platform.is_cpu and ("waits" in spec.tags or spec.solution == "reference"):
        explanation = get_operator("moe_apply").consider_plan(plan, platform, solution=None, override=None, package=None)
        raise NotServedError(f"only {spec.name} would serve it, which waits for the device:\n{explanation}")
    return plan


def _never_served(moe: Any) -> dict[str, bool]:
    parallel = moe.moe_parallel_config
    return {
        f"--moe-backend {moe.moe_backend}": moe.moe_backend != "auto",
        "LoRA": moe.is_lora_enabled,
        "balancing of experts (EPLB)": parallel.enable_eplb,
        "data parallel tokens": parallel.dp_size > 1,
        "sequence parallel tokens": parallel.sp_size > 1,
        "prefills divided among ranks": parallel.pcp_size > 1,
        # AITER's integration puts a mask of another length in the place of the map from experts to this rank's.
        "expert parallel layers that AITER has prepared": parallel.use_ep and moe.rocm_aiter_fmoe_enabled,
    }
