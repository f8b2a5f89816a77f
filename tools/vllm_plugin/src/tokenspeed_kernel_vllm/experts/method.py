"""A layer of MXFP4 experts: its weights as vLLM loads them, prepared once for the kernel that was chosen, and the layer itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from tokenspeed_kernel_vllm.settings import CORE, read_settings
from tokenspeed_kernel_vllm.sizes import sizes_up_to, warming

# Values that share a scale, and values in a byte.
BLOCK, PACKED = 32, 2
# Plans of which a layer was warmed in this process.
_warmed: set[Any] = set()


class GptOssExperts(FusedMoEMethodBase):
    """Experts of one layer, from router logits to their weighted sum; this rank's share of it under parallelism."""

    def __init__(self, moe: FusedMoEConfig, plan: Any) -> None:
        """
        Args:
            moe: vLLM's description of the layer.
            plan: the core's, with the kernel.
        """
        super().__init__(moe)
        self.plan = plan
        self.ops: Any = import_module(CORE)
        self.weights: Any = None

    @property
    def is_monolithic(self) -> bool:
        """Routing is done here, too."""
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """The sizes of this rank's shard: those of the plan."""
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
        """Adds the parameters that vLLM's loader fills, under the names that it looks for. Zero where it leaves them."""
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
        """Arranges the weights for the plan's kernel. What it does not keep is dropped, so that they are not there twice."""
        device = layer.w13_weight.device
        self.weights = arrange(layer, self.plan, self.ops)
        if device.type != "cpu" and self.plan not in _warmed and read_settings().warmup:  # on a CPU nothing is compiled
            _warmed.add(self.plan)
            with warming("experts"):
                self.warm(layer, get_current_vllm_config().scheduler_config.max_num_batched_tokens, device)

    @torch.inference_mode()
    def warm(self, layer: Any, tokens: int, device: torch.device) -> None:
        """Calls the layer with each of `sizes_up_to` but the last, which vLLM tries itself, so that its kernels are compiled."""
        experts = torch.arange(self.moe.num_experts, device=device)
        for size in sizes_up_to(tokens):
            if size < tokens:
                x = torch.zeros(size, self.plan.hidden_size, dtype=self.plan.dtype, device=device)
                turns = torch.arange(size, device=device).unsqueeze(1) * self.plan.top_k
                self.apply_monolithic(layer, x, ((experts + turns) % len(experts)).to(x.dtype))

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """None: it describes weights to kernels of vLLM's, which do not serve this layer."""
        return None

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """The weighted sum over the experts that the router chooses. Does not wait for the device.

        Args:
            layer: vLLM's `RoutedExperts`; its map from experts to those of this rank is read, where it has one.
            x: ``[tokens, hidden]``.
            router_logits: ``[tokens, experts]``, of all ranks.
            input_ids: not read.

        Returns:
            ``[tokens, hidden]`` of x's dtype, without the experts and shards of other ranks: vLLM adds those up.
        """
        weights, ids = self.ops.moe_topk(router_logits, self.plan.top_k, renormalize=True)
        out: Tensor = self.ops.moe_apply(x, self.weights, weights, ids_of_rank(layer, ids), self.plan)
        return out


def arrange(layer: Any, plan: Any, ops: Any, scale: str = "weight_scale") -> Any:
    """Arranges a layer's weights for the plan's kernel. What it does not keep is dropped, so that they are not there twice.

    Args:
        layer: vLLM's `RoutedExperts`, loaded.
        plan: the core's.
        ops: the core.
        scale: what its scales are called, behind ``w13_`` and ``w2_``.

    Returns:
        The core's `MoEWeights`.
    """
    names = [f"{part}_{name}" for part in ("w13", "w2") for name in ("weight", scale, "bias")]
    loaded = [getattr(layer, name, None) for name in names]
    given: list[Any] = [None if parameter is None else parameter.data for parameter in loaded]
    weights = ops.moe_process_weights(ops.MoEWeights(*given), plan)
    kept = {value.untyped_storage().data_ptr() for value in vars(weights).values() if isinstance(value, Tensor)}
    for name, tensor in zip(names, given, strict=True):
        if tensor is not None and tensor.untyped_storage().data_ptr() not in kept:
            replace_parameter(layer, name, tensor.new_empty(0))
    return weights


def ids_of_rank(layer: Any, ids: Tensor) -> Tensor:
    """Experts as this rank counts its own; -1 for those of other ranks, which skips them.

    Args:
        layer: vLLM's `RoutedExperts`.
        ids: ``[tokens, top_k]``, of all ranks' experts.
    """
    if layer.expert_map is None:
        return ids
    local: Tensor = layer.expert_map.index_select(0, ids.flatten()).view_as(ids)
    return local
