"""Tests the wheels in dist/wheels, and every install line of every page, in fresh environments with a package index made for the
test.

``python -m nox -s build`` builds the wheels and runs these tests. The index is a folder of wheels without code. It has the
third-party packages that our wheels require, and other projects' packages under each of our names, with lower, equal and higher
versions. Other projects have uploaded such packages to PyPI, or may do so. A fresh environment can import PyTorch, pip and
hatchling from the environment that runs the tests, which has none of our packages.
"""

from __future__ import annotations

import email
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
WHEELS = sorted((ROOT / "dist" / "wheels").glob("*.whl"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ci/README.md")] + [
    page for pattern in ("docs/**/*.md", "packages/*/README.md", "tools/*/README.md") for page in sorted(ROOT.glob(pattern))
]
LABEL = "independent"


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(opened.read(name))


METADATA = {wheel: metadata_of(wheel) for wheel in WHEELS}
OURS = {canonicalize_name(found["Name"]): found["Version"] for found in METADATA.values()}
# Versions of other projects' packages: PyPI's current versions, our own releases' versions without the label, and a later version.
FOREIGN = sorted({"0.0.0", "0.1.4", "99.0", *(Version(version).public for version in OURS.values())})


def install_lines(page: Path) -> Iterator[str]:
    """Yields the install commands in a page's code blocks and inline code."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:python -m )?pip install [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [line for block in blocks for line in block.splitlines()] + inline:
        for command in line.partition("#")[0].split("&&"):
            if re.match(r"\s*(python -m )?pip install ", command):
                yield command.strip()


# `my_kernels` consists of files of a page, and is tested with this page.
LINES = sorted({line for page in PAGES for line in install_lines(page)} - {"pip install ./my_kernels"})


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Writes a wheel without contents."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in info.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join(f"{stem}.dist-info/{file},,\n" for file in (*info, "RECORD")))


def required() -> Iterator[tuple[str, str]]:
    """Yields the third-party requirements of our wheels and pages, each with a version that all specifiers accept."""
    asked = [text for found in METADATA.values() for text in found.get_all("Requires-Dist") or []]
    for requirement in map(Requirement, [*asked, "nox"]):
        name = canonicalize_name(requirement.name)
        if name not in OURS and name != "torch":
            named = (Version(part.version) for part in requirement.specifier)
            yield name, str(max((version for version in named if version in requirement.specifier), default=Version("1.0")))


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Makes the package index, and returns its address."""
    root = tmp_path_factory.mktemp("index")
    for name, version in {*required(), *((name, version) for name in OURS for version in FOREIGN)}:
        write_wheel(root / name, name, version)
    for folder in root.iterdir():
        links = (f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in folder.glob("*.whl"))
        (folder / "index.html").write_text("<!DOCTYPE html>" + "".join(links))
    return root.as_uri()


class Environment:
    """A fresh virtual environment. It uses the `pip` of the environment that runs the tests."""

    def __init__(self, folder: Path, index: str) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/*/site-packages")
        (self.site / "tests.pth").write_text(sysconfig.get_path("purelib"))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        (self.bin / "pip").write_text(f'#!/bin/sh\nexec {shlex.join(pip)} "$@"\n')
        (self.bin / "pip").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "TOKENSPEED_"))}
        self.variables = {
            **kept,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": index,
            "PIP_NO_BUILD_ISOLATION": "0",  # 0 turns isolation off; builds use the installed hatchling
            "PIP_RETRIES": "0",
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs an install command of a page in the folder of the clone."""
        command = command.replace("python -m pip ", "pip ", 1)
        return subprocess.run(command, shell=True, cwd=ROOT, env=self.variables, capture_output=True, text=True, check=False)

    def succeeds(self, command: str) -> subprocess.CompletedProcess[str]:
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done

    def installed(self) -> dict[str, str]:
        """Returns the installed versions, by name."""
        pairs = (info.name.removesuffix(".dist-info").split("-") for info in self.site.glob("*.dist-info"))
        return {canonicalize_name(name): version for name, version in pairs}

    def of_our_names(self) -> dict[str, str]:
        return {name: version for name, version in self.installed().items() if name in OURS}


@pytest.fixture
def fresh(tmp_path: Path, index: str) -> Environment:
    return Environment(tmp_path / "environment", index)


# -- the wheels --------------------------------------------------------------------------------------------------------------------


def test_every_distribution_is_there_once() -> None:
    projects = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("tools/*/pyproject.toml")]
    assert len(WHEELS) == len(OURS) == len(projects), "run python -m nox -s build"
    assert [version for version in OURS.values() if not version.endswith(f"+{LABEL}")] == []


def test_they_require_one_another_in_this_version() -> None:
    """Our wheels must require one another in exactly this version, label included. No other project's version may satisfy the
    requirement.
    """
    for found in METADATA.values():
        for requirement in map(Requirement, found.get_all("Requires-Dist") or []):
            if (name := canonicalize_name(requirement.name)) in OURS:
                assert str(requirement.specifier) == f"=={OURS[name]}", f"{found['Name']}: {requirement}"
                assert not list(requirement.specifier.filter(FOREIGN, prereleases=True))


def test_all_of_them_in_one_environment(fresh: Environment) -> None:
    fresh.succeeds("pip install dist/wheels/*.whl")
    assert fresh.of_our_names() == OURS
    modules = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/version.py"))
    program = (
        f"import importlib, json; print(*(importlib.import_module(m).__version__ for m in {modules!r})); "
        "from importlib.metadata import entry_points as e; print(*sorted(p.name for p in e(group='tokenspeed_kernel.plugins')))"
    )
    done = fresh.succeeds(f"python -c {shlex.quote(program)}")
    assert "WrongDistributionWarning" not in done.stderr
    versions, plugins = done.stdout.splitlines()
    assert set(versions.split()) == {OURS["tokenspeed-kernel"]}
    assert plugins == "amd nvidia"
    assert fresh.succeeds("tokenspeed-kernel --version").stdout == f"tokenspeed-kernel {OURS['tokenspeed-kernel']}\n"


# -- the pages ---------------------------------------------------------------------------------------------------------------------


def test_the_lines_are_found() -> None:
    assert len(LINES) >= 15
    assert any(line.startswith("python -m pip install nox") for line in LINES)
    assert any("--find-links" in line for line in LINES)
    assert any("./packages/" in line for line in LINES)


def test_versions_on_pages_are_those_of_the_wheels() -> None:
    """Every version of our packages on a page, also in a requirement file that it shows, must be the wheels' version."""
    written = [
        (page.relative_to(ROOT).as_posix(), canonicalize_name(name), version)
        for page in PAGES
        for name, version in re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+\+\w+)", page.read_text())
    ]
    assert {name for _, name, _ in written} >= {"tokenspeed-kernel", "tokenspeed-kernel-base"}
    assert [each for each in written if each[2] != OURS.get(each[1])] == []


@pytest.mark.parametrize("line", LINES)
def test_a_line_installs_ours_and_nothing_else_of_these_names(line: str, fresh: Environment) -> None:
    fresh.succeeds(line)
    found = fresh.of_our_names()
    assert found == {name: OURS[name] for name in found}
    assert found or line == "python -m pip install nox"
    assert "torch" not in fresh.installed(), "PyTorch was there already"


def test_an_index_that_does_not_answer(fresh: Environment) -> None:
    fresh.variables["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"
    core = f"'tokenspeed-kernel=={OURS['tokenspeed-kernel']}'"
    for options in ("--find-links dist/wheels", "--no-index --find-links dist/wheels --force-reinstall --no-deps"):
        fresh.succeeds(f"pip install {options} {core}")
    assert sorted(fresh.of_our_names()) == ["tokenspeed-kernel", "tokenspeed-kernel-base"]


def test_without_the_folder_nothing_is_installed(fresh: Environment) -> None:
    """If the folder of our wheels is missing, pip must install nothing. In particular, it must not install another project's
    package."""
    for name in ("tokenspeed-kernel", "tokenspeed-kernel-nvidia"):
        version = OURS[name]
        done = fresh.run(f"pip install '{name}=={version}'")
        assert done.returncode == 1
        assert f"No matching distribution found for {name}=={version}" in done.stderr
    assert fresh.installed() == {}


def test_the_remedy_of_a_message_takes_the_extra_alone(fresh: Environment) -> None:
    """The command that ``doctor`` prints for missing libraries must work as printed, without the folder of our wheels, and must not
    replace our packages."""
    fresh.succeeds(f"pip install --find-links dist/wheels 'tokenspeed-kernel=={OURS['tokenspeed-kernel']}'")
    before = fresh.of_our_names()
    done = fresh.run("tokenspeed-kernel doctor")
    assert done.returncode == 1
    fresh.succeeds(done.stderr.strip().rpartition(": ")[2])
    assert fresh.of_our_names() == before
    assert {"rich", "typer"} <= fresh.installed().keys()


def test_another_projects_core_beside_our_wheels_is_named(fresh: Environment) -> None:
    """If another project's core is installed beside our wheels, the import must warn, and the command in the warning must replace
    it with ours."""
    fresh.succeeds("pip install tokenspeed-kernel==0.1.4")
    fresh.succeeds(f"pip install --find-links dist/wheels 'tokenspeed-kernel-amd=={OURS['tokenspeed-kernel-amd']}'")
    assert fresh.of_our_names()["tokenspeed-kernel"] == "0.1.4"
    said = fresh.succeeds('python -c "import tokenspeed_kernel_amd"').stderr
    assert "WrongDistributionWarning: tokenspeed-kernel 0.1.4 in " in said
    fresh.succeeds("pip uninstall -y tokenspeed-kernel")
    remedy = said[said.index("pip install") :].splitlines()[0]
    fresh.succeeds(remedy.replace("<folder of its wheels>", "dist/wheels"))
    assert fresh.succeeds('python -c "import tokenspeed_kernel_amd"').stderr == ""
