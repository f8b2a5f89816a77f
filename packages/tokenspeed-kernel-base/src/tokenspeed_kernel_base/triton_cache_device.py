"""A cache manager for Triton that looks for compiled kernels in packs, and applies the compile policy.

Triton asks its cache manager for a kernel's files, and compiles the kernel if there are none. The manager's class is a public
setting of Triton. This module's class, `PolicyCache`, looks into the packs first, then calls the manager of the class that was set
before. `PolicyCache` announces each compilation of this project's kernels to `compilation`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from triton import __version__, knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import CacheManager, FileCacheManager, triton_key

from tokenspeed_kernel_base import compilation, packs

COMPILER = "triton"
_METADATA = ".json"
_delegate: Any = FileCacheManager


def toolchain() -> list[str]:
    """Returns the versions and settings that are part of the cache key of every Triton kernel.

    These are Triton's version, a digest of its installed files, the version of ptxas, and the environment variables that affect
    compilations. Wheels of one version for two versions of Python differ in their files, and thus in their cache keys.
    """
    build = hashlib.sha256(triton_key().encode()).hexdigest()[:12]
    settings = sorted(get_cache_invalidating_env_vars().items())
    return [
        f"triton {__version__} (build {build}, {sys.implementation.cache_tag})",
        f"ptxas {knobs.nvidia.ptxas.version}",
        *(f"{name}={value}" for name, value in settings),
    ]


class PolicyCache(CacheManager):  # type: ignore[misc]  # Triton has no types
    """A cache manager for one compiled kernel. Triton makes a manager for each compilation and for each look-up.

    Args:
        key: hash of all inputs of the compilation.
        override, dump: whether to use Triton's folder of overriding kernels, or of dumped kernels, instead of the cache.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key, self._debugging = key, {"override": override, "dump": dump}
        self._started: compilation.Started | None = None

    @functools.cached_property
    def _cache(self) -> Any:
        """A manager of the class that was set before. It is made on first use, because it creates a folder, which fails on a
        read-only file system."""
        return _delegate(self._key, **self._debugging)

    def get_file(self, filename: str) -> str | None:
        """Returns the path of one file; None if it must be made. Triton looks for compiled host code so."""
        return self._packed(filename).get(filename) or self._cache.get_file(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return self._cache.put(data, filename, binary=binary)  # type: ignore[no-any-return]

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Returns the kernel's files by name; None if the kernel must be compiled.

        Raises:
            CompilationForbiddenError: the kernel must be compiled, and the policy forbids this.
        """
        found = self._packed(filename) or self._cache.get_group(filename)
        missing = found is None or knobs.compilation.always_compile
        if missing and filename.endswith(_METADATA) and compilation.called_by_kernels("triton"):
            self._started = compilation.start(filename.removesuffix(_METADATA), "Triton", self._key)
        return found

    def _packed(self, filename: str) -> dict[str, str]:
        """Returns the folder's files in a pack by name; nothing unless a pack has the folder with this file."""
        found = {} if any(self._debugging.values()) else packs.find_folder(COMPILER, self._key, toolchain())
        return found if filename in found else {}

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        self._cache.put_group(filename, group)
        if self._started is not None:
            self._started.finish()
            self._started = None


def install() -> None:
    """Makes Triton use `PolicyCache`, unless Triton uses it already."""
    global _delegate
    current = knobs.cache.manager_class
    if current is not PolicyCache:
        _delegate = current or FileCacheManager
        knobs.cache.manager_class = PolicyCache


def settle_keys(value: Any) -> None:
    """Computes the cache keys of a kernel and of all functions that it calls, callees first. ``value`` is a Triton function, or a
    Python function that launches kernels; nothing is done for other values.

    Up to Triton 3.6, a function's key leaves out the global constants of a callee whose own key has not been computed before. So
    the key would depend on the order of launches in the process, and another process would not find the program in a pack or in a
    cache.
    """
    _settle(value, set())


def _settle(value: Any, seen: set[int]) -> None:
    function = getattr(value, "fn", value)
    if id(value) in seen or not isinstance(function, FunctionType):
        return
    seen.add(id(value))
    for callee in _callees(function):
        _settle(callee, seen)
    if value is not function:
        getattr(value, "cache_key", None)  # an interpreted function has none


def _callees(function: FunctionType) -> Iterator[Any]:
    """Yields the Triton functions and the functions of device modules whose names a function uses. It may yield further functions
    with these names."""
    names = {*_names(function.__code__)}
    found = [function.__globals__.get(name) for name in names]
    found += [cell.cell_contents for cell in function.__closure__ or ()]
    modules = [each for each in found if isinstance(each, ModuleType) and not each.__name__.startswith("triton")]
    found += [vars(module).get(name) for module in modules for name in names]
    for each in found:
        if hasattr(type(each), "cache_key") or (isinstance(each, FunctionType) and each.__module__.endswith("_device")):
            yield each


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
