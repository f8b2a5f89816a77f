"""Tests the ranges of the timing model's constants, and the times that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gfx950_emulator import emulated_gfx942, emulated_gfx950, ranges
from gfx950_emulator import hardware as hw
from gfx950_emulator.driver import LaunchReport
from gfx950_emulator.snippet import Snippet
from gfx950_emulator.timing import instruction_costs, instructions_of, simulate

from .kernels import elementwise

DEVICES = [hw.MI355X, hw.MI300X]
LARGER_IS_FASTER = ("_bytes", "_per_second", "_per_cycle", "_hz")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_the_model_lies_between_the_bounds(device: hw.Device) -> None:
    fields = {field.name for field in dataclasses.fields(device)}
    for constant in ranges.UNCERTAIN[device.name]:
        assert constant.name in fields
        assert constant.basis
        value, faster_up = getattr(device, constant.name), constant.name.endswith(LARGER_IS_FASTER)
        low, high = (constant.slow, constant.fast) if faster_up else (constant.fast, constant.slow)
        assert low <= value <= high, constant
        assert low < high, constant


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_each_constant_is_listed_once(device: hw.Device) -> None:
    names = [constant.name for constant in ranges.UNCERTAIN[device.name]]
    assert len(names) == len(set(names))


def test_the_bounds_of_one_constant() -> None:
    only = ranges.with_constants(hw.MI355X, "fast", frozenset({"conversion_cycles"}))
    assert only == dataclasses.replace(hw.MI355X, conversion_cycles=4)
    assert ranges.with_constants(hw.MI355X, "slow").hbm_latency == 1536


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match='end must be "fast" or "slow", got \'high\''):
        ranges.with_constants(hw.MI355X, "high")
    with pytest.raises(ValueError, match=r"got \['simds'\]"):
        ranges.with_constants(hw.MI355X, "slow", frozenset({"simds"}))


@pytest.mark.parametrize(
    ("name", "instruction", "cycles"),
    [
        ("conversion_cycles", "v_cvt_pk_f32_fp8_e32 v[2:3], v1", {"fast": 4, "slow": 16}),
        ("transcendental_cycles", "v_exp_f32_e32 v2, v1", {"fast": 8, "slow": 16}),
        ("lds_port_store_bytes", "ds_write_b128 v0, v[4:7]", {"fast": 20, "slow": 4 + 1024 / 37}),
    ],
)
def test_a_constant_is_used(name: str, instruction: str, cycles: dict[str, float]) -> None:
    lanes = np.arange(64, dtype=np.uint32)
    snippet = Snippet(
        "\n".join([*[instruction] * 200, "s_waitcnt lgkmcnt(0)"]),
        counters=True,
        lds=1024,
        v={0: 16 * lanes, **dict.fromkeys(range(1, 8), 0)},
    )
    snippet.run()
    for end, wanted in cycles.items():
        costs = instruction_costs(snippet.counters, ranges.with_constants(hw.MI355X, end, frozenset({name})))
        result = simulate(costs, [instructions_of(snippet.counters, 0)])
        assert result.cycles / 200 == pytest.approx(wanted, rel=0.03)


def _launch(emulated: Callable[..., Any]) -> LaunchReport:
    x, out = torch.arange(4096.0), torch.empty(4096)
    with emulated(counters=True) as emulator:
        elementwise.add[(4,)](x, x, out, 4096, 1024)
    return emulator.launches[0]


@pytest.mark.parametrize("emulated", [emulated_gfx950, emulated_gfx942])
def test_the_times_are_ordered(emulated: Callable[..., Any]) -> None:
    found = ranges.predict_range(_launch(emulated))
    assert 0 < found.fast.seconds < found.modelled.seconds < found.slow.seconds
    assert found.modelled.device in DEVICES
    assert str(found).count(" ") == 4
    assert f"{found.modelled.seconds * 1e6:.2f} us (" in str(found)
