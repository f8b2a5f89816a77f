"""Tests that the logits equal those of transformers' model with the same weights, however the sequences are chunked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_oss_models import YARN, TensorDict, make_config, peer, random_prompts, tensors_of
from torch import Tensor

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import FULL, SLIDING, Config, RopeConfig, alternating
from gpt_oss.loader import CheckpointError
from gpt_oss.model import GptOss

TOLERANCE = 2e-4
PAGE_SIZE = 4
LENGTHS = (1, 23, 6, 7, 40)  # lengths below, at and above the window of 6

CONFIGS = {
    "two layers": make_config(),
    "groups of 8, 5 experts of which 3, yarn": make_config(
        layer_types=alternating(4),
        num_attention_heads=8,
        num_key_value_heads=1,
        num_local_experts=5,
        num_experts_per_tok=3,
        rope=YARN,
    ),
    "no groups, 7 experts of which 1, odd vocabulary and sizes": make_config(
        num_key_value_heads=4, num_local_experts=7, num_experts_per_tok=1, vocab_size=101, hidden_size=36, intermediate_size=17
    ),
    "groups of 3, one expert, all layers slide, no biases": make_config(
        layer_types=(SLIDING,) * 3,
        num_attention_heads=6,
        num_local_experts=1,
        num_experts_per_tok=1,
        attention_bias=False,
        sliding_window=1,
    ),
    "full then sliding, 13 experts of which 4, stretched 8 times": make_config(
        layer_types=(FULL, SLIDING, FULL),
        head_dim=16,
        num_local_experts=13,
        num_experts_per_tok=4,
        rope=RopeConfig(kind="yarn", factor=8.0, original_max_positions=12, truncate=False),
    ),
    "the shape of the tiny preset, dense": make_config(
        hidden_size=128,
        intermediate_size=96,
        num_attention_heads=8,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=4,
        rope=YARN,
    ),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> Config:
    return request.param


@pytest.fixture
def source(config: Config) -> TensorDict:
    return tensors_of(config)


@pytest.fixture
def prompts(config: Config) -> list[list[int]]:
    return random_prompts(LENGTHS, config.vocab_size)


@pytest.fixture
def model(config: Config, source: TensorDict) -> GptOss:
    return GptOss(config, source, torch.float32)


def whole(model: GptOss, prompts: list[list[int]]) -> list[Tensor]:
    """Returns the logits of all tokens. One prefill without a cache runs all prompts."""
    logits = model.forward(make_batch([Piece(prompt) for prompt in prompts], None, "cpu"), None)
    return list(logits.split([len(prompt) for prompt in prompts]))


class Placed:
    """Prompts that have pages of a cache and run in chunks."""

    def __init__(self, model: GptOss, prompts: list[list[int]]) -> None:
        self.model, self.prompts = model, prompts
        pages = [-(-len(prompt) // PAGE_SIZE) for prompt in prompts]
        self.cache = PagedKVCache(model.config, sum(pages) + 2, PAGE_SIZE, model.dtype)
        self.cache.allocator.allocate(1)  # makes page numbers differ from positions
        self.pages = [self.cache.allocator.allocate(count)[::-1] for count in pages]
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        self.phases: set[Phase] = set()

    def run(self, cuts: list[tuple[int, int, int]], phase: Phase | None = None) -> None:
        """Runs one pass over chunks ``(prompt, start, stop)``."""
        pieces = [Piece(self.prompts[i][start:stop], start, self.pages[i]) for i, start, stop in cuts]
        batch = make_batch(pieces, self.cache, "cpu", phase=phase)
        self.phases.add(batch.phase)
        logits = self.model.forward(batch, self.cache).split([stop - start for _, start, stop in cuts])
        for (index, _, _), part in zip(cuts, logits, strict=True):
            self.logits[index].append(part)

    def worst(self, expected: list[Tensor]) -> float:
        return max((torch.cat(got) - want).abs().max().item() for got, want in zip(self.logits, expected, strict=True))


def test_logits_are_those_of_transformers(config: Config, source: TensorDict, prompts: list[list[int]], model: GptOss) -> None:
    pytest.importorskip("transformers")
    theirs = peer(config, source)
    with torch.no_grad():
        expected = [theirs(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    assert all(want.abs().max() > 0.5 for want in expected), "such small logits would make the tolerance meaningless"
    differences = [(got - want).abs().max().item() for got, want in zip(whole(model, prompts), expected, strict=True)]
    print(f"logits differ by at most {max(differences):.2e}")  # `pytest -rP` shows it
    assert max(differences) <= TOLERANCE


def test_a_prefill_into_the_cache_changes_nothing(model: GptOss, prompts: list[list[int]]) -> None:
    placed = Placed(model, prompts)
    placed.run([(i, 0, len(prompt)) for i, prompt in enumerate(prompts)])
    assert placed.phases == {Phase.PREFILL}
    assert placed.worst(whole(model, prompts)) <= TOLERANCE


@pytest.mark.parametrize("chunk", [3, 8])
def test_extending_in_chunks(model: GptOss, prompts: list[list[int]], chunk: int) -> None:
    """Prompt i is i chunks ahead of the first prompt, so a pass has chunks of different lengths."""
    placed = Placed(model, prompts)
    for start in range(-chunk * len(prompts), max(LENGTHS), chunk):
        cuts = [(i, max(start + chunk * i, 0), min(start + chunk * (i + 1), len(p))) for i, p in enumerate(prompts)]
        cuts = [cut for cut in cuts if cut[1] < cut[2]]
        if cuts:
            placed.run(cuts, Phase.EXTEND)
    assert placed.phases == {Phase.EXTEND}
    assert placed.worst(whole(model, prompts)) <= TOLERANCE


def test_decoding_token_by_token(model: GptOss, prompts: list[list[int]]) -> None:
    placed = Placed(model, prompts)
    placed.run([(i, 0, 1) for i in range(len(prompts))])
    for position in range(1, max(LENGTHS)):
        placed.run([(i, position, position + 1) for i, prompt in enumerate(prompts) if position < len(prompt)])
    assert placed.phases == {Phase.PREFILL, Phase.DECODE}
    assert placed.worst(whole(model, prompts)) <= TOLERANCE


def test_only_the_rows_wanted() -> None:
    config = make_config()
    model = GptOss(config, tensors_of(config), torch.float32)
    prompts = random_prompts((4, 9), config.vocab_size)
    expected = whole(model, prompts)
    logits = model.forward(make_batch([Piece(p) for p in prompts], None, "cpu", logits_of=[1, 0]), None)
    torch.testing.assert_close(logits, torch.stack((expected[1][-1], expected[0][-1])))


def test_window_ends_where_it_should() -> None:
    """With one sliding layer, a token's logits depend on exactly the last ``sliding_window`` tokens."""
    config = make_config(layer_types=(SLIDING,), sliding_window=5)
    model = GptOss(config, tensors_of(config), torch.float32)
    prompt = random_prompts((12,), config.vocab_size)[0]
    last = whole(model, [prompt])[0][-1]
    changes = []
    for position in range(12):
        other = list(prompt)
        other[position] = (other[position] + 1) % config.vocab_size
        changes.append(not torch.equal(whole(model, [other])[0][-1], last))
    assert changes == [False] * 7 + [True] * 5


def test_sinks_take_weight() -> None:
    config = make_config()
    source = tensors_of(config)
    sinks = {name: tensor + 5 for name, tensor in source.tensors.items() if name.endswith("sinks")}
    prompts = random_prompts((8,), config.vocab_size)
    plain = whole(GptOss(config, source, torch.float32), prompts)[0]
    drained = whole(GptOss(config, TensorDict({**source.tensors, **sinks}), torch.float32), prompts)[0]
    assert (plain - drained).abs().max() > 0.01


def test_positions_are_bounded_by_what_was_asked_for() -> None:
    config = make_config()
    model = GptOss(config, tensors_of(config), torch.float32, max_positions=16)
    assert model.cos_sin.shape == (16, config.head_dim)
    assert GptOss(config, tensors_of(config), torch.float32, max_positions=10**6).max_positions == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {}}, r"config must be a Config, got \{\}"),
        ({"dtype": torch.int32}, "dtype must be a floating-point torch.dtype, got torch.int32"),
        ({"dtype": "bfloat16"}, r"dtype must be a floating-point torch.dtype, got 'bfloat16' \(str\)"),
        ({"max_positions": 0}, "max_positions must be an int of at least 1 or None, got 0"),
        ({"max_positions": 16.0}, r"max_positions must be an int of at least 1 or None, got 16.0 \(float\)"),
        ({"max_positions": True}, r"max_positions must be an int of at least 1 or None, got True \(bool\)"),
    ],
)
def test_impossible_models(arguments: dict[str, Any], message: str) -> None:
    config = make_config()
    with pytest.raises((TypeError, ValueError), match=message):
        GptOss(**{"config": config, "source": tensors_of(config), **arguments})


def test_wrong_tensors_are_refused() -> None:
    config = make_config()
    with pytest.raises(CheckpointError, match="sinks"):
        GptOss(config, TensorDict({n: t for n, t in tensors_of(config).tensors.items() if "sinks" not in n}), torch.float32)


def test_fp8_cache_comes_close() -> None:
    config = make_config(layer_types=alternating(4))
    model = GptOss(config, tensors_of(config), torch.float32)
    prompts = random_prompts(LENGTHS, config.vocab_size)
    exact = torch.cat(whole(model, prompts))
    placed = Placed(model, prompts)
    placed.cache = PagedKVCache(config, placed.cache.allocator.total, PAGE_SIZE, torch.float8_e4m3fn)
    placed.run([(i, 0, len(prompt)) for i, prompt in enumerate(prompts)], Phase.EXTEND)
    rounded = torch.cat([torch.cat(parts) for parts in placed.logits])
    error = ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).median()
    assert 1e-4 < error < 0.1
