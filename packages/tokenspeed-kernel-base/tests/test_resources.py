"""Tests resources as arguments: in descriptions, under torch.compile, and in calls after the resource was deleted."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import resources
from tokenspeed_kernel_base.parameters import Kind, parse_parameters
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import TraitKind

Declare = Callable[..., Any]


class Table(Resource):
    """A resource that holds values to add, and a name that hooks may read."""

    def __init__(self, name: str, values: Tensor, device: torch.device | None = None) -> None:
        self.key, self.name, self.values, self.device = name, name, values, device


class Other(Resource):
    def __init__(self, name: str) -> None:
        self.key = name


def _add(x: Tensor, table: Table, out: Tensor | None = None) -> Tensor:
    return x + table.values


def _add_if_there(x: Tensor, table: Table | None = None, out: Tensor | None = None) -> Tensor:
    return x.clone() if table is None else x + table.values


@pytest.fixture
def asked() -> list[str]:
    """Returns the list of the names of tables for which a kernel is selected."""
    return []


@pytest.fixture
def add(declare: Declare, asked: list[str]) -> Any:
    function = declare(_add, formats=("x",), traits={"name": str})

    @function.traits
    def _(table: Table) -> dict[str, Any]:
        asked.append(table.name)
        return {"name": table.name}

    function.fake(lambda x: torch.empty_like(x))
    return function


@pytest.fixture
def add_if_there(declare: Declare) -> Any:
    function = declare(_add_if_there, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    return function


def test_kinds() -> None:
    x, table, out = parse_parameters(_add)
    assert (x.kind, table.kind, out.kind) == (Kind.TENSOR, Kind.RESOURCE, Kind.TENSOR)
    assert not table.optional
    assert parse_parameters(_add_if_there)[1].optional

    def two(x: Tensor, table: Table | Other) -> Tensor: ...

    def number(x: Tensor, table: Table | int) -> Tensor: ...

    for body in (two, number):
        body.__annotations__["x"] = Tensor
        body.__annotations__["table"] = Table | (Other if body is two else int)
        with pytest.raises(TypeError, match=r"\(table\): a resource cannot be in a union"):
            parse_parameters(body)


def test_handles_are_never_used_twice() -> None:
    first = Table("a", torch.zeros(1))
    handle = first.handle
    assert resources.find(handle) is first
    second = Table("a", torch.zeros(1))
    assert second.handle > handle
    del first
    gc.collect()
    with pytest.raises(RuntimeError, match=f"handle {handle} is gone"):
        resources.find(handle)


def test_resources_are_shared_by_copies_and_stay_in_their_process() -> None:
    table = Table("a", torch.zeros(1))
    assert copy.copy(table) is copy.deepcopy({"t": table})["t"] is table
    with pytest.raises(TypeError, match="a Table belongs to the process that made it"):
        pickle.dumps(table)


def test_dataclasses_can_be_resources() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen(Resource):
        values: Tensor
        key: str = "frozen"

    one, two = Frozen(torch.zeros(1)), Frozen(torch.zeros(1))
    assert one.handle != two.handle
    assert resources.find(two.handle) is two


def test_equal_keys_share_a_decision(add: Any, asked: list[str]) -> None:
    x = torch.ones(3)
    tables = [Table("a", torch.full((3,), 2.0)), Table("a", torch.full((3,), 3.0)), Table("b", torch.full((3,), 4.0))]
    for _ in range(2):
        assert [add(x, table).tolist() for table in tables] == [[3.0] * 3, [4.0] * 3, [5.0] * 3]
    assert asked == ["a", "b"]


@pytest.mark.parametrize("wrong", [3, None, "a", Other("a"), torch.zeros(3)])
def test_a_wrong_type_is_an_error_that_names_the_argument(add: Any, wrong: Any) -> None:
    x = torch.ones(3)
    add(x, Table("a", x))  # the fast path now remembers a call whose table is deleted
    with pytest.raises(TypeError, match=r"_add_\d+: table must be Table, got "):
        add(x, wrong)


def test_a_key_that_cannot_be_hashed(add: Any) -> None:
    table = Table("a", torch.zeros(3))
    table.key = ["a"]
    with pytest.raises(TypeError, match=r"key of table .* hashable, got list \['a'\]"):
        add(torch.ones(3), table)


class Stated(Table):
    """A resource that declares the trait ``rounded``."""

    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {"rounded": bool}

    @property
    def traits(self) -> dict[str, Any]:
        return {"rounded": self.name == "rounded"}

    @property
    def card(self) -> str:
        return f"the numbers are {self.name}" if self.name else ""


def test_traits_of_a_resource_gate_kernels(add: Any, asked: list[str]) -> None:
    """Asserts that a kernel that does not declare a flag is rejected for resources that set the flag, even if the call names the
    kernel."""
    op = add.operator
    signature = format_signature(x=dense_tensor_format(torch.float32))
    common: dict[str, Any] = {"solution": "test", "signatures": {signature}, "priority": 17}

    @register_kernel(op.family, op.mode, name=f"silent_{op.mode}", **common)
    def _(x: Tensor, table: Table, out: Tensor | None) -> Tensor:
        return torch.full_like(x, 10.0)

    @register_kernel(op.family, op.mode, name=f"able_{op.mode}", traits={"rounded": any}, **{**common, "priority": 16})
    def _(x: Tensor, table: Table, out: Tensor | None) -> Tensor:
        return torch.full_like(x, 20.0)

    x, values = torch.ones(2), torch.zeros(2)
    assert add(x, Stated("exact", values)).tolist() == [10.0] * 2
    assert add(x, Stated("rounded", values)).tolist() == [20.0] * 2
    with pytest.raises(NoKernelFoundError, match="does not declare the flag rounded, which the request sets"):
        add(x, Stated("rounded", values), override=f"silent_{op.mode}")
    explained = add.explain(x, Stated("rounded", values))
    assert explained.request.traits == {"rounded": True, "name": "rounded"}
    assert "  table    the numbers are rounded\n" in str(explained)
    assert explained.to_dict()["cards"] == {"table": "the numbers are rounded"}
    for quiet in (Stated("", values), Table("a", values)):
        assert add.explain(x, quiet).cards == {}


def test_optional_resources(add_if_there: Any) -> None:
    x, table = torch.ones(3), Table("a", torch.full((3,), 2.0))
    for _ in range(2):
        assert add_if_there(x).tolist() == add_if_there(x, None).tolist() == [1.0] * 3
        assert add_if_there(x, table).tolist() == [3.0] * 3
    with pytest.raises(TypeError, match="table must be Table or None, got int 3"):
        add_if_there(x, 3)
    assert add_if_there.explain(x, table).chosen.solution == "reference"
    assert add_if_there.bind(x, table)(x, table, None).tolist() == [3.0] * 3


def test_a_resource_says_where_the_tensors_must_be(add: Any) -> None:
    x = torch.ones(3)
    for device in (torch.device("cuda"), torch.device("cuda", 1)):
        with pytest.raises(ValueError, match=f"table must be for cpu, .* got a Table for {device}"):
            add(x, Table(str(device), x, device))
    add(x, Table("here", x, torch.device("cpu")))
    assert resources.same_place(torch.device("cuda"), torch.device("cuda", 1))
    assert not resources.same_place(torch.device("cuda", 0), torch.device("cuda", 1))


# -- torch.compile -----------------------------------------------------------------------------------------------------------------


def test_compiled_code_names_it_by_its_handle(add: Any) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(graph.code)
        return graph.forward

    x, tables = torch.ones(3), [Table("a", torch.full((3,), float(n))) for n in range(5)]
    compiled = torch.compile(lambda x, table: add(x, table) * 2, fullgraph=True, backend=backend)
    assert [compiled(x, table).tolist() for table in tables] == [[2.0 + 2 * n] * 3 for n in range(5)]
    assert f"(x, {tables[0].handle}, None" in seen[0].replace("l_x_", "x")
    assert len(seen) <= 2, "one function serves all resources, once it is known that they differ"


def test_compiled_with_and_without(add_if_there: Any) -> None:
    x, table = torch.ones(3), Table("a", torch.full((3,), 2.0))
    compiled = torch.compile(lambda x, table: add_if_there(x, table), fullgraph=True)
    assert compiled(x, table).tolist() == [3.0] * 3
    assert compiled(x, None).tolist() == [1.0] * 3


def test_a_resource_that_is_gone(add: Any) -> None:
    op = getattr(torch.ops.tokenspeed_kernel, add.operator.mode)
    table = Table("a", torch.ones(3))
    handle = table.handle
    assert op(torch.ones(3), handle, None, None).tolist() == [2.0] * 3
    del table
    gc.collect()
    with pytest.raises(RuntimeError, match=f"the resource of handle {handle} is gone"):
        op(torch.ones(3), handle, None, None)


def test_the_fake_hook_may_ask_for_it(declare: Declare) -> None:
    """Asserts that a fake hook may read the table. Here the shape of the output depends on the table."""

    def lookup(x: Tensor, table: Table) -> Tensor:
        return table.values[: len(table.name)] + x

    function = declare(lookup, formats=("x",), outs=())
    function.fake(lambda x, table: x.new_empty(len(table.name)))
    tables = [Table("ab", torch.arange(5.0)), Table("abc", torch.arange(5.0))]
    compiled = torch.compile(lambda x, table: function(x, table), fullgraph=True)
    for table in tables:
        assert torch.equal(compiled(torch.ones(1), table), function(torch.ones(1), table))


def test_fake_tensors_meet_resources(add: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3))
        assert add(x, Table("a", torch.ones(3))).shape == (3,)


# -- objects that are resources ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Weights:
    left: Tensor
    right: Tensor | None = None


@dataclasses.dataclass
class ScaledWeights(Weights, Resource):
    scale: float = 1.0


def _times(x: Tensor, weights: Weights, out: Tensor | None = None) -> Tensor:
    return x * weights.left * getattr(weights, "scale", 1.0)


def test_an_object_may_be_a_resource_with_more_than_is_declared(declare: Declare) -> None:
    function = declare(_times, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    x, plain = torch.ones(3), Weights(torch.full((3,), 2.0))
    scaled = [ScaledWeights(plain.left, None, scale) for scale in (10.0, 20.0)]
    compiled = torch.compile(lambda x, weights: function(x, weights), fullgraph=True)
    for call in (function, compiled):
        assert call(x, plain).tolist() == [2.0] * 3
        assert [call(x, weights).tolist() for weights in scaled] == [[20.0] * 3, [40.0] * 3]
    with pytest.raises(TypeError, match="weights must be an object with left, got Table"):
        function(x, Table("a", x))


def test_the_schema_has_handles() -> None:
    assert "SymInt? weights_handle" in str(torch.ops.tokenspeed_kernel.moe_apply.default._schema)
    assert "Tensor x, SymInt group, Tensor(a2!)? out" in str(torch.ops.tokenspeed_kernel.all_reduce.out._schema)
