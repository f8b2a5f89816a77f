"""Products with weights that are not quantised, by the core's `mm`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from tokenspeed_kernel_vllm.settings import CORE, read_settings

# What GPT-OSS calls its routers. vLLM builds them without the model's quantisation, which is asked for all other products.
ROUTER = ".mlp.router"


class Linear(UnquantizedLinearMethod):
    """vLLM's method, but for who multiplies: the kernel of the core's `mm` that suits the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Any = import_module(CORE)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves the weight as it was loaded. vLLM's own method packs it on a CPU."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ layer.weight.T + bias``.

        Args:
            layer: its ``weight`` is ``[out_features, in_features]``.
            x: ``[..., in_features]`` of the weight's dtype.
            bias: ``[out_features]``.

        Returns:
            ``[..., out_features]`` of x's dtype.
        """
        weight: Any = layer.weight
        product: Tensor = self.ops.mm(x.flatten(0, -2), weight.t(), bias=bias)
        # Not `len(weight)`: PyTorch 2.11 cannot trace it for vLLM's class of parameters.
        return product.view(*x.shape[:-1], weight.shape[0])


class RouterLinear(ReplicatedLinear):
    """vLLM's layer of products that each rank computes whole, but for who multiplies where it is a router of GPT-OSS."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See vLLM's."""
        super().__init__(*args, **options)
        method: Any = self.quant_method
        if self.prefix.endswith(ROUTER) and type(method) is UnquantizedLinearMethod and read_settings().linear:
            method = Linear()
        self.quant_method: Any = method
