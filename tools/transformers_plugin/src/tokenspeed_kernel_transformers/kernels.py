"""The core's operators, and `kernel_of`, which names the kernel that runs a call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Operators are overloaded for type checkers; calls with options in a dict match none of the overloads.
OPS: Any = import_module("tokenspeed_kernel")


class NotServedError(ValueError):
    """No kernel of ours supports a layer or a batch; the message says why."""


def kernel_of(operator: str, **arguments: Any) -> str:
    """Returns the name of the kernel that the core selects for a call.

    Raises:
        NotServedError: the operator rejects the call, or no kernel is eligible. On a GPU, references and kernels that wait for the
            device count as not eligible.
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
