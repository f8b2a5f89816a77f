"""Tests ``tokenspeed-kernel pack``: builds and checks a pack without a GPU, then uses its programs under the policy ``forbid``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel import KernelRegistry, get_operator
from tokenspeed_kernel.workbench import packing
from tokenspeed_kernel.workbench.packing import Outcome, _completed, prepared_by_shape
from tokenspeed_kernel_base import config, packs, storage
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.compilation import Compilation
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.platform import use_platform
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import mm_program

CliRunner = pytest.importorskip("typer.testing").CliRunner
app = pytest.importorskip("tokenspeed_kernel_command.commands").app
pytest.importorskip("triton")


def pack(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pack", *map(str, words), "--jobs", "1"])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def halves(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def norm(columns: int) -> torch.Tensor:
    return tk.rmsnorm(halves(2, columns), halves(columns))


@pytest.mark.skipif(importlib.util.find_spec("sm90_emulator") is None, reason="needs the package sm90-emulator")
@pytest.mark.skipif(_machine.dsl_gap() is not None, reason=str(_machine.dsl_gap()))
def test_a_pack_from_a_capture_to_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm90_emulator import emulated_sm90

    with tk.shape_capture(tmp_path / "calls"):
        norm(64)
        for rows in (16, 15):  # the same program
            tk.mm(halves(rows, 256), halves(256, 512))
    folder = tmp_path / "pack"
    shown = json.loads(pack("build", tmp_path / "calls", "--arch", "sm_90a", "-o", folder, "--json"))
    assert sorted((each["compiler"], each["operator"]) for each in shown["programs"]) == [
        ("CuteDSL", "gemm.mm"),
        ("Triton", "norm.rmsnorm"),
    ]
    manifest = packs.read_pack(folder).manifest
    assert manifest["arch"] == "sm_90"
    assert {each["kernel"] for each in manifest["calls"]} == {"triton_rmsnorm", "cutedsl_mm_float16"}
    assert {path.name for path in folder.iterdir()} == {"pack.json", "triton", "cutedsl"}
    assert {Path(name).suffix for name in manifest["files"]} == {".json", ".ptx", ".cubin", ".so"}
    assert any(Path(name).name.startswith("cuda_utils.") for name in manifest["files"])  # Triton's driver, which is host code
    assert "is not empty" in pack("build", tmp_path / "calls", "--arch", "sm_90a", "-o", folder, code=2)

    # As in another process, caches are empty now. No call may compile.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TOKENSPEED_KERNEL_PROGRAMS", str(tmp_path / "programs"))
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", str(folder))
    monkeypatch.setattr(config, "_settings", config.read_settings())
    compiled = len(tk.compilations())
    with tk.compile_policy("forbid"):
        with emulated_sm90(triton=True):
            assert torch.allclose(norm(64), halves(2, 64))
            with pytest.raises(tk.CompilationForbiddenError, match=r"rmsnorm_kernel is not compiled .* norm\.rmsnorm"):
                norm(128)
        kept = [config for config in mm_program.configs() if mm_program.packed(config) is not None]
        assert [config.dtype for config in kept] == ["float16"]
    assert len(tk.compilations()) == compiled
    assert not (tmp_path / "programs").exists()

    # For another capture, the check names the programs that its calls would still compile, and damaged files.
    with tk.shape_capture(tmp_path / "more"):
        norm(64)
        norm(128)
    # Damage a copy of the pack, not the pack. This process has loaded the pack's library. When TVM FFI reports an error, it maps
    # the file of every loaded library again, and an empty file ends the process with SIGBUS.
    copy = shutil.copytree(folder, tmp_path / "copy")
    (program,) = (copy / "cutedsl").iterdir()
    program.write_bytes(b"")
    storage.warn_once.cache_clear()
    said = pack("check", copy, tmp_path / "more", code=1)
    assert "1 of 2 calls would compile" in said
    assert "rmsnorm_kernel is not compiled yet for norm.rmsnorm (triton_rmsnorm), call x float16[2, 128]" in said
    assert f"damaged: cutedsl/{program.name}" in said


def test_a_program_is_listed_once_also_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may compile a Triton program at the same time. Programs of one name with other keys are other programs."""
    one = Compilation("some_kernel", "Triton", "norm.rmsnorm", "triton_rmsnorm", "", 1.0, "one")
    other = dataclasses.replace(one, key="other")
    ends = [one, dataclasses.replace(one, seconds=2.0), other]

    def interrupted(*arguments: object) -> Iterator[Outcome]:
        yield Outcome("norm.rmsnorm", "first", compiled=(ends.pop(0),))
        raise KeyboardInterrupt

    def rest(*arguments: object) -> Iterator[Outcome]:
        yield Outcome("norm.rmsnorm", "first")
        yield Outcome("norm.rmsnorm", "second", compiled=tuple(ends))

    folder = tmp_path / "pack"
    monkeypatch.setattr(packing, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(packing.build(packing.Source("unused"), "sm_90a", folder, 1))
    monkeypatch.setattr(packing, "run", rest)
    list(packing.build(packing.Source("unused"), "sm_90a", folder, 1))
    assert [each["key"] for each in packs.read_pack(folder).manifest["programs"]] == ["one", "other"]
    assert [path.name for path in folder.iterdir()] == ["pack.json"]


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the processes that build packs for gfx942 select portable kernels, also if the AMD wheel is installed."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "amd")


@pytest.mark.slow
@pytest.mark.usefixtures("portable")
def test_a_pack_of_a_model(tmp_path: Path) -> None:
    """Asserts that a model's configuration is enough for a pack: the pack has the programs of all calls of the model's steps, and
    another process finds them."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ("--batch", 2, "--tokens", 16, "--context", 64, "--page-size", 16)
    folder = tmp_path / "pack"
    shown = json.loads(pack("build", tmp_path / "config.json", "--arch", "gfx942", "-o", folder, "--json", *sizes))
    kernels = {each["kernel"] for each in packs.read_pack(folder).manifest["calls"]}
    assert {"triton_rmsnorm", "triton_mha_prefill", "triton_mha_decode_with_kvcache"} <= kernels
    assert {each["compiler"] for each in shown["programs"]} == {"Triton"}
    assert "0 of" in pack("check", folder, tmp_path / "config.json", *sizes)
    assert "rmsnorm_kernel is not compiled yet for norm.rmsnorm" in pack(
        "check", folder, tmp_path / "config.json", *sizes, "--dtype", "float16", code=1
    )


@pytest.mark.slow
@pytest.mark.usefixtures("portable")
def test_batches_and_page_tables_share_programs(tmp_path: Path) -> None:
    """Asserts that batches of up to 32 sequences, with page tables of any width, need one program."""
    with tk.shape_capture(tmp_path / "calls"):
        for batch, width in ((2, 1), (2, 3), (16, 16), (20, 5)):
            draw = paged([8] * batch, [2] * batch, 2, 1, 64, page_size=16, width=width, window_left=15, running_sums=False)
            tk.mha_with_kvcache(**draw(Draw("cpu")))
    shown = json.loads(pack("build", tmp_path / "calls", "--arch", "gfx942", "-o", tmp_path / "pack", "--json"))
    assert [program["program"] for program in shown["programs"]] == ["tiles_kernel"]


def test_a_cache_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """A capture without a device knows no lengths, so every sequence is as long as its bound: each cache takes 275 GB here."""
    cache = torch.empty(16, 64, 8, 64, dtype=torch.bfloat16, device="meta")
    page_table, lengths = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2048, 2048), (2048,)))
    with use_platform(packing.device_of("h200")), tk.shape_capture(tmp_path / "calls"):
        tk.mha_decode_with_kvcache(cache.new_empty(2048, 64, 64), cache, cache, page_table, lengths, max_seqlen_k=131072)
    ((_, case),) = packing.Source(str(tmp_path / "calls")).calls()
    made = case.make(packing.blank_draw())
    assert made["k_cache"].numel() >= 2048 * 131072 * 8 * 64


def test_check_says_once_what_to_do(tmp_path: Path) -> None:
    """Several calls need programs that the pack does not have."""
    with tk.shape_capture(tmp_path / "calls"):
        norm(64)
        norm(128)
    folder = tmp_path / "pack"
    folder.mkdir()
    packs.write_manifest(folder, {"arch": "gfx942", "distributions": {}, "toolchains": {}, "calls": [], "programs": []})
    said = pack("check", folder, tmp_path / "calls", code=1)
    assert said.count("rmsnorm_kernel is not compiled yet for norm.rmsnorm (triton_rmsnorm), call x float16[2, ") == 2
    assert "2 of 2 calls would compile" in said
    assert said.count("tokenspeed-kernel pack build") == 1
    as_json = CliRunner().invoke(app, ["pack", "check", str(folder), str(tmp_path / "calls"), "--json"]).stdout
    assert not any("pack build" in each["missing"] for each in json.loads(as_json)["missing"])


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    said = pack("build", "no-such-model", "--arch", "sm_90a", "-o", tmp_path / "pack", code=2)
    assert "no-such-model is no file, and no preset" in said
    assert "unknown platform 'gtx'" in pack("build", "gpt-oss-120b", "--arch", "gtx", "-o", tmp_path / "pack", code=2)
    assert "is not used: pack.json cannot be read" in pack("check", tmp_path, code=2)


def test_a_postponed_program_that_fails() -> None:
    """Every call that needs a failed program gets the compiler's error. Only the first call that needs a program counts it."""
    made, failed = Future[Compilation](), Future[Compilation]()
    made.set_result(Compilation("good", "CuteDSL", "gemm.mm", "kernel", "call", 1.0))
    failed.set_exception(ValueError("too many registers"))
    first = _completed(Outcome("gemm.mm", "first"), [made], [made])
    assert [program.program for program in first.compiled] == ["good"]
    assert not _completed(Outcome("gemm.mm", "again"), [made], []).compiled
    for new in ([failed], []):
        assert _completed(Outcome("gemm.mm", "bad"), [made, failed], new).error == "ValueError: too many registers"


SERVE = """
import sys
import torch
import tokenspeed_kernel as tk

def halves(*shape):
    return torch.ones(shape, dtype=torch.float16, device="cuda")

if sys.argv[1:]:
    with tk.shape_capture(sys.argv[1]):
        tk.rmsnorm(halves(2, 64), halves(64)), tk.mm(halves(16, 256), halves(256, 512))
assert torch.allclose(tk.rmsnorm(halves(2, 64), halves(64)), halves(2, 64))
assert torch.equal(tk.mm(halves(16, 256), halves(256, 512)), 256 * halves(16, 512))
print(len(tk.compilations()))
"""


def test_a_gpu_runs_from_a_pack_under_forbid(sm90: torch.device, tmp_path: Path) -> None:
    """Builds the pack without the GPU. The process that then runs the calls has empty caches."""

    def serve(place: str, *arguments: str, **settings: str) -> int:
        """Runs a process with separate caches, and returns its number of compilations."""
        caches = {
            "TRITON_CACHE_DIR": str(tmp_path / place / "triton"),
            "TOKENSPEED_KERNEL_PROGRAMS": str(tmp_path / place / "programs"),
        }
        command = [sys.executable, "-c", SERVE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caches, **settings}, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert serve("first", str(tmp_path / "calls")) > 0
    pack("build", tmp_path / "calls", "--arch", "h200", "-o", tmp_path / "pack")
    allowed = {"TOKENSPEED_KERNEL_PACKS": str(tmp_path / "pack"), "TOKENSPEED_KERNEL_COMPILE_POLICY": "forbid"}
    assert serve("second", **allowed) == 0


@pytest.mark.parametrize("activation_dtype", ["none", "fp8"])
def test_weights_are_prepared_by_shape(activation_dtype: str) -> None:
    """Asserts that weights prepared without values have the shapes, strides and dtypes of weights with values. If a preparation
    reads values, it runs on weights with values."""
    op = get_operator("moe_apply")
    spec = KernelRegistry.get().get_by_name("cutedsl_moe_apply_mxfp4", str(op))
    case = next(case for case in op.all_cases() if not case.large and case.build("cpu")["plan"].weight_format == "mxfp4")
    arguments = op.complete(case.build("cpu"))
    arguments["plan"] = dataclasses.replace(arguments["plan"], activation_dtype=activation_dtype)
    expected, made = op.prepared(arguments, spec), prepared_by_shape(op, arguments, spec)
    assert {name for name, value in made.items() if value is not arguments[name]} == {"weights", "plan"}
    assert made["plan"] == expected["plan"]
    for field in dataclasses.fields(expected["weights"]):
        real, zeros = (getattr(each["weights"], field.name) for each in (expected, made))
        if isinstance(real, torch.Tensor):
            assert type(zeros) is torch.Tensor, field.name
            assert (zeros.shape, zeros.stride(), zeros.dtype) == (real.shape, real.stride(), real.dtype), field.name
            assert not zeros.any()
        else:
            assert zeros == real
