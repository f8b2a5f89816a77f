"""Prefill of latent attention with expanded keys and values: of whole prompts, or of new tokens against chunks of their context.

``--attention-config '{"mla_prefill_backend": "CUSTOM"}'`` selects this backend. vLLM expands the latents, and merges the chunks'
results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from tokenspeed_kernel_base.served_latent import PrefillShape
from tokenspeed_kernel_vllm.mla.serving import SWITCH, find_prefill
from tokenspeed_kernel_vllm.settings import WHY_OFF, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")


class LatentPrefill(MLAPrefillBackend):
    """vLLM's backend of MLA prefill that calls `mla_prefill`."""

    def __init__(self, num_heads: int, *args: Any, **options: Any) -> None:
        """Finds the prefill kernel of a model.

        Raises:
            ValueError: no kernel is eligible. The message has each kernel's reason.
        """
        super().__init__(num_heads, *args, **options)
        shape = PrefillShape(
            heads=num_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
        )
        self._prefill, kernel = find_prefill(shape, read_settings().package)
        logger.info_once("tokenspeed_kernel_vllm: MLA prefill by %s (%s; off by default: %s)", kernel, SWITCH, WHY_OFF[SWITCH])

    @staticmethod
    def get_name() -> str:
        """Returns the name under which this backend is registered with vLLM."""
        return "CUSTOM"

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes causal attention of the new tokens to themselves.

        Args:
            q, k: ``[tokens, heads, head_dim]``.
            v: ``[tokens, heads, v_head_dim]``.
            return_softmax_lse: whether the log-sum-exp is also returned.
            out: receives the output.
            output_scale: must be None.

        Returns:
            ``[tokens, heads, v_head_dim]``, and with return_softmax_lse the natural log-sum-exp ``[heads, tokens]``.

        Raises:
            NotImplementedError: vLLM requests a quantised output.
        """
        if output_scale is not None:
            raise NotImplementedError("tokenspeed_kernel_vllm does not quantise the output of attention")
        batch = self._prefill_metadata
        result = self._prefill(
            q, k, v, batch.query_start_loc, max_seqlen=batch.max_query_len, softmax_scale=self.scale, return_lse=return_softmax_lse,
            out=out,
        )  # fmt: skip
        return _heads_first(result) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self, *args: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **chunk: Any
    ) -> tuple[Tensor, Tensor]:
        """Computes attention of new tokens to a chunk of their context; every new token sees the whole chunk. See
        `run_prefill_new_tokens`.

        Args:
            args, chunk: describe the chunk; in vLLM 0.26, the chunk's index in the metadata.
            q, k, v, out: see `run_prefill_new_tokens`; k and v belong to the chunk.
        """
        (which,) = (*args, *chunk.values())
        batch = self._prefill_metadata
        if isinstance(which, int):
            context: Any = batch.chunked_context
            offsets, longest, offsets_kv = batch.query_start_loc, batch.max_query_len, context.cu_seq_lens[which]
        else:
            offsets, longest, offsets_kv = which.query_start_loc, which.max_query_len, which.cu_seq_lens
        result = self._prefill(
            q, k, v, offsets, max_seqlen=longest, softmax_scale=self.scale, cu_seqlens_kv=offsets_kv, is_causal=False,
            return_lse=True, out=out,
        )  # fmt: skip
        return _heads_first(result)


def _heads_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the output, and the log-sum-exp transposed to vLLM's ``[heads, tokens]``."""
    out, lse = result
    return out, lse.t().contiguous()
