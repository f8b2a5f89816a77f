"""The package around the kernels: what importing it costs, what it says to wrong calls and machines, what the plugin declares."""

from __future__ import annotations

import ast
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
from tokenspeed_kernel_amd import _machine, plugin
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry

PACKAGE = Path(tokenspeed_kernel_amd.__file__).parent
FUNCTIONS = ["mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_prefill", "mha_with_kvcache"]


def _python(code: str) -> str:
    """What a new interpreter prints that finds the package and what it requires."""
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
    assert "tokenspeed_kernel_amd.attention" in loaded
    assert not {"triton", "tokenspeed_kernel"} & set(loaded)


def test_public_names() -> None:
    assert set(FUNCTIONS) <= set(dir(tokenspeed_kernel_amd))
    for name in FUNCTIONS:
        assert getattr(tokenspeed_kernel_amd, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'mha'"):
        _ = tokenspeed_kernel_amd.mha


def _imports(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found |= {name.split(".")[0] for name in names}
    return found


def test_nothing_imports_the_core() -> None:
    assert [path.name for path in PACKAGE.rglob("*.py") if "tokenspeed_kernel" in _imports(path)] == []


def test_every_module_is_scanned_or_device_code() -> None:
    """So no kernel can be overlooked."""
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
def test_signatures_are_the_operators(name: str) -> None:
    import inspect

    ours = inspect.signature(getattr(tokenspeed_kernel_amd, name)).parameters
    core = inspect.signature(getattr(tokenspeed_kernel, name)).parameters
    parameters = [(p.name, p.default) for p in core.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours.values()] == parameters


# -- the machine ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the version of Triton that seems to be installed."""

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


def test_another_machine_is_named(monkeypatch: pytest.MonkeyPatch, triton_of: Any) -> None:
    triton_of("3.9.0")
    monkeypatch.setattr(_machine, "_active_arch", lambda: None)
    with pytest.raises(RuntimeError, match=r"mha_prefill .*runs on gfx950 .*this is a machine without a GPU"):
        tokenspeed_kernel_amd.mha_prefill(**_arguments())
    for arch, label in (("gfx942", r"\[gfx942\]"), ("90", r"\[sm_90\]")):
        monkeypatch.setattr(_machine, "_active_arch", lambda arch=arch: arch)
        with pytest.raises(RuntimeError, match=f"runs on gfx950 .*this is .*{label}"):
            tokenspeed_kernel_amd.mha_prefill(**_arguments())


def test_this_machine_is_asked(triton_of: Any) -> None:
    """Without an emulator and without the device, Triton's own driver says so."""
    pytest.importorskip("triton")
    triton_of("3.9.0")
    arch = _machine._active_arch()
    if arch == _machine.ARCH:
        pytest.skip("this is a gfx950")
    with pytest.raises(RuntimeError, match="runs on gfx950"):
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
    triton_of(version)
    with pytest.raises(RuntimeError, match=reason):
        tokenspeed_kernel_amd.mha_prefill(**_arguments())


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0+git1234", "4"])
def test_a_newer_triton(triton_of: Any, version: str) -> None:
    triton_of(version)
    assert _machine.triton_gap() is None


# -- wrong calls ---------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(6, 4, 64)}, TypeError, "q must be a tensor of bfloat16 or float16, got float32"),
    ({"q": [1]}, TypeError, "q must be a tensor, got list"),
    ({"k": torch.zeros(6, 2, 64, dtype=torch.float16)}, TypeError, "k must be a tensor of bfloat16, got float16"),
    ({"k": torch.zeros(5, 2, 64, dtype=torch.bfloat16)}, ValueError, "k must be of shape .* where tokens is 6 in q"),
    ({"v": torch.zeros(6, 1, 64, dtype=torch.bfloat16)}, ValueError, "v must be of shape .* where kv_heads is 2 in k"),
    ({"v": torch.zeros(6, 2, 96, dtype=torch.bfloat16)}, ValueError, "v_head_dim of v must be 64 or 128, got 96"),
    ({"v": torch.zeros(6, 2, dtype=torch.bfloat16)}, ValueError, r"v must be of shape \[tokens, kv_heads, v_head_dim\]"),
    ({"cu_seqlens": torch.tensor([0, 6])}, TypeError, "cu_seqlens must be a tensor of int32, got int64"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens must be of shape \[batch \+ 1\]"),
    ({"cu_seqlens": torch.tensor([0, 7], dtype=torch.int32)}, ValueError, "cu_seqlens must be non-decreasing from 0 to tokens = 6"),
    ({"cu_seqlens": torch.tensor([0, 4, 2, 6], dtype=torch.int32)}, ValueError, "non-decreasing"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen must be at least 0, got -1"),
    ({"window_left": -2}, ValueError, "window_left must be at least -1, got -2"),
    ({"window_left": 1.5}, TypeError, "window_left must be an int, got 1.5"),
    ({"logit_cap": -1.0}, ValueError, r"logit_cap must be 0 \(off\) or positive"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be positive"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks must be of shape .* where heads is 4"),
    ({"out": torch.zeros(6, 4, 128, dtype=torch.bfloat16)}, ValueError, "out must be of shape .* where v_head_dim is 64"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """They are found on any machine, before it is asked what it is."""
    with pytest.raises(error, match=f"^mha_prefill: .*{message}"):
        tokenspeed_kernel_amd.mha_prefill(**_arguments(**changed))


def test_heads_that_kv_heads_do_not_divide() -> None:
    with pytest.raises(ValueError, match="heads of q must be a multiple of kv_heads = 2, got 5"):
        tokenspeed_kernel_amd.mha_prefill(**_arguments(heads=5))


def _paged_arguments(name: str, **changed: Any) -> dict[str, Any]:
    """Of a function with a cache: two sequences with two new tokens each."""
    made = {
        "q": torch.zeros(4, 4, 64, dtype=torch.bfloat16),
        "k_cache": torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16),
        "v_cache": torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "cache_seqlens": torch.tensor([20, 40], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 40,
    }
    if name != "mha_decode_with_kvcache":
        made["cu_seqlens_q"] = torch.tensor([0, 2, 4], dtype=torch.int32)
    if name == "mha_extend_with_kvcache":
        made["cu_seqlens_kv"] = None
    return {**made, **changed}


PAGED = ["mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_with_kvcache"]
WRONG_PAGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(4, 4, 64)}, TypeError, "q must be a tensor of bfloat16 or float16, got float32"),
    ({"k_cache": torch.zeros(6, 16, 2, 64)}, TypeError, "k_cache must be a tensor of bfloat16"),
    ({"k_cache": torch.zeros(6, 16, 64, dtype=torch.bfloat16)}, ValueError, "k_cache must be of shape"),
    ({"v_cache": torch.zeros(6, 32, 2, 64, dtype=torch.bfloat16)}, ValueError, "v_cache must be of shape .* where page_size is 16"),
    ({"page_table": torch.zeros(2, 3)}, TypeError, "page_table must be a tensor of int32, got float32"),
    ({"page_table": torch.zeros(3, 3, dtype=torch.int32)}, ValueError, "page_table must be of shape .* where batch is 2"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, TypeError, "cache_seqlens must be a tensor of int32, got int64"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least [01], got -1"),
    ({"max_seqlen_q": 2.0}, TypeError, "max_seqlen_q must be an int, got 2.0"),
    ({"max_seqlen_k": 49}, ValueError, "max_seqlen_k must be at most 48, what 3 pages of 16 tokens a sequence hold, got 49"),
    ({"q_scale": torch.ones(1)}, ValueError, "q_scale must be None"),
    ({"window_left": -2}, ValueError, "window_left must be at least -1, got -2"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks must be of shape .* where heads is 4"),
    ({"out": torch.zeros(4, 4, 64)}, TypeError, "out must be a tensor of bfloat16, got float32"),
]
WRONG_OFFSETS: list[tuple[Any, type[Exception], str]] = [
    (torch.tensor([0, 2, 4]), TypeError, "must be a tensor of int32, got int64"),
    (torch.tensor([0, 4], dtype=torch.int32), ValueError, r"must be of shape \[batch\+1\] where batch\+1 is 3 in cache_seqlens"),
    (torch.tensor([0, 2, 5], dtype=torch.int32), ValueError, "must be non-decreasing from 0 to tokens = 4"),
    (torch.tensor([0, 5, 4], dtype=torch.int32), ValueError, "must be non-decreasing"),
    (torch.tensor([1, 2, 4], dtype=torch.int32), ValueError, "must be non-decreasing from 0"),
]


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize(("changed", "error", "message"), WRONG_PAGED, ids=[message[:40] for _, _, message in WRONG_PAGED])
def test_wrong_arguments_with_a_cache(name: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(tokenspeed_kernel_amd, name)(**_paged_arguments(name, **changed))


@pytest.mark.parametrize("name", PAGED[1:])
@pytest.mark.parametrize(("offsets", "error", "message"), WRONG_OFFSETS, ids=[message[:40] for _, _, message in WRONG_OFFSETS])
def test_wrong_offsets(name: str, offsets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{name}: cu_seqlens_q {message}"):
        getattr(tokenspeed_kernel_amd, name)(**_paged_arguments(name, cu_seqlens_q=offsets))


@pytest.mark.parametrize("name", PAGED)
def test_another_machine_is_named_by_all(name: str, monkeypatch: pytest.MonkeyPatch, triton_of: Any) -> None:
    triton_of("3.9.0")
    monkeypatch.setattr(_machine, "_active_arch", lambda: None)
    with pytest.raises(RuntimeError, match=f"^{name} .*runs on gfx950"):
        getattr(tokenspeed_kernel_amd, name)(**_paged_arguments(name))


# -- the plugin ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[KernelRegistry]:
    registry = KernelRegistry.get()
    with registry.transaction() as added:
        plugin.register()
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
    names = {spec.name for spec in registered.list_kernels() if spec.solution == "gluon"}
    assert names == {f"gluon_{function}" for function in FUNCTIONS}
    for name in names:
        assert registered.get_impl(name).__module__.startswith("tokenspeed_kernel_amd.gfx950.attention.")
