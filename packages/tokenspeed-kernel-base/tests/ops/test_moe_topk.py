from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk

CASES = [case for case in get_operator("moe_topk").all_cases() if not case.large]


def brute_force(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[list[list[float]], list[list[int]]]:
    """Computes the definition for one token at a time, with lists, in float64. Values are ranked in float32 where the operator's
    docstring says so."""

    def best_first(values: list[float], which: Iterable[int]) -> list[int]:
        return sorted(which, key=lambda i: (0.0, i) if math.isnan(values[i]) else (1.0, -values[i], i))

    all_weights, all_ids = [], []
    for row in logits.double().tolist():
        if scoring == "softmax":
            exps = [math.exp(v - max(row)) for v in row]
            scores = [e / sum(exps) for e in exps]
        elif scoring == "sigmoid":
            scores = [0.0 if v == -math.inf else 1 / (1 + math.exp(-v)) for v in row]
        else:
            scores = [math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in row]
        if correction_bias is None:
            values = row
        else:
            values = [float(np.float32(s) + np.float32(b)) for s, b in zip(scores, correction_bias.tolist(), strict=True)]
        size = len(row) // num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        counted = 1 if correction_bias is None else 2
        worth = [sum(sorted((values[e] for e in group), reverse=True)[:counted]) for group in groups]
        open_groups = best_first(worth, range(num_groups))[:top_groups]
        eligible = [e for g in open_groups for e in groups[g]]
        ids = best_first(values, eligible)[:top_k]
        total = sum(scores[e] for e in ids) if renormalize else 1.0
        all_weights.append([scores[e] / total * scaling_factor for e in ids])
        all_ids.append(ids)
    return all_weights, all_ids


def compare(arguments: dict[str, Any]) -> None:
    weights, ids = moe_topk(**arguments)
    expected_weights, expected_ids = brute_force(**arguments)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert ids.tolist() == expected_ids
    expected = torch.tensor(expected_weights, dtype=torch.float64).reshape(weights.shape)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_against_brute_force(case: Any) -> None:
    compare(case.build())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_routing_against_brute_force(data: st.DataObject) -> None:
    num_groups = data.draw(st.sampled_from([1, 1, 2, 4]))
    experts = num_groups * data.draw(st.integers(1, 6))
    top_groups = data.draw(st.integers(1, num_groups))
    tokens = data.draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(tokens, experts, generator=generator) * 3
    if data.draw(st.booleans()):
        logits = logits.round()  # many ties
    bias = torch.randn(experts, generator=generator) * 0.5 if data.draw(st.booleans()) else None
    scores = ("softmax", "sigmoid", "sqrtsoftplus")
    compare(
        {
            # With float64 logits, the operator and the definition round the same scores to float32 before ranking them.
            "logits": logits.double() if bias is not None else logits,
            "top_k": data.draw(st.integers(1, experts // num_groups * top_groups)),
            "scoring": data.draw(st.sampled_from(scores)),
            "renormalize": data.draw(st.booleans()),
            "correction_bias": bias,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "scaling_factor": data.draw(st.sampled_from([1.0, 2.5])),
        }
    )


def test_gpt_oss_router_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    torch.manual_seed(0)
    router = modeling.GptOssTopKRouter(GptOssConfig(hidden_size=24, num_local_experts=16, num_experts_per_tok=4))
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    with torch.no_grad():
        logits, scores, indices = router(torch.randn(50, 24))
        weights, ids = moe_topk(logits, 4)
    assert ids.tolist() == indices.tolist()
    torch.testing.assert_close(weights, scores)


# The names of a transformers model, its router and its configuration; the configuration's name of the number of experts; and the
# operator's options for this router.
ROUTERS: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config", "n_routed_experts", {"renormalize": False}),
    ("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config", "n_routed_experts", {"scoring": "sigmoid"}),
    ("deepseek_v4", "DeepseekV4TopKRouter", "DeepseekV4Config", "num_local_experts", {"scoring": "sqrtsoftplus"}),
    ("mixtral", "MixtralTopKRouter", "MixtralConfig", "num_local_experts", {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig", "num_experts", {"renormalize": False}),
]


@pytest.mark.parametrize(("model", "router", "config", "experts", "options"), ROUTERS, ids=lambda value: str(value)[:20])
def test_routers_of_transformers(model: str, router: str, config: str, experts: str, options: dict[str, Any]) -> None:
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    torch.manual_seed(0)
    common = {"hidden_size": 64, "num_attention_heads": 1, experts: 16, "num_experts_per_tok": 3}
    if model in ("deepseek_v2", "deepseek_v3"):
        groups: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
        common |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "topk_method": "group_limited_greedy"}
    else:
        groups = {}
    settings_of_router = getattr(transformers, config)(**common)
    if model == "deepseek_v4":
        groups = {"scaling_factor": settings_of_router.routed_scaling_factor}
    module = getattr(modeling, router)(settings_of_router)
    torch.nn.init.normal_(module.weight, std=0.2)
    bias = getattr(module, "e_score_correction_bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias, std=0.3)
    x = torch.randn(200, 64)
    with torch.no_grad():
        *_, expected, indices = module(x)
        weights, ids = moe_topk(x @ module.weight.t(), 3, correction_bias=bias, **options, **groups)
    spread = torch.zeros(200, 16)
    torch.testing.assert_close(spread.scatter(1, ids.long(), weights), spread.scatter(1, indices, expected), rtol=1e-4, atol=1e-6)


def test_renormalised_softmax_is_softmax_over_the_chosen() -> None:
    logits = torch.randn(20, 32) * 4
    weights, ids = moe_topk(logits, 5)
    plain, same_ids = moe_topk(logits, 5, renormalize=False)
    assert torch.equal(ids, same_ids)
    torch.testing.assert_close(weights, torch.softmax(logits.gather(1, ids.long()), -1))
    torch.testing.assert_close(weights, plain / plain.sum(-1, keepdim=True))


def test_equal_logits_go_to_the_lower_id() -> None:
    _, ids = moe_topk(torch.zeros(2, 200), 7)
    assert ids.tolist() == [list(range(7))] * 2
    _, ids = moe_topk(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]]


def test_bias_bears_on_the_choice_only() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, ids = moe_topk(logits, 1, "sigmoid", False, torch.tensor([0.0, 0.0, 5.0]))
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_ranks_by_logits_even_where_scores_round_to_the_same() -> None:
    # In float32, the sigmoid of all three logits is 1.0, and the softmax of the first two is 0.
    logits = torch.tensor([[40.0, 41.0, 300.0]])
    assert moe_topk(logits, 3, "sigmoid")[1].tolist() == [[2, 1, 0]]
    assert moe_topk(logits, 3)[1].tolist() == [[2, 1, 0]]


def test_square_root_of_softplus() -> None:
    logits = torch.tensor([[0.0, 25.0, -40.0, math.inf, -math.inf]])
    weights, ids = moe_topk(logits, 5, "sqrtsoftplus", renormalize=False)
    assert ids.tolist() == [[3, 1, 0, 2, 4]]
    expected = [math.inf, 5.0, math.sqrt(math.log(2.0)), math.exp(-20.0), 0.0]
    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=1e-6, atol=0)
    weights, _ = moe_topk(torch.tensor([[9.0, 4.0, -800.0]]), 2, "sqrtsoftplus", scaling_factor=2.5)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.0]]), rtol=2e-3, atol=0)  # softplus(x) is nearly x here
    weights, _ = moe_topk(torch.full((1, 3), -800.0), 2, "sqrtsoftplus")
    assert weights.tolist() == [[0.0, 0.0]]


def test_chosen_experts_without_any_score_have_finite_weights() -> None:
    weights, _ = moe_topk(torch.tensor([[-200.0, -300.0]]), 2, "sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]
    bias = torch.tensor([0.0, 1e3, 1e3])  # the selected experts have probability 0
    weights, ids = moe_topk(torch.tensor([[500.0, 0.0, 0.0]]), 2, correction_bias=bias)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_closed_groups_are_closed_even_to_great_experts() -> None:
    # Group 0 has the best expert, group 1 the best pair of experts. Without a bias, groups are ranked by their best expert. With a
    # bias, they are ranked by their best pair.
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    assert moe_topk(logits, 2, "sigmoid", num_groups=2, top_groups=1)[1].tolist() == [[0, 1]]
    assert moe_topk(logits, 2, "sigmoid", True, torch.zeros(4), num_groups=2, top_groups=1)[1].tolist() == [[2, 3]]


def test_closed_groups_are_closed_even_beside_experts_at_minus_infinity() -> None:
    weights, ids = moe_topk(torch.tensor([[0.0, 0.0, 5.0, -torch.inf]]), 2, num_groups=2, top_groups=1)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[1.0, 0.0]]


def test_writes_into_outputs() -> None:
    logits = torch.randn(3, 8)
    expected_weights, expected_ids = moe_topk(logits, 2)
    weights_out, ids_out = torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int32)
    weights, ids = moe_topk(logits, 2, weights_out=weights_out, ids_out=ids_out)
    assert weights is weights_out
    assert ids is ids_out
    assert torch.equal(weights_out, expected_weights)
    assert torch.equal(ids_out, expected_ids)
    ids_out.zero_()
    assert moe_topk(logits, 2, ids_out=ids_out)[1] is ids_out
    assert torch.equal(ids_out, expected_ids)


@pytest.mark.parametrize("grouped", [False, True])
def test_compiles_and_passes_opcheck(grouped: bool, opcheck: Any) -> None:
    logits, bias = torch.randn(5, 8), torch.randn(8) * 0.1
    options: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "correction_bias": bias} if grouped else {}
    compiled = torch.compile(lambda x: moe_topk(x, 3, "sigmoid", **options), fullgraph=True)
    for got, expected in zip(compiled(logits), moe_topk(logits, 3, "sigmoid", **options), strict=True):
        assert torch.equal(got, expected)
    out = {"weights_out": torch.empty(5, 3), "ids_out": torch.empty(5, 3, dtype=torch.int32)}
    for outputs in ({}, out):
        arguments = {"logits": logits, "top_k": 3, "scoring": "sigmoid", **options, **outputs}
        opcheck(moe_topk, moe_topk.operator.complete(arguments))


LOGITS = torch.zeros(3, 8)
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "logits must be a tensor of .*got int32", {"logits": LOGITS.int()}),
    (ValueError, r"logits must be of shape \[tokens, experts\], got \[8\]", {"logits": LOGITS[0]}),
    (ValueError, "top_k must be from 1 to the 8 experts of logits, got 0", {"top_k": 0}),
    (ValueError, "top_k must be from 1 to the 8 experts of logits, got 9", {"top_k": 9}),
    (TypeError, "top_k must be int, got float", {"top_k": 2.0}),
    (ValueError, "scoring must be one of 'softmax', 'sigmoid', 'sqrtsoftplus', got 'relu'", {"scoring": "relu"}),
    (TypeError, "renormalize must be bool", {"renormalize": 1}),
    (ValueError, "correction_bias must be of shape .* where experts is 8 in logits", {"correction_bias": torch.zeros(7)}),
    (TypeError, "correction_bias must be a tensor of", {"correction_bias": torch.zeros(8, dtype=torch.int64)}),
    (ValueError, "num_groups must be a divisor of the 8 experts of logits, got 3", {"num_groups": 3}),
    (ValueError, "num_groups must be a divisor", {"num_groups": 0}),
    (ValueError, "top_groups must be from 1 to num_groups = 4, got 5", {"num_groups": 4, "top_groups": 5}),
    (ValueError, "top_groups must be from 1 to num_groups = 1, got 0", {"top_groups": 0}),
    (ValueError, "top_k must be from 1 to the 2 experts of 1 groups, got 3", {"top_k": 3, "num_groups": 4}),
    (ValueError, "scaling_factor must be finite, got nan", {"scaling_factor": math.nan}),
    (TypeError, "weights_out must be float32", {"weights_out": torch.empty(3, 2).half()}),
    (ValueError, r"ids_out must have shape \[3, 2\]", {"ids_out": torch.empty(3, 4, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), WRONG, ids=[w[1][:50] for w in WRONG])
def test_wrong_calls(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        moe_topk(**{"logits": LOGITS, "top_k": 2, **arguments})


def test_a_kernel_that_knows_plain_softmax_only_is_refused_the_rest() -> None:
    from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel

    def plain(logits, top_k, scoring, renormalize, correction_bias, num_groups, top_groups, scaling_factor, weights_out, ids_out):  # type: ignore[no-untyped-def]
        raise AssertionError("explained only")

    register_kernel("moe", "moe_topk", name="plain_topk", solution="test", signatures=None, traits={"renormalize": True})(plain)
    try:
        chosen = moe_topk.explain(LOGITS, 2).chosen
        assert chosen is not None
        assert chosen.name == "plain_topk"
        for options in (
            {"scoring": "sigmoid"},
            {"renormalize": False},
            {"correction_bias": torch.zeros(8)},
            {"num_groups": 2},
            {"scaling_factor": 2.0},
        ):
            chosen = moe_topk.explain(LOGITS, 2, **options).chosen
            assert chosen is not None
            assert chosen.name == "reference_moe_topk", options
    finally:
        KernelRegistry.get().unregister("plain_topk")
