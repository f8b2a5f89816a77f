"""Watchers of calls: profilers, captures, and all other code that must be told of each call.

Watching costs nothing while there is no watcher. While there is a watcher, every call is decided again (see
`tokenspeed_kernel_base.memo`), and the deciding code passes the call to the watcher.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.signature import FormatSignature


class Call(NamedTuple):
    """One call, as passed to watchers.

    Attributes:
        family, mode: the operator.
        kernel: name of the selected kernel; empty for a traced call.
        signature: the formats of the call's operands.
        tensors: the call's tensors by name.
        key: equal for calls of the same description.
        arguments: all arguments of the call by name.
        traits: the traits of the call's request.
        read_work: reads the values that determine the amount of work; returns None if no values do. May wait for the device.
    """

    family: str
    mode: str
    kernel: str
    signature: FormatSignature
    tensors: Mapping[str, torch.Tensor]
    key: Hashable
    arguments: Mapping[str, Any]
    traits: Mapping[str, Any]
    read_work: Callable[[], Any]

    @property
    def first(self) -> torch.Tensor:
        """The first tensor of the call."""
        return next(iter(self.tensors.values()))

    @property
    def operand_shapes(self) -> str:
        """The shapes of the signature's operands, in the order of the parameters, each shape once: ``"64x64x64,8x64"``.

        A role's operand is the tensor of the same name. A role with several tensors (weights and their scales) uses the first
        tensor whose name begins with the role's name. For a tensor inside an object, the attribute's name is used.
        """
        roles = [role for role, _ in self.signature.roles]
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            own = name.rpartition(".")[2]
            role = own if own in roles else next((role for role in roles if own.startswith(role + "_")), None)
            if role is not None:
                found.setdefault(role, tensor)
        shapes = ("x".join(map(str, tensor.shape)) for tensor in [*found.values()] or [self.first])
        return ",".join(dict.fromkeys(shapes))


# ``watcher(call, run)`` returns the function to run instead of ``run``, or ``run`` itself.
Watcher = Callable[[Call, Callable[..., Any]], Callable[..., Any]]

# The active watchers, and whether each also receives traced calls.
_watchers: tuple[tuple[Watcher, bool], ...] = ()
_lock = threading.Lock()


def start(watcher: Watcher, traced: bool = False) -> None:
    """Activates a watcher: it receives every call from now on. Watchers wrap a call one around the other; the watcher that was
    started last is the outermost.

    Args:
        watcher: see `watch_calls`.
        traced: whether the watcher also receives calls whose tensors are all on the meta device. Such calls run no kernel.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, (watcher, traced))
        memo.enter_exceptional()


def stop(watcher: Watcher) -> None:
    """Deactivates a watcher that `start` activated; no effect if the watcher is not active."""
    global _watchers
    with _lock:
        kept = tuple(entry for entry in _watchers if entry[0] != watcher)
        if kept != _watchers:
            _watchers = kept
            memo.leave_exceptional()


@contextlib.contextmanager
def watch_calls(watcher: Watcher) -> Iterator[None]:
    """Activates a watcher inside the block. The watcher receives the operator calls of all threads, including calls that composed
    operators make.

    Args:
        watcher: ``watcher(call, run)`` receives a `Call` and the function that runs it. The watcher returns the function to run
            instead, or ``run`` itself.

    Calls inside the block take longer, because a kernel is selected for each call again. The watcher does not receive calls that a
    CUDA graph replays.
    """
    start(watcher)
    try:
        yield
    finally:
        stop(watcher)


def watching(traced: bool = False) -> bool:
    """Returns whether any watcher is active; with ``traced``, whether any receives traced calls."""
    return bool(_watchers) and (not traced or any(takes for _, takes in _watchers))


def watched(call: Call, run: Callable[..., Any], traced: bool = False) -> Callable[..., Any]:
    """Returns ``run``, wrapped by every active watcher, for one call. ``traced``: whether the call is traced."""
    for watcher, takes_traced in _watchers:
        if takes_traced or not traced:
            run = watcher(call, run)
    return run
