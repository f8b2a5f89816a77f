"""Tensors on their way between host and device, without waiting for what the device has queued.

A copy from or to ordinary host memory would wait for every pass that was launched before. So on a GPU copies go through pinned
memory, which PyTorch keeps until the device has done with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int | float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A new tensor ``[len(values)]`` on the device."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device. On the CPU it is the tensor itself."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetched:
    """A copy of a tensor as it is now, on its way to the host.

    Args:
        tensor: what to copy. It may be written to afterwards, by what is queued later on the same stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host, self._done = tensor.to("cpu", copy=True), None

    def wait(self) -> Tensor:
        """The copy, in host memory, once it has arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
