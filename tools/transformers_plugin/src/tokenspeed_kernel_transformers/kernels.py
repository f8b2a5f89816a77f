"""The core's operators, and which of its kernels run a call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Operators are overloaded for type checkers; calls with options in a dict match none of the overloads.
OPS: Any = import_module("tokenspeed_kernel")


class NotServedError(ValueError):
    """Our kernels do not run something; the message says why."""


def kernel_of(operator: str, **arguments: Any) -> str:
    """The name of the kernel that the core selects for a call.

    Raises:
        NotServedError: the operator rejects the call, or no kernel is eligible. On a GPU, kernels that wait for the device do not
            count, and neither do references.
    """
    try:
        explanation = getattr(OPS, operator).explain(**arguments)
    except (TypeError, ValueError) as error:
        raise NotServedError(f"{operator}: {error}") from error
    chosen = explanation.chosen
    if chosen is None:
        raise NotServedError(str(explanation))
    if not explanation.request.platform.is_cpu and ("waits" in chosen.tags or chosen.solution == "reference"):
        raise NotServedError(f"{operator}: {chosen.name} waits for the device\n{explanation}")
    return str(chosen.name)
