"""Tests the package without running kernels: imports, and errors for invalid calls and on other machines."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel_base
import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base import alignment
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_nvidia import _machine, _rows, capability

PACKAGE = Path(tokenspeed_kernel_nvidia.__file__).parent
FUNCTIONS = ["mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_prefill"]
BFLOAT16, INT32 = torch.bfloat16, torch.int32


def _python(code: str) -> str:
    """Runs code in a new interpreter that finds the package and its requirements. Returns the output."""
    base = Path(tokenspeed_kernel_base.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, base)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- importing -----------------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = _python("import sys, tokenspeed_kernel_nvidia; print(*sys.modules)").split()
    assert not {"torch", "cutlass", "tvm_ffi", "tokenspeed_kernel"} & set(loaded)


def test_importing_a_function_imports_no_compiler() -> None:
    names = ", ".join(FUNCTIONS)
    loaded = _python(f"import sys; from tokenspeed_kernel_nvidia import {names}; print(*sys.modules)").split()
    assert "tokenspeed_kernel_nvidia.sm90.attention.prefill.launch" in loaded
    assert not {"cutlass", "tvm_ffi", "triton", "tokenspeed_kernel"} & set(loaded)


def test_public_names() -> None:
    assert set(FUNCTIONS) <= set(dir(tokenspeed_kernel_nvidia))
    for name in FUNCTIONS:
        assert getattr(tokenspeed_kernel_nvidia, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'mha'"):
        _ = tokenspeed_kernel_nvidia.mha


def test_nothing_imports_the_core() -> None:
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if any(name.split(".")[0] == "tokenspeed_kernel" for name in names):
                importers.add(path.name)
    assert importers == set()


def test_every_module_is_scanned_or_device_code() -> None:
    """Asserts that every module is either scanned for kernels or device code. So every kernel is found."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    scanned = _python(
        "from tokenspeed_kernel_base.discovery import import_modules as f; print(*f('tokenspeed_kernel_nvidia'))"
    ).split()
    assert set(scanned) <= modules
    assert {name for name in modules - set(scanned) if not name.endswith("_device")} == set()


def test_scanning_imports_no_compiler_and_no_library() -> None:
    code = """
import sys
from tokenspeed_kernel_base.registry import register_package
names = [spec.name for spec in register_package("tokenspeed_kernel_nvidia")]
assert "cutedsl_mha_prefill_64" in names and "flashinfer_mha_prefill_128" in names, names
print(*sys.modules)
"""
    loaded = _python(code).split()
    assert not {"cutlass", "tvm_ffi", "triton", "flashinfer", "tokenspeed_kernel"} & set(loaded)
    assert not [name for name in loaded if name.startswith("tokenspeed_kernel_nvidia") and name.endswith("_device")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_operators(name: str) -> None:
    core = pytest.importorskip("tokenspeed_kernel")
    ours, theirs = getattr(tokenspeed_kernel_nvidia, name), getattr(core, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.__doc__ == theirs.__doc__
    assert ours.operator is theirs.operator


def _edges(path: Path) -> set[str]:
    """Returns the modules of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_modules_import_each_other() -> None:
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    imports = {name: _edges(path) & files.keys() for name, path in files.items()}
    while leaves := {name for name, found in imports.items() if not found & imports.keys()}:
        imports = {name: found for name, found in imports.items() if name not in leaves}
    assert imports == {}


# -- the machine ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a function that fakes the installed versions of distributions."""

    def pretend(**versions: str | None) -> None:
        def version(name: str) -> str:
            found = versions.get(name.replace("-", "_"))
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(_machine.metadata, "version", version)
        _machine.dsl_gap.cache_clear()

    yield pretend
    _machine.dsl_gap.cache_clear()


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, "needs nvidia-cutlass-dsl >= 4.8, there is none"),
        ({"nvidia_cutlass_dsl": "4.7.2", "apache_tvm_ffi": "0.1.15"}, "needs nvidia-cutlass-dsl >= 4.8, this is 4.7.2"),
        ({"nvidia_cutlass_dsl": "4.8.1"}, "needs apache-tvm-ffi, there is none"),
        ({"nvidia_cutlass_dsl": "4.8.1", "apache_tvm_ffi": "0.1.15.post2"}, None),
        ({"nvidia_cutlass_dsl": "4.10.0.dev1", "apache_tvm_ffi": "0.2"}, None),
        ({"nvidia_cutlass_dsl": "5.0", "apache_tvm_ffi": "0.2"}, None),
    ],
)
def test_which_compiler_does(installed: Any, versions: dict[str, str], reason: str | None) -> None:
    installed(**versions)
    assert _machine.dsl_gap() == reason


def test_a_missing_compiler_is_named_by_a_call(installed: Any) -> None:
    installed()
    reason = "platform: needs nvidia-cutlass-dsl >= 4.8, there is none"
    with use_platform(named_platform("sm_90")), pytest.raises(RuntimeError, match=reason) as caught:
        tokenspeed_kernel_nvidia.mha_prefill(**_arguments("mha_prefill"))
    assert "cutedsl_mha_prefill_64" in str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ("sm_80", r"needs architecture 9.0 or later, this is 8.0 \(sm_80\)"),
        ("gfx950", r"needs an NVIDIA device, this is gfx950"),
        ("cpu", r"needs an NVIDIA device, this is a CPU"),
    ],
)
def test_another_machine_is_named(name: str, platform: str, reason: str, installed: Any) -> None:
    installed(nvidia_cutlass_dsl="4.8.1", apache_tvm_ffi="0.1.15")
    with use_platform(named_platform(platform)), pytest.raises(RuntimeError, match=f"platform: {reason}") as caught:
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name))
    assert f"cutedsl_{name}_64" in str(caught.value)


def test_sms_and_clusters_are_those_of_the_current_platform() -> None:
    """Results for CPU tensors follow the platform, also if an earlier call was on another platform."""
    for sms in (132, 2, 132):
        with use_platform(dataclasses.replace(named_platform("sm_90"), sm_count=sms)):
            assert _machine.sm_count_of(-1) == sms
            assert _machine.clusters_at_once(-1, 2, 128, 0) == sms // 2


def test_requirements_with_one_probe_are_equal() -> None:
    assert capability.hopper(capability.cutedsl_gap) == capability.CUTEDSL_HOPPER != capability.hopper()
    assert capability.CUTEDSL_HOPPER.overlaps(capability.hopper(capability.flashinfer_gap))
    assert not capability.CUTEDSL_HOPPER.overlaps(capability.blackwell(capability.cutedsl_gap))


# -- wrong arguments -----------------------------------------------------------------------------------------------------------


def _arguments(name: str, **changed: Any) -> dict[str, Any]:
    """Returns the arguments of a function, for two sequences with two new tokens each."""
    made: dict[str, Any] = {"q": torch.zeros(4, 4, 64, dtype=BFLOAT16)}
    offsets = torch.tensor([0, 2, 4], dtype=INT32)
    if name == "mha_prefill":
        made.update({side: torch.zeros(4, 2, 64, dtype=BFLOAT16) for side in ("k", "v")}, cu_seqlens=offsets)
    else:
        made.update({side: torch.zeros(6, 16, 2, 64, dtype=BFLOAT16) for side in ("k_cache", "v_cache")})
        made.update(page_table=torch.zeros(2, 3, dtype=INT32), cache_seqlens=torch.tensor([20, 40], dtype=INT32))
        made.update(max_seqlen_q=2, max_seqlen_k=40)
    if name == "mha_extend_with_kvcache":
        made.update(cu_seqlens_q=offsets, cu_seqlens_kv=None, is_causal=True)
    return {**made, **changed}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": [1]}, TypeError, "q must be a tensor, got list"),
        ({"window_left": 1.5}, TypeError, "window_left must be int, got float 1.5"),
        ({"out": torch.zeros(4, 4, 128, dtype=BFLOAT16)}, ValueError, r"out must have shape \[4, 4, 64\]"),
    ],
)
def test_wrong_arguments(name: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """Asserts that wrong arguments are rejected on any machine. The operator checks arguments before the platform is checked."""
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name, **changed))


_SMALL_PAGES = {
    **{side: torch.zeros(10, 8, 2, 64, dtype=BFLOAT16) for side in ("k_cache", "v_cache")},
    "page_table": torch.zeros(2, 5, dtype=INT32),
}
_ODD = {"q": torch.zeros(4, 6, 64, dtype=BFLOAT16)}  # a GQA group size of three, which no kernel supports


@pytest.mark.parametrize(
    ("name", "kernel", "changed", "reason"),
    [
        (
            "mha_prefill",
            "cutedsl_mha_prefill_any_window_64",
            {**_ODD, "window_left": 128, "logit_cap": 30.0},
            "traits: .*logit_cap",
        ),
        (
            "mha_prefill",
            "cutedsl_mha_prefill_window_64",
            {**_ODD, "window_left": 128},
            "traits: .*window_left=128 is not at most 127",
        ),
        (
            "mha_prefill",
            "cutedsl_mha_prefill_64",
            _ODD,
            "traits: gqa_ratio=3 is not one of",
        ),
        ("mha_prefill", "cutedsl_mha_prefill_64", {**_ODD, "logit_cap": 30.0}, "traits: .*logit_cap"),
        (
            "mha_extend_with_kvcache",
            "cutedsl_mha_extend_with_kvcache_any_window_64",
            {"window_left": 128, "is_causal": False},
            "traits: .*is_causal",
        ),
        ("mha_decode_with_kvcache", "cutedsl_mha_decode_with_kvcache_64", _SMALL_PAGES, "traits: .*page_size=8 is not one of"),
    ],
)
def test_calls_that_no_kernel_declares(name: str, kernel: str, changed: dict[str, Any], reason: str, installed: Any) -> None:
    installed(nvidia_cutlass_dsl="4.8.1", apache_tvm_ffi="0.1.15")
    with use_platform(named_platform("sm_90")), pytest.raises(RuntimeError, match=f"{kernel} +{reason}"):
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name, **changed))


# -- rows ----------------------------------------------------------------------------------------------------------------------


def test_rows_that_need_no_copy() -> None:
    packed = torch.zeros(5, 12, 64, dtype=BFLOAT16)
    for tensor in (packed, packed[:, :8], packed[1:, 2:], packed.transpose(0, 1), packed[:0]):
        assert alignment.aligned(tensor) is tensor
        assert _rows.to_write(tensor, tensor, (1,)) is tensor


@pytest.mark.parametrize("layout", ["shifted", "odd rows", "last axis apart"])
def test_rows_that_are_copied(layout: str) -> None:
    numbers = torch.arange(5 * 12 * 200, dtype=torch.float32).to(BFLOAT16)
    tensor = {
        "shifted": numbers[1 : 1 + 5 * 12 * 64].view(5, 12, 64),
        "odd rows": numbers.as_strided((5, 12, 64), (12 * 65, 65, 1)),
        "last axis apart": numbers.view(5, 12, 200)[:, :, :128:2],
    }[layout]
    copied = alignment.aligned(tensor)
    assert copied.is_contiguous()
    assert copied.data_ptr() % 16 == 0
    assert torch.equal(copied, tensor)
    written = _rows.to_write(tensor, copied, (5, 12, 64))
    assert written.is_contiguous()
    written.fill_(3)
    assert _rows.deliver(written, tensor) is tensor
    assert (tensor == 3).all()
    assert _rows.deliver(written, None) is written
    for other in (tensor[:1], tensor.half(), tensor.to("meta")):
        assert _rows.to_write(other, copied, (5, 12, 64)) is other
