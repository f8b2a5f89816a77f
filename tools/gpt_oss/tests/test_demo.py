"""Runs the command line as a user does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python
from rich.console import Console
from typer.testing import CliRunner

from gpt_oss import demo
from gpt_oss.__main__ import app
from gpt_oss.check import compare_with_reference
from gpt_oss.config import preset
from gpt_oss.kernels import reference_only
from gpt_oss.loader import RandomTensors, save_checkpoint
from gpt_oss.request import Completion, Request
from gpt_oss.sampling import Sampling
from gpt_oss.tokenizer import ByteTokenizer, CheckpointTokenizer, tokenizer_of
from tokenspeed_kernel import rmsnorm


def gpt_oss(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return run_python("-m", "gpt_oss", *arguments, env=environment)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    run = gpt_oss("demo", "--device", "cpu", "--json", "--max-tokens", "8")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_demo_generates(shown: dict[str, Any]) -> None:
    assert [completion["prompt"] for completion in shown["completions"]] == list(demo.PROMPTS)
    tokenizer = ByteTokenizer()
    for completion in shown["completions"]:
        assert len(completion["tokens"]) == 8
        assert completion["text"] == tokenizer.decode(completion["tokens"])
    assert shown["generated_tokens"] == 8 * len(demo.PROMPTS)
    assert shown["tokens_per_second"] > 0
    assert shown["random_weights"]
    assert shown["compilations"] == {"before": 0, "within": 0}  # PyTorch compiles nothing
    assert {phase for phase, count in shown["steps"].items() if count} == {"prefill", "mixed", "decode"}


def test_demo_shows_every_operator_and_why(shown: dict[str, Any]) -> None:
    served = {row["operator"] for row in shown["kernels"]}
    assert served == {
        "attention.mha_prefill",
        "attention.mha_extend_with_kvcache",
        "attention.mha_with_kvcache",
        "attention.mha_decode_with_kvcache",
        "attention.rmsnorm_qkv_rope",
        "embedding.apply_rope",
        "gemm.mm",
        "kvcache.positions_to_slots",
        "moe.moe_apply",
        "moe.moe_topk",
        "moe.rmsnorm_moe_topk",
        "norm.rmsnorm",
        "sampling.argmax",
        "sampling.sample_top_k_top_p",
    }
    for row in shown["kernels"]:
        assert row["kernel"] == row["explanation"]["chosen"]
        assert "priority" in row["why"]
        chosen, *others = (each for each in row["explanation"]["candidates"] if each["accepted"])
        assert row["why"].startswith(chosen["reason"])
        assert [f"not {other['name']}: eligible" in row["why"] for other in others[:1]] == [True] * len(others[:1])


def test_demo_agrees_with_the_reference(shown: dict[str, Any]) -> None:
    check = shown["check"]
    assert check["agrees"]
    assert check["same_tokens"] == check["tokens"] == shown["generated_tokens"]
    assert check["max_abs_difference"] < 1e-4


def test_demo_for_people() -> None:
    options = demo.Options(max_tokens=2, sampling=Sampling(0.8), mixed=True)
    console = Console(record=True, width=132, file=open("/dev/null", "w"))  # noqa: SIM115
    demo.show(demo.run(options, console), console)
    text = console.export_text()
    for wanted in (
        "GPT-OSS generates text tokens",
        "mha_with_kvcache",
        "priority",
        "tokens/s",
        "It agrees with the reference",
    ):
        assert wanted in text


def test_demo_on_a_checkpoint(tmp_path: Path) -> None:
    config = preset("tiny").with_layers(2)
    save_checkpoint(tmp_path, config, RandomTensors(config, dtype=torch.bfloat16))
    options = ("--device", "cpu", "--json", "--prompt", "Once upon a time", "--max-tokens", "6", "--temperature", "0")
    run = gpt_oss("demo", "--checkpoint", str(tmp_path), *options, "--dtype", "bfloat16", "--check")
    assert run.returncode == 0, run.stderr
    shown = json.loads(run.stdout)
    assert not shown["random_weights"]
    assert len(shown["completions"]) == 1
    assert shown["check"]["agrees"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "huge"), "preset must be 'tiny' or 'gpt-oss-20b' or 'gpt-oss-120b', got 'huge'"),
        (("--checkpoint", "/nowhere"), "/nowhere/config.json cannot be read"),
        (("--checkpoint", "/nowhere", "--layers", "2"), "layers must be left out with a checkpoint, got 2"),
        (("--layers", "1000000000000"), "layers must be an int from 1 to 10000, got 1000000000000"),
        (("--max-tokens", "1000000000"), "prompt and max_tokens must together be at most the context of 1024 tokens, got 7 and"),
        (("--temperature", "nan"), "temperature must be a number from 0 to 1e+38, got nan"),
        (("--temperature", "-1"), "temperature must be a number from 0 to 1e+38, got -1.0"),
        (("--chat",), "chat needs a checkpoint with a chat template; bytes have none"),
        (("--top-k", "10000000000"), "top_k must be an int from 0 to 2147483647, got 10000000000"),
        (("--top-p", "2"), "top_p must be a number from 1e-37 to 1, got 2.0"),
        (("--seed", str(2**64)), f"seed must be an int from {-(2**63)} to {2**63 - 1}, got {2**64}"),
        (("--device", "toaster"), "device must be one that PyTorch can use here, got 'toaster': "),
        (("--device", "meta"), "device must be one that PyTorch can use here, got 'meta': "),
    ],
)
def test_demo_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    run = CliRunner().invoke(app, ["demo", "--device", "cpu", *arguments])
    assert run.exit_code == 2, run.output
    assert f"error: {message}" in run.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["demo", "benchmark"])
def test_a_device_that_is_not_there(command: str) -> None:
    run = CliRunner().invoke(app, [command, "--device", "cuda"])
    assert run.exit_code == 2
    assert "error: device must be one that PyTorch can use here, got 'cuda': " in run.output


NO_COUNT = (0, -1, 2.5, True, "4", [4])
NO_FLAG = (None, 0, "yes")


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "checkpoint": ("/tmp", 5, True),
        "preset": (None, "huge", 5, ["tiny"]),
        "layers": NO_COUNT,
        "prompts": (None, (), [], "Hello", b"Hello", [b"Hello"], [1], {"Hello"}, torch.zeros(2)),
        "max_tokens": (None, *NO_COUNT),
        "sampling": (None, 0.8, {}),
        "mixed": NO_FLAG,
        "chat": NO_FLAG[1:],
        "dtype": (None, "float32", torch.int64),
        "device": (None, 0, torch.device("cpu")),
        "seed": (None, 1.5, True, "0"),
        "check": NO_FLAG,
        "prefill_tokens": (None, *NO_COUNT),
        "page_size": (None, *NO_COUNT),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_options(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be .*, got "):
            demo.Options(**{name: value})


def test_every_option_is_checked() -> None:
    assert demo._OPTIONS.keys() == {field.name for field in dataclasses.fields(demo.Options)}


def test_seeds_go_on_beyond_the_largest() -> None:
    options = demo.Options(layers=1, max_tokens=1, sampling=Sampling(0.8, seed=2**63 - 1), prompts=("a", "b", "c"), check=False)
    completions = demo.run(options, Console(quiet=True)).completions
    assert [completion.request.sampling.seed for completion in completions] == [2**63 - 1, -(2**63), 1 - 2**63]


def test_disagreement_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's logits are changed by slightly more than the tolerance."""

    def collect(completion: Completion, event: Any, original: Any = Completion.add) -> None:
        original(completion, event)
        if event.logits is not None:
            completion.logits[-1] = event.logits * 1.0001

    monkeypatch.setattr(Completion, "add", collect)
    run = CliRunner().invoke(app, ["demo", "--device", "cpu", "--max-tokens", "2", "--prompt", "Hello"])
    assert run.exit_code == 1
    assert "DISAGREES" in run.output


def test_check_notices_a_wrong_token() -> None:
    config = preset("tiny").with_layers(2)
    result = demo.run(demo.Options(layers=2, max_tokens=4, prompts=("Hello",)), Console(quiet=True))
    (completion,) = result.completions
    assert result.agreement is not None
    assert result.agreement.agrees
    completion.tokens[1] += 1
    agreement = compare_with_reference(config, RandomTensors(config), [completion], torch.bfloat16, "cpu")
    assert agreement.same_tokens < 4
    assert agreement.same_sequences == 0
    assert not agreement.agrees


def test_reference_only_forces_every_operator() -> None:
    x, weight = torch.ones(1, 4), torch.ones(4)
    with reference_only():
        explanation = rmsnorm.explain(x, weight)
    assert explanation.override is not None
    assert explanation.chosen is not None
    assert explanation.chosen.solution == "reference"
    assert rmsnorm.explain(x, weight).override is None


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.START
    assert max(tokens) < tokenizer.vocab_size
    assert tokenizer.decode([*tokens, tokenizer.END]) == text


def test_which_tokenizer(tmp_path: Path) -> None:
    assert isinstance(tokenizer_of(None, 100), ByteTokenizer)
    assert isinstance(tokenizer_of(tmp_path, 258), ByteTokenizer)


def test_a_checkpoint_s_own_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    tokenizer = tokenizer_of(tmp_path, 3)
    assert isinstance(tokenizer, CheckpointTokenizer)
    assert tokenizer.encode("hello world") == [1, 2]
    assert tokenizer.decode([2, 1]).split() == ["world", "hello"]


def test_a_request_keeps_its_logits_only_if_asked() -> None:
    assert Completion(Request([1])).logits == []
