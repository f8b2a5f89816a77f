"""Tests the scripts of ``benchmarks/`` without a GPU: random weights, request counts, and comparisons of engines."""

from __future__ import annotations

import json
import math
import pickle
import shlex
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.extend([str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parents[2] / "engine_benchmarks")])

import compare
import engine_figures
import h200_vllm
import h200_vllm_models
import random_gpt_oss
import random_models
import vllm_engine

# -- weights ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"])
def test_padded_experts_get_the_same_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Backends may round sizes up. The padding after the model's own values is zero."""
    rows, columns = random_gpt_oss.EXPERT_SIZES[name]
    small = (rows // 32, columns and columns // 9)
    monkeypatch.setitem(random_gpt_oss.EXPERT_SIZES, name, small)
    shape = [size for size in small if size is not None]
    dtype = torch.bfloat16 if name.endswith("bias") else torch.uint8
    exact, padded = torch.ones(3, *shape, dtype=dtype), torch.ones(3, *(size + 5 for size in shape), dtype=dtype)
    for parameter in (exact, padded):
        random_gpt_oss.draw(f"model.layers.0.mlp.experts.{name}", parameter)
    inside = padded[(slice(None), *(slice(size) for size in shape))]
    assert torch.equal(inside, exact)
    assert exact.float().std() > 0
    assert padded.float().abs().sum() == inside.float().abs().sum()


@pytest.mark.parametrize("name", random_gpt_oss.EXPERT_SIZES)
def test_shards_of_ranks_differ(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows, columns = random_gpt_oss.EXPERT_SIZES[name]
    monkeypatch.setitem(random_gpt_oss.EXPERT_SIZES, name, (rows // 32, columns and columns // 9))
    dtype = torch.bfloat16 if name.endswith("bias") else torch.uint8
    shape = [size for size in random_gpt_oss.shard_sizes(name, 2) if size is not None]
    first, second, padded = (torch.ones(2, *(size + more for size in shape), dtype=dtype) for more in (0, 0, 3))
    for rank, parameter in enumerate((first, second)):
        random_gpt_oss.draw(f"model.layers.0.mlp.experts.{name}", parameter, rank, 2)
    random_gpt_oss.draw(f"model.layers.0.mlp.experts.{name}", padded, 0, 2)
    assert not torch.equal(first, second)
    assert torch.equal(padded[(slice(None), *(slice(size) for size in shape))], first)
    assert (second.float().abs().sum() == 0) == (name == "w2_bias")  # as vLLM's loader: the first rank adds this bias


def test_ranks_share_what_is_not_sharded() -> None:
    for name, shared in {
        "a.mlp.router.weight": True,
        "a.norm.weight": True,
        "a.o_proj.bias": True,
        "lm_head.weight": False,
    }.items():
        first, second = torch.empty(16, 8), torch.empty(16, 8)
        for rank, parameter in enumerate((first, second)):
            random_gpt_oss.draw(name, parameter, rank, 2)
        assert torch.equal(first, second) == shared


def test_names_decide_what_is_drawn() -> None:
    first, again, other = torch.empty(64, 32), torch.empty(64, 32), torch.empty(64, 32)
    for name, parameter in (("a.qkv_proj.weight", first), ("a.qkv_proj.weight", again), ("b.qkv_proj.weight", other)):
        assert random_gpt_oss.draw(name, parameter) == "matrix"
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_of_the_head_have_lengths_of_their_own() -> None:
    head, matrix = torch.empty(4000, 64), torch.empty(4000, 64)
    assert random_gpt_oss.draw("lm_head.weight", head) == "head"
    random_gpt_oss.draw("qkv.weight", matrix)
    assert head.norm(dim=1).amax() > 3 * matrix.norm(dim=1).amax()


def test_the_loader_fills_a_model(tmp_path: Path) -> None:
    """vLLM finds the loader by its name."""
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    random_gpt_oss.register()
    random_gpt_oss.register()
    loader = get_model_loader(LoadConfig(load_format=random_gpt_oss.LOAD_FORMAT))
    model = torch.nn.Linear(8, 4)
    loader.load_weights(model, None)
    assert model.bias.std() > 0
    directory = random_gpt_oss.write_model(tmp_path / "model", 3)
    config = json.loads((directory / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("model", list(random_models.MODELS))
def test_a_model_of_few_layers(tmp_path: Path, model: str) -> None:
    """transformers and vLLM know the architecture and its sizes."""
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import get_config

    found = get_config(random_models.write_model(tmp_path / model, model, 3), trust_remote_code=False)
    assert found.num_hidden_layers == 3
    assert found.architectures[0] in ModelRegistry.get_supported_archs()
    assert len(getattr(found, "layer_types", None) or range(3)) == 3


def test_other_models_are_drawn_by_dtype(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    random_models.register()
    random_models.register()
    model = torch.nn.Module()
    made = {
        "w13_weight": torch.zeros(2, 256, 128, dtype=torch.float8_e4m3fn),
        "w13_weight_scale_inv": torch.zeros(2, 2, 1),
        "w2_weight": torch.zeros(2, 128, 128, dtype=torch.bfloat16),
        "gate": torch.zeros(8, 128, dtype=torch.bfloat16),
        "up_weight_packed": torch.zeros(256, 64, dtype=torch.uint8),
        "up_weight_scale": torch.zeros(256, 4, dtype=torch.uint8),
        "down_weight_scale": torch.zeros(256, 8, dtype=torch.float8_e4m3fn),
        "down_weight_scale_2": torch.zeros(1),
        "input_scale": torch.zeros(1),
    }
    for name, values in made.items():
        model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    loader = get_model_loader(LoadConfig(load_format=random_models.LOAD_FORMAT))
    loader.load_weights(model, SimpleNamespace(get_hidden_size=lambda: 128))
    decoded = model.w13_weight.float() * model.w13_weight_scale_inv[0, 0, 0]
    for values in (decoded, model.w2_weight.float(), model.gate.float()):
        assert 0.8 < values.std() * 128**0.5 < 1.2
    assert not torch.equal(model.w13_weight.float()[0], model.w13_weight.float()[1])
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([model.up_weight_packed & 15, model.up_weight_packed >> 4]).int()
    values = e2m1[codes & 7] * (1 - 2 * (codes >> 3))
    for scale in (torch.exp2(model.up_weight_scale[0, 0].float() - 127), model.down_weight_scale_2):
        assert 0.7 < values.std() * scale * 128**0.5 < 1.4  # an e8m0 scale is a power of two
    assert (model.down_weight_scale.float() == 1).all()
    assert model.input_scale.item() == pytest.approx(4 / 2688)


def test_the_plugins_speed_beside_vllms_own() -> None:
    def rows(engine: str, ms: float, rate: float) -> list[dict[str, Any]]:
        return [
            {"engine": engine, "figure": "decode", "batch": 1, "ms": ms},
            {"engine": engine, "figure": "prefill", "shape": "1x8192", "tokens_per_s": rate},
        ]

    found = engine_figures.speed_ups(
        [*rows("vllm", 4.0, 100), *rows("plugin-mla", 2.0, 100), *rows("plugin-experts", 3.0, 97)], "vllm"
    )
    assert [line.split(" (")[0] for line in found] == [
        "holds plugin-mla: decode 1 2.00, prefill 1x8192 1.00; mean 1.41",
        "MISSED plugin-experts: decode 1 1.33, prefill 1x8192 0.97; mean 1.14",
    ]


def test_disturbed_rows_have_no_figure() -> None:
    def row(engine: str, batch: int, *times: float) -> dict[str, Any]:
        ms = sorted(times)[len(times) // 2]
        return {"engine": engine, "figure": "decode", "batch": batch, "ms": ms, "disturbed": engine_figures.is_disturbed(times)}

    rows = [row("vllm", 1, 4.0, 4.1, 4.1), row("vllm", 16, 16.6, 30.7, 4.5), row("vllm", 64, 15.0, -13.2, -8.6)]
    rows += [row("plugin", 1, 2.05, 2.05, 2.0), row("plugin", 16, 3.6, 3.6, 3.7), row("plugin", 64, 5.8, 5.7, 6.0)]
    assert [each["disturbed"] for each in rows] == [False, True, True, False, False, False]
    (found,) = engine_figures.speed_ups(rows, "vllm")
    assert found == "PARTLY plugin: decode 1 2.00; mean 2.00 (>= 0.98 each, 1.12 mean); disturbed: decode 16, decode 64"


# -- several models ----------------------------------------------------------------------------------------------------------------


def test_the_cache_holds_a_measured_batch() -> None:
    """64 requests of a prompt and the generated tokens, of 2 x 8 heads of 128 values in bf16 and 32 layers."""
    a = vllm_engine.arguments(["--name", "vllm", "--out", "results", "--model", "llama-3.1-8b", "--decode", "100"])
    needed = 64 * (a.prompt + a.decode + 16) * 2 * 8 * 128 * 2 * 32 / 2**30
    assert needed < a.kv_gib < needed + 2
    a = vllm_engine.arguments(["--name", "vllm", "--out", "results", "--model", "deepseek-v3", "--batches", "1"])
    assert 8192 * 4 * 576 * 2 / 2**30 < a.kv_gib < 2


def test_the_engines_of_a_round_fit_on_a_gpu() -> None:
    models = h200_vllm_models
    engines = [pair for each in models.ROUNDS for pair in (*each.wide, *(one for share in each.shares for one in share))]
    assert len(engines) == len(set(engines))
    assert {name for name, _ in engines} == models.CASES.keys()
    for each in models.ROUNDS:
        # Engines on all GPUs start one after another. After the start, they take half as much memory.
        wide = sum(models.CASES[name].gib / 2 for name, _ in each.wide)
        for share in each.shares:
            assert wide + sum(models.CASES[name].gib for name, _ in share) <= models.MEMORY_GIB
        assert all(models.CASES[name].gpus == 1 for share in each.shares for name, _ in share)
    for name in models.CASES:
        assert next(variant for case, variant in engines if case == name) == "vllm"


def test_engines_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", "x", "--show", "--engines"]
    h200_vllm_models.main([*words, "deepseek-v3:vllm,deepseek-v3:plugin-mla", "llama-3.1-8b:vllm"])
    shares = "[('deepseek-v3', 'vllm'), ('deepseek-v3', 'plugin-mla')]\n  [('llama-3.1-8b', 'vllm')]"
    assert capsys.readouterr().out == f"round 0:\n  []\n  {shares}\n"
    with pytest.raises(SystemExit, match="got 'llama-3"):
        h200_vllm_models.main([*words, "llama-3.1-8b:llama"])


WAITING_ENGINE = """
import argparse, json, os, pathlib, time
p = argparse.ArgumentParser()
p.add_argument("--name")
p.add_argument("--out", type=pathlib.Path)
p.add_argument("--wait-file", type=pathlib.Path)
a = p.parse_known_args()[0]
if a.name == "marlin":
    raise SystemExit("out of memory")
(a.out / f"{a.name}.ready").touch()
while not a.wait_file.exists():
    time.sleep(0.01)
ms = 2.0 if a.name == "vllm" else 1.0
with (a.out / f"{a.name}.jsonl").open("a") as file:
    for row in ({"figure": "decode", "batch": 1, "ms": ms, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}, {"figure": "end"}):
        file.write(json.dumps({"engine": a.name, **row}) + "\\n")
"""


def test_decode_is_measured_while_all_requests_generate() -> None:
    """Two requests: the second starts two steps later, and so ends later. Steps take 2 s in between, and 5 s elsewhere."""
    steps, now = [], 0.0
    for step in range(1, 13):
        counts = [min(step, 10), min(max(step - 2, 0), 10)]
        now += 2 if min(counts) >= 3 and max(counts) <= 9 else 5
        steps.append((now, counts))
    assert engine_figures.steady(steps, 2) == (2.0, 5)  # 2 to 7 tokens of the second request
    together = [steps[i] for i in (4, 6, 8)]  # the tokens of two steps arrive together
    assert engine_figures.steady([*together, steps[-1]], 2) == (2.0, 4)
    with pytest.raises(ValueError, match="after 9 of 10 tokens"):
        engine_figures.steady(steps, 9)


def test_rounds_of_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines that only write rows: each model's file has the rows of all its engines, also of one that does not start."""
    models = h200_vllm_models
    (tmp_path / "vllm_engine.py").write_text(WAITING_ENGINE)
    monkeypatch.setattr(h200_vllm, "HERE", tmp_path)
    names = ["vllm", "plugin", "marlin"]
    both = [("gpt-oss-120b-tp2", name) for name in names[:2]]
    llama, qwen = ([(case, name) for name in names] for case in ("llama-3.1-8b", "qwen3-30b-a3b"))
    monkeypatch.setattr(models, "ROUNDS", (models.Round(0, both, (llama, [])), models.Round(1, [], (qwen, []))))
    words = ["--folder", str(tmp_path / "found"), "--seconds", "60", "--start-estimate", "-100", "--commit", "0" * 40]
    models.main(words)
    for case, gpus in (("gpt-oss-120b-tp2", "0,1"), ("llama-3.1-8b", "0"), ("qwen3-30b-a3b", "0")):
        found = json.loads((tmp_path / "found" / f"{case}.json").read_text())
        decode = {row["engine"]: row for row in found["rows"] if row["figure"] == "decode"}
        assert (decode["vllm"]["ms"], decode["plugin"]["ms"], decode["plugin"]["gpus"]) == (2.0, 1.0, gpus)
        if gpus == "0":
            (failed,) = (row for row in found["rows"] if row["figure"] == "failed")
            assert (failed["engine"], "out of memory" in failed["error"]) == ("marlin", True)
    assert "decode 1 2.00" in capsys.readouterr().out
    models.main([*words, "--rounds", "1", "--gpus", "1", "--variants", "vllm"])
    found = json.loads((tmp_path / "found" / "qwen3-30b-a3b.json").read_text())
    assert [row["gpus"] for row in found["rows"] if row["figure"] == "decode"] == ["0", "0", "1"]
    assert "--rounds 1" in found["metadata"]["command"]


@pytest.mark.parametrize("wide", [True, False], ids=["all GPUs", "one GPU"])
def test_engines_that_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """Wide engines start together, and engines of one GPU run their tasks together: here, each engine waits for the other one. None
    does so before another program's file exists.
    """
    models = h200_vllm_models
    waits, before = ("log", "(a.out") if wide else ("go", "ms = ")
    loop = f"while len(list(a.out.parent.glob('*/{waits}'))) < 2:\n    time.sleep(0.01)\n"
    (tmp_path / "vllm_engine.py").write_text(WAITING_ENGINE.replace(f"\n{before}", f"\n{loop}{before}"))
    monkeypatch.setattr(h200_vllm, "HERE", tmp_path)
    case = "gpt-oss-120b-tp2" if wide else "llama-3.1-8b"
    both = [(case, name) for name in ("vllm", "plugin")]
    monkeypatch.setattr(models, "ROUNDS", (models.Round(0, *((both, ([], [])) if wide else ([], (both, [])))),))
    after = tmp_path / "after"
    timer = threading.Timer(1.0, after.touch)
    timer.start()
    begun = time.monotonic()
    words = ["--folder", str(tmp_path / "found"), "--seconds", "60", "--start-seconds", "20", "--commit", "0" * 40]
    models.main([*words, "--wide-together" if wide else "--together", "--measure-after", str(after)])
    assert 1.0 < time.monotonic() - begun < 20
    found = json.loads((tmp_path / "found" / f"{case}.json").read_text())
    assert [(row["engine"], row["figure"]) for row in found["rows"]] == [
        (name, figure) for name in ("vllm", "plugin") for figure in ("decode", "end")
    ]


# -- one engine ------------------------------------------------------------------------------------------------------------------


class FakeEngine:
    """An engine that generates one token per request and step. With ``broken``, requests of 70 tokens get one token too few."""

    def __init__(self, broken: bool = False, logit: float = 0.0) -> None:
        self.broken, self.logit, self.wants_logprobs = broken, logit, False
        self.requests: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def compute_logits(self, rows: int) -> torch.Tensor:
        return torch.full((rows, 4), self.logit)

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert prompt["prompt_token_ids"]
        self.wants_logprobs = sampling.logprobs == 0
        self.requests[name] = [sampling.max_tokens - (self.broken and sampling.max_tokens == 70), 0]

    def abort_request(self, names: list[str]) -> None:
        self.aborted.update(names)
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        self.compute_logits(len(self.requests))
        logprobs = {7: SimpleNamespace(logprob=self.logit)} if self.wants_logprobs else None
        ended = []
        for name, counts in list(self.requests.items()):
            counts[1] += 1
            if counts[1] >= counts[0]:
                del self.requests[name]
                ended.append(
                    SimpleNamespace(
                        finished=True,
                        request_id=name,
                        num_cached_tokens=2,
                        outputs=[SimpleNamespace(token_ids=[7] * counts[0], logprobs=logprobs and [logprobs] * counts[0])],
                    )
                )
        return ended


class SteppingEngine:
    """An engine whose requests start one step after another, and generate one token in each step."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.running = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert (sampling.output_kind.name, sampling.ignore_eos) == ("DELTA", True)
        self.requests[name] = sampling.max_tokens

    def has_unfinished_requests(self) -> bool:
        return any(self.requests.values())

    def step(self) -> list[Any]:
        self.running += 1
        found = []
        for name in list(self.requests)[: self.running]:
            if self.requests[name]:
                self.requests[name] -= 1
                found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])]))
        return found


def test_decode_steps_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    words = ["--name", "fake", "--out", str(tmp_path), "--batches", "1", "3", "--decode", "40", "--repeats", "2"]
    engine = vllm_engine.Engine(vllm_engine.arguments(words))
    engine.llm = SimpleNamespace(llm_engine=SteppingEngine())
    engine.decode()
    rows = [json.loads(line) for line in (tmp_path / "fake.jsonl").read_text().splitlines()]
    assert [(row["figure"], row["batch"], len(row["all_ms"])) for row in rows] == [("decode", 1, 2), ("decode", 3, 2)]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[1]["steps"] in (29, 31)  # of 40: not the first 8, nor the last; later repetitions start together


def run_requests(tmp_path: Path, fake: FakeEngine, count: int = 200, here: bool = True) -> dict[str, Any]:
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    words = ["--name", "fake", "--out", str(tmp_path), "--requests", str(count)]
    engine = vllm_engine.Engine(vllm_engine.arguments(words))
    engine.llm = SimpleNamespace(llm_engine=fake)
    engine.watched = vllm_engine.Watched(fake) if here else None
    engine.requests()
    (line,) = (tmp_path / "fake.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_random_requests_are_counted(tmp_path: Path) -> None:
    fake = FakeEngine()
    found = run_requests(tmp_path, fake)
    assert (found["asked"], found["lost"], found["bad"]) == (200, 0, 0)
    assert found["aborted"] > 5
    assert fake.aborted
    assert found["cached_tokens"] > 0


def test_a_request_that_ends_short_is_lost(tmp_path: Path) -> None:
    found = run_requests(tmp_path, FakeEngine(broken=True))
    assert 10 < found["lost"] < found["asked"] // 2


@pytest.mark.parametrize("here", [True, False], ids=["in this process", "in another"])
def test_logits_that_are_not_finite_are_counted(tmp_path: Path, here: bool) -> None:
    assert run_requests(tmp_path, FakeEngine(logit=float("nan")), count=5, here=here)["bad"] > 0
    (tmp_path / "fake.jsonl").unlink()
    assert run_requests(tmp_path, FakeEngine(), count=5, here=here)["bad"] == 0


class TwoRanks:
    """Stands in for vLLM's `LLM`. Its model has two routers. Functions for the model are pickled, because vLLM may run a model in
    other processes."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Module()
        self.model.model = torch.nn.Module()
        self.model.model.layers = self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": torch.nn.Linear(3, 8)})}) for _ in range(2)
        )
        self.model.compute_logits = lambda hidden: torch.nn.functional.pad(hidden, (0, 4))
        (folder / "config.json").write_text('{"num_experts_per_tok": 2}')
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(model=str(folder))))

    def apply_model(self, function: Any) -> list[Any]:
        return [pickle.loads(pickle.dumps(function))(self.model)]

    def generate(self, prompts: list[dict[str, list[int]]], tokens: int) -> tuple[float, list[list[int]]]:
        """The first step has a prompt's tokens, each other step one token."""
        ids = []
        for step in range(tokens):
            hidden = torch.randn(len(prompts[0]["prompt_token_ids"]) if step == 0 else 1, 3)
            for layer in self.layers:
                layer["mlp"]["router"](hidden)
            ids.append(int(self.model.compute_logits(hidden[-1:]).argmax()))
        return 0.0, [ids]


def test_logits_of_a_model_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--name", "fake", "--out", str(tmp_path), "--eager", "--no-inproc"]
    saved = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = vllm_engine.Engine(vllm_engine.arguments(words))
        engine.llm = TwoRanks(tmp_path)
        monkeypatch.setattr(engine, "generate", engine.llm.generate)
        engine.next_tokens()
        saved.append({"prompts": engine.saved["prompts"]})
        assert not engine.llm.model.recorded.keep
    prompts = saved[0]["prompts"]
    assert prompts["rows"].shape == (19, 8, 7)
    assert prompts["experts"].shape == (19 * 8, 2, 2)
    assert [[int(step.argmax()) for step in row] for row in prompts["rows"]] == prompts["ids"]
    found = compare.compared(*saved)["prompts"]
    assert (found["same_experts"]["rows"], found["other_experts"]["rows"], found["all"]["far"]) == (152, 0, 0)
    row = json.loads((tmp_path / "fake.jsonl").read_text().splitlines()[0])
    assert (row["prompts"], row["layers_with_experts"], row["bad"]) == (19, 2, 0)
    monkeypatch.setattr(engine, "generate", lambda prompts, tokens: (0.0, [[0] * tokens]))
    with pytest.raises(RuntimeError, match="expected 8 steps"):
        engine.next_tokens()


def test_kernels_are_divided_into_steps() -> None:
    found = [("norm", 1.0), ("ArgMaxOps", 2.0), ("norm", 3.0), ("mm", 4.0), ("reduce argmax", 5.0), ("copy", 6.0)]
    assert vllm_engine.kernels_of_steps(found) == [found[:2], found[2:5], found[5:]]


def test_gaps_between_kernels() -> None:
    """The device is busy while either of two overlapping kernels runs. Gaps between the same two kernels are counted together."""
    found = [("mm", 0.0, 10.0), ("copy", 2.0, 1.0), ("norm", 14.0, 1.0), ("mm", 15.0, 5.0), ("norm", 21.0, 2.0), ("end", 30.0, 1.0)]
    assert vllm_engine.gaps_of(found) == [(("norm", "end"), (1, 7.0)), (("mm", "norm"), (2, 5.0))]
    assert vllm_engine.gaps_of([]) == []


# -- two engines -----------------------------------------------------------------------------------------------------------------


def test_logits_are_compared_until_tokens_differ() -> None:
    a = {"logits": [torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[9.0, 0.0, 0.0]])]}
    b = {"logits": [torch.tensor([[0.0, 1.0, 3.1]]), torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 9.0]])]}
    found = compare.compare_logits(a, b)
    assert (found["steps"], found["rows"], found["argmax_same"]) == (2, 2, "1/2")
    assert found["shares"][1.0] == pytest.approx(1.0)
    assert found["lead"] == pytest.approx(1.0)
    assert found["far"] == 1
    assert found["of_rows"] == [pytest.approx(math.sqrt(2 / 3), abs=1e-4), pytest.approx(0.0378, abs=1e-3)]
    assert compare.compare_logits(a, {"logits": [torch.zeros(2, 3)]}) == {"steps": 0}


def test_rows_are_compared_while_tokens_agree_and_by_experts() -> None:
    rows = torch.tensor([[[0.0, 1.0, 3.0], [1.0, 2.0, 0.0]], [[5.0, 1.0, 0.0], [1.0, 0.0, 2.0]]])
    experts = torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]])
    a = {"rows": rows, "ids": [[2, 1], [0, 2]], "experts": experts}
    # The second request's first tokens differ, so its second row does not count.
    others = torch.tensor([[[2, 1]], [[3, 5]], [[6, 5]], [[7, 8]]])
    b = {"rows": rows.clone(), "ids": [[2, 0], [1, 2]], "experts": others}
    b["rows"][0, 1] += 1.0
    b["rows"][1, 1] += 9.0
    found = compare.compare_rows(a, b)
    assert (found["all"]["rows"], found["all"]["far"]) == (3, 1)
    assert found["all"]["largest"][1.0] == pytest.approx(1.0)
    assert (found["same_experts"]["rows"], found["same_experts"]["far"]) == (2, 0)
    assert (found["other_experts"]["rows"], found["other_experts"]["far"]) == (1, 1)
    assert compare.compared({"float32": a}, {"float32": {**b, "experts": experts}})["float32"]["other_experts"]["rows"] == 0


def test_a_report_has_what_both_engines_did() -> None:
    a = {"tokens": [[1, 2]], "requests": {"r0": [1, 2], "r1": [], "r2": [3]}}
    b = {"tokens": [[1, 3]], "requests": {"r0": [1, 2], "r1": [], "r2": []}, "logits": []}
    lines = compare.report("vllm", "plugin", compare.compared(a, b)).splitlines()
    assert [line.split()[0] for line in lines] == ["vllm", "tokens", "requests"]
    assert "'sequences_same': '1/1'" in lines[2]


def test_tokens_are_compared_in_place_and_until_the_first_that_differs() -> None:
    found = compare.compare_tokens([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 9, 7, 9]])
    assert found == {"tokens": 8, "same": 0.75, "same_given_the_same_past": round(5 / 6, 4), "sequences_same": "1/2"}


# -- all engines -----------------------------------------------------------------------------------------------------------------

ENGINE = """
import json, os, sys
words = sys.argv[1:]
out, name = words[words.index("--out") + 1], words[words.index("--name") + 1]
if "--moe-backend" in words:
    sys.exit("no such backend")
from importlib.metadata import entry_points
assert [e.name for e in entry_points(group="vllm.general_plugins") if e.name == "random_gpt_oss"]
from random_gpt_oss import register
plugged = "CUSTOM" in words
assert plugged != ("VLLM_PLUGINS" in os.environ)
with open(f"{out}/{name}.jsonl", "w") as file:
    for row in [
        {"figure": "started", "seconds": 3.5},
        {"figure": "decode", "batch": 1, "ms": 3.0 if plugged else 4.25},
        {"figure": "decode", "batch": 64, "ms": 13.5},
        {"figure": "prefill", "shape": "4x8192", "tokens_per_s": 51000},
    ]:
        file.write(json.dumps({"engine": name, **row}) + "\\n")
"""


def test_all_engines_are_run_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed engine is reported with the end of its log, and the other engines still run."""
    (tmp_path / "vllm_engine.py").write_text(ENGINE)
    (tmp_path / "random_gpt_oss.py").write_text("def register(): pass")
    monkeypatch.setattr(h200_vllm, "HERE", tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    output = tmp_path / "results.json"
    words = ["--variants", "vllm", "marlin", "plugin", "--starts", "2", "--commit", "1234567", "--output", str(output)]
    h200_vllm.main(words)
    said = capsys.readouterr().out
    assert "marlin: 1" in said
    assert "no such backend" in said
    assert ["start", "1,", "s", "3.5", "-", "3.5"] in [line.split() for line in said.splitlines()]
    assert "holds decode 1: 3.00 ms (<= 3.4)\nMISSED decode 64: 13.50 ms (<= 13.2)\nholds prefill: 51000" in said
    results = json.loads(output.read_text())
    rows = results["rows"]
    assert results["metadata"]["git_commit"] == "1234567"
    assert results["metadata"]["command"].endswith(shlex.join(words))
    assert [(row["engine"], row["start"]) for row in rows if row["figure"] == "started"] == [
        ("vllm", 0), ("vllm", 1), ("plugin", 0), ("plugin", 1)
    ]  # fmt: skip


def test_a_run_that_is_cut_off_keeps_the_engines_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def run(name: str, *others: Any) -> list[dict[str, Any]]:
        if name == "plugin":
            assert ended.wait(60)
            raise KeyboardInterrupt
        return [{"engine": name, "figure": "requests"}]

    def save(output: Path, results: Any, rows: Any) -> None:
        kept(output, results, rows)
        ended.set()

    kept = h200_vllm.save
    monkeypatch.setattr(h200_vllm, "save", save)
    monkeypatch.setattr(h200_vllm, "run", run)
    output = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        h200_vllm.main(["--correctness", "--variants", "plugin", "vllm", "--output", str(output)])
    assert json.loads(output.read_text())["rows"] == [{"engine": "vllm", "figure": "requests"}]


SAVING = """
import os, sys
import torch
words = sys.argv[1:]
assert os.environ["WANTED"] in words[words.index("--tasks") + 1].split(",")
out, name = words[words.index("--out") + 1], words[words.index("--name") + 1]
open(f"{out}/{name}.jsonl", "w").close()
torch.save({"tokens": [[1, 2, 3, 5 if name == "plugin" else 4]]}, f"{out}/{name}.pt")
"""


@pytest.mark.parametrize(("flag", "task"), [("--correctness", "random"), ("--float32", "float32")])
def test_what_engines_generate_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, task: str
) -> None:
    (tmp_path / "vllm_engine.py").write_text(SAVING)
    (tmp_path / "random_gpt_oss.py").write_text("def register(): pass")
    monkeypatch.setattr(h200_vllm, "HERE", tmp_path)
    output = tmp_path / "results.json"
    monkeypatch.setenv("WANTED", task)
    h200_vllm.main([flag, "--variants", "vllm", "plugin", "--output", str(output)])
    assert "vllm : plugin\n  tokens" in capsys.readouterr().out
    assert json.loads(output.read_text())["compared"]["vllm : plugin"]["tokens"]["same"] == 0.75
