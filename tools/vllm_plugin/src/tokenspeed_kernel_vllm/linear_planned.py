"""Quantised linear layers of any format that use the core's `linear`, with weights prepared once for the selected kernel.

Hook: vLLM's `LinearMethodBase`. A subclass per format says which parameters vLLM's loader fills, and how they become the core's
`LinearWeights`. vLLM keeps sharding, loading, and the all-reduce after row-parallel layers. A layer falls back to vLLM's method
either before its parameters are added (no kernel is eligible) or after loading (the loaded values are not supported).
"""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase

from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_vllm.loading import release
from tokenspeed_kernel_vllm.settings import CORE, core_is_there, default_of
from tokenspeed_kernel_vllm.sizes import sizes_up_to, warm_once

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# The layer whose weight vLLM itself reads, to expand keys and values of latent attention.
READ_BY_VLLM = "kv_b_proj"


def say_own(what: str, error: object) -> None:
    """Logs, once per reason, why linear layers run on vLLM's own method.

    Args:
        what: the layers' format.
        error: the reason; line breaks are replaced.
    """
    reason = " | ".join(line.strip() for line in str(error).splitlines())
    logger.warning_once("tokenspeed_kernel_vllm: vLLM's own %s linear layers, because %s", what, reason)


class PlannedLinear(LinearMethodBase):
    """A quantised linear layer. Layers without an eligible kernel fall back to vLLM's method.

    Attributes:
        own: vLLM's method.
        what: the format's name, for the log.
        switch: the setting that selects this method, for the log.
        unmeasured: see `default_of`, for the log.
        plan: the core's `LinearPlan`; None if the layer falls back to vLLM's method.
        weights: the core's `LinearWeights`, prepared for the plan; None before the layer is loaded.
    """

    def __init__(self, own: LinearMethodBase, what: str, switch: str, unmeasured: str = "") -> None:
        """
        Args:
            own: vLLM's method.
            what: the format's name, for the log.
            switch: the setting that selects this method, for the log.
            unmeasured: see `default_of`, for the log.
        """
        self.own = own
        self.what = what
        self.switch = switch
        self.unmeasured = unmeasured
        self.plan: Any = None
        self.ops: Any = None
        self.weights: Any = None

    @abstractmethod
    def formats(self) -> dict[str, str]:
        """Returns the plan's ``weight_format`` and ``activation_dtype``.

        Raises:
            NotServedError: the format is not supported on this device.
        """

    @abstractmethod
    def add_parameters(self, layer: Any, sizes: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        """Adds the parameters that vLLM's loader fills.

        Args:
            layer: the layer.
            sizes: the arguments of `create_weights` after ``layer``, up to ``params_dtype``.
            attributes: its other arguments, among them the loader.
        """

    @abstractmethod
    def loaded(self, layer: Any) -> Any:
        """Returns the loaded weights in the core's canonical layout, as `LinearWeights`.

        Raises:
            NotServedError: the loaded values are not supported.
        """

    @abstractmethod
    def stored(self) -> tuple[str, ...]:
        """Returns the names of the parameters that the prepared weights replace."""

    @abstractmethod
    def kind(self) -> str:
        """Returns what the log says about the layers, beside their format."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that vLLM's loader fills. If the layer falls back to vLLM's method, one line of the log gives the
        reason.
        """
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        try:
            self.plan = self._plan(input_size_per_partition, sum(output_partition_sizes), params_dtype)
        except NotServedError as error:
            say_own(self.what, error)
            self.own.create_weights(layer, *sizes, **extra_weight_attrs)
            return
        self.ops = import_module(CORE)
        self.add_parameters(layer, sizes, extra_weight_attrs)

    def _plan(self, in_features: int, out_features: int, dtype: torch.dtype) -> Any:
        """Returns the core's `LinearPlan`. Raises NotServedError if the core is not installed or no kernel is eligible."""
        if not core_is_there():
            raise NotServedError("tokenspeed-kernel, which chooses among kernels, is not installed")
        from tokenspeed_kernel import get_operator

        device = torch.get_default_device()  # vLLM builds a model with the model's device as PyTorch's default device
        return plan_for(get_operator("linear").function, in_features, out_features, dtype=dtype, device=device, **self.formats())

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepares the weights for the plan's kernel. Original weights that the kernel does not need are dropped to save memory.
        Then compiles the kernels, once per kind of layer.
        """
        if self.plan is not None:
            try:
                given = self.loaded(layer)
            except NotServedError as error:
                say_own(self.what, error)
                self.plan = None
        if self.plan is None:
            self.own.process_weights_after_loading(layer)
            return
        device = given.weight.device
        self.weights = self.ops.linear.prepare(given, self.plan)
        release(layer, self.stored(), self.weights)
        text = "tokenspeed_kernel_vllm: %s linear layers (%s, activations %s) by %s (%s; %s)"
        plan, default = self.plan, default_of(self.switch, self.plan.weight_format, self.unmeasured)
        logger.info_once(text, self.what, self.kind(), plan.activation_dtype, plan.kernel, self.switch, default)
        warm_once("linear layers", self.plan, device, lambda tokens: self.warm(tokens, device))

    @torch.inference_mode()
    def warm(self, tokens: int, device: torch.device) -> None:
        """Compiles the kernels: calls the layer with each number of tokens of `sizes_up_to` except the last, which vLLM runs
        itself.
        """
        for size in sizes_up_to(tokens):
            if size < tokens:
                x = torch.zeros(size, self.plan.in_features, dtype=self.plan.dtype, device=device)
                self.ops.linear(x, self.weights, self.plan)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes ``x @ weight.T``, rounds the result to x's dtype, and adds the bias.

        Args:
            layer: the layer.
            x: ``[..., in_features]``.
            bias: ``[out_features]``.

        Returns:
            ``[..., out_features]`` of x's dtype.
        """
        if self.plan is None:
            out: Tensor = self.own.apply(layer, x, bias)
            return out
        out = self.ops.linear(x.flatten(0, -2), self.weights, self.plan).view(*x.shape[:-1], self.plan.out_features)
        return out if bias is None else out + bias
