"""Tests MLA decode against the operator's reference."""

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
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import launch as mla_decode
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, PAGE_SIZES, ROPE, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config

from . import launched
from .launched import Launched, as_operator

mla_decode_with_kvcache = as_operator(mla_decode.mla_decode_with_kvcache)

NAME = "cutedsl_mla_decode_with_kvcache"
NAME_FP8 = "cutedsl_mla_decode_with_kvcache_fp8"
E4M3 = torch.float8_e4m3fn
# Options of calls with an fp8 cache: queries and cache are fp8, or only the cache is fp8.
FP8: list[dict[str, Any]] = [{"dtype": E4M3, "scales": ("q_scale", "kv_scale")}, {"cache_dtype": E4M3, "scales": ("kv_scale",)}]
FP8_NAMES = ["fp8 queries", "fp8 cache"]
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)


def arguments_of(lengths: list[int], heads: int, new: int = 1, device: torch.device = CPU, **options: Any) -> dict[str, Any]:
    """Returns the arguments of a call with DeepSeek-V3's head dims. Slots without tokens are NaN, and the LSE is requested."""
    given = {"head_dim": LATENT + ROPE, "kv_lora_rank": LATENT, "page_size": 64, "softmax_scale": 0.1352, **options}
    case = Case("", paged(lengths, heads=heads, max_seqlen_q=new, stale=True, return_lse=True, **given))
    return dict(get_operator("attention.mla_decode_with_kvcache").complete(case.build(device, sum(lengths))))


def check(arguments: dict[str, Any]) -> None:
    launched.check(mla_decode_with_kvcache, tokenspeed_kernel.mla_decode_with_kvcache, arguments)


def check_fp8(arguments: dict[str, Any]) -> None:
    """Launches the kernel twice with an fp8 cache. The kernel rounds probabilities to e4m3, which gives each an rms error of
    2.6%."""
    launched.check_fp8(mla_decode_with_kvcache, tokenspeed_kernel.mla_decode_with_kvcache, arguments)


# -- on the device -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[0], [1], [64], [1, 63, 64, 65, 0, 127, 128, 129, 300], [9000, 1, 0, 700], [40000]], ids=str)
def test_lengths(sm90: torch.device, lengths: list[int], heads: int) -> None:
    """Tests lengths of one token and at the edges of blocks, and sequences that are split over all groups of CTAs."""
    check(arguments_of(lengths, heads, device=sm90))


@pytest.mark.parametrize("options", FP8, ids=FP8_NAMES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[0], [64], [1, 63, 65, 0, 129, 300], [9000, 1, 0, 700], [40000], [30000] * 150], ids=len)
def test_an_fp8_cache(sm90: torch.device, lengths: list[int], heads: int, options: dict[str, Any]) -> None:
    """Tests fp8 caches. Some ranges of keys are so long that the kernel accumulates their partial sums in memory."""
    if len(lengths) == 150 and heads != 128:
        pytest.skip("one program shows it")
    check_fp8(arguments_of(lengths, heads, device=sm90, **options))


@pytest.mark.parametrize("options", FP8, ids=FP8_NAMES)
@pytest.mark.parametrize("heads", HEADS)
def test_several_new_tokens_and_an_fp8_cache(sm90: torch.device, heads: int, options: dict[str, Any]) -> None:
    check_fp8(arguments_of([1, 20, 400, 0, 64, 3000, 2, 5], heads, 3, sm90, **options))


@pytest.mark.parametrize("batch", [33, 200, 500])
@pytest.mark.parametrize("heads", HEADS)
def test_many_sequences(sm90: torch.device, heads: int, batch: int) -> None:
    """Tests batches with more sequences than lanes of a warp, and more than groups of CTAs."""
    draw = random.Random(batch)
    check(arguments_of([draw.choice([0, 1, 64, draw.randrange(1500)]) for _ in range(batch)], heads, device=sm90))


@pytest.mark.parametrize("new", [2, 3, 4, 8])
@pytest.mark.parametrize("heads", HEADS)
def test_several_new_tokens(sm90: torch.device, heads: int, new: int) -> None:
    """Tests several new tokens for each sequence. Some sequences have fewer tokens in the cache than new tokens."""
    check(arguments_of([1, 20, 400, 0, 64, 3000, 2, 5], heads, new, sm90))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_every_program(sm90: torch.device, heads: int, page_size: int, dtype: torch.dtype) -> None:
    check(arguments_of([700, 3, 0, 1300], heads, device=sm90, page_size=page_size, dtype=dtype))


def test_a_graph_stays_right_when_lengths_change(sm90: torch.device) -> None:
    arguments = arguments_of([900, 70, 5000], 128, device=sm90)
    mla_decode_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = mla_decode_with_kvcache(**arguments)
    for lengths in ([900, 70, 5000], [1, 70, 64], [0, 0, 3000]):
        arguments["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        wanted, _ = tokenspeed_kernel.mla_decode_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.01)


# -- on the emulator -----------------------------------------------------------------------------------------------------------


emulated = partial(launched.emulated, mla_decode._programs_of)


@pytest.mark.parametrize(
    ("heads", "lengths", "sm_count", "options"),
    [
        (128, [700, 200, 0, 3], 6, {}),  # three clusters: one has keys of two sequences, and one sequence is in two clusters
        (128, [130, 1], 4, {"new": 2, "softmax_scale": 1.0}),  # row maxima rise so much that accumulators are rescaled
        (16, [1500], 7, {}),  # the sequence is split over all groups of CTAs
        (16, [300, 2, 66, 65], 3, {"new": 3}),  # a tile has several tokens
    ],
)
@pytest.mark.parametrize(("seed", "copies"), [(0, "early"), (3, "late"), (5, "random")])
def test_on_the_emulator(heads: int, lengths: list[int], sm_count: int, options: dict[str, Any], seed: int, copies: str) -> None:
    """Runs with warps in order and copies performed at issue, then with warps in random order and copies late or at random
    times."""
    with emulated(sm_count, seed=seed, copies=copies):
        check(arguments_of(lengths, heads, **options))


@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e30], ids=str)
def test_the_range_of_narrow_partial_results_on_the_emulator(magnitude: float) -> None:
    """Tests values of very different magnitudes. The kernel's narrow partial results are float16, which cannot represent the
    smallest and the largest of these values."""
    arguments = arguments_of([700], 128)
    arguments["q"].zero_()  # all scores are then 0, whatever the magnitude of the cache
    arguments["kv_cache"].mul_(magnitude)
    wanted, _ = tokenspeed_kernel.mla_decode_with_kvcache(**arguments, solution="reference")
    with emulated(8):
        got, _ = mla_decode_with_kvcache(**arguments)
    torch.testing.assert_close(got.float() / magnitude, wanted.float() / magnitude, rtol=0.01, atol=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "lengths", "sm_count", "options"),
    [(128, [130, 1], 2, FP8[0]), (16, [300, 2], 1, {"new": 3, "softmax_scale": 1.0, **FP8[1]})],
    ids=FP8_NAMES,
)
def test_an_fp8_cache_on_the_emulator(
    monkeypatch: pytest.MonkeyPatch, heads: int, lengths: list[int], sm_count: int, options: dict[str, Any]
) -> None:
    """Tests rising row maxima while two blocks of keys are accumulated in registers, and further blocks in memory. The emulator
    accumulates fp8 MMAs with as few bits as Hopper.
    """
    monkeypatch.setattr(mla_decode, "Fp8Config", partial(Fp8Config, summed=2))
    with emulated(sm_count, seed=3, copies="late", limited_fp8_accumulation=True):
        check_fp8(arguments_of(lengths, heads, **options))


def test_many_pages_on_the_emulator() -> None:
    """Tests more pages and more sequences than a warp has lanes."""
    with emulated(2):
        check(arguments_of([2600, *[1, 0, 64] * 11], 16))


# -- launches ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    yield from launched.recorded(mla_decode, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(16, 132), (32, 132), (64, 132), (128, 66)])
def test_used_programs_are_compiled_ahead_of_time(launches: list[Launched], heads: int, groups: int, dtype: torch.dtype) -> None:
    """Asserts that launches use programs that are compiled ahead of time. A group of CTAs has all heads: it is one CTA, or two CTAs
    with half of 128 heads each."""
    mla_decode_with_kvcache(**arguments_of([70, 3], heads, dtype=dtype))
    (computes, config, handed), (merges, same, others) = launches
    assert (computes, merges) == (mla_decode.mla_decode_program, mla_decode.mla_merge_program)
    assert config in computes.configs()
    assert same in merges.configs()
    assert (config.heads, handed[9], others[4]) == (heads, groups, groups)
    assert same == config
    assert config.narrow == (heads == 128)


@pytest.mark.parametrize(
    ("options", "dtype", "fp8_queries"),
    [(FP8[0], "bfloat16", True), (FP8[1], "bfloat16", False), ({**FP8[1], "dtype": torch.float16}, "float16", False)],
)
def test_an_fp8_cache_has_a_program_of_its_own(
    launches: list[Launched], options: dict[str, Any], dtype: str, fp8_queries: bool
) -> None:
    arguments = arguments_of([70, 3], 128, **options)
    got, _ = mla_decode_with_kvcache(**arguments)
    (computes, config, handed), (merges, same, _) = launches
    assert (computes, merges) == (mla_decode.mla_decode_fp8_program, mla_decode.mla_merge_program)
    assert config in computes.configs()
    assert same in merges.configs()
    assert (config, str(got.dtype)) == (Fp8Config(dtype, 128, fp8_queries), f"torch.{dtype}")
    assert same == Config(dtype, 128)  # partial results are float32, because the fp8 program accumulates in them
    assert handed[1].dtype == torch.uint8
    scales = [arguments[name] for name in ("q_scale", "kv_scale")]
    assert handed[-2:] == tuple(0 if scale is None else scale.data_ptr() for scale in scales)


def test_sequences_of_one_block_leave_nothing_to_merge(launches: list[Launched]) -> None:
    mla_decode_with_kvcache(**{**arguments_of([64, 3], 16), "max_seqlen_k": 64})
    assert [program for program, _, _ in launches] == [mla_decode.mla_decode_program]


def test_other_layouts_are_copied(launches: list[Launched]) -> None:
    arguments = arguments_of([70, 3], 16)

    def apart(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    out = apart(torch.zeros(2, 16, LATENT, dtype=torch.bfloat16))
    changed = {name: apart(arguments[name]) for name in ("q", "kv_cache", "page_table", "cache_seqlens")}
    got, lse = mla_decode_with_kvcache(**{**arguments, **changed, "out": out})
    assert got is out
    assert lse.shape == (2, 16)
    (_, _, handed), (_, _, others) = launches
    assert others[0] is handed[2]
    for tensor, name in zip(handed, ("q", "kv_cache", "", "page_table", "cache_seqlens"), strict=False):
        assert tensor.is_contiguous()
        assert not name or torch.equal(tensor.nan_to_num(), arguments[name].nan_to_num())


def test_an_empty_cache_and_an_empty_batch(launches: list[Launched]) -> None:
    arguments = arguments_of([0, 0], 16)
    mla_decode_with_kvcache(**{**arguments, "kv_cache": arguments["kv_cache"][:0]})
    assert launches[0][2][1].shape == (1, 64, LATENT + ROPE)
    launches.clear()
    out, lse = mla_decode_with_kvcache(**{**arguments, "q": arguments["q"][:0]})
    assert (out.shape, lse.shape) == ((0, 16, LATENT), (0, 16))
    assert launches == []


# -- declarations --------------------------------------------------------------------------------------------------------------


def _verdict(arguments: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether the kernel is eligible for a call, and which kernel is selected."""
    with use_platform(named_platform("sm_90")):
        explained = tokenspeed_kernel.mla_decode_with_kvcache.explain(**arguments)
    accepted = [verdict.accepted for verdict in explained.verdicts if verdict.spec.name == NAME]
    return accepted == [True], str(explained.chosen.name)


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"heads": 128}, True),
        ({"heads": 16, "new": 5}, True),
        ({"heads": 64, "page_size": 128, "dtype": torch.float16}, True),
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
    assert _verdict(arguments_of([70, 3], **options))[0] == served


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_preferred(registered: KernelRegistry, heads: int) -> None:
    assert registered.get_by_name(NAME).priority == Priority.SPECIALIZED
    assert _verdict(arguments_of([70, 3], heads))[1] == NAME


@pytest.mark.parametrize("options", FP8, ids=FP8_NAMES)
def test_an_fp8_cache_is_supported(registered: KernelRegistry, options: dict[str, Any]) -> None:
    def chosen(**others: Any) -> str:
        with use_platform(named_platform("sm_90")):
            return str(tokenspeed_kernel.mla_decode_with_kvcache.explain(**arguments_of([70, 3], **options, **others)).chosen.name)

    assert {heads: chosen(heads=heads) for heads in HEADS} == dict.fromkeys(HEADS, NAME_FP8)
    assert NAME_FP8 not in (chosen(heads=8), chosen(heads=128, window_left=100), chosen(heads=128, page_size=32))
