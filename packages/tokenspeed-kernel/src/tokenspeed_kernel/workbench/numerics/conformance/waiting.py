"""Detects kernels that synchronise with the device.

On a GPU, PyTorch reports synchronisation. On a CPU nothing synchronises, so this module detects calls that would synchronise on a
GPU: calls that read a tensor's values on the host, like ``lengths.tolist()``, and operations whose output size depends on values.
The module does not see synchronisation inside compiled code; the check `graphs`, on a GPU, finds it, because the capture of a graph
then fails.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Methods of a tensor and operations that read its values on the host, or copy it to the host.
_READING = frozenset({"tolist", "numpy", "__array__", "cpu"})
_WAITING_OPS = frozenset(
    {
        "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere",
        "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    }
)  # fmt: skip
# Modules that emulate a device on the host. They read values where a kernel would read them on the device, so these reads are not
# reported.
_EMULATORS = ("triton.",)


@dataclass(frozen=True)
class Wait:
    """One call that would synchronise with the device (``what``), and its location in the source (``where``)."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class Waits:
    """The synchronising calls that were seen in a `watching` block, one per line of code."""

    def __init__(self) -> None:
        self.found: list[Wait] = []

    def note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        place = None
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(_EMULATORS):
                return
            if place is None and module != __name__ and not (module == "torch" or module.startswith("torch.")):
                place = frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        if place is not None:
            line = linecache.getline(*place).strip()
            wait = Wait(what, f"{os.path.basename(place[0])}:{place[1]}" + (f": {line}" if line else ""))
            if all(known.where != wait.where for known in self.found):
                self.found.append(wait)


@contextlib.contextmanager
def watching() -> Iterator[Waits]:
    """Records the calls in the ``with`` block that read tensors' values on the host. Use this function if all tensors are in host
    memory."""
    waits = Waits()
    with _Calls(waits), _Operations(waits):
        yield waits


class _Calls(TorchFunctionMode):
    """Intercepts Python calls on tensors before they are dispatched."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READING:
            self.waits.note(f"Tensor.{name}")
        elif name == "to" and _to_host(args[1:], kwargs):
            self.waits.note("Tensor.to('cpu')")
        return func(*args, **kwargs)


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    targets = [*args, kwargs.get("device")]
    return any(isinstance(t, (str, torch.device)) and str(t).partition(":")[0] == "cpu" for t in targets)


class _Operations(TorchDispatchMode):
    """Intercepts operations as they are dispatched to a backend."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _WAITING_OPS:
            self.waits.note(name.replace("aten::_local_scalar_dense", "Tensor.item").replace("aten::", "torch."))
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self.waits.note("torch.repeat_interleave without output_size")
        elif name.startswith("aten::index") and _picks_by_mask(name, args):
            self.waits.note("indexing by a mask")
        return func(*args, **kwargs)


def _picks_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether an indexing operation must count the true elements of a mask, which synchronises on a GPU.

    An operation that writes a single value to the elements of one mask need not count them.
    """
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    masks = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return masks and not ("put" in name and len(indices) == 1 and args[2].numel() == 1)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Makes PyTorch raise RuntimeError for every call in the block that synchronises with the GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
