"""Tests profiler scopes and shape capture."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.watching import (
    ShapeCapture,
    kernel_scope,
    load,
    shape_capture,
    start_profiling,
    start_shape_capture,
    stop_profiling,
    stop_shape_capture,
)
from tokenspeed_kernel_base import watch

rmsnorm = tokenspeed_kernel.rmsnorm
X, W = torch.ones(2, 4), torch.ones(4)


def found(path: Path) -> list[tuple[str, int]]:
    return [(record["operator"], record["count"]) for record in load(path).records]


def test_capture_counts_calls_by_description(tmp_path: Path) -> None:
    rmsnorm(X, W)
    with shape_capture(tmp_path / "made" / "shapes.jsonl") as capture:
        rmsnorm(X, W)
        rmsnorm(X, W, residual=X)
        rmsnorm(X, W)
        assert len(capture.get()) == 2
    rmsnorm(X, W)
    records = load(tmp_path / "made" / "shapes.jsonl").records
    assert [r["count"] for r in records] == [2, 1]
    first = records[0]
    assert first["operator"] == "norm.rmsnorm"
    assert first["kernel"] == rmsnorm.explain(X, W).chosen.name
    assert first["traits"] == {"hidden": 4, "residual": False, "wide_residual": False}
    assert first["arguments"]["x"] == {"dtype": "float32", "shape": [2, 4], "device": "cpu"}
    assert first["arguments"]["residual"] is None
    assert first["arguments"]["eps"] == 1e-5
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["shapes.jsonl"]


def test_capture_is_written_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), shape_capture(tmp_path / "shapes.jsonl"):  # noqa: PT012
        rmsnorm(X, W)
        raise RuntimeError
    assert found(tmp_path / "shapes.jsonl") == [("norm.rmsnorm", 1)]


def test_a_capture_extends_an_existing_file(tmp_path: Path) -> None:
    for _ in range(2):
        with shape_capture(tmp_path / "shapes.jsonl"):
            rmsnorm(X, W)
    assert found(tmp_path / "shapes.jsonl") == [("norm.rmsnorm", 2)]


def test_captures_nest(tmp_path: Path) -> None:
    """The end of an inner capture must not end the outer capture."""
    with shape_capture(tmp_path / "outer.jsonl") as outer:
        rmsnorm(X, W)
        with shape_capture(tmp_path / "inner.jsonl") as inner:
            rmsnorm(X, W)
        rmsnorm(X, W)
        assert outer is not inner
    assert found(tmp_path / "outer.jsonl") == [("norm.rmsnorm", 3)]
    assert found(tmp_path / "inner.jsonl") == [("norm.rmsnorm", 1)]


def test_start_and_stop(tmp_path: Path) -> None:
    assert stop_shape_capture() == []
    capture = start_shape_capture(tmp_path / "kept.jsonl")
    assert start_shape_capture() is capture
    rmsnorm(X, W)
    with shape_capture() as inner:
        rmsnorm(X, W)
    records = stop_shape_capture(tmp_path / "shapes.jsonl")
    assert [r["count"] for r in records] == [2]
    assert [r["count"] for r in inner.get()] == [1]
    assert load(tmp_path / "shapes.jsonl").records == load(tmp_path / "kept.jsonl").records == records
    rmsnorm(X, W)
    assert [r["count"] for r in capture.get()] == [2]
    assert not watch.watching()


def test_memory_is_bounded() -> None:
    capture = ShapeCapture(max_records=2)
    for n in (1, 2, 3, 4, 1):
        capture.record("f.m", "k", n, {"x": torch.empty(n)}, {})
    assert [r["count"] for r in capture.get()] == [2, 1]
    assert capture.dropped == 2
    assert capture.contents().dropped == {"f.m": 2}
    capture.reset()
    assert (capture.get(), capture.dropped) == ([], 0)


def test_a_capture_in_a_file_cannot_be_cleared(tmp_path: Path) -> None:
    with shape_capture(tmp_path / "shapes") as capture, pytest.raises(ValueError, match="kept in a file cannot be cleared"):
        capture.clear()


@dataclasses.dataclass(frozen=True)
class Weights:
    main: Tensor
    blocks: tuple[int, ...]


def test_arguments_without_their_data() -> None:
    capture = ShapeCapture()
    arguments = {
        "weights": Weights(torch.ones(2, dtype=torch.float8_e4m3fn), (1, 32)),
        "sliced": torch.ones(4, 6)[:, 1:3],
        "dtype": torch.bfloat16,
        "blocks": (128, 128),
        "lengths": [1, 2],
        "other": object(),
        "text": "t",
    }
    capture.record("f.m", "k", 1, arguments, {"dtype": torch.float16, "flag": True})
    (record,) = capture.get()
    assert record["arguments"] == {
        "weights": {"main": {"dtype": "float8_e4m3fn", "shape": [2], "device": "cpu"}, "blocks": [1, 32]},
        "sliced": {"dtype": "float32", "shape": [4, 2], "device": "cpu", "stride": [6, 1]},
        "dtype": "bfloat16",
        "blocks": [128, 128],
        "lengths": [1, 2],
        "other": "object",
        "text": "t",
    }
    assert record["traits"] == {"dtype": "float16", "flag": True}
    json.dumps(record)


def test_capture_from_threads() -> None:
    def work() -> None:
        for _ in range(100):
            rmsnorm(X, W)

    with shape_capture() as capture:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [r["count"] for r in capture.get()] == [400]


def test_calls_inside_compiled_code_are_captured() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rmsnorm(x, W), fullgraph=True)
    compiled(X)
    with shape_capture() as capture:
        compiled(X)
    assert [r["operator"] for r in capture.get()] == ["norm.rmsnorm"]


def scopes(run: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return [event.name for event in profile.events() if event.name.startswith(("norm.", "my.", "testing."))]


def test_profiling_puts_every_call_into_a_scope() -> None:
    name = rmsnorm.explain(X, W).chosen.name
    rmsnorm(X, W)
    start_profiling()
    start_profiling()
    try:
        assert scopes(lambda: (rmsnorm(X, W), rmsnorm(X, W))) == [f"norm.rmsnorm[float32] {name} 2x4"] * 2
    finally:
        stop_profiling()
        stop_profiling()
    assert scopes(lambda: rmsnorm(X, W)) == []


def test_scopes_by_hand() -> None:
    def run() -> None:
        with kernel_scope("my", "op", torch.bfloat16, kernel_name="k", flops=3), kernel_scope("my", "other", "mxfp4"):
            pass

    assert scopes(run) == []
    start_profiling()
    try:
        assert scopes(run) == ["my.op[bfloat16] k", "my.other[mxfp4]"]
    finally:
        stop_profiling()


def without_formats(x: Tensor) -> Tensor:
    return x + 1


def test_an_operator_without_formats_is_observed_too(declare: Callable[..., Any]) -> None:
    function = declare(without_formats)
    start_profiling()
    try:
        assert scopes(lambda: function(X)) == [f"testing.{function.__name__}[float32] reference_{function.__name__} 2x4"]
    finally:
        stop_profiling()
