"""Builds the wheels and installs them into an empty environment: this package alone first, then tokenspeed-kernel as well.

The new environment links PyTorch, CuteDSL and their requirements from the environment that runs the tests. It links nothing of this
project. An editable installation is a file of paths (.pth), and the test does not link such files. In the new environment, a
program is compiled for sm_90a, and launched if there is an sm_90.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel_nvidia import _machine

PACKAGES = Path(__file__).parents[2]
OF_THIS_PROJECT = ("tokenspeed", "gpt_oss", "gfx950_emulator", "sm90_emulator", "kernel_emulation")

INPUTS = """
import json, sys
import torch

torch.manual_seed(7)
device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
q, k, v = (torch.randn(90, heads, 64, device=device).bfloat16() for heads in (4, 2, 2))
cu_seqlens = torch.tensor([0, 33, 90], dtype=torch.int32, device=device)
arguments = dict(q=q, k=k, v=v, cu_seqlens=cu_seqlens, window_left=40, sinks=torch.randn(4, device=device))
"""

ALONE = f"""{INPUTS}
import importlib.metadata
import tokenspeed_kernel_nvidia
from tokenspeed_kernel_nvidia import mha_prefill, warmup

try:
    import tokenspeed_kernel
    core = tokenspeed_kernel.__file__
except ModuleNotFoundError as error:
    core = str(error)
refused = None
try:
    mha_prefill(**arguments)
except RuntimeError as error:
    refused = str(error)
selection = warmup.select(["prefill", "bfloat16", "head_dim=64"])[:1]
warmed = [list(warmup.warm_up(selection)) for _ in range(2)]
print(json.dumps({{
    "core": core,
    "device": device,
    "refused": refused,
    "file": tokenspeed_kernel_nvidia.__file__,
    "version": importlib.metadata.version("tokenspeed-kernel-nvidia"),
    "errors": [outcome.error for (outcome,) in warmed],
    "seconds": [outcome.seconds for (outcome,) in warmed],
}}))
"""

TOGETHER = f"""{INPUTS}
import tokenspeed_kernel
from tokenspeed_kernel import list_plugins, mha_prefill
from tokenspeed_kernel_base.platform import named_platform, use_platform

with use_platform(named_platform("sm_90")):
    explained = mha_prefill.explain(**arguments)
with use_platform(named_platform("sm_80")):
    elsewhere = mha_prefill.explain(**arguments)
print(json.dumps({{
    "file": tokenspeed_kernel.__file__,
    "plugins": [[p.name, p.package, list(p.kernel_names)] for p in list_plugins()],
    "failures": [str(f) for f in tokenspeed_kernel.plugin_failures()],
    "loaded": sorted({{"cutlass", "tvm_ffi", "triton"}} & set(sys.modules)),
    "chosen": explained.chosen.name,
    "origin": explained.chosen.origin,
    "explained": str(explained),
    "elsewhere": elsewhere.chosen.name,
}}))
"""


class Environment:
    """A virtual environment with links to PyTorch's and CuteDSL's requirements."""

    def __init__(self, where: Path) -> None:
        self.where = where
        venv.create(where, with_pip=False, symlinks=True)
        self.python = where / "bin" / "python"
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site_packages = Path(self.run(purelib).strip())
        for module in ("torch", "nvidia_cutlass_dsl", "tvm_ffi", "numpy"):
            self._link_all_beside(Path(_folder(module)).parent)
        # CuteDSL's wheel has a .pth file that adds CuteDSL's folder to the path. This file stands in for it.
        (self.site_packages / "cutedsl.pth").write_text(f"{_folder('cutlass').rpartition('/')[0]}\n")

    def _link_all_beside(self, folder: Path) -> None:
        for entry in folder.iterdir():
            ours = entry.name.lower().removeprefix("_editable_impl_").removeprefix("__editable__").startswith(OF_THIS_PROJECT)
            link = self.site_packages / entry.name
            if not ours and entry.suffix not in (".pth", ".egg-link") and not link.exists():
                link.symlink_to(entry)

    def install(self, wheel: Path) -> None:
        """Installs a wheel with the pip of the environment that runs the tests. The wheel's dependencies are linked already."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        _output([*pip, "install", "--no-index", "--no-deps", str(wheel)])

    def run(self, code: str) -> str:
        """Returns the output of a script. The tests' working directory is not on the script's path."""
        return _output([str(self.python), "-I", "-c", code], TOKENSPEED_KERNEL_PROGRAMS=str(self.where / "programs"))


def _output(command: list[str], **settings: str) -> str:
    """Returns the output of a command that runs without this project's settings and without the tests' Python paths."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENSPEED_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **settings}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _folder(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations
    return next(iter(spec.submodule_search_locations))


def _build(package: str, where: Path) -> Path:
    _output([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(where), str(PACKAGES / package)])
    (wheel,) = where.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


def _printed(text: str) -> dict[str, Any]:
    """Returns the JSON object in the last line that a script printed."""
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_the_wheels(tmp_path: Path) -> None:
    for module in ("build", "hatchling", "pip", "tokenspeed_kernel"):
        pytest.importorskip(module)
    gap = _machine.dsl_gap()
    if gap is not None:
        pytest.skip(gap)
    base, ours, core = (
        _build(package, tmp_path) for package in ("tokenspeed-kernel-base", "tokenspeed-kernel-nvidia", "tokenspeed-kernel")
    )
    environment = Environment(tmp_path / "environment")

    environment.install(base)
    environment.install(ours)
    alone = _printed(environment.run(ALONE))
    assert alone["core"] == "No module named 'tokenspeed_kernel'"
    assert Path(alone["file"]).is_relative_to(environment.site_packages)
    assert ours.name.startswith(f"tokenspeed_kernel_nvidia-{alone['version']}-")
    assert alone["device"] == "cuda" or "no kernel of tokenspeed_kernel_nvidia serves attention.mha_prefill" in alone["refused"]
    assert alone["device"] == "cpu" or alone["refused"] is None
    assert alone["errors"] == ["", ""]
    assert alone["seconds"][0] > 0
    assert alone["seconds"][1] == 0

    environment.install(core)
    together = _printed(environment.run(TOGETHER))
    assert Path(together["file"]).is_relative_to(environment.site_packages)
    ((name, package, kernels),) = together["plugins"]
    assert (name, package) == ("nvidia", "tokenspeed-kernel-nvidia")
    assert "cutedsl_mha_prefill_64" in kernels
    assert not together["failures"]
    assert not together["loaded"]
    assert together["chosen"] == "cutedsl_mha_prefill_window_64"
    assert "tokenspeed_kernel_nvidia/sm90/attention/window/launch.py:" in together["origin"]
    assert "-> cutedsl_mha_prefill_window_64" in together["explained"]
    assert not together["elsewhere"].startswith("cutedsl")
