"""Reads tensors ahead, so that reading files overlaps with uploading weights and preparing them on the device."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from gpt_oss.loader import TensorSource
from gpt_oss.transfer import Upload


def bytes_of(source: TensorSource) -> dict[str, int]:
    """Returns the size of each tensor of a source in bytes, by name. Reads no tensor."""
    sizes = {name: getattr(torch, dtype).itemsize for name, dtype in source.dtypes().items()}
    return {name: math.prod(shape) * sizes[name] for name, shape in source.shapes().items()}


class ReadAhead:
    """A source whose tensors are read ahead by a thread, in a given order.

    This object is a context manager; the thread ends with the block. Tensors may be requested in any order, each once. A request
    never waits for the request of another tensor: if ``most_bytes`` stops the thread, the caller reads the requested tensor.

    Args:
        source: the underlying source.
        names: names of the tensors that will be requested, in approximately that order. Other tensors are read on request.
        most_bytes: the approximate limit of the bytes that are read ahead and not requested yet.
        upload: copies tensors to a device while they are read, if the source supports this (`Checkpoint.read`). Otherwise, and for
            a tensor that is requested before the thread has started to read it, tensors are in host memory.
    """

    def __init__(self, source: TensorSource, names: Sequence[str], most_bytes: int = 4 << 30, upload: Upload | None = None) -> None:
        self._source, self._most = source, most_bytes
        self._sizes = bytes_of(source)
        read: Callable[..., Tensor] | None = getattr(source, "read", None)
        # A memory-mapped tensor is read from the file only when it is copied.
        self._read: Callable[[str], Tensor] = (
            (lambda name: source.get(name).clone()) if read is None else functools.partial(read, upload=upload)
        )
        self._changed = threading.Condition()
        # The condition guards the fields below. A name is in ``_pending`` until the thread or a caller starts to read it.
        self._pending = dict.fromkeys(names)
        self._reading: str | None = None
        self._ready: dict[str, Tensor | BaseException] = {}
        self._held = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reading weights", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def dtypes(self) -> Mapping[str, str]:
        return self._source.dtypes()

    def get(self, name: str) -> Tensor:
        """Returns one tensor; see `TensorSource`. Raises the source's errors for this tensor."""
        with self._changed:
            # A thread that is at its byte limit does not read this tensor, so the caller reads the tensor itself.
            self._changed.wait_for(lambda: name in self._ready or (name != self._reading and not self._comes(name)))
            if name in self._ready:
                found = self._ready.pop(name)
                if isinstance(found, BaseException):
                    raise found
                self._held -= self._sizes[name]
                self._changed.notify_all()
                return found
            self._pending.pop(name, None)
            self._changed.notify_all()
        return self._source.get(name)

    def _comes(self, name: str) -> bool:
        """Returns whether the thread will read a tensor even if no other tensor is requested."""
        return name in self._pending and self._held < self._most and self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._pending or self._held < self._most)
                if self._closed or not self._pending:
                    return
                name = next(iter(self._pending))
                del self._pending[name]
                self._reading = name
            found: Tensor | BaseException
            try:
                found = self._read(name)
            except BaseException as error:  # raised in the thread that requests the tensor
                found = error
            with self._changed:
                self._reading = None
                self._ready[name] = found
                if isinstance(found, Tensor):
                    self._held += self._sizes[name]
                self._changed.notify_all()
