"""Tests that the code which architectures share imports no architecture's code, and that only one module imports CDNA4
instructions."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_one_module_has_the_instructions_of_cdna4() -> None:
    named = [name for name, code in _sources("gfx950").items() if re.search(r"language\.amd|gl\.amd\.", code)]
    assert named == ["instructions_device.py"]
