"""The attention function for transformers' ``AttentionInterface``. Our kernels run the batches for which the mask function
`masks.attention_mask` made a `Batch`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenspeed_kernel_transformers.batch import Batch, kv_heads_of, row_pages, unpack
from tokenspeed_kernel_transformers.kernels import OPS


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the attention of a layer.

    Args:
        module: the layer.
        query: ``[batch, heads, q_length, head_dim]``.
        key, value: ``[batch, kv_heads, kv_length, dim]``, including the new tokens; for a static cache, all of its slots.
        attention_mask: the result of `masks.attention_mask`; with any other mask, transformers' own attention runs.
        dropout: the dropout probability, which is 0 unless the model is trained.
        scaling: the factor of the dot products q·k; None means ``1 / sqrt(head_dim)``.
        softcap: if positive, the cap of the scores.
        s_aux: ``[heads]``, sinks.
        others: further arguments of transformers' own attention. An argument for the window is ignored, because the `Batch`
            contains the window.

    Returns:
        The output ``[batch, q_length, heads, v_head_dim]``, and the probabilities if transformers' eager attention ran.
    """
    batch = unpack(attention_mask)
    if batch is None:
        own = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return _own(module, query, key, value, attention_mask, {**own, **others})
    if others.get("position_bias") is not None:
        raise ValueError("tokenspeed_kernel_transformers has no kernel for position_bias; choose another attn_implementation")
    options = {
        "window_left": batch.window_left,
        "logit_cap": softcap or 0.0,
        "sinks": s_aux,
        "softmax_scale": scaling,
    }
    rows, heads, tokens, _ = query.shape
    if not batch.page_size:
        out = _ragged(query, key, value, batch, options)
    else:
        out = _paged(query, key, value, batch, options, row_pages(kv_heads_of(module.config), key.shape[2]))
    return out.view(rows, tokens, heads, value.shape[3]), None


def _ragged(query: Tensor, key: Tensor, value: Tensor, batch: Batch, options: dict[str, Any]) -> Tensor:
    """Computes the attention of a prefill. If the batch has several rows, keys and values are copied, because rows are not adjacent
    in a cache."""
    tokens = query.shape[2]
    q, k, v = (_rows(states[:, :, :tokens]) for states in (query, key, value))
    out: Tensor = OPS.mha_prefill(q, k, v, batch.table, max_seqlen=tokens, **options)
    return out


def _paged(query: Tensor, key: Tensor, value: Tensor, batch: Batch, options: dict[str, Any], row: int) -> Tensor:
    """Computes attention of new tokens after cached tokens. The cache is viewed as pages; a contiguous cache is not copied.

    ``row`` is the number of pages from one row of the batch to the next. The mask function assumed this number.
    """
    rows, _, tokens, _ = query.shape
    _, heads, length, _ = key.shape
    lengths, pages = batch.pages_of(rows, row_pages(heads, length) - row if rows > 1 else 0)
    k_cache, v_cache = (_pages(states, batch.page_size) for states in (key, value))
    cache = {"k_cache": k_cache, "v_cache": v_cache, "page_table": pages, "cache_seqlens": lengths}
    out: Tensor
    if tokens == 1:
        out = OPS.mha_decode_with_kvcache(query.squeeze(2), **cache, max_seqlen_k=length, **options)
    else:
        q = _rows(query)
        cu_seqlens = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
        out = OPS.mha_with_kvcache(q, cu_seqlens, **cache, max_seqlen_q=tokens, max_seqlen_k=length, **options)
    return out


def _rows(states: Tensor) -> Tensor:
    """Returns queries, keys or values ``[batch, heads, tokens, dim]`` as ``[batch * tokens, heads, dim]``."""
    return states.transpose(1, 2).flatten(0, 1)


def _pages(states: Tensor, size: int) -> Tensor:
    """Views a cache ``[batch, heads, tokens, dim]`` as pages of ``size`` tokens, ``[pages, size, heads, dim]``. Page p begins p
    tokens after the cache's first token, so pages of several tokens overlap.

    A page table refers only to pages that begin in head 0 of some row.
    """
    rows, heads, tokens, dim = states.shape
    row = row_pages(heads, tokens)
    _, of_head, of_token, of_element = states.stride()
    if of_element != 1 or (rows > 1 and states.stride(0) != row * of_token):
        # In a contiguous tensor, an axis of one element may have any stride. So the strides are computed from the sizes.
        states, of_head, of_token = states.contiguous(), tokens * dim, dim
    pages = (rows - 1) * row + tokens - size + 1
    return states.as_strided((pages, size, heads, dim), (of_token, of_token, of_head, 1))


def _own(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Computes transformers' own attention: sdpa, or eager attention if sdpa lacks a feature that the layer uses."""
    if not options["softcap"] and options["s_aux"] is None:
        forward: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    else:
        # By transformers' convention, the model's eager attention is a function in the module of the layer's class.
        forward = sys.modules[type(module).__module__].eager_attention_forward
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    out, probabilities = forward(module, query, key, value, mask, **options)
    return out, probabilities
