"""Memory that FlashInfer's kernels work in, and the forms of tensors that they take."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.workspace import Keeper

# What FlashInfer's own tests give. XQA takes the first 8 MiB for semaphores, the rest holds partial results.
_WORKSPACE_BYTES = 256 << 20
# One a multiprocessor, of any device.
_LEAST_COUNTERS = 1 << 10

# Theirs alone: that they leave counters and semaphores zero is what their documentation says. A decode wants a counter for each
# sequence and head, so an arena of 4 MiB is enough for the layers of a large model.
_keeper = Keeper(arena=1 << 20)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph. On which stream that will run is not known."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _where(device: torch.device) -> tuple[int, int]:
    """A device's number and its current stream, as the keeper wants them."""
    if device.type != "cuda":
        return -1, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def workspace(device: torch.device) -> Tensor:
    """uint8 ``[256 MiB]`` for calls on the current stream.

    Zero before its first use, as XQA wants its semaphores to be; the kernels leave those so. For captured graphs, which share one,
    see `Keeper.standing`.

    Raises:
        RuntimeError: a graph is captured, and there was no call on this device before.
    """
    return _keeper.standing(*_where(device), _WORKSPACE_BYTES)


def counters(device: torch.device, wanted: int) -> Tensor:
    """int32, at least ``wanted`` of them and one a multiprocessor, for calls on the current stream: what the parts of a sequence
    count themselves in with. All zero; each launch leaves them so. Each captured launch has its own."""
    return _keeper.get(*_where(device), 0, max(wanted, _LEAST_COUNTERS)).counters


def alike(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Both caches. Kernels read the strides of the keys only, and none along the last axis.

    Raises:
        ValueError: their strides differ, or the last axis is not contiguous. A copy would be one of the whole cache at every call.
    """
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            "FlashInfer's kernels need k_cache and v_cache of the same strides, and a contiguous last axis, "
            f"got strides {tuple(k_cache.stride())} and {tuple(v_cache.stride())}"
        )
    return k_cache, v_cache


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``out`` if it is contiguous, as kernels take it to be, else new memory in like's dtype."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


def lse_for(q: Tensor, wanted: bool) -> Tensor | None:
    """float32 ``[tokens, heads]`` for a log-sum-exp, if one is wanted."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else None


def sinks_of(sinks: Tensor | None) -> Tensor | None:
    """As kernels want them: float32, contiguous. They are in units of scores after softmax_scale, as the operators' are."""
    return None if sinks is None else sinks.float().contiguous()


def pages(page_table: Tensor, window_left: int) -> Tensor:
    """The page table, contiguous. Pages that have left a window may have been freed, and their entries be -1: whether
    FlashInfer looks at such a page is not known. Page 0 stands for those, and the window hides what is on it."""
    return page_table.contiguous() if window_left < 0 else page_table.clamp(min=0)
