"""Tests which tensors have rows aligned to 16 bytes, and the message about caches whose rows are not aligned."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel_base import alignment

_ROOM = torch.zeros(4096, dtype=torch.float16)


@pytest.mark.parametrize(
    ("cache", "is_aligned"),
    [
        (_ROOM[:1024].view(4, 4, 64), True),
        (_ROOM.as_strided((4, 4, 64), (288, 72, 1)), True),
        (_ROOM.as_strided((4, 4, 64), (288, 72, 1), 8), True),
        (_ROOM[:0].view(0, 4, 64), True),
        (_ROOM.as_strided((4, 4, 64), (272, 68, 1)), False),
        (_ROOM.as_strided((4, 4, 64), (512, 128, 2)), False),
        (_ROOM[1:1025].view(4, 4, 64), False),
    ],
    ids=["contiguous", "padded by 8", "shifted by 8", "empty", "padded by 4", "elements apart", "contiguous, shifted"],
)
def test_tensors_that_need_no_copy(cache: torch.Tensor, is_aligned: bool) -> None:
    made = alignment.aligned(cache)
    assert (made is cache) == is_aligned == alignment.is_aligned(cache)
    assert alignment.is_aligned(made)
    assert torch.equal(made, cache)
    said = "copied whole at every call, 2048 bytes: its rows do not begin at multiples of 16 bytes"
    assert alignment.copied_cache(cache) == ("" if is_aligned else said)


def test_nothing_is_said_of_a_cache_without_an_address() -> None:
    assert alignment.copied_cache(torch.empty(4, 4, 68, device="meta")[..., :64]) == ""
