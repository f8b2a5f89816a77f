"""Tests that compiled kernels run every operator on a GPU, and that the result agrees with the reference."""

from __future__ import annotations

import pytest
import torch
from gpt_oss_models import YARN, make_config, random_prompts, tensors_of
from rich.console import Console

from gpt_oss import Completion, Engine, GptOss, PagedKVCache, Request, Sampling, demo, penalties

pytestmark = [
    pytest.mark.nvidia,
    pytest.mark.amd,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("preset", "layers", "dtype"),
    [
        ("tiny", None, torch.bfloat16),
        ("tiny", None, torch.float16),
        ("tiny", None, torch.float32),
        ("gpt-oss-120b", 4, torch.bfloat16),
    ],
    ids=["tiny bfloat16", "tiny float16", "tiny float32", "four layers of 120b"],
)
def test_every_operator_has_a_kernel_and_agrees(preset: str, layers: int | None, dtype: torch.dtype) -> None:
    options = demo.Options(preset=preset, layers=layers, dtype=dtype, device="cuda", max_tokens=16, mixed=True)
    result = demo.run(options, Console(quiet=True))
    on_the_reference = [heard.explanation for heard in result.kernels if heard.kernel.startswith("reference_")]
    assert not on_the_reference, "\n".join(map(str, on_the_reference))
    assert result.agreement is not None
    assert result.agreement.agrees, result.agreement


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_tokens_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """In fp32, all tokens are equal. In bf16, rounding may decide between nearly equal tokens, so only the logits are compared,
    within the demo's tolerance.
    """
    options = demo.Options(preset="tiny", dtype=dtype, device="cuda", max_tokens=48, sampling=Sampling())
    result = demo.run(options, Console(quiet=True))
    assert result.agreement is not None
    assert result.agreement.tokens == 48 * len(options.prompts)
    assert result.agreement.agrees, result.agreement
    if dtype == torch.float32:
        assert result.agreement.same_tokens == result.agreement.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_gives_what_its_launches_give(dtype: torch.dtype) -> None:
    """Requests start and finish at different times. So rows move, batches are padded, and tokens pass between different kinds of
    passes."""
    config = make_config(rope=YARN, head_dim=16, hidden_size=64)
    model = GptOss(config, tensors_of(config, dtype), dtype, "cuda")
    prompts = random_prompts((3, 19, 1, 11, 6, 8, 2), config.vocab_size)
    samplings = [Sampling(0.8 * (number % 2), seed=number) for number in range(len(prompts))]
    requests = [
        Request(prompt, 3 + 2 * i, sampling, keep_logits=True, logprobs=(None, 0, 5)[i % 3])
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]

    def run(decode: str) -> list[Completion]:
        cache = PagedKVCache(config, 24, 16, dtype, "cuda")
        engine = Engine(model, cache, prefill_tokens=9, max_sequences=5, decode=decode, overlap=True)
        return engine.generate(requests)

    for graphs, static in zip(run("graphs"), run("static"), strict=True):
        assert graphs.tokens == static.tokens
        torch.testing.assert_close(torch.stack(graphs.logits), torch.stack(static.logits))
        chosen = torch.stack(graphs.logits).log_softmax(-1)[range(len(graphs.tokens)), graphs.tokens]
        torch.testing.assert_close(torch.tensor(graphs.logprobs), chosen[: len(graphs.logprobs)], rtol=1e-4, atol=1e-4)
        assert [len(likely) for likely in graphs.likely] == [graphs.request.logprobs] * len(graphs.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_in_graphs_are_those_of_static_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with and without penalties and biases start and finish at different times. Lists are so short that they move."""
    monkeypatch.setattr(penalties, "LEAST_WIDTH", 2)
    config = make_config(rope=YARN, head_dim=16, hidden_size=64)
    model = GptOss(config, tensors_of(config, dtype), dtype, "cuda")
    samplings = [
        Sampling(repetition_penalty=1.4),
        Sampling(0.8, seed=1, frequency_penalty=0.9, logit_bias={3: 2.0, 5: -100}),
        Sampling(),
        Sampling(logit_bias={7: 100.0}),
        Sampling(1.0, seed=4, presence_penalty=-1.0),
        Sampling(0.8, seed=5),
        Sampling(repetition_penalty=0.7, frequency_penalty=2, presence_penalty=2, logit_bias=dict.fromkeys(range(97), 1.0)),
    ]
    prompts = random_prompts((3, 19, 1, 11, 6, 8, 2), config.vocab_size)
    requests = [Request(prompt, 7 + 2 * i, samplings[i], keep_logits=True, logprobs=0) for i, prompt in enumerate(prompts)]

    def run(decode: str) -> list[Completion]:
        cache = PagedKVCache(config, 24, 16, dtype, "cuda")
        engine = Engine(model, cache, prefill_tokens=9, max_sequences=5, decode=decode, overlap=True)
        return engine.generate(requests)

    static = run("static")
    for graphs, wanted in zip(run("graphs"), static, strict=True):
        assert graphs.tokens == wanted.tokens
        torch.testing.assert_close(torch.stack(graphs.logits), torch.stack(wanted.logits))
        chosen = torch.stack(graphs.logits).log_softmax(-1)[range(len(graphs.tokens)), graphs.tokens]
        torch.testing.assert_close(torch.tensor(graphs.logprobs), chosen, rtol=1e-4, atol=1e-4)
    assert static[3].tokens == [7] * len(static[3].tokens)
    greedy = static[0]  # its tokens follow from the model's logits, which events show
    for index, (logits, token) in enumerate(zip(greedy.logits, greedy.tokens, strict=True)):
        listed = [*{*prompts[0], *greedy.tokens[:index]}]
        logits[listed] = torch.where(logits[listed] > 0, logits[listed] / 1.4, logits[listed] * 1.4).to(dtype).float()
        assert logits[token] == logits.max()
