"""All settings that come from outside the program: environment variables and one TOML file.

The environment variables start with ``TOKENSPEED_KERNEL_``. The variable ``TOKENSPEED_KERNEL_CONFIG`` names the TOML file. The
environment takes precedence over the file. The settings are read when ``tokenspeed_kernel`` is imported, or on first use without
it, and again by `reload_settings`. Later changes of ``os.environ`` have no effect, so calls never pay for reading settings.

The file::

    objective = "accuracy"           # a `SelectionObjective` value
    platform = "gfx950"              # pretend to run there: selections can be explained, nothing launches
    disabled_plugins = ["broken"]
    verbose = true

    [overrides]
    "attention.mha_prefill" = "my_kernel"

    [overrides.gemm]                 # an override of gemm.mm, spelled as a table
    mm = "torch_mm"
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.installation import requirement
from tokenspeed_kernel_base.names import did_you_mean

PREFIX = "TOKENSPEED_KERNEL_"
OVERRIDE_PREFIX = PREFIX + "OVERRIDE_"

VARIABLES: dict[str, str] = {
    PREFIX + "CONFIG": "path of a TOML file with settings; off: none is read",
    PREFIX + "PLATFORM": "pretend to be this platform (gfx950, sm_90, cpu): selection can be explained, nothing launches",
    PREFIX + "VERBOSE": "1: log every new selection with its reason",
    PREFIX + "DISABLE_PLUGINS": "comma-separated plugin names that are not loaded; * for all",
    PREFIX + "TUNED": "directory of measured choices, instead of the user's cache directory (on); off: none are read or written",
    PREFIX + "PROGRAMS": "directory of kernels that plugins compile, instead of the user's cache directory (on); off: none kept",
    PREFIX + "PACKS": f"directories of kernel packs, separated by {os.pathsep}; off: none, not even those of installed packages",
    PREFIX + "COMPILE_POLICY": "what a call does that needs compiling: allow: compile; warn: compile and log; forbid: raise",
    PREFIX + "CAPTURE_SHAPES": "path of a file that receives the shapes of every call; off: they are not recorded",
    PREFIX + "PROFILE": "1: every call in a range that profilers show; a folder: the times of all calls are written there",
    OVERRIDE_PREFIX + "<FAMILY>_<MODE>": "name of the kernel that runs this operator",
}

OFF = "off"
COMPILE_POLICIES = ("allow", "warn", "forbid")


class ConfigurationError(ValueError):
    """A setting from the environment or the TOML file cannot be used; the message names the setting and the fix."""


@dataclass(frozen=True)
class Settings:
    """The settings of the environment and the TOML file.

    Attributes:
        overrides: forced kernels from the file: maps an operator, ``("family", "mode")``, to a kernel's name.
        env_overrides: forced kernels from the environment: maps an operator's upper-case ``FAMILY_MODE`` to a kernel's name. The
            name does not show where the family ends, because both parts may contain underscores. So `override_for` compares the
            joined name.
        disabled_plugins: names of plugins that are not loaded; ``"*"`` means all.
        objective: name of the default `SelectionObjective`, or None.
        platform: name of the platform to select kernels for in place of the real one; None for the real platform.
        verbose: whether every new selection is logged.
        tuned: directory of tuned results, or ``"off"``; None for the user's cache directory.
        packs: directories of kernel packs, or None for no packs, not even those of installed packages.
        compile_policy: one of `COMPILE_POLICIES`.
        capture_path: file that receives the shapes of every call, or None.
        profile: whether a profiler range encloses every call.
        profile_folder: folder that receives the times of all calls, or None.
        source: the TOML file, or None.
    """

    overrides: Mapping[tuple[str, str], str] = field(default_factory=dict)
    env_overrides: Mapping[str, str] = field(default_factory=dict)
    disabled_plugins: frozenset[str] = frozenset()
    objective: str | None = None
    platform: str | None = None
    verbose: bool = False
    tuned: str | None = None
    packs: tuple[Path, ...] | None = ()
    compile_policy: str = "allow"
    capture_path: Path | None = None
    profile: bool = False
    profile_folder: Path | None = None
    source: Path | None = None

    def override_for(self, family: str, mode: str) -> tuple[str, str] | None:
        """Returns the kernel that a setting forces for an operator, and the name of that setting; None if no setting forces a
        kernel."""
        joined = f"{family}_{mode}".upper()
        if joined in self.env_overrides:
            return self.env_overrides[joined], OVERRIDE_PREFIX + joined
        if (family, mode) in self.overrides:
            return self.overrides[family, mode], f"{self.source}: overrides.{family}.{mode}"
        return None

    @property
    def watches_calls(self) -> bool:
        """Whether a setting requires that all calls are watched: to record their shapes, to measure their times, or to enclose them
        in profiler ranges."""
        return self.capture_path is not None or self.profile or self.profile_folder is not None

    def plugin_disabled(self, name: str) -> bool:
        return name in self.disabled_plugins or "*" in self.disabled_plugins


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from the environment and from the TOML file that the environment names.

    Raises:
        ConfigurationError: the file is missing or malformed, has an unknown key, or a value has the wrong type.
    """
    env = os.environ if environ is None else environ
    _warn_about_unknown(env)
    path = _file(PREFIX + "CONFIG", env.get(PREFIX + "CONFIG", ""))
    settings = _settings_from_table(_read_toml(path) if path else {}, path)
    disabled = _names(env[PREFIX + "DISABLE_PLUGINS"]) if PREFIX + "DISABLE_PLUGINS" in env else settings.disabled_plugins
    tuned, capture = env.get(PREFIX + "TUNED"), env.get(PREFIX + "CAPTURE_SHAPES")
    policy = env.get(PREFIX + "COMPILE_POLICY")
    profile, folder = settings.profile, settings.profile_folder
    if PREFIX + "PROFILE" in env:
        profile, folder = _flag_or_folder(PREFIX + "PROFILE", env[PREFIX + "PROFILE"])
    return Settings(
        overrides=settings.overrides,
        env_overrides={k[len(OVERRIDE_PREFIX) :]: v for k, v in env.items() if k.startswith(OVERRIDE_PREFIX) and v},
        disabled_plugins=disabled,
        objective=settings.objective,
        platform=env.get(PREFIX + "PLATFORM") or settings.platform,
        verbose=_flag(PREFIX + "VERBOSE", env[PREFIX + "VERBOSE"]) if PREFIX + "VERBOSE" in env else settings.verbose,
        tuned=directory(tuned) if tuned else settings.tuned,
        packs=_folders(env[PREFIX + "PACKS"].split(os.pathsep)) if env.get(PREFIX + "PACKS") else settings.packs,
        compile_policy=_policy(PREFIX + "COMPILE_POLICY", policy) if policy else settings.compile_policy,
        capture_path=_file(PREFIX + "CAPTURE_SHAPES", capture) if capture else settings.capture_path,
        profile=profile,
        profile_folder=folder,
        source=settings.source,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _word(text: str) -> bool | None:
    """Parses a boolean word: True for a word such as "yes", False for a word such as "no", None for any other text."""
    lowered = text.strip().lower()
    return True if lowered in _TRUE else False if lowered in _FALSE else None


def _flag(name: str, text: str) -> bool:
    word = _word(text)
    if word is None:
        raise ConfigurationError(f"{name} must be 1 or 0, got {text!r}")
    return word


def _folders(paths: list[str]) -> tuple[Path, ...] | None:
    """The directories that a setting names; None if the setting is ``off``."""
    return None if [path.strip().lower() for path in paths] == [OFF] else tuple(Path(path) for path in paths if path)


def _policy(name: str, text: str) -> str:
    if text not in COMPILE_POLICIES:
        raise ConfigurationError(f"{name} must be one of {', '.join(COMPILE_POLICIES)}, got {text!r}")
    return text


def _file(name: str, text: str) -> Path | None:
    """The path of the file that a setting names, or None for a word such as "no". A word such as "yes" raises ConfigurationError,
    because the setting is a path and not a flag.
    """
    word = _word(text)
    if word:
        raise ConfigurationError(
            f"{name} must be the path of a file, or off, got {text!r}; a file of that name is ./{text.strip()}"
        )
    return Path(text) if word is None else None


def directory(text: str) -> str | None:
    """Parses a setting that names a directory for files. Returns the path, `OFF` for a word such as "no", or None for a word such
    as "yes" and for an unset setting. None means the default directory.

    Args:
        text: the setting's value; empty if it is not set.
    """
    word = _word(text) if text else True
    return text if word is None else None if word else OFF


def _flag_or_folder(name: str, text: str) -> tuple[bool, Path | None]:
    word = _word(text)
    if word is not None:
        return word, None
    if not Path(text).is_dir():
        raise ConfigurationError(f"{name} must be 1, 0 or a folder that exists, got {text!r}")
    return False, Path(text)


def _warn_about_unknown(env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in VARIABLES or name.startswith(OVERRIDE_PREFIX):
            continue
        warnings.warn(f"unknown environment variable {name}{_meant(name, VARIABLES, PREFIX)}", stacklevel=2)


def warn_about_unknown_overrides(operators: Iterable[tuple[str, str]]) -> None:
    """Warns of overrides for operators that do not exist. The caller passes all operators, after their declaration."""
    known = {f"{family}.{mode}": f"{OVERRIDE_PREFIX}{family}_{mode}".upper() for family, mode in operators}
    for joined in settings().env_overrides:
        name = OVERRIDE_PREFIX + joined
        _warn_unless_known(name, name, known.values(), OVERRIDE_PREFIX)
    for family, mode in settings().overrides:
        _warn_unless_known(f"{settings().source}: overrides.{family}.{mode}", f"{family}.{mode}", known)


def _warn_unless_known(where: str, name: str, known: Collection[str], prefix: str = "") -> None:
    if name not in known:
        warnings.warn(f"{where} names no operator{_meant(name, known, prefix)}", stacklevel=4)


def _meant(name: str, known: Iterable[str], prefix: str) -> str:
    """`did_you_mean`'s suggestion for an unknown name. The prefix that all names share is removed before the comparison. Otherwise
    all names would be near one another.
    """
    return did_you_mean(name.removeprefix(prefix), (other.removeprefix(prefix) for other in known), prefix.__add__)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{PREFIX}CONFIG names {path}, which cannot be read: {error}") from error
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigurationError(
                f"{PREFIX}CONFIG names {path}; reading TOML on Python 3.10 needs tomli: "
                f"pip install {requirement('tokenspeed-kernel[tools]')}"
            ) from error
    try:
        table: dict[str, Any] = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    return table


_KEYS: dict[str, type] = {
    "objective": str,
    "platform": str,
    "disabled_plugins": list,
    "verbose": bool,
    "tuned": str,
    "packs": list,
    "compile_policy": str,
    "capture_shapes": str,
    "profile": bool,
}


def _settings_from_table(table: Mapping[str, Any], source: Path | None) -> Settings:
    for key, value in table.items():
        if key == "overrides":
            continue
        if key not in _KEYS:
            known = [*_KEYS, "overrides"]
            meant = did_you_mean(key, known, repr) or f"; there are {', '.join(known)}"
            raise ConfigurationError(f"{source}: unknown key {key!r}{meant}")
        if not isinstance(value, _KEYS[key]):
            raise ConfigurationError(f"{source}: {key} must be a {_KEYS[key].__name__}, got {value!r}")
    for key in ("disabled_plugins", "packs"):
        if not all(isinstance(name, str) for name in table.get(key, ())):
            raise ConfigurationError(f"{source}: {key} must be a list of str, got {table[key]!r}")
    return Settings(
        overrides=_overrides_from_table(table.get("overrides", {}), source),
        disabled_plugins=frozenset(table.get("disabled_plugins", ())),
        objective=table.get("objective"),
        platform=table.get("platform"),
        verbose=table.get("verbose", False),
        tuned=directory(table.get("tuned", "")),
        packs=_folders(table.get("packs", [])),
        compile_policy=_policy(f"{source}: compile_policy", table.get("compile_policy", "allow")),
        capture_path=_file(f"{source}: capture_shapes", table.get("capture_shapes", "")),
        profile=table.get("profile", False),
        source=source,
    )


def _overrides_from_table(table: Any, source: Path | None) -> dict[tuple[str, str], str]:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{source}: overrides must be a table, got {table!r}")
    overrides: dict[tuple[str, str], str] = {}
    for key, value in table.items():
        entries = value.items() if isinstance(value, Mapping) else [(None, value)]
        for mode, kernel in entries:
            family, dot, rest = (key, ".", mode) if mode is not None else key.partition(".")
            if not family or not dot or not rest or not isinstance(kernel, str) or not kernel:
                raise ConfigurationError(f'{source}: an override is spelled "family.mode" = "kernel_name", got {key!r} = {value!r}')
            overrides[family, rest] = kernel
    return overrides


def cache_directory() -> Path | None:
    """This project's folder in the user's cache directory, by the XDG base directory specification; None without a home
    directory."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "tokenspeed_kernel"


def kept_in(chosen: str | None, folder: str) -> Path | None:
    """Returns the directory in which files are stored, from a setting parsed by `directory`. Returns None for `OFF`. If the setting
    names no directory, the result is ``folder`` in `cache_directory`, or None without a cache directory.
    """
    if chosen is not None:
        return None if chosen == OFF else Path(chosen)
    cache = cache_directory()
    return None if cache is None else cache / folder


_settings: Settings | None = None


def settings() -> Settings:
    """The current settings, read on first use."""
    global _settings
    if _settings is None:
        _settings = read_settings()
    return _settings


def reload_settings() -> Settings:
    """Reads all settings again, and invalidates every selection made under the old settings.

    Loaded plugins stay loaded; see `tokenspeed_kernel.plugins`.
    """
    global _settings
    _settings = read_settings()
    memo.invalidate()
    return _settings
