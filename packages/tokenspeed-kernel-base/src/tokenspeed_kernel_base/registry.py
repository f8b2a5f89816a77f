"""The registry of kernels: their declarations and implementations. Selection is in `tokenspeed_kernel_base.selection`.

A kernel is declared once, with `register_kernel`, beside its code. The registry keeps the declaration (`KernelSpec`) and the
implementation. The implementation is a function, or ``"module:function"``, which is imported when the kernel is first selected.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.discovery import import_modules
from tokenspeed_kernel_base.interface import Interface, layouts_of, refuse_layout
from tokenspeed_kernel_base.launchers import Launcher
from tokenspeed_kernel_base.names import nearest
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.spec import CANONICAL, TAGS, KernelSpec, Priority, RegistrationError

F = TypeVar("F")


class PriorityClashWarning(UserWarning):
    """Two kernels of equal priority may be eligible for the same request. The kernel whose name sorts first wins."""


class KernelLoadWarning(UserWarning):
    """The implementation of a selected kernel cannot be imported; selection rejects the kernel from then on."""


class PriorityClash(NamedTuple):
    """A pair of kernels of equal priority that may be eligible for the same request."""

    first: KernelSpec
    second: KernelSpec

    def __str__(self) -> str:
        a, b = sorted((self.first, self.second), key=lambda spec: spec.name)
        return (
            f"{a.name} ({a.origin}) and {b.name} ({b.origin}) both have priority {a.priority} and may be eligible for the same "
            f"{a.operator} request; {a.name} wins by name. Give one of them another priority."
        )


class KernelRegistry:
    """All kernels, by operator and by name. `KernelRegistry.get` returns the process-wide registry; tests may make others.

    Registering and reading are thread-safe.
    """

    _instance: KernelRegistry | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._specs: dict[str, KernelSpec] = {}
        self._impls: dict[str, Callable[..., Any] | str] = {}
        self._modules: dict[str, str] = {}
        self._interfaces: dict[tuple[str, str], Interface] = {}
        self._launchers: dict[str, Launcher] = {}
        self._clashes: list[PriorityClash] = []
        self._load_failures: dict[str, str] = {}
        self._disabled: dict[str, str] = {}
        self._private: set[str] = set()
        self._open_transactions = 0

    @classmethod
    def get(cls) -> KernelRegistry:
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @classmethod
    def reset(cls) -> None:
        """Removes all kernels of the process-wide registry, the built-in ones included. For tests."""
        with cls._instance_lock:
            cls._instance = None
        memo.invalidate()

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def declare_interface(self, family: str, mode: str, interface: Interface) -> None:
        """Sets the interface that every kernel of an operator is checked against.

        Raises:
            RegistrationError: a kernel that is already registered violates the interface.
        """
        with self._lock:
            self._interfaces[family, mode] = interface
            specs = [spec for spec in self._specs.values() if (spec.family, spec.mode) == (family, mode)]
            for spec in specs:
                interface.check(spec)
                if callable(self._impls[spec.name]):
                    self._launcher(spec.name)
            self._check_layouts(specs)

    def interface_of(self, family: str, mode: str) -> Interface | None:
        """The interface of an operator; None if the operator is not declared."""
        with self._lock:
            return self._interfaces.get((family, mode))

    def register(self, spec: KernelSpec, impl: Callable[..., Any] | str) -> None:
        """Registers a kernel.

        Raises:
            RegistrationError: the name is in use; the implementation's parameters do not match the operator's; or the declaration
                has a name that the operator does not declare.
        Warns:
            PriorityClashWarning: another kernel of equal priority may be eligible for the same request.
        """
        if not callable(impl) and not (isinstance(impl, str) and impl.count(":") == 1 and all(impl.split(":"))):
            raise RegistrationError(
                f'{spec.name}: an implementation is a function or "module:function", got {impl!r} ({spec.origin})'
            )
        with self._lock:
            existing = self._specs.get(spec.name)
            if existing is not None:
                raise RegistrationError(
                    f"a kernel named {spec.name} exists: registered by {existing.origin}, now again by {spec.origin}; "
                    "give one of them another name="
                )
            interface = self._interfaces.get((spec.family, spec.mode))
            launcher = Launcher(spec, impl, interface) if callable(impl) else None
            if interface is not None:
                interface.check(spec)
            if not self._open_transactions:
                self._check_layouts([spec])
            candidates = [s for s in self._specs.values() if s.priority == spec.priority and s.overlaps(spec)]
            self._specs[spec.name] = spec
            self._impls[spec.name] = impl
            if launcher is not None:
                self._launchers[spec.name] = launcher
            self._modules[spec.name] = impl.partition(":")[0] if isinstance(impl, str) else _module_of(impl)
            clashes = [PriorityClash(candidate, spec) for candidate in candidates]
            self._clashes.extend(clashes)
        memo.invalidate()
        for clash in clashes:
            warnings.warn(str(clash), PriorityClashWarning, stacklevel=3)

    def publish(self, names: Iterable[str], public: bool) -> None:
        """Makes kernels public or private. Public kernels are eligible for all requests, private kernels only for requests that
        name their package. Registered kernels are public by default. Unknown names are ignored."""
        with self._lock:
            known = self._specs.keys() & set(names)
            self._private = self._private - known if public else self._private | known
        memo.invalidate()

    def unregister(self, name: str) -> None:
        """Removes a kernel. Raises KeyError for an unknown name."""
        with self._lock:
            self.get_by_name(name)
            del self._specs[name], self._impls[name]
            self._launchers.pop(name, None)
            self._load_failures.pop(name, None)
            self._disabled.pop(name, None)
            self._private.discard(name)
            self._clashes = [c for c in self._clashes if name not in (c.first.name, c.second.name)]
        memo.invalidate()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[list[KernelSpec]]:
        """Keeps all registrations made inside the block; if the block raises, keeps none of them.

        Yields a list. After the block, the list holds the kernels that became public in the block, including formerly private
        kernels.
        """
        with self._lock:
            public = set(self._public())
            before = dict(self._specs), dict(self._impls), dict(self._interfaces), list(self._clashes), set(self._private)
            added: list[KernelSpec] = []
            self._open_transactions += 1
            try:
                yield added
                # Layouts are checked at the end of the block, because a kernel that makes a layout may be registered after a kernel
                # that reads it.
                self._check_layouts([spec for name, spec in self._specs.items() if before[0].get(name) is not spec])
            except BaseException:
                self._specs, self._impls, self._interfaces, self._clashes, self._private = before
                memo.invalidate()
                raise
            finally:
                self._open_transactions -= 1
            added.extend(spec for name, spec in self._public().items() if name not in public or before[0][name] is not spec)

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def has(self, spec: KernelSpec) -> bool:
        """Whether this very spec object is registered. False if another spec of the same name is registered."""
        with self._lock:
            return self._specs.get(spec.name) is spec

    def _public(self) -> dict[str, KernelSpec]:
        return {name: spec for name, spec in self._specs.items() if name not in self._private}

    def is_public(self, name: str) -> bool:
        """Whether a kernel is registered and public."""
        with self._lock:
            return name in self._public()

    def get_by_name(self, name: str, operator: str | None = None) -> KernelSpec:
        """The declaration of a kernel. Raises KeyError for an unknown name, with a suggestion. If ``operator``, ``"family.mode"``,
        is given, only its kernels are suggested."""
        with self._lock:
            if name not in self._specs:
                candidates = [spec for spec in self._specs.values() if operator in (None, spec.operator)]
                raise KeyError(f"no kernel named {name}{nearest_kernel(name, candidates)}")
            return self._specs[name]

    def declarations(self, names: Iterable[str]) -> list[tuple[KernelSpec, Callable[..., Any] | str]]:
        """Returns the specs and implementations of kernels, with which they can be registered again. An implementation is a
        function if it has been imported, else ``"module:function"``.
        """
        with self._lock:
            return [(self.get_by_name(name), self._impls[name]) for name in names]

    def launchers(self) -> list[tuple[KernelSpec, Callable[..., Any]]]:
        """Returns all kernels whose implementation is imported, private kernels included, with their implementations."""
        with self._lock:
            return [(spec, impl) for name, spec in self._specs.items() if callable(impl := self._impls[name])]

    def get_impl(self, name: str) -> Callable[..., Any]:
        """Returns a function that takes all the operator's parameters, in order, and runs the kernel.

        The function is the implementation, or a wrapper that passes the implementation only the parameters that it takes. An
        implementation that was registered by name is imported now.

        Raises:
            KeyError: no kernel of that name.
            ImportError, AttributeError: the implementation cannot be imported; the message names the kernel.
            RegistrationError: the implementation's parameters do not match the operator's.
        """
        with self._lock:
            spec, impl = self.get_by_name(name), self._impls[name]
        if not callable(impl):
            loaded: Callable[..., Any] = load_object(impl, f"kernel {name}")
            if not callable(loaded):
                raise RegistrationError(f"{name}: {impl} is not callable ({spec.origin})")
            Launcher(spec, loaded, self._interfaces.get((spec.family, spec.mode)))
            with self._lock:
                if self._impls.get(name) is impl:
                    self._impls[name] = loaded
        return self._launcher(name).function

    def ignored_parameters(self, name: str) -> frozenset[str]:
        """The operator's parameters that a kernel's implementation does not take. Empty for an unknown name, and until the
        implementation is imported."""
        with self._lock:
            return self._launcher(name).ignored if callable(self._impls.get(name)) else frozenset()

    def module_of(self, name: str) -> str:
        """The module that implements a kernel. Imports nothing. Raises KeyError for an unknown name."""
        with self._lock:
            self.get_by_name(name)
            return self._modules[name]

    def load_or_leave_out(self, name: str) -> Callable[..., Any] | None:
        """Returns a kernel's implementation, imported if necessary; None if the import fails.

        If the import fails, the failure is recorded, with a warning, and every later selection rejects the kernel. So one broken
        package does not disable an operator that has other kernels.

        Warns:
            KernelLoadWarning: the implementation cannot be imported.
        """
        try:
            return self.get_impl(name)
        except KeyError:  # another thread unregistered the kernel
            return None
        except (ImportError, AttributeError, RegistrationError) as error:
            line = f"{type(error).__name__}: {error}"
            with self._lock:
                if name not in self._specs:
                    return None
                origin = self._specs[name].origin
                self._load_failures[name] = "".join(traceback.format_exception(error))
            self.disable(name, f"cannot be loaded: {line}")
            warnings.warn(f"{name} ({origin}) cannot be loaded and is left out: {line}", KernelLoadWarning, stacklevel=2)
            return None

    def disable(self, name: str, why: str) -> None:
        """Makes every later selection of this process reject a kernel, at the gate ``implementation``. Raises KeyError for an
        unknown name.

        Args:
            name: the kernel.
            why: the gate's reason. Messages put it after the kernel's name, so it starts with a verb.
        """
        with self._lock:
            self.get_by_name(name)
            self._disabled[name] = why
        memo.invalidate()

    def load_failures(self) -> dict[str, str]:
        """The tracebacks of the selected kernels that could not be loaded, by kernel name."""
        with self._lock:
            return dict(sorted(self._load_failures.items()))

    def why_disabled(self, name: str) -> str | None:
        """Why selection rejects a kernel, in one line: it could not be loaded, or was disabled. None for all other kernels."""
        return self._disabled.get(name)

    def get_for_operator(self, family: str, mode: str, package: str | None = None) -> list[KernelSpec]:
        """Returns an operator's public kernels; with ``package``, the operator's public and private kernels of that package. They
        are ordered by descending priority, then by name."""
        with self._lock:
            offered = self._public() if package is None else {n: s for n, s in self._specs.items() if s.package == package}
        specs = [spec for spec in offered.values() if spec.family == family and spec.mode == mode]
        return sorted(specs, key=lambda spec: (-spec.priority, spec.name))

    def list_operators(self) -> list[tuple[str, str]]:
        with self._lock:
            return sorted({(s.family, s.mode) for s in self._specs.values()} | self._interfaces.keys())

    def list_kernels(self) -> list[KernelSpec]:
        with self._lock:
            specs = list(self._public().values())
        return sorted(specs, key=lambda s: (s.family, s.mode, -s.priority, s.name))

    def list_solutions(self) -> list[str]:
        with self._lock:
            return sorted({spec.solution for spec in self._public().values()})

    def clashes(self) -> list[PriorityClash]:
        with self._lock:
            public = self._public()
            return [c for c in self._clashes if c.first.name in public and c.second.name in public]

    def is_lazy(self, name: str) -> bool:
        """Whether a kernel's implementation was given by name and is not imported yet."""
        with self._lock:
            self.get_by_name(name)
            return isinstance(self._impls[name], str)

    def _check_layouts(self, specs: Iterable[KernelSpec]) -> None:
        """Raises RegistrationError for a kernel that names a weight layout which no kernel of its family makes."""
        for spec in specs:
            named = self._layouts_of(spec) - {CANONICAL}
            if named and spec.weight_preprocessor is None:
                # Operators of a family share plans, and therefore the layouts of weights.
                makers = (o for o in self._specs.values() if o.family == spec.family and o.weight_preprocessor is not None)
                made = {CANONICAL}.union(*map(self._layouts_of, makers))
                for layout in sorted(named - made):
                    refuse_layout(spec, layout, made)

    def _layouts_of(self, spec: KernelSpec) -> frozenset[Any]:
        interface = self._interfaces.get((spec.family, spec.mode))
        return frozenset() if interface is None else layouts_of(spec, interface.layout)

    def _launcher(self, name: str) -> Launcher:
        """Returns a kernel's imported launcher, checked against its operator's interface. The result is cached until the spec, the
        implementation or the interface changes."""
        with self._lock:
            spec, impl = self._specs[name], self._impls[name]
            interface = self._interfaces.get((spec.family, spec.mode))
            known = self._launchers.get(name)
            if known is None or known.spec is not spec or known.impl is not impl or known.interface is not interface:
                assert callable(impl)
                known = self._launchers[name] = Launcher(spec, impl, interface)
            return known


def load_object(path: str, wanted_by: str) -> Any:
    """Imports the object that ``"module:attribute"`` names. An error names ``wanted_by``, the kernel that needs the object."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing may raise anything: OSError for a missing library, SyntaxError...
        raise ImportError(
            f"{wanted_by} is implemented by {path}, which cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise AttributeError(f"{wanted_by} is implemented by {path}, but {module_name} has no {attribute}") from None


def _module_of(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(getattr(function, "func", function))  # the function inside a functools.partial
    return str(getattr(inner, "__module__", None) or type(inner).__module__)


def nearest_kernel(name: str, specs: Iterable[KernelSpec]) -> str:
    """A suggestion for an unknown kernel name, as the end of a sentence; empty if no name is near. If the unknown name is near a
    solution's name, the suggestion lists kernels of this solution.
    """
    names: set[str] = set()
    by_solution: dict[str, list[str]] = {}
    for spec in specs:
        names.add(spec.name)
        by_solution.setdefault(spec.solution, []).append(spec.name)
    near = nearest(name, [*sorted(names), *sorted(by_solution.keys() - names)])  # solutions last: the first name wins a tie
    if near is None:
        return ""
    if near in names:
        return f"; did you mean {near}?"
    kernels = sorted(by_solution[near])
    listed = ", ".join(kernels[:_FEW]) + (", ..." if len(kernels) > _FEW else "")
    return f"; did you mean a kernel of solution {near} ({listed})?"


_FEW = 4  # number of kernels of a solution that an error lists


# Declarations by module, in source order. A module's code runs only once, so registering its kernels again needs this table.
_declared: dict[str, list[tuple[KernelSpec, Callable[..., Any] | str]]] = {}


def register_package(package: str, *, public: bool = True) -> list[KernelSpec]:
    """Imports a package's modules except device modules (see `discovery.import_modules`), and registers all kernels that they
    declare. Registers no kernel if an import or a registration raises an error.

    Args:
        package: the package's name.
        public: whether the package's kernels become public. If not, kernels that were not public before are eligible only for
            requests that name the package.

    Returns:
        All declarations of the package, sorted by name, including declarations that were registered before.
    """
    registry = KernelRegistry.get()
    with registry.transaction():
        offered = {spec.name for spec in registry.list_kernels()}
        try:
            import_modules(package)
        finally:
            for module in [name for name in _declared if name not in sys.modules]:
                del _declared[module]  # the import raised; the module runs again at its next import
        declared = [
            pair for module, pairs in sorted(_declared.items()) if (module + ".").startswith(package + ".") for pair in pairs
        ]
        for spec, impl in declared:
            if not registry.has(spec):
                registry.register(spec, impl)
        registry.publish({spec.name for spec, _ in declared} - (set() if public else offered), public)
    _unbind_modules(package, {spec.mode for spec, _ in declared})
    return sorted((spec for spec, _ in declared), key=lambda spec: spec.name)


def _unbind_modules(package: str, modes: set[str]) -> None:
    """Deletes the attributes of a package that are modules and hide the package's functions.

    The import of the module ``my_kernels.rmsnorm`` sets the attribute ``rmsnorm`` of ``my_kernels`` to this module. Python then
    does not call the package's ``__getattr__``, which returns the function ``rmsnorm`` (see `standalone.functions_of`).
    `importlib.import_module` still finds the module.
    """
    parent = sys.modules[package]
    if "__getattr__" not in vars(parent):
        return
    for name, value in list(vars(parent).items()):
        if value is sys.modules.get(f"{package}.{name}", parent) and (name in modes or hasattr(vars(value).get(name), "operator")):
            delattr(parent, name)


def register_kernel(
    family: str,
    mode: str,
    *,
    name: str | None = None,
    solution: str,
    capability: CapabilityRequirement | None = None,
    signatures: Iterable[FormatSignature] | None,
    traits: Mapping[str, Any] | None = None,
    priority: Priority | int = Priority.PERFORMANT,
    tags: Iterable[str] | None = None,
    aligned_caches: tuple[str, ...] = (),
    only_by_name: str = "",
    accuracy: str = "",
    weight_preprocessor: Callable[..., Any] | str | None = None,
    tunables: Mapping[str, Iterable[Any]] | None = None,
    tunable_if: Callable[[Any, Mapping[str, Any]], str | None] | None = None,
) -> Callable[[F], F]:
    """Declares a kernel. Returns a decorator for the launcher. The decorator can also be called with ``"module:function"``; then
    the launcher is imported when the kernel is first selected.

    Args:
        family, mode: the operator, e.g. ``"attention", "mha_prefill"``.
        name: the kernel's name, unique among all kernels; ``f"{solution}_{mode}"`` if not given.
        solution: the backend: the toolkit or library that the kernel is made with.
        capability: requirements of the platform; no requirements if omitted.
        signatures: the accepted operand formats; None for all.
        traits: constraints by trait. The kernel does not have the feature of any flag that is not mentioned.
        priority: 0 to 19, see `Priority`.
        tags: some of `TAGS`.
        aligned_caches: cache parameters whose rows must start at multiples of 16 bytes. The kernel copies other caches whole at
            every call: it warns once (`tokenspeed_kernel_base.alignment.aligned_cache`), and `explain` reports the copy.
        only_by_name: a precondition that no trait expresses and that the caller must ensure. If given, only requests that name the
            kernel may select it.
        accuracy: a bound of the kernel's error, within the error that the operator allows. `explain` shows this text.
        weight_preprocessor: converts weights to the kernel's layout at load time; a function or ``"module:function"``.
        tunables: values to try, by name: ``{"block_n": [64, 128]}``. The implementation takes each as a keyword-only parameter. The
            parameter's default applies if there is no measurement. Selection binds the measured configuration to the
            implementation, so calls need not look it up.
        tunable_if: ``tunable_if(request, configuration)`` returns why a configuration is invalid for a `Request` (its ``traits``
            and ``sizes``), or None. Invalid configurations are neither measured nor used.

    Raises:
        RegistrationError: see `KernelRegistry.register`.

    ::

        @register_kernel("norm", "rmsnorm", solution="mine", signatures=format_signatures("x", "dense", {torch.bfloat16}))
        def rmsnorm(x, weight, eps, residual, out, residual_out): ...

        register_kernel("norm", "rmsnorm", solution="mine", signatures=None)("my_package.norm:rmsnorm")
    """
    frame = sys._getframe(1)
    module = str(frame.f_globals.get("__name__", "?"))
    spec = KernelSpec(
        name=f"{solution}_{mode}" if name is None else name,
        family=family,
        mode=mode,
        solution=solution,
        capability=capability or CapabilityRequirement(),
        format_signatures=signatures,  # type: ignore[arg-type]
        traits=traits or {},
        priority=priority,
        tags=tags or frozenset(),  # type: ignore[arg-type]  # checked and frozen by KernelSpec
        aligned_caches=aligned_caches,
        only_by_name=only_by_name,
        accuracy=accuracy,
        weight_preprocessor=weight_preprocessor,
        tunables=tunables or {},  # type: ignore[arg-type]  # likewise
        tunable_if=tunable_if,
        package=module.partition(".")[0],
        origin=f"{frame.f_code.co_filename}:{frame.f_lineno}",
    )

    def add(impl: F) -> F:
        KernelRegistry.get().register(spec, impl)  # type: ignore[arg-type]
        _declared.setdefault(module, []).append((spec, impl))  # type: ignore[arg-type]
        return impl

    return add


def describe_kernel(name: str) -> str:
    """Returns a kernel's name and the facts about it as text, one fact per line. Raises KeyError for an unknown name."""
    registry = KernelRegistry.get()
    ((spec, impl),) = registry.declarations([name])
    capability = spec.capability
    names = {int(priority): priority.name.lower() for priority in Priority}
    facts = {
        "operator": spec.operator,
        "solution": spec.solution,
        "package": spec.package or "none",
        "priority": f"{spec.priority}" + (f" ({names[spec.priority]})" if spec.priority in names else ""),
        "vendors": ", ".join(sorted(capability.vendors)) if capability.vendors is not None else "any",
        "architectures": f"{capability.min_arch_version or 'any'} to {capability.max_arch_version or 'any'}",
        "platform features": ", ".join(sorted(capability.required_features)) or "none",
        "probe": _qualified_name(capability.probe),
        "formats": "any" if spec.format_signatures is None else " | ".join(sorted(map(str, spec.format_signatures))),
        "traits": "; ".join(f"{k}: {v}" for k, v in sorted(spec.traits.items())) or ("any" if spec.universal else "none"),
        "undeclared flags": "served" if spec.universal else "not served",
        "tunables": "; ".join(f"{k}: {', '.join(map(str, v))}" for k, v in spec.tunables.items()) or "none",
        "tunable if": _qualified_name(spec.tunable_if),
        "weight preprocessor": _qualified_name(spec.weight_preprocessor),
        "tags": "; ".join(f"{tag}: {TAGS[tag]}" for tag in sorted(spec.tags)) or "none",
        "ignored parameters": ", ".join(sorted(registry.ignored_parameters(name))) or "none",
        "aligned caches": ", ".join(spec.aligned_caches) or "none",
        "only by name": spec.only_by_name or "no",
        "accuracy": spec.accuracy or "as the operator says",
        "serves": "everyone" if registry.is_public(name) else f"the functions of {spec.package}",
        "implementation": _qualified_name(impl),
        "disabled": registry.why_disabled(name) or "no",
        "declared by": spec.origin or "unknown",
    }
    width = max(map(len, facts))
    return "\n".join([name, *(f"  {label:<{width}} {value}" for label, value in facts.items())])


def _qualified_name(function: Callable[..., Any] | str | None) -> str:
    """The qualified name of a function, ``module:name``; ``"none"`` without a function."""
    if function is None or isinstance(function, str):
        return function or "none"
    inner = inspect.unwrap(getattr(function, "func", function))
    return f"{_module_of(function)}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"
