"""Every operator declares everything: reference, docstring, traits, checks, fake, cases, cost; and the parts agree."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenspeed_kernel
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry

OPERATORS = [op for op in operators() if op.body.__module__.startswith("tokenspeed_kernel_base.")]
SMALL = [(op, case) for op in OPERATORS for case in op.all_cases() if not case.large]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=str)
each_small_case = pytest.mark.parametrize(("op", "case"), SMALL, ids=[f"{op.mode}-{case.name}" for op, case in SMALL])


def complete(op: Operator[Any, Any], case: Case, **where: Any) -> dict[str, Any]:
    return op.complete(case.build(**where))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from tensors_of(member)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal bits, so that NaN equals itself and 8-bit floats compare."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_the_families_are_there() -> None:
    """If an import fails quietly, everything below would pass on nothing."""
    assert {op.family for op in OPERATORS} >= {"attention", "comm", "gemm", "moe", "norm", "quantization"}
    assert len(OPERATORS) >= 28


# -- each operator ----------------------------------------------------------------------------------------------------------------


@each_operator
def test_it_has_every_hook(op: Operator[Any, Any]) -> None:
    assert [hook for hook in ("traits", "check", "fake", "cases", "cost") if not op.has_hook(hook)] == []


@each_operator
def test_its_reference_runs_anywhere(op: Operator[Any, Any]) -> None:
    spec = KernelRegistry.get().get_by_name(f"reference_{op.mode}")
    assert spec.solution == "reference"
    assert spec.priority == 0
    assert spec.capability.gap(tokenspeed_kernel.named_platform("cpu")) is None
    assert spec.format_signatures is None


@each_operator
def test_a_portable_kernel_serves_it(op: Operator[Any, Any]) -> None:
    """As the README says: a Triton kernel that needs nothing of a platform but that Triton compiles for it. Not so where several
    processes take part: how these reach one another is the platform's."""
    if any(issubclass(cls, ProcessGroup) for parameter in op.parameters for cls in parameter.types if isinstance(cls, type)):
        pytest.skip("between processes")
    specs = KernelRegistry.get().get_for_operator(op.family, op.mode)
    assert [spec.name for spec in specs if spec.solution == "triton" and spec.capability == TRITON]


_SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Warns|Note|Notes):\s*$")


def sections(docstring: str) -> dict[str, list[str]]:
    """Lines of each section of a docstring; those before the first are under ``""``."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(docstring).splitlines():
        match = _SECTION.match(line)
        if match:
            current = match[1]
            found[current] = []
        elif line and not line.startswith(" ") and current:
            current = ""
            found[""].append(line)
        else:
            found[current].append(line)
    return found


def documented(docstring: str) -> dict[str, str]:
    """The Args section: parameter to what is said of it."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in sections(docstring).get("Args", []):
        match = re.match(r"^ {4}(\w+(?:, \w+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            entries.update(dict.fromkeys(names, match[2]))
        else:
            for name in names:
                entries[name] += " " + line.strip()
    return entries


@each_operator
def test_its_docstring_says_all(op: Operator[Any, Any]) -> None:
    docstring = op.body.__doc__ or ""
    parts, entries = sections(docstring), documented(docstring)
    assert parts[""], "what it computes"
    assert [*entries] == [name for name in op.names if name in entries], "in the signature's order"
    assert set(entries) == set(op.names), f"missing {set(op.names) - set(entries)}, unknown {set(entries) - set(op.names)}"
    assert [name for name, text in entries.items() if len(text.strip()) < 4] == []
    says_shape = re.compile(r"\[[^]]*\]|\blike \w|\blikewise\b|\bthe same for\b|\bsee above\b")
    inputs = [p.name for p in op.parameters if p.is_tensor and p.name not in op.outs]
    assert [name for name in inputs if not says_shape.search(entries[name])] == [], "tensors need a shape"
    assert re.search(r"\[[^]]+\]", docstring)
    if lowering.count_outputs(op.body):
        assert any(line.strip() for line in parts.get("Returns", [])), "a Returns section"
    assert any("ValueError" in line for line in parts.get("Raises", [])), "a Raises section"
    assert any(line.strip().startswith(">>> ") for line in docstring.splitlines()), "an example that runs"
    assert "CUDA graph" in docstring, "what holds under CUDA graphs"


@each_operator
def test_its_outputs_are_parameters(op: Operator[Any, Any]) -> None:
    by_name = {p.name: p for p in op.parameters}
    for name in op.outs:
        assert by_name[name].is_tensor
        assert by_name[name].optional
        assert by_name[name].default is None
    assert len(op.outs) <= lowering.count_outputs(op.body)
    if lowering.count_outputs(op.body):
        assert op.outs, "outputs can be provided"


@each_operator
def test_its_cases_are_named_and_small_enough(op: Operator[Any, Any]) -> None:
    cases = op.all_cases()
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    assert all(name.strip() == name and name for name in names)
    assert sum(not case.large for case in cases) >= 3
    assert any(case.large for case in cases), "a large one, for benchmarks"


@each_operator
def test_its_traits_are_plain_and_its_flags_always_stated(op: Operator[Any, Any]) -> None:
    """A kernel that exists for a flag refuses requests that do not state it, so a flag that is clear has to be stated too."""
    seen = []
    for case in op.all_cases():
        if case.large:
            continue
        traits = op.request(complete(op, case)).traits
        seen.append({name for name, value in traits.items() if isinstance(value, bool)})
        assert all(value is None or isinstance(value, (bool, int, float, str)) for value in traits.values())
    assert all(flags == seen[0] for flags in seen)


@each_operator
def test_its_cases_follow_the_seed(op: Operator[Any, Any]) -> None:
    def drawn(case: Case, seed: int) -> list[torch.Tensor]:
        return [bits(t) for t in tensors_of([*complete(op, case, seed=seed).values()])]

    differing = [
        case.name
        for case in op.all_cases()
        if not case.large and any(not torch.equal(a, b) for a, b in zip(drawn(case, 0), drawn(case, 1), strict=True))
    ]
    assert len(differing) >= 2, "most cases are random, and a few may be fixed"


# -- each small case --------------------------------------------------------------------------------------------------------------


@each_small_case
def test_a_case_is_reproducible_and_passes_the_checks(op: Operator[Any, Any], case: Case) -> None:
    arguments, again = case.build(seed=3), case.build(seed=3)
    assert set(arguments) <= set(op.names)
    assert not {*op.outs} & {name for name, value in arguments.items() if value is not None}, "cases leave outputs to the operator"
    assert [*arguments] == [*again]
    for name in arguments:
        for one, other in zip(tensors_of(arguments[name]), tensors_of(again[name]), strict=True):
            assert one.data_ptr() != other.data_ptr() or not one.numel()
            assert torch.equal(bits(one), bits(other)), name
    op.check_call(op.complete(arguments))


@each_small_case
def test_a_case_costs_something(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    cost = op.cost_of(arguments)
    assert isinstance(cost, Cost)
    assert math.isfinite(cost.flops)
    assert math.isfinite(cost.bytes)
    assert cost.flops >= 0
    assert cost.bytes >= 0
    outputs = lowering.as_list(op.fake_outputs(arguments))
    if any(t.numel() for t in outputs) or (op.mutates and all(t.numel() for _, t in tensor_arguments(op.parameters, arguments))):
        assert cost.bytes > 0


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    # The stride of an axis of one element is of no consequence.
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, tensor.dtype, tensor.device, strides


@each_small_case
def test_a_case_runs_and_the_fake_agrees(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    untouched = {n: [bits(t).clone() for t in tensors_of(v)] for n, v in arguments.items() if n not in op.mutates}
    results = op.function(**arguments)
    assert results is None or isinstance(results, (torch.Tensor, tuple))
    listed = lowering.as_list(results)
    assert len(listed) <= lowering.count_outputs(op.body)
    fakes = lowering.as_list(op.fake_outputs(arguments))
    assert [_looks(fake) for fake in fakes] == [_looks(result) for result in listed]

    for name, before in untouched.items():
        for old, now in zip(before, tensors_of(arguments[name]), strict=True):
            assert torch.equal(old, bits(now)), f"{name} was written to"
    storages = {t.untyped_storage().data_ptr() for _, t in tensor_arguments(op.parameters, arguments) if t.numel()}
    given = [r.untyped_storage().data_ptr() for r in listed if r.numel()]
    assert not storages & set(given), "an output shares memory with an input"
    assert len(set(given)) == len(given), "two outputs share memory"


@each_small_case
def test_provided_outputs_receive_the_same(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    if op.mutates and any(arguments[name] is not None for name in op.mutates):
        pytest.skip("it writes to its arguments, so a second run is another one")
    wanted = lowering.as_list(op.function(**arguments))
    outputs = {name: torch.empty_like(result) for name, result in zip(op.outs, wanted, strict=False)}
    results = lowering.as_list(op.function(**{**arguments, **outputs}))
    for (name, output), result, expected in zip(outputs.items(), results, wanted, strict=False):
        assert result is output, name
        assert torch.equal(bits(output), bits(expected)), name


def _custom_op_check(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    flat = lowering.spread(op.mode, op.parameters, [*arguments.values()])
    custom_op = getattr(torch.ops.tokenspeed_kernel, op.mode).default
    tests = ["test_autograd_registration", "test_faketensor"]
    eager = {n: v.clone() if n in op.mutates and v is not None else v for n, v in arguments.items()}
    wanted = lowering.as_list(op.function(**eager))
    if not any(t.float().isnan().any() for t in wanted):
        tests.append("test_aot_dispatch_dynamic")  # it takes NaN for a difference
    if not any(t.element_size() == 1 and t.is_floating_point() for t in tensors_of(flat)):
        tests.append("test_schema")  # it compares values in a way that PyTorch lacks for 8-bit floats
    torch.library.opcheck(custom_op, (*flat, None, None), test_utils=tests)

    traced = {n: v.clone() if n in op.mutates and v is not None else v for n, v in arguments.items()}
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: op.function(**kwargs), fullgraph=True, backend="aot_eager")
    got = lowering.as_list(compiled(traced))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(bits(one), bits(other))
    for name in op.mutates:
        if arguments[name] is not None:
            assert torch.equal(bits(traced[name]), bits(eager[name])), name


def _first_with_values(op: Operator[Any, Any]) -> Case:
    small = [case for case in op.all_cases() if not case.large]
    return min(small, key=lambda c: (sum(t.numel() for t in tensors_of([*c.build().values()])) == 0, small.index(c)))


@each_operator
def test_it_works_under_torch_compile(op: Operator[Any, Any]) -> None:
    _custom_op_check(op, _first_with_values(op))


@pytest.mark.slow
@each_small_case
def test_every_case_works_under_torch_compile(op: Operator[Any, Any], case: Case) -> None:
    _custom_op_check(op, case)


# -- examples ---------------------------------------------------------------------------------------------------------------------

_TOOLS = ("cli", "__main__", "numerics", "benchmark", "tuning")
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(tokenspeed_kernel.__path__, "tokenspeed_kernel.")
    if not name.endswith("__main__") and ".triton" not in name
]


@pytest.mark.parametrize("name", ["tokenspeed_kernel", *MODULES])
def test_examples_run(name: str) -> None:
    if name.split(".")[1:2] and name.split(".")[1] in _TOOLS:
        pytest.importorskip("rich")
        pytest.importorskip("typer")
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, name):
        runner.run(test)
    assert runner.failures == 0


@each_operator
def test_its_example_is_found(op: Operator[Any, Any]) -> None:
    """A public function is generated; doctest must still find the example where the operator is declared."""
    module = importlib.import_module(op.body.__module__)
    found = [test for test in doctest.DocTestFinder().find(module) if test.name.endswith(f".{op.mode}")]
    assert [test for test in found if test.examples], op.mode
