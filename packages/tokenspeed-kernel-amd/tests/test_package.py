"""Tests the package: which modules its import loads, errors for invalid calls and on other machines, and declarations."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel
import tokenspeed_kernel_amd
import tokenspeed_kernel_base
from tokenspeed_kernel import Priority
from tokenspeed_kernel_amd import _machine
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry

PACKAGE = Path(tokenspeed_kernel_amd.__file__).parent
FUNCTIONS = [
    "linear",
    "mha_decode_with_kvcache",
    "mha_extend_with_kvcache",
    "mha_prefill",
    "mha_with_kvcache",
    "mla_decode_with_kvcache",
    "mla_extend_with_kvcache",
    "mla_prefill",
    "mla_sparse_with_kvcache",
    "mm",
    "moe_apply",
    "moe_topk_apply",
]


def _python(code: str) -> str:
    """Returns the output of a script in a new interpreter, which finds this package and the base."""
    base = Path(tokenspeed_kernel_base.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, base)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- importing -----------------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = _python("import sys, tokenspeed_kernel_amd; print(*sys.modules)").split()
    assert not {"torch", "triton", "tokenspeed_kernel"} & set(loaded)


def test_importing_a_function_imports_no_triton() -> None:
    names = ", ".join(FUNCTIONS)
    loaded = _python(f"import sys; from tokenspeed_kernel_amd import {names}; print(*sys.modules)").split()
    assert "tokenspeed_kernel_amd.gfx950.attention.prefill" in loaded
    assert not {"triton", "tokenspeed_kernel"} & set(loaded)


def test_public_names() -> None:
    assert set(FUNCTIONS) <= set(dir(tokenspeed_kernel_amd))
    for name in FUNCTIONS:
        assert getattr(tokenspeed_kernel_amd, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'mha'"):
        _ = tokenspeed_kernel_amd.mha


def _imports(path: Path) -> set[str]:
    """Returns the top-level names of the packages that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found |= {name.split(".")[0] for name in names}
    return found


def test_nothing_imports_the_core() -> None:
    assert [path.name for path in PACKAGE.rglob("*.py") if "tokenspeed_kernel" in _imports(path)] == []


def test_every_module_is_scanned_or_device_code() -> None:
    """Every module is either scanned or device code. A kernel in any other module would not be found."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    scanned = _python(
        "from tokenspeed_kernel_base.discovery import import_modules as f; print(*f('tokenspeed_kernel_amd'))"
    ).split()
    assert set(scanned) <= modules
    assert {name for name in modules - set(scanned) if not name.endswith("_device")} == set()
    assert modules - set(scanned), "there is no device code any more"


def test_scanning_imports_no_compiler_and_no_library() -> None:
    code = """
import sys
from tokenspeed_kernel_base.registry import register_package
names = [spec.name for spec in register_package("tokenspeed_kernel_amd")]
assert "gluon_mha_prefill" in names and "aiter_mha_prefill_64" in names, names
print(*sys.modules)
"""
    loaded = _python(code).split()
    assert not {"triton", "aiter", "tokenspeed_kernel"} & set(loaded)
    assert not [name for name in loaded if name.startswith("tokenspeed_kernel_amd") and name.endswith("_device")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_operators(name: str) -> None:
    ours, core = getattr(tokenspeed_kernel_amd, name), getattr(tokenspeed_kernel, name)
    assert inspect.signature(ours) == inspect.signature(core)
    assert ours.__doc__ == core.__doc__
    assert ours.operator is core.operator


# -- the machine ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that fakes the installed version of Triton."""

    def pretend(version: str | None) -> None:
        monkeypatch.setattr(_machine, "triton_version", lambda: version)
        _machine.triton_gap.cache_clear()

    yield pretend
    _machine.triton_gap.cache_clear()


def _arguments(tokens: int = 6, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **changed: Any) -> dict[str, Any]:
    made = {
        "q": torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16),
        "k": torch.zeros(tokens, kv_heads, head_dim, dtype=torch.bfloat16),
        "v": torch.zeros(tokens, kv_heads, head_dim, dtype=torch.bfloat16),
        "cu_seqlens": torch.tensor([0, 2, tokens], dtype=torch.int32),
    }
    return {**made, **changed}


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ("gfx90a", r"gluon_mha_prefill +platform: needs architecture 9.5 or later, this is 9.0 \(gfx90a\)"),
        ("sm_90", r"gluon_mha_prefill +platform: needs an AMD device, this is sm_90"),
        ("cpu", r"gluon_mha_prefill +platform: needs an AMD device, this is a CPU"),
    ],
)
def test_another_machine_is_named(triton_of: Any, platform: str, reason: str) -> None:
    triton_of("3.9.0")
    with use_platform(named_platform(platform)), pytest.raises(RuntimeError, match=reason):
        tokenspeed_kernel_amd.mha_prefill(**_arguments())


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.6.0", "needs triton >= 3.9, this is 3.6.0"),
        ("3.8.1+rocm7", "this is 3.8.1"),
        (None, "there is none"),
    ],
)
def test_an_older_triton(triton_of: Any, version: str | None, reason: str) -> None:
    pytest.importorskip("triton")
    triton_of(version)
    with use_platform(named_platform("gfx950")), pytest.raises(RuntimeError, match=reason):
        tokenspeed_kernel_amd.mha_prefill(**_arguments())


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0+git1234", "4"])
def test_a_newer_triton(triton_of: Any, version: str) -> None:
    triton_of(version)
    assert _machine.triton_gap() is None


# -- wrong calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": [1]}, TypeError, "q must be a tensor, got list"),
        ({"k": torch.zeros(5, 2, 64, dtype=torch.bfloat16)}, ValueError, "k must be of shape .* where tokens is 6 in q"),
        ({"max_seqlen": -1}, ValueError, "max_seqlen must be at least 0, got -1"),
        ({"window_left": 1.5}, TypeError, "window_left must be int, got float 1.5"),
        ({"out": torch.zeros(6, 4, 128, dtype=torch.bfloat16)}, ValueError, r"out must have shape \[6, 4, 64\]"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """The operator's checks reject wrong arguments on any machine."""
    with pytest.raises(error, match=f"^mha_prefill: .*{message}"):
        tokenspeed_kernel_amd.mha_prefill(**_arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({name: torch.zeros(6, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}, "formats: "),
        ({"v": torch.zeros(6, 2, 96, dtype=torch.bfloat16)}, "traits: v_head_dim=96 is not one of 64, 128"),
    ],
)
def test_what_no_kernel_declares(triton_of: Any, changed: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    triton_of("3.9.0")
    with use_platform(named_platform("gfx950")), pytest.raises(RuntimeError, match=f"gluon_mha_prefill +{reason}"):
        tokenspeed_kernel_amd.mha_prefill(**_arguments(**changed))


# -- the plugin ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[KernelRegistry]:
    registry = KernelRegistry.get()
    with registry.transaction() as added:
        tokenspeed_kernel_amd.register()
    yield registry
    for spec in added:
        registry.unregister(spec.name)


def _explain(platform: str = "gfx950", **changed: Any) -> Any:
    with use_platform(named_platform(platform)):
        return tokenspeed_kernel.mha_prefill.explain(**_arguments(**changed))


def test_it_is_selected_on_gfx950(registered: KernelRegistry, triton_of: Any) -> None:
    pytest.importorskip("triton")
    triton_of("3.9.0")
    sinks = torch.zeros(4)
    assert _explain().chosen.name == "gluon_mha_prefill"
    assert _explain(sinks=sinks, window_left=127, logit_cap=1.0, return_lse=True).chosen.name == "gluon_mha_prefill"
    assert registered.get_by_name("gluon_mha_prefill").priority == Priority.SPECIALIZED


def test_what_it_does_not_declare_goes_to_others(registered: KernelRegistry, triton_of: Any) -> None:
    triton_of("3.9.0")
    wide = {name: torch.zeros(6, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    assert _explain(**wide).chosen.name != "gluon_mha_prefill"
    assert _explain(head_dim=80).chosen.name != "gluon_mha_prefill"
    for platform in ("gfx942", "sm_90", "cpu"):
        assert _explain(platform).chosen.name != "gluon_mha_prefill"


def test_with_an_older_triton_it_says_why(registered: KernelRegistry, triton_of: Any) -> None:
    pytest.importorskip("triton")
    triton_of("3.6.0")
    explained = _explain()
    assert explained.chosen.name != "gluon_mha_prefill"
    assert "needs triton >= 3.9, this is 3.6.0" in str(explained)


def test_a_declaration_says_where_it_stands(registered: KernelRegistry) -> None:
    spec = registered.get_by_name("gluon_mha_prefill")
    path, _, line = spec.origin.rpartition(":")
    assert Path(path) == PACKAGE / "gfx950" / "attention" / "prefill.py"
    assert Path(path).read_text().splitlines()[int(line) - 1].startswith("@register_kernel(")


def test_every_kernel_in_gluon_is_declared(registered: KernelRegistry) -> None:
    specs = [spec for spec in registered.list_kernels() if spec.solution == "gluon"]
    assert {spec.mode for spec in specs} == set(FUNCTIONS)
    for spec in specs:
        arch = "gfx942" if spec.name.endswith("_gfx942") else "gfx950"
        assert registered.get_impl(spec.name).__module__.startswith(f"tokenspeed_kernel_amd.{arch}.{spec.family}.")
