"""The package around the kernels: what importing it costs, and what it says to wrong calls and machines."""

from __future__ import annotations

import ast
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

import tokenspeed_kernel_nvidia
from tokenspeed_kernel_nvidia import _checks, _limits, _machine, _rows

PACKAGE = Path(tokenspeed_kernel_nvidia.__file__).parent
PAGED = ["mha_decode_with_kvcache", "mha_extend_with_kvcache"]
FUNCTIONS = [*PAGED, "mha_prefill"]
PREFILLS = ["mha_extend_with_kvcache", "mha_prefill"]
BFLOAT16, INT32 = torch.bfloat16, torch.int32


def _python(code: str) -> str:
    """What a new interpreter prints that finds the package and nothing of ours beside it."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
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
    assert "tokenspeed_kernel_nvidia.attention" in loaded
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_the_operators(name: str) -> None:
    core = pytest.importorskip("tokenspeed_kernel")
    ours = inspect.signature(getattr(tokenspeed_kernel_nvidia, name)).parameters
    theirs = inspect.signature(getattr(core, name)).parameters
    parameters = [(p.name, p.default) for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours.values()] == parameters


# -- the machine ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets which versions of distributions seem to be installed."""

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
    with pytest.raises(RuntimeError, match=r"^mha_prefill of tokenspeed_kernel_nvidia needs nvidia-cutlass-dsl >= 4\.8, there"):
        tokenspeed_kernel_nvidia.mha_prefill(**_arguments("mha_prefill"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_machine_is_named(name: str, installed: Any) -> None:
    installed(nvidia_cutlass_dsl="4.8.1", apache_tvm_ffi="0.1.15")
    this = "these tensors are on cpu" if torch.cuda.is_available() else "this is a machine without a GPU"
    with pytest.raises(RuntimeError, match=f"^{name} .* runs on sm_90 .*H200.*, {this}"):
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name))


# -- wrong arguments -----------------------------------------------------------------------------------------------------------


def _arguments(name: str, **changed: Any) -> dict[str, Any]:
    """Of a function: two sequences with two new tokens each."""
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


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 3}, TypeError, "q must be a tensor, got int"),
    ({"q": torch.zeros(4, 4, 64)}, TypeError, "q must be a tensor of bfloat16 or float16, got float32"),
    ({"q": torch.zeros(4, 4, 80, dtype=BFLOAT16)}, ValueError, "head_dim of q must be 64 or 128, got 80"),
    ({"q": torch.zeros(4, 256, dtype=BFLOAT16)}, ValueError, r"q must be of shape \[tokens, heads, head_dim\] .* got \[4, 256\]"),
    ({"q": torch.zeros(4, 5, 64, dtype=BFLOAT16)}, ValueError, "heads of q must be 1 .* 16 times kv_heads = 2, got 5"),
    ({"q": torch.zeros(4, 34, 64, dtype=BFLOAT16)}, ValueError, "heads of q must be 1 .* 16 times kv_heads = 2, got 34"),
    ({"window_left": -2}, ValueError, "window_left must be at least -1, got -2"),
    ({"window_left": 1.0}, TypeError, r"window_left must be an int, got 1\.0"),
    ({"logit_cap": 30.0}, ValueError, r"logit_cap must be 0: these kernels have none, got 30\.0"),
    ({"softmax_scale": 0.0}, ValueError, r"softmax_scale must be positive and finite, got 0\.0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be positive and finite, got nan"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be of shape \[heads\] = \[4\], got \[3\]"),
    (
        {"sinks": torch.zeros(4, dtype=INT32)},
        TypeError,
        "sinks must be a tensor of bfloat16 or .* or float64, got int32",
    ),
    ({"out": torch.zeros(4, 4, 64)}, TypeError, "out must be a tensor of bfloat16, got float32"),
    ({"out": torch.zeros(4, 4, 32, dtype=BFLOAT16)}, ValueError, r"out must be of shape .* = \[4, 4, 64\], got \[4, 4, 32\]"),
    ({"out": torch.zeros(4, 4, 64, dtype=BFLOAT16, device="meta")}, ValueError, "out must be on cpu as q, got a tensor on meta"),
]
WRONG_PREFILL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": torch.zeros(4, 2, 64)}, TypeError, "k must be a tensor of bfloat16, got float32"),
    ({"k": torch.zeros(5, 2, 64, dtype=BFLOAT16)}, ValueError, r"k must be of shape .* = \[4, any, 64\], got \[5, 2, 64\]"),
    ({"v": torch.zeros(4, 2, 128, dtype=BFLOAT16)}, ValueError, r"v must be of shape .* = \[4, 2, 64\], got \[4, 2, 128\]"),
    ({"cu_seqlens": torch.tensor([0, 4])}, TypeError, "cu_seqlens must be a tensor of int32, got int64"),
    ({"cu_seqlens": torch.zeros(0, dtype=INT32)}, ValueError, r"cu_seqlens must be of shape \[batch \+ 1\], got \[0\]"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen must be at least 0, got -1"),
    ({"window_left": 128}, ValueError, "window_left must be -1 for all, or at most 127, got 128"),
]
WRONG_PAGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k_cache": torch.zeros(6, 16, 2, 64, dtype=torch.float8_e4m3fn)},
        TypeError,
        "k_cache must be a tensor of bfloat16, got float8",
    ),
    ({"k_cache": torch.zeros(6, 16, 64, dtype=BFLOAT16)}, ValueError, "k_cache must be of shape"),
    ({"v_cache": torch.zeros(6, 32, 2, 64, dtype=BFLOAT16)}, ValueError, r"v_cache must be of shape .* = \[6, 16, 2, 64\]"),
    ({"page_table": torch.zeros(2, 3)}, TypeError, "page_table must be a tensor of int32, got float32"),
    ({"page_table": torch.zeros(3, 3, dtype=INT32)}, ValueError, r"page_table must be of shape .* = \[2, any\], got \[3, 3\]"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, TypeError, "cache_seqlens must be a tensor of int32, got int64"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least [01], got -1"),
    ({"max_seqlen_k": 49}, ValueError, "max_seqlen_k must be at most 48, what 3 pages of 16 tokens a sequence hold, got 49"),
    ({"k_scale": torch.ones(1)}, ValueError, "k_scale must be None: there is no fp8 here"),
    (
        {side: torch.zeros(6, 8, 2, 64, dtype=BFLOAT16) for side in ("k_cache", "v_cache")},
        ValueError,
        "page_size of k_cache must be 16 or 32 or 64 or 128, got 8",
    ),
]
WRONG_EXTEND: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_q": torch.tensor([0, 4], dtype=INT32)}, ValueError, r"cu_seqlens_q must be of shape \[batch \+ 1\] = \[3\]"),
    ({"is_causal": False, "window_left": 5}, ValueError, "is_causal must be True where there is a window, got False"),
    ({"window_left": 128}, ValueError, "window_left must be -1 for all, or at most 127, got 128"),
]
WRONG_DECODE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_seqlen_q": 1}, ValueError, "q must be of 2 tokens, max_seqlen_q for each length in cache_seqlens, got 4 tokens"),
    ({"max_seqlen_q": 33}, ValueError, "max_seqlen_q must be at most 32 with 4 heads and 2 kv_heads; mha_extend_with_kvcache"),
]
EVERY_WRONG = [
    *((name, *wrong) for name in FUNCTIONS for wrong in WRONG),
    *(("mha_prefill", *wrong) for wrong in WRONG_PREFILL),
    *((name, *wrong) for name in PAGED for wrong in WRONG_PAGED),
    *(("mha_extend_with_kvcache", *wrong) for wrong in WRONG_EXTEND),
    *(("mha_decode_with_kvcache", *wrong) for wrong in WRONG_DECODE),
]


@pytest.mark.parametrize(("name", "changed", "error", "message"), EVERY_WRONG, ids=[f"{w[0]}-{w[3][:40]}" for w in EVERY_WRONG])
def test_wrong_arguments(name: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name, **changed))


def _refuse(given: dict[str, Any]) -> None:
    """What programs do with tensors of which others say what they should be like."""
    q = given["q"]
    keys, values = (given.get(side, given.get(f"{side}_cache")) for side in ("k", "v"))
    pairs = [(values, keys), (given["out"], q)]
    numbers = [given[name] for name in given if "seqlens" in name or name == "page_table"]
    fit = all(one is None or (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) for one, other in pairs)
    if not fit or keys.dtype != q.dtype or any(isinstance(one, torch.Tensor) and one.dtype != INT32 for one in numbers):
        raise ValueError("refused")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretends to be an sm_90, and says what would have been launched."""
    from tokenspeed_kernel_nvidia import attention

    names: list[str] = []

    def pretend(module: Any, function: str) -> None:
        parameters = inspect.signature(getattr(module, function)).parameters

        def launch(*arguments: Any) -> None:
            _refuse(dict(zip(parameters, arguments, strict=True)))
            names.append(f"{module.__name__.rpartition('.')[2]}.{function}")

        monkeypatch.setattr(module, function, launch)

    for module, functions in ((attention.prefill, PREFILLS), (attention.window, PREFILLS), (attention.decode, PAGED[:1])):
        for function in functions:
            pretend(module, function)
    monkeypatch.setattr(attention, "require_sm90", lambda function, device: None)
    monkeypatch.setattr(_checks, "_passed", {})
    return names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernel_is_chosen_by_the_window(name: str, launched: list[str]) -> None:
    for window_left in (-1, 0, 127):
        getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name, window_left=window_left))
    with_window = "decode" if name == "mha_decode_with_kvcache" else "window"
    without = "decode" if name == "mha_decode_with_kvcache" else "prefill"
    assert launched == [f"{without}.{name}", f"{with_window}.{name}", f"{with_window}.{name}"]


@pytest.mark.parametrize(("name", "changed", "error", "message"), EVERY_WRONG, ids=[f"{w[0]}-{w[3][:40]}" for w in EVERY_WRONG])
def test_wrong_arguments_after_right_ones(
    name: str, changed: dict[str, Any], error: type[Exception], message: str, launched: list[str]
) -> None:
    """What has been right is not looked at again, and what is wrong is named, however often."""
    for arguments in (_arguments(name), _arguments(name, window_left=1, softmax_scale=1, logit_cap=0)):
        getattr(tokenspeed_kernel_nvidia, name)(**arguments)
    assert len(_checks._passed) == 2
    for _ in range(2):
        with pytest.raises(error, match=f"^{name}: {message}"):
            getattr(tokenspeed_kernel_nvidia, name)(**_arguments(name, **changed))
    assert len(launched) == len(_checks._passed) == 2


def test_ever_new_shapes_do_not_fill_memory(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_MOST_PASSED", 3)
    for tokens in range(10):
        parts = {side: torch.zeros(tokens, 2, 64, dtype=BFLOAT16) for side in ("q", "k", "v")}
        tokenspeed_kernel_nvidia.mha_prefill(**_arguments("mha_prefill", **parts))
        assert 1 <= len(_checks._passed) <= 3
    assert len(launched) == 10


def test_ratios_of_heads() -> None:
    q = torch.zeros(4, 6, 64, dtype=BFLOAT16)
    with pytest.raises(ValueError, match=r"heads of q must be 1 or 2 or .* or 16 times kv_heads = 2, got 6"):
        tokenspeed_kernel_nvidia.mha_prefill(**_arguments("mha_prefill", q=q))
    with pytest.raises(RuntimeError, match="mha_decode_with_kvcache of tokenspeed_kernel_nvidia"):
        tokenspeed_kernel_nvidia.mha_decode_with_kvcache(**_arguments("mha_decode_with_kvcache", q=q))


# -- rows ----------------------------------------------------------------------------------------------------------------------


def test_rows_that_need_no_copy() -> None:
    packed = torch.zeros(5, 12, 64, dtype=BFLOAT16)
    for tensor in (packed, packed[:, :8], packed[1:, 2:], packed.transpose(0, 1), packed[:0]):
        assert _rows.aligned(tensor) is tensor
        assert _rows.to_write(tensor, tensor, (1,)) is tensor


@pytest.mark.parametrize("layout", ["shifted", "odd rows", "last axis apart"])
def test_rows_that_are_copied(layout: str) -> None:
    numbers = torch.arange(5 * 12 * 200, dtype=torch.float32).to(BFLOAT16)
    tensor = {
        "shifted": numbers[1 : 1 + 5 * 12 * 64].view(5, 12, 64),
        "odd rows": numbers.as_strided((5, 12, 64), (12 * 65, 65, 1)),
        "last axis apart": numbers.view(5, 12, 200)[:, :, :128:2],
    }[layout]
    copied = _rows.aligned(tensor)
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


# -- what is declared ----------------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_kernels() -> None:
    from tokenspeed_kernel_nvidia.sm90.attention import decode_config, window_config

    assert max(decode_config.ROWS) == _limits.MOST_ROWS
    assert window_config.REACH - 1 == _limits.LONGEST_WINDOW
