"""Measures how much faster tuned kernels and configurations are than untuned ones, at twelve shapes of GPT-OSS 120B. Needs a GPU.

    python packages/tokenspeed-kernel/benchmarks/tuning.py --output tuning.json

Every shape is tuned, starting without tuned results. Then two candidates are measured again, alternating, on the same inputs, and
in CUDA graphs as in tuning: the kernel and configuration that tuning chose, and those that are selected without tuned results. The
times from tuning are not used, because the fastest of many measurements is partly fastest by chance. If both candidates are the
same kernel and configuration, the ratio of their times shows the noise.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel import reload_settings
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import captured, sample
from tokenspeed_kernel.workbench.tuning import tune_case
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import kernel_override
from tokenspeed_kernel_base.traits import format_traits

# Operator, case, and the seconds that tuning on the case may take, including compilation.
SHAPES = (
    ("mha_decode_with_kvcache", "gpt-oss-120b full layer 64 x 8192", 14),
    ("mha_decode_with_kvcache", "gpt-oss-120b full layer 256 x 1024", 6),
    ("mha_decode_with_kvcache", "gpt-oss-120b full layer 1 x 32768", 6),
    ("mha_decode_with_kvcache", "gpt-oss-120b sliding layer 64 x 8192", 14),
    ("mha_prefill", "gpt-oss-120b full layer 4 x 4096", 20),
    ("mha_prefill", "gpt-oss-120b full layer 16 x 1024", 6),
    ("mha_prefill", "gpt-oss-120b full layer 1 x 8192", 6),
    ("moe_apply", "gpt-oss-120b decode 1", 14),
    ("moe_apply", "gpt-oss-120b decode 16", 14),
    ("moe_apply", "gpt-oss-120b decode 256", 14),
    ("moe_apply", "gpt-oss-120b decode 1024", 10),
    ("moe_apply", "gpt-oss-120b decode 8192", 10),
)


def bound(operator: str, case: Case, kernel: str, config: Mapping[str, Any], device: torch.device) -> Callable[[], Any]:
    """Returns a callable that runs a kernel with a configuration on the inputs of a case."""
    op = get_operator(operator)
    prepared = op.prepared(op.complete(case.build(device)), KernelRegistry.get().get_by_name(kernel))
    values = tuple(prepared.values())
    with kernel_override(op.family, op.mode, kernel, config=config):
        call = op.function.bind(*values, override=kernel)
    return lambda: call(*values)


def measure(operator: str, name: str, budget_s: float, device: torch.device) -> dict[str, Any] | None:
    """Tunes one case, then measures the tuned and the untuned kernel. Returns None if tuning had no candidates to choose from.

    ``name``: the case's name.
    """
    begun = time.monotonic()
    case = next(case for case in get_operator(operator).all_cases() if case.name == name)
    outcomes = [found for found in tune_case(operator, case, device, budget_s=budget_s) if found.results and found.untuned]
    if not outcomes:
        return None
    outcome = min(outcomes, key=lambda found: found.results[0].us)
    best = outcome.results[0]
    assert outcome.untuned is not None
    calls = {
        "untuned": bound(operator, case, outcome.untuned, {}, device),
        "tuned": bound(operator, case, best.kernel, dict(best.config), device),
    }
    calls = {label: captured([call], device) for label, call in calls.items()}
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(5):
        for label, call in calls.items():
            times[label].extend(sample(call, device, budget_s=0.06))
    medians = {f"{label}_us": statistics.median(found) for label, found in times.items()}
    configuration = format_traits(best.config) or "its own choice"
    return {"operator": operator, "case": name, "kernel": best.kernel, "configuration": configuration, **medians} | {
        "gain": medians["untuned_us"] / medians["tuned_us"],
        "seconds": time.monotonic() - begun,
        "trials": outcome.to_dict()["trials"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    device = torch.device("cuda", 0)
    rows = []
    with tempfile.TemporaryDirectory() as tables, torch.no_grad():
        os.environ["TOKENSPEED_KERNEL_TUNED"] = tables
        reload_settings()
        for operator, name, budget_s in SHAPES:
            row = measure(operator, name, budget_s, device)
            torch.cuda.empty_cache()
            if row is None:
                print(f"{operator} {name}: nothing to choose from", flush=True)
                continue
            rows.append(row)
            print(
                f"{operator:<24} {name:<38} {row['untuned_us']:9.2f} -> {row['tuned_us']:9.2f} us  x{row['gain']:.3f}  "
                f"{row['kernel']} ({row['configuration']})  {row['seconds']:.0f} s",
                flush=True,
            )
    mean = math.exp(statistics.fmean(math.log(row["gain"]) for row in rows))
    print(f"geometric mean of {len(rows)} shapes: x{mean:.4f}")
    write_result(options.output, device, geometric_mean=mean, rows=rows)


if __name__ == "__main__":
    main()
