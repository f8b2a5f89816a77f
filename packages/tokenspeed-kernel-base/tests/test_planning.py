"""Tests planning and weight preparation, two steps that an operator may have before its first call."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.operator import get_operator, plain_function
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.planning import ReferenceWarning
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.selection import NoKernelFoundError, kernel_override
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

Declare = Callable[..., Any]
SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 6}


def weights_of() -> MoEWeights:
    return MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)


def call_of(weights: Any, plan: Any) -> dict[str, Any]:
    topk_ids = torch.tensor([[0, 3], [2, 1], [3, -1]], dtype=torch.int32)
    return {"x": torch.randn(3, 8), "weights": weights, "topk_weights": torch.rand(3, 2), "topk_ids": topk_ids, "plan": plan}


# -- through a package's own function ----------------------------------------------------------------------------------------------


@pytest.fixture
def moe_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Writes a package with two kernels of moe_apply: one for canonical weights, and a preferred one whose layout has doubled
    weights."""
    folder = tmp_path / "expert_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "moe_apply.py").write_text(
        "import dataclasses\n"
        "from tokenspeed_kernel_base.operator import get_operator\n"
        "from tokenspeed_kernel_base.registry import register_kernel\n\n"
        "def double(weights, plan):\n"
        "    return dataclasses.replace(weights, w2_weight=weights.w2_weight * 2, layout='doubled')\n\n"
        "@register_kernel('moe', 'moe_apply', name='expert_plain', solution='plain', signatures=None, priority=18)\n"
        "def plain(x, weights, topk_weights, topk_ids, plan, out):\n"
        "    return get_operator('moe_apply').body(x, weights, topk_weights, topk_ids, plan)\n\n"
        "@register_kernel('moe', 'moe_apply', name='expert_doubled', solution='doubled', signatures=None, priority=19,\n"
        "                 traits={'weight_layout': 'doubled', 'processed_weights': True}, weight_preprocessor=double)\n"
        "def doubled(x, weights, topk_weights, topk_ids, plan, out):\n"
        "    return get_operator('moe_apply').body(x, weights, topk_weights / 2, topk_ids, plan)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "expert_kernels"
    for name in [name for name in sys.modules if name.startswith("expert_kernels")]:
        del sys.modules[name]


def test_a_package_plans_with_its_own_kernels(moe_package: str) -> None:
    everyones = moe_apply.plan(**SIZES, dtype=torch.float32, device="cpu")
    function = plain_function(moe_apply, moe_package)
    plan = function.plan(**SIZES, dtype=torch.float32, device="cpu")
    assert (plan.kernel, plan.weight_layout) == ("expert_doubled", "doubled")
    assert moe_apply.plan(**SIZES, dtype=torch.float32, device="cpu") == everyones, "its kernels serve itself alone"
    weights = weights_of()
    prepared = function.prepare(weights, plan)
    assert torch.equal(prepared.w2_weight, weights.w2_weight * 2)
    own = call_of(prepared, plan)
    wanted = moe_apply(**{**own, "weights": weights, "plan": everyones})
    torch.testing.assert_close(function(**own), wanted)
    assert function.explain(**own).chosen.name == "expert_doubled"

    assert function.plan(**SIZES, device="cpu", solution="plain").kernel == "expert_plain"
    with pytest.raises(NoKernelFoundError, match="override= requests reference_moe_apply, which"):
        function.plan(**SIZES, device="cpu", override="reference_moe_apply")
    with pytest.raises(ValueError, match=r"plan.kernel .*expert_kernels, got 'reference_moe_"):
        function.prepare(weights, everyones)
    with pytest.raises(ValueError, match=r"plan.kernel .*a public kernel, got 'expert_"):
        moe_apply.prepare(weights, plan)
    with kernel_override("moe", "moe_apply", "reference_moe_apply"):
        assert function.plan(**SIZES, device="cpu").kernel == "expert_doubled", "what others want is not asked of it"


def test_errors_name_the_function_that_was_called() -> None:
    with pytest.raises(ValueError, match=r"^moe_apply.plan: top_k must be at least 1, got 0"):
        moe_apply.plan(**{**SIZES, "top_k": 0}, device="cpu")
    with pytest.raises(ValueError, match=r"^moe_apply.plan: top_k must be at least 1, got 0"):
        moe_apply.plan(**{**SIZES, "top_k": 0}, device="cpu")
    with pytest.raises(TypeError, match=r"^moe_apply.plan: .*unexpected keyword .*'sinks'"):
        moe_apply.plan(**SIZES, sinks=True)
    with pytest.raises(TypeError, match=r"prepare: plan must be a MoEPlan.*got dict"):
        moe_apply.prepare(weights_of(), {})
    with pytest.raises(TypeError, match=r"prepare: plan must be a MoEPlan.*got dict"):
        moe_apply.prepare(weights_of(), {})


def test_a_gpu_plan_for_which_only_the_reference_is_eligible_warns() -> None:
    facts: dict[str, Any] = {**SIZES, "dtype": torch.float64}  # no kernel supports this dtype
    gpu = named_platform("sm_90")
    with pytest.warns(ReferenceWarning, match="plan: no kernel for NVIDIA H100.*reference_moe_"):
        moe_apply.plan(**facts, platform=gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe_apply.plan(**facts, device="cpu")
        moe_apply.plan(**facts, platform=gpu, solution="reference")
        moe_apply.plan(**facts, platform=gpu, override="reference_moe_apply")
        with kernel_override("moe", "moe_apply", "reference_moe_apply"):
            moe_apply.plan(**facts, platform=gpu)


# -- weights with more than six tensors --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ScaledWeights(MoEWeights, Resource):
    """Weights in the layout "scaled", in which each expert of w2 has its own factor."""

    factors: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


def _scale(weights: MoEWeights, plan: Any) -> ScaledWeights:
    factors = torch.arange(1.0, 1.0 + plan.num_experts)
    return ScaledWeights(
        weights.w13_weight, None, None, weights.w2_weight * factors.view(-1, 1, 1), None, None, layout="scaled", factors=factors
    )


def _scaled_kernel(x, weights, topk_weights, topk_ids, plan, out):  # type: ignore[no-untyped-def]
    factors = weights.factors[topk_ids.clamp(min=0).long()]
    return get_operator("moe_apply").body(x, weights, topk_weights / factors, topk_ids, plan)


@pytest.fixture
def scaled() -> Iterator[str]:
    layout = {"weight_layout": "scaled", "processed_weights": True}
    declared = {"solution": "testing", "signatures": None, "traits": layout, "priority": 19, "weight_preprocessor": _scale}
    register_kernel("moe", "moe_apply", name="scaled_moe", **declared)(_scaled_kernel)  # type: ignore[arg-type]
    yield "scaled_moe"
    KernelRegistry.get().unregister("scaled_moe")


def test_a_misspelled_fact_of_a_plan_is_named() -> None:
    with pytest.raises(TypeError, match=r"^moe_apply.plan: got an unexpected keyword argument 'topk'; did you mean top_k\?$"):
        moe_apply.plan(num_experts=4, topk=2, hidden_size=8, intermediate_size=6)
    with pytest.raises(TypeError, match=r"^moe_apply.plan: missing a required argument: 'top_k'$"):
        moe_apply.plan(num_experts=4)


def test_a_kernel_may_keep_more_than_six_tensors(scaled: str) -> None:
    weights = weights_of()
    plain = moe_apply.plan(**SIZES, dtype=torch.float32, device="cpu", solution="reference")
    plan = moe_apply.plan(**SIZES, dtype=torch.float32, device="cpu")
    assert plan.kernel == scaled
    prepared = moe_apply.prepare(weights, plan)
    assert isinstance(prepared, ScaledWeights)
    assert moe_apply.prepare(prepared, plan) is prepared
    own = call_of(prepared, plan)
    wanted = moe_apply(**{**own, "weights": weights, "plan": plain})
    torch.testing.assert_close(moe_apply(**own), wanted)
    compiled = torch.compile(lambda **call: moe_apply(**call), fullgraph=True)
    torch.testing.assert_close(compiled(**own), wanted)
    case = get_operator("moe_apply").all_cases()[0]
    drawn = moe_apply.operator.complete(case.build())
    of_case = moe_apply.operator.prepared(drawn, KernelRegistry.get().get_by_name(scaled))
    assert isinstance(of_case["weights"], ScaledWeights)
    torch.testing.assert_close(moe_apply(**of_case), moe_apply(**drawn))


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (Resource, TypeError, "what the weight_preprocessor of scaled_moe returns must be an object with w13_weight, got Resource"),
        (
            lambda: ScaledWeights(torch.ones(1), None, None, torch.ones(1), None, None),
            ValueError,
            "the layout of what the weight_preprocessor of scaled_moe returns must be 'scaled', got 'canonical'",
        ),
    ],
)
@pytest.mark.usefixtures("scaled")
def test_resources_that_will_not_do(made: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = moe_apply.plan(**SIZES, dtype=torch.float32, device="cpu")
    monkeypatch.setitem(vars(KernelRegistry.get().get_by_name("scaled_moe")), "weight_preprocessor", lambda weights, plan: made())
    with pytest.raises(error, match=message):
        moe_apply.prepare(weights_of(), plan)


# -- any operator ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    width: int
    kernel: str
    dtype: torch.dtype = torch.float32


class Packed(Resource):
    """A table in the layout of one kernel."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.key, self.rows = len(rows), rows


def _look_up(x: Tensor, table: Packed, plan: Plan) -> Tensor:
    return torch.stack([table.rows[int(i)] for i in x])


def _declare(declare: Declare, **options: Any) -> Any:
    stated = {"formats": {"x": ("dense",)}, "traits": {"width": int}}
    function = declare(_look_up, outs=(), **{"planned": "plan", **stated, **options})
    function.formats(lambda plan: format_signature(x=dense_tensor_format(plan.dtype)))
    function.traits(lambda plan: {"width": plan.width})
    function.fake(lambda x, plan: x.new_empty(len(x), plan.width))
    return function


def test_the_life_of_an_operator_with_a_resource(declare: Declare) -> None:
    """The resource has no layouts: all kernels use the same table. So a plan only selects the kernel."""
    function = _declare(declare)

    @function.plan
    def _(check: Any, width: int) -> Plan:
        check.require(width > 0, "width", "positive", width)
        return Plan(width, kernel="undecided")

    @function.prepare
    def _(preparation: Any, table: Tensor, plan: Plan) -> Packed:
        preparation.check.tensor("table", table, f"rows {plan.width}")
        return Packed(list(table))

    plan = function.plan(3, device="cpu")
    assert plan == Plan(3, f"reference_{function.operator.mode}")
    table = torch.randn(5, 3)
    packed = function.prepare(table, plan)
    x = torch.tensor([4, 0])
    assert torch.equal(function(x, packed, plan), table[x])
    assert torch.equal(function.bind(x, packed, plan)(x, packed, plan), table[x])
    compiled = torch.compile(lambda x, packed: function(x, packed, plan), fullgraph=True)
    assert torch.equal(compiled(x, packed), table[x])
    with pytest.raises(ValueError, match=rf"{function.operator.mode}.plan: width must be positive, got 0"):
        function.plan(0)
    with pytest.raises(ValueError, match=rf"{function.operator.mode}.prepare: table .*\[5, 3\]"):
        function.prepare(table, function.plan(4))


def test_wrong_declarations(declare: Declare) -> None:
    for options in ({"planned": "x"}, {"planned": "nothing"}, {"layout": "layout"}):
        with pytest.raises(TypeError, match=r"name a parameter .* dataclass with kernel"):
            declare(_look_up, outs=(), **{"planned": "plan", **options})
    with pytest.raises(TypeError, match="layout='layout' is for operators that are planned"):
        declare(_look_up, outs=(), layout="layout")
    function = declare(_look_up, outs=())
    with pytest.raises(TypeError, match=r"plan hook needs planned="):
        function.plan(lambda check: None)
    wrong_traits = pytest.raises(TypeError, match="traits hook must ask for plan alone")
    function = declare(_look_up, outs=(), planned="plan")
    function.traits(lambda x, plan: {})
    with wrong_traits:
        function.plan(lambda check: None)
    function = declare(_look_up, outs=(), planned="plan")
    function.plan(lambda check: None)
    with wrong_traits:
        function.traits(lambda x, plan: {})
    with pytest.raises(TypeError, match=r"prepare hook must ask for .* prepared, .* plan"):
        function.prepare(lambda preparation, plan, table: None)
