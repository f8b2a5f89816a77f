"""Tests that every operator's declaration is complete and consistent, and that every kernel's declaration matches its operator.

All faults of one operator or kernel are reported in one message, each with its remedy.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel
import tokenspeed_kernel_base
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base import lowering, ops
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.discovery import DEVICE_SUFFIX
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.traits import impossible_values, one_of

OPERATORS = [op for op in operators() if op.body.__module__.startswith(ops.__name__ + ".")]
KERNELS = [spec for spec in KernelRegistry.get().list_kernels() if spec.package == tokenspeed_kernel.__name__]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=str)


class Faults:
    """Collects the faults of one declaration. The test fails at the end of the block if there are any."""

    def __init__(self, declaration: str) -> None:
        self.declaration, self.found = declaration, list[str]()

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None and self.found:
            listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(self.found, 1))
            pytest.fail(f"{self.declaration}: {len(self.found)} faults\n{listed}", pytrace=False)

    def unless(self, holds: object, fault: str, mend: str) -> None:
        """Records a fault and its remedy, unless ``holds``."""
        if not holds:
            self.found.append(f"{fault}: {mend}")

    def attempt(self, check: Callable[[Operator[Any, Any], Case], None], op: Operator[Any, Any], cases: Sequence[Case]) -> None:
        """Runs a check on each case. Records the first case whose check raises an error as a fault, with the number of other
        failing cases."""
        failed = {}
        for case in cases:
            try:
                check(op, case)
            except Exception as error:  # any error is reported together with the other faults
                failed[case.name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        for name, said in [*failed.items()][:1]:
            others = f" and {len(failed) - 1} others" * (len(failed) > 1)
            self.found.append(f"case {name!r}{others}: {said}")


def small_cases(op: Operator[Any, Any]) -> list[Case]:
    return [case for case in op.all_cases() if not case.large]


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
    """Returns the bits of a tensor as integers, so that NaN equals itself and 8-bit floats can be compared."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _declared_in_the_tree() -> set[tuple[str, str, str]]:
    """Returns the folder, family and mode of every operator, read from the source files of ``ops``."""
    found = set()
    folder = Path(str(ops.__file__)).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "operator":
                    family, mode = (ast.literal_eval(argument) for argument in decorator.args)
                    found.add((path.relative_to(folder).parts[0], family, mode))
    return found


def test_every_operator_of_the_tree_is_declared() -> None:
    """Compares the declared operators with the source files. An operator whose module is not imported would be missing from the
    tests below."""
    found = _declared_in_the_tree()
    assert found
    assert {(family, mode) for _, family, mode in found} == {(op.family, op.mode) for op in OPERATORS}
    assert [f"{mode} of family {family} lies in {folder}/" for folder, family, mode in found if folder != family] == []


# -- each operator ----------------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Warns|Note|Notes):\s*$")


def sections(docstring: str) -> dict[str, list[str]]:
    """Returns the lines of each section of a docstring. Lines before the first section have the key ``""``."""
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
    """Returns the description of each parameter from the Args section."""
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


def _check_docstring(op: Operator[Any, Any], faults: Faults) -> None:
    docstring = op.body.__doc__ or ""
    parts, entries = sections(docstring), documented(docstring)
    faults.unless(parts[""], "its docstring does not say what it computes", "begin it with a formula or a sentence")
    names = [name for name in op.names if name in entries]
    faults.unless([*entries] == names, f"Args lists {', '.join(entries)}", f"list the parameters in order: {', '.join(op.names)}")
    faults.unless(set(entries) == set(op.names), "Args is not complete", f"differing: {', '.join(set(entries) ^ set(op.names))}")
    short = [name for name, text in entries.items() if len(text.strip()) < 4]
    faults.unless(not short, f"Args says next to nothing of {', '.join(short)}", "say dtype, shape and meaning")
    says_shape = re.compile(r"\[[^]]*\]|\blike \w|\blikewise\b|\bthe same for\b|\bsee above\b")
    inputs = [p.name for p in op.parameters if p.is_tensor and p.name not in op.outs]
    shapeless = [name for name in inputs if not says_shape.search(entries.get(name, ""))]
    faults.unless(not shapeless, f"Args gives no shape of {', '.join(shapeless)}", "write it as ``[tokens, hidden]``, or `like x`")
    if lowering.count_outputs(op.body):
        returns = any(line.strip() for line in parts.get("Returns", []))
        faults.unless(returns, "no Returns section", "say dtype and shape of every output")
    raises = any("ValueError" in line for line in parts.get("Raises", []))
    faults.unless(raises, "no Raises section with TypeError and ValueError", "say when a call is refused")
    example = any(line.strip().startswith(">>> ") for line in docstring.splitlines())
    faults.unless(example, "no example that runs", "add an Example section with >>> lines")
    faults.unless("CUDA graph" in docstring, "CUDA graphs are not mentioned", "say whether calls are safe in them")


def _check_sizes(op: Operator[Any, Any], faults: Faults) -> None:
    named: set[str] = set()
    for case in small_cases(op):
        check = Checker(op.mode)
        op.run_hook("check", complete(op, case), check)
        named |= check.sizes().keys()
    for kind in ("varying", "capacity"):
        unknown = sorted(set(getattr(op, kind)) - named)
        there = f"name sizes that the check binds on some case: {', '.join(sorted(named))}"
        faults.unless(not unknown, f"{kind} names {', '.join(unknown)}, which no check binds", there)
    scales = {p.name for p in op.parameters if p.is_tensor and p.name.endswith("scale")} - {*op.outs}
    faults.unless(
        scales == {*op.scales},
        f"scales declares {sorted(op.scales)}",
        f"declare {sorted(scales)}, so that captured calls draw them > 0",
    )


@each_operator
def test_an_operator_is_declared_completely(op: Operator[Any, Any]) -> None:
    with Faults(str(op)) as faults:
        missing = [hook for hook in ("traits", "check", "fake", "cases", "cost") if not op.has_hook(hook)]
        for hook in missing:
            faults.unless(False, f"no {hook} hook", f"add one with @{op.mode}.{hook}; the docstring of operator.py shows how")
        registry = KernelRegistry.get()
        reference = registry.get_by_name(f"reference_{op.mode}")
        gap = reference.capability.gap(tokenspeed_kernel.named_platform("cpu"))
        anywhere = gap is None and reference.priority == 0 and reference.format_signatures is None
        faults.unless(anywhere, f"its reference does not run everywhere ({gap})", "the body must be plain PyTorch")
        specs = registry.get_for_operator(op.family, op.mode)
        portable = [spec for spec in specs if spec.solution == "triton" and spec.capability == TRITON]
        # Communication between processes depends on the platform, so its operators need no portable kernel.
        between_processes = any(case.world_size > 1 for case in op.all_cases())
        wanted = f"add triton/{op.family}/{op.mode}.py with capability=TRITON"
        # A composed operator needs no portable kernel of its own, because its parts have portable kernels.
        composed = op.parts and all(part.operator in OPERATORS for part in op.parts)
        faults.unless(portable or between_processes or composed, "no portable kernel", wanted)
        _check_docstring(op, faults)
        for parameter in op.parameters:
            if parameter.name in op.outs:
                optional = parameter.is_tensor and parameter.optional and parameter.default is None
                faults.unless(optional, f"{parameter.name} receives an output", "annotate it `Tensor | None = None`")
        outputs = lowering.count_outputs(op.body)
        faults.unless(len(op.outs) <= outputs, f"{len(op.outs)} outs for {outputs} outputs", "outs are in the order of the outputs")
        faults.unless(op.outs or not outputs, "its outputs cannot be provided", "add a parameter `out: Tensor | None = None`")
        if not missing:
            _check_cases(op, faults)
            _check_sizes(op, faults)


def _check_cases(op: Operator[Any, Any], faults: Faults) -> None:
    cases, small = op.all_cases(), small_cases(op)
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults.unless(not twice, f"cases named {', '.join(twice)} stand twice", "give each its own name")
    faults.unless(all(name.strip() == name and name for name in names), "a case's name begins or ends with a space", "strip it")
    faults.unless(len(small) >= 3, f"{len(small)} small cases", "have three or more, for tests on a CPU")
    faults.unless(len(small) < len(cases), "no large case", "add one with large=True, for benchmarks")

    def drawn(case: Case, seed: int) -> list[torch.Tensor]:
        return [bits(t) for t in tensors_of([*complete(op, case, seed=seed).values()])]

    follow = [c for c in small if any(not torch.equal(a, b) for a, b in zip(drawn(c, 0), drawn(c, 1), strict=True))]
    faults.unless(len(follow) >= 2, f"{len(follow)} of its cases follow the seed", "draw values from the given `Draw`")
    flags: dict[str, set[str]] = {}
    given: set[str] = set()
    for case in small:
        traits = op.request(complete(op, case)).traits
        given.update(traits)
        odd = [f"{name}={value!r}" for name, value in traits.items() if impossible_values(one_of(value), op.traits[name])]
        faults.unless(not odd, f"{case.name}: {', '.join(odd)} are not what traits= states", "state what values they have")
        flags[case.name] = {name for name, value in traits.items() if isinstance(value, bool)}
    # An undeclared trait in a request raises an error. So the remaining fault is a declared trait that no small case has.
    idle = sorted(op.traits.keys() - given)
    faults.unless(not idle, f"no small case gives the traits {', '.join(idle)}", "add a case, or leave them out of traits=")
    first = next(iter(flags.values()), set())
    for name, stated in flags.items():
        # A kernel that requires a flag rejects requests without the flag. So requests must also contain flags that are False.
        faults.unless(stated == first, f"{name}: flags {sorted(stated ^ first)} are not always stated", "state them as False")


# -- each small case --------------------------------------------------------------------------------------------------------------


def _drawn_twice(op: Operator[Any, Any], case: Case) -> None:
    arguments, again = case.build(seed=3), case.build(seed=3)
    unknown = set(arguments) - set(op.names)
    assert not unknown, f"draws {unknown}, which are no parameters"
    outs = {*op.outs} & {name for name, value in arguments.items() if value is not None}
    assert not outs, f"draws {outs}: leave outputs to the operator"
    assert [*arguments] == [*again], "draws other arguments the second time"
    for name in arguments:
        for one, other in zip(tensors_of(arguments[name]), tensors_of(again[name]), strict=True):
            assert one.data_ptr() != other.data_ptr() or not one.numel(), f"{name} is the same tensor again: draw a new one"
            assert torch.equal(bits(one), bits(other)), f"{name} does not follow the seed: draw it from the given `Draw`"
    op.check_call(op.complete(arguments))


def _cost_is_sensible(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    cost = op.cost_of(arguments)
    assert isinstance(cost, Cost)
    for name in ("flops", "bytes"):
        value = getattr(cost, name)
        assert math.isfinite(value) and value >= 0, f"cost hook: {name} must be finite and not negative, got {value}"  # noqa: PT018
    outputs = lowering.as_list(op.fake_outputs(arguments))
    if any(t.numel() for t in outputs) or (op.mutates and all(t.numel() for _, t in tensor_arguments(op.parameters, arguments))):
        assert cost.bytes > 0, "cost hook: a call that writes something moves bytes, got 0"


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    # The stride of an axis of one element does not matter.
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, tensor.dtype, tensor.device, strides


def _runs_as_declared(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    untouched = {n: [bits(t).clone() for t in tensors_of(v)] for n, v in arguments.items() if n not in op.mutates}
    results = op.function(**arguments)
    assert results is None or isinstance(results, (torch.Tensor, tuple)), "the body returns neither None, a tensor nor a tuple"
    listed = lowering.as_list(results)
    assert len(listed) <= lowering.count_outputs(op.body), "the body returns more outputs than its annotation says"
    fakes = [_looks(fake) for fake in lowering.as_list(op.fake_outputs(arguments))]
    assert fakes == [_looks(result) for result in listed], f"fake hook: gives {fakes}, the body {[_looks(r) for r in listed]}"
    for name, before in untouched.items():
        for old, now in zip(before, tensors_of(arguments[name]), strict=True):
            assert torch.equal(old, bits(now)), f"the body writes to {name}: declare that with mutates=, or do not"
    storages = {t.untyped_storage().data_ptr() for _, t in tensor_arguments(op.parameters, arguments) if t.numel()}
    given = [r.untyped_storage().data_ptr() for r in listed if r.numel()]
    assert not storages & set(given), "an output shares memory with an input: clone it"
    assert len(set(given)) == len(given), "two outputs share memory: clone one"


def _outputs_can_be_provided(op: Operator[Any, Any], case: Case) -> None:
    arguments = complete(op, case)
    if op.mutates and any(arguments[name] is not None for name in op.mutates):
        return  # the operator writes to its arguments, so a second run would have other inputs
    wanted = lowering.as_list(op.function(**arguments))
    outputs = {name: torch.empty_like(result) for name, result in op.named(arguments, wanted).items()}
    results = lowering.as_list(op.function(**{**arguments, **outputs}))
    for (name, output), result, expected in zip(outputs.items(), results, wanted, strict=False):
        assert result is output, f"{name} is not returned"
        rows = slice(op.counted_rows(arguments)) if output.ndim else ...
        assert torch.equal(bits(output[rows]), bits(expected[rows])), f"{name} receives other values than are returned without it"


@each_operator
def test_its_small_cases_work(op: Operator[Any, Any]) -> None:
    with Faults(str(op)) as faults:
        for check in (_drawn_twice, _cost_is_sensible, _runs_as_declared, _outputs_can_be_provided):
            faults.attempt(check, op, small_cases(op))


# -- each kernel ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_a_kernel_goes_with_its_operator(spec: KernelSpec) -> None:
    """For each of a kernel's signatures, some small case must have exactly its operands. Otherwise no request can have this
    signature."""
    op = get_operator(spec.operator)
    requests = [op.request(complete(op, case)) for case in small_cases(op)]
    roles = [{name for name, _ in request.signature.roles} for request in requests]
    with Faults(f"{spec.name} ({spec.origin})") as faults:
        for signature in sorted(spec.format_signatures or (), key=str):
            names = {name for name, _ in signature.roles}
            stated = " or ".join(sorted({", ".join(sorted(r)) for r in roles}))
            faults.unless(names in roles, f"takes the operands {sorted(names)}", f"a request for {op} states {stated}")


# -- the messages -----------------------------------------------------------------------------------------------------------------


def _odd(op: Operator[Any, Any], case: Case) -> None:
    if case.name != "good":
        raise ValueError(f"{case.name} must be good\nand more")


def _gathered() -> None:
    op = OPERATORS[0]
    with Faults("family.mode") as faults:
        faults.unless(True, "never", "said")
        faults.unless([], "no cases", "add three")
        faults.attempt(_odd, op, [Case(name, lambda draw: {}) for name in ("good", "a", "b")])


def test_faults_come_together() -> None:
    with pytest.raises(pytest.fail.Exception) as raised:
        _gathered()
    text = "family.mode: 2 faults\n  1. no cases: add three\n  2. case 'a' and 1 others: ValueError: a must be good"
    assert str(raised.value) == text


# -- examples ---------------------------------------------------------------------------------------------------------------------

WORKBENCH = "tokenspeed_kernel.workbench"
MODULES = [
    name
    for package in (tokenspeed_kernel, tokenspeed_kernel_base)
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not name.endswith(("__main__", DEVICE_SUFFIX))
]


@pytest.mark.parametrize("name", ["tokenspeed_kernel", *MODULES])
def test_examples_run(name: str) -> None:
    if name.startswith(WORKBENCH):
        pytest.importorskip("rich")
        pytest.importorskip("typer")
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, name):
        runner.run(test)
    assert runner.failures == 0


@each_operator
def test_its_example_is_found(op: Operator[Any, Any]) -> None:
    """doctest must find the example in each operator's docstring, although the public function is generated."""
    module = importlib.import_module(op.body.__module__)
    found = [test for test in doctest.DocTestFinder().find(module) if test.name.endswith(f".{op.mode}")]
    assert [test for test in found if test.examples], op.mode
