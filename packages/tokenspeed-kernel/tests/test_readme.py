"""The READMEs' Python blocks run, in order, in one namespace each."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import GATES, RANKS

PACKAGE = Path(__file__).parents[1]


@pytest.mark.parametrize("readme", [PACKAGE / "README.md", PACKAGE.parents[1] / "README.md"], ids=["package", "repository"])
def test_the_python_blocks_run(readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    before = {spec.name for spec in KernelRegistry.get().list_kernels()}
    namespace: dict[str, object] = {"__name__": "readme"}
    try:
        for block in blocks:
            exec(compile(block, str(readme), "exec"), namespace)
    finally:
        for spec in KernelRegistry.get().list_kernels():
            if spec.name not in before:
                KernelRegistry.get().unregister(spec.name)
    assert "->" in capsys.readouterr().out, "an explanation marks the chosen kernel"


def test_ten_commands_lead_from_a_kernel_to_its_report(tmp_path: Path) -> None:
    """The files and commands of that section, in an environment of their own."""
    for package in ("hatchling", "typer", "jinja2", "matplotlib"):
        pytest.importorskip(package)
    section = (PACKAGE / "README.md").read_text().partition("## From a kernel to its report")[2].partition("\n## ")[0]
    for file, content in re.findall(r"^```(?:toml|py)\n# (\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(commands.splitlines()) == 10
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_KERNEL_")} | {
        # The package goes into a folder beside, and nothing is downloaded.
        "PIP_TARGET": str(tmp_path / "site"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say yes
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    said = {}
    for command in commands.splitlines():
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
    shown = list(said.values())
    assert re.search(r"my-kernels +loaded", shown[1])
    assert re.search(r"10 +norm\.rmsnorm +mine_rmsnorm +x float32\[512, 2880\]", shown[3])
    assert "failed" not in shown[4]
    assert (tmp_path / "conformance.xml").read_text().count("<testcase") == len(
        re.findall("^mine_rmsnorm ", shown[4], re.MULTILINE)
    )
    assert json.loads((tmp_path / "after.json").read_text())["rows"]
    assert "written to" in shown[6]
    assert re.search(r"norm\.rmsnorm +mine_rmsnorm", shown[8])
    assert "mine_rmsnorm" in (tmp_path / "report.html").read_text()


def test_the_gates_are_those_of_selection() -> None:
    text = " ".join((PACKAGE / "README.md").read_text().split())
    assert f"gates ({', '.join(GATES)})" in text
    assert f"ranked: {', '.join(RANKS)}." in text


def test_the_package_readme_names_every_operator() -> None:
    from tokenspeed_kernel_base.operator import operators

    text = (PACKAGE / "README.md").read_text()
    missing = [op.mode for op in operators() if f"`{op.mode}`" not in text]
    # The dequantising twins are named together.
    assert [mode for mode in missing if not mode.startswith("dequantize_")] == []


def test_the_table_is_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("table", PACKAGE / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.in_readme(table.README.read_text()) == table.table(json.loads(table.REPORT.read_text()))
