"""A package of kernels that works alone: each operator that its kernels implement becomes a function of the package.

In the package's ``__init__.py``::

    from tokenspeed_kernel_base.standalone import functions_of

    __getattr__, __dir__ = functions_of(__name__)

Then ``from my_kernels import mha_prefill`` imports the package's function for the operator. The function has the operator's
signature, docstring and checks, and selects only kernels that ``my_kernels`` declares. The first access to a function discovers the
kernels and imports PyTorch.

An operator that the package itself declares is an attribute, too. It selects among all kernels that are registered for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

OPERATORS = "tokenspeed_kernel_base.ops"


def functions_of(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__``. They make each operator that the package's kernels implement an
    attribute."""

    @functools.cache
    def operators() -> Mapping[str, Any]:
        from tokenspeed_kernel_base.discovery import import_modules
        from tokenspeed_kernel_base.operator import get_operator
        from tokenspeed_kernel_base.operator import operators as all_operators
        from tokenspeed_kernel_base.registry import register_package

        specs = register_package(package, public=False)
        own = {op.mode: op for op in all_operators() if _declares(package, op)}
        for family in sorted({spec.family for spec in specs if spec.mode not in own}):
            import_modules(f"{OPERATORS}.{family}")
        return own | {spec.mode: get_operator(spec.operator) for spec in specs}

    def get_attribute(name: str) -> Any:
        if name.startswith("_") or name not in operators():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from tokenspeed_kernel_base.operator import plain_function

        op = operators()[name]
        function = op.function if _declares(package, op) else plain_function(op.function, package)
        setattr(sys.modules[package], name, function)
        return function

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *operators()})

    return get_attribute, names


def _declares(package: str, op: Any) -> bool:
    """Whether a module of the package declares the operator."""
    return f"{op.body.__module__}.".startswith(f"{package}.")
