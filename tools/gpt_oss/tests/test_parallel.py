"""Runs the scripts for torchrun, with several processes on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import run_python

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "parallel.py"
TINY = ("--preset", "tiny")


def torchrun(*arguments: str) -> str:
    """Runs a script with two processes, and returns their output."""
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "torch.distributed.run", *options, *arguments, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_model_that_processes_share_generates() -> None:
    said = torchrun("-m", "gpt_oss.parallel", *TINY, "--experts", "whole", "--tokens", "4", "--batch", "2", "--prompt", "9")
    assert "2 x 9 + 4 tokens" in said
    assert "ms per decode step" in said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("experts", ["parts", "whole"])
def test_the_benchmark(experts: str, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    sizes = ("--batches", "1,3", "--context", "20", "--steps", "2", "--prefills", "2x9", "--repeats", "1", "--check", "2")
    sizes += ("--routed-tokens", "3,4")
    said = torchrun(str(BENCHMARK), *TINY, "--experts", experts, *sizes, "--output", str(output))
    report = json.loads(output.read_text())
    assert report["ranks"] == 2
    assert [row["batch"] for row in report["decode"]] == [1, 3]
    assert all(row["milliseconds_bare"] > 0 and row["milliseconds_a_step"] > 0 for row in report["decode"])
    assert report["prefill"][0]["tokens_per_second"] > 0
    assert report.get("routed_tokens") == ([3, 4] if experts == "parts" else None)
    assert "comm.all_reduce" in " ".join(report["kernels"])
    assert report["check"]["positions"] == 3 * 41
    assert report["check"]["same_on_every_rank"]
    assert report["check"]["mean_kl"] < 0.1
    assert str(tmp_path) not in report["metadata"]["command"]
    assert f"--experts {experts}" in report["metadata"]["command"]
    assert "prefill 2 x 9:" in said
