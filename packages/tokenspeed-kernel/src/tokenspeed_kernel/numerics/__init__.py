"""Is a kernel right? Comparing results, how far they may differ and why, and running kernels against the reference."""

from tokenspeed_kernel.numerics.compare import Comparison, Element, compare, compare_tensors
from tokenspeed_kernel.numerics.tolerance import EXACT, Tolerance, tolerance_for
from tokenspeed_kernel.numerics.verify import CaseResult, Status, default_device, verify_case, verify_kernel

__all__ = [
    "EXACT",
    "CaseResult",
    "Comparison",
    "Element",
    "Status",
    "Tolerance",
    "compare",
    "compare_tensors",
    "default_device",
    "tolerance_for",
    "verify_case",
    "verify_kernel",
]
