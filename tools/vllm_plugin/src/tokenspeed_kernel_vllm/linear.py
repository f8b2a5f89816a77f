"""Unquantised linear layers that use the core's `mm`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from tokenspeed_kernel_vllm.settings import CORE, read_settings

# The end of the names of GPT-OSS's routers. vLLM builds routers without the model's quantisation, unlike all other linear layers.
ROUTER = ".mlp.router"


class Linear(UnquantizedLinearMethod):
    """vLLM's method of unquantised linear layers, with the core's `mm` as the GEMM. `mm` selects a kernel for each number of
    tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Any = import_module(CORE)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the weight as loaded. vLLM's own method would pack it on a CPU."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes ``x @ layer.weight.T + bias``.

        Args:
            layer: the layer, with ``weight`` ``[out_features, in_features]``.
            x: ``[..., in_features]`` of the weight's dtype.
            bias: ``[out_features]``.

        Returns:
            ``[..., out_features]`` of x's dtype.
        """
        weight: Any = layer.weight
        product: Tensor = self.ops.mm(x.flatten(0, -2), weight.t(), bias=bias)
        # `len(weight)` cannot be used here: PyTorch 2.11 cannot trace it for vLLM's parameter class.
        return product.view(*x.shape[:-1], weight.shape[0])


class RouterLinear(ReplicatedLinear):
    """vLLM's replicated linear layer, with the core's `mm` if the layer is a router of GPT-OSS."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """The arguments are those of vLLM's `ReplicatedLinear`."""
        super().__init__(*args, **options)
        method: Any = self.quant_method
        if self.prefix.endswith(ROUTER) and type(method) is UnquantizedLinearMethod and read_settings().linear:
            method = Linear()
        self.quant_method: Any = method
