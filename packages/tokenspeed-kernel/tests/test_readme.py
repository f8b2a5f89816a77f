"""The READMEs' Python blocks run, in order, in one namespace each."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tokenspeed_kernel.registry import KernelRegistry

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


def test_the_package_readme_names_every_operator() -> None:
    from tokenspeed_kernel.operator import operators

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
