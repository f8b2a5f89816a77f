"""How fast is a kernel? Timing, and reports that say what was measured on what."""

from tokenspeed_kernel.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel.benchmark.run import Metadata, Report, Row, bench_case, bench_kernel, collect_metadata
from tokenspeed_kernel.benchmark.timing import Timing, measure, measure_graph

__all__ = [
    "Metadata",
    "Report",
    "Roofline",
    "Row",
    "Timing",
    "bench_case",
    "bench_kernel",
    "collect_metadata",
    "measure",
    "measure_graph",
    "measure_roofline",
]
