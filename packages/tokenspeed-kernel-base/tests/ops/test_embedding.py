"""Tests apply_rope against transformers, against complex numbers, and for known properties of rotations."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def angles_of(max_positions: int, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """Returns the angles of all positions, float64 ``[max_positions, rotary_dim / 2]``."""
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return torch.arange(max_positions, dtype=torch.float64).unsqueeze(1) * frequencies


def table_of(angles: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).float()


def draw(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def test_half_rotation_agrees_with_llama() -> None:
    q, k, _ = draw(9, 6, 2, 32)
    positions = torch.tensor([5, 0, 1, 99, 99, 7, 3, 2, 50])
    angles = angles_of(100, 32)
    full = torch.cat((angles, angles), dim=-1)[positions].unsqueeze(0)
    wanted = modeling_llama.apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), full.cos().float(), full.sin().float()
    )
    got = apply_rope(q, k, positions, table_of(angles))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_half_rotation_with_an_attention_factor_agrees_with_gpt_oss() -> None:
    q, k, _ = draw(5, 8, 2, 64)
    positions = torch.tensor([0, 10, 4095, 7, 300])
    angles = angles_of(4096, 64, base=150000.0)
    table = table_of(angles, factor=1.3466)
    cos, sin = table[positions].chunk(2, dim=-1)
    wanted = modeling_gpt_oss.apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0)
    )
    for one, other in zip(apply_rope(q, k, positions, table), wanted, strict=True):
        torch.testing.assert_close(one, other[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [2, 32, 48])
def test_interleaved_pairs_are_complex_numbers_times_a_phase(rotary_dim: int) -> None:
    q, k, _ = draw(7, 4, 1, 48, torch.float64)
    positions = torch.tensor([0, 1, 2, 30, 31, 5, 5], dtype=torch.int32)
    table = table_of(angles_of(32, rotary_dim))
    phase = torch.complex(*table.double().chunk(2, dim=-1))[positions.long()].unsqueeze(1)
    for got, x in zip(apply_rope(q, k, positions, table, interleaved=True), (q, k), strict=True):
        pairs = torch.view_as_complex(x[..., :rotary_dim].reshape(*x.shape[:2], -1, 2).contiguous())
        turned = torch.view_as_real(pairs * phase).flatten(-2)
        torch.testing.assert_close(got[..., :rotary_dim], turned, rtol=1e-14, atol=1e-14)
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_is_rounded_once(dtype: torch.dtype, interleaved: bool) -> None:
    q, k, _ = draw(20, 8, 2, 64, dtype)
    positions, table = torch.arange(20), table_of(angles_of(20, 64), factor=1.3)
    got = apply_rope(q, k, positions, table, interleaved)
    exact = apply_rope(q.double(), k.double(), positions, table, interleaved)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rest_of_a_partly_rotated_head_passes_through(dtype: torch.dtype, interleaved: bool) -> None:
    q, k, _ = draw(4, 3, 1, 57, dtype)
    q[0, 0, 50], k[1, 0, 56] = float("nan"), float("inf")
    got_q, got_k = apply_rope(q, k, torch.arange(4), table_of(angles_of(4, 32)), interleaved)
    torch.testing.assert_close(got_q[..., 32:], q[..., 32:], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got_k[..., 32:], k[..., 32:], rtol=0, atol=0)
    whole_q, _ = apply_rope(q[..., :32], k[..., :32], torch.arange(4), table_of(angles_of(4, 32)), interleaved)
    assert torch.equal(got_q[..., :32], whole_q)


def test_interleaving_only_moves_elements() -> None:
    q, k, _ = draw(6, 2, 1, 16)
    table, positions = table_of(angles_of(10, 16)), torch.tensor([9, 1, 2, 3, 4, 5])

    def woven(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)

    halves = apply_rope(q, k, positions, table)
    pairs = apply_rope(woven(q), woven(k), positions, table, interleaved=True)
    for one, other in zip(pairs, halves, strict=True):
        assert torch.equal(one, woven(other))


@given(seed=st.integers(0, 2**31), pairs=st.integers(1, 20), interleaved=st.booleans(), position=st.integers(0, 499))
def test_lengths_stay(seed: int, pairs: int, interleaved: bool, position: int) -> None:
    q, k, _ = draw(1, 3, 2, 2 * pairs, torch.float64, seed)
    table = table_of(angles_of(500, 2 * pairs))
    for got, x in zip(apply_rope(q, k, torch.tensor([position]), table, interleaved), (q, k), strict=True):
        torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


@given(
    seed=st.integers(0, 2**31), pairs=st.integers(1, 20), interleaved=st.booleans(),
    positions=st.tuples(st.integers(0, 199), st.integers(0, 199)), shift=st.integers(0, 300),
)  # fmt: skip
def test_dot_products_depend_on_the_distance_only(
    seed: int, pairs: int, interleaved: bool, positions: tuple[int, int], shift: int
) -> None:
    q, k, _ = draw(1, 1, 1, 2 * pairs, torch.float64, seed)
    table = table_of(angles_of(500, 2 * pairs))

    def dot_product(q_position: int, k_position: int) -> torch.Tensor:
        turned_q, _ = apply_rope(q, k, torch.tensor([q_position]), table, interleaved)
        _, turned_k = apply_rope(q, k, torch.tensor([k_position]), table, interleaved)
        return (turned_q * turned_k).sum()

    first, second = positions
    # The bound covers the rounding of cos_sin_cache to float32.
    bound = 1e-6 * float(q.norm() * k.norm())
    torch.testing.assert_close(dot_product(first, second), dot_product(first + shift, second + shift), rtol=0, atol=bound)


def test_position_0_changes_nothing() -> None:
    q, k, _ = draw(3, 4, 2, 16, torch.bfloat16)
    got = apply_rope(q, k, torch.zeros(3, dtype=torch.int64), table_of(angles_of(1, 16)))
    assert torch.equal(got[0], q)
    assert torch.equal(got[1], k)
    assert all(t.is_contiguous() for t in got)


def test_writes_into_outs_and_in_place() -> None:
    q, k, _ = draw(5, 4, 2, 16)
    positions, table = torch.arange(5), table_of(angles_of(5, 16))
    wanted = apply_rope(q, k, positions, table)
    q_out = torch.empty(5, 4, 16)
    got = apply_rope(q, k, positions, table, q_out=q_out)
    assert got[0] is q_out
    assert all(map(torch.equal, got, wanted))
    got = apply_rope(q, k, positions, table, q_out=q, k_out=k)
    assert got[0] is q
    assert got[1] is k
    assert all(map(torch.equal, got, wanted))


def cached(tokens: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    pages = tokens // page_size + 2
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[3::4] = -1
    shape = (pages, page_size, kv_heads, head_dim)
    return {
        "k_cache": torch.randn(shape, generator=generator).to(dtype),
        "v_cache": torch.randn(shape, generator=generator).to(dtype),
        "slot_mapping": slots,
    }


@pytest.mark.parametrize(
    ("rotary", "section", "in_turn"),
    [
        (modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding, (16, 24, 24), False),
        (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, (24, 20, 20), True),
    ],
)
def test_three_positions_agree_with_qwen(rotary: Any, section: tuple[int, ...], in_turn: bool) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    embedding = rotary(SimpleNamespace(rope_parameters=parameters, head_dim=128, max_position_embeddings=100))
    positions = torch.randint(0, 100, (3, 7), generator=torch.Generator().manual_seed(0))
    cos, sin = embedding(torch.zeros(1), positions.unsqueeze(1))
    q, k, _ = draw(7, 4, 2, 128)
    wanted = modeling_llama.apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    table = table_of(angles_of(100, 128))
    got = apply_rope(q, k, positions, table, mrope_section=section, mrope_interleaved=in_turn)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other[0].transpose(0, 1), rtol=2e-5, atol=2e-5)  # transformers computes angles in float32
    # A token with three equal positions is rotated like a token with one position.
    same = apply_rope(q, k, positions[:1].expand(3, -1), table, mrope_section=section, mrope_interleaved=in_turn)
    assert all(map(torch.equal, same, apply_rope(q, k, positions[0], table)))
    # If cos_sin_cache has one row for each token, any number of sections is possible, as the page "Calling operators" shows.
    if not in_turn:
        section_of_pair = torch.arange(3).repeat_interleave(torch.tensor(section))
        rows = table[positions].view(3, 7, 2, 64).gather(0, section_of_pair.expand(1, 7, 2, 64)).view(7, 128)
        assert all(map(torch.equal, got, apply_rope(q, k, torch.arange(7), rows)))
    # Without KV heads, only q is rotated.
    alone, nothing = apply_rope(q, q[:, :0], positions, table, mrope_section=section, mrope_interleaved=in_turn)
    assert torch.equal(alone, got[0])
    assert nothing.shape == (7, 0, 128)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(d, d) for d in FLOATS] + [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2)],
)
def test_with_a_cache_it_is_rope_then_store(dtype: torch.dtype, cache_dtype: torch.dtype, interleaved: bool) -> None:
    q, k, v = draw(11, 4, 2, 16, dtype)
    positions, table = torch.arange(11) * 3, table_of(angles_of(40, 12))
    fused, apart = cached(11, 4, 2, 16, cache_dtype), cached(11, 4, 2, 16, cache_dtype)
    before = {name: x.clone() for name, x in fused.items()}

    got = apply_rope(q, k, positions, table, interleaved, v=v, **fused)
    wanted = apply_rope(q, k, positions, table, interleaved)
    store_kv_cache(wanted[1], v, **apart)

    assert all(map(torch.equal, got, wanted))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(fused[name].view(torch.uint8), apart[name].view(torch.uint8))
        assert not torch.equal(fused[name].view(torch.uint8), before[name].view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("v_head_dim", [5, 16, 24])
def test_the_cache_may_be_scaled_and_values_of_another_width(v_head_dim: int, shape: tuple[int, ...]) -> None:
    q, k, _ = draw(11, 4, 2, 16, torch.bfloat16)
    v = torch.randn(11, 2, v_head_dim).bfloat16()
    positions, table = torch.arange(11) * 3, table_of(angles_of(40, 12))
    scales = {"k_scale": torch.rand(shape) * 0.01 + 0.001, "v_scale": torch.rand(shape) + 0.5}
    fused, apart = ({**cached(11, 4, 2, 16, torch.float8_e4m3fn)} for _ in range(2))
    for caches in (fused, apart):
        caches["v_cache"] = torch.zeros(*caches["k_cache"].shape[:3], v_head_dim).to(torch.float8_e4m3fn)
    _, turned = apply_rope(q, k, positions, table, v=v, **fused, **scales)
    store_kv_cache(turned, v, **apart, **scales)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(fused[name].view(torch.uint8), apart[name].view(torch.uint8))
    with pytest.raises(ValueError, match=r"^apply_rope: k_scale must be None, .* no cache"):
        apply_rope(q, k, positions, table, k_scale=scales["k_scale"])
    with pytest.raises(ValueError, match=r"^apply_rope: v_scale .* finite .* more than 0"):
        apply_rope(q, k, positions, table, v=v, **fused, v_scale=torch.tensor(0.0))


def test_with_a_cache_in_place() -> None:
    q, k, v = draw(11, 4, 2, 16)
    positions, table = torch.arange(11), table_of(angles_of(11, 16))
    one, other = cached(11, 4, 2, 16, torch.float32), cached(11, 4, 2, 16, torch.float32)
    apply_rope(q.clone(), k.clone(), positions, table, v=v, **one)
    apply_rope(q, k, positions, table, v=v, **other, q_out=q, k_out=k)
    assert torch.equal(one["k_cache"], other["k_cache"])
    assert torch.equal(one["v_cache"], other["v_cache"])


def test_no_tokens() -> None:
    q, k, v = draw(0, 4, 2, 16)
    table, positions = table_of(angles_of(4, 16)), torch.zeros(0, dtype=torch.int64)
    got = apply_rope(q, k, positions, table)
    assert [list(t.shape) for t in got] == [[0, 4, 16], [0, 2, 16]]
    caches = cached(0, 4, 2, 16, torch.float32)
    before = caches["k_cache"].clone()
    apply_rope(q, k, positions, table, v=v, **caches)
    assert torch.equal(caches["k_cache"], before)


def arguments_for(cache: bool = False) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "q": torch.ones(3, 4, 8),
        "k": torch.ones(3, 2, 8),
        "positions": torch.tensor([0, 1, 2]),
        "cos_sin_cache": torch.ones(10, 8),
    }
    if cache:
        arguments.update(v=torch.ones(3, 2, 8), k_cache=torch.zeros(2, 2, 2, 8), v_cache=torch.zeros(2, 2, 2, 8))
        arguments["slot_mapping"] = torch.tensor([0, 1, 2])
    return arguments


WRONG: list[tuple[bool, dict[str, Any], type[Exception], str]] = [
    (False, {"q": torch.ones(3, 4, 8).int()}, TypeError, "q must be a tensor of .*, got int32"),
    (False, {"q": torch.ones(3, 32)}, ValueError, r"q must be of shape \[tokens, heads, head_dim\], got \[3, 32\]"),
    (False, {"k": torch.ones(3, 2, 8).half()}, TypeError, "k must be a tensor of float32, got float16"),
    (False, {"k": torch.ones(2, 2, 8)}, ValueError, "k must be of shape .* where tokens is 3 in q"),
    (False, {"k": torch.ones(3, 2, 4)}, ValueError, "k must be of shape .* where head_dim is 8 in q"),
    (False, {"positions": torch.tensor([0, 1])}, ValueError, "positions must be of shape .* where tokens is 3 in q"),
    (False, {"positions": torch.ones(3)}, TypeError, "positions must be a tensor of int32 or int64, got float32"),
    (False, {"positions": torch.tensor([0, 10, 2])}, ValueError, "positions must be in 0 to 9, .* got 10 for token 1"),
    (False, {"positions": torch.tensor([0, 1, -1])}, ValueError, "positions must be in 0 to 9, .* got -1 for token 2"),
    (False, {"cos_sin_cache": torch.ones(10, 8).half()}, TypeError, "cos_sin_cache must be a tensor of float32, got float16"),
    (False, {"cos_sin_cache": torch.ones(10, 7)}, ValueError, "cos_sin_cache must be of an even rotary_dim"),
    (False, {"cos_sin_cache": torch.ones(10, 0)}, ValueError, "cos_sin_cache must be of an even rotary_dim"),
    (False, {"cos_sin_cache": torch.ones(10, 10)}, ValueError, "at most head_dim = 8 of q, got \\[10, 10\\]"),
    (False, {"cos_sin_cache": torch.ones(80)}, ValueError, "cos_sin_cache must be of shape"),
    (False, {"interleaved": None}, TypeError, "interleaved must be bool"),
    (False, {"q_out": torch.ones(3, 4, 4)}, ValueError, "q_out must have shape"),
    (False, {"k_out": torch.ones(3, 2, 8).half()}, TypeError, "k_out must be float32"),
    (False, {"v": torch.ones(3, 2, 8)}, ValueError, "k_cache must be given with v: .* are given together or not at all, got None"),
    (True, {"v": None}, ValueError, "v must be given with k_cache, v_cache, slot_mapping"),
    (True, {"k_cache": None}, ValueError, "k_cache must be given"),
    (True, {"v_cache": None}, ValueError, "v_cache must be given"),
    (True, {"slot_mapping": None}, ValueError, "slot_mapping must be given"),
    (True, {"v": torch.ones(3, 1, 8)}, ValueError, "v must be of shape .* where kv_heads is 2 in k"),
    (True, {"k_cache": torch.zeros(2, 2, 2, 8).half()}, TypeError, "k_cache must be a tensor of .*, got float16"),
    (True, {"v_cache": torch.zeros(2, 2, 2, 4)}, ValueError, "v_cache must be of shape"),
    (True, {"slot_mapping": torch.tensor([0, 1, 4])}, ValueError, "slot_mapping must be below .* = 4 .* got 4 for token 2"),
    (True, {"slot_mapping": torch.tensor([1, 0, 1])}, ValueError, "slot_mapping must be of distinct slots"),
    (True, {"slot_mapping": torch.tensor([0, 1, 2]).float()}, TypeError, "slot_mapping must be a tensor of int32 or int64"),
]


@pytest.mark.parametrize(("cache", "arguments", "error", "message"), WRONG)
def test_refuses(cache: bool, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    complete = {**arguments_for(cache), **arguments}
    with pytest.raises(error, match=f"^apply_rope: .*{message}"):
        apply_rope(**complete)
    for name in ("k_cache", "v_cache"):
        assert complete.get(name) is None or not complete[name].any(), "something was written"


def test_it_is_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(apply_rope, arguments_for())
    check_custom_op(apply_rope, {**arguments_for(), "interleaved": True, "q_out": torch.empty(3, 4, 8)})
    check_custom_op(apply_rope, {**arguments_for(cache=True), "slot_mapping": torch.tensor([3, -1, 0])})
    check_custom_op(apply_rope, {**arguments_for(cache=True), "k_out": torch.empty(3, 2, 8)})
