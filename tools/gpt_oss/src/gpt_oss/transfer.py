"""Asynchronous copies between host and device, which do not wait for the device's queued work.

A copy from or to pageable host memory would wait for all earlier passes. So on a GPU, copies use pinned memory, which PyTorch keeps
until the device is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int | float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Copies values from the host to a new tensor ``[len(values)]`` on the device."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies a host tensor to the device. On the CPU, returns the tensor itself."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetched:
    """An asynchronous copy to the host of a tensor's current contents.

    Args:
        tensor: the tensor to copy. Work that is queued later on the same stream may overwrite it.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done: torch.cuda.Event | None = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host, self._done = tensor.to("cpu", copy=True), None

    def wait(self) -> Tensor:
        """Waits for the copy, and returns the copied tensor in host memory."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


class Upload:
    """Copies bytes that the host produces in chunks, such as a file's, to a GPU, overlapped with their production.

    Chunks alternate between two pinned buffers, so that one is copied while the next is filled. A separate stream does the copies.

    Args:
        device: the GPU. Its current stream, in the thread that creates this object, is the stream that will use the copied data.
        piece_bytes: the size of a pinned buffer, in bytes.
    """

    def __init__(self, device: torch.device | str, piece_bytes: int = 16 << 20) -> None:
        self._device = torch.device(device)
        self._user = torch.cuda.current_stream(self._device)
        self._stream = torch.cuda.Stream(self._device)
        self._buffers = [(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]

    def send(self, count: int, fill: Callable[[Tensor], None]) -> Tensor:
        """Returns a new device tensor, uint8 ``[count]``, after the copies to it have completed.

        Args:
            count: number of bytes.
            fill: called with chunks of host memory, uint8 ``[at most piece_bytes]``, in order; must fill each chunk.
        """
        # The copying stream must not write to memory that the using stream may still read. So the copying stream has its own
        # memory.
        with torch.cuda.stream(self._stream):
            sent = torch.empty(count, dtype=torch.uint8, device=self._device)
            for number, target in enumerate(sent.split(self._buffers[0][0].numel())):
                buffer, copied = self._buffers[number % 2]
                copied.synchronize()
                piece = buffer[: target.numel()]
                fill(piece)
                target.copy_(piece, non_blocking=True)
                copied.record(self._stream)
        self._stream.synchronize()
        sent.record_stream(self._user)
        return sent
