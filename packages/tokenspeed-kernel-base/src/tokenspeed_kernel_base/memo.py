"""Memoised decisions, and their invalidation.

A call through the public API is fast because the decision for its key is memoised in a dictionary. This module owns the two rules
that keep the memo valid:

* A change of anything that decisions depend on (kernels, policy, process-wide overrides, the platform) calls `invalidate`. A
  decision that was in progress during the change is not memoised.
* Some states hold for one thread or task only, or must see every call: an override in a ``with`` block, shape capture, profiling.
  Code that sets such a state enters `exceptional`. While the state is in force, no call is memoised. The fast path need not test
  for the state, because the fast path's dictionary is empty. Selections are still memoised, because their key contains the
  override.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any

MAX_ENTRIES = 4096

_lock = threading.Lock()
_memos: list[dict[Any, Any]] = []
_epoch = 0
_exceptions = 0


def new_memo() -> dict[Any, Any]:
    """A dictionary that `invalidate` clears. Write to the dictionary only through `remember`; reading needs no lock."""
    memo: dict[Any, Any] = {}
    with _lock:
        _memos.append(memo)
    return memo


def epoch() -> int:
    """The current epoch, a number that every `invalidate` increases. Read the epoch before deciding, and pass it to `remember`."""
    return _epoch


def remember(memo: dict[Any, Any], key: Hashable, value: object, decided_in: int, *, exceptions_in_key: bool = False) -> None:
    """Memoises a decision. Does nothing if something that the decision depends on has changed since the epoch ``decided_in``, or
    while an exceptional state is in force.

    ``exceptions_in_key``: whether the key contains everything that an exceptional state may change. If so, such a state
    does not prevent memoising.
    """
    with _lock:
        if decided_in != _epoch or (_exceptions and not exceptions_in_key):
            return
        if len(memo) >= MAX_ENTRIES:
            # Shapes that vary at every step would grow the memo without limit. Deciding again costs microseconds.
            memo.clear()
        memo[key] = value


def invalidate() -> None:
    """Clears every memo and starts a new epoch."""
    global _epoch
    with _lock:
        _epoch += 1
        for memo in _memos:
            memo.clear()


@contextlib.contextmanager
def exceptional() -> Iterator[None]:
    """Inside the block, every call is decided again. Blocks may be nested, and several threads may be in a block."""
    enter_exceptional()
    try:
        yield
    finally:
        leave_exceptional()


def enter_exceptional() -> None:
    global _exceptions
    with _lock:
        _exceptions += 1
    invalidate()


def leave_exceptional() -> None:
    global _exceptions
    with _lock:
        _exceptions -= 1
    invalidate()
