"""Latent attention of tokens to chosen slots, against the operator's reference."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_nvidia import _machine, _programs
from tokenspeed_kernel_nvidia.sm90.attention import mla_sparse
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import mla_merge_program
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import HEADS, LATENT, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse_config import PAGE_SIZES

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
    """A call with DeepSeek-V3's widths, whose tokens have so many keys each.

    Slots that no token chose hold NaN, and what lies behind a token's indices is no slot. The log-sum-exp is asked for.

    Args:
        holes: how many of the indices that count are -1.
        counted: give the lengths; otherwise -1 stands behind a token's indices.
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
    """Launches the kernel, twice, and compares the results to the reference's."""
    wanted, wanted_lse = tokenspeed_kernel.mla_sparse_with_kvcache(**arguments, solution="reference")
    out = torch.full_like(wanted, torch.nan)
    got, lse = mla_sparse.mla_sparse_with_kvcache(**{**arguments, "out": out})
    assert got is out
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    again, _ = mla_sparse.mla_sparse_with_kvcache(**arguments)
    assert torch.equal(again, got)


# -- on the device -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[0], [1], [64], [1, 63, 64, 65, 0, 127, 128, 129, 300], [2048], [2048, 1, 0, 700]], ids=str)
def test_lengths(sm90: torch.device, lengths: list[int], heads: int) -> None:
    """The edges of blocks, and tokens that many groups have a part of."""
    check(arguments_of(lengths, heads, device=sm90))


@pytest.mark.parametrize("tokens", [33, 200, 1500])
@pytest.mark.parametrize("heads", HEADS)
def test_many_tokens(sm90: torch.device, heads: int, tokens: int) -> None:
    """More than a lane's lengths, and more than there are groups."""
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
    mla_sparse.mla_sparse_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = mla_sparse.mla_sparse_with_kvcache(**arguments)
    for lengths in ([900, 70, 2000], [1, 70, 64], [0, 0, 1500]):
        arguments["topk_length"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments["indices"].copy_(arguments["indices"].roll(1, 1))
        graph.replay()
        wanted, _ = tokenspeed_kernel.mla_sparse_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.01)


# -- on the emulator -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated(multiprocessors: int, **options: Any) -> Iterator[None]:
    sm90_emulator = pytest.importorskip("sm90_emulator")
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():  # where other tests of this process launch programs on a GPU
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    _machine.multiprocessors.cache_clear()
    mla_sparse._programs_of.cache_clear()
    with sm90_emulator.emulated_sm90(multiprocessors=multiprocessors, uninitialised=True, **options):
        yield
    _machine.multiprocessors.cache_clear()
    mla_sparse._programs_of.cache_clear()


@pytest.mark.parametrize(
    ("heads", "lengths", "multiprocessors", "options"),
    [
        (128, [300, 130, 0, 3], 6, {"holes": 0.2}),  # three groups of two; one has parts of two tokens, and a token has parts in two
        (128, [130], 4, {"softmax_scale": 1.0, "page_size": 1, "counted": False}),  # maxima rise so much that sums are scaled anew
        (32, [70, 2, 66, 65], 3, {"holes": 0.9, "top_k": 200}),  # most blocks have no key at all
    ],
)
@pytest.mark.parametrize(("seed", "copies"), [(0, "early"), (3, "late"), (5, "random")])
def test_on_the_emulator(
    heads: int, lengths: list[int], multiprocessors: int, options: dict[str, Any], seed: int, copies: str
) -> None:
    """Whatever warp goes on first, and however late copies and products are."""
    with emulated(multiprocessors, seed=seed, copies=copies):
        check(arguments_of(lengths, heads, **options))
