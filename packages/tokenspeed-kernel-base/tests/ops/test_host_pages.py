"""Tests pages that move to host memory and back, in any order, against copies of whole caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.kvcache.host_pages import HostPages

PAGES, HOST_PAGES = 7, 9


def caches_of(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Makes caches of several shapes. The second cache is strided."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((PAGES, 4, 2, 8), (PAGES, 4, 3, 16), (PAGES, 2, 12))
    every = [torch.randn(shape, generator=draw).mul(9).to(device, dtype) for shape in shapes]
    return [every[0], every[1][..., ::2], every[2]]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def agree(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(got, wanted, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.float8_e4m3fn]), st.integers(1, 4))
def test_any_moves(data: st.DataObject, dtype: torch.dtype, staging_pages: int) -> None:
    caches = caches_of(dtype)
    host = HostPages(caches, HOST_PAGES, staging_pages)
    expected, stored = [cache.clone() for cache in caches], {}
    for _ in range(data.draw(st.integers(1, 5))):
        if stored and data.draw(st.booleans()):
            pages = data.draw(st.lists(st.integers(0, PAGES - 1), unique=True))
            origins = [data.draw(st.sampled_from(sorted(stored))) for _ in pages]
            host.load(origins, pages)
            for origin, page in zip(origins, pages, strict=True):
                for cache, kept in zip(expected, stored[origin], strict=True):
                    cache[page] = kept
        else:
            targets = data.draw(st.lists(st.integers(0, HOST_PAGES - 1), unique=True))
            pages = [data.draw(st.integers(0, PAGES - 1)) for _ in targets]
            host.store(pages, targets)
            stored.update({target: [c[page].clone() for c in expected] for target, page in zip(targets, pages, strict=True)})
        assert agree(caches, expected)
    host.synchronize()
    for target, kept in stored.items():
        assert agree([tensor[target] for tensor in host.tensors], kept)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"caches": []}, "caches must be at least one cache, got 0"),
        ({"caches": [torch.zeros(2, 3)]}, "caches[0] must be"),
        ({"caches": [torch.zeros(2, 3, 4), torch.zeros(3, 3, 4)]}, "caches[1] must be of 2 pages on cpu"),
        ({"pages": 0}, "pages must be at least 1, got 0"),
        ({"staging_pages": 0}, "staging_pages must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_of_host_pages(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="HostPages: ") as raised:
        HostPages(**{"caches": [torch.zeros(2, 3, 4)], "pages": 4, **arguments})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("store", "pages", "host_pages", "said"),
    [
        (True, [0, 1], [0], "host_pages must be 2 indices, as many as pages, got 1"),
        (True, [0, 7], [0, 1], "pages must be 0 to 6, got 7"),
        (True, [0], [9], "host_pages must be 0 to 8, got 9"),
        (True, [0, 1, 1], [2, 3, 2], "host_pages must be distinct, got 2 twice"),
        (False, [5, 5], [0, 1], "pages must be distinct, got 5 twice"),
        (False, [-1], [0], "pages must be 0 to 6, got -1"),
    ],
)
def test_pages_that_are_refused(store: bool, pages: list[int], host_pages: list[int], said: str) -> None:
    host = HostPages(caches_of(torch.float32), HOST_PAGES)
    host.store([0, 1], [0, 1])
    before = [x.clone() for x in (*host.caches, *host.tensors)]
    with pytest.raises(ValueError, match="HostPages: ") as raised:
        host.store(pages, host_pages) if store else host.load(host_pages, pages)
    assert said in str(raised.value)
    assert agree([*host.caches, *host.tensors], before)


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moves_are_ordered_by_the_current_stream() -> None:
    """The current stream fills the caches just before a call, and overwrites the caches right after the call. Calls use several
    streams."""
    caches = caches_of(torch.bfloat16, "cuda")
    kept = [cache.clone() for cache in caches]
    host = HostPages(caches, HOST_PAGES, staging_pages=2)
    assert all(tensor.is_pinned() for tensor in host.tensors)
    side = torch.cuda.Stream()
    for cache in caches:
        cache.zero_()
    torch.cuda._sleep(50_000_000)
    for cache, values in zip(caches, kept, strict=True):
        cache.copy_(values)
    host.store(range(PAGES), range(HOST_PAGES - 1, HOST_PAGES - 1 - PAGES, -1))
    for cache in caches:
        cache.fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.load([HOST_PAGES - 1 - page for page in range(PAGES)], [(page + 3) % PAGES for page in range(PAGES)])
        moved = [cache.clone() for cache in caches]
    host.synchronize()
    torch.cuda.synchronize()
    assert agree([tensor.flip(0)[:PAGES] for tensor in host.tensors], kept)
    assert agree(moved, [values.roll(3, 0) for values in kept])
