"""The Python blocks of each README run in order, in one namespace per README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenspeed_kernel_base.registry import KernelRegistry

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
    from tokenspeed_kernel_base.operator import operators

    text = (PACKAGE / "README.md").read_text()
    missing = [op.mode for op in operators() if f"`{op.mode}`" not in text]
    # The README lists the inverse operators as `dequantize_*`.
    assert [mode for mode in missing if not mode.startswith("dequantize_")] == []
