"""Tests that vLLM's loader finds the plugin, and what registration changes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

tokenspeed_kernel_vllm = pytest.importorskip("tokenspeed_kernel_vllm", reason="needs the plugin: `nox -s vllm` installs it")

from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_vllm.settings import PREFIX, WHY_OFF, WHY_ON, Settings, default_of, is_on, read_settings

PER_FORMAT = ("TOKENSPEED_VLLM_OTHER_EXPERTS", "TOKENSPEED_VLLM_FP4_LINEAR")


def test_importing_imports_neither_vllm_nor_pytorch() -> None:
    code = "import sys, tokenspeed_kernel_vllm as p; assert p.__version__; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert run.stdout.strip() == "[]"


def test_settings() -> None:
    assert read_settings({}) == Settings(attention=True, experts=True, package=None)
    given = {"TOKENSPEED_VLLM_ATTENTION": "0", "TOKENSPEED_VLLM_EXPERTS": "0", "TOKENSPEED_VLLM_PACKAGE": "my_kernels"}
    assert read_settings(given) == Settings(attention=False, experts=False, package="my_kernels")
    assert read_settings({"TOKENSPEED_VLLM_WARMUP": "0", "TOKENSPEED_VLLM_LINEAR": "1"}) == Settings(warmup=False, linear=True)
    assert read_settings({"TOKENSPEED_VLLM_OTHER_EXPERTS": "1"}) == Settings(other_experts=True)
    off = {"TOKENSPEED_VLLM_OTHER_EXPERTS": "0", "TOKENSPEED_VLLM_FP4_LINEAR": "0"}
    assert read_settings(off) == Settings(other_experts=False, fp4_linear=False)
    assert read_settings({"TOKENSPEED_VLLM_RECEIPTS": "there"}) == Settings(receipts=Path("there"))
    assert read_settings({"TOKENSPEED_VLLM_ACTIVATIONS": "fp8"}) == Settings(activations="fp8")
    assert read_settings({"TOKENSPEED_VLLM_MLA": "1", "TOKENSPEED_VLLM_FP8_LINEAR": "1"}) == Settings(mla=True, fp8_linear=True)
    fp4 = {"TOKENSPEED_VLLM_FP4_LINEAR": "1", "TOKENSPEED_VLLM_FP4_ACTIVATIONS": "1"}
    assert read_settings(fp4) == Settings(fp4_linear=True, fp4_activations=True)
    with pytest.raises(ValueError, match=r"VLLM_ACTIVATIONS .* none, fp8, mxfp4, got 'fp4'"):
        read_settings({"TOKENSPEED_VLLM_ACTIVATIONS": "fp4"})
    with pytest.raises(ValueError, match="TOKENSPEED_VLLM_EXPERTS must be 1 or 0, got 'off'"):
        read_settings({"TOKENSPEED_VLLM_EXPERTS": "off"})
    with pytest.raises(ValueError, match=r"VLLM_EXPERT is no setting; .*VLLM_ACTIVATIONS"):
        read_settings({"TOKENSPEED_VLLM_EXPERT": "0"})


@pytest.mark.parametrize("switch", PER_FORMAT)
def test_mxfp4_is_on_by_default_where_it_was_measured(switch: str) -> None:
    for device in ("h200", "h100"):
        with use_platform(named_platform(device)):
            assert str(default_of(switch, "mxfp4")) == f"on by default: {WHY_ON}"
            assert is_on(None, switch, "mxfp4")
            assert not is_on(False, switch, "mxfp4")
            assert str(default_of(switch, "mxfp4", "not measured there")) == "off by default: not measured there"
            assert not is_on(None, switch, "mxfp4", "not measured there")
            assert is_on(True, switch, "mxfp4", "not measured there")
            assert str(default_of(switch, "nvfp4")) == f"off by default: {WHY_OFF[switch]}"
            assert not is_on(None, switch, "nvfp4")
            assert is_on(True, switch, "nvfp4")
    for device, arch in {"b200": "sm_100", "a100": "sm_80", "mi355x": "gfx950", "cpu": "cpu"}.items():
        with use_platform(named_platform(device)):
            assert str(default_of(switch, "mxfp4")) == f"off by default: not measured on {arch}"
            assert not is_on(None, switch, "mxfp4")
            assert is_on(True, switch, "mxfp4")


def test_other_parts_are_off_whatever_the_format() -> None:
    with use_platform(named_platform("h200")):
        for switch in WHY_OFF.keys() - set(PER_FORMAT):
            assert str(default_of(switch, "mxfp4")) == f"off by default: {WHY_OFF[switch]}"
        for weight_format in ("dense", "fp8_block"):
            assert not is_on(None, "TOKENSPEED_VLLM_OTHER_EXPERTS", weight_format)


def test_a_receipt_is_written_after_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    import tokenspeed_kernel as tk
    from tokenspeed_kernel.workbench.receipts import read_receipt
    from tokenspeed_kernel_vllm import sizes

    with sizes.warming("nothing"):
        tk.rmsnorm(torch.ones(2, 8), torch.ones(8))
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("TOKENSPEED_VLLM_RECEIPTS", str(tmp_path / "receipts"))
    with sizes.warming("norms"):
        tk.rmsnorm(torch.ones(2, 8), torch.ones(8))
    (file,) = (tmp_path / "receipts").iterdir()
    receipt = read_receipt(file)
    assert "norm.rmsnorm" in {row.operator for row in receipt.rows}
    assert file.name == f"receipt-{os.getpid()}.json"


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\ntokenspeed_kernel = "tokenspeed_kernel_vllm:register"\n' in text


def test_another_projects_core_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install tokenspeed-kernel` without a version installs another project's package. Attention then uses a vendor's wheel,
    as if the core were not installed."""
    from tokenspeed_kernel_vllm.attention import serving
    from tokenspeed_kernel_vllm.settings import core_is_there

    assert core_is_there()
    for name, version in (("tokenspeed_kernel", "0.1.4"), ("tokenspeed_kernel_a_vendor", "0.0.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{serving.WHEELS}]\nwrong = no_such_module_{name}:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not core_is_there()
    taken = {module.__name__ for module in serving.packages(None)}
    assert "tokenspeed_kernel" not in taken
    assert not [name for name in taken if name.startswith("no_such_module")]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Restores vLLM's tables after the test."""
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    from vllm.model_executor.layers import quantization
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    AttentionBackendEnum.CUSTOM.clear_override()
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()


def test_vllm_finds_and_calls_it(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own loader finds and calls the plugin, as in each of vLLM's processes."""
    from vllm import plugins
    from vllm.model_executor.layers.quantization import get_quantization_config

    entry = metadata.EntryPoint("tokenspeed_kernel", "tokenspeed_kernel_vllm:register", "vllm.general_plugins")
    installed = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == entry.group else installed(group=group))
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    assert registered.get_class().__name__ == "TokenspeedBackend"
    assert get_quantization_config("gpt_oss_mxfp4").__name__ == "GptOssConfig"


def test_another_projects_package_is_named_in_the_log(registered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_vllm import parts

    said: list[str] = []
    monkeypatch.setattr(parts.logger, "error", lambda text, *args: said.append(text % args))
    (tmp_path / "tokenspeed_kernel-0.1.4.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenspeed_kernel_vllm.register()
    assert len(said) == 1
    assert said[0].startswith(f"tokenspeed_kernel_vllm: tokenspeed-kernel 0.1.4 in {tmp_path} is another project's package")


def test_registering_again_changes_nothing(registered: Any) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    seen = []
    for _ in range(3):
        tokenspeed_kernel_vllm.register()
        seen.append((registered.get_class(), get_quantization_config("gpt_oss_mxfp4"), list(QUANTIZATION_METHODS)))
    assert seen[0] == seen[1] == seen[2]


def test_each_part_has_a_switch(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    monkeypatch.setenv("TOKENSPEED_VLLM_ATTENTION", "0")
    monkeypatch.setenv("TOKENSPEED_VLLM_EXPERTS", "0")
    tokenspeed_kernel_vllm.register()
    assert not registered.is_overridden()
    assert get_quantization_config("gpt_oss_mxfp4") is GptOssMxfp4Config
    monkeypatch.setenv("TOKENSPEED_VLLM_EXPERTS", "1")
    tokenspeed_kernel_vllm.register()
    assert not registered.is_overridden()
    assert get_quantization_config("gpt_oss_mxfp4").__name__ == "GptOssConfig"


@pytest.mark.parametrize(
    ("variables", "replaced"),
    [
        ({}, {"compressed-tensors"}),
        ({"OTHER_EXPERTS": "0"}, {"compressed-tensors"}),
        ({"FP4_LINEAR": "0"}, {"compressed-tensors"}),
        ({"OTHER_EXPERTS": "0", "FP4_LINEAR": "0"}, set()),
        ({"OTHER_EXPERTS": "0", "FP4_LINEAR": "0", "FP8_LINEAR": "1"}, {"compressed-tensors", "fp8"}),
        ({"OTHER_EXPERTS": "1", "FP4_LINEAR": "0"}, {"compressed-tensors", "quark", "fp8", "modelopt_fp4", "modelopt_mixed"}),
        ({"FP4_LINEAR": "1"}, {"compressed-tensors", "quark", "modelopt_fp4", "modelopt_mixed"}),
    ],
)
def test_configurations_are_replaced_for_formats_that_may_be_on(
    registered: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], replaced: set[str]
) -> None:
    """By default, only configurations of MXFP4 checkpoints are replaced. A layer's format and device decide later."""
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import quantization

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    tokenspeed_kernel_vllm.register()
    assert set(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG) == {"gpt_oss_mxfp4", *replaced}


def test_another_plugin_keeps_its_backend(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    from tokenspeed_kernel_vllm import parts

    said: list[str] = []
    monkeypatch.setattr(parts.logger, "warning", lambda text, *args: said.append(text % args))
    register_backend(registered, "other.plugin.Backend")
    tokenspeed_kernel_vllm.register()
    assert registered.get_path() == "other.plugin.Backend"
    assert said == ["tokenspeed_kernel_vllm: no attention, because other.plugin.Backend is the attention backend CUSTOM already"]


def test_a_hook_that_is_missing_leaves_its_part_out(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a hook is missing, vLLM still starts, and the log names the hook."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.v1.attention.backends import registry

    from tokenspeed_kernel_vllm import parts

    said: list[str] = []
    monkeypatch.setattr(parts.logger, "error", lambda text, *args: said.append(text % args))
    monkeypatch.delattr(registry, "register_backend")
    tokenspeed_kernel_vllm.register()
    assert len(said) == 1
    assert said[0].startswith("tokenspeed_kernel_vllm: no attention, because a hook of vLLM")
    assert "register_backend" in said[0]
    assert get_quantization_config("gpt_oss_mxfp4").__name__ == "GptOssConfig"


def test_the_readme_says_why_parts_are_off() -> None:
    lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
    for name, reason in WHY_OFF.items():
        (line,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        assert line.endswith(f"off by default: {reason} |"), name
        assert (f"on by default: {WHY_ON}." in line) == (name in PER_FORMAT), name
        assert getattr(Settings(), name.removeprefix(PREFIX).lower()) is (None if name in PER_FORMAT else False), name
