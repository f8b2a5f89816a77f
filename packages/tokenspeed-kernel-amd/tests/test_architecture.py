"""Tests that the code which architectures share imports no architecture's code, and that only one module of an architecture
imports its instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tokenspeed_kernel_amd

PACKAGE = Path(tokenspeed_kernel_amd.__file__).parent


def _sources(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (PACKAGE / folder).rglob("*.py")}


def test_shared_code_depends_on_no_architecture() -> None:
    """Shared code may use CDNA3's buffer loads and stores, because every later CDNA has them. It must not use MFMAs and copies to
    LDS."""
    sources = _sources("gluon")
    assert len(sources) > 5
    for name, code in sources.items():
        assert not re.search(r"^\s*(?:from|import) .*(\.gfx\d|cdna4|rdna)", code, re.MULTILINE), name
        assert not re.search(r"AMDMFMALayout|\bmfma\(|async_copy|buffer_load_to_shared", code), name
        assert set(re.findall(r"cdna3\.(\w+)", code)) <= {"buffer_load", "buffer_store"}, name


@pytest.mark.parametrize(("arch", "others"), [("gfx950", "cdna3|cdna5"), ("gfx942", "cdna4|cdna5")])
def test_one_module_has_the_instructions_of_an_architecture(arch: str, others: str) -> None:
    sources = _sources(arch)
    named = [name for name, code in sources.items() if re.search(r"language\.amd|gl\.amd\.", code)]
    assert named == ["instructions_device.py"]
    assert not re.search(others, sources["instructions_device.py"])


def test_code_of_an_architecture_imports_no_other_architecture() -> None:
    for arch, other in (("gfx950", "gfx942"), ("gfx942", "gfx950")):
        for name, code in _sources(arch).items():
            assert not re.search(rf"^\s*(?:from|import) .*\.{other}", code, re.MULTILINE), name
