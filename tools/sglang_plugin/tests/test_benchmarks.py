"""Tests the scripts of ``benchmarks/`` without a GPU: options, hooks in SGLang's processes, step times, requests, and reports."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

_TOOLS = Path(__file__).parents[2]
sys.path.extend(str(_TOOLS / name) for name in ("sglang_plugin/benchmarks", "engine_benchmarks", "vllm_plugin/benchmarks"))

import h200_sglang
import sglang_engine
import sglang_hooks
from engine_requests import bursts
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from tokenspeed_kernel_sglang.settings import read_settings


@pytest.mark.parametrize("name", h200_sglang.VARIANTS)
def test_variants_have_options_of_sglang_and_settings_of_the_plugin(name: str, tmp_path: Path) -> None:
    variant = h200_sglang.VARIANTS[name]
    read_settings(variant.variables)  # raises an error for an unknown setting
    assert ("tokenspeed_kernel" in variant.variables["SGLANG_PLUGINS"].split(",")) == name.startswith("plugin")
    a = sglang_engine.arguments(["--name", name, "--out", str(tmp_path), *h200_sglang.CASES["gpt-oss-20b"], *variant.arguments()])
    made = sglang_engine.engine_arguments(a, tmp_path)
    assert not set(made) - set(ServerArgs.__annotations__)
    assert variant.options.items() <= made.items()
    assert made["max_running_requests"] == 64 == made["cuda_graph_bs_decode"][-1]
    assert made["context_length"] >= 8192 + 1


def test_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    engines = [pair for each in h200_sglang.ROUNDS for share in each.shares for pair in share]
    assert len(engines) == len(set(engines))
    assert {name for name, _ in engines} == set(h200_sglang.CASES)
    assert {variant for _, variant in engines} == set(h200_sglang.VARIANTS)
    h200_sglang.main(["--folder", "x", "--show", "--engines", "gpt-oss-20b:plugin"])
    assert capsys.readouterr().out == "round 0:\n  [('gpt-oss-20b', 'plugin')]\n"
    h200_sglang.main(["--folder", "x", "--show", "--engines", "gpt-oss-20b:sglang,gpt-oss-20b:plugin", "gpt-oss-120b:sglang"])
    together = "[('gpt-oss-20b', 'sglang'), ('gpt-oss-20b', 'plugin')]"
    assert capsys.readouterr().out == f"round 0:\n  {together}\n  [('gpt-oss-120b', 'sglang')]\n"
    with pytest.raises(SystemExit, match="got 'gpt-oss-20b'"):
        h200_sglang.main(["--folder", "x", "--show", "--engines", "gpt-oss-20b"])


# -- in SGLang's processes -------------------------------------------------------------------------------------------------------


def test_sglang_finds_the_hooks_by_their_entry_point(tmp_path: Path) -> None:
    h200_sglang.entry_point(tmp_path)
    (entry,) = (entry for installed in distributions(path=[str(tmp_path)]) for entry in installed.entry_points)
    assert (entry.group, entry.load()) == ("sglang.srt.plugins", sglang_hooks.register)


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the hooks that `register` registers, by the name of SGLang's function."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: found.update({target: hook}))
    monkeypatch.delenv(sglang_hooks.OUT, raising=False)
    sglang_hooks.register()
    assert not found
    monkeypatch.setenv(sglang_hooks.OUT, str(tmp_path))
    sglang_hooks.register()
    return lambda last: next(hook for target, hook in found.items() if target.endswith(last))


def test_weights_are_drawn(hooked: Any) -> None:
    model = torch.nn.Module()
    model.norm = torch.nn.Parameter(torch.zeros(64))
    model.w2_weight_bias = torch.nn.Parameter(torch.zeros(2, 2880, dtype=torch.bfloat16))
    hooked("initialize_dummy_weights")(model, 1e-3)
    assert 0.9 < model.norm.mean() < 1.1
    assert model.w2_weight_bias.std() > 0


class Router(torch.nn.Module):
    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits, None


def test_steps_and_logits(hooked: Any, tmp_path: Path) -> None:
    model = torch.nn.Module()
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model, attn_backend=object())))
    step, look = hooked("process_batch_result"), hooked("ModelRunner.sample")
    for mode, size in (("EXTEND", 2), ("DECODE", 2)):
        batch = SimpleNamespace(forward_mode=SimpleNamespace(name=mode), reqs=[None] * size)
        assert step(None, scheduler, batch, None) is None
    lines = (tmp_path / sglang_hooks.STEPS).read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [["EXTEND", "2"], ["DECODE", "2"]]
    assert json.loads((tmp_path / sglang_hooks.SERVING).read_text())["attention"] == ["builtins.object"]
    logits = SimpleNamespace(next_token_logits=torch.tensor([[1.0, float("nan")]]))
    layers = [torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": Router()})}) for _ in range(2)]
    model.layers = torch.nn.ModuleList(layers)
    runner = SimpleNamespace(model=model, model_config=SimpleNamespace(hf_config=SimpleNamespace(num_experts_per_tok=2)))
    for flag in (None, sglang_hooks.WATCH, sglang_hooks.KEEP):
        if flag:
            (tmp_path / flag).touch()
        assert look(runner, logits, None) is None
    assert (tmp_path / sglang_hooks.BAD).read_text() == "1"
    for layer, tokens in ((0, [[9.0, 0, 0], [0, 1, 2]]), (1, [[1.0, 2, 3], [3, 1, 2]])):
        layers[layer]["mlp"]["router"](torch.tensor(tokens))
    look(runner, logits, None)
    first, second = (torch.load(file) for file in sorted(tmp_path.glob("logits-*.pt")))
    assert "experts" not in first  # a step that was replayed as a graph
    assert second["experts"].tolist() == [[[2, 1], [0, 2]]]


def test_hooked_functions_exist() -> None:
    from pkgutil import resolve_name

    for target in (
        "sglang.srt.model_loader.weight_utils:initialize_dummy_weights",
        "sglang.srt.model_executor.model_runner:ModelRunner.sample",
    ):
        assert callable(resolve_name(target))


# -- one engine ------------------------------------------------------------------------------------------------------------------


def test_the_time_of_a_step() -> None:
    """Steps of the whole batch take 2 s; others are left out, as are the first steps and the last."""
    lines = ["0 EXTEND 2", "1 DECODE 1", *(f"{10 + 2 * step} DECODE 2" for step in range(8)), "99 DECODE 2", "100 DECODE 1"]
    assert sglang_engine.step_time(lines, 2, 3) == (2.0, 4)
    with pytest.raises(ValueError, match="1 decode steps of 2 requests among 12 steps, after 7 steps"):
        sglang_engine.step_time(lines, 2, 7)


class FakeEngine:
    """Generates the token 7. Requests that are aborted fail, or end without a number of cached tokens, as in SGLang if they had not
    begun. With ``broken``, requests of 70 tokens get one token too few."""

    def __init__(self, broken: bool) -> None:
        self.broken, self.loop, self.tokenizer_manager = broken, asyncio.new_event_loop(), self
        self.aborted: set[str] = set()

    def abort_request(self, rid: str) -> None:
        self.aborted.add(rid)

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], rid: str) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        if rid in self.aborted:
            if len(self.aborted) % 2:
                return {"output_ids": [], "meta_info": {"id": rid, "finish_reason": {"type": "abort"}}}
            raise ValueError("aborted")
        tokens = sampling_params["max_new_tokens"]
        return {"output_ids": [7] * (tokens - (self.broken and tokens == 70)), "meta_info": {"cached_tokens": 1}}


def test_prompts_of_a_task_do_not_depend_on_other_tasks(tmp_path: Path) -> None:
    """Variants run different tasks, and are compared by their results for the same prompts."""

    class Recording(sglang_engine.Engine):
        def generate(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> tuple[float, list[list[int]]]:
            self.seen = prompts
            return 1.0, [[7]]

        def measure_decode(self, *_: Any, **__: Any) -> None:
            self.prompts(1, 3)

    engines = [Recording(sglang_engine.arguments(["--name", name, "--out", str(tmp_path)])) for name in ("sglang", "plugin")]
    for engine, tasks in zip(engines, (["decode", "tokens"], ["tokens"]), strict=True):
        assert [engine.task(name) for name in tasks] == [True] * len(tasks)
    assert engines[0].seen == engines[1].seen


@pytest.mark.parametrize("broken", [False, True])
def test_lost_requests_are_counted(tmp_path: Path, broken: bool) -> None:
    engine = sglang_engine.Engine(sglang_engine.arguments(["--name", "plugin", "--out", str(tmp_path), "--requests", "60"]))
    engine.engine = FakeEngine(broken)
    engine.requests()
    (row,) = map(json.loads, (tmp_path / "plugin.jsonl").read_text().splitlines())
    every = [request for burst in bursts(60, engine.highest_token) for request in burst]
    expected = sum(request.tokens == 70 and not request.aborted for request in every) if broken else 0
    assert (row["asked"], row["aborted"], row["lost"]) == (60, sum(request.aborted for request in every), expected)
    assert expected > 0 or not broken


# -- reports ---------------------------------------------------------------------------------------------------------------------


WRITING_ENGINE = """
import argparse, json, os, pathlib, torch
p = argparse.ArgumentParser()
p.add_argument("--name")
p.add_argument("--out", type=pathlib.Path)
p.add_argument("--wait-file", type=pathlib.Path)
a = p.parse_known_args()[0]
if a.name == "plugin-all":
    raise SystemExit("out of memory")
assert os.environ["SGLANG_PLUGINS"]
(a.out / f"{a.name}.ready").touch()
while not a.wait_file.exists():
    pass
with (a.out / f"{a.name}.jsonl").open("w") as file:
    for row in ({"figure": "decode", "batch": 1, "ms": 4.0 if a.name == "sglang" else 2.0}, {"figure": "end"}):
        file.write(json.dumps({"engine": a.name, **row}) + "\\n")
torch.save({"tokens": [[1, 2, 3, 4 if a.name == "sglang" else 5]]}, a.out / f"{a.name}.pt")
"""


def test_reports_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sglang_engine.py").write_text(WRITING_ENGINE)
    monkeypatch.setattr(h200_sglang, "HERE", tmp_path)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    words = ["--folder", str(tmp_path / "found"), "--seconds", "60", "--start-estimate", "-100", "--commit", "0" * 40]
    h200_sglang.main([*words, "--engines", *(f"gpt-oss-120b:{name}" for name in ("sglang", "plugin", "plugin-all"))])
    found = json.loads((tmp_path / "found" / "gpt-oss-120b.json").read_text())
    assert found["metadata"]["git_commit"] == "0" * 40
    assert {row["engine"]: row["ms"] for row in found["rows"] if row["figure"] == "decode"} == {"sglang": 4.0, "plugin": 2.0}
    (failed,) = (row for row in found["rows"] if row["figure"] == "failed")
    assert (failed["engine"], "out of memory" in failed["error"]) == ("plugin-all", True)
    assert found["compared"]["sglang : plugin"]["tokens"]["same"] == 0.75
    said = capsys.readouterr().out
    assert "plugin: decode 1 2.00" in said
    assert "holds plugin decode 1: 2.00 ms (<= 2.90)" in said


def test_the_readme_has_the_measured_times() -> None:
    folder = Path(h200_sglang.__file__).parent
    rows = json.loads((folder / "models" / "gpt-oss-120b.json").read_text())["rows"]
    assert [line for line in h200_sglang.judged(rows) if "plugin-all" in line and not line.startswith("holds")] == []
    readme = (folder.parent / "README.md").read_text().splitlines()
    for row in rows:
        if row["engine"] in (engines := ("sglang", "plugin", "plugin-all")) and row["figure"] in ("decode", "prefill"):
            name = f"decode {row['batch']}" if row["figure"] == "decode" else "prefill"
            (line,) = (line for line in readme if line.startswith(f"| {name} |"))
            value = f"{row['ms']:.2f}" if row["figure"] == "decode" else f"{row['tokens_per_s']:,}"
            assert line.split(" | ")[1 + engines.index(row["engine"])] == value, name


def test_bars() -> None:
    def rows(engine: str, decode: dict[int, float], rate: int) -> list[dict[str, Any]]:
        prefill = {"engine": engine, "figure": "prefill", "tokens_per_s": rate}
        return [prefill, *({"engine": engine, "figure": "decode", "batch": batch, "ms": ms} for batch, ms in decode.items())]

    own = rows("sglang", {1: 5.1, 4: 7.0}, 36_900)
    assert [line.split()[0] for line in h200_sglang.judged([*own, *rows("plugin", {1: 2.8, 4: 6.9}, 48_000)])] == ["holds"] * 3
    assert [line.split()[0] for line in h200_sglang.judged([*own, *rows("plugin", {1: 3.0, 4: 7.1}, 46_000)])] == ["MISSED"] * 3
    disturbed = [{**row, "disturbed": True} for row in rows("plugin", {1: 3.0}, 46_000)]
    assert h200_sglang.judged([*own, *disturbed]) == []
