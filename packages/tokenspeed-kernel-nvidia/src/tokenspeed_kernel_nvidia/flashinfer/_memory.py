"""Memory that FlashInfer's kernels work in, and the forms of tensors that they take."""

from __future__ import annotations

import torch
from torch import Tensor

# What FlashInfer's own tests give. XQA takes the first 8 MiB for semaphores, the rest holds partial results.
_WORKSPACE_BYTES = 256 << 20
# Counters are allocated in steps, so that a batch that grows does not get new ones each time.
_LEAST_COUNTERS = 1 << 14

# By device, and by stream: two kernels must not work in one at the same time. All are kept, because captured graphs refer to them.
# Nothing that is made while a graph is captured is among them: its memory and its zeros are the graph's.
_workspaces: dict[torch.device, dict[int, Tensor]] = {}
_counters: dict[torch.device, dict[int, list[Tensor]]] = {}


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph. On which stream that will run is not known."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def workspace(device: torch.device) -> Tensor:
    """uint8 ``[256 MiB]`` for calls on the current stream.

    Zero before its first use, as XQA wants its semaphores to be; the kernels leave those so.

    Captured graphs work in that of the first call on the device: filling another with zeros would be part of every replay. So no
    two graphs may run at once on a device, nor one beside other calls on the first call's stream.

    Raises:
        RuntimeError: a graph is captured, and there has been no call on this device before.
    """
    made = _workspaces.setdefault(device, {})
    if capturing(device):
        if not made:
            raise RuntimeError(f"call a kernel of FlashInfer on {device} once before a graph is captured: it needs a workspace")
        return next(iter(made.values()))
    stream = _stream(device)
    if stream not in made:
        made[stream] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return made[stream]


def counters(device: torch.device, wanted: int) -> Tensor:
    """int32, at least ``wanted`` of them and one a multiprocessor, for calls on the current stream: what the parts of a sequence
    count themselves in with. All zero; each launch leaves them so.

    A captured graph gets those that belong to its `workspace`, with the same limits, or if they are too few its own, which each
    replay fills with zeros.
    """
    count = max(_LEAST_COUNTERS, 1 << (wanted - 1).bit_length())
    made = _counters.setdefault(device, {})
    if capturing(device):
        kept = made.get(next(iter(_workspaces.get(device, {})), -1), [])
        if kept and kept[-1].numel() >= wanted:
            return kept[-1]
        return torch.zeros(count, dtype=torch.int32, device=device)
    of_stream = made.setdefault(_stream(device), [])
    if not of_stream or of_stream[-1].numel() < wanted:
        of_stream.append(torch.zeros(count, dtype=torch.int32, device=device))
    return of_stream[-1]


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
