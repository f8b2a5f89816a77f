"""Tests when decisions are memoised, and when they are invalidated."""

from __future__ import annotations

import pytest

from tokenspeed_kernel_base import memo


def test_memoised_decisions_are_found_until_invalidated() -> None:
    table = memo.new_memo()
    memo.remember(table, "a", 1, memo.epoch())
    assert table == {"a": 1}
    memo.invalidate()
    assert table == {}


def test_decisions_made_before_a_change_are_not_memoised() -> None:
    table = memo.new_memo()
    started = memo.epoch()
    memo.invalidate()
    memo.remember(table, "a", 1, started)
    assert table == {}


def test_nothing_is_memoised_in_exceptional_blocks() -> None:
    table = memo.new_memo()
    memo.remember(table, "before", 1, memo.epoch())
    with memo.exceptional():
        assert table == {}
        memo.remember(table, "a", 1, memo.epoch())
        with memo.exceptional():
            memo.remember(table, "b", 1, memo.epoch())
        memo.remember(table, "c", 1, memo.epoch())
        assert table == {}
        started = memo.epoch()
    memo.remember(table, "d", 1, started)
    assert table == {}, "decided inside, remembered outside"
    memo.remember(table, "e", 1, memo.epoch())
    assert table == {"e": 1}


def test_exceptional_blocks_end_when_they_raise() -> None:
    table = memo.new_memo()
    with pytest.raises(RuntimeError), memo.exceptional():
        raise RuntimeError
    memo.remember(table, "a", 1, memo.epoch())
    assert table == {"a": 1}


def test_a_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_ENTRIES", 3)
    table = memo.new_memo()
    for i in range(10):
        memo.remember(table, i, i, memo.epoch())
        assert 1 <= len(table) <= 3
        assert table[i] == i
