"""The source of measured results that the core installs in the base; see `tokenspeed_kernel_base.measured.Source`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_kernel.workbench.tuned.tables import find, has_results
from tokenspeed_kernel_base.explanation import Request

__all__ = ["autotune", "find", "has_results"]


def autotune(request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
    """Measures for one call; see `tokenspeed_kernel.workbench.tuning.autotune`."""
    from tokenspeed_kernel.workbench.tuning.autotune import autotune as measure  # large, and most programs never measure

    return measure(request, arguments, budget_s)
