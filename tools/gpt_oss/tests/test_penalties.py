"""Tests that penalties and biases change tokens as a plain loop over one sequence does, in every mode and beside any requests."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of
from torch import Tensor

import tokenspeed_kernel
from gpt_oss import Completion, Engine, GptOss, PagedKVCache, Request, Sampling, penalties
from gpt_oss.batch import Piece, make_batch
from gpt_oss.penalties import Penalties
from gpt_oss.sampling import sample
from gpt_oss.sequences import Running
from tokenspeed_kernel import watch_calls

VOCAB = 97


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def model() -> GptOss:
    config = make_config(rope=YARN, vocab_size=VOCAB)
    return GptOss(config, tensors_of(config), torch.float32)


@pytest.fixture(scope="module")
def wanted(model: GptOss) -> Callable[[int], list[list[int]]]:
    """Returns the tokens of the random requests of a seed, from a loop that runs once."""
    return functools.cache(lambda seed: [looped(model, request)[0] for request in random_requests(seed)])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes lists so short that they move to longer ones while sequences run."""
    monkeypatch.setattr(penalties, "LEAST_WIDTH", 2)


def make_engine(model: GptOss, pages: int = 200, **options: Any) -> Engine:
    return Engine(model, PagedKVCache(model.config, pages, 4, torch.float32), **options)


def changed(logits: Tensor, prompt: list[int], generated: list[int], sampling: Sampling) -> Tensor:
    """Returns the logits of one token, changed as the fields of `Sampling` say, in float64."""
    changed = logits.double()
    for token, bias in (sampling.logit_bias or {}).items():
        changed[token] += bias
    for token in {*prompt, *generated}:
        x = changed[token]
        changed[token] = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
    for token, count in Counter(generated).items():
        changed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return changed.float()


def looped(model: GptOss, request: Request) -> tuple[list[int], list[Tensor]]:
    """Runs a request without engine, cache and batch. Returns its tokens, and the model's logits of each."""
    generated: list[int] = []
    kept = []
    for index in range(request.max_tokens):
        batch = make_batch([Piece([*request.prompt, *generated])], None, "cpu")
        kept.append(model.forward(batch, None)[-1])
        logits = changed(kept[-1], list(request.prompt), generated, request.sampling)
        generated.append(int(sample(tokenspeed_kernel, logits[None], [request.sampling], [index])))
    return generated, kept


def random_sampling(rng: random.Random, seed: int) -> Sampling:
    """Returns sampling parameters in which about half of the fields have no effect."""
    biased = rng.sample(range(VOCAB), rng.choice((0, 0, 1, 20, VOCAB)))
    return Sampling(
        temperature=rng.choice((0.0, 0.8)),
        top_k=rng.choice((0, 9)),
        seed=seed,
        repetition_penalty=rng.choice((1.0, 0.6, 1.3, 3)),
        frequency_penalty=rng.choice((0, 0.0, -0.3, 0.8)),
        presence_penalty=rng.choice((0, 0.0, -0.5, 2)),
        logit_bias={token: rng.uniform(-3, 3) for token in biased},
    )


def random_requests(seed: int, count: int = 9) -> list[Request]:
    rng = random.Random(seed)
    # Prompts of few different tokens. So prompts have tokens more than once, and the sequences repeat tokens of their prompts.
    prompts = [[rng.randrange(rng.choice((8, VOCAB))) for _ in range(rng.choice((1, 3, 11, 30)))] for _ in range(count)]
    return [Request(prompt, rng.randint(1, 14), random_sampling(rng, index)) for index, prompt in enumerate(prompts)]


def adjusted_logits(model: GptOss, request: Request) -> Tensor:
    engine, rows = make_engine(model), []

    def watch(call: Any, run: Any) -> Any:
        def ran(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if call.mode == "adjust_logits":
                rows.append(result[0].clone())
            return result

        return ran

    with watch_calls(watch):
        engine.generate([request])
    return torch.stack(rows)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_tokens": 7, "decode_sizes": (1, 3)}, {"prefill_tokens": 5, "max_sequences": 3, "pages": 24}],
    ids=["one prefill", "chunked prompts, and batches larger than the decoder's", "few sequences at a time"],
)
def test_tokens_are_those_of_a_loop(
    model: GptOss,
    wanted: Callable[[int], list[list[int]]],
    narrow: None,
    mode: dict[str, Any],
    options: dict[str, Any],
    seed: int,
) -> None:
    completions = make_engine(model, **options, **mode).generate(random_requests(seed))
    assert [completion.tokens for completion in completions] == wanted(seed)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(frequency_penalty=0.7),
        Sampling(presence_penalty=1.1),
        Sampling(presence_penalty=-2, frequency_penalty=-2),
        Sampling(logit_bias={5: 100}),
        Sampling(logit_bias={5: 20, 6: -100.0}, frequency_penalty=2, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_each_option_alone(model: GptOss, sampling: Sampling) -> None:
    """The logits from which tokens are selected are those of the loop. The options change the tokens."""
    request = Request([5, 6, 7, 5], 24, sampling)
    tokens, kept = looped(model, request)
    assert make_engine(model).generate([request])[0].tokens == tokens
    assert tokens != looped(model, Request([5, 6, 7, 5], 24))[0]
    wanted = [changed(logits, [5, 6, 7, 5], tokens[:index], sampling) for index, logits in enumerate(kept)]
    torch.testing.assert_close(adjusted_logits(model, request), torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_a_bias_decides(model: GptOss, mode: dict[str, Any]) -> None:
    requests = [Request([1, 2], 6, Sampling(temperature, logit_bias={token: 100})) for temperature in (0, 1) for token in (3, 4)]
    assert [each.tokens for each in make_engine(model, **mode).generate(requests)] == [[3] * 6, [4] * 6] * 2


def test_what_events_show_is_the_models(model: GptOss, mode: dict[str, Any]) -> None:
    """Logits and log-probabilities are those before penalties and biases, also of requests in the same pass."""
    samplings = [Sampling(repetition_penalty=2, logit_bias={3: 50}), Sampling(), Sampling(logit_bias={5: 50})]
    requests = [Request([1, 2, 3], 5, s, keep_logits=s.logit_bias is None, logprobs=2) for s in samplings]
    for request, completion in zip(requests, make_engine(model, **mode).generate(requests), strict=True):
        tokens, logits = looped(model, request)
        assert completion.tokens == tokens
        logprobs = torch.stack(logits).log_softmax(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs[range(5), tokens], rtol=1e-4, atol=1e-4)
        assert [[token for token, _ in likely] for likely in completion.likely] == logprobs.topk(2).indices.tolist()
        if request.keep_logits:
            torch.testing.assert_close(torch.stack(completion.logits), torch.stack(logits), rtol=1e-4, atol=1e-4)


def test_requests_that_come_and_go(model: GptOss, narrow: None, mode: dict[str, Any]) -> None:
    """Requests are added and cancelled at any step, beside others with and without options."""
    rng = random.Random(5)
    engine = make_engine(model, prefill_tokens=9, max_sequences=4, pages=60, **mode)
    queue = random_requests(11, 24)
    found: dict[int, Completion] = {}
    cancelled: set[int] = set()
    while queue or not engine.idle:
        while queue and rng.random() < 0.5:
            request = queue.pop()
            found[engine.add(request)] = Completion(request)
        for event in engine.step():
            found[event.request].add(event)
        if found and rng.random() < 0.1:
            cancelled.add(number := rng.choice(list(found)))
            engine.cancel(number)
    assert cancelled
    for number, completion in found.items():
        wanted = looped(model, completion.request)[0]
        assert completion.tokens == wanted[: len(completion.tokens) if number in cancelled else None]


def calls_of(engine: Engine, requests: list[Request]) -> list[str]:
    made: list[str] = []

    def watch(call: Any, run: Any) -> Any:
        made.append(call.mode)
        return run

    with watch_calls(watch):
        engine.generate(requests)
    return made


def test_other_passes_stay_as_they_are(model: GptOss, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [Request([1, 2, 3], 6), Request([4, 5], 4, Sampling(0.8, logit_bias={}, repetition_penalty=1, presence_penalty=0))]
    engine = make_engine(model, **mode)
    assert "adjust_logits" not in calls_of(engine, plain)
    assert calls_of(engine, [*plain, Request([6], 3, Sampling(frequency_penalty=1))]).count("adjust_logits") == 3
    monkeypatch.setattr(Penalties, "adjust", lambda *_: pytest.fail("no request has penalties or biases"))
    engine.generate(plain)
    assert engine._penalties._lists is None


def test_lists_move_only_when_sequences_change(model: GptOss, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []
    moved = Penalties._moved
    monkeypatch.setattr(Penalties, "_moved", lambda self, sequences: moves.append(len(sequences)) or moved(self, sequences))
    sampling = Sampling(repetition_penalty=1.1)
    make_engine(model, **mode).generate([Request([1, 2], 20, sampling), Request([1, 2], 9), Request([1, 2], 9, sampling)])
    assert moves == [3, 1]


def test_lists_are_as_long_as_their_tokens_need(model: GptOss, narrow: None) -> None:
    """Only the repetition penalty lists the prompt, and only penalties list generated tokens."""

    def listed(*requests: Request) -> list[int]:
        found: list[int] = []
        with watch_calls(lambda call, run: (found.extend(adjusted_widths(call)), run)[1]):
            make_engine(model).generate(requests)
        return found

    def adjusted_widths(call: Any) -> list[int]:
        return [call.arguments["tokens"].shape[1]] if call.mode == "adjust_logits" else []

    prompt = list(range(90))
    assert listed(Request(prompt, 9), Request(prompt, 6, Sampling(presence_penalty=1))) == [2, 2, 2, 4, 4, 8]
    assert listed(Request(prompt, 3, Sampling(repetition_penalty=2))) == [128] * 3
    assert listed(Request(prompt, 9, Sampling(logit_bias={1: 1.0, 2: -1.0, 3: 1}))) == [4] * 9


def test_counting_again_counts_nothing_twice(model: GptOss) -> None:
    """A pass that is repeated after a failure counts its input tokens again."""
    changing = Penalties("cpu")
    request = Request([7, 7, 8], 9, Sampling(repetition_penalty=2.0, logit_bias={9: 1.0}))
    text = [8, 9, 9, 5, 5, 8]
    for generated in range(len(text) + 1):
        sequence = Running(0, request, (), 2 + generated, generated)
        inputs = torch.tensor([text[generated - 1] if generated else 8])
        for _ in range(3):
            changing.adjust(tokenspeed_kernel, torch.zeros(1, VOCAB), inputs, torch.tensor([generated]), [sequence])
        lists = changing._lists
        assert lists is not None
        listed = {int(t): int(c) for t, c in zip(lists.tokens[0], lists.counts[0], strict=True) if t >= 0}
        assert listed == {9: -1, 7: 0, 8: 0} | Counter(text[:generated])


def test_a_sequence_whose_list_is_lost_is_an_error(model: GptOss) -> None:
    sequence = Running(0, Request([1], 9, Sampling(presence_penalty=1)), (), 1, 1)
    with pytest.raises(AssertionError, match="has a list"):
        Penalties("cpu").adjust(tokenspeed_kernel, torch.zeros(1, VOCAB), torch.tensor([1]), torch.tensor([1]), [sequence])


def test_prompts_of_other_requests_do_not_count(model: GptOss, mode: dict[str, Any]) -> None:
    prompts = random_prompts((3, 29, 8, 17), VOCAB)
    requests = [Request(prompt, 8, Sampling(repetition_penalty=5.0)) for prompt in prompts]
    alone = [make_engine(model).generate([request])[0].tokens for request in requests]
    assert [each.tokens for each in make_engine(model, prefill_tokens=10, **mode).generate(requests)] == alone


def test_a_request_keeps_its_biases(model: GptOss) -> None:
    bias = {3: 100.0}
    engine = make_engine(model)
    engine.add(Request([1], 2, Sampling(logit_bias=bias)))
    assert hash(Sampling(logit_bias=bias)) == hash(Sampling()), "biases are no part of the hash"
    bias[3], bias[4] = 0.0, 100.0
    assert [event.token for _ in range(2) for event in engine.step()] == [3, 3]
