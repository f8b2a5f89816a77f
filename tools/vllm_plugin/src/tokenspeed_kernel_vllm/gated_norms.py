"""The gated norm of Qwen3-Next, Kimi Linear and other hybrid models, by the core's `rmsnorm_gated`, in vLLM's operator
``rms_norm_gated``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNormGated

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_vllm.settings import CORE, WHY_OFF

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module(CORE)
logger = init_logger("vllm.plugins.tokenspeed_kernel")

SWITCH = "TOKENSPEED_VLLM_GATED_NORMS"
# vLLM's names of activations, and ours.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


class GatedNorm(RMSNormGated):
    """vLLM's operator. Norms of groups and norms without a gate run vLLM's own method."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype, activation)
        self.own: Callable[..., Any] = vars(self)["_forward_method"]  # vLLM's choice
        # vLLM builds a model with the model's dtype as PyTorch's default dtype.
        x = torch.empty(1, hidden_size, dtype=torch.get_default_dtype(), device=self.weight.device)
        try:
            if group_size not in (None, hidden_size):
                raise NotServedError(f"norms of groups of {group_size}")
            chosen = kernel_for(OPS.rmsnorm_gated, {"x": x, "gate": x, "weight": self.weight.data, **self._options()})
        except NotServedError as error:
            logger.warning_once("tokenspeed_kernel_vllm: gated norms of %s run on vLLM's own: %s", hidden_size, str(error))
        else:
            text = "tokenspeed_kernel_vllm: gated norms of %s by %s (%s; off by default: %s)"
            logger.info_once(text, hidden_size, chosen.name, SWITCH, WHY_OFF[SWITCH])
            self._forward_method = self.run

    def run(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalises each row and multiplies it by the weight and by the gate's activation, in the order of the layer.

        Args:
            x: ``[..., hidden]``.
            z: the gate, like x; None for a norm without a gate.

        Returns:
            Like x.
        """
        if z is None or z.dtype != x.dtype:
            own: Tensor = self.own(x, z)
            return own
        out: Tensor = OPS.rmsnorm_gated(x, z, self.weight, **self._options())
        return out

    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "activation": _ACTIVATIONS[self.activation], "norm_before_gate": self.norm_before_gate}
