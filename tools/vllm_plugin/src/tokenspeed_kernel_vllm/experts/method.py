"""The quantisation method of GPT-OSS's MXFP4 experts: the weights as vLLM loads them, their preparation for the selected kernel,
and the computation.

Hook: vLLM's `FusedMoEMethodBase`, in its monolithic form: vLLM passes router logits, and this method also routes. If one fused
kernel routes and computes the experts, one call does both. vLLM adds the ranks' partial sums.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.utils import set_weight_attrs

from tokenspeed_kernel_vllm.experts.planning import find_routed, say_served
from tokenspeed_kernel_vllm.loading import release
from tokenspeed_kernel_vllm.settings import CORE
from tokenspeed_kernel_vllm.sizes import sizes_up_to, warm_once

# Number of values that share a scale, and number of values per byte.
BLOCK, PACKED = 32, 2


class GptOssExperts(FusedMoEMethodBase):
    """Computes the experts of one layer, from router logits to the weighted sum; with parallelism, this rank's part of the sum."""

    def __init__(self, moe: FusedMoEConfig, plan: Any) -> None:
        """
        Args:
            moe: vLLM's description of the layer.
            plan: the core's `MoEPlan`, with the selected kernel.
        """
        super().__init__(moe)
        self.plan = plan
        self.ops: Any = import_module(CORE)
        self.weights: Any = None
        self.routed = False  # whether one fused kernel routes and computes the experts

    @property
    def is_monolithic(self) -> bool:
        """True, because this method includes routing."""
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """Returns the hidden size and the intermediate size of this rank's shard, from the plan."""
        return self.plan.hidden_size, self.plan.intermediate_size

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that vLLM's loader fills, under the names that the loader expects. Padding that the loader does not
        fill is zero.
        """
        h, i = hidden_size, intermediate_size_per_partition
        shapes = {
            "w13_weight": (2 * i, h // PACKED),
            "w13_weight_scale": (2 * i, h // BLOCK),
            "w2_weight": (h, i // PACKED),
            "w2_weight_scale": (h, i // BLOCK),
        }
        biases = {"w13_bias": (2 * i,), "w2_bias": (h,)} if self.moe.has_bias else {}
        for name, shape in {**shapes, **biases}.items():
            dtype = torch.bfloat16 if name in biases else torch.uint8
            parameter = torch.nn.Parameter(torch.zeros(num_experts, *shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)
            if name.endswith("_scale"):
                set_weight_attrs(parameter, {"quant_method": "block"})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rearranges the weights for the plan's kernel. Original weights that the kernel does not need are dropped to save
        memory.
        """
        device = layer.w13_weight.device
        self.weights = arrange(layer, self.plan, self.ops)
        # Under expert parallelism, the router selects among all experts, but the plan has only this rank's experts.
        routed = find_routed(self.ops, self.plan, self.weights) if layer.expert_map is None else None
        self.routed = routed is not None
        say_served("MXFP4", self.plan, routed)
        warm_once("experts", self.plan, device, lambda tokens: self.warm(layer, tokens, device))

    @torch.inference_mode()
    def warm(self, layer: Any, tokens: int, device: torch.device) -> None:
        """Compiles the kernels: calls the layer with each number of tokens of `sizes_up_to` except the last, which vLLM runs
        itself.
        """
        experts = torch.arange(self.moe.num_experts, device=device)
        for size in sizes_up_to(tokens):
            if size < tokens:
                x = torch.zeros(size, self.plan.hidden_size, dtype=self.plan.dtype, device=device)
                turns = torch.arange(size, device=device).unsqueeze(1) * self.plan.top_k
                self.apply_monolithic(layer, x, ((experts + turns) % len(experts)).to(x.dtype))

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """Returns None: the configuration is for vLLM's own kernels, which do not run this layer."""
        return None

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Computes the weighted sum over the experts that the router selects. Does not synchronise with the device.

        Args:
            layer: vLLM's `RoutedExperts`; its map from global to local expert ids is used if it has one.
            x: ``[tokens, hidden]``.
            router_logits: ``[tokens, experts]``, with the experts of all ranks.
            input_ids: not read.

        Returns:
            This rank's partial sum, ``[tokens, hidden]`` of x's dtype. vLLM adds the partial sums of all ranks (all-reduce).
        """
        out: Tensor
        if self.routed:
            out = self.ops.moe_topk_apply(x, router_logits, self.weights, self.plan, renormalize=True)
            return out
        weights, ids = self.ops.moe_topk(router_logits, self.plan.top_k, renormalize=True)
        out = self.ops.moe_apply(x, self.weights, weights, ids_of_rank(layer, ids), self.plan)
        return out


def arrange(layer: Any, plan: Any, ops: Any, scale: str = "weight_scale", weight: str = "weight", **more: Tensor) -> Any:
    """Rearranges a layer's weights for the plan's kernel. Original weights that the kernel does not need are dropped to save
    memory.

    Args:
        layer: vLLM's `RoutedExperts`, loaded.
        plan: the core's plan.
        ops: the core's Python module.
        scale: the part after ``w13_`` and ``w2_`` of the names of the scales.
        weight: the same of the weights.
        more: further attributes of `MoEWeights`.

    Returns:
        The core's `MoEWeights`.
    """
    names = [f"{part}_{name}" for part in ("w13", "w2") for name in (weight, scale, "bias")]
    loaded = [getattr(layer, name, None) for name in names]
    given: list[Any] = [None if parameter is None else parameter.data for parameter in loaded]
    weights = ops.moe_apply.prepare(ops.MoEWeights(*given, **more), plan)
    release(layer, names, weights)
    return weights


def ids_of_rank(layer: Any, ids: Tensor) -> Tensor:
    """Returns the local expert ids of this rank. Experts of other ranks become -1, and kernels skip them.

    Args:
        layer: vLLM's `RoutedExperts`.
        ids: ``[tokens, top_k]``, global expert ids.
    """
    if layer.expert_map is None:
        return ids
    local: Tensor = layer.expert_map.index_select(0, ids.flatten()).view_as(ids)
    return local
