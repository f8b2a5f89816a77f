"""Unquantised experts, and fp8 experts with 128 x 128 block scales.

Hooks: the out-of-tree class `DenseExperts` replaces `UnquantizedFusedMoEMethod`, and the configuration `BlockFp8Config` replaces
``fp8``. vLLM's router selects the experts, the core's `moe_apply` computes them, and vLLM adds the ranks' partial sums and runs
shared experts. Unless the settings say otherwise, inputs of fp8 experts are not quantised, unlike with vLLM's own method.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.utils import set_weight_attrs

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.experts.method import arrange, ids_of_rank
from tokenspeed_kernel_vllm.experts.planning import find_plan, say_served
from tokenspeed_kernel_vllm.linear_fp8 import fp8_linear
from tokenspeed_kernel_vllm.settings import CORE, default_of, is_on, read_settings
from tokenspeed_kernel_vllm.sizes import sizes_up_to, warm_once

SWITCH = "TOKENSPEED_VLLM_OTHER_EXPERTS"

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# Number of rows and of columns of a scale block.
BLOCK = 128
_SCALE = "weight_scale_inv"


class _Served:
    """The plan and the weights of a layer that runs on a kernel of ours. Arranges the layer's weights, and calls the kernel."""

    def __init__(self, plan: Any, scale: str, weight: str = "weight", unmeasured: str = "") -> None:
        self.plan = plan
        self.unmeasured = unmeasured  # see `default_of`, for the log
        self.scale = scale
        self.weight = weight
        self.ops: Any = import_module(CORE)
        self.weights: Any = None

    def arrange(self, layer: Any, **more: Tensor) -> None:
        """Arranges the loaded weights for the plan's kernel, logs the kernel, and warms it up. ``more``: further attributes of
        `MoEWeights`.
        """
        device = getattr(layer, f"w13_{self.weight}").device
        self.weights = arrange(layer, self.plan, self.ops, self.scale, self.weight, **more)
        weight_format = self.plan.weight_format
        say_served(f"{weight_format} ({SWITCH}; {default_of(SWITCH, weight_format, self.unmeasured)})", self.plan)
        warm_once("experts", self.plan, device, lambda tokens: self.warm(layer, tokens, device))

    @torch.inference_mode()
    def warm(self, layer: Any, tokens: int, device: torch.device) -> None:
        """Compiles the kernels: calls the layer with each number of tokens of `sizes_up_to` except the last, which vLLM runs
        itself.
        """
        plan = self.plan
        slot = torch.arange(plan.top_k, device=device)
        for size in sizes_up_to(tokens):
            if size < tokens:
                x = torch.zeros(size, plan.hidden_size, dtype=plan.dtype, device=device)
                ids = (torch.arange(size, device=device).unsqueeze(1) * plan.top_k + slot) % plan.num_experts
                weights = torch.full(ids.shape, 1 / plan.top_k, dtype=torch.float32, device=device)
                self.ops.moe_apply(x, self.weights, weights, ids.int(), plan)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Returns this rank's partial sum over the top-k experts, ``[tokens, hidden]``. ``topk_ids``: global expert ids."""
        out: Tensor = self.ops.moe_apply(x, self.weights, topk_weights.float(), ids_of_rank(layer, topk_ids), self.plan)
        return out


def wanted(weight_format: str, unmeasured: str = "") -> bool:
    """Returns whether the switch, or its default, asks for our kernels for experts of a format. ``unmeasured``: see
    `default_of`."""
    return is_on(read_settings().other_experts, SWITCH, weight_format, unmeasured)


def plan_of(moe: Any, weight_format: str) -> Any:
    """Returns the plan of a layer of experts with SiLU. See `find_plan`."""
    refused = {
        f"activation {moe.activation.value}": moe.activation is not MoEActivation.SILU,
        "clamped or scaled activations": any(value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)),
    }
    if weight_format == "fp8_block":
        size = moe.intermediate_size_per_partition
        refused[f"{size} features a rank, which are not whole blocks"] = size % BLOCK != 0
    return find_plan(moe, refused, moe.intermediate_size_per_partition, weight_format=weight_format)


def say_own(what: str, error: NotServedError) -> None:
    """Logs, once per reason, why experts run on vLLM's own method."""
    reason = " | ".join(line.strip() for line in str(error).splitlines())
    logger.warning_once("tokenspeed_kernel_vllm: vLLM's own %s experts, because %s", what, reason)


class DenseExperts(UnquantizedFusedMoEMethod):
    """Unquantised experts. Layers without an eligible kernel fall back to vLLM's method, the base class."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """
        Args:
            moe: vLLM's description of the layer.
        """
        self.served: _Served | None = None
        served = None
        if wanted("dense"):
            try:
                served = _Served(plan_of(moe, "dense"), "weight_scale")
            except NotServedError as error:
                say_own("unquantised", error)
        if served is None:
            super().__init__(moe)
        else:
            # No selection among vLLM's own kernels is needed, so the constructor of vLLM's method is skipped.
            super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.served = served

    @property
    def is_monolithic(self) -> bool:
        """False if a kernel of ours runs the layer, because vLLM then does the routing."""
        return self.served is None and super().is_monolithic

    @property
    def supports_eplb(self) -> bool:
        """False if a kernel of ours runs the layer. Layers with expert load balancing fall back to vLLM's method."""
        return self.served is None and super().supports_eplb

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """Returns the sizes of this rank's shard. If a kernel of ours runs the layer, these are the sizes of the plan."""
        if self.served is None:
            sizes: tuple[int, int] = super().maybe_roundup_sizes(
                hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
            )
            return sizes
        return self.served.plan.hidden_size, self.served.plan.intermediate_size

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rearranges the weights for the plan's kernel."""
        if self.served is None:
            super().process_weights_after_loading(layer)
        else:
            self.served.arrange(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """Returns vLLM's configuration for its own kernels; None if a kernel of ours runs the layer."""
        return super().get_fused_moe_quant_config(layer) if self.served is None else None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Computes the weighted sum over the top-k experts. Does not synchronise with the device.

        Args:
            layer: vLLM's `RoutedExperts`. If it has a map from global to local expert ids, the map is used.
            x: ``[tokens, hidden]``.
            topk_weights, topk_ids: ``[tokens, top_k]``, with global expert ids.
            shared_experts, shared_experts_input: not read; vLLM calls shared experts itself.

        Returns:
            This rank's partial sum, ``[tokens, hidden]`` of x's dtype. vLLM adds the partial sums of all ranks (all-reduce).
        """
        if self.served is None:
            out: Tensor = super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            return out
        return self.served.apply(layer, x, topk_weights, topk_ids)


class BlockFp8Config(Fp8Config):
    """vLLM's configuration of fp8 checkpoints. Experts and linear layers for which a kernel of ours is eligible run on this
    kernel.
    """

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the quantisation method of a layer. If experts fall back to vLLM's own method, one line of the log gives the
        reason.
        """
        own = fp8_linear(super().get_quant_method(layer, prefix), prefix, self)
        if not isinstance(own, Fp8MoEMethod) or not wanted("fp8_block"):
            return own
        try:
            if self.weight_block_size != [BLOCK, BLOCK]:
                raise NotServedError(f"it serves scales of blocks of {BLOCK} x {BLOCK}, not {self.weight_block_size}")
            return BlockFp8Experts(layer.moe_config)
        except NotServedError as error:
            say_own("fp8", error)
            return own


class ServedExperts(FusedMoEMethodBase):
    """Experts of a checkpoint's format on a kernel of the core."""

    def __init__(self, moe: FusedMoEConfig, weight_format: str, scale: str, weight: str = "weight", unmeasured: str = "") -> None:
        """
        Args:
            moe: vLLM's description of the layer.
            weight_format: the plan's format.
            scale, weight: the parts after ``w13_`` and ``w2_`` of the parameters' names.
            unmeasured: see `default_of`, for the log.

        Raises:
            NotServedError: no kernel is eligible.
        """
        super().__init__(moe)
        self.served = _Served(plan_of(moe, weight_format), scale, weight, unmeasured)

    @property
    def is_monolithic(self) -> bool:
        """False, because vLLM does the routing."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rearranges the weights for the plan's kernel."""
        self.served.arrange(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """Returns None: the configuration is for vLLM's own kernels, which do not run this layer."""
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Computes the weighted sum over the top-k experts; see `DenseExperts.apply`."""
        return self.served.apply(layer, x, topk_weights, topk_ids)


class BlockFp8Experts(ServedExperts):
    """fp8 (e4m3) experts with float32 block scales. Unlike with vLLM's own method, inputs are not quantised."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """
        Args:
            moe: vLLM's description of the layer.

        Raises:
            NotServedError: no kernel is eligible.
        """
        super().__init__(moe, "fp8_block", _SCALE)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that vLLM's loader fills, with the names that the loader expects."""
        h, i = hidden_size, intermediate_size_per_partition
        layer.weight_block_size = [BLOCK, BLOCK]
        biases = {"w13_bias": (2 * i,), "w2_bias": (h,)} if self.moe.has_bias else {}
        for name, shape in {"w13_weight": (2 * i, h), "w2_weight": (h, i), **biases}.items():
            dtype = params_dtype if name in biases else torch.float8_e4m3fn
            self._add(layer, name, torch.zeros(num_experts, *shape, dtype=dtype), extra_weight_attrs)
        blocks_h = -(-h // BLOCK)
        for name, shape in {"w13": (2 * i // BLOCK, blocks_h), "w2": (blocks_h, i // BLOCK)}.items():
            scales = torch.ones(num_experts, *shape, dtype=torch.float32)
            self._add(layer, f"{name}_{_SCALE}", scales, {**extra_weight_attrs, "quant_method": "block"})

    @staticmethod
    def _add(layer: Any, name: str, tensor: Tensor, attributes: dict[str, Any]) -> None:
        """Adds a parameter to the layer. ``attributes``: those that vLLM's loader reads, such as ``weight_loader``."""
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, attributes)
