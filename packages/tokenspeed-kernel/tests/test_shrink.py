"""Tests recipes of cases, and shrinking: the search for the smallest call with the same failure."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics import CaseResult, Status, verify_case
from tokenspeed_kernel.workbench.numerics.narrow import axes_of, count_items, first_items, narrow, narrowed
from tokenspeed_kernel.workbench.numerics.recipes import request_without_values
from tokenspeed_kernel.workbench.numerics.shrink import shrink, variations
from tokenspeed_kernel.workbench.numerics.verify import Fault
from tokenspeed_kernel.workbench.watching import replay
from tokenspeed_kernel_base.cases import DEFAULT, Case, Draw, Recipe, recipe
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

Impl = Callable[..., Any]


@recipe
def rows_of(
    *shape: int, lengths: list[int] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"x": draw.normal(*shape, dtype=dtype), **options}


@recipe
def doubled(make: Callable[[Draw], dict[str, Any]], factor: int = 2) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {name: value * factor for name, value in make(draw).items()}


# -- recipes ------------------------------------------------------------------------------------------------------------------


def test_a_recipe_draws_and_says_how_it_was_made() -> None:
    made = rows_of(3, 4, dtype=torch.float64, scale=2.0)
    assert isinstance(made, Recipe)
    assert made.values == {"shape": (3, 4), "dtype": torch.float64, "scale": 2.0}
    assert str(made) == "rows_of(3, 4, dtype=torch.float64, scale=2.0)"
    assert Case("one", made).build()["x"].shape == (3, 4)
    same = eval(str(made), {"rows_of": rows_of, "torch": torch})
    assert torch.equal(Case("one", same).build()["x"], Case("one", made).build()["x"])


def test_a_recipe_is_varied() -> None:
    made = rows_of(3, 4, dtype=torch.float64, scale=2.0)
    assert str(made.vary(shape=(1,), scale=DEFAULT)) == "rows_of(1, dtype=torch.float64)"
    assert str(made.vary(dtype=torch.float32, lengths=[1])) == "rows_of(3, 4, scale=2.0, lengths=[1])", "defaults are left out"
    assert made.values["scale"] == 2.0, "the first stays as it was"
    nested = doubled(made, 3)
    assert str(nested) == "doubled(rows_of(3, 4, dtype=torch.float64, scale=2.0), factor=3)"
    assert str(nested.vary(factor=2, make=made.vary(shape=(2,)))) == "doubled(rows_of(2, dtype=torch.float64, scale=2.0))"


def test_a_recipe_rejects_what_its_function_rejects() -> None:
    with pytest.raises(TypeError, match=r"unexpected|too many|got"):
        doubled(rows_of(1), 2, 3)  # type: ignore[call-arg]


@pytest.mark.parametrize("op", operators(), ids=str)
def test_large_cases_need_no_memory(op: Operator[Any, Any]) -> None:
    """Asserts that the arguments of large cases can be fake tensors. Real tensors would take gigabytes."""
    for case in [case for case in op.all_cases() if case.large][:2]:
        assert request_without_values(op, case) is not None


def test_a_random_order_under_fake_tensors() -> None:
    with FakeTensorMode():
        order = Draw("cpu", seed=3).order(20)
    assert order == Draw("cpu", seed=3).order(20)
    assert sorted(order) == [*range(20)]


@pytest.mark.parametrize("op", operators(), ids=str)
def test_every_operators_recipes_can_be_written_down(op: Operator[Any, Any]) -> None:
    recipes = [case for case in op.all_cases() if isinstance(case.make, Recipe) and not case.large]
    assert recipes, "some case of every operator can be varied"
    for case in recipes[:3]:
        made: Any = case.make
        room: dict[str, Any] = {
            "torch": torch,
            made.maker.__name__: getattr(sys.modules[made.maker.__module__], made.maker.__name__),
        }
        for inner in made.values.values():
            if isinstance(inner, Recipe):
                room[inner.maker.__name__] = getattr(sys.modules[inner.maker.__module__], inner.maker.__name__)
        assert eval(str(made), room) == made


# -- narrowing ----------------------------------------------------------------------------------------------------------------


def test_axes_are_read_off_the_check() -> None:
    op = get_operator("mha_prefill")
    arguments = op.complete(op.all_cases()[1].build())
    axes = axes_of(op, arguments)
    assert axes["q"] == ("tokens", "heads", "head_dim")
    assert axes["cu_seqlens"] == ("batch+1",)
    norm = get_operator("rmsnorm")
    case = next(case for case in norm.all_cases() if case.name == "odd hidden 1001, float16")
    assert axes_of(norm, norm.complete(case.build()))["x"] == ("...", "", "hidden")


def test_a_size_is_narrowed_wherever_it_stands() -> None:
    op = get_operator("qk_rmsnorm")
    arguments = narrow(op, op.complete(op.all_cases()[1].build()), "head_dim", 16)
    assert {name: t.shape[-1] for name, t in tensor_arguments(op.parameters, arguments)} == dict.fromkeys(
        ("q", "k", "q_weight", "k_weight"), 16
    )
    with pytest.raises(ValueError, match=r"no tensor of norm\.qk_rmsnorm has pages"):
        narrow(op, arguments, "pages", 1)


@pytest.mark.parametrize("mode", ["mha_prefill", "mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_with_kvcache",
                                  "mla_prefill", "mm", "rmsnorm", "moe_topk", "apply_rope", "sample_top_k_top_p"])  # fmt: skip
def test_the_first_items_of_a_batch_give_the_first_rows(mode: str) -> None:
    """If a call is cut to the first half of its items, its results must equal the first rows of the whole call's results."""
    op = get_operator(mode)
    checked = 0
    for case in op.all_cases():
        if case.large or checked == 3:
            continue
        arguments = op.complete(case.build())
        items = count_items(op, arguments)
        if items < 2:
            continue
        cut, rows = first_items(op, op.complete(case.build()), items // 2)
        assert count_items(op, cut) == items // 2
        whole, alone = op.reference(*arguments.values()), op.reference(*cut.values())
        for one, other in zip(_tensors(alone), _tensors(whole), strict=True):
            torch.testing.assert_close(one, other[:rows], rtol=0.02, atol=1e-3, equal_nan=True)
        checked += 1
    assert checked


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


# -- shrinking ----------------------------------------------------------------------------------------------------------------


def _register(mode: str, bad: Impl, name: str = "tried", **declared: Any) -> KernelSpec:
    """Registers a kernel that runs the reference and modifies its result."""
    op = get_operator(mode)

    def impl(*args: Any) -> Any:
        return bad(op, dict(zip(op.names, args, strict=True)))

    flags = {
        trait: any for case in op.all_cases() if not case.large for trait, value in _traits(op, case).items() if type(value) is bool
    }
    spec = KernelSpec(name, op.family, op.mode, solution="tried", format_signatures=None, traits=flags, **declared)
    KernelRegistry.get().register(spec, impl)
    return spec


@functools.cache
def _traits(op: Operator[Any, Any], case: Case) -> dict[str, Any]:
    return dict(op.request(op.complete(case.build())).traits)


def _case(mode: str, name: str) -> Case:
    return next(case for case in get_operator(mode).all_cases() if case.name == name)


def _doubled(op: Operator[Any, Any], arguments: dict[str, Any]) -> Any:
    return op.reference(*arguments.values()) * 2


def _window_off_by_one(op: Operator[Any, Any], arguments: dict[str, Any]) -> Any:
    if arguments["window_left"] >= 0:
        arguments = {**arguments, "window_left": arguments["window_left"] + 1}
    return op.reference(*arguments.values())


def _wrong_from_row_3_column_5(op: Operator[Any, Any], arguments: dict[str, Any]) -> Any:
    result = op.reference(*arguments.values())
    if result.shape[0] > 3:
        result[3:, ..., 5:] += 1
    return result


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("mode", "case", "bad", "smallest"),
    [
        (
            "mha_prefill",
            "window of the token alone",
            _window_off_by_one,
            "ragged([2], heads=1, kv_heads=1, window_left=0, head_dim=1)",
        ),
        (
            "mha_decode_with_kvcache",
            "four new tokens in a window of three",
            _window_off_by_one,
            "paged([2], kv_heads=1, window_left=0, head_dim=1, page_size=1, heads=1)",
        ),
        (
            "mm",
            "dense, odd sizes, float32, bias",
            _wrong_from_row_3_column_5,
            "dense(4, 1, 6, dtype=torch.float32, bias=torch.float32)",
        ),
        ("silu_and_mul", "odd d 1001, three axes, float16", None, ""),
    ],
)
def test_a_failing_case_shrinks(mode: str, case: str, bad: Impl | None, smallest: str) -> None:
    if bad is None:
        spec = _register(mode, lambda op, arguments: op.reference(*arguments.values()) + 1)
    else:
        spec = _register(mode, bad)
    given = _case(mode, case)
    result = verify_case(spec, given, "cpu")
    assert result.status is Status.FAILED
    shrunk = shrink(spec, given, result, "cpu", seconds=60)
    assert shrunk.exhausted
    assert shrunk.result.faults[0].kind == result.faults[0].kind
    assert shrunk.result == verify_case(spec, shrunk.case, "cpu"), "the case gives what is said of it"
    if smallest:
        assert str(shrunk.case.make) == smallest
    else:
        assert shrunk.case.build()["x"].numel() == 2, "one gate and one up"
    again = shrink(spec, given, result, "cpu", seconds=60)
    assert (str(again.case.make), again.tried) == (str(shrunk.case.make), shrunk.tried), "deterministic"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_case_that_is_a_plain_function_is_narrowed() -> None:
    spec = _register("silu_and_mul", _wrong_from_row_3_column_5)
    case = _case("silu_and_mul", "every second row of a wider tensor")
    shrunk = shrink(spec, case, verify_case(spec, case, "cpu"), "cpu", seconds=60)
    assert shrunk.case.build()["x"].shape == (4, 12)
    assert "case = narrowed(op, case, items=4" in shrunk.reproducer
    room: dict[str, Any] = {}
    exec(shrunk.reproducer.replace("print(", "said = ("), room)
    assert room["said"] == shrunk.result.reason != ""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_fault_is_not_mistaken_for_the_same() -> None:
    """Smaller calls of this kernel raise an error. The original fault is a wrong value, so shrinking must not end at a call with
    the error."""

    def bad(op: Operator[Any, Any], arguments: dict[str, Any]) -> Any:
        if arguments["x"].shape[0] < 5:
            raise RuntimeError("too few rows")
        return op.reference(*arguments.values()) + 1

    spec = _register("silu_and_mul", bad)
    case = _case("silu_and_mul", "llama-70b decode 8, one of 8 ranks")
    shrunk = shrink(spec, case, verify_case(spec, case, "cpu"), "cpu", seconds=60)
    assert shrunk.result.status is Status.FAILED
    assert shrunk.case.build()["x"].shape == (6,), "one axis, five or more, and even"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["tokenspeed_kernel.workbench.numerics.shrink"]
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))  # type: ignore[attr-defined]
    spec = _register("silu_and_mul", lambda op, arguments: op.reference(*arguments.values()) + 1)
    case = _case("silu_and_mul", "llama-70b decode 8, one of 8 ranks")
    shrunk = shrink(spec, case, verify_case(spec, case, "cpu"), "cpu", seconds=8)
    assert not shrunk.exhausted
    assert shrunk.tried < 8


@pytest.mark.parametrize("op", operators(), ids=str)
def test_cases_of_every_operator_shrink_to_little(op: Operator[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If every call of a kernel is wrong, shrinking must end at a call that is smaller than the case, and find no smaller one."""
    failed = CaseResult("k", str(op), "c", Status.FAILED, faults=(Fault("values output", ""),))
    monkeypatch.setattr(sys.modules["tokenspeed_kernel.workbench.numerics.shrink"], "verify_case", lambda *args, **options: failed)
    spec = KernelSpec("tried", op.family, op.mode, solution="tried", format_signatures=None)
    case = next(case for case in op.all_cases()[1:] if isinstance(case.make, Recipe) and not case.large)

    def elements(of: Case) -> int:
        return sum(t.numel() for _, t in tensor_arguments(op.parameters, op.complete(of.build())))

    shrunk = shrink(spec, case, failed, "cpu", seconds=120)
    assert shrunk.exhausted
    assert elements(shrunk.case) < elements(case)
    assert elements(shrunk.case) <= 256, (str(case.make), str(shrunk.case.make))
    assert [*variations(op, case)], "and there is something to try"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_captured_call_is_narrowed() -> None:
    """The recipe of a captured call has no sizes to vary, only descriptions of arguments. So shrinking must cut the arguments
    themselves."""
    op, spec = get_operator("silu_and_mul"), _register("silu_and_mul", _doubled)
    with tk.shape_capture() as found:
        op.function(torch.ones(9, 8))
    case = replay(found.get()[0])
    shrunk = shrink(spec, case, verify_case(spec, case))
    assert shrunk.case.build()["x"].shape == (1, 2)
    room: dict[str, Any] = {}
    exec(compile(shrunk.reproducer.replace("print(", "found = ("), "reproducer", "exec"), room)
    assert room["found"] == shrunk.result.reason


def test_narrowing_twice_is_one_step() -> None:
    op = get_operator("rmsnorm")
    case = narrowed(op, narrowed(op, op.all_cases()[1], items=8), items=3, hidden=4)
    assert case.make.steps == (("items", 3), ("hidden", 4))  # type: ignore[attr-defined]
    assert case.build()["x"].shape == (3, 4)
