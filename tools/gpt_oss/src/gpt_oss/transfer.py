"""Tensors on their way between host and device, without waiting for what the device has queued.

A copy from or to ordinary host memory would wait for every pass that was launched before. So on a GPU copies go through pinned
memory, which PyTorch keeps until the device has done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class Upload:
    """Bytes that are made on the host piece by piece, as those of a file are, and sent to a GPU meanwhile.

    Pieces are made in two pinned buffers in turn, so that one is sent while the next is made. A stream of its own sends them.

    Args:
        device: the GPU. Its current stream, that of the thread which makes this object, is the one that will use what is sent.
        piece_bytes: the size of a buffer.
    """

    def __init__(self, device: torch.device | str, piece_bytes: int = 16 << 20) -> None:
        self._device = torch.device(device)
        self._user = torch.cuda.current_stream(self._device)
        self._stream = torch.cuda.Stream(self._device)
        self._buffers = [(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]

    def send(self, count: int, fill: Callable[[Tensor], None]) -> Tensor:
        """A new tensor on the device, uint8 ``[count]``. It can be used at once by the stream that uses what is sent.

        Args:
            count: how many bytes.
            fill: is called with pieces of host memory, uint8 ``[at most piece_bytes]``, in their order, and writes all of each.
        """
        # Memory that the user's stream may still read must not be written to by this one, so each stream has memory of its own.
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
