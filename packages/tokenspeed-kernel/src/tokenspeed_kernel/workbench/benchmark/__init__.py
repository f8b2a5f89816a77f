"""Benchmarks: timing, comparisons with baselines and earlier reports, and reports that also record the hardware and software."""

from tokenspeed_kernel.workbench.benchmark.baselines import Baseline, Unsupported, baseline, failure_of, load_baselines
from tokenspeed_kernel.workbench.benchmark.compare import Comparison, Difference, Ratio, Verdict, compare, ratio_of
from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata, write_result
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

# Names of earlier releases, kept as aliases.
Peer, load_peers, peer = Baseline, load_baselines, baseline

__all__ = [
    "Baseline",
    "Comparison",
    "Difference",
    "Launch",
    "Metadata",
    "Method",
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
    "baseline",
    "bench",
    "bench_case",
    "bench_kernel",
    "cached_roofline",
    "collect_metadata",
    "compare",
    "failure_of",
    "load_baselines",
    "load_report",
    "measure",
    "measure_graph",
    "measure_roofline",
    "ratio_of",
    "write_result",
]
