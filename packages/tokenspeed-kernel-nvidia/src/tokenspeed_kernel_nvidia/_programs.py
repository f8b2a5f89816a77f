"""Programs: CuteDSL kernels that are compiled once for each configuration and cached on disk as machine code.

A kernel's launcher module declares a program by a function of the configuration. This function imports the device code::

    @program(arch="sm_90a", configs=every_config)
    def decode_program(config: Config):
        from . import kernel_device
        return kernel_device.host(config), kernel_device.fake_arguments(config)

``decode_program(config)`` is then a function of tensors and scalars that launches on PyTorch's current stream. The first call in a
process loads the program from a pack (`tokenspeed_kernel_base.packs`) or from the cache. Loading imports neither the compiler nor
the device code. A program that is in neither a pack nor the cache is compiled.

A cache file is a shared library, or an object file if there is no linker, followed by a checksum. CuteDSL loads object files. The
file name contains a hash of the program's inputs: the sources of the declaring module and of all modules of this package that it
imports, the configuration, the architecture, and the versions and settings of CuteDSL and TVM-FFI. So after a change of a source,
comments included, programs are compiled again.

If several processes need the same program, one process compiles it and the others wait. A damaged file is renamed with a warning,
and the program is compiled again. If no cache can be written, each process compiles its programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenspeed_kernel_base import compilation, packs
from tokenspeed_kernel_base import config as settings
from tokenspeed_kernel_base.storage import locked, part_of, replace_file, set_aside, warn_once
from tokenspeed_kernel_nvidia.program_backend import Backend, current
from tokenspeed_kernel_nvidia.program_backend import Launch as Launch

VARIABLE = "TOKENSPEED_KERNEL_PROGRAMS"
DSL = "nvidia-cutlass-dsl"
COMPILER = "cutedsl"
SUFFIXES = (".so", ".o")

ConfigT = TypeVar("ConfigT", bound=Hashable)
Declaration = Callable[[ConfigT], tuple[Any, Sequence[Any]]]

_PACKAGE = __name__.partition(".")[0]
_FORMAT = 1
_FUNCTION = "program"
_RUNTIME = "libcute_dsl_runtime.so"
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|.*)|import[ \t]+(.*))", re.MULTILINE)
# A cache file ends with this mark and the SHA-256 of all bytes before the mark. Loaders ignore the mark and the hash.
_MARK = b"tokenspeed-kernel program"
# CuteDSL's environment variables that change the machine code, without the prefix ``CUTE_DSL_``.
_SETTINGS = ("DEBUG", "LINEINFO", "ENABLE_ASSERTIONS", "COMPILER_OPT", "COMPILER_BACKEND")
# Seconds to wait for a program's lock. Compiling takes less, so a process that holds the lock for longer is stuck. The waiting
# process then compiles the program too.
_PATIENCE_S = 300.0
# The compiler keeps its state in globals, so one thread compiles at a time.
_compiler = threading.RLock()
_libraries: dict[Path, ctypes.CDLL] = {}


def program(
    *, arch: str, configs: Callable[[], Sequence[ConfigT]], usual: Callable[[], Sequence[ConfigT]] | None = None
) -> Callable[[Declaration[ConfigT]], Program[ConfigT]]:
    """Decorator that turns a function into a `Program`. The decorated function receives a configuration. It returns a ``cute.jit``
    function and the fake arguments to compile that function with; the last argument is the stream.

    Args:
        arch: the architecture to compile for, as CuteDSL spells it: ``"sm_90a"``.
        configs: function that returns all supported configurations.
        usual: function that returns the configurations to compile ahead of time, see `Program`; all if not given.
    """

    def declare(declaration: Declaration[ConfigT]) -> Program[ConfigT]:
        return Program(declaration, arch, configs, usual)

    return declare


class Program(Generic[ConfigT]):
    """A kernel that is compiled once for each configuration. The decorator `program` makes it.

    Attributes:
        name: the names of the declaring module and function, without the package.
        arch: the architecture to compile for.
        configs: function that returns all supported configurations.
        usual: function that returns the configurations that calls can select without naming a kernel.
    """

    def __init__(
        self,
        declaration: Declaration[ConfigT],
        arch: str,
        configs: Callable[[], Sequence[ConfigT]],
        usual: Callable[[], Sequence[ConfigT]] | None = None,
    ) -> None:
        self.name = f"{declaration.__module__.removeprefix(_PACKAGE + '.')}.{declaration.__name__}"
        self.arch = arch
        self.configs = configs
        self.usual = usual or configs
        self.__doc__ = declaration.__doc__
        self._declaration = declaration
        self._loaded: dict[tuple[Backend, ConfigT], Launch] = {}
        self._loading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _declared, (self._declaration.__module__, self._declaration.__name__)

    def __repr__(self) -> str:
        return f"<program {self.name} for {self.arch}>"

    def __call__(self, config: ConfigT) -> Launch:
        """Returns the program for a configuration. A program that this process has not loaded yet is loaded from a pack or from the
        cache, or compiled.

        Returns:
            A function of the kernel's real arguments, without the stream, that launches the kernel on the current stream. The
            function raises TypeError or ValueError if a dtype, a shape, an alignment or a device differs from that of the fake
            arguments.
        """
        try:
            return self._loaded[current(), config]
        except KeyError:
            return self._load(config)

    def compile(self, config: ConfigT, options: str = "") -> Any:
        """Compiles the program now, without the cache. No GPU is needed.

        Args:
            config: the configuration.
            options: further options of ``cute.compile``, for example ``"--keep-cubin --dump-dir /tmp/x"``.

        Returns:
            The result of ``cute.compile``.

        Raises:
            RuntimeError: CuteDSL is not installed.
        """
        if importlib.util.find_spec("cutlass") is None:
            raise RuntimeError(f"{self.name} is not compiled yet, which needs {DSL}: pip install {DSL}")
        from cutlass import cute

        def build(more: str) -> Any:
            function, arguments = self._declaration(config)
            return cute.compile(function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {self.arch} {options} {more}")

        with _compiler:
            return current().compile(build)

    def file(self, config: ConfigT) -> Path | None:
        """Returns the path of the cache file, without its suffix; None if the cache is off. The file need not exist."""
        directory = cache_directory()
        return None if directory is None else directory / self._file_name(config)

    def _file_name(self, config: ConfigT) -> str:
        """Returns the name of the program's file in a cache or a pack, without its suffix."""
        key = {
            "format": _FORMAT,
            "program": self.name,
            "arch": self.arch,
            "config": repr(config),
            "source": source_digest(self._declaration.__module__),
            "toolchain": toolchain(),
            "settings": [os.environ.get(f"CUTE_DSL_{name}") for name in _SETTINGS],
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return f"{self.name}.{digest[:24]}"

    def is_kept(self, config: ConfigT) -> bool:
        """Returns whether the compiled program for this configuration is in a pack or in the cache, in a file without damage."""
        if self._packed_file(config) is not None:
            return True
        file = self.file(config)
        return file is not None and any(whole for _, whole in _cache_files(file))

    def description(self, config: ConfigT) -> str:
        """Returns the program's name in messages of the compile policy."""
        return f"{self.name} {config}"

    def _compiled(self, config: ConfigT) -> Any:
        """Compiles the program during a call, if the compile policy allows compilation."""
        started = compilation.start(self.description(config), "CuteDSL")
        compiled = self.compile(config)
        started.finish()
        return compiled

    def _load(self, config: ConfigT) -> Launch:
        backend = current()
        with self._loading:
            if (backend, config) not in self._loaded:
                self._loaded[backend, config] = backend.load(self, config)
            return self._loaded[backend, config]

    def packed(self, config: ConfigT) -> Launch | None:
        """Loads the program from a pack; None if no pack has the program."""
        path = self._packed_file(config)
        return None if path is None else _loaded(path)

    def _packed_file(self, config: ConfigT) -> Path | None:
        """Returns the program's file in a pack; None if no pack has an intact file. An emulator has its own cache and uses no
        packs, because packs are for GPUs."""
        if current().directory() is not None:
            return None
        name = self._file_name(config)
        return packs.find(COMPILER, [name + suffix for suffix in SUFFIXES], toolchain())

    def cached(self, config: ConfigT) -> Launch:
        """Returns the program for a configuration, from a pack, from the cache, or compiled now. Unlike a call of the object, this
        method does not remember the returned function."""
        packed = self.packed(config)
        if packed is not None:
            return packed
        file = self.file(config)
        if file is None:
            return _for_this_process(self._compiled(config))
        found = _read(file)
        if found is not None:
            return found
        # Refuse before waiting for another process, because waiting takes as long as compiling.
        compilation.refuse_if_forbidden(self.description(config))
        with _program_lock(file):
            found = _read(file)  # another process may have written the file meanwhile
            if found is None:
                for path, whole in _cache_files(file):
                    if not whole:
                        set_aside(path, f"the compiled program {path} is damaged, and compiled again")
                compiled = self._compiled(config)
                if _write(file, compiled):
                    found = _read(file)
                    if found is None:
                        warn_once(f"compiled programs cannot be loaded from {file.parent}, and are compiled by every process")
            return _for_this_process(compiled) if found is None else found


def _declared(module: str, name: str) -> Any:
    """Unpickles a program: returns the program that ``module`` declares under this name in this process."""
    return getattr(importlib.import_module(module), name)


def cache_directory() -> Path | None:
    """Returns the cache directory: ``TOKENSPEED_KERNEL_PROGRAMS``, or ``tokenspeed_kernel/programs`` in the user's cache directory.

    Returns None if the variable is ``off``, or there is no home directory. An emulator has its own cache directory.
    """
    return current().directory() or settings.kept_in(settings.directory(os.environ.get(VARIABLE, "")), "programs")


def source_digest(module: str) -> str:
    """Returns a hash of the sources of a module and of all modules of its package that it imports, directly or indirectly.

    Imports inside functions count. This function imports no module. The hash leaves out ``_programs``, because the other inputs of
    the file name cover what matters in that module. The hash leaves out the package's own ``__init__``, because it imports all
    modules.
    """
    digest = hashlib.sha256()
    for name, source in sorted(_sources(module).items()):
        digest.update(f"{name} {len(source)}\n{source}".encode())
    return digest.hexdigest()


def _sources(module: str) -> dict[str, str]:
    sources: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        file = _file_of(name)
        if name in sources or name == __name__ or file is None:
            continue
        sources[name] = file.read_text("utf-8")
        left += _imported(sources[name], name if file.name == "__init__.py" else name.rpartition(".")[0])
    return sources


def _file_of(module: str) -> Path | None:
    """Returns the source file of a module; None if there is no module with this name. The top-level package must be imported."""
    package, *parts = module.split(".")
    root = sys.modules[package].__file__
    if root is None or not parts:
        return None if root is None else Path(root)
    path = Path(root).parent.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(source: str, package: str) -> Iterator[str]:
    """Yields the dotted names that a module's source imports from its own top-level package: names of modules and of other objects.

    Text that looks like an import counts as an import. An extra module in the hash does no harm, and parsing would take ten times
    as long.
    """
    outermost = package.partition(".")[0] + "."
    for origin, members, plain in _IMPORT.findall(source):
        if plain:
            names = re.findall(r"[\w.]+", plain)
        else:
            base = origin.lstrip(".")
            level = len(origin) - len(base)
            if level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - level + 1], *([base] if base else [])])
            names = [base, *(f"{base}.{name}" for name in re.findall(r"\w+", members))]
        yield from (name for name in names if name.startswith(outermost))


@functools.cache
def toolchain() -> tuple[str, ...]:
    """Returns the versions of the compiler and of the libraries to which programs are linked, the CUDA version of CuteDSL's runtime
    (as the name of its folder), and the host's architecture."""
    runtime = _runtime()
    flavor = "unknown" if runtime is None else runtime.parent.parent.name
    return f"{DSL} {_version(DSL)}", flavor, f"apache-tvm-ffi {_version('apache-tvm-ffi')}", os.uname().machine


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _runtime() -> Path | None:
    """Returns the path of CuteDSL's runtime library. Returns None if the library is not where the wheels install it.
    `_runtime_libraries` then asks CuteDSL for the path.

    The wheels may hold a library for CUDA 12 and one for CUDA 13. Like CuteDSL, this function picks the newest library that the
    driver supports.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = {
        int(file.parent.parent.name.removeprefix("cu")): file
        for root in spec.submodule_search_locations
        for file in Path(root).glob(f"cu[0-9]*/lib/{_RUNTIME}")
    }
    newest = _driver_major()
    fitting = [major for major in found if newest is None or major <= newest]
    return found[max(fitting)] if fitting else None


def _driver_major() -> int | None:
    """Returns the newest CUDA major version that the driver supports; None if there is no driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _runtime_libraries() -> list[Path]:
    """Returns the libraries that must be loaded before a program's shared library: CuteDSL's runtime and TVM-FFI."""
    import tvm_ffi

    runtime = _runtime()
    if runtime is not None:
        return [runtime, Path(tvm_ffi.libinfo.find_libtvm_ffi())]
    from cutlass.runtime import find_runtime_libraries

    return [Path(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]


def _sealed(body: bytes) -> bytes:
    """Returns the contents of a cache file: the program's bytes, the mark and the checksum."""
    return body + _MARK + hashlib.sha256(body).digest()


def _cache_files(file: Path) -> Iterator[tuple[Path, bool]]:
    """Yields the cache files whose path without suffix is ``file``, and whether the checksum of each is correct."""
    for path in (file.with_name(file.name + suffix) for suffix in SUFFIXES):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            yield path, content == _sealed(content[: -len(_MARK) - 32])


def _read(file: Path) -> Launch | None:
    """Loads the cached program whose path without suffix is ``file``; None if there is no intact cache file that loads."""
    loaded = (_loaded(path) for path, whole in _cache_files(file) if whole)
    return next((launch for launch in loaded if launch is not None), None)


def _loaded(path: Path) -> Launch | None:
    """Loads the program in an intact file; None if the file does not load because it is for another system."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        return _load_library(path) if path.suffix == ".so" else _load_object(path)
    return None


def _load_library(path: Path) -> Launch:
    import tvm_ffi

    for library in _runtime_libraries():
        # Load the libraries first: when a program is loaded, the dynamic linker then finds its libraries by name.
        if library not in _libraries:
            _libraries[library] = ctypes.CDLL(str(library))
    launch: Launch = tvm_ffi.load_module(path)[_FUNCTION]
    return launch


def _load_object(path: Path) -> Launch:
    from cutlass import cute

    with _compiler:
        launch: Launch = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
        return launch


def _for_this_process(compiled: Any) -> Launch:
    """Returns a compiled program for use in this process only, without a cache. If a temporary directory can be written, the
    program is linked and loaded from there, like a cached program."""
    launch: Launch = compiled
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program"
            launch = (_read(file) if _write(file, compiled) else None) or compiled
    except OSError:  # without a writable directory, the compiled program in memory is used
        pass
    return launch


def _write(file: Path, compiled: Any) -> bool:
    """Writes a compiled program to the cache. Returns whether the write succeeded. The caller holds the program's lock."""
    part = part_of(file)
    beside, linked = part.with_name(part.name + ".o"), part.with_name(part.name + ".so")
    try:
        # If the folder is not writable, this raises OSError. The exporter would raise other errors.
        beside.touch(exist_ok=False)
        compiled.export_to_c(str(beside), function_name=_FUNCTION, export_only_tvm_ffi_symbols=True)
        made = linked if _link(beside, linked) else beside
        replace_file(file.with_name(file.name + made.suffix), _sealed(made.read_bytes()))
        return True
    except OSError as error:
        warn_once(f"compiled programs are not kept in {file.parent}: {error.strerror}")
        return False
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
            linked.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Links an object file to a shared library. Returns whether a linker succeeded."""
    libraries = [str(path) for path in _runtime_libraries()]
    for linker in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if shutil.which(linker) is None:
            continue
        command = [linker, "-shared", "-nostdlib", "-Wl,-Bsymbolic", "-o", str(target), str(source), *libraries]
        if subprocess.run(command, capture_output=True).returncode == 0 and target.is_file():
            return True
    return False


@contextlib.contextmanager
def _program_lock(file: Path) -> Iterator[None]:
    """Context manager that holds the lock of a program's cache file. If the lock cannot be acquired, the ``with`` block runs
    without the lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(locked(file, _PATIENCE_S))
        yield
