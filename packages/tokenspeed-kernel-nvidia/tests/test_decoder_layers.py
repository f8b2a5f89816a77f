"""Tests the kernels of `decoder_layers`: which calls they serve and why, calls one after another on the emulator, and concurrent
calls and graphs on the device. `test_persistent` tests the device code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import alignment
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.pretended import as_rank_of
from tokenspeed_kernel_base.ops.decoder.decoder_layers import decoder_layers
from tokenspeed_kernel_base.ops.decoder.weights import DecoderWeights
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.workspace import Keeper
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import LAYOUT
from tokenspeed_kernel_nvidia.sm90.layers import launch

ONE, FEW, COMPOSED = "cutedsl_decoder_layers", "cutedsl_decoder_layers_few", "composed_decoder_layers"
OP = get_operator("decoder_layers")
CASES = {case.name: case for case in OP.all_cases()}
NARROW = "gpt-oss layers, narrow, "
FP8 = "cutedsl_decoder_layers_fp8_weights"


def prepared(case: Case, device: Any = "cpu", kernel: str = ONE) -> dict[str, Any]:
    """Returns the arguments of a case, with weights and plan for a kernel."""
    return OP.prepared(OP.complete(case.build(device)), KernelRegistry.get().get_by_name(kernel))


def varied(name: str, **changes: Any) -> Case:
    case = CASES[name]
    return dataclasses.replace(case, make=case.make.vary(**changes))  # type: ignore[attr-defined]


# -- selection -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ("one token", ONE),
        ("3 tokens", ONE),
        ("8 tokens", COMPOSED),
        ("fp8 dense weights, one token", FP8),
        ("fp8 dense weights, 3 tokens", FP8),
    ],
)
def test_few_tokens_are_served_others_by_name(registered: KernelRegistry, case: str, kernel: str) -> None:
    with use_platform(named_platform("sm_90")):
        arguments = prepared(CASES[NARROW + case], kernel=FP8 if kernel == FP8 else ONE)
        assert decoder_layers.explain(**arguments).chosen.name == kernel
        if kernel == COMPOSED:
            found = decoder_layers.explain(**arguments)
            assert next(v for v in found.verdicts if v.spec.name == FEW).accepted
            assert decoder_layers.explain(**arguments, override=FEW).chosen.name == FEW
    for platform in ("sm_80", "sm_100", "gfx950", "cpu"):
        with use_platform(named_platform(platform)):
            assert decoder_layers.explain(**arguments).chosen.name == COMPOSED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 96}, "hidden_size=96 is not at most 2880 and a multiple of 64"),
        ({"weights": "dense"}, "qkv: bfloat16 wanted"),
        ({"weights": "mxfp4"}, "qkv: mxfp4<uint8> scaled by uint8/block32x1 wanted"),
        ({"dtype": torch.float16}, "k_cache: float16 wanted"),
    ],
    ids=str,
)
def test_explain_says_why_not_fp8_weights(registered: KernelRegistry, changes: dict[str, Any], reason: str) -> None:
    arguments = prepared(varied(NARROW + "fp8 dense weights, one token", **changes), kernel=FP8)
    with use_platform(named_platform("sm_90")):
        found = decoder_layers.explain(**arguments)
    assert found.chosen is not None
    assert found.chosen.name != FP8
    assert reason in next(verdict for verdict in found.verdicts if verdict.spec.name == FP8).reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sinks": False}, "sinks=False is not True"),
        ({"bias": False}, "attention_bias=False is not True"),
        ({"page_size": 8}, "page_size=8 is not a multiple of 16"),
        ({"rotary_dim": 32}, "rotary_dim=32 is not 64"),
        ({"kv_heads": 9, "gqa_ratio": 1}, "kv_heads=9 is not at most 8"),
        ({"gqa_ratio": 9}, "gqa_ratio=9 is not at most 8"),
        ({"experts": 6}, "num_experts=6 is not at most 128 and a multiple of 4"),
        ({"top_k": 5}, "top_k=5 is not at most 4"),
        ({"windows": [-1] * 49}, "layers=49 is not at most 48"),
        ({"kv_lens": [3] * 9}, "tokens=16 is not 1"),
        ({"activation_dtype": "fp8"}, "does not declare the flag fp8_activations"),
    ],
    ids=str,
)
def test_explain_says_why_not(registered: KernelRegistry, changes: dict[str, Any], reason: str) -> None:
    arguments = prepared(varied(NARROW + "one token", **changes))
    with use_platform(named_platform("sm_90")):
        found = decoder_layers.explain(**arguments)
    assert found.chosen is not None
    assert found.chosen.name == COMPOSED
    assert reason in next(verdict for verdict in found.verdicts if verdict.spec.name == ONE).reason


@pytest.mark.parametrize(
    ("ranks", "link", "reason"),
    [
        (2, "nvlink, no multicast", ""),
        (2, "nvlink, multicast not used", ""),
        (2, "pcie", "link=pcie is not"),
        (2, "none", "link=none is not"),
        (4, "nvlink, no multicast", "world_size=4 is not"),
    ],
)
def test_layers_that_ranks_share(registered: KernelRegistry, ranks: int, link: str, reason: str) -> None:
    """Two ranks whose GPUs write to one another's memory over NVLink are supported."""
    with as_rank_of(ranks):
        group = ProcessGroup.with_peer_memory()
        assert group.peers is not None
        group.peers.link = link
        arguments = prepared(CASES[NARROW + "one token"])
        shared = DecoderWeights(arguments["weights"].layers, group)
        with use_platform(named_platform("sm_90")):
            found = decoder_layers.explain(**{**arguments, "weights": shared})
    assert found.chosen.name == (COMPOSED if reason else ONE)
    assert reason in next(verdict for verdict in found.verdicts if verdict.spec.name == ONE).reason


def test_a_device_with_few_sms(registered: KernelRegistry) -> None:
    """An H100 PCIe has 114 SMs, so that a CTA would have more rows of qkv than the kernel supports."""
    arguments = prepared(CASES[NARROW + "one token"])
    for sms, kernel in ((114, COMPOSED), (132, ONE)):
        with use_platform(dataclasses.replace(named_platform("sm_90"), sm_count=sms)):
            found = decoder_layers.explain(**arguments)
            assert found.chosen is not None
            assert found.chosen.name == kernel
            assert ("needs 128 SMs, this has 114" in str(found)) == (kernel == COMPOSED)


def test_the_experts_are_those_of_moe_apply(registered: KernelRegistry) -> None:
    """Weights that `moe_apply.prepare` made serve both operators, without a copy."""
    given = OP.complete(CASES[NARROW + "one token"].build())
    facts = {field.name: getattr(given["plan"], field.name) for field in dataclasses.fields(given["plan"])}
    facts = {name: value for name, value in facts.items() if name not in ("kernel", "weight_layout")}
    with use_platform(named_platform("sm_90")):
        plan = moe_apply.plan(**facts)
        assert plan.weight_layout == LAYOUT
        layers = [dataclasses.replace(layer, experts=moe_apply.prepare(layer.experts, plan)) for layer in given["weights"].layers]
        weights = DecoderWeights(layers)
        assert decoder_layers.explain(**{**given, "weights": weights, "plan": plan}).chosen.name == ONE
    assert all(mine is layer for mine, layer in zip(weights.layers, layers, strict=True))
    assert f"2 layers, 1 of them with a window; experts in the layout {LAYOUT}" in weights.card


def test_ctas() -> None:
    """One CTA per SM for GPT-OSS; fewer for sizes of tests. The kernel's limits hold from 128 SMs on."""
    plans = {
        case.name: case.build("meta")["plan"]
        for case in (CASES["gpt-oss-120b, 4 layers, decode 1 x 1024"], CASES[NARROW + "one token"])
    }
    large, small = plans.values()
    for tokens in (1, 2, 4, 8):
        for sms in (128, 132):
            assert launch.ctas_of(large, tokens, 64, 8, sms) == sms
            launch._check(large, 36, tokens, 64, 8, sms, launch.served_config(tokens))
    assert launch.ctas_of(small, 1, 3, 1, 132) == 20


# -- calls on the emulator -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> Any:
    pytest.importorskip("cutlass")
    pytest.importorskip("tokenspeed_kernel")
    emulator = pytest.importorskip("sm90_emulator")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    return emulator.emulated_sm90


def fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with copies of all tensors that a call may write to."""
    return {**arguments, **{name: arguments[name].clone() for name in ("x", "k_cache", "v_cache")}}


def run(arguments: dict[str, Any], kernel: str | None = None, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the operator on copies. Returns the result and the caches."""
    given = {**fresh(arguments), **changes}
    result = decoder_layers(**given, override=kernel)
    return result.clone(), given["k_cache"], given["v_cache"]


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, right, strict=True))


def test_calls_one_after_another(hopper: Any) -> None:
    """Calls for other numbers of tokens, other weights and other caches in between do not change results."""
    with hopper(seed=1):
        calls = [prepared(CASES[NARROW + "one token"]), prepared(CASES["one layer, narrow, pages of 64"])]
        few = prepared(varied(NARROW + "3 tokens", kv_lens=[33, 1]))
        calls.append(prepared(CASES[NARROW + "fp8 dense weights, one token"], kernel=FP8))
        assert decoder_layers.explain(**calls[-1]).chosen.name == FP8
        assert decoder_layers.explain(**calls[0]).chosen.name == ONE
        first = [run(call) for call in calls]
        assert same(run(few), run(few))
        again = [run(call) for call in calls]
    assert all(same(one, other) for one, other in zip(first, again, strict=True))


def test_results_in_place_and_other_layouts(hopper: Any) -> None:
    """``out`` may be x. Caches, page table and slots may have any strides."""
    with hopper(seed=1):
        call = prepared(CASES[NARROW + "one token"])
        wanted = run(call)
        given = fresh(call)
        assert decoder_layers(**{**given, "out": given["x"]}) is given["x"]
        assert torch.equal(given["x"], wanted[0])
        wide = torch.zeros(*call["k_cache"].shape[:-1], 2, call["k_cache"].shape[-1], dtype=torch.bfloat16)
        caches = {name: wide.clone()[..., index, :].copy_(call[name]) for index, name in enumerate(("k_cache", "v_cache"))}
        slots = torch.stack([call["slot_mapping"]] * 2, 1).int()[:, 0]
        pages = call["page_table"].t().contiguous().t()
        result = decoder_layers(**{**call, **caches, "slot_mapping": slots, "page_table": pages})
        assert same((result, caches["k_cache"], caches["v_cache"]), wanted)
        spread = {name: call[name].repeat_interleave(2, -1)[..., ::2] for name in caches}
        alignment._warn_of_copies.cache_clear()  # an earlier test may have warned
        with pytest.warns(alignment.CacheCopyWarning, match="copied whole"):
            result = decoder_layers(**{**call, **spread})
        assert same((result, spread["k_cache"], spread["v_cache"]), wanted)


def test_rows_that_pad_the_batch(hopper: Any) -> None:
    """A row without a token or with a negative slot writes nothing, and does not change the other rows' results."""
    with hopper(seed=1):
        call = prepared(varied(NARROW + "3 tokens", kv_lens=[33, 5]))
        wanted = run(call)
        lengths, slots = call["cache_seqlens"].clone(), call["slot_mapping"].clone()
        lengths[1], slots[1] = 0, -1
        with KernelRegistry.get().transaction():
            got = launch.decoder_layers(**{**fresh(call), "cache_seqlens": lengths, "slot_mapping": slots})
    torch.testing.assert_close(got[0], wanted[0][0])


def test_weights_and_pages_that_the_kernel_does_not_read(registered: KernelRegistry) -> None:
    """Errors are raised before anything is launched, also if a caller names the kernel."""
    call = prepared(varied(NARROW + "one token", page_size=8))
    with pytest.raises(ValueError, match="pages must be a multiple of 16 by 64, got 8 by 64"):
        launch.decoder_layers(**call)
    call = prepared(varied(NARROW + "one token", experts=6))
    hopper = dataclasses.replace(named_platform("sm_90"), sm_count=132)  # with a CPU's few cores, another limit is exceeded first
    with use_platform(hopper), pytest.raises(ValueError, match="num_experts must be a multiple of 4, got 6"):
        launch.decoder_layers(**call)
    with pytest.raises(ValueError, match=r"layers\[0\].sinks must be given, got None"):
        launch.check_layer(0, dataclasses.replace(call["weights"].layers[0], sinks=None))
    layer = prepared(CASES[NARROW + "fp8 dense weights, one token"], kernel=FP8)["weights"].layers[0]
    with pytest.raises(ValueError, match=r"layers\[0\].projection must be torch.float8_e4m3fn, got torch.bfloat16"):
        launch.check_layer(0, dataclasses.replace(layer, projection=layer.projection.bfloat16(), projection_scale=None))
    with pytest.raises(ValueError, match=r"layers\[0\].qkv_scale must have the shape \(320, 1\), got None"):
        launch.check_layer(0, dataclasses.replace(layer, qkv_scale=None))


def test_scratch_memory_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each captured launch has memory of its own, which was zeroed before the capture."""
    keeper = Keeper(arena=4 * 100, capturing=lambda: True, device_of=lambda device: torch.device("cpu"))
    monkeypatch.setattr(keeper, "_capturing", lambda: False)
    eager = keeper.get(-1, 0, 0, 100)
    monkeypatch.setattr(keeper, "_capturing", lambda: True)
    captured = [keeper.get(-1, 1, 0, 100).counters_at for _ in range(3)]
    assert len({eager.counters_at, *captured}) == 4


# -- on the device -------------------------------------------------------------------------------------------------------------

LARGE = "gpt-oss-120b, 4 layers, decode {} x 1024"


def close(got: Tensor, wanted: Tensor) -> None:
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 0.0228, float(error)  # the operator's tolerance for four layers


@pytest.mark.parametrize(("tokens", "weights"), [(1, "dense"), (2, "dense"), (4, "dense"), (8, "dense"), (1, "fp8"), (3, "fp8")])
def test_like_the_separate_kernels(sm90: torch.device, tokens: int, weights: str) -> None:
    pytest.importorskip("tokenspeed_kernel")
    kernel = FP8 if weights == "fp8" else ONE if tokens <= 4 else FEW
    case = varied(LARGE.format(1), kv_lens=[1024] * tokens, weights=weights)
    call = prepared(case, sm90, kernel)
    got, wanted = run(call, kernel), run(call, COMPOSED)
    close(got[0], wanted[0])
    for mine, its in zip(got[1:], wanted[1:], strict=True):
        close(mine.nan_to_num(), its.nan_to_num())
    for _ in range(20):
        assert same(run(call, kernel), got)


def test_concurrent_graphs_and_calls(sm90: torch.device) -> None:
    """Two graphs and an eager call run at the same time on three streams, many times. Launches wait for one another, and do not
    deadlock."""
    pytest.importorskip("tokenspeed_kernel")
    calls = [fresh(prepared(CASES[LARGE.format(1)], sm90)) for _ in range(2)]
    wanted = [decoder_layers(**call, override=ONE).clone() for call in calls]
    graphs, results = [], []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([decoder_layers(**call, override=ONE) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream(sm90) for _ in range(3)]
    for _ in range(30):
        for made in results:
            for each in made:
                each.fill_(torch.nan)
        torch.cuda.synchronize(sm90)
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = [decoder_layers(**calls[0], override=ONE) for _ in range(4)]
        torch.cuda.synchronize(sm90)
        for made, each in zip(results, wanted, strict=True):
            assert all(torch.equal(result, each) for result in made)
        assert all(torch.equal(result, wanted[0]) for result in eager)


def test_beside_kernels_that_occupy_sms(sm90: torch.device) -> None:
    """Launches start while GEMMs of another stream occupy SMs."""
    pytest.importorskip("tokenspeed_kernel")
    call = fresh(prepared(CASES[LARGE.format(1)], sm90))
    wanted = decoder_layers(**call, override=ONE).clone()
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=sm90)
    streams = [torch.cuda.Stream(sm90) for _ in range(2)]
    torch.cuda.synchronize(sm90)
    results = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            a @ a
        with torch.cuda.stream(streams[1]):
            results.append(decoder_layers(**call, override=ONE))
    torch.cuda.synchronize(sm90)
    assert all(torch.equal(result, wanted) for result in results)


def test_a_capture_before_any_call_says_so(sm90: torch.device) -> None:
    pytest.importorskip("tokenspeed_kernel")
    call = fresh(prepared(CASES[LARGE.format(1)], sm90))
    torch.cuda.synchronize(sm90)
    with pytest.raises(RuntimeError, match="call the kernel once with these weights"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        decoder_layers(**call, override=ONE)
