"""Tests sparse MLA of tokens to selected slots against the operator's reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.launch import mla_merge_program
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse import launch as mla_sparse
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.config import PAGE_SIZES

from . import launched
from .launched import Launched, as_operator

mla_sparse_with_kvcache = as_operator(mla_sparse.mla_sparse_with_kvcache)

NAME = "cutedsl_mla_sparse_with_kvcache"
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
FAR = torch.iinfo(torch.int32).max


def arguments_of(
    lengths: list[int],
    heads: int,
    top_k: int = 0,
    device: torch.device = CPU,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    holes: float = 0.0,
    softmax_scale: float = 0.1352,
    counted: bool = True,
) -> dict[str, Any]:
    """Returns the arguments of a call with DeepSeek-V3's head dims, whose tokens have these numbers of keys.

    Slots that no token selected are NaN. Indices past a token's last key are invalid. The LSE is requested.

    Args:
        holes: how many of a token's valid positions have index -1.
        counted: whether the lengths are passed; otherwise -1 follows a token's indices.
    """
    draw = torch.Generator().manual_seed(sum(lengths) + heads)
    top_k = top_k or max([1, *lengths])
    slots = -(-(top_k + 40) // page_size) * page_size
    indices = torch.stack([torch.randperm(slots, generator=draw)[:top_k] for _ in lengths]).to(torch.int32)
    indices[torch.rand(indices.shape, generator=draw) < holes] = -1
    kept = torch.arange(top_k) < torch.tensor(lengths).unsqueeze(1)
    used = indices[kept & (indices >= 0)].long()
    cache = torch.full((slots, LATENT + ROPE), torch.nan, dtype=dtype)
    cache[used] = torch.randn(len(used), LATENT + ROPE, generator=draw).to(dtype)
    return {
        "q": torch.randn(len(lengths), heads, LATENT + ROPE, generator=draw).to(device, dtype),
        "kv_cache": cache.view(-1, page_size, LATENT + ROPE).to(device),
        "indices": torch.where(kept, indices, FAR if counted and device == CPU else -1).to(device),
        "kv_lora_rank": LATENT,
        "softmax_scale": softmax_scale,
        "topk_length": torch.tensor(lengths, dtype=torch.int32).to(device) if counted else None,
        "return_lse": True,
    }


def check(arguments: dict[str, Any]) -> None:
    launched.check(mla_sparse_with_kvcache, tokenspeed_kernel.mla_sparse_with_kvcache, arguments)


# -- on the device -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[0], [1], [64], [1, 63, 64, 65, 0, 127, 128, 129, 300], [2048], [2048, 1, 0, 700]], ids=str)
def test_lengths(sm90: torch.device, lengths: list[int], heads: int) -> None:
    """Tests numbers of keys at the edges of blocks, and tokens whose keys are split over many groups of CTAs."""
    check(arguments_of(lengths, heads, device=sm90))


@pytest.mark.parametrize("tokens", [33, 200, 1500])
@pytest.mark.parametrize("heads", HEADS)
def test_many_tokens(sm90: torch.device, heads: int, tokens: int) -> None:
    """Tests more tokens than lanes of a warp, and more than groups of CTAs."""
    draw = random.Random(tokens)
    check(arguments_of([draw.choice([0, 1, 64, draw.randrange(700)]) for _ in range(tokens)], heads, device=sm90, holes=0.1))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_every_program(sm90: torch.device, heads: int, page_size: int, dtype: torch.dtype) -> None:
    check(arguments_of([700, 3, 0, 1300], heads, device=sm90, page_size=page_size, dtype=dtype, counted=False))


def test_a_graph_stays_right_when_indices_change(sm90: torch.device) -> None:
    arguments = arguments_of([900, 70, 2000], 128, device=sm90)
    arguments["kv_cache"].nan_to_num_()
    mla_sparse_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = mla_sparse_with_kvcache(**arguments)
    for lengths in ([900, 70, 2000], [1, 70, 64], [0, 0, 1500]):
        arguments["topk_length"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments["indices"].copy_(arguments["indices"].roll(1, 1))
        graph.replay()
        wanted, _ = tokenspeed_kernel.mla_sparse_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.01)


# -- on the emulator -----------------------------------------------------------------------------------------------------------


emulated = partial(launched.emulated, mla_sparse._programs_of)


@pytest.mark.parametrize(
    ("lengths", "sm_count", "options", "seed", "copies"),
    [
        # There are three groups of CTAs. One group has keys of two tokens, and the keys of one token are split over two groups.
        ([300, 130, 0, 3], 6, {"holes": 0.2}, 3, "late"),
        ([300, 130, 0, 3], 6, {"holes": 0.2}, 5, "random"),
        # Row maxima rise so much that accumulators are rescaled.
        ([130, 70], 4, {"softmax_scale": 1.0, "page_size": 1, "counted": False}, 1, "random"),
        # One block has no key.
        ([2, 65], 2, {"holes": 0.97, "top_k": 200}, 2, "late"),
    ],
)
def test_on_the_emulator(lengths: list[int], sm_count: int, options: dict[str, Any], seed: int, copies: str) -> None:
    """Runs with late copies and wgmmas, and with copies and wgmmas at random times. Warps run in random order."""
    with emulated(sm_count, seed=seed, copies=copies):
        check(arguments_of(lengths, 128, **options))


# -- launches ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    yield from launched.recorded(mla_sparse, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(16, 132), (32, 132), (64, 132), (128, 66)])
def test_used_programs_are_compiled_ahead_of_time(launches: list[Launched], heads: int, groups: int, dtype: torch.dtype) -> None:
    """Asserts that launches use programs that are compiled ahead of time. A group of CTAs has all heads: it is one CTA, or two CTAs
    with half of 128 heads each."""
    mla_sparse_with_kvcache(**arguments_of([70, 3], heads, dtype=dtype))
    (computes, config, handed), (merges, same, others) = launches
    assert (computes, merges) == (mla_sparse.mla_sparse_program, mla_merge_program)
    assert config in computes.configs()
    assert same in merges.configs()
    assert (config.heads, handed[7], others[4]) == (heads, groups, groups)


def test_tokens_of_one_block_leave_nothing_to_merge(launches: list[Launched]) -> None:
    mla_sparse_with_kvcache(**arguments_of([64, 3], 16))
    assert [program for program, _, _ in launches] == [mla_sparse.mla_sparse_program]


def test_other_layouts_are_copied(launches: list[Launched]) -> None:
    arguments = arguments_of([70, 3], 16)

    def apart(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    out = apart(torch.zeros(2, 16, LATENT, dtype=torch.bfloat16))
    changed = {name: apart(arguments[name]) for name in ("q", "kv_cache", "indices")}
    got, lse = mla_sparse_with_kvcache(**{**arguments, **changed, "out": out})
    assert got is out
    assert lse.shape == (2, 16)
    (_, _, handed), (_, _, others) = launches
    assert others[0] is handed[2]
    for tensor, name in zip(handed, ("q", "kv_cache", "", "indices"), strict=False):
        assert tensor.is_contiguous()
        assert not name or torch.equal(tensor.nan_to_num(), arguments[name].nan_to_num())


def test_an_empty_cache_and_an_empty_batch(launches: list[Launched]) -> None:
    arguments = arguments_of([0, 0], 16)
    mla_sparse_with_kvcache(**{**arguments, "kv_cache": arguments["kv_cache"][:0]})
    assert launches[0][2][1].shape == (1, 64, LATENT + ROPE)
    launches.clear()
    out, lse = mla_sparse_with_kvcache(**{**arguments, "q": arguments["q"][:0], "indices": arguments["indices"][:0]})
    assert (out.shape, lse.shape) == ((0, 16, LATENT), (0, 16))
    assert launches == []


# -- declarations --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"heads": 128}, True),
        ({"heads": 16, "page_size": 1}, True),
        ({"heads": 64, "page_size": 256, "dtype": torch.float16}, True),
        ({"heads": 8}, False),
        ({"heads": 128, "page_size": 24}, False),
        ({"heads": 128, "dtype": torch.float32}, False),
    ],
    ids=str,
)
def test_eligible_calls(registered: KernelRegistry, options: dict[str, Any], served: bool) -> None:
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.mla_sparse_with_kvcache.explain(**arguments_of([70, 3], **options))
    assert [verdict.accepted for verdict in explained.verdicts if verdict.spec.name == NAME] == [served]
