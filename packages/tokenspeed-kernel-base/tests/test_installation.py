"""Tests the warning about distributions of other projects that have this project's names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenspeed_kernel_base
from tokenspeed_kernel_base.installation import LABEL, wrong_distributions

SOURCES = Path(tokenspeed_kernel_base.__file__).parents[1]


def installed(folder: Path, *names: str) -> str:
    """Makes empty ``.dist-info`` folders in ``folder``, as if these distributions were installed there. Returns the path of
    ``folder``."""
    for name in names:
        (folder / f"{name}.dist-info").mkdir(parents=True)
    return str(folder)


def test_versions_carry_the_label() -> None:
    assert LABEL == "independent"
    assert tokenspeed_kernel_base.__version__.endswith(f"+{LABEL}")


def test_our_own_are_right(tmp_path: Path) -> None:
    """Asserts that this project's distributions cause no warning, whatever their release. pip's requirements ensure that releases
    match."""
    ours = f"tokenspeed_kernel-0.3.0+{LABEL}", f"tokenspeed_kernel_base-0.4.1+{LABEL}", f"tokenspeed_kernel_vllm-0.3.0+{LABEL}"
    others = "torch-2.13.0+cpu", "tokenspeed-1.0", "tokenspeed_kernels-1.0", "my_kernels-1.0"
    assert wrong_distributions([installed(tmp_path, *ours, *others), str(tmp_path / "absent")]) == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tokenspeed-kernel", "0.1.4"),
        ("tokenspeed-kernel", "0.3.0"),
        ("tokenspeed-kernel", "0.3.0+cu130"),
        ("tokenspeed-kernel-base", "0.3.0"),
        ("tokenspeed-kernel-some-vendor", "0.0.0"),
    ],
)
def test_another_projects_is_wrong(tmp_path: Path, name: str, version: str) -> None:
    folder = installed(tmp_path, f"{name.replace('-', '_')}-{version}", f"tokenspeed_kernel_other-1.0+{LABEL}")
    (wrong,) = wrong_distributions([folder])
    assert (wrong.name, wrong.version, wrong.folder) == (name, version, tmp_path)
    assert str(wrong) == f"{name} {version} in {tmp_path} is another project's package: versions of this project end in +{LABEL}"
    assert wrong.remedy.startswith(f"pip uninstall {name}; ")
    assert f"'{name}=={tokenspeed_kernel_base.__version__}'" in wrong.remedy


def test_the_first_folder_counts(tmp_path: Path) -> None:
    ours = installed(tmp_path / "ours", f"tokenspeed_kernel-0.3.0+{LABEL}")
    theirs = installed(tmp_path / "theirs", "tokenspeed_kernel-0.1.4")
    assert wrong_distributions([ours, theirs]) == []
    assert [wrong.version for wrong in wrong_distributions([theirs, ours])] == ["0.1.4"]


def test_importing_the_base_says_so_once(tmp_path: Path) -> None:
    installed(tmp_path, "tokenspeed_kernel-0.1.4", f"tokenspeed_kernel_base-0.3.0+{LABEL}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCES)])}
    program = "import sys, tokenspeed_kernel_base, tokenspeed_kernel_base.version; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WrongDistributionWarning: tokenspeed-kernel 0.1.4") == 1
    assert "pip uninstall tokenspeed-kernel; " in done.stderr
