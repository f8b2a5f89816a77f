"""Remembered decisions, and when they must be forgotten.

A call through the public API is fast because what was decided for a call like it is remembered in a dictionary. This module
owns the two rules that keep that safe, so that no one else needs to think of them:

* Whatever decisions rest on (kernels, policy, overrides for all, the platform) calls `invalidate` when it changes. A decision
  that was being made meanwhile is not remembered.
* While anything is in force that holds only for one thread or task, or that must see every call (an override in a context,
  shape capture, profiling), no call is remembered: it enters `exceptional`. The common path then needs no test for any of them;
  it simply finds its dictionary empty. Only selections, whose key names the override, are remembered all the same.
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
    """A dictionary that `invalidate` clears. Write to it through `remember` only; reading it needs no lock."""
    memo: dict[Any, Any] = {}
    with _lock:
        _memos.append(memo)
    return memo


def epoch() -> int:
    """Take this before deciding, and hand it to `remember`."""
    return _epoch


def remember(memo: dict[Any, Any], key: Hashable, value: object, decided_in: int, *, exceptions_in_key: bool = False) -> None:
    """Stores a decision, unless what it rests on has changed since ``decided_in`` or something exceptional is in force.

    ``exceptions_in_key``: the key holds whatever may be exceptional, so that this is no reason against it.
    """
    with _lock:
        if decided_in != _epoch or (_exceptions and not exceptions_in_key):
            return
        if len(memo) >= MAX_ENTRIES:
            # Shapes that vary with every step would grow it for ever; making a decision again costs microseconds.
            memo.clear()
        memo[key] = value


def invalidate() -> None:
    """Forgets every decision."""
    global _epoch
    with _lock:
        _epoch += 1
        for memo in _memos:
            memo.clear()


@contextlib.contextmanager
def exceptional() -> Iterator[None]:
    """Inside the block every call decides afresh. Nests, also across threads."""
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
