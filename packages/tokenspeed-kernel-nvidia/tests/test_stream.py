"""Tests MoE experts for few tokens against float32, the choice of programs, and the launcher's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel_base.ops.moe import moe_apply as declared
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_base.workspace import Keeper, Workspace, keeper
from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.sm90.moe import moe_apply
from tokenspeed_kernel_nvidia.sm90.moe.stream import launch as stream
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import (
    BUFFERS,
    GROUPS,
    LIST_BYTES,
    MAX_EXPERTS,
    MAX_PAIRS,
    MAX_TOP_K,
    OTHER_BYTES,
    SHARED_BYTES,
    Config,
    config_of,
    entries_of,
    every_config,
    max_k,
)

from .experts import GPT_OSS, RandomLayer, compare

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


class Layer(RandomLayer):
    """A layer that calls the kernel for few tokens."""

    apply = staticmethod(stream.moe_apply_few)


# -- on the device: results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "top_k", "counts", "options"),
    [
        (8, 96, 64, 4, (1, 7), GPT_OSS),
        (8, 64, 96, 2, (7,), {}),
        (4, 96, 64, 4, (9,), {"dtype": torch.float16}),
        (128, 2880, 2880, 4, (1, 16, 64), GPT_OSS),
        (128, 2880, 2880, 4, (64,), {**GPT_OSS, "dtype": torch.float16}),
        (4, 2880, 2880, 4, (40,), GPT_OSS),  # several entries per expert
        (384, 1024, 512, 8, (33,), GPT_OSS),
        (8, 7168, 2048, 8, (5,), GPT_OSS),
        (8, 32, 32, 1, (6,), GPT_OSS),
        (16, 192, 160, 4, (300,), GPT_OSS),  # more pairs than one launch supports
    ],
    ids=str,
)
def test_shapes(
    sm90: torch.device, experts: int, hidden: int, intermediate: int, top_k: int, counts: tuple[int, ...], options: dict[str, Any]
) -> None:
    layer = Layer(sm90, experts, top_k, hidden, intermediate, **options)
    for count in counts:
        layer.check(*layer.tokens(count))


@pytest.mark.parametrize("options", [{"bias": True}, {"limit": 0.5}, {"w13_interleaved": True, "beta": 0.5}], ids=str)
def test_options(sm90: torch.device, options: dict[str, Any]) -> None:
    layer = Layer(sm90, 8, 2, 192, 160, **options)
    layer.check(*layer.tokens(20))


def test_skipped_slots_and_empty_experts(sm90: torch.device) -> None:
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(40)
    ids[ids % 3 == 0] = -1  # six experts have no pairs
    ids[17] = -7
    weights[ids < 0] = torch.nan
    got = layer.run(x, weights, ids)
    compare(got, layer.wanted(x, weights, ids))
    assert (got[17] == 0).all()
    out = torch.full_like(x, torch.nan)
    assert (layer.run(x, weights, torch.full_like(ids, -1), out) == 0).all()
    layer.check(x, weights.nan_to_num(), torch.where(ids == 4, ids, -1))  # only one expert has pairs


def test_one_expert_for_all(sm90: torch.device) -> None:
    layer = Layer(sm90, 16, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(100)
    layer.check(x, weights, torch.full_like(ids, 5))  # each token has expert 5 more than once


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_few_tokens(sm90: torch.device, dtype: torch.dtype, count: int) -> None:
    """Tests tokens that choose an expert twice, and experts with two entries."""
    layer = Layer(sm90, 16, 4, 192, 160, dtype=dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(count)
    layer.check(x, weights, ids)
    for chosen in ([3, 3, 3, 3], [2, 9, 2, 9], [5, -1, 5, 15]):
        layer.check(x, weights, torch.tensor([chosen] * count, dtype=torch.int32, device=sm90))
    first = layer.run(x, weights, ids)
    for _ in range(20):
        assert torch.equal(layer.run(x, weights, ids), first)


@pytest.mark.parametrize("pairs", [31, 32, 33])
def test_lists_of_a_warp_and_of_a_cta(sm90: torch.device, pairs: int) -> None:
    """Tests numbers of pairs around 32. Up to 32 pairs are sorted by one warp, more pairs by all warps of a CTA."""
    layer = Layer(sm90, 24, 1, 96, 64, **GPT_OSS)
    x, weights, ids = layer.tokens(pairs)
    ids[pairs // 2] = -1
    layer.check(x, weights, ids)


def test_no_tokens(sm90: torch.device) -> None:
    layer = Layer(sm90, 4, 2, 64, 64)
    call = layer.tokens(0)
    assert layer.run(*call).shape == (0, 64)
    out = torch.empty_like(call[0])
    assert layer.run(*call, out) is out


@pytest.mark.parametrize("count", [1, 20])
def test_strides(sm90: torch.device, count: int) -> None:
    layer = Layer(sm90, 8, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(count)
    wanted = layer.wanted(x, weights, ids)
    weights, ids = weights.t().contiguous().t(), ids.t().contiguous().t()
    # In the first case, rows are aligned. In the second, rows begin at addresses that are not multiples of 16 bytes. In the third,
    # the pitch of rows is not a multiple of 16 bytes.
    for first, width in ((8, 400), (3, 400), (8, 397)):
        wide_x, wide_out = (torch.full((count, width), 7.0, dtype=x.dtype, device=sm90) for _ in range(2))
        wide_x[:, first : first + 192] = x
        out = wide_out[:, first : first + 192]
        assert layer.run(wide_x[:, first : first + 192], weights, ids, out) is out
        compare(out, wanted)
        assert (wide_out[:, :first] == 7).all()
        assert (wide_out[:, first + 192 :] == 7).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
def test_rows_of_zeros_and_with_an_outlier(sm90: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Tests rows of zeros, and outliers. The kernel scales each row by the row's amax. This amax may be far from other rows' amax,
    and from the other elements of the row."""
    layer = Layer(sm90, 4, 4, 96, 160, dtype=dtype, **options)
    x, weights, ids = layer.tokens(9)
    x[2] = 0
    x[5] *= 1e-3
    x[5, 41] = 10.0
    x[6] *= 1e-2
    got, wanted = layer.run(x, weights, ids), layer.wanted(x, weights, ids)
    if not options:
        assert (got[2] == 0).all()
    if dtype == torch.float16 and not options:  # row 6: too small for float16's full precision
        x, got, wanted = (torch.cat((rows[:6], rows[7:])) for rows in (x, got, wanted))
    for row in range(len(x)):
        compare(got[row : row + 1], wanted[row : row + 1])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nan_and_infinity_stay_in_their_token(sm90: torch.device, dtype: torch.dtype) -> None:
    layer = Layer(sm90, 4, 4, 96, 160, dtype=dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(9)
    x[2, 40], x[5, 3], x[8, 95] = torch.nan, torch.inf, -torch.inf
    got, wanted = layer.run(x, weights, ids), layer.wanted(x, weights, ids)
    broken = torch.tensor([2, 5, 8], device=sm90)
    assert got[broken].isnan().all()
    others = (torch.arange(9, device=sm90)[:, None] != broken).all(-1)
    compare(got[others], wanted[others])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_less_exact_than_the_portable_kernel(sm90: torch.device, dtype: torch.dtype) -> None:
    core = pytest.importorskip("tokenspeed_kernel")
    layer = Layer(sm90, 32, 4, 960, 640, dtype=dtype, **GPT_OSS)
    call = layer.tokens(16)
    plan = core.moe_apply.plan(
        32, 4, 960, 640, dtype=dtype, weight_format="mxfp4", device=sm90, override="triton_moe_apply_mxfp4", **GPT_OSS
    )  # fmt: skip
    portable = core.moe_apply(call[0], core.moe_apply.prepare(layer.given, plan), *call[1:], plan)
    wanted = layer.wanted(*call)
    ours, others = ((got.float() - wanted).square().mean().sqrt().item() for got in (layer.run(*call), portable))
    assert ours <= 1.2 * others


def test_same_bits_every_time(sm90: torch.device) -> None:
    layer = Layer(sm90, 32, 4, 960, 640, **GPT_OSS)
    call = layer.tokens(16)
    first = layer.run(*call)
    for _ in range(20):
        assert torch.equal(layer.run(*call), first)


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "top_k", "counts", "dtype"),
    [
        (8, 96, 64, 4, (1, 7), torch.bfloat16),
        (8, 64, 96, 2, (7, 60), torch.float16),
        (128, 2880, 2880, 4, (1, 16, 64, 256), torch.bfloat16),
        (128, 2880, 2880, 4, (64,), torch.float16),
        (4, 2880, 2880, 4, (40,), torch.bfloat16),  # several entries per expert
        (384, 1024, 512, 8, (33,), torch.bfloat16),
        (8, 7168, 2048, 8, (5, 40), torch.float16),
    ],
    ids=str,
)
def test_fp8_activations(
    sm90: torch.device, experts: int, hidden: int, intermediate: int, top_k: int, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Asserts that the error is smaller than that of the other kernels, which round activations to 16 bits before they quantise
    them."""
    layer = Layer(sm90, experts, top_k, hidden, intermediate, dtype=dtype, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales([1])
    for count in counts:
        call = layer.tokens(count)
        got, wanted = layer.run(*call), layer.wanted(*call)
        assert (got.float() - wanted).norm() <= 6e-3 * wanted.norm()
        assert all(torch.equal(layer.run(*call), got) for _ in range(20))


def test_fp8_activations_of_any_magnitude(sm90: torch.device) -> None:
    layer = Layer(sm90, 4, 4, 96, 160, activation_dtype="fp8")
    x, weights, ids = layer.tokens(9)
    x[1] *= 2.0**-120  # the smallest scale
    x[2], x[4, 3], x[6, 9] = 0, torch.inf, torch.nan
    got, wanted = layer.run(x, weights, ids), layer.wanted(x, weights, ids)
    assert got[[4, 6]].isnan().all()
    assert (got[2] == 0).all()
    for row in (0, 1, 3, 5, 7, 8):
        compare(got[row : row + 1], wanted[row : row + 1])


# -- on the device: graphs and streams ---------------------------------------------------------------------------------------------


def _capture(layer: Layer, call: tuple[Tensor, Tensor, Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(*call)
    return graph, out


def _change(layer: Layer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    """Writes other tokens, weights and expert ids to the memory that a graph reads. Some of the ids are negative."""
    x, weights, ids = layer.tokens(len(call[0]))
    for old, new in zip(call, (x, weights, torch.where(ids > 3, ids, -1)), strict=True):
        old.copy_(new)


def test_two_graphs(sm90: torch.device) -> None:
    """Replays two graphs in turn on one stream, and then at once on two streams, beside calls without a graph."""
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    calls = [layer.tokens(24) for _ in range(3)]
    layer.run(*calls[2])
    captured = [_capture(layer, call) for call in calls[:2]]
    for _ in range(3):
        for (graph, out), call in zip(captured, calls[:2], strict=True):
            graph.replay()
            compare(out, layer.wanted(*call))
            _change(layer, call)
    streams = [torch.cuda.Stream(sm90) for _ in captured]
    eager = layer.wanted(*calls[2])
    for _ in range(5):
        wanted = [layer.wanted(*call) for call in calls[:2]]
        torch.cuda.synchronize()
        beside = []
        for _ in range(10):
            for (graph, _), on in zip(captured, streams, strict=True):
                with torch.cuda.stream(on):
                    graph.replay()
            beside.append(layer.run(*calls[2]))
        torch.cuda.synchronize()
        for (_, out), each in zip(captured, wanted, strict=True):
            compare(out, each)
        for out in beside:
            compare(out, eager)
        for call in calls[:2]:
            _change(layer, call)


def test_two_streams(sm90: torch.device) -> None:
    """Tests launches on two streams. They wait until all launches are queued, and then overlap. They must leave their counters at
    zero."""
    layer = Layer(sm90, 32, 4, 960, 640, **GPT_OSS)
    calls = [layer.tokens(16), layer.tokens(60)]
    wanted = [layer.run(*call) for call in calls]
    streams = [torch.cuda.Stream(sm90) for _ in calls]
    for call, on in zip(calls, streams, strict=True):
        with torch.cuda.stream(on):
            layer.run(*call)  # allocates the stream's workspace
    torch.cuda.synchronize()
    begin = torch.cuda.Event()
    torch.cuda._sleep(20_000_000)
    begin.record()
    found: list[list[Tensor]] = [[], []]
    for on in streams:
        on.wait_event(begin)
    for _ in range(20):
        for outs, call, on in zip(found, calls, streams, strict=True):
            with torch.cuda.stream(on):
                outs.append(layer.run(*call))
    torch.cuda.synchronize()
    for outs, each in zip(found, wanted, strict=True):
        for out in outs:
            assert torch.equal(out, each)
    for on in streams:
        assert not keeper.get(sm90.index, on.cuda_stream, 0, 0).counters.any()


@pytest.mark.parametrize("activation_dtype", ["none", "fp8"])
def test_kernels_that_overlap(sm90: torch.device, activation_dtype: str) -> None:
    """Tests kernels that overlap (PDL). The output of each call is the next call's tokens."""
    layer = Layer(sm90, 16, 4, 192, 160, activation_dtype=activation_dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(24)
    wanted = x
    for _ in range(8):
        wanted = layer.run(wanted, weights, ids)
        torch.cuda.synchronize()

    def chain() -> Tensor:
        out = x
        for _ in range(8):
            out = layer.run(out, weights, ids)
        return out

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(5):
        assert torch.equal(chain(), wanted)
        graph.replay()
        assert torch.equal(captured, wanted)


# -- the choice of programs --------------------------------------------------------------------------------------------------------


def test_programs() -> None:
    every = every_config()
    assert len(set(every)) == len(every)
    assert {config.dtype for config in every} == set(DTYPES.values())
    for config in every:
        assert config.stages >= 3
        assert config.stages % GROUPS == 0
        used = LIST_BYTES + OTHER_BYTES + config.rows_bytes + BUFFERS * (config.sums_bytes + PANEL_HEAD_BYTES)
        assert used + config.stages * config.stage_bytes <= SHARED_BYTES
        assert config.pairs >= 4
        assert config.columns == config.pairs * (1 if config.rounded else 4 if config.dtype == "float16" else 2)


@pytest.mark.parametrize(
    ("dtype", "k", "tokens", "top_k", "experts", "blocks", "pairs"),
    [
        ("rounded", 2880, 1, 4, 128, 45, 8),
        ("rounded", 2880, 64, 4, 128, 45, 8),
        ("rounded", 2880, 256, 4, 128, 45, 16),
        ("rounded", 7168, 128, 8, 32, 112, 16),
        ("bfloat16", 2880, 1, 4, 128, 45, 4),
        ("bfloat16", 2880, 16, 4, 128, 45, 4),
        ("bfloat16", 2880, 64, 4, 128, 45, 8),
        ("bfloat16", 2880, 256, 4, 32, 45, 16),
        ("float16", 2880, 16, 4, 128, 45, 4),
        ("float16", 2880, 64, 4, 128, 45, 8),
        ("bfloat16", 768, 1, 8, 128, 12, 4),
        ("bfloat16", 800, 1, 8, 128, 45, 4),
        ("bfloat16", 4096, 1, 8, 128, 64, 4),
        ("bfloat16", 7168, 128, 8, 256, 112, 8),
        ("bfloat16", 7168, 128, 8, 32, 112, 8),  # no program supports more pairs
        ("float16", 7168, 128, 8, 32, 112, 4),
    ],
)
def test_program_for_a_layer(dtype: str, k: int, tokens: int, top_k: int, experts: int, blocks: int, pairs: int) -> None:
    rounded = dtype == "rounded"
    config = config_of("bfloat16" if rounded else dtype, k, tokens * top_k / experts, rounded)
    assert (config.blocks, config.pairs, config.rounded) == (blocks, pairs, rounded)


@given(st.sampled_from(sorted(DTYPES.values())), st.integers(1, max_k() // 32), st.floats(0, MAX_PAIRS), st.booleans())
def test_there_is_a_program_for_every_size(dtype: str, half_blocks: int, pairs_per_expert: float, rounded: bool) -> None:
    k = 32 * half_blocks
    config = config_of(dtype, k, pairs_per_expert, rounded)
    alike = [other for other in every_config() if (other.dtype, other.rounded) == (dtype, rounded) and other.blocks * BLOCK >= k]
    assert config in alike
    assert config.blocks == min(other.blocks for other in alike)
    wide = [other.pairs for other in alike if other.blocks == config.blocks]
    assert config.pairs == min((pairs for pairs in wide if pairs >= 2 * pairs_per_expert + 2), default=max(wide))


@st.composite
def _routings(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draws the number of pairs of each expert, and the number of skipped pairs. The total is at most what one launch supports."""
    counts = draw(st.lists(st.one_of(st.sampled_from([0, 1, 5, 9, 17]), st.integers(0, 200)), min_size=1, max_size=MAX_EXPERTS))
    left, kept = MAX_PAIRS, []
    for count in counts:
        kept.append(min(count, left))
        left -= kept[-1]
    return kept, draw(st.integers(0, left))


@given(_routings(), st.sampled_from(every_config()))
def test_room_for_all_entries(routing: tuple[list[int], int], config: Config) -> None:
    counts, skipped = routing
    pairs, experts = sum(counts) + skipped, len(counts)
    entries = sum(-(-count // config.pairs) for count in counts)
    assert entries <= entries_of(config, pairs, experts) <= MAX_PAIRS


# -- the launcher ------------------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """The arguments of a launch, and the workspace that was allocated for it."""

    config: Config
    arguments: tuple[Any, ...]
    workspace: Workspace

    @property
    def tokens(self) -> int:
        return len(self.arguments[0])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Yields the list of launches, which are recorded but not run. The fake programs double the tokens, and reject the same
    arguments as compiled programs."""
    found: list[Launch] = []
    made: list[Workspace] = []

    class Recorded(Keeper):
        def get(self, *arguments: Any) -> Workspace:
            made.append(super().get(*arguments))
            return made[-1]

    def program(_: Program[Any], config: Config) -> Any:
        def launch(*arguments: Any) -> None:
            x, out = arguments[:2]
            for tensor in (x, out):
                assert DTYPES[tensor.dtype] == config.dtype
                assert tensor.data_ptr() % 16 == 0 == tensor.shape[1] % 32
                assert tensor.stride(1) == 1
                assert len(tensor) == 1 or tensor.stride(0) % 8 == 0
            assert x.shape == out.shape
            found.append(Launch(config, arguments, made[-1]))
            out.copy_(2 * x)

        return launch

    stream._program_of.cache_clear()
    monkeypatch.setattr(Program, "__call__", program)
    monkeypatch.setattr(stream, "sm_count_of", lambda device: 132)
    monkeypatch.setattr(stream, "keeper", Recorded(arena=1, capturing=lambda: False))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    yield found
    stream._program_of.cache_clear()


def _checked(layer: Layer, found: list[Launch], x: Tensor, weights: Tensor, ids: Tensor, out: Tensor | None = None) -> list[int]:
    """Makes a call, and checks its launches. Returns the number of tokens of each launch."""
    plan = layer.plan
    got = layer.run(x, weights, ids, out)
    assert out is None or got is out
    assert torch.equal(got, 2 * x), "each token belongs to one launch"
    done = 0
    for launch in found:
        _, _, w13, w2, ids_at, weights_at, activated, slots, counters, *sizes = launch.arguments
        pairs = launch.tokens * plan.top_k
        assert 0 < pairs <= MAX_PAIRS
        k = max(plan.hidden_size, plan.intermediate_size)
        assert launch.config == config_of(DTYPES[plan.dtype], k, pairs / plan.num_experts, plan.activation_dtype == "fp8")
        assert (w13, w2) == (layer.prepared.w13_weight.data_ptr(), layer.prepared.w2_weight.data_ptr())
        if ids.is_contiguous():
            assert ids_at == ids.data_ptr() + 4 * done * plan.top_k
            assert weights_at == weights.data_ptr() + 4 * done * plan.top_k
        memory = launch.workspace
        assert (activated, counters) == (memory.memory_at, memory.counters_at)
        assert slots >= activated + (4 if launch.config.wide else 2) * pairs * plan.intermediate_size
        assert (slots - activated) % 16 == 0
        assert slots + 4 * pairs * plan.hidden_size <= activated + memory.nbytes
        assert memory.count >= stream.COUNTERS + entries_of(launch.config, pairs, plan.num_experts)
        assert 1 <= sizes[4] <= 3, "turns"
        assert sizes == [
            plan.num_experts, plan.intermediate_size, plan.top_k, 132, sizes[4], plan.alpha, plan.limit or float("inf"), plan.beta
        ]  # fmt: skip
        done += launch.tokens
    counts = [launch.tokens for launch in found]
    found.clear()
    return counts


@pytest.mark.parametrize(
    ("tokens", "top_k", "counts"),
    [
        (0, 4, []),
        (1, 4, [1]),
        (256, 4, [256]),
        (257, 4, [256, 1]),
        (300, 4, [256, 44]),
        (1024, 4, [256] * 4),
        (700, 3, [341, 341, 18]),
        (1100, 1, [1024, 76]),
        (129, 8, [128, 1]),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {**GPT_OSS, "dtype": torch.float16}, {"activation_dtype": "fp8"}], ids=["plain", "gpt-oss", "fp8"]
)
def test_no_launch_has_more_pairs_than_it_takes(
    launches: list[Launch], tokens: int, top_k: int, counts: list[int], options: dict[str, Any]
) -> None:
    layer = Layer(CPU, 8, top_k, 64, 96, **options)
    call = layer.tokens(tokens)
    assert _checked(layer, launches, *call) == counts
    assert _checked(layer, launches, *call, torch.empty_like(call[0])) == counts


@pytest.mark.parametrize("top_k", range(1, MAX_TOP_K + 1))
@pytest.mark.parametrize(("dtype", "activation_dtype"), [*((dtype, "none") for dtype in HALVES), (torch.bfloat16, "fp8")], ids=str)
def test_sizes(launches: list[Launch], dtype: torch.dtype, activation_dtype: str, top_k: int) -> None:
    """Asserts that all programs that calls use are among those that are compiled ahead of time."""
    every = set(every_config())
    sizes = ((32, 32, 8), (768, 800, 8), (2880, 32, 9), (32, 4096, 8), (max_k(), 64, 8), (64, max_k(), 8), (32, 32, MAX_EXPERTS))
    for hidden, intermediate, experts in sizes:
        layer = Layer(CPU, experts, top_k, hidden, intermediate, dtype=dtype, activation_dtype=activation_dtype)
        for tokens in (1, 5, 300):
            layer.run(*layer.tokens(tokens))
            assert {launch.config for launch in launches} <= every
            assert sum(launch.tokens for launch in launches) == tokens
            launches.clear()


@pytest.mark.parametrize("tokens", [1, 2, 300])
def test_layouts(launches: list[Launch], tokens: int) -> None:
    """Asserts that for every layout of the caller's tensors, programs receive aligned rows, and ``out`` is returned."""
    layer = Layer(CPU, 8, 4, 64, 96)
    x, weights, ids = layer.tokens(tokens)
    weights, ids = weights.t().contiguous().t(), ids.t().contiguous().t()
    for first, width, step in ((8, 96, 1), (3, 96, 1), (8, 97, 1), (0, 128, 2)):
        wide_x, wide_out = torch.zeros(2, tokens, width, dtype=x.dtype)
        given_x, out = (wide[:, first : first + 64 * step : step] for wide in (wide_x, wide_out))
        given_x.copy_(x)
        assert sum(_checked(layer, launches, given_x, weights, ids, out)) == tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9, "num_experts": 16}, "plan.top_k must be at most 8"),
        ({"hidden_size": 7200}, "plan.hidden_size must be at most 7168"),
        ({"activation_dtype": "mxfp4"}, "plan.activation_dtype must be 'none' or 'fp8'"),
    ],
)
def test_a_plan_that_names_the_kernel_is_checked(changes: dict[str, Any], message: str) -> None:
    """Asserts that the launcher checks the plan. If a plan names a kernel, selection does not check the kernel's traits."""
    options = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64, "weight_format": "mxfp4", **changes}
    plan = declared.moe_apply.plan(**options, platform=cpu_platform(), override="reference_moe_apply")  # type: ignore[arg-type]
    x, ids = torch.zeros(1, plan.hidden_size, dtype=torch.bfloat16), torch.zeros(1, plan.top_k, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        moe_apply.moe_apply(x, None, torch.ones(1, plan.top_k), ids, plan)  # type: ignore[arg-type]
