"""Tests `tokenspeed_kernel_base.interface`: names in a kernel's declaration that its operator does not declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.selection import select_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures, tensor_format
from tokenspeed_kernel_base.spec import RegistrationError
from tokenspeed_kernel_base.traits import TraitKind, at_least, at_most, multiple_of, one_of

Declare = Callable[..., Any]


def declared(function: Any, name: str = "mine", **options: Any) -> None:
    op = function.operator
    given = {"solution": "testing", "signatures": None, **options}
    register_kernel(op.family, op.mode, name=name, **given)("nowhere:kernel")


def refused(function: Any, **options: Any) -> str:
    """Asserts that registering a kernel fails, and that the kernel is not registered afterwards. Returns the error's message."""
    with pytest.raises(RegistrationError) as caught:
        declared(function, **options)
    assert not any(spec.name == "mine" for spec in KernelRegistry.get().list_kernels())
    return str(caught.value)


def _body(x: Tensor, mode: str = "up", out: Tensor | None = None) -> Tensor:
    return x.clone()


TRAITS: dict[str, TraitKind] = {"hidden": int, "residual": bool, "scale": float, "mode": ("up", "down"), "limit": int | None}


@pytest.fixture
def op(declare: Declare) -> Any:
    function = declare(_body, formats=("x",), traits=TRAITS)
    function.traits(lambda x, mode: {"hidden": x.shape[-1], "residual": False, "mode": mode})
    return function


# -- traits -----------------------------------------------------------------------------------------------------------------------


def test_a_misspelled_trait_is_refused_with_the_name_that_was_meant() -> None:
    """Without this error, the misspelled trait would constrain nothing: the kernel would be eligible for every ``hidden``."""
    said = refused(rmsnorm, traits={"hiden": at_most(64)})
    assert said.startswith(
        "mine: norm.rmsnorm states no trait hiden; did you mean hidden? Its traits are hidden, residual, wide_residual ("
    )
    assert "test_interface.py" in said
    assert "did you mean" not in refused(rmsnorm, traits={"page_size": 16})


@pytest.mark.parametrize(
    ("trait", "constraint", "said"),
    [
        ("hidden", "64", "trait hidden is int, so '64' can never hold"),
        ("hidden", {64, True}, "trait hidden is int, so True can never hold"),
        ("hidden", None, "trait hidden is int, so None can never hold"),
        ("residual", 1, "trait residual is True or False, so 1 can never hold"),
        ("residual", at_least(1), "trait residual is True or False, so it is never at least 1"),
        ("mode", "dwon", "trait mode is one of 'up', 'down', so 'dwon' can never hold; did you mean 'down'?"),
        ("mode", multiple_of(8), "trait mode is one of 'up', 'down', so it is never a multiple of 8"),
        ("limit", "none", "trait limit is int or None, so 'none' can never hold"),
        ("scale", True, "trait scale is float, so True can never hold"),
    ],
)
def test_values_that_a_trait_never_has_are_refused(op: Any, trait: str, constraint: Any, said: str) -> None:
    assert f"mine: {said} (" in refused(op, traits={trait: constraint})


def test_declared_names_are_accepted(op: Any) -> None:
    fine: list[dict[str, Any]] = [
        dict.fromkeys(TRAITS, any),
        {"hidden": at_most(64) & multiple_of(16), "residual": {True, False}, "limit": None},
        {"scale": one_of(1, 2.5), "mode": {"up"}, "limit": at_most(8)},
    ]
    for place, traits in enumerate(fine):
        declared(op, f"fine_{place}", traits=traits, priority=place + 5)


def test_an_operator_without_traits_takes_kernels_without(declare: Declare) -> None:
    op = declare(_body, formats=("x",))
    assert "states no trait hidden. Its traits are none" in refused(op, traits={"hidden": any})
    declared(op, "none")


def test_a_manual_request_must_match_the_declaration() -> None:
    signature = format_signature(x=dense_tensor_format(torch.float32))
    assert select_kernel("norm", "rmsnorm", signature, traits={"hidden": 64, "residual": False}).name
    with pytest.raises(ValueError, match=r"norm\.rmsnorm .* no trait hiden; .* hidden\?"):
        select_kernel("norm", "rmsnorm", signature, traits={"hiden": 64})
    with pytest.raises(ValueError, match=r"norm\.rmsnorm have no operand q\. .* are x"):
        select_kernel("norm", "rmsnorm", format_signature(q=dense_tensor_format(torch.float32)))


# -- formats ----------------------------------------------------------------------------------------------------------------------


def test_operands_and_formats_that_no_request_has_are_refused(op: Any) -> None:
    said = refused(moe_apply, signatures=format_signatures("w31", "dense", {torch.float32}))
    assert "signatures of moe.moe_apply have no operand w31; did you mean w13? Its operands are x, w13, w2 (" in said
    scaled = format_signature(x=dense_tensor_format(torch.float16), w13=tensor_format("mxpf4", torch.uint8))
    assert "w13 of moe.moe_apply is never mxpf4; did you mean mxfp4? It may be dense, fp8, mxfp8, mxfp4, nvfp4 (" in refused(
        moe_apply, signatures=[scaled]
    )


# -- tags, tunables ---------------------------------------------------------------------------------------------------------------


def test_tags_and_tunables_say_what_was_meant() -> None:
    assert "got 'wait'; did you mean 'waits'?" in refused(rmsnorm, tags={"wait"})
    with pytest.raises(RegistrationError, match=r"it does not take block_m; did you mean block_n\?"):

        @register_kernel("norm", "rmsnorm", name="mine", solution="testing", signatures=None, tunables={"block_m": [1]})
        def _(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any, *, block_n: int = 1) -> None: ...


# -- layouts of weights -----------------------------------------------------------------------------------------------------------


def prepare(weights: Any, plan: Any) -> Any:
    return weights


OWN: dict[str, Any] = {"weight_layout": "rows-reversed", "processed_weights": True}


def test_a_layout_that_no_kernel_makes_is_refused() -> None:
    said = refused(moe_apply, traits={"weight_layout": "cannonical"})
    assert "no kernel's weight_preprocessor makes the layout cannonical, and this kernel has none; did you mean canonical?" in said
    declared(moe_apply, "makes", traits=OWN, weight_preprocessor=prepare)
    shared = {**OWN, "weight_layout": {"canonical", "rows-reversed"}, "processed_weights": any}
    declared(moe_apply, "shares", traits=shared, priority=1)
    misspelled = {**OWN, "weight_layout": "row-reversed"}
    assert "did you mean rows-reversed? There are " in refused(moe_apply, traits=misspelled, priority=2)


def test_kernels_of_one_transaction_may_share_a_layout_in_any_order() -> None:
    registry = KernelRegistry.get()
    with registry.transaction():
        declared(moe_apply, "shares", traits=OWN, priority=1)
        declared(moe_apply, "makes", traits=OWN, weight_preprocessor=prepare)
    unmade = pytest.raises(RegistrationError, match=r"mine: no .*weight_preprocessor makes .* alone")
    with unmade, registry.transaction():
        declared(moe_apply, "mine", traits={**OWN, "weight_layout": "alone"}, priority=2)
    assert "mine" not in {spec.name for spec in registry.list_kernels()}


# -- resources --------------------------------------------------------------------------------------------------------------------


class Table(Resource):
    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {"rounded": bool}

    @property
    def traits(self) -> Mapping[str, Any]:
        return {"rounded": True}


class Wider(Table):
    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {**Table.trait_kinds, "wide": bool}


class Loose(Table):
    @property
    def traits(self) -> Mapping[str, Any]:
        return {"loose": True}


def _with_table(x: Tensor, table: Table, out: Tensor | None = None) -> Tensor:
    return x.clone()


def test_resources_state_traits_too(declare: Declare) -> None:
    op = declare(_with_table, formats=("x",))
    assert "states no trait ronded; did you mean rounded? Its traits are rounded, wide (" in refused(op, traits={"ronded": any})
    assert "trait wide is True or False, so 3 can never hold" in refused(op, traits={"wide": 3})
    declared(op, "fine", traits={"rounded": any, "wide": any})
    op(torch.ones(2), Table(), solution="reference")
    with pytest.raises(TypeError, match=r"Loose states the trait loose, .*trait_kinds"):
        op(torch.ones(2), Loose(), solution="reference")


# -- order ------------------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_was_registered_before_its_operator_is_looked_at_then(declare: Declare) -> None:
    """A kernel is registered before its operator in a wheel that works alone, and in a plugin whose operator another plugin
    declares."""
    probe = declare(_body)
    mode = f"_body_{int(probe.operator.mode.rpartition('_')[2]) + 1}"
    register_kernel("testing", mode, name="early", solution="testing", signatures=None, traits={"hiden": any})("nowhere:kernel")
    with pytest.raises(RegistrationError, match=r"early: .*no trait hiden; .*hidden\?"):
        declare(_body, formats=("x",), traits=TRAITS)


# -- what an operator says of itself ----------------------------------------------------------------------------------------------


def test_an_operator_keeps_to_its_own_declaration(declare: Declare) -> None:
    with pytest.raises(TypeError, match=r"hiden is not among .* declaration; .* hidden\?"):
        declare(_body, formats=("x",), traits=TRAITS, fixed_traits=("hiden",))
    with pytest.raises(RegistrationError, match=r"reference_\w+: .* states no trait modus"):
        declare(_body, formats=("x",), traits=TRAITS, reference_traits={"modus": "up"})
    op = declare(_body, formats=("x",), traits={"hidden": int})
    op.traits(lambda x: {"hidden": 1, "more": True})
    with pytest.raises(TypeError, match="hooks give more, which traits= or formats="):
        op(torch.ones(2))
    op = declare(_body, formats={"x": ("dense",)})
    op.formats(lambda x: format_signature(x=tensor_format("odd", x.dtype)))
    with pytest.raises(TypeError, match="hooks give x: odd, which traits= or formats="):
        op(torch.ones(2))
    op = declare(_body, formats=("x",))
    with pytest.raises(TypeError, match="it has a formats hook, so formats= must be a dict"):
        op.formats(lambda x: format_signature(x=dense_tensor_format(x.dtype)))


def test_a_kernel_without_an_operator_is_declared_against_nothing(registry: KernelRegistry) -> None:
    """Such a kernel may declare any trait, because another plugin may declare the operator later. `discover_plugins` warns about a
    kernel whose operator is never declared."""
    facts: dict[str, Any] = {"solution": "testing", "signatures": None, "traits": {"anything": at_most(8)}}
    register_kernel("no", "such", name="free", **facts)("nowhere:kernel")
    assert registry.get_by_name("free").traits["anything"] == at_most(8)
