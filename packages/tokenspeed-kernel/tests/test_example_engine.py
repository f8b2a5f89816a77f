"""The engine in docs/examples must generate the same tokens as a plain PyTorch model, with any other requests running at the same
time."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 2, 4, 2, 8, 24, 40, 61
THETA, EPS = 100.0, 1e-5
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [11, 12, 13, 14], [3, 1, 4, 1, 5, 9, 2, 6], [60, 0]]
MAX_TOKENS = [9, 5, 1, 12, 7]
Weights = dict[str, Tensor]

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the documentation is no part of the source distribution")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("engine")


@pytest.fixture(params=["llama", "qwen3"])
def weights(request: pytest.FixtureRequest) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    made = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": 1 + draw(HIDDEN)}
    for prefix in (f"model.layers.{layer}." for layer in range(LAYERS)):
        made |= {prefix + f"{name}_layernorm.weight": 1 + draw(HIDDEN) for name in ("input", "post_attention")}
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        made |= {prefix + f"self_attn.{name}_proj.weight": draw(count, HIDDEN) * 3 for name, count in rows.items()}
        made[prefix + "self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        made |= {prefix + f"mlp.{name}_proj.weight": draw(INNER, HIDDEN) for name in ("gate", "up")}
        made[prefix + "mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        if request.param == "qwen3":
            made |= {prefix + f"self_attn.{name}_norm.weight": 1 + draw(HEAD_DIM) for name in "qk"}
    return made if request.param == "qwen3" else {**made, "lm_head.weight": draw(VOCAB, HIDDEN)}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """Computes RoPE of ``[tokens, heads, HEAD_DIM]`` with complex numbers."""
    first, second = x.chunk(2, dim=-1)
    angles = torch.arange(len(x)).unsqueeze(1) / THETA ** (torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference(weights: Weights, tokens: list[int]) -> Tensor:
    """Computes the logits after each token of a sequence, without a cache."""
    x = weights["model.embed_tokens.weight"][tokens]
    for prefix in (f"model.layers.{layer}." for layer in range(LAYERS)):
        normed = norm(x, weights[prefix + "input_layernorm.weight"])
        q, k, v = (linear(normed, weights[f"{prefix}self_attn.{n}_proj.weight"]).unflatten(1, (-1, HEAD_DIM)) for n in "qkv")
        if prefix + "self_attn.q_norm.weight" in weights:
            q, k = (norm(y, weights[f"{prefix}self_attn.{n}_norm.weight"]) for y, n in ((q, "q"), (k, "k")))
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        hidden = torch.ones(scores.shape[1:]).triu(1) > 0
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + linear(attended.flatten(1), weights[prefix + "self_attn.o_proj.weight"])
        normed = norm(x, weights[prefix + "post_attention_layernorm.weight"])
        gate, up = (linear(normed, weights[f"{prefix}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + linear(silu(gate) * up, weights[prefix + "mlp.down_proj.weight"])
    return linear(norm(x, weights["model.norm.weight"]), weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


def greedy(weights: Weights, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make(example: ModuleType, weights: Weights, device: str = "cpu", **options: Any) -> Any:
    config = example.Config(LAYERS, KV_HEADS, HEAD_DIM, EPS, THETA, max_positions=48)
    model = example.Model(config, {name: weight.to(device) for name, weight in weights.items()})
    return example.Engine(model, config, **{"pages": 40, "page_size": 4, "max_batch": 8, **options})


def requests(example: ModuleType, **options: Any) -> list[Any]:
    return [example.Request(prompt, count, **options) for prompt, count in zip(PROMPTS, MAX_TOKENS, strict=True)]


def test_tokens_are_the_references(example: ModuleType, weights: Weights) -> None:
    wanted = [greedy(weights, prompt, count) for prompt, count in zip(PROMPTS, MAX_TOKENS, strict=True)]
    assert len({token for tokens in wanted for token in tokens}) > 10, "a model that repeats itself shows little"
    assert make(example, weights).generate(requests(example)) == wanted
    # Prompts run in chunks of three tokens, at most two sequences run at a time, and the cache has pages for two sequences.
    few = make(example, weights, prefill_tokens=3, max_batch=2, pages=11)
    assert few.generate(requests(example)) == wanted
    assert few.generate(requests(example)[::-1]) == wanted[::-1], "seats and pages are used again"
    assert sorted(few.free_pages) == list(range(11))
    assert few.free_seats == [1, 0]


def test_logits_are_the_references(example: ModuleType, weights: Weights) -> None:
    engine, seen = make(example, weights, prefill_tokens=5), []
    forward = engine.model.forward
    engine.model.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
    (output,) = engine.generate([example.Request(PROMPTS[1], 6)])
    got = torch.cat([logits[:1] for logits in seen if len(logits)])
    torch.testing.assert_close(got, reference(weights, [*PROMPTS[1], *output])[len(PROMPTS[1]) - 1 : -1], rtol=1e-4, atol=1e-4)


def test_sampled_tokens_do_not_depend_on_the_batch(example: ModuleType, weights: Weights) -> None:
    options = {"temperature": 2.0, "top_k": 20, "top_p": 0.95}
    together = make(example, weights).generate(requests(example, seed=5, **options))
    engine = make(example, weights, prefill_tokens=5)
    assert together == [engine.generate([one])[0] for one in requests(example, seed=5, **options)]
    assert together != make(example, weights).generate(requests(example, seed=6, **options))
    assert together != make(example, weights).generate(requests(example))


def test_stop_tokens_and_limits(example: ModuleType, weights: Weights) -> None:
    engine = make(example, weights)
    wanted = greedy(weights, PROMPTS[3], 12)
    stop = wanted[4]
    assert engine.generate([example.Request(PROMPTS[3], 12, stop_tokens=[stop])]) == [wanted[: wanted.index(stop) + 1]]
    for prompt, count in (([], 3), ([1], 0), ([1] * 40, 9)):
        with pytest.raises(ValueError, match="a request needs a prompt, and"):
            engine.add(example.Request(prompt, count))
    with pytest.raises(ValueError, match=r"no use for .*0\.self_attn\.q_proj\.bias"):
        make(example, {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(HEADS * HEAD_DIM)})


@pytest.mark.nvidia
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tokens_of_cuda_graphs_are_the_references(example: ModuleType, weights: Weights) -> None:
    engine = make(example, weights, "cuda", prefill_tokens=6, max_batch=3)
    assert list(engine.graphs) == [3, 2, 1]
    wanted = [greedy(weights, prompt, count) for prompt, count in zip(PROMPTS, MAX_TOKENS, strict=True)]
    assert engine.generate(requests(example)) == wanted


def test_the_benchmark_writes_a_report(example: ModuleType, tmp_path: Path) -> None:
    benchmark = importlib.import_module("engine_benchmark")
    sizes = ["--tiny", "--device", "cpu", "--batches", "1", "3", "--prompt", "20", "--steps", "3", "--repeats", "2"]
    benchmark.main([*sizes, "--output", str(tmp_path / "engine.json")])
    report = json.loads((tmp_path / "engine.json").read_text())
    assert report["metadata"]["command"].startswith("python docs/examples/engine_benchmark.py --tiny")
    assert {"attention.mha_decode_with_kvcache", "sampling.sample_top_k_top_p"} <= {row["operator"] for row in report["kernels"]}
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert len(row["decode_ms"]) == 3
        assert len(row["prefill_s"]) == 2
        assert row["ms_per_token"] in row["decode_ms"]
        assert row["prefill_tokens_per_s"] > 0
