"""Tests ``python -m gpt_oss capture``: an engine's calls are captured on the meta device, without data and without the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_models import make_config, tensors_of
from test_engine import make_engine
from typer.testing import CliRunner

from gpt_oss.__main__ import app
from gpt_oss.config import alternating
from gpt_oss.model import GptOss
from gpt_oss.shapes_only import capture_calls
from tokenspeed_kernel import shape_capture
from tokenspeed_kernel.workbench.watching import load, load_cases

SIZES = {"pages": 8, "page_size": 4, "prefill_tokens": 5, "max_sequences": 2, "max_positions": 16}
PARTS = {"gemm.mm", "norm.rmsnorm"}  # composed operators also call these


def without_devices(told: Any) -> Any:
    """Returns a described argument without the device of each tensor in it."""
    if isinstance(told, Mapping):
        return {name: without_devices(value) for name, value in told.items() if name != "device"}
    return [without_devices(value) for value in told] if isinstance(told, list) else told


def captured(path: Path) -> set[str]:
    records = [(each["operator"], without_devices(each["arguments"])) for each in load(path).records]
    return {json.dumps(record, sort_keys=True) for record in records}


def test_the_calls_are_those_of_an_engine_with_data(tmp_path: Path) -> None:
    """A composed operator's body also makes calls if it runs. On the meta device, only the outer calls are captured."""
    config = make_config(layer_types=alternating(3))
    made = capture_calls(tmp_path / "meta", config, "cpu", torch.float32, **SIZES)
    model = GptOss(config, tensors_of(config), torch.float32, max_positions=SIZES["max_positions"])
    limits = {name: SIZES[name] for name in ("prefill_tokens", "max_sequences")}
    with shape_capture(tmp_path / "real"):
        engine = make_engine(model, SIZES["pages"], decode="static", warm="all", **limits)
    assert engine.warmed is not None
    assert made.passes == engine.warmed.passes
    without_data, with_data = captured(tmp_path / "meta"), captured(tmp_path / "real")
    assert without_data
    assert without_data <= with_data
    outer = {operator for operator, _ in map(json.loads, without_data)} - PARTS
    assert {record for record in with_data if json.loads(record)[0] in outer} == {
        record for record in without_data if json.loads(record)[0] in outer
    }


def test_the_command_captures_cases_that_can_be_run(tmp_path: Path) -> None:
    file = tmp_path / "calls.capture"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = ["capture", str(file), "--arch", "h200", "--preset", "tiny", "--activation-dtype", "fp8", *sizes]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    cases = load_cases(file, "moe_apply")
    assert cases
    assert {case.case.build("cpu")["plan"].activation_dtype for case in cases} == {"fp8"}
    assert {each["kernel"] for each in load(file).records} == {""}


def test_the_calls_of_quantised_weights(tmp_path: Path) -> None:
    config = make_config(quantization="mxfp4", intermediate_size=32)
    made = capture_calls(tmp_path / "calls", config, "h200", **SIZES, dense_weights="fp8")
    assert made.passes > 0
    dtypes = {case.case.build("cpu")["qkv_weight"].dtype for case in load_cases(tmp_path / "calls", "rmsnorm_qkv_rope")}
    assert dtypes == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("option", "named"),
    [("--arch=gtx", "gtx"), ("--preset=large", "large"), ("--activation-dtype=fp7", "fp7"), ("--dense-weights=fp7", "fp7")],
)
def test_wrong_options(tmp_path: Path, option: str, named: str) -> None:
    result = CliRunner().invoke(app, ["capture", str(tmp_path / "calls"), "--arch=h200", "--preset=tiny", option])
    assert result.exit_code == 2
    assert named in result.output
