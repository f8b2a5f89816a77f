"""Tests the Triton kernels for mixed batches. The decode kernel and the extend kernel split the batch, and neither may write to the
other's sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.attention import _split_kv
from tokenspeed_kernel.triton.attention import mha_decode_with_kvcache as decode
from tokenspeed_kernel.triton.attention import mha_with_kvcache as kernel
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged

DEVICE = default_device()
# Sequences that decode, verify two drafts, extend, prefill, or have no new token, in no order.
KV_LENS, Q_LENS = [97, 30, 1, 60, 16, 0, 33, 150], [1, 30, 1, 2, 0, 0, 9, 1]


def _draw(kv_lens: list[int], q_lens: list[int], *args: Any, **options: Any) -> dict[str, Any]:
    return paged(kv_lens, q_lens, *args, running_sums=False, stale=True, **options)(Draw(DEVICE))


def _agrees(arguments: dict[str, Any], bound: float = 5e-3) -> None:
    (got, lse), (wanted, wanted_lse) = (
        tk.mha_with_kvcache(**arguments, return_lse=True, solution=solution) for solution in ("triton", "reference")
    )
    torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)
    assert (got.float() - wanted.float()).norm() <= bound * wanted.float().norm() + 1e-30


@pytest.fixture
def small_work_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configures the decode kernel such that work items have few keys, and sequence lengths are loaded 16 at a time."""
    choose = decode._config
    small = {"block_n": 16, "least": 16, "long": 16, "whole": 16, "resident": 1, "waves": 1}
    monkeypatch.setattr(decode, "_config", lambda *args: choose(*args)._replace(**small))
    monkeypatch.setattr(_split_kv, "_LENGTHS_AT_ONCE", 16)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("small_work_items")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("options", [{}, {"window_left": 300}, {"sinks": True, "logit_cap": 4.0}], ids=["full", "window", "cap"])
def test_decode_work_items_beside_prefill_tiles(page_size: int, options: dict[str, Any]) -> None:
    """With eight query heads per KV head, the decode kernel runs sequences with up to two new tokens."""
    _agrees(_draw(KV_LENS, Q_LENS, 8, 1, 16, page_size=page_size, dtype=torch.float32, **options), 1e-5)


@pytest.mark.usefixtures("small_work_items")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (24, 1)])
def test_head_ratios(heads: int, kv_heads: int) -> None:
    """At a GQA ratio of 1, the decode kernel runs sequences with up to sixteen new tokens. At 24, it runs only sequences with one
    new token; their 24 rows exceed the smallest tile."""
    _agrees(_draw([*KV_LENS, 40, 41], [*Q_LENS, 16, 17], heads, kv_heads, 16, dtype=torch.float32), 1e-5)


@pytest.mark.usefixtures("small_work_items")
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=20))
def test_any_mixture(lengths: list[tuple[int, int]]) -> None:
    _agrees(_draw([cached + new for cached, new in lengths], [new for _, new in lengths], 4, 1, 16, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("kv_lens", [[9], [9, 0], []], ids=["one sequence", "two", "none"])
def test_padding_alone(kv_lens: list[int]) -> None:
    """In a padded batch in which no sequence has a new token, no row of the output may be written."""
    arguments = _draw(kv_lens, [0] * len(kv_lens), 8, 2, 32)
    q = torch.randn(5, 8, 32, dtype=arguments["q"].dtype, device=DEVICE)
    out = torch.full_like(q, 7.0)
    tk.mha_with_kvcache(**{**arguments, "q": q}, out=out, solution="triton")
    assert torch.equal(out, torch.full_like(q, 7.0))


@pytest.mark.parametrize("window_left", [0, 1, 127, 128, 1000])
def test_windows(window_left: int) -> None:
    _agrees(_draw([*KV_LENS, 300], [*Q_LENS, 1], 8, 2, 32, window_left=window_left, sinks=True))


@pytest.mark.parametrize(
    ("window_left", "q_lens", "launched"),
    [
        (-1, Q_LENS, ["tiles", "newest"]),
        (-1, [1, 2, 1, 1, 0, 0, 2, 1], ["newest"]),  # all sequences decode
        (127, Q_LENS, ["tiles"]),  # few keys in each window, so split-KV is not used
        (1000, Q_LENS, ["tiles", "newest"]),
    ],
)
def test_which_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch, window_left: int, q_lens: list[int], launched: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(kernel, "attend_stretches", lambda *args, **options: found.append("tiles"))
    monkeypatch.setattr(kernel, "attend_newest", lambda *args, **options: found.append("newest"))
    tk.mha_with_kvcache(**_draw(KV_LENS, q_lens, 8, 1, 16, window_left=window_left), solution="triton")
    assert found == launched


@pytest.mark.usefixtures("small_work_items")
def test_outputs_elsewhere_stay_as_they_are() -> None:
    """The output is a view of a larger buffer that has more rows and heads. The rest of the buffer must not change."""
    arguments = _draw(KV_LENS, Q_LENS, 8, 1, 16, dtype=torch.float32)
    wanted = tk.mha_with_kvcache(**arguments, solution="reference")
    padded = torch.full((wanted.shape[0] + 5, 9, 16), 7.0, device=DEVICE)
    tk.mha_with_kvcache(**arguments, out=padded[: wanted.shape[0], :8], solution="triton")
    torch.testing.assert_close(padded[: wanted.shape[0], :8], wanted, rtol=1e-4, atol=1e-5)
    assert (padded[wanted.shape[0] :] == 7).all()
    assert (padded[:, 8] == 7).all()
