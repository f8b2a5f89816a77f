"""Benchmarks: timing, comparisons with baselines and earlier reports, and reports that record what was measured on what."""

from tokenspeed_kernel.workbench.benchmark.compare import Comparison, Difference, Ratio, Verdict, compare, ratio_of
from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata
from tokenspeed_kernel.workbench.benchmark.peers import Peer, Unsupported, failure_of, load_peers, peer
from tokenspeed_kernel.workbench.benchmark.results import (
    Launch,
    Metadata,
    Method,
    Report,
    ReportError,
    Row,
    appended,
    as_text,
    load_report,
)
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, Share, measure_roofline
from tokenspeed_kernel.workbench.benchmark.roofline_cache import cached_roofline
from tokenspeed_kernel.workbench.benchmark.run import bench, bench_case, bench_kernel
from tokenspeed_kernel.workbench.benchmark.timing import Round, Timing, measure, measure_graph

__all__ = [
    "Comparison",
    "Difference",
    "Launch",
    "Metadata",
    "Method",
    "Peer",
    "Ratio",
    "Report",
    "ReportError",
    "Roofline",
    "Round",
    "Row",
    "Share",
    "Timing",
    "Unsupported",
    "Verdict",
    "appended",
    "as_text",
    "bench",
    "bench_case",
    "bench_kernel",
    "cached_roofline",
    "collect_metadata",
    "compare",
    "failure_of",
    "load_peers",
    "load_report",
    "measure",
    "measure_graph",
    "measure_roofline",
    "peer",
    "ratio_of",
]
