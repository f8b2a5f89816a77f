"""Replaces SGLang's quantisation ``mxfp4``. Experts of GPT-OSS run on a kernel of the core if one is eligible, otherwise on
SGLang's own.

Hook: SGLang's registry of quantisations, and `FusedMoEMethodBase`. SGLang routes and adds the ranks' results; the core's
`moe_apply` computes the weighted sum over the selected experts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod
from sglang.srt.utils import set_weight_attrs
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_sglang.record import record

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module("tokenspeed_kernel")

# Number of values that share a scale, and number of values per byte.
BLOCK, PACKED = 32, 2
# A rank's intermediate features are rounded up to a multiple of this number, as SGLang's loader of GPT-OSS expects.
ROUNDING = 64
# The runner backends with which SGLang's router returns top-k weights and ids. In newer releases of SGLang, the quantisation method
# determines what the router returns.
STANDARD = ("auto", "triton")


class GptOssConfig(Mxfp4Config):
    """SGLang's configuration of MXFP4 checkpoints, except that experts run on a kernel of ours if one is eligible."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the quantisation method of a layer. If experts fall back to SGLang's own method, one line of the log gives the
        reason.
        """
        own = super().get_quant_method(layer, prefix)
        if not isinstance(own, Mxfp4MoEMethod):
            return own
        facts: Any = layer
        kind = f"{facts.num_local_experts} experts of {facts.hidden_size} x {facts.intermediate_size_per_partition}, mxfp4"
        try:
            method = GptOssExperts(layer)
        except NotServedError as error:
            record("experts", kind, reason=str(error))
            return own
        record("experts", kind, (method.plan.kernel,))
        return method


class GptOssExperts(FusedMoEMethodBase):
    """Computes the experts of one layer: SGLang's router selects the experts, and the core's `moe_apply` computes their weighted
    sum."""

    def __init__(self, layer: Any) -> None:
        """
        Args:
            layer: SGLang's `FusedMoE`. Its weights need not exist yet.

        Raises:
            NotServedError: the layer has an unsupported feature, or no kernel is eligible. The message has the reason.
        """
        super().__init__()
        self.plan = plan_of(layer)
        self.weights: Any = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that SGLang's loader fills, under the names that the loader expects. Padding stays zero."""
        h, i = hidden_size, self.plan.intermediate_size
        shapes = {
            "w13_weight": (2 * i, h // PACKED),
            "w13_weight_scale": (2 * i, h // BLOCK),
            "w13_weight_bias": (2 * i,),
            "w2_weight": (h, i // PACKED),
            "w2_weight_scale": (h, i // BLOCK),
            "w2_weight_bias": (h,),
        }
        for name, shape in shapes.items():
            dtype = torch.bfloat16 if name.endswith("_bias") else torch.uint8
            parameter = torch.nn.Parameter(torch.zeros(num_experts, *shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Stores SGLang's configuration. No runner is made, because the experts use none of SGLang's."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rearranges the weights for the plan's kernel. Drops original weights that the kernel does not read, to save memory."""
        names = [f"{part}_{name}" for part in ("w13", "w2") for name in ("weight", "weight_scale", "weight_bias")]
        given = [getattr(layer, name).data for name in names]
        self.weights = OPS.moe_apply.prepare(OPS.MoEWeights(*given), self.plan)
        kept = {value.untyped_storage().data_ptr() for value in vars(self.weights).values() if isinstance(value, Tensor)}
        for name, tensor in zip(names, given, strict=True):
            if tensor.untyped_storage().data_ptr() not in kept:
                setattr(layer, name, torch.nn.Parameter(tensor.new_empty(0), requires_grad=False))

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Computes the weighted sum over the experts that SGLang's router selected. Does not synchronise with the device.

        Args:
            layer: SGLang's `FusedMoE`.
            dispatch_output: ``hidden_states`` ``[tokens, hidden]``, and the router's ``topk_output`` with the experts of this rank;
                experts of other ranks are -1.

        Returns:
            SGLang's result object, with the sum ``[tokens, hidden]`` over this rank's experts and shards. SGLang adds the results
            of other ranks.

        Raises:
            ValueError: the router did not return weights and ids of experts.
        """
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        topk = dispatch_output.topk_output
        if not hasattr(topk, "topk_ids"):
            raise ValueError(f"tokenspeed_kernel_sglang reads weights and ids of experts, got {type(topk).__name__}")
        x = dispatch_output.hidden_states
        out = OPS.moe_apply(x, self.weights, topk.topk_weights.float(), topk.topk_ids.int(), self.plan)
        return StandardCombineInput(hidden_states=out)


def plan_of(layer: Any) -> Any:
    """Returns the plan of a layer of experts, which has the layer's sizes and the selected kernel.

    Args:
        layer: SGLang's `FusedMoE`.

    Returns:
        The core's `MoEPlan`.

    Raises:
        NotServedError: the layer has an unsupported feature, or no kernel is eligible here.
    """
    config = layer.moe_runner_config
    backend = getattr(get_moe_runner_backend(), "value", "of another plug-in")
    asked = {
        # In this release, the runner backend's name determines what the router returns, not the quantisation method.
        f"the expert routing of --moe-runner-backend {backend} (choose triton)": (
            backend not in STANDARD and not hasattr(FusedMoEMethodBase, "get_moe_runner_backend")
        ),
        f"activation {config.activation}": config.activation not in ("silu", "swiglu") or not config.is_gated,
        "experts without a clamped SwiGLU": config.gemm1_alpha is None or config.gemm1_clamp_limit is None,
        "gate and up in separate halves": not config.gate_up_interleaved,
        "routing weights on the input": config.apply_router_weight_on_input,
        "results of single experts": config.no_combine,
        "a factor of the routed experts": config.routed_scaling_factor not in (None, 1.0),
        "shared experts in the same weights": bool(config.num_fused_shared_experts),
        f"all-to-all by {get_moe_a2a_backend().value}": not get_moe_a2a_backend().is_none(),
    }
    found = [feature for feature, wanted in asked.items() if wanted]
    if found:
        raise NotServedError(f"our method does not support {', '.join(found)}")
    return plan_for(
        OPS.moe_apply,
        layer.num_local_experts,
        layer.top_k,
        layer.hidden_size,
        -(-layer.intermediate_size_per_partition // ROUNDING) * ROUNDING,
        dtype=config.params_dtype or torch.get_default_dtype(),
        device=torch.get_default_device(),
        weight_format="mxfp4",
        w13_interleaved=True,
        bias=True,
        alpha=float(config.gemm1_alpha),
        limit=float(config.gemm1_clamp_limit),
        beta=1.0,
    )
