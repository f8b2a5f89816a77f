"""Tests the public function that an operator's declaration creates: argument checks, outputs, and methods."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import operator as operator_module
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.operator import get_operator, operators
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.parameters import tensor_arguments, with_tensors
from tokenspeed_kernel_base.platform import PlatformInfo, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError, kernel_override

X, W = torch.ones(2, 4), torch.ones(4)


def scale(
    x: Tensor, factor: float = 2.0, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns x times factor."""
    return x * factor if residual is None else (x * factor, x + residual)


@pytest.fixture
def toy(declare: Callable[..., Any]) -> Any:
    """Declares the operator ``scale`` with all hooks. ``toy.launched`` records the calls that reach a kernel."""
    function = declare(scale, formats=("x",), traits={"width": int, "negative": bool})
    function.launched = []

    @function.traits
    def _(x: Tensor, factor: float) -> dict[str, Any]:
        return {"width": x.shape[-1], "negative": factor < 0}

    @function.check
    def _(check: Any, x: Tensor, factor: float, residual: Tensor | None) -> None:
        check.tensor("x", x, "... width", {torch.float32, torch.bfloat16})
        check.require(factor != 0, "factor", "not 0", factor)
        check.same_shape("residual", residual, "x", x)

    @function.fake
    def _(x: Tensor, residual: Tensor | None) -> Any:
        return torch.empty_like(x) if residual is None else (torch.empty_like(x), torch.empty_like(x))

    @function.cost
    def _(x: Tensor) -> Cost:
        return Cost(x.numel(), 2 * x.numel())

    @function.cases
    def _() -> list[Case]:
        return [Case("one", lambda draw: {"x": draw.normal(2, 3)})]

    def spy(x: Tensor, factor: float, residual: Tensor | None, out: Tensor | None) -> Any:
        function.launched.append((x.shape, factor))
        return function.operator.reference(x, factor, residual, out)

    register_kernel(
        "testing",
        function.__name__,
        name=f"spy_{function.__name__}",
        solution="spy",
        signatures=None,
        traits={"negative": any},
        priority=19,
    )(spy)
    return function


# -- an ordinary function ---------------------------------------------------------------------------------------------------------


def test_it_looks_like_its_body(toy: Any) -> None:
    signature = inspect.signature(toy)
    assert [*signature.parameters] == ["x", "factor", "residual", "out", "override", "solution"]
    assert signature.parameters["factor"].default == 2.0
    assert signature.parameters["override"].kind is inspect.Parameter.KEYWORD_ONLY
    assert toy.__doc__ == "Returns x times factor."
    assert toy.__qualname__ == "scale"
    assert toy.__module__ == __name__
    assert inspect.isfunction(toy)
    assert toy.operator.function is toy
    assert str(toy.operator).startswith("testing.scale_")


@pytest.mark.parametrize("op", operators(), ids=str)
def test_public_functions_are_ordinary(op: Any) -> None:
    function = op.function
    hints = typing.get_type_hints(function)
    assert set(hints) == {*op.names, "override", "solution", "return"}
    assert hints["override"] == (str | None)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert functools.partial(function, 1).func is function
    assert inspect.signature(function).bind(*[None] * len(op.names), override="k", solution=None)


def test_arguments_go_by_position_and_name(toy: Any) -> None:
    assert torch.equal(toy(X, 3.0), X * 3)
    assert torch.equal(toy(factor=3.0, x=X), X * 3)
    assert torch.equal(functools.partial(toy, factor=3)(X), X * 3)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        toy()
    with pytest.raises(TypeError, match="unexpected keyword argument 'fctor'"):
        toy(X, fctor=1)
    with pytest.raises(TypeError, match="multiple values"):
        toy(X, x=X)


# -- wrong calls ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0],), r"x must be a tensor, got list \[1.0, 2.0\]"),
        ((None,), "x must be a tensor, got None"),
        (("text",), "x must be a tensor, got str 'text'"),
        ((3,), "x must be a tensor, got int 3"),
        ((X.numpy(),), "x must be a tensor, got ndarray"),
        ((X, "2"), "factor must be float, got str '2'"),
        ((X, None), "factor must be float, got None"),
        ((X, True), "factor must be float, got bool True"),
        ((X, [2.0]), r"factor must be float, got list \[2.0\]"),
        ((X, torch.tensor(2.0)), "factor must be float, got a float32 tensor"),
        ((X, 2.0, 3), "residual must be a tensor or None, got int 3"),
        ((X, 2.0, None, "out"), "out must be a tensor or None, got str 'out'"),
        ((X.double(),), "x must be a tensor of bfloat16 or float32, got float64"),
        ((X, 2.0, None, X.double()), "out must be float32, got a float64 tensor"),
    ],
)
def test_wrong_types(toy: Any, arguments: tuple[Any, ...], message: str) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^{toy.__name__}: {message}"):
            toy(*arguments)
    with pytest.raises(TypeError, match=message):
        toy.bind(*arguments)
    with pytest.raises(TypeError, match=message):
        toy.explain(*arguments)
    assert toy.launched == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(()),), r"x must be of shape \[..., width\], got \[\]"),
        ((X, 0.0), "factor must be not 0, got 0.0"),
        ((X, 2.0, torch.ones(3, 4)), r"residual must be of shape \[2, 4\] like x, got \[3, 4\]"),
        ((X, 2.0, None, torch.ones(8)), r"out must have shape \[2, 4\], got a float32 tensor of shape \[8\]"),
        ((X, 2.0, torch.ones(2, 4, device="meta")), "residual must be on cpu like x, got a float32 tensor of shape .* on meta"),
    ],
)
def test_wrong_values(toy: Any, arguments: tuple[Any, ...], message: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{toy.__name__}: {message}"):
            toy(*arguments)
    assert toy.launched == []


def test_a_wrong_call_after_a_right_one_is_still_wrong(toy: Any) -> None:
    toy(X)
    toy(X, 2)
    with pytest.raises(ValueError, match="factor must be not 0"):
        toy(X, 0)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        toy([[1.0] * 4] * 2)
    with pytest.raises(TypeError, match="out must be a tensor or None"):
        toy(X, 2.0, None, [])
    assert len(toy.launched) == 2


@pytest.mark.parametrize("name", ["override", "solution"])
def test_overrides_and_solutions_are_names(toy: Any, name: str) -> None:
    for wrong in (3, b"spy", ["spy"], toy):
        with pytest.raises(TypeError, match=rf"{toy.__name__}: {name} must be str or None, got "):
            toy(X, **{name: wrong})
        with pytest.raises(TypeError, match=rf"{toy.__name__}: {name} must be str or None, got "):
            toy.bind(X, **{name: wrong})


def test_an_output_that_the_call_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"rmsnorm: residual_out must be None.*got a float32"):
        rmsnorm(X, W, residual_out=X.clone())


# -- outputs ----------------------------------------------------------------------------------------------------------------------


def test_out_receives_the_result(toy: Any) -> None:
    out = torch.empty(2, 4)
    assert toy(X, out=out) is out
    assert torch.equal(out, X * 2)
    first, second = toy(X, residual=X, out=out)
    assert first is out
    assert torch.equal(second, X + X)


def test_out_may_be_an_input() -> None:
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    wanted = rmsnorm(x, W, residual=residual)
    got = rmsnorm(x, W, residual=residual, out=x, residual_out=residual)
    assert got[0] is x
    assert got[1] is residual
    assert torch.equal(x, wanted[0])
    assert torch.equal(residual, wanted[1])


def test_out_may_be_strided(toy: Any) -> None:
    out = torch.zeros(4, 2).t()
    assert toy(X, out=out) is out
    assert torch.equal(out, X * 2)


def test_empty_outputs_launch_nothing(toy: Any) -> None:
    empty, out = torch.empty(0, 4), torch.empty(0, 4)
    for _ in range(2):
        assert toy(empty).shape == (0, 4)
        assert toy(empty, out=out) is out
        assert [r.shape for r in toy(empty, residual=empty)] == [(0, 4), (0, 4)]
    assert toy(empty, residual=empty, out=out)[0] is out
    bound = toy.bind(empty)
    assert bound(empty, 2.0, None, None).shape == (0, 4)
    assert toy.launched == []
    with pytest.raises(ValueError, match="factor must be not 0"):
        toy(empty, 0.0)


# -- which kernel -----------------------------------------------------------------------------------------------------------------


def test_overrides_of_a_call(toy: Any) -> None:
    toy(X)
    assert len(toy.launched) == 1
    toy(X, override=f"reference_{toy.__name__}")
    toy(X, solution="reference")
    with kernel_override("testing", toy.__name__, f"reference_{toy.__name__}"):
        toy(X)
    assert len(toy.launched) == 1
    toy(X)
    assert len(toy.launched) == 2
    with pytest.raises(NoKernelFoundError, match="override=: no kernel named absent"):
        toy(X, override="absent")
    with pytest.raises(NoKernelFoundError, match="solution: is of solution spy, the request is for triton"):
        toy(X, solution="triton")


def test_bind_returns_the_kernel_itself(toy: Any) -> None:
    bound = toy.bind(X, factor=3.0)
    assert bound is KernelRegistry.get().get_impl(f"spy_{toy.__name__}")
    assert torch.equal(bound(X, 3.0, None, None), X * 3)
    assert toy.bind(X, solution="reference") == toy.operator.reference
    with pytest.raises(TypeError, match=rf"{toy.__name__}: missing a required argument: 'x'"):
        toy.bind()
    with pytest.raises(TypeError, match=rf"{toy.__name__}: got an unexpected keyword argument 'y'"):
        toy.bind(X, y=1)


def test_explain_launches_nothing(toy: Any) -> None:
    explanation = toy.explain(X, factor=-1.0)
    assert explanation.chosen.name == f"spy_{toy.__name__}"
    assert explanation.request.traits == {"width": 4, "negative": True}
    assert "formats  x: float32" in str(explanation)
    assert toy.explain(X, override="absent").chosen is None
    assert toy.launched == []


def test_a_pretended_platform_never_launches(toy: Any, cdna4: PlatformInfo) -> None:
    import dataclasses

    with use_platform(dataclasses.replace(cdna4, pretended=True)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"is pretended: .* explained, nothing launches"):
                toy(X)
    assert toy.launched == []
    toy(X)
    assert len(toy.launched) == 1


def test_costs_cases_and_defaults(toy: Any) -> None:
    op = toy.operator
    assert op.cost_of({"x": X}) == Cost(8, 16)
    assert [c.name for c in op.all_cases()] == ["one"]
    assert op.complete({"x": X}) == {"x": X, "factor": 2.0, "residual": None, "out": None}


# -- declarations that are wrong --------------------------------------------------------------------------------------------------


def no_annotation(x) -> Tensor: ...  # type: ignore[no-untyped-def]
def keyword_only(x: Tensor, *, y: int = 0) -> Tensor: ...
def strange(x: Tensor, y: dict[str, int]) -> Tensor: ...
def either(x: Tensor | int) -> Tensor: ...
def no_return(x: Tensor): ...  # type: ignore[no-untyped-def]
def returns_list(x: Tensor) -> list[Tensor]: ...
def no_tensor(n: int) -> Tensor: ...
def fine(x: Tensor, n: int = 0) -> Tensor: ...


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (no_annotation, {}, r"no_annotation\(x\) needs an annotation"),
        (keyword_only, {}, r"keyword_only\(y\): an operator's parameters are positional-or-keyword"),
        (strange, {}, r"y of type .* has no counterpart in a custom operator's schema"),
        (either, {}, r"either\(x\): a tensor cannot be in a union with another type"),
        (no_return, {}, "no_return must return None, a tensor or a tuple of tensors"),
        (returns_list, {}, "returns_list must return None, a tensor or a tuple of tensors"),
        (no_tensor, {}, "no_tensor.*: an operator takes at least one tensor that may not be absent"),
        (fine, {"formats": ("y",)}, "y of the declaration are not parameters of fine"),
        (fine, {"mutates": ("cache",)}, "cache of the declaration are not parameters of fine"),
        (fine, {"hints": ("lengths",)}, "lengths of the declaration are not parameters of fine"),
        (fine, {"bounds": ("max_rows",)}, "max_rows of the declaration are not parameters of fine"),
        (fine, {"bounds": ("x",)}, r"fine\(x\): a bound must be annotated as int or int \| None"),
        (fine, {"varying": ("rows",), "capacity": ("rows",)}, "rows must be declared as one of varying, capacity and bounds"),
    ],
)
def test_wrong_declarations(declare: Callable[..., Any], registry: KernelRegistry, body: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        declare(body, **options)
    assert registry.list_kernels() == [], "a wrong declaration leaves nothing behind"


def test_a_hook_asks_for_parameters_only(toy: Any) -> None:
    with pytest.raises(TypeError, match=r"work hook asks for y, .* not parameters"):

        @toy.work
        def _(y: int) -> None: ...


def test_sizes_have_kinds(declare: Callable[..., Any]) -> None:
    """Asserts that only sizes which the operator declares as varying are rounded to buckets. Two models with different state sizes
    must not share a measured result."""

    def scan(x: Tensor, state: Tensor, cache: Tensor, max_rows: int | None = None) -> Tensor:
        return x

    function = declare(scan, formats=("x",), varying=("rows",), capacity=("slots",), bounds=("max_rows",))

    @function.check
    def _(check: Any, x: Tensor, state: Tensor, cache: Tensor) -> None:
        check.tensor("x", x, "rows width")
        check.tensor("state", state, "state_dim")
        check.tensor("cache", cache, "slots width")

    def request(**options: Any) -> Any:
        return function.explain(torch.ones(5, 3), torch.ones(96), torch.ones(7, 3), **options).request

    assert request().sizes == {"rows": 5, "width": 3, "state_dim": 96}
    assert request().buckets == {"rows": 8, "width": 3, "state_dim": 96}
    assert request(max_rows=9).buckets == {"rows": 8, "width": 3, "state_dim": 96, "max_rows": 16}


def test_a_mode_is_declared_once() -> None:
    with pytest.raises(TypeError, match=r"rmsnorm is declared twice: .*ops.norm.rmsnorm"):
        operator_module.operator("other", "rmsnorm")(fine)


def test_get_operator() -> None:
    assert get_operator("rmsnorm") is get_operator("norm.rmsnorm") is rmsnorm.operator
    with pytest.raises(KeyError, match=r"no operator rmsnrom; did you mean rmsnorm\?"):
        get_operator("rmsnrom")
    assert [str(op) for op in operators()] == sorted(str(op) for op in operators())


def test_tensors_are_converted_also_in_objects() -> None:
    op = moe_apply.operator
    arguments = op.complete(op.all_cases()[0].build("cpu"))
    moved = with_tensors(op.parameters, arguments, lambda tensor: tensor.to("meta"))
    assert {name: tensor.device.type for name, tensor in tensor_arguments(op.parameters, moved)} == {
        name: "meta" for name, _ in tensor_arguments(op.parameters, arguments)
    }
    assert "weights.w13_weight" in dict(tensor_arguments(op.parameters, moved))
    assert moved["plan"] is arguments["plan"]
