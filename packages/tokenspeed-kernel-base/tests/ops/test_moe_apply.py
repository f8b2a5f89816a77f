from __future__ import annotations

import dataclasses
import timeit
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.selection import NoKernelFoundError

OPERATOR = get_operator("moe_apply")
CASES = {case.name: case for case in OPERATOR.all_cases() if not case.large}
ATTRIBUTES = [f"{w}_weight{part}" for w in ("w13", "w2") for part in ("", "_scale", "_bias")]

Arguments = dict[str, Any]


def build(name: str, **changes: Any) -> Arguments:
    """Draws a case's arguments, with changed fields of the plan."""
    arguments = CASES[name].build()
    return {**arguments, "plan": dataclasses.replace(arguments["plan"], **changes)}


# -- an independent implementation: NumPy, float64, one token and slot at a time -------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(weight: torch.Tensor, scale: torch.Tensor | None, global_scale: torch.Tensor | None = None) -> np.ndarray:
    if scale is None:
        return weight.double().numpy()
    if weight.dtype == torch.uint8:
        codes = weight.numpy()
        values = np.empty((*codes.shape[:-1], codes.shape[-1] * 2))
        values[..., 0::2], values[..., 1::2] = E2M1[codes & 15], E2M1[codes >> 4]
    else:
        values = weight.double().numpy()
    if global_scale is not None:
        return values * np.repeat(scale.double().numpy(), 16, axis=-1) * global_scale.double().numpy()[:, None, None]
    if scale.dtype == torch.uint8:
        return values * np.repeat(np.exp2(scale.numpy().astype(np.float64) - 127), 32, axis=-1)
    if scale.shape[1:] == (weight.shape[1], 1):
        return values * scale.double().numpy()
    rows, columns = np.arange(values.shape[1]) // 128, np.arange(values.shape[2]) // 128
    return values * scale.double().numpy()[:, rows][:, :, columns]


def rounded(row: np.ndarray, activation_dtype: str, static: torch.Tensor | None) -> np.ndarray:
    if activation_dtype == "fp8_static":
        assert static is not None
        codes = torch.from_numpy(np.clip(row / float(static), -448, 448)).float().to(torch.float8_e4m3fn)
        return codes.double().numpy() * float(static)
    if activation_dtype == "fp8":
        scale = max(float(np.abs(row).max()) / 448, 2.0**-126)
        return torch.from_numpy(row / scale).float().to(torch.float8_e4m3fn).double().numpy() * scale
    if activation_dtype == "mxfp4":
        blocks = row.reshape(-1, 32)
        scale = np.exp2(np.floor(np.log2(np.maximum(np.abs(blocks).max(1, keepdims=True), 2.0**-120))) - 2)
        even_first = np.concatenate([E2M1[0::2], E2M1[1::2]])  # argmin returns the first minimum, and a tie rounds to even
        distance = np.abs(np.clip(blocks / scale, -6, 6)[..., None] - even_first)
        return (even_first[distance.argmin(-1)] * scale).reshape(-1)
    return row


def independent(x: torch.Tensor, weights: Any, topk_weights: torch.Tensor, topk_ids: torch.Tensor, plan: MoEPlan) -> torch.Tensor:
    parts = ("", "_scale", "_global_scale")
    w13, w2 = (decoded(*(getattr(weights, f"{w}_weight{part}", None) for part in parts)) for w in ("w13", "w2"))
    b13, b2 = ((b.double().numpy() if b is not None else None) for b in (weights.w13_weight_bias, weights.w2_weight_bias))
    result = np.zeros(tuple(x.shape))
    for token in range(x.shape[0]):
        row = rounded(x[token].double().numpy(), plan.activation_dtype, weights.w13_input_scale)
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            if expert < 0:
                continue
            both = w13[expert] @ row + (b13[expert] if b13 is not None else 0)
            size = plan.intermediate_size
            gate, up = (both[0::2], both[1::2]) if plan.w13_interleaved else (both[:size], both[size:])
            if plan.limit is not None:
                gate, up = np.minimum(gate, plan.limit), np.clip(up, -plan.limit, plan.limit)
            with np.errstate(over="ignore"):  # if exp overflows, the quotient is 0, as it should be
                hidden = (up + plan.beta) * gate / (1 + np.exp(-plan.alpha * gate))
            between = rounded(hidden, plan.activation_dtype, weights.w2_input_scale)
            down = w2[expert] @ between + (b2[expert] if b2 is not None else 0)
            result[token] += float(topk_weights[token, slot]) * down
    return torch.from_numpy(result)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest absolute difference, divided by the largest expected magnitude."""
    if not got.numel():
        return 0.0
    return float((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("name", CASES)
def test_cases_against_a_loop_in_float64(name: str) -> None:
    arguments = build(name)
    got = moe_apply(**arguments)
    assert got.dtype == arguments["x"].dtype
    assert got.shape == arguments["x"].shape
    expected = independent(**arguments)
    if arguments["plan"].activation_dtype == "none":
        assert error(got, expected) <= (1e-5 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps)
        return
    # The operator quantises a float32 intermediate, and the expected result a float64 intermediate. So some elements round to a
    # neighbouring quantised value.
    assert error(got, expected) < 0.02
    exact = dataclasses.replace(arguments["plan"], activation_dtype="none")
    assert error(got, independent(**{**arguments, "plan": exact})) > 2 * error(got, expected)


def test_float64_is_computed_in_float64() -> None:
    arguments = build("dense float32, 4 experts, odd sizes", dtype=torch.float64)
    weights = arguments["weights"]
    arguments["weights"] = dataclasses.replace(
        weights, w13_weight=weights.w13_weight.double(), w2_weight=weights.w2_weight.double()
    )
    arguments["x"] = arguments["x"].double()
    assert error(moe_apply(**arguments), independent(**arguments)) < 1e-14


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.702, 1.0), (0.5, -1.0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activation_options(limit: float | None, alpha: float, beta: float, interleaved: bool) -> None:
    options: Arguments = {"limit": limit, "alpha": alpha, "beta": beta, "w13_interleaved": interleaved}
    arguments = build("dense float32, 4 experts, odd sizes", **options)
    assert error(moe_apply(**arguments), independent(**arguments)) < 1e-6


def test_plain_options_are_a_silu_gated_unit() -> None:
    arguments = build("dense float32, 4 experts, odd sizes")
    x, weights = arguments["x"], arguments["weights"]
    gate, up = (x @ weights.w13_weight[2].t()).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ weights.w2_weight[2].t()
    arguments["topk_ids"] = torch.full_like(arguments["topk_ids"], 2)
    arguments["topk_weights"] = torch.full_like(arguments["topk_weights"], 0.5)
    torch.testing.assert_close(moe_apply(**arguments), expected)


@pytest.mark.parametrize(
    ("name", "activation_dtype"),
    [
        ("mxfp4, gpt-oss options", "none"),
        ("mxfp4, gpt-oss options", "fp8"),
        ("mxfp4, gpt-oss options", "mxfp4"),
        ("fp8 blocks, fp8 activations", "none"),
        ("fp8 blocks, fp8 activations", "mxfp4"),
        ("fp8 blocks, blocks cut short", "none"),
        ("fp8 blocks, blocks cut short", "fp8"),
    ],
)
def test_quantised_weights_are_their_decoded_values(name: str, activation_dtype: str) -> None:
    arguments = build(name, activation_dtype=activation_dtype, dtype=torch.float32)
    arguments["x"] = arguments["x"].float()
    weights = arguments["weights"]
    dense = dataclasses.replace(weights, w13_weight_scale=None, w2_weight_scale=None)
    for w in ("w13", "w2"):
        values = decoded(getattr(weights, f"{w}_weight"), getattr(weights, f"{w}_weight_scale"))
        setattr(dense, f"{w}_weight", torch.from_numpy(values).float())
    plan = dataclasses.replace(arguments["plan"], weight_format="dense")
    assert torch.equal(moe_apply(**arguments), moe_apply(**{**arguments, "weights": dense, "plan": plan}))


def test_gpt_oss_experts_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    experts, router = modeling.GptOssExperts(config), modeling.GptOssTopKRouter(config)
    for parameter in (*experts.parameters(), *router.parameters()):
        torch.nn.init.normal_(parameter, std=0.7)  # large enough that the clamp at the limit matters
    x = torch.randn(11, 48)
    with torch.no_grad():
        _, scores, indices = router(x)
        expected = experts(x, indices, scores)
    plan = moe_apply.plan(
        6, 3, 48, 40, dtype=torch.float32, device="cpu", w13_interleaved=True, bias=True, alpha=1.702, limit=7.0, beta=1.0
    )
    weights = MoEWeights(
        experts.gate_up_proj.detach().mT,
        None,
        experts.gate_up_proj_bias.detach(),
        experts.down_proj.detach().mT,
        None,
        experts.down_proj_bias.detach(),
    )
    got = moe_apply(x, moe_apply.prepare(weights, plan), scores.detach(), indices.int(), plan)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


# -- properties -------------------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**31)
quick = settings(max_examples=20, deadline=None)


def drawn(seed: int) -> Arguments:
    return {**CASES["2 of 8 experts here"].build(seed=seed)}


@quick
@given(seeds)
def test_numbering_of_experts_does_not_matter(seed: int) -> None:
    arguments = CASES["mxfp4, gpt-oss options"].build(seed=seed)
    order = torch.randperm(arguments["plan"].num_experts, generator=torch.Generator().manual_seed(seed))
    weights = MoEWeights(*(t if t is None else t[order] for t in (getattr(arguments["weights"], a) for a in ATTRIBUTES)))
    renumbered = {**arguments, "weights": weights, "topk_ids": order.argsort().int()[arguments["topk_ids"].long()]}
    torch.testing.assert_close(moe_apply(**renumbered), moe_apply(**arguments), rtol=2e-2, atol=1e-3)


@quick
@given(seeds)
def test_tokens_do_not_see_each_other(seed: int) -> None:
    arguments = drawn(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:7]
    some = {**arguments, **{name: arguments[name][order] for name in ("x", "topk_weights", "topk_ids")}}
    torch.testing.assert_close(moe_apply(**some), moe_apply(**arguments)[order], rtol=1e-5, atol=1e-6)


@quick
@given(seeds)
def test_order_of_slots_does_not_matter(seed: int) -> None:
    arguments = drawn(seed)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    turned = {**arguments, **{name: arguments[name][:, order] for name in ("topk_weights", "topk_ids")}}
    torch.testing.assert_close(moe_apply(**turned), moe_apply(**arguments), rtol=1e-5, atol=1e-6)


@quick
@given(seeds, st.floats(-4, 4), st.floats(-4, 4))
def test_linear_in_the_routing_weights(seed: int, a: float, b: float) -> None:
    arguments = drawn(seed)
    first = arguments["topk_weights"]
    second = first.flip(0)
    results = [moe_apply(**{**arguments, "topk_weights": w}) for w in (a * first + b * second, first, second)]
    torch.testing.assert_close(results[0], a * results[1] + b * results[2], rtol=1e-4, atol=1e-5)


@quick
@given(seeds)
def test_ranks_of_expert_parallelism_add_up(seed: int) -> None:
    arguments = CASES["dense float32, 4 experts, odd sizes"].build(seed=seed)
    half = dataclasses.replace(arguments["plan"], num_experts=2)
    total = torch.zeros_like(arguments["x"])
    for rank in range(2):
        here = slice(2 * rank, 2 * rank + 2)
        weights = MoEWeights(*(t if t is None else t[here] for t in (getattr(arguments["weights"], a) for a in ATTRIBUTES)))
        local = arguments["topk_ids"] - 2 * rank
        ids = torch.where((local >= 0) & (local < 2), local, -7)
        total += moe_apply(arguments["x"], weights, arguments["topk_weights"], ids, half)
    torch.testing.assert_close(total, moe_apply(**arguments), rtol=1e-5, atol=1e-6)


def test_skipped_slots_weigh_nothing() -> None:
    arguments = build("dense bfloat16, gpt-oss options")
    arguments["topk_ids"][:, 1] = -1
    arguments["topk_ids"][4] = -1
    arguments["topk_weights"][:, 1] = torch.nan  # never read
    got = moe_apply(**arguments)
    assert not got.isnan().any()
    assert not got[4].any()
    assert got[3].any()


def test_an_expert_named_twice_counts_twice() -> None:
    arguments = build("dense float32, 4 experts, odd sizes")
    arguments["topk_ids"][:] = 3
    arguments["topk_weights"][:] = 1.0
    twice = moe_apply(**arguments)
    arguments["topk_ids"][:, 0] = -1
    torch.testing.assert_close(twice, 2 * moe_apply(**arguments))


def test_out_is_written_and_inputs_are_not() -> None:
    arguments = build("mxfp4 in all")
    tensors = [arguments["x"], arguments["topk_weights"], arguments["topk_ids"]]
    tensors += [t for a in ATTRIBUTES if (t := getattr(arguments["weights"], a)) is not None]
    before = [t.clone() for t in tensors]
    expected = moe_apply(**arguments)
    out = torch.empty_like(arguments["x"])
    assert moe_apply(**arguments, out=out) is out
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_weights_need_not_be_contiguous() -> None:
    arguments = build("dense float32, 4 experts, odd sizes")
    expected = moe_apply(**arguments)
    weights = arguments["weights"]
    turned = dataclasses.replace(weights, w13_weight=weights.w13_weight.mT.contiguous().mT)
    torch.testing.assert_close(moe_apply(**{**arguments, "weights": turned}), expected)


# -- weights objects of other makes ----------------------------------------------------------------------------------------------


def foreign(weights: MoEWeights) -> Any:
    return SimpleNamespace(**{name: getattr(weights, name) for name in ATTRIBUTES})


@pytest.mark.parametrize("name", ["dense bfloat16, gpt-oss options", "mxfp4 in all", "no tokens"])
def test_any_object_with_the_attributes_will_do(name: str) -> None:
    arguments = build(name)
    other = {**arguments, "weights": foreign(arguments["weights"])}
    expected = moe_apply(**arguments)
    assert torch.equal(moe_apply(**other), expected)
    out = torch.empty_like(arguments["x"])
    assert torch.equal(moe_apply(**other, out=out), expected)
    assert moe_apply.explain(**other).chosen is moe_apply.explain(**arguments).chosen
    assert torch.equal(moe_apply.bind(**other)(*OPERATOR.complete(other).values()), expected)


def test_calls_with_foreign_weights_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = build("dense float32, 4 experts, odd sizes")
    arguments["weights"] = foreign(arguments["weights"])
    moe_apply(**arguments)
    monkeypatch.setattr(OPERATOR, "check_call", None)  # from now on, a call that takes the slow path fails
    assert timeit.timeit(lambda: moe_apply(**arguments), number=3) > 0


def test_layout_of_a_foreign_object_counts() -> None:
    arguments = build("dense float32, 4 experts, odd sizes")
    arguments["weights"] = foreign(arguments["weights"])
    moe_apply(**arguments)
    arguments["weights"].layout = "shuffled"
    with pytest.raises(ValueError, match=r"weights.layout .*'canonical'.*got 'shuffled'"):
        moe_apply(**arguments)
    arguments["weights"].layout = 3
    with pytest.raises(TypeError, match=r"weights.layout must be str, got int 3"):
        moe_apply(**arguments)


# -- torch.compile -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda weights: weights, foreign], ids=["MoEWeights", "foreign"])
@pytest.mark.parametrize("name", ["dense bfloat16, gpt-oss options", "mxfp4, concatenated, fp8 activations"])
def test_compiles_in_one_graph(name: str, make: Any) -> None:
    arguments = build(name)
    arguments["weights"] = make(arguments["weights"])
    compiled = torch.compile(lambda **kwargs: moe_apply(**kwargs) * 2, fullgraph=True)
    assert torch.equal(compiled(**arguments), moe_apply(**arguments) * 2)
    out = torch.empty_like(arguments["x"])
    assert torch.equal(compiled(**arguments, out=out), out * 2)
    assert torch.equal(out, moe_apply(**arguments))


def test_compiles_for_any_number_of_tokens() -> None:
    arguments = build("dense bfloat16, gpt-oss options")
    compiled = torch.compile(lambda **kwargs: moe_apply(**kwargs), fullgraph=True, dynamic=True)
    for tokens in (9, 4, 2):
        few = {**arguments, **{name: arguments[name][:tokens] for name in ("x", "topk_weights", "topk_ids")}}
        assert torch.equal(compiled(**few), moe_apply(**few))


@pytest.mark.parametrize("with_out", [False, True])
def test_opcheck(with_out: bool, opcheck: Any) -> None:
    arguments = build("mxfp4, gpt-oss options")
    out = torch.empty_like(arguments["x"]) if with_out else None
    opcheck(moe_apply, moe_apply.operator.complete({**arguments, "out": out}))


# -- wrong calls -------------------------------------------------------------------------------------------------------------------

PLAN = "dense float32, 4 experts, odd sizes"  # 5 tokens, 4 experts, top 2, hidden 10, intermediate 7
WRONG: list[tuple[type[Exception], str, Arguments]] = [
    (
        ValueError,
        r"x must be of shape \[tokens, hidden\] where hidden is 10 in plan.hidden_size, got \[5, 11\]",
        {"x": torch.zeros(5, 11)},
    ),
    (TypeError, "x must be a tensor of float32, got bfloat16", {"x": torch.zeros(5, 10, dtype=torch.bfloat16)}),
    (TypeError, "weights must be an object with w13_weight, .*w2_weight_bias, got dict", {"weights": {}}),
    (TypeError, "weights must be MoEWeights, got NoneType None", {"weights": None}),
    (ValueError, r"topk_weights must be of shape \[tokens, top_k\] where top_k is 2", {"topk_weights": torch.zeros(5, 3)}),
    (ValueError, r"topk_weights must be of shape .* where tokens is 5 in x", {"topk_weights": torch.zeros(4, 2)}),
    (TypeError, "topk_weights must be a tensor of float32", {"topk_weights": torch.zeros(5, 2).half()}),
    (TypeError, "topk_ids must be a tensor of int32, got int64", {"topk_ids": torch.zeros(5, 2, dtype=torch.int64)}),
    (ValueError, "topk_ids must be of shape", {"topk_ids": torch.zeros(10, dtype=torch.int32)}),
    (
        ValueError,
        "topk_ids must be below plan.num_experts = 4, got an id 4",
        {"topk_ids": torch.full((5, 2), 4, dtype=torch.int32)},
    ),
    (TypeError, "plan must be MoEPlan, got dict", {"plan": {}}),
    (TypeError, "out must be float32", {"out": torch.zeros(5, 10).half()}),
    (ValueError, r"out must have shape \[5, 10\]", {"out": torch.zeros(5, 9)}),
]


@pytest.mark.parametrize(("kind", "message", "changes"), WRONG, ids=[w[1][:40] for w in WRONG])
def test_wrong_calls(kind: type[Exception], message: str, changes: Arguments) -> None:
    with pytest.raises(kind, match=message):
        moe_apply(**{**build(PLAN), **changes})


def test_ids_are_checked_again_when_they_were_written_to() -> None:
    arguments = build(PLAN)
    moe_apply(**arguments)
    arguments["topk_ids"][0, 0] = 99
    with pytest.raises(ValueError, match="got an id 99"):
        moe_apply(**arguments)


def test_a_plan_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"plan.limit must be positive or None, got -1"):
        moe_apply(**build(PLAN, limit=-1.0))
    with pytest.raises(ValueError, match=r"plan.weight_format must be one of .*got 'int3'"):
        moe_apply(**build(PLAN, weight_format="int3"))


def test_the_reference_refuses_processed_weights_even_when_it_is_wanted_by_name() -> None:
    arguments = build(PLAN, weight_layout="shuffled")
    arguments["weights"] = dataclasses.replace(arguments["weights"], layout="shuffled")
    with pytest.raises(NoKernelFoundError, match=r"traits gate: weight_layout=shuffled .* canonical"):
        moe_apply(**arguments, override="reference_moe_apply")
