"""The gated delta rule of prompts (Qwen3-Next), by the core's `gated_delta_rule_prefill`, in vLLM's operator
``chunk_gated_delta_rule``.

Hook: the out-of-tree class `DeltaRule` replaces `ChunkGatedDeltaRule`. vLLM's layer calls plain functions for decode steps and for
the causal convolution, which no hook can replace. So these run on vLLM's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_vllm.settings import CORE, WHY_OFF

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module(CORE)
logger = init_logger("vllm.plugins.tokenspeed_kernel")

SWITCH = "TOKENSPEED_VLLM_DELTA_RULE"
_STATES = (torch.float32, torch.bfloat16)


class DeltaRule(ChunkGatedDeltaRule):
    """vLLM's operator. Calls for which no kernel of ours is eligible run vLLM's own method."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Callable[..., Any] = vars(self)["_forward_method"]  # vLLM's choice
        self._forward_method = self.run
        # Heads and dtypes of a call -> whether a kernel of ours is eligible.
        self.served: dict[tuple[Any, ...], bool] = {}

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None,
        **chunks: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the gated delta rule to packed prompts, or to chunks of prompts.

        Args:
            q, k: ``[1, tokens, heads, k_dim]``.
            v: ``[1, tokens, v_heads, v_dim]``.
            g: ``[1, tokens, v_heads]``, logarithms of the decay.
            beta: like g.
            initial_state: ``[batch, v_heads, v_dim, k_dim]``, zeros for prompts that begin. Not changed.
            output_final_state: whether the states are returned.
            cu_seqlens: int32 ``[batch + 1]``.
            use_qk_l2norm_in_kernel: whether queries and keys are normalised first.
            core_attn_out: receives the outputs, in its first elements.
            chunks: metadata of vLLM's kernels.

        Returns:
            ``[1, tokens, v_heads, v_dim]``, and the states after the last tokens, or None.
        """
        packed = cu_seqlens is not None and q.shape[0] == 1 and q.shape[1] > 0 and initial_state.dtype in _STATES
        states = initial_state.clone() if packed else initial_state
        slots = torch.arange(len(states), dtype=torch.int32, device=states.device)
        arguments: dict[str, Any] = {
            **{name: value[0] for name, value in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))},
            "states": states.transpose(-1, -2),
            "cu_seqlens": cu_seqlens,
            "state_slots": slots,
            "has_initial_state": torch.ones_like(slots, dtype=torch.bool),
            "qk_l2norm": use_qk_l2norm_in_kernel,
        }
        if not packed or not self._serves(arguments):
            options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "core_attn_out": core_attn_out, **chunks}
            own: tuple[Tensor, Tensor | None] = self.own(
                q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=cu_seqlens, **options
            )
            return own
        out: Tensor = OPS.gated_delta_rule_prefill(**arguments)
        if core_attn_out is not None:
            core_attn_out.view(-1)[: out.numel()].copy_(out.view(-1))
        return out.unsqueeze(0), states if output_final_state else None

    def _serves(self, arguments: dict[str, Any]) -> bool:
        """Returns whether a kernel of ours is eligible for the call. Logs the decision once for each kind of call."""
        names = ("q", "v", "states")
        key = *(arguments[name].shape[1:] for name in names), *(arguments[name].dtype for name in names), arguments["qk_l2norm"]
        if key not in self.served:
            try:
                chosen = kernel_for(OPS.gated_delta_rule_prefill, arguments)
            except NotServedError as error:
                logger.warning_once("tokenspeed_kernel_vllm: the gated delta rule runs on vLLM's own: %s", str(error))
                self.served[key] = False
            else:
                text = "tokenspeed_kernel_vllm: the gated delta rule of prompts by %s (%s; off by default: %s)"
                logger.info_once(text, chosen.name, SWITCH, WHY_OFF[SWITCH])
                self.served[key] = True
        return self.served[key]
