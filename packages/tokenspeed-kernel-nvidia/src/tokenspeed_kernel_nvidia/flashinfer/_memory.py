"""Workspace memory for FlashInfer's kernels, and conversion of tensors to the forms that these kernels need."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.workspace import Keeper

# The workspace size that FlashInfer's own tests use. XQA uses the first 8 MiB for semaphores, and the rest for partial results.
_WORKSPACE_BYTES = 256 << 20
# Enough counters for one per SM on any device.
_LEAST_COUNTERS = 1 << 10

# FlashInfer's kernels have a `Keeper` of their own, apart from other kernels. FlashInfer documents that its kernels leave counters
# and semaphores zero. A decode needs a counter for each sequence and head, so an arena of 4 MiB is enough for the layers of a large
# model.
_keeper = Keeper(arena=1 << 20)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _where(device: torch.device) -> tuple[int, int]:
    """Returns the device's index and its current raw stream, as `Keeper` needs them; -1 and 0 for CPU tensors."""
    if device.type != "cuda":
        return -1, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def workspace(device: torch.device) -> Tensor:
    """Returns the workspace, uint8 ``[256 MiB]``, for calls on the current stream.

    The workspace is zeroed before its first use, as XQA's semaphores require, and the kernels leave the semaphores zero. Captured
    graphs share one workspace, see `Keeper.standing`.

    Raises:
        RuntimeError: a graph is being captured, and there was no call on this device before.
    """
    return _keeper.standing(*_where(device), _WORKSPACE_BYTES)


def counters(device: torch.device, wanted: int) -> Tensor:
    """Returns int32 counters for calls on the current stream: at least ``wanted``, and at least one per SM.

    For each sequence and head, a counter counts the split-KV CTAs that have finished. All counters are zero, and each launch leaves
    them zero. Each captured launch has its own counters.
    """
    return _keeper.get(*_where(device), 0, max(wanted, _LEAST_COUNTERS)).counters


def alike(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both caches after a check of their strides. The kernels use k_cache's strides for both, and assume a contiguous last
    axis.

    Raises:
        ValueError: the caches' strides differ, or the last axis is not contiguous. This function makes no copy, because a copy
            would move the whole cache in every call.
    """
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            "FlashInfer's kernels need k_cache and v_cache of the same strides, and a contiguous last axis, "
            f"got strides {tuple(k_cache.stride())} and {tuple(v_cache.stride())}"
        )
    return k_cache, v_cache


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor for the kernel to write: ``out`` if it is contiguous, as the kernels assume, otherwise a new tensor in
    like's dtype."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


def lse_for(q: Tensor, wanted: bool) -> Tensor | None:
    """Allocates float32 ``[tokens, heads]`` for the LSE; None if the LSE is not requested."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else None


def sinks_of(sinks: Tensor | None) -> Tensor | None:
    """Returns the sinks as the kernels need them: float32, contiguous. In FlashInfer and in the operators, a sink is a score to
    which softmax_scale is already applied.
    """
    return None if sinks is None else sinks.float().contiguous()


def pages(page_table: Tensor, window_left: int) -> Tensor:
    """Returns the page table, contiguous, without entries of -1 for pages that left the window and were freed.

    FlashInfer's documentation does not say whether its kernels read such pages. So page 0 replaces them, and the window masks the
    contents of page 0.
    """
    return page_table.contiguous() if window_left < 0 else page_table.clamp(min=0)
