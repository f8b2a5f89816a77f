"""Detects installed distributions that carry this project's names but belong to another project.

The package index has other projects' distributions under the names ``tokenspeed-kernel`` and ``tokenspeed-kernel-...``. Versions of
this project end in a local label, ``0.3.0+independent``. The index accepts no version with a local label. So no version on the
index equals a version of this project.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_kernel_base.version import __version__

LABEL = __version__.partition("+")[2]
"""The label that ends every version of this project."""


@dataclass(frozen=True)
class WrongDistribution:
    """An installed distribution that has one of this project's names but belongs to another project.

    Attributes:
        name, version: name and version of the distribution, from the name of its ``.dist-info`` folder.
        folder: the folder in which the distribution is installed.
    """

    name: str
    version: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version} in {self.folder} is another project's package: versions of this project end in +{LABEL}"

    @property
    def remedy(self) -> str:
        """How to replace the wrong distribution, for a warning or an error message."""
        return (
            f"pip uninstall {self.name}; where this project has a package of that name, install it with "
            f"pip install --find-links <folder of its wheels> {requirement(self.name)}"
        )


def requirement(distribution: str) -> str:
    """A requirement for pip's command line. The requirement has this project's version, so pip accepts no other project's
    distribution. ``distribution`` may name extras.
    """
    return f"'{distribution}=={__version__}'"


class WrongDistributionWarning(UserWarning):
    """An installed distribution has one of this project's names but belongs to another project."""


def wrong_distributions(path: Iterable[str] | None = None) -> list[WrongDistribution]:
    """Installed distributions that have this project's names but belong to another project, sorted by name.

    Args:
        path: folders to search, in order; the first match of a name wins. ``sys.path`` by default.
    """
    found: dict[str, WrongDistribution] = {}
    # The names of the ``.dist-info`` folders suffice. Listing them takes a hundredth of the time of parsing their metadata.
    for folder in map(Path, sys.path if path is None else path):
        for info in folder.glob("tokenspeed_kernel*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            name = name.replace("_", "-")
            if name == "tokenspeed-kernel" or name.startswith("tokenspeed-kernel-"):
                found.setdefault(name, WrongDistribution(name, version, folder))
    return [found[name] for name in sorted(found) if found[name].version.partition("+")[2] != LABEL]


def warn_of_wrong_distributions() -> None:
    """Warns of installed distributions that have this project's names but belong to another project.

    Warns:
        WrongDistributionWarning: one warning for each distribution.
    """
    for wrong in wrong_distributions():
        warnings.warn(f"{wrong}; {wrong.remedy}", WrongDistributionWarning, stacklevel=3)
