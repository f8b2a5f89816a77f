"""Tests plugins as users install them: built, installed with pip, and discovered by a fresh process that imports the core.

`sample_plugins/good` is a correct plugin. `sample_plugins/broken` is a package with one plugin for each mistake.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import tokenspeed_kernel
import tokenspeed_kernel_base.operator as operator_module
from tokenspeed_kernel import NoKernelFoundError, plugins
from tokenspeed_kernel.plugins import PluginWarning, discover_plugins
from tokenspeed_kernel_base.config import PREFIX
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel, register_package

SAMPLES = Path(__file__).parent / "sample_plugins"

BROKEN = {
    "absent-attribute": "AttributeError: .*nothing_of_that_name",
    "exits": "SystemExit: no device",
    "half": "RuntimeError: after two of three",
    "import-error": "ModuleNotFoundError: No module named 'a_gpu_toolchain_that_is_not_installed'",
    "name-clash": r"RegistrationError: a kernel named reference_rmsnorm exists: registered by .*/ops/norm/rmsnorm.py:\d+, "
    r"now again by .*/sample_broken_kernels/plugin.py:\d+",
    "not-callable": r"TypeError: sample_broken_kernels.plugin:NOT_CALLABLE must be a function without parameters, got 42",
    "raises": "RuntimeError: the driver is too old",
    "wants-arguments": "TypeError: wants_arguments\\(\\) missing 1 required positional argument",
    "wrong-signature": r"RegistrationError: wrong_rmsnorm: norm.rmsnorm may write to out, so an implementation must take it. "
    r"It has \(x, weight, eps, residual, out, residual_out\), this implementation takes \(x, weight\)",
}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds both sample packages, and installs each into its own folder, without network access."""
    targets = {}
    for package in ("good", "broken"):
        targets[package] = tmp_path_factory.mktemp(package)
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
            "--no-build-isolation", "--no-compile", "--target", str(targets[package]), str(SAMPLES / package),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return targets


# Plugins that are installed on this machine. Tests disable them.
OTHERS = sorted(entry.name for entry in metadata.entry_points(group=plugins.GROUP))

Run = Callable[..., tuple[Any, str]]

PREAMBLE = f"""
OTHERS = {OTHERS!r}
import json, sys, warnings
warnings.simplefilter("always")
import torch
import tokenspeed_kernel
from tokenspeed_kernel import plugins
from tokenspeed_kernel_base.registry import KernelRegistry
x, weight = torch.ones(2, 4), torch.ones(4)
def ours(names): return [name for name in names if name not in OTHERS]
def served(): return "sample" if tokenspeed_kernel.rmsnorm(x, weight)[0, 0] == 42 else "reference"
"""


@pytest.fixture(scope="session")
def run(installed: dict[str, Path]) -> Run:
    """Returns a function that runs a program in a fresh process, with the named packages installed. It returns the program's
    variable ``result``, and stderr."""

    def execute(program: str, *packages: str, **environment: str) -> tuple[Any, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        if "CONFIG" not in environment:  # the environment would override the file
            environment["DISABLE_PLUGINS"] = ",".join([environment.get("DISABLE_PLUGINS", ""), *OTHERS])
        env.update({PREFIX + name: value for name, value in environment.items()})
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*(str(installed[p]) for p in packages), env.get("PYTHONPATH")]))
        source = PREAMBLE + textwrap.dedent(program) + "\nprint(json.dumps(result))"
        done = run_python("-c", source, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return execute


@pytest.fixture(scope="session")
def all_together(run: Run) -> tuple[dict[str, Any], str]:
    """Runs one process with the good plugin and all broken plugins."""
    return run(
        """
        result = {
            "modules before": sorted(m for m in sys.modules if m.startswith("sample_")),
            "plugins": {p.name: [p.package, p.version, p.num_kernels, list(p.kernel_names)] for p in plugins.list_plugins()},
            "failures": {f.name: [f.package, f.version, f.error, f.traceback] for f in plugins.plugin_failures()},
            "kernels": {s.name: s.origin for s in KernelRegistry.get().list_kernels()},
            "clashes": [str(c) for c in KernelRegistry.get().clashes() if "sample_rmsnorm" in str(c)],
            "served": served(),
            "modules after": sorted(m for m in sys.modules if m.startswith("sample_")),
            "mm": tokenspeed_kernel.mm(x, torch.ones(4, 2)).tolist(),
            "silu": tokenspeed_kernel.silu_and_mul(torch.ones(1, 2)).tolist(),
            "silu explained": str(tokenspeed_kernel.silu_and_mul.explain(torch.ones(1, 2))),
            "load failures": KernelRegistry.get().load_failures(),
        }
        """,
        "good",
        "broken",
    )


def test_a_plugin_is_discovered_when_the_core_is_imported(all_together: tuple[dict[str, Any], str]) -> None:
    result, _ = all_together
    assert result["plugins"]["sample"] == ["sample-kernels", "1.2.3", 2, ["sample_mm", "sample_rmsnorm"]]
    assert re.fullmatch(r".*/sample_kernels/plugin.py:\d+", result["kernels"]["sample_rmsnorm"])


def test_a_plugin_wins_and_loses_by_priority(all_together: tuple[dict[str, Any], str]) -> None:
    result, _ = all_together
    assert result["served"] == "sample"
    assert result["mm"] == [[4.0, 4.0]] * 2


def test_a_plugins_kernels_are_imported_when_selected(all_together: tuple[dict[str, Any], str]) -> None:
    result, _ = all_together
    assert "sample_kernels.plugin" in result["modules before"]
    assert "sample_kernels.kernels" not in result["modules before"]
    assert "sample_kernels.kernels" in result["modules after"]


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_plugin_is_reported(all_together: tuple[dict[str, Any], str], name: str) -> None:
    result, stderr = all_together
    package, version, error, traceback = result["failures"][name]
    assert (package, version) == ("sample-broken-kernels", "0.1")
    assert re.match(BROKEN[name], error), error
    assert traceback.startswith("Traceback (most recent call last)")
    assert error.split(":")[0] in traceback
    assert f"plugin {name} of sample-broken-kernels 0.1 failed to load and is left out: {error}" in stderr
    assert name not in result["plugins"]


def test_broken_plugins_leave_nothing_behind(all_together: tuple[dict[str, Any], str]) -> None:
    result, _ = all_together
    assert sorted(result["failures"].keys() - OTHERS) == sorted(BROKEN), "no other plugin failed"
    of_plugins = {n for n, origin in result["kernels"].items() if re.search("/sample_(broken_)?kernels/", origin)}
    assert of_plugins == {"sample_rmsnorm", "sample_mm", "zz_equal_rmsnorm", "later_silu_and_mul", "misspelt_rmsnrm"}
    assert "/ops/norm/rmsnorm.py:" in result["kernels"]["reference_rmsnorm"]


def test_equal_priorities_are_reported_with_both_origins(all_together: tuple[dict[str, Any], str]) -> None:
    result, stderr = all_together
    (clash,) = result["clashes"]
    assert re.match(
        r"sample_rmsnorm \(.*/sample_kernels/plugin.py:\d+\) and zz_equal_rmsnorm \(.*/sample_broken_kernels/plugin.py:\d+\) "
        "both have priority 16 and may be eligible for the same norm.rmsnorm request; sample_rmsnorm wins by name",
        clash,
    )
    assert "PriorityClashWarning: " + clash in stderr
    assert result["plugins"]["equal-priority"] == ["sample-broken-kernels", "0.1", 1, ["zz_equal_rmsnorm"]]


def test_a_kernel_of_no_operator_is_warned_of(all_together: tuple[dict[str, Any], str]) -> None:
    _, stderr = all_together
    assert re.search(
        r"PluginWarning: kernel misspelt_rmsnrm \(.*/sample_broken_kernels/plugin.py:\d+\) implements norm.rmsnrm, which is not "
        r"declared; did you mean norm.rmsnorm\?",
        stderr,
    )
    assert stderr.count("which is not declared") == 1


def test_a_kernel_that_proves_broken_when_selected_is_left_out(all_together: tuple[dict[str, Any], str]) -> None:
    result, stderr = all_together
    assert result["silu"] == [[pytest.approx(0.7310586)]]
    assert re.search(r"KernelLoadWarning: later_silu_and_mul \(.*/sample_broken_kernels/plugin.py:\d+\) cannot be loaded", stderr)
    assert "later_silu_and_mul" in result["load failures"]
    explained = " ".join(result["silu explained"].split())
    assert "cannot be loaded: RegistrationError: later_silu_and_mul: activation.silu_and_mul" in explained


def test_without_plugins(run: Run) -> None:
    result, stderr = run("result = [served(), [p.name for p in discover_plugins()]]".replace("discover", "plugins.discover"))
    assert result[0] == "reference"
    assert "sample" not in result[1]
    assert stderr == ""


@pytest.mark.parametrize("how", ["environment", "file"])
def test_disabling_by_settings(run: Run, tmp_path: Path, how: str) -> None:
    names = sorted({*BROKEN, "equal-priority", "misspelt", "wrong-signature-later", "sample"} - {"raises"})
    if how == "environment":
        setting = {"DISABLE_PLUGINS": ", ".join(names)}
    else:
        (tmp_path / "settings.toml").write_text(f"disabled_plugins = {json.dumps(names)}\n")
        setting = {"CONFIG": str(tmp_path / "settings.toml")}
    result, stderr = run(
        """
        result = [served(), ours(p.name for p in plugins.list_plugins()), ours(f.name for f in plugins.plugin_failures()),
                  ours(plugins.disabled_plugins()), sorted(m for m in sys.modules if m.startswith("sample_kernels"))]
        """,
        "good",
        "broken",
        **setting,
    )
    assert result == ["reference", [], ["raises"], names, []]
    assert stderr.count("plugin raises of sample-broken-kernels 0.1 failed to load") == 1
    assert "sample_" not in stderr.replace("sample_broken_kernels.plugin:raises", "")


@pytest.mark.parametrize("how", ["environment", "file"])
def test_disabling_a_plugin_that_is_not_installed_is_warned_of(run: Run, tmp_path: Path, how: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('disabled_plugins = ["smaple"]\n')
    setting = {"DISABLE_PLUGINS": "smaple"} if how == "environment" else {"CONFIG": str(file)}
    where = PREFIX + "DISABLE_PLUGINS" if how == "environment" else f"{file}: disabled_plugins"
    result, stderr = run("result = served()", "good", **setting)
    assert result == "sample"
    assert f"PluginWarning: {where} names smaple, which is not installed; did you mean sample?" in stderr


def test_disabling_all(run: Run) -> None:
    result, stderr = run("result = [served(), ours(plugins.disabled_plugins())]", "good", DISABLE_PLUGINS="*")
    assert result == ["reference", ["sample"]]
    assert stderr == ""


def test_disabling_one_while_running(run: Run) -> None:
    result, _ = run(
        """
        result = [served()]
        tokenspeed_kernel.KernelRegistry.get().unregister("sample_mm")  # by hand, before
        plugins.disable_plugin("sample")
        result += [served(), ours(p.name for p in plugins.list_plugins()), ours(plugins.disabled_plugins())]
        plugins.discover_plugins(force=True)
        result += [served()]
        try:
            plugins.disable_plugin("simple")
        except KeyError as error:
            result += [error.args[0]]
        """,
        "good",
    )
    installed = ", ".join(sorted([*OTHERS, "sample"]))
    assert result == ["sample", "reference", [], ["sample"], "reference", f"no plugin named simple; installed are: {installed}"]


def test_force_looks_again(run: Run, installed: dict[str, Path]) -> None:
    """With ``force``, discovery finds a package that was installed or repaired while the process runs."""
    result, _ = run(
        f"""
        result = [ours(p.name for p in plugins.discover_plugins())]
        sys.path.insert(0, {str(installed["good"])!r})
        result += [ours(p.name for p in plugins.discover_plugins(force=force)) for force in (False, True)] + [served()]
        first = plugins.list_plugins()
        plugins.discover_plugins(force=True)
        result += [all(one is other for one, other in zip(plugins.list_plugins(), first))]
        """
    )
    assert result == [[], [], ["sample"], "sample", True]


def test_force_brings_everything_back_after_a_reset(run: Run) -> None:
    result, _ = run(
        """
        def state():
            registry = KernelRegistry.get()
            return [
                [(spec.name, spec.operator, spec.origin) for spec in registry.list_kernels()],
                [p.kernel_names for p in plugins.list_plugins()],
                [f"{f.name}: {f.error}" for f in plugins.plugin_failures()],
                [str(clash) for clash in registry.clashes()],
            ]

        before, served_before = state(), served()
        KernelRegistry.reset()
        try:
            served()
            without = ""
        except tokenspeed_kernel.NoKernelFoundError as error:
            without = str(error)
        plugins.discover_plugins()
        still = len(KernelRegistry.get().list_kernels())
        plugins.discover_plugins(force=True)
        again = state()
        plugins.discover_plugins(force=True)
        result = [without, still, before == again == state(), served_before, served(), len(before[0]), before[1], before[2]]
        result += [tokenspeed_kernel.mm(x, torch.ones(4, 2)).tolist(), tokenspeed_kernel.argmax(x).tolist()]
        """,
        "good",
        "broken",
    )
    without, still, same, served_before, served, kernels, loaded, failed, product, largest = result
    assert "no kernel is registered for this operator" in without
    assert still == 0, "only force looks again"
    assert same
    assert (served_before, served) == ("sample", "sample")
    assert kernels > 40
    assert len(failed) == len(BROKEN)
    assert ["sample_mm", "sample_rmsnorm"] in loaded
    assert (product, largest) == ([[4.0, 4.0]] * 2, [0, 0])


def test_an_unknown_override_is_warned_of(run: Run) -> None:
    _, stderr = run("result = 0", "good", OVERRIDE_NORM_RMSNROM="sample_rmsnorm")
    assert (
        "TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNROM names no operator; did you mean TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM?" in stderr
    )


def test_an_override_that_no_call_can_select_is_warned_of_once(run: Run) -> None:
    _, stderr = run(
        "plugins.discover_plugins(); result = 0",
        "good",
        OVERRIDE_NORM_RMSNORM="sample_rmsnrom",
        OVERRIDE_GEMM_MM="sample_rmsnorm",
        OVERRIDE_ACTIVATION_SILU_AND_MUL="reference_silu_and_mul",
    )
    said = [line for line in stderr.splitlines() if "no call of" in line]
    assert len(said) == 2
    wanted = "no call of norm.rmsnorm can select it: no kernel named sample_rmsnrom; did you mean sample_rmsnorm?"
    assert f"TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM = sample_rmsnrom: {wanted}" in stderr
    assert "no call of gemm.mm can select it: sample_rmsnorm implements norm.rmsnorm, not gemm.mm" in stderr


def test_verbose_shows_each_decision_once(run: Run) -> None:
    _, stderr = run("result = [served(), served()]", VERBOSE="1")
    assert stderr.count("-> reference_rmsnorm") == 1


# -- in this process, with stand-ins for entry points
# ----------------------------------------------------------------------------------


class Entry:
    """A stand-in for an entry point, with the attributes that discovery uses."""

    def __init__(self, name: str, register: Callable[[], None], package: str = "made-up") -> None:
        self.name, self.value, self._register = name, f"{package}:register", register
        self.module, self.dist = package, type("Dist", (), {"name": package, "version": "1"})

    def load(self) -> Callable[[], None]:
        return self._register


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, registry: Any) -> list[Entry]:
    """Makes discovery find the entry points in the returned list, and no others. The registry is empty."""
    found: list[Entry] = []
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: list(found))
    plugins._loaded, plugins._failed, plugins._disabled, plugins._declared = {}, {}, set(), {}
    plugins._filled = registry
    return found


def test_a_failed_plugin_is_tried_again_with_force(entries: list[Entry]) -> None:
    working = []

    def register() -> None:
        if not working:
            raise RuntimeError("not yet")

    entries.append(Entry("late", register))
    with pytest.warns(PluginWarning, match="late of made-up 1 failed .*RuntimeError: not yet"):
        discover_plugins(force=True)
    assert [f.name for f in plugins.plugin_failures()] == ["late"]
    working.append(True)
    assert [p.name for p in discover_plugins(force=True)] == ["late"]
    assert plugins.plugin_failures() == []


def test_two_packages_with_a_plugin_of_one_name(entries: list[Entry]) -> None:
    entries += [Entry("same", lambda: None, "one"), Entry("same", lambda: None, "two")]
    with pytest.warns(PluginWarning, match="plugin same of two 1 is left out: .*one 1"):
        (loaded,) = discover_plugins(force=True)
    assert loaded.package == "one"


def test_kernels_declared_on_import_come_back(entries: list[Entry]) -> None:
    """The plugin's function declares kernels only at its first call, like a module that declares kernels at import. After a reset
    of the registry, discovery must register them again."""
    ran = []

    def register() -> None:
        if not ran:
            ran.append(True)
            register_kernel("norm", "rmsnorm", name="once", solution="once", signatures=None)(lambda *arguments: None)

    entries.append(Entry("once", register))
    (first,) = discover_plugins(force=True)
    KernelRegistry.reset()
    (second,) = discover_plugins(force=True)
    assert first == second
    assert KernelRegistry.get().is_public("once")
    assert KernelRegistry.get().is_public("reference_rmsnorm"), "the core is back, too"
    plugins.disable_plugin("once")
    KernelRegistry.reset()
    assert discover_plugins(force=True) == []
    assert not KernelRegistry.get().is_public("once"), "what is disabled stays so"


def test_a_name_in_use_since_a_reset(entries: list[Entry]) -> None:
    entries.append(Entry("mine", lambda: declared_by_plugin(lambda *arguments: None)))
    declared_by_plugin = register_kernel("norm", "rmsnorm", name="taken", solution="mine", signatures=None)
    discover_plugins(force=True)
    KernelRegistry.reset()
    register_kernel("norm", "rmsnorm", name="taken", solution="other", signatures=None)(lambda *arguments: None)
    with pytest.warns(PluginWarning, match="plugin mine of made-up 1 .* named taken exists"):
        assert discover_plugins(force=True) == []
    assert [failure.name for failure in plugins.plugin_failures()] == ["mine"]


_packages = itertools.count()


@pytest.fixture
def two_plugins(entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a package that works alone and provides two plugins, one for each of its two kernels."""
    package = f"twofold_kernels_{next(_packages)}"  # a new name each time: a process keeps a module's declarations
    folder = tmp_path / package
    (folder / "cpu").mkdir(parents=True)
    (folder / "cpu" / "__init__.py").touch()
    functions = "from tokenspeed_kernel_base.standalone import functions_of\n\n__getattr__, __dir__ = functions_of(__name__)\n"
    (folder / "__init__.py").write_text(functions)
    for operator, call in (("norm.rmsnorm", "x, weight, eps, residual, out, residual_out"), ("activation.silu_and_mul", "x, out")):
        family, mode = operator.split(".")
        (folder / "cpu" / f"{mode}.py").write_text(
            "from tokenspeed_kernel_base.registry import register_kernel\n\n"
            f"@register_kernel({family!r}, {mode!r}, solution='twofold', signatures=None, traits={{'residual': {{False}}}})\n"
            f"def {mode}({call}):\n    return x + 42\n"
        )
        entries.append(Entry(mode, functools.partial(register_package, f"{package}.cpu.{mode}"), package))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(package)
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


@pytest.mark.parametrize("used_before", [True, False], ids=["used before discovery", "not used before"])
def test_disabling_a_plugin_leaves_its_packages_own_functions_alone(two_plugins: Any, used_before: bool) -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    if used_before:
        assert two_plugins.rmsnorm(x, weight)[0, 0] == 42
    discover_plugins(force=True)
    assert {p.name: p.kernel_names for p in plugins.list_plugins()} == {
        "rmsnorm": ("twofold_rmsnorm",),
        "silu_and_mul": ("twofold_silu_and_mul",),
    }
    assert tokenspeed_kernel.rmsnorm(x, weight)[0, 0] == two_plugins.rmsnorm(x, weight)[0, 0] == 42

    plugins.disable_plugin("rmsnorm")
    assert [p.name for p in plugins.list_plugins()] == ["silu_and_mul"]
    assert two_plugins.rmsnorm(x, weight)[0, 0] == 42, "the package's own function is still served"
    assert two_plugins.rmsnorm(x + 1, weight)[0, 0] == 43
    with pytest.raises(NoKernelFoundError, match="no kernel is registered for this operator"):
        tokenspeed_kernel.rmsnorm(x, weight)
    with pytest.raises(NoKernelFoundError, match=r"twofold_rmsnorm, .*private to .*twofold_kernels"):
        tokenspeed_kernel.rmsnorm(x, weight, override="twofold_rmsnorm")
    assert [spec.name for spec in KernelRegistry.get().list_kernels()] == ["twofold_silu_and_mul"]
    assert tokenspeed_kernel.silu_and_mul(x)[0, 0] == 42, "another plugin of the package is not disabled"


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Writes a package that works without the core. Its kernel's module has the name of the kernel's operator. The package also
    declares an operator of its own."""
    package = f"own_kernels_{next(_packages)}"
    folder = tmp_path / package
    folder.mkdir()
    functions = "from tokenspeed_kernel_base.standalone import functions_of\n\n__getattr__, __dir__ = functions_of(__name__)\n"
    (folder / "__init__.py").write_text(functions)
    (folder / "rmsnorm.py").write_text(
        "from tokenspeed_kernel_base.registry import register_kernel\n\n"
        f"@register_kernel('norm', 'rmsnorm', name={package!r}, solution='own', signatures=None, traits={{'residual': False}})\n"
        "def rmsnorm(x, weight, eps, residual, out, residual_out):\n    return x + 42\n"
    )
    (folder / f"{package}_doubled.py").write_text(
        "import torch\nfrom tokenspeed_kernel_base.operator import operator\n\n"
        f"@operator('testing', '{package}_doubled', formats=('x',))\n"
        f"def {package}_doubled(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:\n    return 2 * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    operator_module._operators.pop(("testing", f"{package}_doubled"), None)
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


@pytest.mark.parametrize("registered", [True, False], ids=["after the plugin", "before the plugin"])
def test_a_packages_functions_hide_the_modules_of_their_names(own_package: str, registered: bool) -> None:
    if registered:
        register_package(own_package)
    package = importlib.import_module(own_package)
    assert package.rmsnorm(torch.zeros(2, 4), torch.ones(4))[0, 0] == 42
    register_package(own_package)
    assert package.rmsnorm(torch.zeros(2, 4), torch.ones(4))[0, 0] == 42
    assert importlib.import_module(f"{own_package}.rmsnorm") is sys.modules[f"{own_package}.rmsnorm"]


def test_an_operator_that_a_package_declares_is_a_function_of_the_package(own_package: str) -> None:
    register_package(own_package)
    package = importlib.import_module(own_package)
    assert {"rmsnorm", f"{own_package}_doubled"} <= set(dir(package))
    assert getattr(package, f"{own_package}_doubled")(torch.ones(3)).tolist() == [2, 2, 2]


def test_an_interrupt_is_not_swallowed(entries: list[Entry], registry: Any) -> None:
    def register() -> None:
        raise KeyboardInterrupt

    entries.append(Entry("slow", register))
    with pytest.raises(KeyboardInterrupt):
        discover_plugins(force=True)
    assert plugins.list_plugins() == []


def test_published_names() -> None:
    for module, names in (
        (plugins, ["discover_plugins", "list_plugins", "disable_plugin", "PluginInfo"]),
        (
            tokenspeed_kernel,
            ["kernel_scope", "shape_capture", "start_shape_capture", "stop_shape_capture", "start_profiling", "stop_profiling"],
        ),
    ):
        assert [name for name in names if not hasattr(module, name)] == []
    assert list(inspect.signature(plugins.PluginInfo).parameters) == ["name", "package", "version", "num_kernels", "kernel_names"]
    assert plugins.GROUP == "tokenspeed_kernel.plugins"
