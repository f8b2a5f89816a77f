"""Tests the registry: accepted and rejected declarations, error messages, and when an implementation is imported."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import textwrap
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import platform, selection, signature
from tokenspeed_kernel_base import registry as registry_module
from tokenspeed_kernel_base.interface import Interface
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel_base.registry import (
    KernelLoadWarning,
    KernelRegistry,
    PriorityClashWarning,
    describe_kernel,
    register_kernel,
)
from tokenspeed_kernel_base.selection import NoKernelFoundError, Request, gate, select_kernel
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import TAGS, KernelSpec, Priority, RegistrationError
from tokenspeed_kernel_base.traits import at_most, multiple_of

BF16 = format_signatures("x", "dense", {torch.bfloat16})
X = format_signature(x=dense_tensor_format(torch.bfloat16))
DENSE = {"x": ("dense",)}


def kernel(x: Any, out: Any) -> None: ...


def spec(name: str = "mine", **changes: Any) -> KernelSpec:
    facts: dict[str, Any] = {"family": "norm", "mode": "scale", "solution": "torch", "format_signatures": BF16, "origin": "here:1"}
    return KernelSpec(name, **{**facts, **changes})


# -- declarations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, r"name of a kernel must be a non-empty str, got ''"),
        ({"name": None, "solution": "torch"}, None),
        ({"solution": ""}, r"solution of a kernel must be a non-empty str, got ''"),
        ({"family": 3}, r"family of a kernel must be a non-empty str, got 3"),
        ({"mode": ""}, r"mode of a kernel must be a non-empty str"),
        ({"priority": 20}, r"torch_scale: priority must be an int from 0 to 19, got 20"),
        ({"priority": -1}, r"priority must be an int from 0 to 19, got -1"),
        ({"priority": True}, r"priority must be an int from 0 to 19, got True"),
        ({"priority": 8.0}, r"priority must be an int from 0 to 19, got 8\.0"),
        ({"signatures": []}, r"signatures is empty, so no request would match; pass None to accept all"),
        ({"signatures": ["bf16"]}, r"signatures must be FormatSignature, got 'bf16'"),
        ({"traits": {"head_dim": object()}}, r"torch_scale: trait head_dim: a trait is constrained by a value, a set of values"),
        ({"traits": {"head_dim": {"a": 1}}}, r"trait head_dim: a trait is constrained by"),
        ({"traits": {"head_dim": [[64]]}}, r"trait head_dim: a trait is constrained by"),
        ({"traits": {"head_dim": set()}}, r"trait head_dim .* no value"),
        ({"traits": {"head_dim": at_most(8) & multiple_of(16) & 64}}, r"trait head_dim .* no value"),
        ({"tags": "waits"}, r"torch_scale: tags must be a set of str, got 'waits'"),
        ({"tags": [1]}, r"tags must be a set of str"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused(registry: KernelRegistry, changes: dict[str, Any], message: str | None) -> None:
    facts: dict[str, Any] = {"solution": "torch", "signatures": BF16}
    facts.update(changes)
    family, mode = facts.pop("family", "norm"), facts.pop("mode", "scale")
    if message is None:
        register_kernel(family, mode, **facts)(kernel)
        return
    with pytest.raises(RegistrationError, match=message) as caught:
        register_kernel(family, mode, **facts)(kernel)
    assert __name__ in str(caught.value) or "test_registry" in str(caught.value), "the message says where the kernel was declared"
    assert registry.list_kernels() == []


def test_default_name_is_solution_and_mode(registry: KernelRegistry) -> None:
    register_kernel("norm", "scale", solution="torch", signatures=BF16)(kernel)
    assert [s.name for s in registry.list_kernels()] == ["torch_scale"]
    assert registry.get_by_name("torch_scale").origin.startswith(__file__ + ":")


def test_the_decorator_returns_the_decorated_object(registry: KernelRegistry) -> None:
    assert register_kernel("norm", "scale", solution="torch", signatures=BF16)(kernel) is kernel
    path = "nowhere_to_be_found:kernel"
    assert register_kernel("norm", "scale", solution="lazy", signatures=BF16, priority=9)(path) is path


@pytest.mark.parametrize("impl", [3, None, "module", "module:", ":function", "a:b:c", ""])
def test_neither_function_nor_path_is_rejected(registry: KernelRegistry, impl: Any) -> None:
    with pytest.raises(RegistrationError, match=r'mine: .* function or "module:function", got'):
        registry.register(spec(), impl)
    assert registry.list_kernels() == []


def test_a_name_in_use_is_rejected_with_both_origins(registry: KernelRegistry) -> None:
    registry.register(spec(origin="first.py:10"), kernel)
    with pytest.raises(RegistrationError, match=r"named mine exists: .*first.py:10.*plugin b"):
        registry.register(spec(origin="plugin b", family="other"), kernel)
    assert registry.get_by_name("mine").origin == "first.py:10"


def test_implementations_take_the_operators_parameters(registry: KernelRegistry) -> None:
    registry.declare_interface("norm", "scale", Interface(("x", "out"), formats=DENSE, written=("out",)))

    def too_few(x: Any) -> None: ...
    def more(x: Any, out: Any, extra: Any) -> None: ...
    def keyword_only(x: Any, out: Any, *, needed: Any) -> None: ...

    for impl in (too_few, more, keyword_only):
        with pytest.raises(RegistrationError, match=r"mine: norm.scale .* has \(x, out\), .* takes \("):
            registry.register(spec(), impl)
    assert registry.list_kernels() == []

    def anything(*args: Any) -> None: ...
    def optional(x: Any, out: Any = None, *, block: int = 128) -> None: ...

    registry.register(spec("a", priority=1), anything)
    registry.register(spec("b", priority=2), optional)
    registry.register(spec("c", priority=3), print)  # a builtin has no signature, so registration cannot check it


# -- lazily imported implementations ----------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yields a function that writes an importable module and returns the module's name."""
    names: list[str] = []

    def write(source: str) -> str:
        name = f"lazy_kernels_{len(names)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        names.append(name)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_lazy_kernel_is_imported_only_when_selected(registry: KernelRegistry, module: Any, cpu: Any) -> None:
    name = module("def kernel(x, out): return 'ran'\n")
    registry.declare_interface("norm", "scale", Interface(("x", "out"), formats=DENSE, written=("out",)))
    registry.register(spec("lazy", priority=8), f"{name}:kernel")
    registry.register(spec("eager", priority=12), kernel)
    assert select_kernel("norm", "scale", X, platform=cpu).name == "eager"
    assert selection.explain_selection("norm", "scale", X, platform=cpu)
    assert describe_kernel("lazy")
    assert registry.is_lazy("lazy")
    assert name not in sys.modules

    chosen = select_kernel("norm", "scale", X, platform=cpu, override="lazy")
    assert chosen(None, None) == "ran"
    assert not registry.is_lazy("lazy")
    assert registry.get_impl("lazy") is sys.modules[name].kernel


def test_get_impl_names_the_fault_of_a_lazy_kernel(registry: KernelRegistry, module: Any) -> None:
    name = module("def short(x): ...\nnot_a_function = 3\n")
    raising = module("raise OSError('libgpu.so is missing')\n")
    registry.declare_interface("norm", "scale", Interface(("x", "out"), formats=DENSE, written=("out",)))
    for priority, (kernel_name, path) in enumerate(
        {
            "no_module": "there_is_no_such_module:kernel",
            "no_attribute": f"{name}:absent",
            "raising": f"{raising}:kernel",
            "short": f"{name}:short",
            "number": f"{name}:not_a_function",
        }.items()
    ):
        registry.register(spec(kernel_name, priority=priority), path)
    with pytest.raises(ImportError, match=r"no_module .*there_is_no_such_module.*imported"):
        registry.get_impl("no_module")
    with pytest.raises(AttributeError, match=f"no_attribute .*{name} has no absent"):
        registry.get_impl("no_attribute")
    with pytest.raises(ImportError, match=f"raising .*{raising}:kernel.*libgpu.so is missing"):
        registry.get_impl("raising")
    with pytest.raises(RegistrationError, match=r"short: norm.scale may write to out, .* take it"):
        registry.get_impl("short")
    with pytest.raises(RegistrationError, match=r"number: .*not_a_function is not callable"):
        registry.get_impl("number")
    with pytest.raises(KeyError, match=r"no kernel named shoort; did you mean short\?"):
        registry.get_impl("shoort")


def test_a_kernel_that_cannot_be_loaded_is_left_out_and_reported(registry: KernelRegistry, module: Any, cpu: Any) -> None:
    """Asserts that selection uses another kernel if the kernel with the highest priority cannot be imported, for example without
    its toolchain."""
    registry.register(spec("portable", priority=4), kernel)
    registry.register(spec("broken", priority=16, origin="plugin p"), "there_is_no_such_module:kernel")
    with pytest.warns(registry_module.KernelLoadWarning, match=r"broken \(plugin p\) .* left out: .*no_such_module"):
        assert select_kernel("norm", "scale", X, platform=cpu).name == "portable"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selection.memo.invalidate()
        assert select_kernel("norm", "scale", X, platform=cpu).name == "portable", "reported once"

    text = selection.explain_selection("norm", "scale", X, platform=cpu)
    assert "broken" in text
    assert "implementation: cannot be loaded: ImportError: kernel broken is implemented by" in text
    failure = registry.load_failures()["broken"]
    assert "Traceback" in failure
    assert "there_is_no_such_module" in failure

    with pytest.raises(NoKernelFoundError, match=r"broken, which fails the implementation gate"):
        select_kernel("norm", "scale", X, platform=cpu, override="broken")


def test_a_disabled_kernel_is_rejected_until_it_is_registered_again(registry: KernelRegistry) -> None:
    spec = KernelSpec("mine", "norm", "rmsnorm", "theirs", format_signatures=None, universal=True)
    registry.register(spec, lambda: None)
    request = Request("norm", "rmsnorm", FormatSignature(()), platform.cpu_platform())
    assert gate(spec, request) is None
    registry.disable("mine", "is disabled: wrong")
    assert gate(spec, request) == gate(spec, request, overridden=True) == ("implementation", "is disabled: wrong")
    assert registry.load_failures() == {}
    registry.unregister("mine")
    registry.register(spec, lambda: None)
    assert gate(spec, request) is None
    with pytest.raises(KeyError, match="no kernel named mien; did you mean mine"):
        registry.disable("mien", "is disabled")


def test_nothing_but_kernels_that_cannot_be_loaded_is_an_error(registry: KernelRegistry, cpu: Any) -> None:
    registry.register(spec("broken"), "there_is_no_such_module:kernel")
    with (
        pytest.warns(registry_module.KernelLoadWarning),
        pytest.raises(NoKernelFoundError, match=r"broken +implementation: cannot be"),
    ):
        select_kernel("norm", "scale", X, platform=cpu)


def test_a_kernel_registered_again_gets_another_chance(registry: KernelRegistry, cpu: Any) -> None:
    registry.register(spec("broken"), "there_is_no_such_module:kernel")
    with pytest.warns(registry_module.KernelLoadWarning), pytest.raises(NoKernelFoundError):
        select_kernel("norm", "scale", X, platform=cpu)
    registry.unregister("broken")
    registry.register(spec("broken"), kernel)
    assert select_kernel("norm", "scale", X, platform=cpu).name == "broken"


def test_importing_does_not_overwrite_what_was_registered_meanwhile(registry: KernelRegistry, module: Any) -> None:
    name = module(
        """
        from tokenspeed_kernel_base.registry import KernelRegistry
        registry = KernelRegistry.get()
        spec = registry.get_by_name("mine")
        registry.unregister("mine")
        def replacement(x, out): ...
        registry.register(spec, replacement)
        def kernel(x, out): ...
        """
    )
    registry.register(spec(), f"{name}:kernel")
    registry.get_impl("mine")
    assert registry.get_impl("mine").__name__ == "replacement"


# -- clashes ----------------------------------------------------------------------------------------------------------------------


def test_equal_priority_is_reported_with_both_origins(registry: KernelRegistry) -> None:
    registry.register(spec("b", origin="core.py:7"), kernel)
    with pytest.warns(PriorityClashWarning, match=r"a \(plugin p\) and b .*priority 8 .*a wins"):
        registry.register(spec("a", origin="plugin p"), kernel)
    assert [str(c) for c in registry.clashes()] == [
        "a (plugin p) and b (core.py:7) both have priority 8 and may be eligible for the same norm.scale request; a wins by name. "
        "Give one of them another priority."
    ]
    registry.unregister("b")
    assert registry.clashes() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"priority": 9},
        {"mode": "other"},
        {"format_signatures": format_signatures("x", "dense", {torch.float16})},
        {"traits": {"sinks": True}},
        {"traits": {"head_dim": 128}},
        {"capability": CapabilityRequirement(vendors=frozenset({"amd"}))},
        {"capability": CapabilityRequirement(max_arch_version=ArchVersion(8, 9), vendors=frozenset({"nvidia"}))},
    ],
)
def test_kernels_that_cannot_meet_do_not_clash(registry: KernelRegistry, changes: dict[str, Any]) -> None:
    nvidia = CapabilityRequirement(ArchVersion(9, 0), vendors=frozenset({"nvidia"}))
    registry.register(spec("first", capability=nvidia, traits={"head_dim": {32, 64}}), kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.register(spec("second", **changes), kernel)
    assert registry.clashes() == []


def test_only_cpus_do_not_clash_with_an_architecture(registry: KernelRegistry) -> None:
    registry.register(spec("first", capability=CapabilityRequirement(vendors=frozenset({"cpu"}))), kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.register(spec("second", capability=CapabilityRequirement(ArchVersion(9, 0))), kernel)


def test_the_universal_reference_clashes_with_priority_0(registry: KernelRegistry) -> None:
    registry.register(spec("reference", priority=0, universal=True, format_signatures=None), kernel)
    with pytest.warns(PriorityClashWarning):
        registry.register(spec("lowest", priority=0, traits={"sinks": True}), kernel)


# -- removing, transactions -------------------------------------------------------------------------------------------------------


def test_unregistering_an_unknown_kernel(registry: KernelRegistry) -> None:
    registry.register(spec("mine"), kernel)
    with pytest.raises(KeyError, match=r"no kernel named mime; did you mean mine\?"):
        registry.unregister("mime")


def test_a_transaction_keeps_all_or_nothing(registry: KernelRegistry) -> None:
    registry.register(spec("before"), kernel)
    with registry.transaction() as added:
        registry.register(spec("one", priority=1), kernel)
        registry.register(spec("two", priority=2), kernel)
    assert [s.name for s in added] == ["one", "two"]

    with pytest.raises(RuntimeError, match="half way"), registry.transaction():  # noqa: PT012
        registry.register(spec("three", priority=3), kernel)
        raise RuntimeError("half way")
    assert sorted(s.name for s in registry.list_kernels()) == ["before", "one", "two"]


def test_a_transaction_undoes_removals_interfaces_and_clashes(registry: KernelRegistry) -> None:
    registry.register(spec("kept"), kernel)
    with pytest.raises(RuntimeError), registry.transaction():  # noqa: PT012
        registry.unregister("kept")
        registry.register(spec("kept", priority=19), print)
        registry.declare_interface("norm", "scale", Interface(("q",), formats=DENSE))
        with pytest.warns(PriorityClashWarning):
            registry.register(spec("clashing", priority=19), lambda q: None)
        raise RuntimeError
    assert registry.get_by_name("kept").priority == 8
    assert registry.get_impl("kept") is kernel
    assert registry.clashes() == []
    registry.register(spec("later", priority=3), kernel)


def test_a_kernel_replaced_in_a_transaction_counts_as_added(registry: KernelRegistry) -> None:
    registry.register(spec("kept"), kernel)
    with registry.transaction() as added:
        registry.unregister("kept")
        registry.register(spec("kept", priority=19), kernel)
    assert [s.name for s in added] == ["kept"]


def test_registering_from_many_threads(registry: KernelRegistry) -> None:
    def work(thread: int) -> None:
        for i in range(50):
            registry.register(spec(f"k_{thread}_{i}", mode=f"m_{thread}_{i}"), kernel)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.list_kernels()) == 200


# -- reading ----------------------------------------------------------------------------------------------------------------------


def test_lists(registry: KernelRegistry) -> None:
    registry.declare_interface("moe", "apply", Interface(("x", "out"), formats=DENSE, written=("out",)))
    registry.register(spec("b", priority=4), kernel)
    registry.register(
        spec("a", priority=4, solution="triton", format_signatures=format_signatures("x", "dense", {torch.float16})), kernel
    )
    registry.register(spec("c", priority=16, mode="apply", family="moe"), kernel)
    registry.register(spec("d", priority=12), kernel)
    assert registry.list_operators() == [("moe", "apply"), ("norm", "scale")]
    assert [s.name for s in registry.get_for_operator("norm", "scale")] == ["d", "a", "b"]
    assert registry.get_for_operator("norm", "absent") == []
    assert [s.name for s in registry.list_kernels()] == ["c", "d", "a", "b"]
    assert registry.list_solutions() == ["torch", "triton"]


def _suits(request: Any, config: Any) -> None: ...


def _present() -> None: ...


def _described(name: str) -> dict[str, str]:
    first, *lines = describe_kernel(name).splitlines()
    assert first == name
    width = len("weight preprocessor")
    assert all(line[:2] == "  " and line[2 + width] == " " for line in lines)
    return {line[2 : 2 + width].strip(): line[3 + width :] for line in lines}


def test_describe_kernel_lists_every_fact(registry: KernelRegistry) -> None:
    requirement = CapabilityRequirement(
        ArchVersion(9, 0), ArchVersion(9, 9), frozenset({"triton"}), frozenset({"nvidia"}), probe=_present
    )
    capability = {
        "vendors": "nvidia",
        "architectures": "9.0 to 9.9",
        "platform features": "triton",
        "probe": f"{__name__}:_present",
    }
    traits = "head_dim: at most 256 and a multiple of 16; sinks: any"
    tags = f"fp8_weights: {TAGS['fp8_weights']}; waits: it may wait for the device, so a CUDA graph cannot capture it"
    facts: dict[str, tuple[Any, dict[str, str]]] = {
        "name": ("mine", {}),
        "family": ("norm", {"operator": "norm.scale"}),
        "mode": ("scale", {"operator": "norm.scale"}),
        "solution": ("torch", {"solution": "torch"}),
        "capability": (requirement, capability),
        "format_signatures": (BF16, {"formats": "x: bfloat16"}),
        "traits": ({"head_dim": at_most(256) & multiple_of(16), "sinks": any}, {"traits": traits}),
        "priority": (8, {"priority": "8 (performant)"}),
        "tags": ({"fp8_weights", "waits"}, {"tags": tags}),
        "aligned_caches": (("k_cache", "v_cache"), {"aligned caches": "k_cache, v_cache"}),
        "only_by_name": ("it is an experiment", {"only by name": "it is an experiment"}),
        "accuracy": ("within 2^-21 of the largest", {"accuracy": "within 2^-21 of the largest"}),
        "weight_preprocessor": ("mine.weights:arrange", {"weight preprocessor": "mine.weights:arrange"}),
        "universal": (True, {"undeclared flags": "served"}),
        "tunables": ({"block": (1, 2), "warps": (4,)}, {"tunables": "block: 1, 2; warps: 4"}),
        "tunable_if": (_suits, {"tunable if": f"{__name__}:_suits"}),
        "package": ("my_kernels", {"package": "my_kernels"}),
        "origin": ("here:1", {"declared by": "here:1"}),
    }
    assert facts.keys() == {field.name for field in dataclasses.fields(KernelSpec)}, "a fact of a declaration is not shown"
    registry.register(KernelSpec(**{name: value for name, (value, _) in facts.items()}), "nowhere:kernel")
    shown = {label: text for _, lines in facts.values() for label, text in lines.items()}
    of_registry = {"serves": "everyone", "implementation": "nowhere:kernel", "disabled": "no", "ignored parameters": "none"}
    assert _described("mine") == {**shown, **of_registry}

    registry.publish(["mine"], public=False)
    with pytest.warns(KernelLoadWarning):
        registry.load_or_leave_out("mine")
    described = _described("mine")
    assert described["serves"] == "the functions of my_kernels"
    assert described["disabled"].startswith("cannot be loaded: ImportError: kernel mine is implemented by nowhere:kernel")


def test_describe_kernel_reports_absences(registry: KernelRegistry) -> None:
    registry.register(KernelSpec("plain", "norm", "scale", "torch", format_signatures=None, priority=9), functools.partial(kernel))
    described = _described("plain")
    nothing = {"package", "platform features", "probe", "traits", "tunables", "tunable if", "weight preprocessor", "tags"}
    assert {label for label, text in described.items() if text == "none"} == nothing | {
        "aligned caches",
        "ignored parameters",
    }
    assert described["vendors"] == described["formats"] == "any"
    assert described["architectures"] == "any to any"
    assert described["only by name"] == "no"
    assert described["priority"] == "9"
    assert described["undeclared flags"] == "not served"
    assert described["implementation"] == f"{__name__}:kernel"
    with pytest.raises(KeyError, match="no kernel named other"):
        describe_kernel("other")


def test_aligned_caches_are_parameters(registry: KernelRegistry) -> None:
    def attend(q: Any, k_cache: Any) -> None: ...

    registry.register(spec("right", aligned_caches=("k_cache",)), attend)
    with pytest.raises(RegistrationError, match=r"wrong: aligned_caches .* parameters, got v_cache"):
        registry.register(spec("wrong", aligned_caches=("k_cache", "v_cache")), attend)


def test_the_nearest_kernel_is_of_the_operator(registry: KernelRegistry) -> None:
    registry.register(spec("triton_scale", solution="triton", priority=5), kernel)
    registry.register(spec("torch_scale"), kernel)
    registry.register(spec("triton_scales", mode="scales", solution="triton"), kernel)
    with pytest.raises(KeyError, match=r"triton_scalez; did you mean triton_scales?\?"):
        registry.get_by_name("triton_scalez")
    with pytest.raises(KeyError, match=r"triton_scalez; did you mean triton_scale\?"):
        registry.get_by_name("triton_scalez", "norm.scale")
    with pytest.raises(KeyError, match=r"triton_scales_2; did you mean triton_scales\?"):
        registry.get_by_name("triton_scales_2", "norm.scales")
    assert registry.get_by_name("triton_scales", "norm.scale").mode == "scales", "a name is a name"


def test_a_solution_is_not_a_kernel(registry: KernelRegistry) -> None:
    registry.register(spec("triton_scale", solution="triton", priority=5), kernel)
    registry.register(spec("other_scale", solution="triton", priority=6), kernel)
    for number in range(4):
        registry.register(spec(f"some_{number}", solution="triton", mode="some", priority=number), kernel)
    message = r"no kernel named {}; did you mean a kernel of solution triton \({}\)\?"
    with pytest.raises(KeyError, match=message.format("triton", "other_scale, triton_scale")):
        registry.get_by_name("triton", "norm.scale")
    with pytest.raises(KeyError, match=message.format("tritn", r"other_scale, some_0, some_1, some_2, \.\.\.")):
        registry.get_by_name("tritn")
    with pytest.raises(KeyError, match=r"^'no kernel named qqq'$"):
        registry.get_by_name("qqq")


def test_specs_are_immutable(registry: KernelRegistry) -> None:
    one = spec(traits={"head_dim": 64}, tags={"waits"})
    with pytest.raises(TypeError):
        one.traits["head_dim"] = 3  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.priority = 3  # type: ignore[misc]
    assert isinstance(one.tags, frozenset)
    assert one.priority == Priority.PERFORMANT
    assert hash(one) == hash(spec(traits={"head_dim": 64}, tags={"waits"}))


def test_get_and_reset() -> None:
    first = KernelRegistry.get()
    assert KernelRegistry.get() is first
    KernelRegistry.reset()
    assert KernelRegistry.get() is not first
    assert KernelRegistry.get().list_kernels() == []


# -- names and meanings in use by code written against 0.1 -----------------------------------------------------------------------


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    parameters = inspect.signature(function).parameters.values()
    return (
        [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"],
        [p.name for p in parameters if p.kind is p.KEYWORD_ONLY],
    )


def test_published_signatures() -> None:
    assert _parameters(register_kernel) == (
        ["family", "mode"],
        [
            "name",
            "solution",
            "capability",
            "signatures",
            "traits",
            "priority",
            "tags",
            "aligned_caches",
            "only_by_name",
            "accuracy",
            "weight_preprocessor",
            "tunables",
            "tunable_if",
        ],
    )
    assert _parameters(select_kernel) == (
        ["family", "mode", "format_signature"],
        ["platform", "objective", "traits", "solution", "override", "sizes"],
    )
    assert {p.name: int(p) for p in Priority} == {"REFERENCE": 0, "COMPOSED": 2, "PORTABLE": 4, "PERFORMANT": 8, "SPECIALIZED": 12}
    for name in (
        "get",
        "reset",
        "register",
        "get_by_name",
        "get_impl",
        "get_for_operator",
        "list_operators",
        "list_kernels",
        "list_solutions",
    ):
        assert callable(getattr(KernelRegistry, name))
    assert {o.value for o in selection.SelectionObjective} == {
        "default", "portability", "determinism", "accuracy", "debug"
    }  # fmt: skip
    for name in (
        "SelectionStrategy", "SelectionPolicy", "set_selection_policy", "kernel_override",
        "explain_selection", "warmup_selection", "NoKernelFoundError", "SelectedKernel",
    ):  # fmt: skip
        assert hasattr(selection, name)
    assert list(inspect.signature(selection.SelectedKernel).parameters)[:2] == ["name", "impl"]
    assert list(inspect.signature(CapabilityRequirement).parameters) == [
        "min_arch_version", "max_arch_version", "required_features", "vendors", "probe", "min_sms"
    ]  # fmt: skip


def test_published_names_of_the_other_modules() -> None:
    expected: dict[types.ModuleType, list[str]] = {
        signature: [
            "TensorFormat", "ScaleFormat", "FormatSignature", "tensor_format", "dense_tensor_format", "format_signature",
            "format_signatures",
        ],
        platform: ["ArchVersion", "PlatformInfo", "CapabilityRequirement", "current_platform"],
    }  # fmt: skip
    for module, names in expected.items():
        assert [n for n in names if not hasattr(module, n)] == []
