"""Tests how processes read kernel packs: which packs are rejected and why, damaged files, and where packs are found."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel_base import config, packs, storage
from tokenspeed_kernel_base.packs import PackError, find, find_folder, read_pack, write_manifest
from tokenspeed_kernel_base.storage import StorageWarning
from tokenspeed_kernel_base.version import __version__

TOOLCHAIN = ["maker 1.0", "x86_64"]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    packs._usable.cache_clear()
    storage.warn_once.cache_clear()


def make_pack(folder: Path, **changes: Any) -> Path:
    (folder / "maker" / "deep").mkdir(parents=True)
    (folder / "maker" / "one.so").write_bytes(b"one")
    (folder / "maker" / "deep" / "k.json").write_text("{}")
    (folder / "maker" / "deep" / "k.bin").write_bytes(b"k")
    manifest = {"arch": "sm_90", "distributions": {"tokenspeed-kernel-base": __version__}, "toolchains": {"maker": TOOLCHAIN}}
    write_manifest(folder, {**manifest, **changes})
    return folder


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a pack, and sets ``TOKENSPEED_KERNEL_PACKS`` to it."""
    folder = make_pack(tmp_path / "pack")
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", str(folder))
    config.reload_settings()
    return folder


def test_files_are_found_by_compiler_and_name(pack: Path) -> None:
    assert find("maker", ["one.so", "one.o"], TOOLCHAIN) == pack / "maker" / "one.so"
    assert find("maker", ["two.so"], TOOLCHAIN) is None
    assert find("other", ["one.so"], TOOLCHAIN) is None
    assert find_folder("maker", "deep", TOOLCHAIN) == {name: str(pack / "maker" / "deep" / name) for name in ("k.bin", "k.json")}
    assert find_folder("maker", "dee", TOOLCHAIN) == {}


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_file_counts_as_absent_and_is_named(pack: Path, damage: str) -> None:
    for path in (pack / "maker" / "one.so", pack / "maker" / "deep" / "k.bin"):
        path.unlink() if damage == "missing" else path.write_bytes(b"eno")
    with pytest.warns(StorageWarning, match=r"one\.so is damaged or missing, and not used"):
        assert find("maker", ["one.so"], TOOLCHAIN) is None
    with pytest.warns(StorageWarning, match=r"k\.bin is damaged"):
        assert find_folder("maker", "deep", TOOLCHAIN) == {}


def test_a_file_that_the_manifest_does_not_list_is_not_used(pack: Path) -> None:
    (pack / "maker" / "two.so").write_bytes(b"two")
    assert find("maker", ["two.so"], TOOLCHAIN) is None


def test_another_toolchain_is_refused_with_the_difference(pack: Path) -> None:
    with pytest.warns(StorageWarning, match=r"maker 1\.0, this is maker 2\.0$"):
        assert find("maker", ["one.so"], ["maker 2.0", "x86_64"]) is None
    assert find("maker", ["one.so"], TOOLCHAIN) is not None


def test_other_versions_are_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that a pack that cannot be used does not affect other packs."""
    made_with = {"tokenspeed-kernel-base": "0.0.1", "not-installed-here": "7"}
    old, new = make_pack(tmp_path / "old", distributions=made_with), make_pack(tmp_path / "new")
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", f"{old}:{tmp_path / 'none'}:{new}")
    config.reload_settings()
    with pytest.warns(StorageWarning) as caught:
        assert find("maker", ["one.so"], TOOLCHAIN) == new / "maker" / "one.so"
    assert [str(each.message) for each in caught] == [
        f"the pack {old} is not used: it was made with tokenspeed-kernel-base 0.0.1, this is {__version__}",
        f"the pack {tmp_path / 'none'} is not used: pack.json cannot be read: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "pack.json is damaged: JSONDecodeError"),
        ("[]", "pack.json is damaged: TypeError"),
        ('{"format": 1}', "pack.json is damaged: KeyError"),
        (
            json.dumps({"format": 2, "distributions": {}, "toolchains": {}, "files": {}}),
            "it has format 2, this release reads format 1",
        ),
    ],
)
def test_a_manifest_that_cannot_be_used(pack: Path, text: str, reason: str) -> None:
    (pack / "pack.json").write_text(text)
    with pytest.raises(PackError, match=reason):
        read_pack(pack)


def test_installed_packages_bring_packs_unless_they_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_pack(tmp_path / "shipped_pack")
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        metadata.EntryPoint("shipped", "shipped_pack", packs.GROUP),
        metadata.EntryPoint("absent", "no_such_pack", packs.GROUP),
    ]
    monkeypatch.setattr(packs.metadata, "entry_points", lambda group: entries if group == packs.GROUP else [])
    config.reload_settings()
    with pytest.warns(StorageWarning, match=r"absent \(no_such_pack\) is not used: ModuleNot"):
        assert find("maker", ["one.so"], TOOLCHAIN) == folder / "maker" / "one.so"
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", "off")
    config.reload_settings()
    assert find("maker", ["one.so"], TOOLCHAIN) is None
    del sys.modules["shipped_pack"]


def test_the_setting_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("TOKENSPEED_KERNEL_CONFIG", str(path))
    path.write_text('packs = ["/a", "/b"]\ncompile_policy = "warn"\n')
    assert config.read_settings().packs == (Path("/a"), Path("/b"))
    assert config.read_settings().compile_policy == "warn"
    path.write_text("packs = [1]\n")
    with pytest.raises(config.ConfigurationError, match=r"packs must be a list of str, got \[1\]"):
        config.read_settings()
