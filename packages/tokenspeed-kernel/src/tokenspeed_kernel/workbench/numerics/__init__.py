"""Correctness of kernels: comparison of results, tolerances, verification against the reference, shrinking of failing calls, and
the conformance kit, which checks a kernel against its declaration."""

from tokenspeed_kernel.workbench.numerics.compare import Comparison, Element, compare, compare_tensors
from tokenspeed_kernel.workbench.numerics.conformance import CHECKS, Finding, Options, conformance
from tokenspeed_kernel.workbench.numerics.shrink import Shrunk, shrink
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong, summary
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, Tolerance, tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Fault, Status, default_device, verify_case, verify_kernel

__all__ = [
    "CHECKS",
    "EXACT",
    "CaseResult",
    "Comparison",
    "Element",
    "Fault",
    "Finding",
    "Options",
    "Shrunk",
    "Status",
    "Tolerance",
    "assert_none_wrong",
    "compare",
    "compare_tensors",
    "conformance",
    "default_device",
    "shrink",
    "summary",
    "tolerance_for",
    "verify_case",
    "verify_kernel",
]
