"""Asks pip whether the wheels in dist/wheels can be installed beside the newest releases of engines, and prints the conflicts.

    python ci/resolve.py [ENGINE]...

Nothing is installed: pip resolves with `--dry-run`, for the platform and Python that run this script. The exit status is 1 if a
release cannot be installed beside our wheels. The script skips a release, and prints the reason, in two cases. Either the package
index does not answer. Or a requirement has no wheel for this platform, and pip cannot build its source here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "dist" / "wheels"
ENGINES = ("vllm", "sglang", "transformers")
# The wheels that a user installs beside an engine. The engine's plugin, if there is one, is added.
BESIDE = ("tokenspeed-kernel", "tokenspeed-kernel-nvidia", "tokenspeed-kernel-amd")
NEWEST = 2
TIMEOUT_S = 900  # an engine has some 200 requirements; its resolution takes three minutes on a slow machine
# Packages whose resolved versions are printed, so that users can compare them with their own.
SHOWN = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")
_NO_ANSWER = re.compile(
    r"WARNING: Retrying|Could not fetch URL|Connection(Error| reset| refused)|ReadTimeout|HTTP error|Temporary failure"
)


class Outcome(NamedTuple):
    """pip's answer for one release of an engine.

    Attributes:
        status: ``"resolves"``, ``"conflicts"``, ``"fails"`` or ``"skipped"``.
        lines: details, such as the conflicting requirements.
    """

    status: str
    lines: tuple[str, ...] = ()


def versions_of(listing: str, count: int = NEWEST) -> list[str]:
    """Returns the newest versions in the output of ``pip index versions``; an empty list if the output has none."""
    found = re.search(r"^Available versions: (.+)$", listing, re.MULTILINE)
    return found[1].split(", ")[:count] if found else []


def wanted(engine: str, wheels: Iterable[str]) -> list[str]:
    """Returns an exact requirement for each of our wheels that is to be installed beside an engine. ``wheels``: the wheels' file
    names."""
    versions = {name.replace("_", "-"): version for name, version, *_ in (wheel.split("-") for wheel in wheels)}
    names = [*BESIDE, f"tokenspeed-kernel-{engine}"]
    return [f"{name}=={versions[name]}" for name in names if name in versions]


def causes(output: str) -> list[str]:
    """Returns the requirements that pip names as the cause of a conflict."""
    found = re.search(r"^The conflict is caused by:\n((?:[ \t]+.+\n?)+)", output, re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()] if found else []


def pins(lines: Sequence[str]) -> list[str]:
    """Returns those causes of a conflict that allow only one version (``==``); all causes if there are none."""
    return [line for line in lines if "==" in line] or list(lines)


def outcome_of(status: int, output: str) -> Outcome:
    """Returns the outcome of a ``pip install --dry-run`` from its exit status and output."""
    if not status:
        return Outcome("resolves")
    conflict = causes(output)
    if conflict:
        moving = [f"would have to move: {line}" for line in pins(conflict)]
        return Outcome("conflicts", (*conflict, *moving))
    unbuilt = re.search(r"^error: metadata-generation-failed\n+.*\n╰─> (.*)", output, re.MULTILINE)
    if unbuilt:
        return Outcome("skipped", (f"pip cannot build the metadata of a requirement that has no wheel here: {unbuilt[1]}",))
    errors = tuple(line for line in output.splitlines() if line.startswith("ERROR:"))
    return Outcome("skipped" if _NO_ANSWER.search(output) else "fails", errors or tuple(output.splitlines()[-1:]))


def resolved(report: str) -> tuple[str, ...]:
    """Returns one line with the resolved versions of the packages in `SHOWN`, from pip's report."""
    chosen = {part["metadata"]["name"].lower(): part["metadata"]["version"] for part in json.loads(report)["install"]}
    return (" ".join(f"{name}=={chosen[name]}" for name in SHOWN if name in chosen),)


def _pip(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout


def resolve(engine: str, version: str, folder: Path) -> Outcome:
    """Asks pip whether one release of an engine can be installed beside our wheels."""
    report = folder / f"{engine}-{version}.json"
    ours = wanted(engine, [wheel.name for wheel in WHEELS.glob("*.whl")])
    # If the index has no separate metadata, fast-deps reads a wheel's metadata by range requests. Downloads of whole wheels would
    # take gigabytes.
    options = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--progress-bar=off", f"--report={report}")
    try:
        outcome = outcome_of(*_pip("install", *options, "--find-links", str(WHEELS), *ours, f"{engine}=={version}"))
    except subprocess.TimeoutExpired:
        return Outcome("skipped", (f"pip did not finish within {TIMEOUT_S} s",))
    return outcome._replace(lines=resolved(report.read_text())) if outcome.status == "resolves" else outcome


def releases_of(engine: str) -> tuple[list[str], Outcome]:
    """Returns the newest releases of an engine, and the outcome to report if the list is empty."""
    status, output = _pip("index", "versions", engine)
    reason = outcome_of(status, output).lines or ("the package index lists no release",)
    return versions_of(output), Outcome("skipped", reason)


def main(engines: Sequence[str]) -> int:
    if not any(WHEELS.glob("*.whl")):
        print(f"there are no wheels in {WHEELS.relative_to(ROOT)}: run `python -m nox -s build` first")
        return 1
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        for engine, (versions, none) in zip(engines, pool.map(releases_of, engines), strict=True):
            outcomes = pool.map(lambda version, engine=engine: resolve(engine, version, Path(folder)), versions)
            for name, outcome in [(f"{engine} {v}", o) for v, o in zip(versions, outcomes, strict=True)] or [(engine, none)]:
                print(f"{name}: {outcome.status}", *outcome.lines, sep="\n    ", flush=True)
                failed |= outcome.status in ("conflicts", "fails")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ENGINES))
