"""Builds the wheels and installs them into a new environment: first our wheel with its requirements, then tokenspeed-kernel as
well.

The new environment links PyTorch, Triton and their requirements from the environment that runs the tests. It contains nothing else
of this project: editable installations are files of paths (.pth), which are not linked. Kernels run on the emulator.
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
import torch

from tokenspeed_kernel_amd import _machine

PACKAGES = Path(__file__).parents[2]
OF_THIS_PROJECT = ("tokenspeed", "gpt_oss", "gfx950_emulator", "kernel_emulation")

INPUTS = """
import json, sys
import torch
from gfx950_emulator import emulated_gfx950

draw = torch.Generator().manual_seed(7)
q, k, v = (torch.randn(90, heads, 64, generator=draw).bfloat16() for heads in (4, 2, 2))
sinks = torch.randn(4, generator=draw)
lengths = [33, 57]
arguments = dict(q=q, k=k, v=v, cu_seqlens=torch.tensor([0, 33, 90], dtype=torch.int32), window_left=40, sinks=sinks)
"""

ALONE = f"""{INPUTS}
import importlib.metadata
import tokenspeed_kernel_amd
from tokenspeed_kernel_amd import mha_prefill

try:
    import tokenspeed_kernel
    core = tokenspeed_kernel.__file__
except ModuleNotFoundError as error:
    core = str(error)
refused = None
if not torch.version.hip:  # else this may be a gfx950
    try:
        mha_prefill(**arguments)
    except RuntimeError as error:
        refused = str(error)
with emulated_gfx950() as emulator:
    out = mha_prefill(**arguments)
wanted = []
for q, k, v in zip(*(x.float().split(lengths) for x in (q, k, v))):
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8
    behind = torch.arange(len(q))[:, None] - torch.arange(len(k))
    scores.masked_fill_((behind < 0) | (behind > 40), -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2).softmax(2)[..., :-1]
    wanted.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))
wanted = torch.cat(wanted)
torch.save(out, sys.argv[1])
print(json.dumps({{
    "core": core,
    "refused": refused,
    "file": tokenspeed_kernel_amd.__file__,
    "version": importlib.metadata.version("tokenspeed-kernel-amd"),
    "error": float((out.float() - wanted).norm() / wanted.norm()),
    "kernels": [launch.kernel for launch in emulator.launches],
}}))
"""

TOGETHER = f"""{INPUTS}
import tokenspeed_kernel
from tokenspeed_kernel import list_plugins, mha_prefill
from tokenspeed_kernel_base.platform import named_platform, use_platform

with use_platform(named_platform("gfx950")):
    pretended = mha_prefill.explain(**arguments)
with emulated_gfx950() as emulator:
    explained = mha_prefill.explain(**arguments)
    out = mha_prefill(**arguments)
print(json.dumps({{
    "file": tokenspeed_kernel.__file__,
    "plugins": [[p.name, p.package, list(p.kernel_names)] for p in list_plugins()],
    "failures": [str(f) for f in tokenspeed_kernel.plugin_failures()],
    "pretended": pretended.chosen.name,
    "elsewhere": mha_prefill.explain(**arguments).chosen.name,
    "chosen": explained.chosen.name,
    "origin": explained.chosen.origin,
    "explained": str(explained),
    "kernels": [launch.kernel for launch in emulator.launches],
    "same": torch.equal(out, torch.load(sys.argv[1])),
}}))
"""


class Environment:
    """A virtual environment with links to PyTorch, Triton, their requirements, and the emulator with the package that the emulators
    share.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        venv.create(where, with_pip=False, symlinks=True)
        self.python = where / "bin" / "python"
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site_packages = Path(self.run(purelib).strip())
        for module in ("torch", "triton", "numpy"):
            self._link_all_beside(Path(_folder(module)).parent)
        for module in ("gfx950_emulator", "kernel_emulation"):
            self._link(Path(_folder(module)))

    def _link_all_beside(self, folder: Path) -> None:
        for entry in folder.iterdir():
            ours = entry.name.lower().removeprefix("_editable_impl_").removeprefix("__editable__").startswith(OF_THIS_PROJECT)
            if not ours and entry.suffix not in (".pth", ".egg-link"):
                self._link(entry)

    def _link(self, target: Path) -> None:
        link = self.site_packages / target.name
        if not link.exists():
            link.symlink_to(target)

    def install(self, wheel: Path) -> None:
        """Installs a wheel with the pip of the environment that runs the tests. Its dependencies are linked already."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        _output([*pip, "install", "--no-index", "--no-deps", str(wheel)])

    def run(self, code: str, *arguments: str) -> str:
        """Returns the output of a script. The current folder is not on the script's path."""
        return _output([str(self.python), "-I", "-c", code, *arguments])


def _output(command: list[str]) -> str:
    """Returns the output of a command that runs without environment variables of this project or of Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENSPEED_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
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
    """Returns the JSON object in a script's last line."""
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_the_wheels(tmp_path: Path) -> None:
    for module in ("build", "hatchling", "pip", "gfx950_emulator"):
        pytest.importorskip(module)
    gap = _machine.triton_gap()
    if gap is not None:
        pytest.skip(gap)
    base, ours, core = (
        _build(package, tmp_path) for package in ("tokenspeed-kernel-base", "tokenspeed-kernel-amd", "tokenspeed-kernel")
    )
    environment = Environment(tmp_path / "environment")
    output = str(tmp_path / "output.pt")

    environment.install(base)
    environment.install(ours)
    alone = _printed(environment.run(ALONE, output))
    assert alone["core"] == "No module named 'tokenspeed_kernel'"
    assert Path(alone["file"]).is_relative_to(environment.site_packages)
    assert ours.name.startswith(f"tokenspeed_kernel_amd-{alone['version']}-")
    assert alone["error"] <= 5e-3
    assert alone["kernels"]
    assert torch.version.hip or "no kernel of tokenspeed_kernel_amd serves attention.mha_prefill" in alone["refused"]
    assert torch.version.hip or "needs an AMD device" in alone["refused"]

    environment.install(core)
    together = _printed(environment.run(TOGETHER, output))
    assert Path(together["file"]).is_relative_to(environment.site_packages)
    ((name, package, kernels),) = together["plugins"]
    assert (name, package) == ("amd", "tokenspeed-kernel-amd")
    assert "gluon_mha_prefill" in kernels
    assert not together["failures"]
    assert together["pretended"] == together["chosen"] == "gluon_mha_prefill"
    assert together["elsewhere"] != "gluon_mha_prefill"
    assert Path(together["origin"].rpartition(":")[0]).is_relative_to(environment.site_packages)
    assert "-> gluon_mha_prefill" in together["explained"]
    assert together["kernels"] == alone["kernels"]
    assert together["same"]
