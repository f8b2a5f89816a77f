from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_oss_models import make_config
from hypothesis import given
from hypothesis import strategies as st

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.cache import OutOfPages, PageAllocator, PagedKVCache


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8))))
def test_no_page_is_held_twice_and_none_is_lost(total: int, actions: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(total, 4)
    held: list[list[int]] = []
    for take, number in actions:
        if take and number <= allocator.available:
            held.append(allocator.allocate(number))
        elif take:
            before = allocator.available
            with pytest.raises(OutOfPages):
                allocator.allocate(number)
            assert allocator.available == before
        elif held:
            allocator.free(held.pop(number % len(held)))
        pages = [page for group in held for page in group]
        assert len(set(pages)) == len(pages)
        assert set(pages) <= set(range(total))
        assert allocator.available == total - len(pages)


def test_out_of_pages_says_how_many() -> None:
    allocator = PageAllocator(3, 16)
    allocator.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages of 16 tokens are needed, 1 of 3 are free"):
        allocator.allocate(2)


def test_freeing_what_is_not_held() -> None:
    allocator = PageAllocator(3, 16)
    pages = allocator.allocate(2)
    for wrong in ([*pages, 2], [pages[0], pages[0]]):
        with pytest.raises(ValueError, match=r"pages must .*freed"):
            allocator.free(wrong)
    assert allocator.available == 1
    allocator.free(pages)
    assert allocator.available == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "pages must be an int of at least 1, got 0"),
        ((True,), TypeError, r"pages must be an int of at least 1, got True \(bool\)"),
        ((4, 0), ValueError, "page_size must be an int of at least 1, got 0"),
        ((4, 16.0), TypeError, r"page_size must be an int of at least 1, got 16.0 \(float\)"),
        ((4, 16, torch.int8), ValueError, r"dtype must be a floating-point torch.dtype, got torch.int8"),
        ((4, 16, "bfloat16"), TypeError, r"dtype must be a floating-point torch.dtype, got 'bfloat16' \(str\)"),
    ],
)
def test_impossible_caches(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PagedKVCache(make_config(), *arguments)


def test_a_cache_is_for_a_configuration() -> None:
    with pytest.raises(TypeError, match="config must be a Config, got 4"):
        PagedKVCache(4, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)])
def test_pages_are_counted_in_ints(count: Any, error: type[Exception]) -> None:
    allocator = PageAllocator(3, 16)
    with pytest.raises(error, match="count must be an int of at least 0, got "):
        allocator.allocate(count)
    assert allocator.available == 3


def test_layout() -> None:
    cache = PagedKVCache(make_config(), 5, 4, torch.float16)
    assert len(cache.k) == len(cache.v) == 2
    assert cache.k[1].shape == (5, 4, 2, 8)
    assert cache.k[1].dtype == torch.float16
    assert cache.page_table([[3, 0, 2], [1]]).tolist() == [[3, 0, 2], [1, 0, 0]]


def test_layers_do_not_share_memory() -> None:
    cache = PagedKVCache(make_config(), 2, 4)
    cache.k[0].fill_(1)
    assert not any(t.any() for t in (cache.k[1], *cache.v))


def test_batch() -> None:
    cache = PagedKVCache(make_config(), 8, 4)
    batch = make_batch([Piece([5, 6, 7], 4, [2, 3]), Piece([9], 0, [1])], cache, "cpu", logits_of=[1, 0])
    assert batch.phase is Phase.EXTEND
    assert batch.tokens.tolist() == [5, 6, 7, 9]
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.slot_mapping is not None
    assert batch.slot_mapping.tolist() == [12, 13, 14, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.cu_seqlens_kv.tolist() == [0, 7, 8]
    assert batch.cache_seqlens.tolist() == [7, 1]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (3, 8)
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("pieces", "phase"),
    [
        ([Piece([1, 2]), Piece([1])], Phase.PREFILL),
        ([Piece([1], 5), Piece([1], 1)], Phase.DECODE),
        ([Piece([1], 5), Piece([1])], Phase.MIXED),
        ([Piece([1], 5), Piece([1, 2], 5)], Phase.MIXED),
        ([Piece([1, 2], 5)], Phase.EXTEND),
        ([Piece([1, 2], 5), Piece([1])], Phase.EXTEND),
    ],
)
def test_phase(pieces: list[Piece], phase: Phase) -> None:
    cache = PagedKVCache(make_config(), 8, 4)
    placed = [Piece(piece.tokens, piece.start, [0, 1]) for piece in pieces]
    assert make_batch(placed, cache, "cpu").phase is phase


@pytest.mark.parametrize(
    ("pieces", "message"), [([], "at least one piece"), ([Piece([])], "one token"), ([Piece([1], 3)], "cache")]
)
def test_impossible_batches(pieces: list[Piece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(pieces, None, "cpu")
