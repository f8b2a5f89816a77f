"""Tests checkpoints in the released layout: the generated tokens equal those of transformers. Also tests reading ahead."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_models import YARN, TensorDict, make_config, tensors_of
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from gpt_oss import Checkpoint, Config, ConfigError, Engine, GptOss, PagedKVCache, Request, save_checkpoint
from gpt_oss.__main__ import app
from gpt_oss.config import alternating
from gpt_oss.loader import reading_order
from gpt_oss.read_ahead import ReadAhead, bytes_of
from gpt_oss.tokenizer import tokenizer_of

WORDS = (
    "[UNK]",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "user",
    "assistant",
    "hello",
    "there",
    "world",
    "a",
    "kernel",
)
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m.role }} <|message|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant{% endif %}"
)
PROMPTS = ("hello there world", "is a", "world " * 20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint folder: two shards in bf16 with MXFP4 experts, a tokenizer with a chat template, and stop tokens."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("checkpoint")
    config = make_config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=32,
        layer_types=alternating(4),
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=4,
        rope=YARN,
        quantization="mxfp4",
        eos_token_ids=(4,),
    )
    save_checkpoint(directory, config, tensors_of(config, torch.bfloat16, seed=3), shard_bytes=60_000)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3], "do_sample": True}))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    """Returns transformers' model of the folder, dequantised by transformers."""
    import transformers

    return transformers.GptOssForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).float()


def generated_by(model: Any, prompt: list[int], tokens: int, stop: tuple[int, ...]) -> list[int]:
    """Returns the greedy continuation, computed with one pass over the whole sequence per token."""
    found: list[int] = []
    while len(found) < tokens and (not found or found[-1] not in stop):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found]), use_cache=False).logits
        found.append(int(logits[0, -1].argmax()))
    return found


def test_it_generates_what_transformers_generates(directory: Path, theirs: Any) -> None:
    config, tokenizer = Config.from_directory(directory), tokenizer_of(directory, len(WORDS))
    model = GptOss(config, Checkpoint(directory), torch.float32)
    engine = Engine(model, PagedKVCache(config, 64, 4, torch.float32), prefill_tokens=7)
    prompts = [encode(prompt) for prompt in PROMPTS for encode in (tokenizer.encode, tokenizer.chat)]
    requests = [Request(prompt, 12, stop_tokens=frozenset(config.eos_token_ids)) for prompt in prompts]
    found = [completion.tokens for completion in engine.generate(requests)]
    assert found == [generated_by(theirs, prompt, 12, config.eos_token_ids) for prompt in prompts]
    assert len({tuple(tokens) for tokens in found}) > 3, "the texts should differ, or this shows little"


def test_the_chat_template_of_the_folder(directory: Path) -> None:
    tokenizer = tokenizer_of(directory, len(WORDS))
    assert tokenizer.has_chat
    wanted = ("<|start|>", "user", "<|message|>", "hello", "world", "<|end|>", "<|start|>", "assistant")
    assert tokenizer.chat("hello world") == [WORDS.index(word) for word in wanted]
    assert tokenizer.encode("hello world") == [WORDS.index("hello"), WORDS.index("world")]


def test_a_text_ends_where_the_generation_settings_say(directory: Path, tmp_path: Path) -> None:
    assert Config.from_directory(directory).eos_token_ids == (4, 3)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert Config.from_directory(tmp_path).eos_token_ids == (4,)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')
    assert Config.from_directory(tmp_path).eos_token_ids == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 500}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        Config.from_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        Config.from_directory(tmp_path)


def test_the_demo_answers_messages(directory: Path) -> None:
    options = ("--device", "cpu", "--json", "--prompt", "hello there", "--max-tokens", "4", "--temperature", "0")
    runs = [CliRunner().invoke(app, ["demo", "--checkpoint", str(directory), *options, *more]) for more in ((), ("--no-chat",))]
    assert [run.exit_code for run in runs] == [0, 0], runs[0].output + runs[1].output
    config, tokenizer = Config.from_directory(directory), tokenizer_of(directory, len(WORDS))
    model = GptOss(config, Checkpoint(directory), torch.float32)
    for run, prompt in zip(runs, (tokenizer.chat("hello there"), tokenizer.encode("hello there")), strict=True):
        engine = Engine(model, PagedKVCache(config, 16, 4, torch.float32))
        (wanted,) = engine.generate([Request(prompt, 4, stop_tokens=frozenset(config.eos_token_ids))])
        assert json.loads(run.stdout[run.stdout.index("{") :])["completions"][0]["tokens"] == wanted.tokens


def test_loading_shows_how_far_it_is(directory: Path) -> None:
    console = Console(record=True, width=132, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    checkpoint = Checkpoint(directory)
    GptOss(Config.from_directory(directory), checkpoint, torch.float32, console=console)
    shown = console.export_text()
    assert "loading the weights" in shown
    kilobytes = f"{sum(bytes_of(checkpoint).values()) / 1000:.1f}"
    assert f"{kilobytes}/{kilobytes} kB" in shown


# -- reading ahead ------------------------------------------------------------------------------------------------------------


class Noted:
    """Records which thread reads which tensor. Calls ``beginning`` with a tensor's name before the tensor is read."""

    def __init__(self, source: TensorDict, beginning: Callable[[str], object] = str, broken: str = "") -> None:
        self._source, self._beginning, self._broken = source, beginning, broken
        self.threads: dict[str, str] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._source.shapes()

    def dtypes(self) -> dict[str, str]:
        return self._source.dtypes()

    def get(self, name: str) -> Tensor:
        assert name not in self.threads, f"{name} was read twice"
        self.threads[name] = threading.current_thread().name
        self._beginning(name)
        if name == self._broken:
            raise OSError(f"{name} cannot be read")
        return self._source.get(name)


@pytest.fixture
def small() -> TensorDict:
    return TensorDict({f"t{i}": torch.full((250,), float(i)) for i in range(30)})  # each tensor has 1000 bytes


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not any(thread.name == "reading weights" for thread in threading.enumerate())


@pytest.mark.parametrize("most_bytes", [1, 2500, 1 << 20])
@pytest.mark.parametrize("order", [range(30), range(29, -1, -1), [*range(0, 30, 2), *range(1, 30, 2)]], ids=["same", "back", "odd"])
def test_tensors_are_right_in_any_order(small: TensorDict, order: Any, most_bytes: int) -> None:
    source = Noted(small)
    with ReadAhead(source, [f"t{i}" for i in range(28)], most_bytes) as reader:  # names 28 of the 30 tensors
        for i in order:
            assert torch.equal(reader.get(f"t{i}"), small.tensors[f"t{i}"])
    assert len(source.threads) == 30


def test_no_more_is_held_than_allowed(small: TensorDict) -> None:
    source = Noted(small)

    def read_on(tensors: int) -> None:
        while len(source.threads) < tensors:
            time.sleep(0.01)
        time.sleep(0.2)  # in this time, a faulty reader would read further tensors
        assert [*source.threads] == [f"t{i}" for i in range(tensors)]

    with ReadAhead(source, [*small.tensors], 5000) as reader:
        read_on(5)
        reader.get("t0")
        read_on(6)


def test_what_fails_fails_where_it_is_asked_for(small: TensorDict) -> None:
    with ReadAhead(Noted(small, broken="t3"), [*small.tensors]) as reader:
        for i in range(3):
            reader.get(f"t{i}")
        with pytest.raises(OSError, match="t3 cannot be read"):
            reader.get("t3")
        assert reader.get("t4")[0] == 4


def test_a_tensor_is_prepared_while_the_next_one_is_read(small: TensorDict) -> None:
    """Each read waits until the previous tensor is prepared. Each preparation waits until the next read has started. So the test
    ends only if reading and preparing overlap.
    """
    names = [*small.tensors]
    begun, prepared = ({name: threading.Event() for name in names} for _ in range(2))

    def beginning(name: str) -> None:
        begun[name].set()
        if name != names[0]:
            prepared[names[names.index(name) - 1]].wait()

    with ReadAhead(Noted(small, beginning), names) as reader:
        for name, following in itertools.zip_longest(names, names[1:]):
            reader.get(name)
            if following is not None:
                begun[following].wait()
            prepared[name].set()


def test_the_order_names_every_tensor_of_a_model() -> None:
    for tied in (False, True):
        config = make_config(tie_word_embeddings=tied)
        asked = Noted(tensors_of(config))
        GptOss(config, asked, torch.float32)
        assert sorted(asked.threads) == sorted(reading_order(config))
