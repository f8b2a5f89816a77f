"""The functions through which the base package finds and measures tuned results. This module is a
`tokenspeed_kernel_base.measured.Source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_kernel.workbench.tuned.tables import find, has_results
from tokenspeed_kernel_base.explanation import Request

__all__ = ["autotune", "find", "has_results"]


def autotune(request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
    """Measures the eligible kernels on one call's arguments, see `tokenspeed_kernel.workbench.tuning.autotune`."""
    from tokenspeed_kernel.workbench.tuning.autotune import autotune as measure  # imported here: it is large, and rarely used

    return measure(request, arguments, budget_s)
