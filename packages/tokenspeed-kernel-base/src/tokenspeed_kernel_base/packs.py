"""Kernel packs: read-only folders of programs that were compiled ahead of time for one architecture.

A process looks for a program in the packs first, then in the caches. It compiles the program only if neither has it. A pack's
manifest, ``pack.json``, has the versions of the software that made the pack, and the SHA-256 of every file. If the versions differ
from the installed ones, the pack is not used, and a warning gives the reason. If a file's digest differs, the file counts as
absent, and a warning names the file. Nothing in a pack is unpickled.

Packs come from the setting ``TOKENSPEED_KERNEL_PACKS`` and from installed packages. An installed package with a pack has an entry
point of the group ``tokenspeed_kernel.packs``, which names a module in the pack's folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.storage import replace_file, warn_once

GROUP = "tokenspeed_kernel.packs"
MANIFEST = "pack.json"
FORMAT = 1


class PackError(ValueError):
    """A folder cannot be used as a pack by this installation. The message has the reason."""


@dataclass(frozen=True)
class Pack:
    """A kernel pack that this installation can use.

    Attributes:
        folder: the pack's folder.
        manifest: the content of the manifest, ``pack.json``.
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def files(self) -> Mapping[str, str]:
        """The SHA-256 of every file, by the file's path within the pack."""
        files: Mapping[str, str] = self.manifest["files"]
        return files

    def is_intact(self, name: str) -> bool:
        """Whether a file can be read, and has the SHA-256 of the manifest."""
        try:
            return hashlib.sha256((self.folder / name).read_bytes()).hexdigest() == self.files[name]
        except OSError:
            return False

    def file(self, name: str) -> Path | None:
        """Returns the path of an intact file; None if the pack does not list the file, or the file is damaged.

        Warns:
            StorageWarning: the file is damaged.
        """
        if name not in self.files:
            return None
        if self.is_intact(name):
            return self.folder / name
        warn_once(f"{self.folder / name} is damaged or missing, and not used: build the pack again")
        return None


def read_pack(folder: Path) -> Pack:
    """Reads a pack's manifest, and compares the versions in it with the versions of the installed distributions.

    Raises:
        PackError: the manifest is missing, damaged or of another format, or a version in it differs from the installed version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        version, made_with, _ = manifest["format"], manifest["distributions"], {**manifest["files"], **manifest["toolchains"]}
    except OSError as error:
        raise PackError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PackError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise PackError(f"it has format {version}, this release reads format {FORMAT}")
    for name, wanted in sorted(made_with.items()):
        found = installed_version(name)
        if found not in (None, wanted):
            raise PackError(f"it was made with {name} {wanted}, this is {found}")
    return Pack(folder, manifest)


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if the distribution is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def packs() -> tuple[Pack, ...]:
    """Returns the packs that this process uses, in order of precedence: packs of the setting, then packs of installed packages.

    Warns:
        StorageWarning: a pack cannot be used.
    """
    folders = config.settings().packs
    return () if folders is None else _usable(folders)


def examined() -> tuple[list[tuple[str, Pack]], list[tuple[str, str]]]:
    """Reads all packs of the setting and of installed packages.

    Returns:
        The name and the pack of each usable pack. The name of each other pack, with the reason why it cannot be used. A pack's name
        is its folder, or its entry point.

    Warns:
        StorageWarning: the package of an installed pack cannot be imported.
    """
    folders = config.settings().packs
    return ([], []) if folders is None else _examined(folders)


@functools.cache
def _usable(folders: tuple[Path, ...]) -> tuple[Pack, ...]:
    used, unused = _examined(folders)
    for name, why in unused:
        warn_once(f"the pack {name} is not used: {why}")
    return tuple(pack for _, pack in used)


def _examined(folders: Sequence[Path]) -> tuple[list[tuple[str, Pack]], list[tuple[str, str]]]:
    """Returns what `examined` returns, for these folders and the packs of installed packages, in this order."""
    used: list[tuple[str, Pack]] = []
    unused: list[tuple[str, str]] = []
    for folder, name in [*((folder, str(folder)) for folder in folders), *_installed()]:
        try:
            used.append((name, read_pack(folder)))
        except PackError as error:
            unused.append((name, str(error)))
    return used, unused


def _installed() -> Iterator[tuple[Path, str]]:
    """Yields the folder of each pack in an installed package, and the name of the pack's entry point for messages."""
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            yield Path(entry.load().__file__).parent, f"{entry.name} ({entry.value})"
        except Exception as error:  # importing may raise anything, and must not affect other packs
            warn_once(f"the pack {entry.name} ({entry.value}) is not used: {type(error).__name__}: {error}")


def find(compiler: str, names: Sequence[str], toolchain: Sequence[str]) -> Path | None:
    """Finds a compiled program in the packs.

    Args:
        compiler: the name of a compiler. The compiler's folder in a pack has the same name.
        names: names of acceptable files in this folder, in order of preference.
        toolchain: versions of the software with which this process would compile the program.

    Returns:
        The path of the first intact file; None if no pack has such a file.

    Warns:
        StorageWarning: a file is damaged, or a pack was made with another toolchain.
    """
    for pack in _made_with(compiler, toolchain):
        for name in names:
            path = pack.file(f"{compiler}/{name}")
            if path is not None:
                return path
    return None


def find_folder(compiler: str, folder: str, toolchain: Sequence[str]) -> dict[str, str]:
    """Finds the folder ``folder`` in a compiler's folder of a pack. Returns the paths of its files by name.

    The result is empty unless some pack has the folder and all of the folder's files are intact. The arguments ``compiler`` and
    ``toolchain``, and the warnings, are those of `find`.
    """
    for pack in _made_with(compiler, toolchain):
        prefix = f"{compiler}/{folder}/"
        found = {name.removeprefix(prefix): pack.file(name) for name in pack.files if name.startswith(prefix)}
        if found and None not in found.values():
            return {name: str(path) for name, path in found.items()}
    return {}


def _made_with(compiler: str, toolchain: Sequence[str]) -> Iterator[Pack]:
    for pack in packs():
        made = pack.manifest["toolchains"].get(compiler)
        if made == [*toolchain]:
            yield pack
        elif made is not None:
            warn_once(f"programs of {compiler} in the pack {pack.folder} are not used: {toolchain_gap(made, toolchain)}")


def toolchain_gap(made: Sequence[str], toolchain: Sequence[str]) -> str:
    """Describes how the toolchain that made a pack differs from the toolchain of this process."""
    theirs, ours = (", ".join(each for each in some if each not in other) for some, other in ((made, toolchain), (toolchain, made)))
    return f"they were made with {theirs or 'less'}, this is {ours or 'less'}"


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest, with the digests of the pack's files. Call this function last when making a pack."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1) + "\n")
