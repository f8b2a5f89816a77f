"""Memory that FlashInfer's kernels work in, and the forms of tensors that they take."""

from __future__ import annotations

import torch
from torch import Tensor

# What FlashInfer's own tests give. XQA takes the first 8 MiB for semaphores, the rest holds partial results.
_WORKSPACE_BYTES = 256 << 20
# Counters are allocated in steps, so that a batch that grows does not get new ones each time.
_LEAST_COUNTERS = 1 << 14

# By device, and by stream: two kernels must not work in one at the same time. All are kept, because captured graphs refer to them.
_workspaces: dict[torch.device, dict[int, Tensor]] = {}
_counters: dict[torch.device, dict[int, list[Tensor]]] = {}


def _stream(device: torch.device) -> int:
    """The current stream, or -1 while a graph is captured: on which stream that will run is not known."""
    if device.type != "cuda":
        return 0
    return -1 if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def workspace(device: torch.device) -> Tensor:
    """uint8 ``[256 MiB]`` for calls on the current stream.

    Zero before its first use, as XQA wants its semaphores to be; the kernels leave those so.

    A captured graph works in that of the first call on the device: filling another with zeros would be part of every replay. So a
    graph must not run beside other calls on that call's stream.
    """
    made, stream = _workspaces.setdefault(device, {}), _stream(device)
    if stream == -1 and made:
        return next(iter(made.values()))
    if stream not in made:
        made[stream] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return made[stream]


def counters(device: torch.device, wanted: int) -> Tensor:
    """int32, at least ``wanted`` of them and one a multiprocessor, for calls on the current stream: what the parts of a sequence
    count themselves in with. All zero; each launch leaves them so. For a captured graph see `workspace`."""
    made, stream = _counters.setdefault(device, {}), _stream(device)
    of_stream = next(iter(made.values())) if stream == -1 and made else made.setdefault(stream, [])
    if not of_stream or of_stream[-1].numel() < wanted:
        count = max(_LEAST_COUNTERS, 1 << (wanted - 1).bit_length())
        of_stream.append(torch.zeros(count, dtype=torch.int32, device=device))
    return of_stream[-1]


def alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values whose last axis is contiguous and whose strides are the same: kernels read those of the keys only.

    Copies both otherwise, which nobody wants of a cache; caches that are made alike are alike.
    """
    if k.stride() == v.stride() and k.stride(-1) == 1:
        return k, v
    return k.contiguous(), v.contiguous()


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``out`` if it is contiguous, as kernels take it to be, else new memory in like's dtype."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


def lse_for(q: Tensor, wanted: bool) -> Tensor | None:
    """float32 ``[tokens, heads]`` for a log-sum-exp, if one is wanted."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else None


def sinks_of(sinks: Tensor | None) -> Tensor | None:
    """As kernels want them: float32, contiguous. They are in units of scores after softmax_scale, as the operators' are."""
    return None if sinks is None else sinks.float().contiguous()
