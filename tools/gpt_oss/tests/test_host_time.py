"""Tests the script that measures the host time of a pass without the device."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tokenspeed_kernel import watch_calls

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "host_time.py"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")


def test_it_measures_a_pass_of_a_device_that_is_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("host_time", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output, kernels = tmp_path / "result.json", set()
    with watch_calls(lambda call, run: (kernels.add(call.kernel), run)[1]):
        # More rows than are dequantised in registers.
        sizes = ["--preset", "tiny", "--layers", "3", "--prefill", "2x300", "--dense-weights", "fp8"]
        module.main([*sizes, "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["prompts"], row["tokens"], row["dense_weights"]) == (2, 300, "fp8")
    assert row["calls_a_layer"] > row["torch_operators_a_layer"] > 0
    assert set(row["operators_us"]) == {"rmsnorm_qkv_rope", "mha_prefill", "mm", "rmsnorm_moe_topk", "moe_apply"}
    assert kernels >= {"triton_rmsnorm", "triton_mm_dequantised_fp8"}
    assert "us a layer" in capsys.readouterr().out
