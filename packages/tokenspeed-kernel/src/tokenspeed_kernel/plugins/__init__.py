"""Discovers plugins, which are installed packages that register kernels.

A package registers kernels through an entry point of the group ``tokenspeed_kernel.plugins``, whose object is a function without
parameters that calls `register_kernel`::

    [project.entry-points."tokenspeed_kernel.plugins"]
    my-kernels = "my_package.plugin:register"

The core discovers plugins when it is imported. Each plugin registers all of its kernels or, if it raises an error, none of them.
The failure is recorded with its traceback (`plugin_failures`, ``tokenspeed-kernel doctor``), and the other plugins are still
loaded.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.reach import why_unreachable
from tokenspeed_kernel_base.registry import KernelRegistry, register_package
from tokenspeed_kernel_base.spec import KernelSpec

GROUP = "tokenspeed_kernel.plugins"


@dataclass(frozen=True)
class PluginInfo:
    """A plugin that was loaded, and the kernels that it registered."""

    name: str
    package: str
    version: str
    num_kernels: int
    kernel_names: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that failed to load or to register its kernels: ``error`` is the reason in one line, ``traceback`` the full
    traceback.
    """

    name: str
    package: str
    version: str
    error: str
    traceback: str


class PluginWarning(UserWarning):
    """A plugin could not be loaded, or a name in a setting or in a kernel's declaration is unknown."""


_lock = threading.RLock()
_loaded: dict[str, PluginInfo] = {}
_failed: dict[str, PluginFailure] = {}
_disabled: set[str] = set()
# The declarations of each loaded plugin's kernels. A plugin's modules run once, and may declare kernels at import. So the plugin's
# function cannot declare them a second time.
_declared: dict[str, list[tuple[KernelSpec, Callable[..., Any] | str]]] = {}
# The registry in which `discover_plugins` last registered kernels. `KernelRegistry.reset` replaces the process-wide registry, and
# all kernels must then be registered again.
_filled: KernelRegistry | None = None

CORE = ("tokenspeed_kernel.torch", "tokenspeed_kernel.triton")
"""The packages that register the core's own kernels."""


def discover_plugins(*, force: bool = False) -> list[PluginInfo]:
    """Loads all installed plugins that are not disabled. The core's own kernels are registered first, if they are not yet.

    Args:
        force: whether to discover again. If so, loaded plugins are unchanged, and failed ones are retried. After
            `KernelRegistry.reset` the kernels of the core and of all plugins are registered again.

    Returns:
        The loaded plugins.

    Warns:
        PluginWarning: a plugin failed; a plugin is ignored because another package's plugin has the same name; the settings disable
            a plugin that is not installed; the settings name a kernel that no call of its operator can select; a kernel implements
            an operator that is not declared.
    """
    global _filled
    with _lock:
        if _filled is not None and not force:
            return list_plugins()
        if _filled is not KernelRegistry.get():
            _register_core()
            _loaded.clear()
            _filled = KernelRegistry.get()
        # Sorted, so that the outcome does not depend on the order of distributions on disk.
        entries = sorted(metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value))
        for entry in entries:
            if entry.name in _disabled or config.settings().plugin_disabled(entry.name):
                continue
            if entry.name in _loaded:
                _warn_of_namesake(entry)
                continue
            _load(entry)
        _warn_of_unknown_names({entry.name for entry in entries})
        return list_plugins()


def _register_core() -> None:
    """Registers every operator's body as its reference, and the kernels of the core."""
    for op in operators():
        op.register_reference()
    for package in CORE:
        register_package(package)


def _warn_of_unknown_names(installed: set[str]) -> None:
    """Warns of unknown names in settings and declarations. Call this function after everything is declared."""
    declared = [(op.family, op.mode) for op in operators()]
    config.warn_about_unknown_overrides(declared)
    for family, mode in declared:
        setting = config.settings().override_for(family, mode)
        # No platform is passed, because detecting the platform would use the GPU. If the kernel does not run on the platform, the
        # call raises an error.
        why = None if setting is None else why_unreachable(setting[0], f"{family}.{mode}")
        if setting is not None and why is not None:
            _warn(f"{setting[1]} = {setting[0]}: no call of {family}.{mode} can select it: {why}")
    variable = config.PREFIX + "DISABLE_PLUGINS"
    where = variable if variable in os.environ else f"{config.settings().source}: disabled_plugins"
    for name in sorted(config.settings().disabled_plugins - installed - {"*"}):
        _warn(f"{where} names {name}, which is not installed{did_you_mean(name, installed)}")
    for spec in KernelRegistry.get().list_kernels():
        if (spec.family, spec.mode) not in declared:
            near = did_you_mean(spec.operator, map(".".join, declared))
            _warn(f"kernel {spec.name} ({spec.origin}) implements {spec.operator}, which is not declared{near}")


def _warn(message: str) -> None:
    """Issues a warning at the code that imports the core or calls `discover_plugins`."""
    warnings.warn(message, PluginWarning, stacklevel=4)


def _package_of(entry: metadata.EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist else (entry.module, "")


def _warn_of_namesake(entry: metadata.EntryPoint) -> None:
    (package, version), loaded = _package_of(entry), _loaded[entry.name]
    if package != loaded.package:
        _warn(
            f"plugin {entry.name} of {package} {version} is left out: a plugin of that name was loaded from "
            f"{loaded.package} {loaded.version}"
        )


def _load(entry: metadata.EntryPoint) -> None:
    package, version = _package_of(entry)
    try:
        with KernelRegistry.get().transaction() as added:
            if entry.name in _declared:
                _register_again(_declared[entry.name])
            else:
                register = entry.load()
                if not callable(register):
                    raise TypeError(f"{entry.value} must be a function without parameters, got {register!r}")
                register()
    except (Exception, SystemExit) as error:  # any error of a plugin is recorded as its failure
        _failed[entry.name] = PluginFailure(
            entry.name, package, version, f"{type(error).__name__}: {error}", traceback.format_exc()
        )
        _warn(
            f"plugin {entry.name} of {package} {version} failed to load and is left out: {type(error).__name__}: {error}; "
            "tokenspeed-kernel doctor shows the traceback"
        )
        return
    _failed.pop(entry.name, None)
    names = tuple(sorted(spec.name for spec in added))
    _declared[entry.name] = KernelRegistry.get().declarations(names)
    _loaded[entry.name] = PluginInfo(entry.name, package, version, len(names), names)


def _register_again(declared: Sequence[tuple[KernelSpec, Callable[..., Any] | str]]) -> None:
    """Registers and publishes a plugin's kernels from the declarations that an earlier load made. The earlier load may have used
    another registry.
    """
    registry = KernelRegistry.get()
    for spec, impl in declared:
        if not registry.has(spec):
            registry.register(spec, impl)
    registry.publish([spec.name for spec, _ in declared], True)


def list_plugins() -> list[PluginInfo]:
    """Returns the loaded plugins, sorted by name."""
    with _lock:
        return [_loaded[name] for name in sorted(_loaded)]


def plugin_failures() -> list[PluginFailure]:
    """Returns the plugins that failed to load, sorted by name."""
    with _lock:
        return [_failed[name] for name in sorted(_failed)]


def disabled_plugins() -> list[str]:
    """Returns the names of installed plugins that are disabled."""
    with _lock:
        names = {entry.name for entry in metadata.entry_points(group=GROUP)}
        return sorted(n for n in names if n in _disabled or config.settings().plugin_disabled(n))


def disable_plugin(name: str) -> None:
    """Makes selection ignore a plugin's kernels, and prevents the plugin from being loaded in this process.

    The kernels remain available to the functions of their own package.

    Raises:
        KeyError: no plugin of this name is loaded, has failed, or is installed.
    """
    with _lock:
        installed = {entry.name for entry in metadata.entry_points(group=GROUP)}
        if name not in installed | _loaded.keys() | _failed.keys():
            raise KeyError(f"no plugin named {name}; installed are: {', '.join(sorted(installed)) or 'none'}")
        _disabled.add(name)
        _failed.pop(name, None)
        _declared.pop(name, None)
        info = _loaded.pop(name, None)
        if info is not None:
            KernelRegistry.get().publish(info.kernel_names, False)
