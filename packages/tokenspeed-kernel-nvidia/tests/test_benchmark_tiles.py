"""Tests the benchmark of decode attention's K/V tiles without a GPU: the emulator runs the kernels, and nothing is timed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tokenspeed_kernel")
sm90_emulator = pytest.importorskip("sm90_emulator")
if torch.cuda.is_available():
    pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process", allow_module_level=True)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("h200_decode_tiles")
    # Each call runs once, and a graph is reported to take 60 us.
    monkeypatch.setattr(module, "captured", lambda calls, device: calls)
    monkeypatch.setattr(module, "sample", lambda *_, **__: [60.0])
    monkeypatch.setattr(module, "CACHED_BYTES", 0.0)
    return module


@pytest.mark.parametrize("window", [-1, 127])
def test_rows(tiles: Any, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Asserts that every variant agrees with the selected configuration."""
    monkeypatch.setattr(tiles, "BLOCKS", (16, 32))
    monkeypatch.setattr(tiles, "RESIDENT", (1, 2))
    case = tiles.Case(9, 30, 300, window)
    with sm90_emulator.emulated_sm90(seed=1):
        found = [*tiles.measured(case, torch.device("cpu"))]
    assert [row["variant"] for row in found] == [
        "selected",
        "16 keys, 1 CTAs",
        "16 keys, 2 CTAs",
        "32 keys, 1 CTAs",
        "32 keys, 2 CTAs",
    ]
    assert {row["us"] for row in found} == {60.0 / (tiles.PASSES * 2)}
    assert found[0]["error"] == 0
    assert all(row["error"] < 0.02 for row in found)


def test_cases_have_the_class_of_work_of_their_variants(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that a call of each case would select the configuration that the program calls selected."""
    for case in tiles.CASES:
        shown = case.longest if case.window < 0 else min(case.longest, case.window + 1)
        assert (shown > tiles.launch.WHOLE) == (case.work == "much")
        if case.work == "much":
            assert case.sequences * shown >= tiles.launch.LITTLE
            assert case.sequences > tiles.launch.FEW
        else:
            assert case.sequences * tiles.KV_HEADS < tiles.launch.MANY


def test_every_variant_has_a_stage_for_each_warp(tiles: Any) -> None:
    found = tiles.variants_of("much")
    assert next(iter(found.values())) == found["32 keys, 1 CTAs"]
    assert "128 keys, 2 CTAs" not in found
    assert all(config.stages >= tiles.CONSUMERS for config in found.values())
