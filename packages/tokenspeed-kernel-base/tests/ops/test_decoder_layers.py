"""Tests `decoder_layers` and its weights. The cases compare kernels with the reference; these tests compare the reference with the
operators that it is composed of, and test what cases cannot express."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.rmsnorm_qkv_rope import rmsnorm_qkv_rope
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.decoder._inputs import layer_inputs
from tokenspeed_kernel_base.ops.decoder.decoder_layers import decoder_layers
from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel

OP = get_operator("decoder_layers")
CASES = {case.name: case for case in OP.all_cases()}
FIRST = CASES["float32, dense experts, no sinks"]


def drawn(case: Case = FIRST) -> dict[str, Any]:
    return OP.complete(case.build())


@pytest.mark.parametrize("solution", ["reference", "composed"])
def test_the_layers_one_by_one(solution: str) -> None:
    """The residual stream is added in another way than in the body: after attention and after the experts."""
    given, own = drawn(), drawn()
    x = own["x"]
    kv_heads, head_dim = own["k_cache"].shape[3:]
    for index, layer in enumerate(own["weights"].layers):
        caches = own["k_cache"][index], own["v_cache"][index]
        qkv = rmsnorm_qkv_rope(
            x, layer.input_norm, layer.qkv.t(), own["cache_seqlens"] - 1, own["cos_sin_cache"], kv_heads, head_dim,
            bias=layer.qkv_bias, k_cache=caches[0], v_cache=caches[1], slot_mapping=own["slot_mapping"],
        )  # fmt: skip
        q = qkv.view(len(x), -1, head_dim)[:, : -2 * kv_heads]
        found = mha_decode_with_kvcache(
            q, *caches, own["page_table"], own["cache_seqlens"], int(own["cache_seqlens"].max()), window_left=layer.window_left
        )
        x = x + found.flatten(1) @ layer.projection.t() + layer.projection_bias
        normed = rmsnorm(x, layer.norm)
        weights, ids = moe_topk(normed @ layer.router.t() + layer.router_bias, own["plan"].top_k)
        x = x + moe_apply(normed, layer.experts, weights, ids, own["plan"])
    torch.testing.assert_close(decoder_layers(**given, solution=solution), x)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name], own[name], equal_nan=True)


@pytest.mark.parametrize("solution", ["reference", "composed"])
@pytest.mark.parametrize(
    "name", ["gpt-oss layers, narrow, fp8 dense weights, 3 tokens", "gpt-oss layers, narrow, mxfp4 dense weights"]
)
def test_quantised_weights_are_like_their_values(name: str, solution: str) -> None:
    """With scales that are powers of two, bfloat16 represents all values of quantised weights."""
    given, dense = drawn(CASES[name]), drawn(CASES[name])
    quantised, layers = [], []
    for layer in given["weights"].layers:
        scales, values = {}, {}
        for weight, scale in (("qkv", "qkv_scale"), ("projection", "projection_scale")):
            codes, found = getattr(layer, weight), getattr(layer, scale)
            scales[scale] = found if codes.dtype == torch.uint8 else found.log2().round().exp2()
            operand = torch.empty(1, codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1), dtype=torch.bfloat16)
            _, decoded = decode_operands("test", operand, codes.mT, None, scales[scale].mT)
            values[weight] = decoded.mT.to(torch.bfloat16).contiguous()
            assert torch.equal(values[weight].float(), decoded.mT)
        quantised.append(dataclasses.replace(layer, **scales))
        layers.append(dataclasses.replace(layer, **values, qkv_scale=None, projection_scale=None))
    found = decoder_layers(**{**given, "weights": DecoderWeights(quantised)}, solution=solution)
    wanted = decoder_layers(**{**dense, "weights": DecoderWeights(layers)}, solution=solution)
    torch.testing.assert_close(found, wanted)


def test_the_result_may_replace_x() -> None:
    given = drawn()
    wanted = decoder_layers(**drawn())
    assert decoder_layers(**{**given, "out": given["x"]}) is given["x"]
    assert torch.equal(given["x"], wanted)


def test_torch_compile() -> None:
    """The caches are known to be written to, and the weights are passed by their handle."""
    given, own = drawn(), drawn()
    wanted = decoder_layers(**own)

    def step(x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before = k_cache.nan_to_num().sum()
        return decoder_layers(x, k_cache=k_cache, v_cache=v_cache, **rest), k_cache.nan_to_num().sum() - before

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result, change = compiled(**{name: value for name, value in given.items() if name != "out"})
    assert torch.equal(result, wanted)
    assert change != 0
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].nan_to_num(), own[name].nan_to_num())


def test_prepared_weights_share_what_they_can() -> None:
    given = drawn()
    prepared = decoder_layers.prepare(given["weights"], given["plan"])
    for mine, its in zip(prepared.layers, given["weights"].layers, strict=True):
        assert all(getattr(mine, name) is getattr(its, name) for name in ("qkv", "projection", "router", "norm"))
    with pytest.raises(TypeError, match=r"decoder_layers.prepare: weights must be a DecoderWeights, got list"):
        decoder_layers.prepare([], given["plan"])


def test_a_group_of_one_rank() -> None:
    """The sums over ranks are then the addends. The group stays with weights that are made from others."""
    given, group = drawn(), ProcessGroup.of()
    wanted = decoder_layers(**drawn())
    shared = DecoderWeights(given["weights"].layers, group)
    assert torch.equal(decoder_layers(**{**given, "weights": shared}), wanted)
    assert shared.card.endswith("shared by 1 ranks")
    assert decoder_layers.prepare(shared, given["plan"]).group is group
    assert shared.converted(torch.clone).group is group
    assert shared.key != given["weights"].key


def test_kernels_that_know_nothing_of_ranks_are_refused() -> None:
    given = drawn()
    shared = DecoderWeights(given["weights"].layers, ProcessGroup.of())
    with KernelRegistry.get().transaction():
        options: dict[str, Any] = {"sliding_window": any, "attention_bias": any, "router_bias": any, "world_size": 1}
        register_kernel(
            "decoder", "decoder_layers", name="fused", solution="testing", signatures=None,
            traits={**options, **dict.fromkeys(("bias", "w13_interleaved", "swiglu_limit", "swiglu_alpha_beta"), any)},
        )(decoder_layers.operator.body)  # fmt: skip
        for weights, accepted in ((given["weights"], True), (shared, False)):
            found = decoder_layers.explain(**{**given, "weights": weights})
            verdict = next(each for each in found.verdicts if each.spec.name == "fused")
            assert verdict.accepted == accepted, verdict.reason
        assert "over_ranks" in verdict.reason


def test_work_that_cannot_be_avoided() -> None:
    """A layer of GPT-OSS-120B with one token reads 128 keys or 1024, the dense weights, and 4 of 128 experts."""
    case = CASES["gpt-oss-120b, 4 layers, decode 1 x 1024"]
    meta = OP.complete(case.build("meta"))
    cost = OP.cost_of({**meta, "cache_seqlens": torch.tensor([1024], dtype=torch.int32)})
    dense = 2 * (5120 * 2880 + 2880 * 4096 + 128 * 2880)
    experts = 4 * 3 * 2880 * 2880 * (1 / 2 + 1 / 32)
    keys = (1024 + 128) / 2 * 2 * 8 * 64 * 2
    assert cost.bytes == pytest.approx(4 * (dense + experts + keys), rel=0.01)
    assert cost.flops == pytest.approx(4 * (dense + 6 * 4 * 2880 * 2880 + 4 * 4096 * (1024 + 128) / 2), rel=0.01)


def test_the_bytes_of_fp8_weights() -> None:
    costs = []
    for weights in ("", ", fp8 dense weights"):
        meta = OP.complete(CASES[f"gpt-oss-120b, 4 layers{weights}, decode 1 x 1024"].build("meta"))
        costs.append(OP.cost_of({**meta, "cache_seqlens": torch.tensor([1024], dtype=torch.int32)}))
    dense, fp8 = costs
    assert dense.bytes - fp8.bytes == 4 * (5120 * 2880 + 2880 * 4096 - 4 * (5120 + 2880))
    assert dense.flops == fp8.flops


def layer(**changes: Any) -> DecoderLayer:
    return dataclasses.replace(drawn()["weights"].layers[0], **changes)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([], ValueError, "layers must hold at least one layer, got none"),
        (
            [layer(), layer(router=torch.ones(5, 32))],
            ValueError,
            r"layers\[1\].router must be .*4, 32.* as in layers\[0\], got .*5, 32",
        ),
        ([layer(), layer(router_bias=None)], ValueError, r"layers\[1\].router_bias must be .* as in layers\[0\], got None"),
        ([layer(qkv=torch.ones(32, 64).t())], ValueError, r"layers\[0\].qkv must be contiguous, got strides \(1, 64\)"),
        ([layer(qkv_bias=None)], ValueError, "qkv_bias and projection_bias must be given together, got projection_bias alone"),
        ([layer(projection_bias=None)], ValueError, "given together, got qkv_bias alone"),
        ([layer(window_left=-2)], ValueError, r"layers\[0\].window_left must be at least -1, got -2"),
        ([layer(norm=3)], TypeError, r"layers\[0\].norm must be a tensor, got int"),
        (
            [layer(), layer(experts=MoEWeights(*[torch.ones(1)] * 6, layout="other"))],
            ValueError,
            r"layers\[1\].experts.layout must be canonical as in layers\[0\], got other",
        ),
    ],
)
def test_wrong_layers(layers: list[DecoderLayer], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^DecoderWeights: .*{message}"):
        DecoderWeights(layers)


def test_weights_with_other_windows_have_another_key() -> None:
    """A memoised decision must not serve weights with other windows, because the composed kernel keeps its parts' decisions."""
    one, other = DecoderWeights([layer()]), DecoderWeights([layer(window_left=9)])
    assert one.key == DecoderWeights([layer()]).key
    assert one.key != other.key


def test_a_drawn_sequence_without_tokens_is_rejected_by_the_operator() -> None:
    """The draw must not index the page table with -1: on a GPU this triggers a device-side assertion, after which the process
    cannot use the GPU."""
    arguments = drawn(Case("no tokens in one sequence", layer_inputs([0, 5], [0, -1], 32, 1, 2, 8, 4, 2, 24)))
    with pytest.raises(ValueError, match="cache_seqlens must be at least 1, got 0"):
        OP.check_call(arguments)
