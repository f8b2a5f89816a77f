"""Builds every distribution of this repository: a wheel in dist/wheels, for pip's ``--find-links``, and an sdist in dist/sdists.

The script needs `build` and `hatchling`. Each wheel is built from its sdist. So the build fails if the sdist lacks a file that the
wheel needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def projects() -> list[Path]:
    """The folders of all distributions."""
    return sorted(path.parent for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("tools/*/pyproject.toml")])


def build(project: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{project}: {done.stdout}{done.stderr}")


def main() -> None:
    with tempfile.TemporaryDirectory() as built, ThreadPoolExecutor(os.cpu_count()) as pool:
        # list() reads the result of each build, and so raises the error of a failed build.
        list(pool.map(lambda project: build(project, Path(built)), projects()))
        for suffix, name in ((".whl", "wheels"), (".tar.gz", "sdists")):
            shutil.rmtree(DIST / name, ignore_errors=True)
            (DIST / name).mkdir(parents=True)
            for path in sorted(Path(built).glob(f"*{suffix}")):
                shutil.move(path, DIST / name)
                print(f"{(DIST / name / path.name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
