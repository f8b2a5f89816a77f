"""Tests MLA extend (many new tokens) against the operator's reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, PAGE_SIZES, ROPE
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend import launch as mla_extend
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import Fp8Config

from . import launched
from .launched import Launched, as_operator

mla_extend_with_kvcache = as_operator(mla_extend.mla_extend_with_kvcache)

NAME = "cutedsl_mla_extend_with_kvcache"
NAME_FP8 = "cutedsl_mla_extend_with_kvcache_fp8"
E4M3 = torch.float8_e4m3fn
# Options of calls with an fp8 cache: queries and cache are fp8, or only the cache is fp8.
FP8: list[dict[str, Any]] = [{"dtype": E4M3, "scales": ("q_scale", "kv_scale")}, {"cache_dtype": E4M3, "scales": ("kv_scale",)}]
FP8_NAMES = ["fp8 queries", "fp8 cache"]
CPU = torch.device("cpu")


def arguments_of(lengths: list[int], new: list[int], heads: int, device: torch.device = CPU, **options: Any) -> dict[str, Any]:
    """Returns the arguments of a call with DeepSeek-V3's head dims. Slots without tokens are NaN, and the LSE is requested."""
    widths = {"head_dim": LATENT + ROPE, "kv_lora_rank": LATENT, "page_size": 64, "softmax_scale": 0.1352, "is_causal": True}
    case = Case("", paged(lengths, new, heads=heads, **{**widths, "stale": True, "return_lse": True, **options}))
    return dict(get_operator("attention.mla_extend_with_kvcache").complete(case.build(device, sum(lengths))))


def check(arguments: dict[str, Any]) -> None:
    launched.check(mla_extend_with_kvcache, tokenspeed_kernel.mla_extend_with_kvcache, arguments)


def check_fp8(arguments: dict[str, Any]) -> None:
    """Launches the kernel twice with an fp8 cache. The kernel rounds probabilities to e4m3, which gives each an rms error of
    2.6%."""
    launched.check_fp8(mla_extend_with_kvcache, tokenspeed_kernel.mla_extend_with_kvcache, arguments)


def drawn(count: int) -> tuple[list[int], list[int]]:
    """Returns the random lengths of ``count`` sequences, and how many of each sequence's tokens are new."""
    draw = random.Random(count)
    lengths = [draw.choice([0, 1, 64, draw.randrange(900)]) for _ in range(count)]
    return lengths, [draw.choice([0, min(length, 1), length, draw.randint(0, length)]) for length in lengths]


# -- on the device -------------------------------------------------------------------------------------------------------------

SHAPES = [
    ([1], [1]),
    ([64, 65, 0, 130, 63, 200], [64, 3, 0, 129, 1, 0]),
    ([5000, 9, 700], [70, 9, 1]),
    ([40000], [2]),
    ([2000, 1500], [900, 1500]),
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("lengths", "new"), SHAPES, ids=str)
def test_lengths(sm90: torch.device, lengths: list[int], new: list[int], heads: int, is_causal: bool) -> None:
    """Tests lengths at the edges of blocks, and long sequences with few and with many new tokens."""
    check(arguments_of(lengths, new, heads, sm90, is_causal=is_causal))


@pytest.mark.parametrize("options", FP8, ids=FP8_NAMES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("lengths", "new"), SHAPES, ids=str)
def test_an_fp8_cache(sm90: torch.device, lengths: list[int], new: list[int], heads: int, options: dict[str, Any]) -> None:
    check_fp8(arguments_of(lengths, new, heads, sm90, **options))


@pytest.mark.parametrize("batch", [33, 200])
@pytest.mark.parametrize("heads", HEADS)
def test_many_sequences(sm90: torch.device, heads: int, batch: int) -> None:
    """Tests a batch with more sequences than lanes of a warp, and more than groups of CTAs."""
    check(arguments_of(*drawn(batch), heads, sm90))


@pytest.mark.parametrize("heads", [64, 128])
def test_runs_agree(sm90: torch.device, heads: int) -> None:
    """Asserts that many runs of thousands of short work items agree. A buffer that one CTA of a cluster releases must have been
    read before the other CTA overwrites it.
    """
    arguments = arguments_of(*drawn(200), heads, sm90)
    first, _ = mla_extend_with_kvcache(**arguments)
    for _ in range(60):
        again, _ = mla_extend_with_kvcache(**arguments)
        assert torch.equal(again, first)


@pytest.mark.parametrize("heads", HEADS)
def test_more_queries_than_keys(sm90: torch.device, heads: int) -> None:
    """Tests sequences with more queries than keys. Some queries see no key."""
    check(arguments_of([30, 0, 300], [40, 5, 400], heads, sm90, is_causal=False))


@pytest.mark.parametrize("new", [[100, 3, 0, 1], [1, 1, 0, 1]])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_every_program(sm90: torch.device, heads: int, page_size: int, new: list[int]) -> None:
    check(arguments_of([700, 3, 0, 1300], new, heads, sm90, page_size=page_size))


def test_a_graph_stays_right_when_lengths_change(sm90: torch.device) -> None:
    arguments = arguments_of([900, 70, 5000], [100, 70, 30], 128, sm90)
    mla_extend_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = mla_extend_with_kvcache(**arguments)
    for lengths, offsets in (
        ([900, 70, 5000], [0, 100, 170, 200]),
        ([150, 70, 64], [0, 90, 100, 160]),
        ([99, 0, 3000], [0, 99, 99, 99]),
    ):
        arguments["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments["cu_seqlens_q"].copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        case = {**arguments, "q": arguments["q"][: offsets[-1]], "cu_seqlens_kv": None}
        wanted, _ = tokenspeed_kernel.mla_extend_with_kvcache(**case, solution="reference")
        torch.testing.assert_close(got[: offsets[-1]], wanted, rtol=0.02, atol=0.01)


# -- on the emulator -----------------------------------------------------------------------------------------------------------


emulated = partial(launched.emulated, mla_extend._programs_of)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("heads", "lengths", "new", "sm_count", "options"),
    [
        (128, [130, 0, 3, 70], [3, 0, 3, 1], 6, {}),  # three clusters, some of which begin within a sequence
        (128, [130, 65], [2, 1], 2, {"softmax_scale": 1.0}),  # row maxima rise so much that accumulators are rescaled
        (16, [300, 2, 0, 66, 65], [21, 2, 0, 9, 1], 4, {}),  # some tiles have fewer tokens, and some sequences have no tile
        (16, [700, 130], [9, 8], 10, {"is_causal": False}),
        (64, [20, 0, 70], [30, 3, 71], 2, {"is_causal": False}),  # more queries than keys
        (32, [200, 128], [70, 64], 6, {"page_size": 128}),
        (16, [300, 2, 0, 66, 65], [4, 2, 0, 1, 3], 3, {}),  # one tile has all new tokens of a sequence: no clusters
    ],
)
@pytest.mark.parametrize(("seed", "copies"), [(0, "early"), (3, "random")])
def test_on_the_emulator(
    heads: int, lengths: list[int], new: list[int], sm_count: int, options: dict[str, Any], seed: int, copies: str
) -> None:
    """Runs with warps in order and copies performed at issue, then with warps in random order and copies at random times."""
    with emulated(sm_count, seed=seed, copies=copies):
        check(arguments_of(lengths, new, heads, **options))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "lengths", "new", "sm_count", "options"),
    [
        (128, [130, 1], [2, 1], 2, FP8[0]),
        (16, [300, 66], [9, 5], 4, {"softmax_scale": 1.0, **FP8[1]}),
        (16, [200, 3], [3, 1], 2, FP8[0]),  # no clusters
    ],
)
def test_an_fp8_cache_on_the_emulator(
    monkeypatch: pytest.MonkeyPatch, heads: int, lengths: list[int], new: list[int], sm_count: int, options: dict[str, Any]
) -> None:
    """Tests rising row maxima while two blocks of keys are accumulated in registers, and further blocks in memory. The emulator
    accumulates fp8 MMAs with as few bits as Hopper.
    """
    monkeypatch.setattr(mla_extend, "Fp8Config", partial(Fp8Config, summed=2))
    with emulated(sm_count, seed=3, copies="late", limited_fp8_accumulation=True):
        check_fp8(arguments_of(lengths, new, heads, **options))


def test_many_sequences_on_the_emulator() -> None:
    """Tests a batch with more sequences than a warp has lanes."""
    lengths, new = drawn(40)
    lengths = [length % 130 for length in lengths]
    with emulated(4):
        check(arguments_of(lengths, [min(count % 20, length) for count, length in zip(new, lengths, strict=True)], 16))


# -- launches ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    yield from launched.recorded(mla_extend, monkeypatch)


@pytest.mark.parametrize(
    ("heads", "new", "groups"), [(16, 5, 66), (32, 3, 66), (64, 2, 66), (128, 1, 66), (16, 4, 132), (64, 1, 132)]
)
def test_used_programs_are_compiled_ahead_of_time(launches: list[Launched], heads: int, new: int, groups: int) -> None:
    """Asserts that launches use programs that are compiled ahead of time. A group of CTAs is a cluster of two CTAs, or one CTA if a
    tile has all new tokens of a sequence."""
    mla_extend_with_kvcache(**arguments_of([70, 3], [new, 1], heads))
    (computes, config, handed), (merges, same, others) = launches
    assert (computes, merges) == (mla_extend.mla_extend_program, mla_extend.mla_extend_merge_program)
    assert config in computes.configs()
    assert same in merges.configs()
    assert (config.heads, handed[11], others[5]) == (heads, groups, groups)


@pytest.mark.parametrize(("options", "narrow"), [(FP8[0], True), (FP8[1], False)], ids=FP8_NAMES)
def test_an_fp8_cache_has_a_program_of_its_own(launches: list[Launched], options: dict[str, Any], narrow: bool) -> None:
    arguments = arguments_of([70, 3], [9, 3], 64, **options)
    got, _ = mla_extend_with_kvcache(**arguments)
    (computes, config, handed), (merges, same, _) = launches
    assert (computes, merges) == (mla_extend.mla_extend_fp8_program, mla_extend.mla_extend_merge_program)
    assert config in computes.configs()
    assert same in merges.configs()
    assert (config, got.dtype) == (Fp8Config("bfloat16", 64, narrow), torch.bfloat16)
    assert handed[1].dtype == torch.uint8
    scales = [arguments[name] for name in ("q_scale", "kv_scale")]
    assert handed[-2:] == tuple(0 if scale is None else scale.data_ptr() for scale in scales)


@pytest.mark.parametrize(("is_causal", "bound", "handed_on"), [(True, 1000, 70), (True, 50, 50), (False, 1000, 73)])
def test_a_loose_bound_of_new_tokens_is_tightened(launches: list[Launched], is_causal: bool, bound: int, handed_on: int) -> None:
    """Asserts that the launcher lowers a loose bound to the total number of new tokens, and for causal attention to
    max_seqlen_k."""
    arguments = arguments_of([70, 3], [70, 3], 16, is_causal=is_causal)
    mla_extend_with_kvcache(**{**arguments, "max_seqlen_q": bound, "max_seqlen_k": 70})
    assert [arguments[8] for _, _, arguments in launches[:1]] == [arguments[4] for _, _, arguments in launches[1:]] == [handed_on]


def test_sequences_of_one_block_leave_nothing_to_merge(launches: list[Launched]) -> None:
    mla_extend_with_kvcache(**{**arguments_of([64, 3], [20, 3], 16), "max_seqlen_k": 64})
    assert [program for program, _, _ in launches] == [mla_extend.mla_extend_program]


def test_other_layouts_are_copied(launches: list[Launched]) -> None:
    arguments = arguments_of([70, 3], [2, 3], 16)

    def apart(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    out = apart(torch.zeros(5, 16, LATENT, dtype=torch.bfloat16))
    names = ("q", "kv_cache", "page_table", "cache_seqlens", "cu_seqlens_q")
    got, lse = mla_extend_with_kvcache(**{**arguments, **{name: apart(arguments[name]) for name in names}, "out": out})
    assert got is out
    assert lse.shape == (5, 16)
    (_, _, handed), (_, _, others) = launches
    assert others[0] is handed[2]
    assert others[1].is_contiguous()
    for tensor, name in zip(handed, ("q", "kv_cache", "", "page_table", "cache_seqlens", "cu_seqlens_q"), strict=False):
        assert tensor.is_contiguous()
        assert not name or torch.equal(tensor.nan_to_num(), arguments[name].nan_to_num())


def test_an_empty_cache_and_no_new_tokens(launches: list[Launched]) -> None:
    arguments = arguments_of([0, 0], [2, 0], 16, is_causal=False)
    mla_extend_with_kvcache(**{**arguments, "kv_cache": arguments["kv_cache"][:0]})
    assert launches[0][2][1].shape == (1, 64, LATENT + ROPE)
    launches.clear()
    out, lse = mla_extend_with_kvcache(**arguments_of([70, 3], [0, 0], 16))
    assert (out.shape, lse.shape) == ((0, 16, LATENT), (0, 16))
    assert launches == []


# -- declarations --------------------------------------------------------------------------------------------------------------


def _verdict(arguments: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether the kernel is eligible for a call, and which kernel is selected."""
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.mla_extend_with_kvcache.explain(**arguments)
    accepted = [verdict.accepted for verdict in explained.verdicts if verdict.spec.name == NAME]
    return accepted == [True], str(explained.chosen.name)


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"heads": 128}, True),
        ({"heads": 16, "is_causal": False}, True),
        ({"heads": 64, "page_size": 128}, True),
        ({"heads": 64, "dtype": torch.float16}, False),
        ({"heads": 8}, False),
        ({"heads": 128, "page_size": 32}, False),
        ({"heads": 128, "window_left": 100}, False),
        ({"heads": 128, "logit_cap": 5.0}, False),
        ({"heads": 128, "cache_dtype": E4M3}, False),
        ({"heads": 16, "head_dim": 320, "kv_lora_rank": 256}, False),
    ],
    ids=str,
)
def test_eligible_calls(registered: KernelRegistry, options: dict[str, Any], served: bool) -> None:
    assert _verdict(arguments_of([70, 3], [9, 3], **options))[0] == served


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_preferred(registered: KernelRegistry, heads: int) -> None:
    assert registered.get_by_name(NAME).priority == Priority.SPECIALIZED
    assert _verdict(arguments_of([70, 3], [9, 3], heads))[1] == NAME


@pytest.mark.parametrize("options", FP8, ids=FP8_NAMES)
def test_an_fp8_cache_is_supported(registered: KernelRegistry, options: dict[str, Any]) -> None:
    def chosen(**others: Any) -> str:
        given = {**options, **others}
        with use_platform(named_platform("sm_90")):
            return str(tokenspeed_kernel.mla_extend_with_kvcache.explain(**arguments_of([70, 3], [9, 3], **given)).chosen.name)

    assert {heads: chosen(heads=heads) for heads in HEADS} == dict.fromkeys(HEADS, NAME_FP8)
    assert NAME_FP8 not in (chosen(heads=8), chosen(heads=128, window_left=100), chosen(heads=128, page_size=32))
