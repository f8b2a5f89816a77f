"""Whose distributions are installed: this project's, or another project's of the same name.

The package index has other projects' distributions under the names ``tokenspeed-kernel`` and ``tokenspeed-kernel-...``. Versions of
this project end in a local label, ``0.3.0+independent``. The index takes no upload whose version has a local label, so no version
there is equal to one of ours, whatever number it has.
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
    """An installed distribution of another project, whose name is one of this project's.

    Attributes:
        name, version: as its metadata has them.
        folder: where it is installed.
    """

    name: str
    version: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version} in {self.folder} is another project's package: versions of this project end in +{LABEL}"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return (
            f"pip uninstall {self.name}; where this project has a package of that name, install it with "
            f"pip install --find-links <folder of its wheels> {requirement(self.name)}"
        )


def requirement(distribution: str) -> str:
    """A name, with extras if wanted, as a command line gives it to pip: with our version, so that no other project's is taken."""
    return f"'{distribution}=={__version__}'"


class WrongDistributionWarning(UserWarning):
    """A distribution is installed that is another project's, though its name is one of this project's."""


def wrong_distributions(path: Iterable[str] | None = None) -> list[WrongDistribution]:
    """The installed distributions with names of this project that are not this project's, by name.

    Args:
        path: folders to look in, in order; a name that several have is the first one's. ``sys.path`` by default.
    """
    found: dict[str, WrongDistribution] = {}
    # File names are enough, and reading them takes a hundredth of the time that parsing metadata takes.
    for folder in map(Path, sys.path if path is None else path):
        for info in folder.glob("tokenspeed_kernel*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            name = name.replace("_", "-")
            if name == "tokenspeed-kernel" or name.startswith("tokenspeed-kernel-"):
                found.setdefault(name, WrongDistribution(name, version, folder))
    return [found[name] for name in sorted(found) if found[name].version.partition("+")[2] != LABEL]


def warn_of_wrong_distributions() -> None:
    """Says so where a distribution of another project is installed beside this one.

    Warns:
        WrongDistributionWarning: for each.
    """
    for wrong in wrong_distributions():
        warnings.warn(f"{wrong}; {wrong.remedy}", WrongDistributionWarning, stacklevel=3)
