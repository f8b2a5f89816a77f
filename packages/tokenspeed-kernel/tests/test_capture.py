"""Tests captured calls: the recorded descriptions, and the calls that are recreated from the descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.watching import Record, ReplayError, ShapeCapture, described, load, load_cases, merge, replay
from tokenspeed_kernel.workbench.watching.captures import Work
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.variation import Variation, Want

SMALL = [(op, case) for op in tk.operators() for case in op.all_cases() if not case.large]


def capture(op: Any, arguments: dict[str, Any]) -> Record:
    with tk.shape_capture() as found:
        op.function(**arguments)
    # If the operator is composed, the calls of its parts are recorded, too.
    (record,) = (record for record in found.get() if record["operator"] == str(op))
    return record


@pytest.mark.parametrize(("op", "case"), SMALL, ids=[f"{op.mode}-{case.name}" for op, case in SMALL])
def test_a_call_like_a_captured_one_asks_for_the_same(op: Any, case: Case) -> None:
    """Captures and recreates each small case. The recreated call must have the case's request, descriptions of arguments, and
    amount of work."""
    arguments = op.complete(case.build())
    record = capture(op, arguments)
    again = op.complete(replay(record).build())
    op.check_call(again)
    assert op.request(again) == op.request(arguments)
    hints = {"cu_seqlens_cpu"}
    pages = {"k_cache", "v_cache", "kv_cache", "states"}
    for name in set(op.names) - {*op.outs} - hints:
        told, wanted = described(again[name]), described(arguments[name])
        if name in pages and wanted is not None:  # the recreated cache may have fewer pages: those that the call uses
            told["shape"], wanted["shape"] = told["shape"][1:], wanted["shape"][1:]
        assert told == wanted, name
    assert op.run_hook("work", again) == op.run_hook("work", arguments)
    replayed = capture(op, again)
    assert replayed["traits"] == record["traits"]
    assert replayed["kernel"] == record["kernel"]


def test_work_comes_from_the_values_read() -> None:
    op = tk.get_operator("mha_extend_with_kvcache")
    arguments = paged([40, 7, 1], [9, 7, 0], is_causal=True)(Draw())
    work = capture(op, op.complete(arguments))["work"]
    assert work == {
        "seen": 1,
        "samples": [{"kv_lens": [40, 7, 1], "q_lens": [9, 7, 0]}],
        "histograms": {"kv_lens": {"64": 1, "8": 1, "1": 1}, "q_lens": {"16": 1, "8": 1, "0": 1}},
    }


def test_routing_keeps_its_skew() -> None:
    op = tk.get_operator("moe_apply")
    case = next(case for case in op.all_cases() if case.name == "dense bfloat16, gpt-oss options")
    arguments = op.complete(case.build())
    skewed = torch.tensor([[0, 1, 2, 3]] * 8 + [[0, 5, -1, 7]], dtype=torch.int32)
    record = capture(op, {**arguments, "topk_ids": skewed})
    again = replay(record).build()["topk_ids"]
    assert again.flatten().add(1).bincount(minlength=9).tolist() == [1, 9, 8, 8, 8, 0, 1, 0, 1]
    assert all(len({e for e in row if e >= 0}) == sum(e >= 0 for e in row) for row in again.tolist())


@pytest.mark.parametrize("mode", ["apply_rope", "store_kv_cache"])
def test_padding_is_kept(mode: str) -> None:
    op = tk.get_operator(mode)
    padded = [c for c in op.all_cases() if not c.large and (c.build().get("slot_mapping", torch.ones(1)) < 0).any()]
    assert padded
    for case in padded:
        arguments = op.complete(case.build())
        again = replay(capture(op, arguments)).build()
        assert (again["slot_mapping"] < 0).sum() == (arguments["slot_mapping"] < 0).sum()


def test_every_tensor_keeps_its_dtype() -> None:
    """A tensor keeps its captured dtype even if the operator's own cases use another dtype."""
    op = tk.get_operator("mha_prefill")
    arguments = op.complete(ragged([5, 3], 4, 2)(Draw()))
    again = replay(capture(op, {**arguments, "sinks": torch.ones(4)})).build()
    assert again["q"].dtype == torch.bfloat16
    assert again["sinks"].dtype == torch.float32


def test_the_sample_with_most_work_is_made_again() -> None:
    op = tk.get_operator("mha_decode_with_kvcache")
    few, many = (op.complete(paged(lengths, max_seqlen_k=32, width=3)(Draw())) for lengths in ([3, 4], [30, 31]))
    record = capture(op, few)
    other = capture(op, many)
    record["work"]["samples"] += other["work"]["samples"]
    assert replay(record).build()["cache_seqlens"].tolist() == [30, 31]


def test_a_call_in_a_graph_is_made_at_full_length() -> None:
    """A call that was captured in a CUDA graph has no recorded lengths. Its recreated call must have the maximum lengths."""
    op = tk.get_operator("mha_decode_with_kvcache")
    record = capture(op, op.complete(paged([3, 4], max_seqlen_k=32, width=3)(Draw())))
    record["work"] = {"seen": 0, "samples": [], "histograms": {}}
    assert replay(record).build()["cache_seqlens"].tolist() == [32, 32]


@pytest.mark.parametrize(
    ("samples", "total", "wanted"),
    [
        ([3, 5], 8, [3, 5]),
        ([3, 5], 16, [6, 10]),
        ([], 7, [3, 4]),
        ([0, 0], 6, [3, 3]),
        ([1, 2, 3], 3, [1, 2]),
    ],
)
def test_lengths_that_add_up(samples: list[int], total: int, wanted: list[int]) -> None:
    assert Variation(Want.CAPTURED, Draw(), {"lengths": samples}).parts("lengths", 2, total) == wanted


def test_long_lists_are_thinned() -> None:
    kept = ShapeCapture()
    lengths = list(range(5000))
    kept.record("f.m", "k", 1, {}, {}, lambda: {"lengths": lengths})
    (sample,) = kept.get()[0]["work"]["samples"]
    assert len(sample["lengths"]) == 1024
    assert sample["lengths"][::256] == [0, 1250, 2500, 3750]


def test_values_are_not_read_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel.workbench.watching import captures

    clock = [100.0]
    monkeypatch.setattr(captures.time, "monotonic", lambda: clock[0])
    kept, reads = ShapeCapture(), []

    def read() -> Work:
        reads.append(clock[0])
        return {"n": [len(reads)]}

    for _ in range(16):
        kept.record("f.m", "k", 1, {}, {}, read)
        clock[0] += 0.25
    (record,) = kept.get()
    assert record["count"] == 16
    assert len(reads) == record["work"]["seen"] == 8
    # The first and the latest samples are kept.
    assert [sample["n"] for sample in record["work"]["samples"]] == [[1], [6], [7], [8]]


def test_expanded_and_sliced_tensors_keep_their_strides() -> None:
    x = torch.ones(1, 8).expand(4, 8)
    with tk.shape_capture() as found:
        tk.silu_and_mul(x)
        tk.silu_and_mul(torch.ones(4, 3, 8)[:, 1])
    strides = {replay(record).build()["x"].stride() for record in found.get()}
    assert strides == {(0, 1), (24, 1)}


def test_calls_that_cannot_be_replayed() -> None:
    op = tk.get_operator("rmsnorm")
    record = capture(op, op.complete({"x": torch.ones(2, 4), "weight": torch.ones(4)}))
    with pytest.raises(ReplayError, match=r"no operator norm\.rmsnorn"):
        replay({**record, "operator": "norm.rmsnorn"})
    with pytest.raises(ReplayError, match=r"captured with other parameters .*: gamma"):
        replay({**record, "arguments": {**record["arguments"], "gamma": None}})
    ints = {**record["arguments"], "x": {"dtype": "int64", "shape": [2], "device": "cpu"}}
    with pytest.raises(ReplayError, match="x of a captured call cannot be recreated"):
        replay({**record, "arguments": ints}).build()


def test_a_model_without_data_is_captured() -> None:
    """Calls on meta tensors are captured without a kernel. Other watchers, and a compiler's tracing, see no such call."""
    x, weight = torch.empty(3, 64, device="meta"), torch.empty(64, device="meta")
    seen: list[str] = []

    def watcher(call: Any, run: Any) -> Any:
        seen.append(call.mode)
        return run

    with tk.shape_capture() as found, tk.watch_calls(watcher):
        assert tk.rmsnorm(x, weight).device.type == "meta"
        with FakeTensorMode() as fakes:
            tk.rmsnorm(fakes.from_tensor(x), fakes.from_tensor(weight))
    assert not seen
    (record,) = found.get()
    assert (record["operator"], record["kernel"], record["count"]) == ("norm.rmsnorm", "", 1)
    assert replay(record).build()["x"].shape == (3, 64)
    with tk.shape_capture(), pytest.raises(ValueError, match="weight"):
        tk.rmsnorm(x, weight[:32])


@pytest.mark.parametrize(("experts", "large"), [(2, False), (256, True)])
def test_the_weights_of_experts_count_as_large(experts: int, large: bool) -> None:
    """Runs on a CPU leave out large cases, and packs are built without their values."""
    plan = tk.moe_apply.plan(experts, 2, 512, 512, weight_format="mxfp4", platform=tk.named_platform("cpu"))
    shapes = ((experts, 1024, 256), (experts, 1024, 16), (experts, 512, 256), (experts, 512, 16))
    w13, w13_scale, w2, w2_scale = (torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
    weights = tk.moe_apply.prepare(tk.MoEWeights(w13, w13_scale, None, w2, w2_scale, None), plan)
    x, ids = torch.empty(1, 512, dtype=plan.dtype, device="meta"), torch.empty(1, 2, dtype=torch.int32, device="meta")
    with tk.shape_capture() as found:
        tk.moe_apply(x, weights, ids.float(), ids, plan)
    (record,) = found.get()
    assert replay(record).large == large


def test_cases_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    with tk.shape_capture(path):
        for _ in range(3):
            tk.rmsnorm(torch.ones(2, 8), torch.ones(8))
        tk.silu_and_mul(torch.ones(2, 8))
        tk.rmsnorm(torch.ones(2, 8), torch.ones(8), solution="reference")
    cases = load_cases(path)
    assert [(c.operator, c.count, c.case.large, c.case.tags) for c in cases] == [
        ("norm.rmsnorm", 4, False, {"captured"}),
        ("activation.silu_and_mul", 1, False, {"captured"}),
    ]
    assert cases[0].case.name == "x float32[2, 8], weight float32[8]"
    assert [c.operator for c in load_cases(path, "silu_and_mul")] == ["activation.silu_and_mul"]


def test_merging(tmp_path: Path) -> None:
    for index, rows in enumerate(((1, 2), (2, 3))):
        with tk.shape_capture(tmp_path / f"{index}"):
            for n in rows:
                tk.silu_and_mul(torch.ones(n, 8))
    merged = merge([tmp_path / "0", tmp_path / "1"], tmp_path / "both")
    counts = {record["arguments"]["x"]["shape"][0]: record["count"] for record in merged.records}
    assert counts == {1: 1, 2: 2, 3: 1}
    assert {record["arguments"]["x"]["shape"][0]: record["count"] for record in load(tmp_path / "both").records} == counts


def test_inputs_are_drawn_and_never_kept(tmp_path: Path) -> None:
    secret = torch.full((2, 8), 0.123456)
    with tk.shape_capture(tmp_path / "shapes"):
        tk.silu_and_mul(secret)
    assert b"0.1234" not in (tmp_path / "shapes").read_bytes()
    x: Tensor = load_cases(tmp_path / "shapes")[0].case.build()["x"]
    assert not torch.equal(x, secret)
