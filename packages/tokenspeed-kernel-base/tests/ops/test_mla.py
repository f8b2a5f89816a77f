"""Tests that the absorbed and the plain form of MLA agree with each other, with PyTorch's attention, and with the MHA operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel_base.ops.attention.attn_merge_state import attn_merge_state
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill

HEADS, RANK, NOPE, ROPE, V = 4, 16, 8, 6, 10
SCALE = 1.3 / math.sqrt(NOPE + ROPE)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Layer:
    """An MLA layer: the projections before and after the attention, in float64, and the tokens of one sequence."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q_nope, self.q_rope = normal(tokens, HEADS, NOPE), normal(tokens, HEADS, ROPE)
        self.latent, self.k_rope = normal(tokens, RANK), normal(tokens, ROPE)
        self.expand_k, self.expand_v = normal(HEADS, RANK, NOPE) / 4, normal(HEADS, RANK, V) / 4

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of every head, without absorption."""
        k_nope = torch.einsum("tr,hrd->thd", self.latent, self.expand_k)
        k_rope = self.k_rope.unsqueeze(1).expand(-1, HEADS, -1)
        v = torch.einsum("tr,hrd->thd", self.latent, self.expand_v)
        return torch.cat([self.q_nope, self.q_rope], -1), torch.cat([k_nope, k_rope], -1), v

    def absorbed(self) -> tuple[Tensor, Tensor]:
        """Returns the absorbed q, and the latents with their rotary part."""
        q = torch.einsum("thd,hrd->thr", self.q_nope, self.expand_k)
        return torch.cat([q, self.q_rope], -1), torch.cat([self.latent, self.k_rope], -1)

    def project(self, out: Tensor) -> Tensor:
        """Projects attention outputs from latents to values."""
        return torch.einsum("thr,hrd->thd", out, self.expand_v)


def into_pages(tokens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Stores one sequence in a cache whose pages are in reverse order. Unused slots hold NaN."""
    pages = -(-len(tokens) // page_size)
    cache = torch.full((pages + 1, page_size, tokens.shape[1]), math.nan, dtype=tokens.dtype)
    for position, token in enumerate(tokens):
        cache[pages - position // page_size, position % page_size] = token
    return cache, torch.arange(pages, 0, -1, dtype=torch.int32).unsqueeze(0)


def tensors(result: Any) -> tuple[Tensor, Tensor]:
    out, lse = result
    return out, lse


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 25), st.integers(1, 8), st.integers(0, 99), st.data())
def test_plain_absorbed_and_tokenwise_decode_agree(tokens: int, page_size: int, seed: int, data: st.DataObject) -> None:
    layer = Layer(tokens, seed)
    whole, whole_lse = tensors(mla_prefill(*layer.plain(), ints(0, tokens), return_lse=True, softmax_scale=SCALE))
    q, latents = layer.absorbed()
    cache, page_table = into_pages(latents, page_size)
    room = page_table.shape[1] * page_size

    new = data.draw(st.integers(1, tokens))
    call = (cache, page_table, ints(tokens), new, room, RANK, SCALE)
    out, lse = tensors(mla_extend_with_kvcache(q[-new:], ints(0, new), ints(0, tokens), *call, is_causal=True, return_lse=True))
    torch.testing.assert_close(layer.project(out), whole[-new:])
    torch.testing.assert_close(lse, whole_lse[-new:])

    several = mla_decode_with_kvcache(q[-new:], cache, page_table, ints(tokens), room, RANK, SCALE, new, return_lse=True)
    torch.testing.assert_close(tensors(several), (out, lse), rtol=0, atol=0)

    lengths = torch.arange(1, tokens + 1, dtype=torch.int32)
    one_by_one = mla_decode_with_kvcache(q, cache, page_table.repeat(tokens, 1), lengths, room, RANK, SCALE, return_lse=True)
    torch.testing.assert_close(layer.project(tensors(one_by_one)[0]), whole)
    torch.testing.assert_close(tensors(one_by_one)[1], whole_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prefill_against_sdpa(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [5, 0, 200]
    q, k = torch.randn(205, 3, 192, dtype=dtype), torch.randn(205, 3, 192, dtype=dtype)
    v = torch.randn(205, 3, 128, dtype=dtype)
    wanted = [
        scaled_dot_product_attention(*(x.transpose(0, 1) for x in qkv), is_causal=True, scale=0.1).transpose(0, 1)
        for qkv in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        if len(qkv[0])
    ]
    got = mla_prefill(q, k, v, ints(0, 5, 5, 205), softmax_scale=0.1)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, torch.cat(wanted))
    default = mla_prefill(q, k, v, ints(0, 5, 5, 205))
    torch.testing.assert_close(default, mla_prefill(q, k, v, ints(0, 5, 5, 205), softmax_scale=192**-0.5))


@pytest.mark.parametrize("logit_cap", [0.0, 2.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_absorbed_is_plain_attention_with_one_key_head(is_causal: bool, logit_cap: float) -> None:
    torch.manual_seed(0)
    cache = torch.randn(6, 4, RANK + ROPE)
    k_cache, v_cache = cache.unsqueeze(2), cache[..., :RANK].unsqueeze(2)
    page_table, lengths = ints(5, 1, 0, 2, 4, 3).view(2, 3), ints(10, 7)
    q = torch.randn(8, HEADS, RANK + ROPE)
    options: dict[str, Any] = {"softmax_scale": SCALE, "logit_cap": logit_cap, "return_lse": True}
    got = mla_extend_with_kvcache(
        q, ints(0, 3, 8), None, cache, page_table, lengths, 5, 12, kv_lora_rank=RANK, is_causal=is_causal, **options
    )
    wanted = mha_extend_with_kvcache(
        q, ints(0, 3, 8), None, k_cache, v_cache, page_table, lengths, 5, 12, is_causal=is_causal, **options
    )
    torch.testing.assert_close(tensors(got), tensors(wanted), rtol=0, atol=0)
    got = mla_decode_with_kvcache(q, cache, page_table, lengths, 12, kv_lora_rank=RANK, max_seqlen_q=4, **options)
    wanted = mha_decode_with_kvcache(q, k_cache, v_cache, page_table, lengths, 12, max_seqlen_q=4, **options)
    torch.testing.assert_close(tensors(got), tensors(wanted), rtol=0, atol=0)


def test_prefill_is_plain_prefill() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 3, 12), torch.randn(9, 3, 12), torch.randn(9, 3, 8)
    for options in ({}, {"logit_cap": 3.0}, {"softmax_scale": 0.5}, {"cu_seqlens_cpu": [0, 4, 9], "max_seqlen": 5}):
        assert torch.equal(
            torch.as_tensor(mla_prefill(q, k, v, ints(0, 4, 9), override="reference_mla_prefill", **options)),
            torch.as_tensor(mha_prefill(q, k, v, ints(0, 4, 9), override="reference_mha_prefill", **options)),
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_is_dequantised_by_its_scales(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(3, 4, RANK + ROPE).to(dtype), torch.randn(2, HEADS, RANK + ROPE).to(dtype)
    q_scale, kv_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    rest = (ints(0, 1, 2, 0).view(2, 2), ints(7, 3), 8, RANK, SCALE)
    wanted = mla_decode_with_kvcache(q.float() * q_scale, cache.float() * kv_scale, *rest)
    got = mla_decode_with_kvcache(q, cache, *rest, q_scale=q_scale, kv_scale=kv_scale)
    assert isinstance(wanted, Tensor)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, wanted.bfloat16())
    mixed = mla_decode_with_kvcache((q.float() * q_scale).bfloat16(), cache, *rest, kv_scale=kv_scale)
    assert isinstance(mixed, Tensor)
    torch.testing.assert_close(mixed.float(), wanted, rtol=0.03, atol=0.03)


def test_a_sequence_that_pads_the_batch_gives_nothing() -> None:
    cache = torch.randn(2, 4, RANK + ROPE)
    out, lse = tensors(
        mla_decode_with_kvcache(
            torch.randn(2, HEADS, RANK + ROPE), cache, ints(-1, 1).view(2, 1), ints(0, 2), 4, RANK, SCALE, return_lse=True
        )
    )
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert (out[1] != 0).all()


def test_no_sequences() -> None:
    nothing = torch.zeros(0, HEADS, RANK + ROPE)
    cache, table, lengths = torch.zeros(0, 4, RANK + ROPE), torch.zeros(0, 0, dtype=torch.int32), ints()
    out, lse = tensors(mla_decode_with_kvcache(nothing, cache, table, lengths, 64, RANK, SCALE, return_lse=True))
    assert (out.shape, lse.shape) == ((0, HEADS, RANK), (0, HEADS))
    extended = mla_extend_with_kvcache(nothing, ints(0), ints(0), cache, table, lengths, 0, 64, RANK, SCALE)
    assert isinstance(extended, Tensor)
    assert extended.shape == (0, HEADS, RANK)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 30), st.integers(1, 30), st.integers(0, 99), st.data())
def test_chunks_merged_by_their_log_sum_exps_are_the_whole(tokens: int, chunk: int, seed: int, data: st.DataObject) -> None:
    """Runs a prompt in chunks. Each chunk attends to itself and, in separate calls, to each preceding chunk. The merged results
    must equal those of the whole prompt."""
    q, k, v = Layer(tokens, seed).plain()
    whole, whole_lse = tensors(mla_prefill(q, k, v, ints(0, tokens), return_lse=True, softmax_scale=SCALE))
    options: dict[str, Any] = {"return_lse": True, "softmax_scale": SCALE}
    for begin in range(0, tokens, chunk):
        rows = slice(begin, min(begin + chunk, tokens))
        count = rows.stop - begin
        out, lse = tensors(mla_prefill(q[rows], k[rows], v[rows], ints(0, count), **options))
        split = data.draw(st.integers(0, begin))
        for part in (slice(0, split), slice(split, begin)):
            length = part.stop - part.start
            arguments = (q[rows], k[part], v[part], ints(0, count))
            earlier = mla_prefill(*arguments, cu_seqlens_kv=ints(0, length), is_causal=False, **options)
            out, lse = attn_merge_state(out, lse, *tensors(earlier))
        # The tolerance covers the rounding of each LSE to float32 before the merge.
        torch.testing.assert_close(out, whole[rows], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, whole_lse[rows], rtol=1e-5, atol=1e-6)
        # The same queries attend to all keys in one call. There, the queries are the last tokens.
        keys = slice(0, rows.stop)
        at_once = mla_prefill(q[rows], k[keys], v[keys], ints(0, count), cu_seqlens_kv=ints(0, rows.stop), **options)
        torch.testing.assert_close(tensors(at_once)[0], whole[rows])


@pytest.mark.parametrize("window_left", [0, 1, 4, 50])
def test_a_window_is_the_same_before_and_after_absorption(window_left: int) -> None:
    layer = Layer(23)
    whole = mla_prefill(*layer.plain(), ints(0, 20, 23), softmax_scale=SCALE, window_left=window_left)
    wanted = mha_prefill(*layer.plain(), ints(0, 20, 23), softmax_scale=SCALE, window_left=window_left)
    assert torch.equal(torch.as_tensor(whole), torch.as_tensor(wanted))
    q, latents = layer.absorbed()
    cache, page_table = into_pages(latents[:20], 4)
    call = (cache, page_table, ints(20), 3, 20, RANK, SCALE)
    out = mla_extend_with_kvcache(q[17:20], ints(0, 3), None, *call, window_left=window_left)
    torch.testing.assert_close(layer.project(torch.as_tensor(out)), torch.as_tensor(whole)[17:20])
    hidden = max(20 - 3 - window_left, 0) // 4  # no new token sees these pages, so they may have been freed
    cache[page_table[0, :hidden].long()] = math.nan
    page_table[0, :hidden] = -1
    arguments = (q[17:20], cache, page_table, ints(20), 20, RANK, SCALE)
    freed = mla_decode_with_kvcache(*arguments, max_seqlen_q=3, window_left=window_left)
    torch.testing.assert_close(torch.as_tensor(freed), torch.as_tensor(out))
    if hidden:
        with pytest.raises(ValueError, match=r"page_table\[0, 0\] must be a page of kv_cache"):
            mla_decode_with_kvcache(*arguments, max_seqlen_q=3)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_fp8_prefill_is_dequantised_by_its_scales(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 3, width).to(torch.float8_e4m3fn) for width in (12, 12, 8))
    scales = [torch.rand(shape) + 0.5 for _ in range(3)]
    wide = (x.float() * scale.reshape(-1, 1) for x, scale in zip((q, k, v), scales, strict=True))
    wanted = torch.as_tensor(mla_prefill(*wide, ints(0, 4, 9)))
    got = torch.as_tensor(mla_prefill(q, k, v, ints(0, 4, 9), q_scale=scales[0], k_scale=scales[1], v_scale=scales[2]))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted.bfloat16())


WRONG_PREFILLS: list[tuple[dict[str, Any], str]] = [
    ({"k": torch.ones(5, 2, 6)}, "k must be of shape .* where tokens is 4 in q"),
    ({"cu_seqlens_kv": ints(0, 2, 4, 4)}, "cu_seqlens_kv must be of shape .* is 3 in cu_seqlens"),
    ({"cu_seqlens_kv": ints(0, 2, 5)}, r"cu_seqlens_kv\[-1\] must be at most 4, the number of tokens in k, got 5"),
    ({"window_left": -2}, "window_left must be -1"),
    ({"q_scale": torch.tensor(1.0)}, "q_scale must be None, because q is not fp8"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_PREFILLS)
def test_a_wrong_prefill_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"q": torch.ones(4, 2, 6), "k": torch.ones(4, 2, 6), "v": torch.ones(4, 2, 3), "cu_seqlens": ints(0, 1, 4)}
    with pytest.raises(ValueError, match=f"^mla_prefill: .*{message}"):
        mla_prefill(**{**arguments, **changes})
    narrow = {name: torch.ones(4, 2, 6).to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    with pytest.raises(ValueError, match=r"k_scale must be of shape .*\[2\].*, got \[3\]"):
        mla_prefill(**{**arguments, **narrow}, k_scale=torch.ones(3))
