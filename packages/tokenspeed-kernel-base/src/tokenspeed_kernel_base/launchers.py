"""Launchers: the functions that kernels are registered with.

A launcher's parameters are those of the operator's parameters that it uses, in any order. The same holds for hooks. Other code
calls launchers through `Launcher.function`, with all parameters in the operator's order. So an operator can gain a parameter, and
its kernels need no edit. A kernel whose launcher does not name the new parameter is eligible for calls that leave the parameter at
its default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tokenspeed_kernel_base.generated import compile_source
from tokenspeed_kernel_base.interface import Interface
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.spec import KernelSpec, RegistrationError


def check_keywords(spec: KernelSpec, impl: Callable[..., Any]) -> None:
    """Raises RegistrationError if a launcher lacks a keyword that the kernel's declaration requires: a tunable or an aligned
    cache.
    """
    parameters = _parameters(impl)
    if parameters is None:
        return
    unknown = [name for name in spec.aligned_caches if all(p.name != name for p in parameters)]
    if unknown:
        raise RegistrationError(f"{spec.name}: aligned_caches must be parameters, got {', '.join(unknown)} ({spec.origin})")
    settable = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    unsettable = [name for name in spec.tunables if name not in settable]
    if unsettable and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise RegistrationError(
            f"{spec.name}: its implementation must take each tunable as a keyword with a default, after a *; "
            f"it does not take {', '.join(unsettable)}{did_you_mean(unsettable[0], sorted(settable))} ({spec.origin})"
        )


def named_parameters(spec: KernelSpec, impl: Callable[..., Any], interface: Interface) -> tuple[str, ...]:
    """The operator's parameters that a launcher names, in the launcher's order.

    Raises:
        RegistrationError: the launcher names a parameter that the operator lacks, or does not name an output that callers may
            provide.
    """
    parameters = _parameters(impl)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return interface.parameters
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    extra = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    unknown = [name for name in (*names, *extra) if name not in interface.parameters or name in extra]
    missing = [name for name in interface.written if name not in names]
    if unknown or missing:
        problem = (
            f"has no parameter {unknown[0]}{did_you_mean(unknown[0], interface.parameters)}"
            if unknown
            else f"may write to {missing[0]}, so an implementation must take it"
        )
        raise RegistrationError(
            f"{spec.name}: {spec.operator} {problem}. It has ({', '.join(interface.parameters)}), this implementation takes "
            f"({', '.join(p.name for p in parameters)}) ({spec.origin})"
        )
    return names


class Launcher:
    """A kernel's launcher function, checked against its operator's parameters, and a wrapper that takes all of the operator's
    parameters.

    Attributes:
        spec: the kernel's declaration.
        impl: the launcher.
        interface: the interface that the launcher was checked against; None if its operator is not declared.
        ignored: the operator's parameters that the launcher does not name.
        function: takes all the operator's parameters in order, and passes the launcher the parameters that the launcher names. It
            is the launcher itself if both lists of parameters are equal. The kernel's tunables are keywords of both functions.

    Raises:
        RegistrationError: see `check_keywords` and `named_parameters`.
    """

    def __init__(self, spec: KernelSpec, impl: Callable[..., Any], interface: Interface | None) -> None:
        check_keywords(spec, impl)
        self.spec, self.impl, self.interface = spec, impl, interface
        self._all = interface.parameters if interface is not None else ()
        self._names = named_parameters(spec, impl, interface) if interface is not None else ()
        self.ignored = frozenset(self._all).difference(self._names)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        if self._names == self._all:
            return self.impl
        options = ", **_tunables" if self.spec.tunables else ""
        source = f"""\
def {self.spec.mode}({", ".join(self._all)}{options}):
    return _launcher({", ".join(self._names)}{options})
"""
        made = compile_source(self.spec.mode, source, {"_launcher": self.impl}, self.spec.name)
        made.__module__ = getattr(self.impl, "__module__", made.__module__)
        return made


def unchecked(operator: Any, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the operator's signature that calls a launcher with the parameters that the launcher names.

    The function checks nothing and selects nothing. Tests and benchmarks run one launcher with it.

    Args:
        operator: the operator's function.
        launcher: takes some of the operator's parameters. Further keywords of a call, such as tunables, are passed to the launcher.
    """
    op = operator.operator
    names = [p.name for p in _parameters(launcher) or () if p.name in op.names]

    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in kwargs.keys() - set(op.names)}
        arguments = op.bound_arguments(args, kwargs)
        return launcher(*(arguments[name] for name in names), **own)

    return call


def _parameters(impl: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None for a builtin without a signature, which cannot be checked before it is called."""
    try:
        return list(inspect.signature(impl).parameters.values())
    except (TypeError, ValueError):
        return None
