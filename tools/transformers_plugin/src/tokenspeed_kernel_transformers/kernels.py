"""The core's operators, and `kernel_of`, which names the kernel that runs a call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokenspeed_kernel_base.served import NotServedError, kernel_for

__all__ = ["OPS", "NotServedError", "kernel_of"]

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module("tokenspeed_kernel")


def kernel_of(operator: str, **arguments: Any) -> str:
    """Returns the name of the kernel that the core selects for a call, see `kernel_for`."""
    return kernel_for(getattr(OPS, operator), arguments).name
