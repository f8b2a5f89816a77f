"""Tests that pip installs the wheel into an environment with vLLM, and uninstalls it without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("hatchling", reason="needs the dependency group `build`")

PROJECT = Path(__file__).parents[1]
NAME = "tokenspeed_kernel_vllm"
# A script that runs like vLLM's processes, and prints the state that a plugin could have changed.
PROBE = """
import json
from vllm import plugins
plugins.load_general_plugins()
from vllm.model_executor import custom_op
from vllm.model_executor.layers import quantization
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print("PROBE", json.dumps({
    "backends": {kind.name: kind.get_path() for kind in AttentionBackendEnum if kind.is_overridden()},
    "quantisations": sorted(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG),
    "names": quantization.QUANTIZATION_METHODS,
    "ops": sorted(custom_op.op_registry_oot),
    "gpt-oss": quantization.get_quantization_config("gpt_oss_mxfp4").__module__,
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", *options, str(PROJECT)], check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_its_own_files_only(wheel: Path) -> None:
    """No file of the wheel is in another package's folder, runs when Python starts, or extends the path."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {NAME, f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    assert f"{NAME}/experts/routed.py" in names
    assert not [name for name in names if name.endswith((".pth", ".so"))]


def test_installed_and_removed_again(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/*/site-packages")
    (site / "rest.pth").write_text("\n".join(without_the_plugin(tmp_path / "rest")))
    first, installed = probe(python), sorted(path.name for path in site.iterdir())
    assert first["gpt-oss"].startswith("vllm.")
    assert first["backends"] == {}
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    between = probe(python)
    assert between["gpt-oss"].startswith(NAME)
    assert between["backends"]["CUSTOM"].startswith(NAME)
    pip(python, "uninstall", "-y", wheel.name.split("-")[0])
    assert probe(python) == first
    assert sorted(path.name for path in site.iterdir()) == installed


def without_the_plugin(folder: Path) -> list[str]:
    """Returns this process's path. Folders with the plugin are replaced by folders with links to all other entries."""
    found = []
    for number, entry in enumerate(path for path in map(Path, sys.path) if path.is_dir()):
        others = [part for part in entry.iterdir() if NAME not in part.name and part.name != "__pycache__"]
        if len(others) == len([part for part in entry.iterdir() if part.name != "__pycache__"]):
            found.append(str(entry))
            continue
        links = folder / str(number)
        links.mkdir(parents=True)
        for part in others:
            (links / part.name).symlink_to(part)
        found.append(str(links))
    # Editable installs of these two packages are found through .pth files, which the new interpreter does not read.
    packages = PROJECT.parents[1] / "packages"
    return [*found, *(str(packages / name / "src") for name in ("tokenspeed-kernel-base", "tokenspeed-kernel"))]


def pip(python: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *words, "-q"], check=True, capture_output=True)


def probe(python: Path) -> dict[str, Any]:
    done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, env=clean())
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("PROBE "))
    found: dict[str, Any] = json.loads(line.removeprefix("PROBE "))
    return found


def clean() -> dict[str, str]:
    """Returns this process's environment, without variables for folders or settings of the plugin."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("TOKENSPEED_VLLM_")}
