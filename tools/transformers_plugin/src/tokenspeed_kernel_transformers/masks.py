"""The mask function for transformers' ``AttentionMaskInterface``. It describes a batch for `attention.attention_forward`, or makes
a mask for transformers' own attention."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from tokenspeed_kernel_transformers.batch import Batch, kv_heads_of, row_pages
from tokenspeed_kernel_transformers.kernels import NotServedError

logger = logging.getLogger(__name__)

# Sizes of pages in decode steps. The fastest kernels read pages of several tokens by TMA.
PAGE_SIZES = (64, 16)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor:
    """Returns the mask of a forward pass for one kind of layer.

    Args:
        batch_size, q_length: number of rows, and number of query tokens of each row.
        kv_length: number of tokens of the key states, including free slots of a static cache.
        q_offset: position of the first query; a tensor for static caches.
        kv_offset: position of the first key.
        mask_function: the pattern of visible tokens, as a function of positions.
        attention_mask: bool ``[batch, positions]``, False for padding. None if there is no padding.
        local_size: the sliding window in tokens, including the token itself; None for layers without a window.
        device: where the mask is made.
        config: the model's configuration.
        others: further arguments of transformers' ``sdpa_mask``.

    Returns:
        A packed `Batch`. If our kernels do not support the batch: a bool mask ``[batch, 1, q_length, kv_length]``, with which the
        layers run transformers' own attention. The reason is logged once.
    """
    try:
        window_left = _window_of(mask_function, local_size, kv_length)
        if q_length > 1 and _is_first(q_offset):
            batch = _ragged(batch_size, q_length, attention_mask, device, window_left)
        else:
            new = q_offset + q_length - kv_offset
            layout = (kv_length, kv_offset, row_pages(kv_heads_of(config), kv_length))
            batch = _paged(batch_size, q_length, layout, new, attention_mask, device, window_left)
        return batch.pack()
    except NotServedError as error:
        _say(str(error))
    mask: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        device=device,
        config=config,
        # A mask is always made, because transformers' eager attention is causal only with a mask.
        **{**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return mask


def _window_of(mask_function: Callable[..., Any], local_size: int | None, kv_length: int) -> int:
    """Returns ``window_left`` of a causal mask pattern. Raises NotServedError for every other pattern, and if gradients are
    enabled."""
    if torch.is_grad_enabled():
        raise NotServedError("gradients are enabled, and kernels are for inference: call the model under torch.inference_mode()")
    if local_size is None:
        if mask_function is masking_utils.causal_mask_function:
            return -1
        raise NotServedError("the mask is not plainly causal")
    if torch.compiler.is_compiling():
        raise NotServedError("a pattern with a window cannot be recognised while torch.compile traces the mask")
    if not _same(mask_function, masking_utils.sliding_window_causal_mask_function(local_size)):
        raise NotServedError("the mask is not a plain sliding window")
    return local_size - 1


def _same(one: Any, other: Any) -> bool:
    """Returns whether two functions have the same code and the same closure values."""
    if inspect.isfunction(one) and inspect.isfunction(other) and one is not other:
        enclosed = (inspect.getclosurevars(one).nonlocals, inspect.getclosurevars(other).nonlocals)
        return one.__code__ is other.__code__ and _same(*(tuple(values.items()) for values in enclosed))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, (int, str)) and one == other)


def _is_first(q_offset: int | Tensor) -> bool:
    """Returns whether the cache was empty before this forward pass. With a static cache, this function waits for the device once
    per prefill, as transformers does.
    """
    if isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
        raise NotServedError("the length of a static cache cannot be read while torch.compile traces a prefill")
    return int(q_offset) == 0


def _ragged(batch: int, tokens: int, padding: Tensor | None, device: Any, window_left: int) -> Batch:
    """Returns the batch of a prefill. Padding on the left of a row becomes a separate sequence, to which no token of the row
    attends.

    Padding on the right needs no handling, because it comes after every token of the row.
    """
    ends = torch.arange(tokens, (batch + 1) * tokens, tokens, device=device)
    if padding is None:
        sequences = ends
    else:
        known = padding[:, :tokens]
        left = (known.cumsum(1) == 0).sum(1)
        if not _contiguous(known, left, left + known.sum(1)):
            raise NotServedError("there is padding between a row's tokens")
        sequences = torch.stack((ends - tokens + left, ends), 1).flatten()
    return Batch(0, window_left, torch.nn.functional.pad(sequences, (1, 0)).int())


def _paged(
    batch: int,
    q_length: int,
    layout: tuple[int, int, int],
    new: int | Tensor,
    padding: Tensor | None,
    device: Any,
    window_left: int,
) -> Batch:
    """Returns the batch of new tokens after cached tokens.

    ``layout``: number of tokens of the key states, the position of the first of these tokens, and the number of pages from one row
    to the next. ``new``: number of tokens of the key states without free slots."""
    tokens, begin, row = layout
    token = torch.arange(tokens, device=device)
    if q_length == 1 and window_left >= tokens - 1:
        window_left = -1  # all keys are in the window
    single, page_size = q_length == 1 and window_left < 0, 1
    if padding is None:
        lengths, pages = (token < new).sum().expand(batch), token.expand(batch, -1)
        if single and tokens >= min(PAGE_SIZES):
            page_size = next(size for size in PAGE_SIZES if size <= tokens)
            pages = _large_pages(tokens, page_size, torch.zeros_like(lengths), lengths)
    else:
        known = torch.nn.functional.pad(padding, (0, max(begin + tokens - padding.shape[1], 0)))
        known = known[:, begin : begin + tokens] & (token < new)
        lengths = known.sum(1)
        room = _room(known, new - lengths, new) if single and not torch.compiler.is_compiling() else 0
        if room >= min(PAGE_SIZES):
            page_size = next(size for size in PAGE_SIZES if size <= room)
            pages = _large_pages(tokens, page_size, new - lengths, lengths)
            return _batch_of(page_size, window_left, lengths, pages, row)
        # With a window or with several queries, the tokens to attend to depend on positions, so padding between tokens is not
        # supported. For a single query without a window, the page table may skip padding anywhere.
        if (window_left >= 0 or q_length > 1) and not _contiguous(known, new - lengths, new):
            raise NotServedError("there is padding between a row's tokens")
        pages = known.int().argsort(dim=1, descending=True, stable=True)
    return _batch_of(page_size, window_left, lengths, pages, row)


def _batch_of(page_size: int, window_left: int, lengths: Tensor, pages: Tensor, row: int) -> Batch:
    """Returns the batch of rows whose ``pages`` are counted from the beginning of each row."""
    pages = pages + torch.arange(0, len(pages) * row, row, device=pages.device).unsqueeze(1)
    return Batch(page_size, window_left, torch.cat((lengths, pages.flatten())).int())


def _large_pages(tokens: int, size: int, first: Tensor, lengths: Tensor) -> Tensor:
    """Returns the page table of rows whose visible tokens are contiguous, for one query without a window. The order of the keys
    then does not matter.

    A page that began in the last tokens of a row would end outside of the cache. So the whole pages come first, and end with the
    row's last token. The tokens before them are the beginning of the table's last page.

    Args:
        tokens: the largest number of tokens of a row.
        size: the size of a page. ``first + size`` is at most ``tokens``.
        first, lengths: ``[batch]``, each row's first visible token, and the number of visible tokens.
    """
    begin = torch.arange(0, tokens, size, device=lengths.device) + (lengths % size).unsqueeze(1)
    whole = begin + size <= lengths.unsqueeze(1)
    return begin * whole + first.unsqueeze(1)


def _room(known: Tensor, begin: Tensor, end: int | Tensor) -> int:
    """Returns the smallest number of slots of a row from the first valid token on. Returns 0 if some row's valid tokens are not
    exactly those from ``begin`` to ``end``. This function waits for the device, as transformers' own masks do.
    """
    return int((known.shape[1] - begin).min() * _are_contiguous(known, begin, end))


def _contiguous(known: Tensor, begin: Tensor, end: int | Tensor) -> bool:
    """Returns whether the valid tokens of each row are exactly those from ``begin`` to ``end``. This function waits for the device,
    as transformers' own masks do.
    """
    if torch.compiler.is_compiling():
        raise NotServedError("padding cannot be read while torch.compile traces the mask")
    return bool(_are_contiguous(known, begin, end))


def _are_contiguous(known: Tensor, begin: Tensor, end: int | Tensor) -> Tensor:
    """Returns the result of `_contiguous` on the device."""
    token = torch.arange(known.shape[1], device=known.device)
    end = end.unsqueeze(-1) if isinstance(end, Tensor) else end
    return (known == ((token >= begin.unsqueeze(1)) & (token < end))).all()


@functools.cache
def _say(reason: str) -> None:
    logger.info("tokenspeed_kernel_transformers: transformers' own attention, because %s", reason)
