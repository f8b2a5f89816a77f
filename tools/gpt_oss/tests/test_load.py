"""Tests that an engine under random load does not lose, repeat or mix up tokens. Requests of different lengths arrive at any time.
Some requests are cancelled, and some stop early. There are so few pages that most requests wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of

from gpt_oss import Completion, Engine, Event, GptOss, PagedKVCache, Request, Sampling

PAGES, PAGE_SIZE = 14, 4
TEXTS = 40
LONGEST = 12  # the largest number of generated tokens
SAMPLINGS = (Sampling(), Sampling(0.9), Sampling(1.3, top_k=9), Sampling(1.0, top_p=0.7))


ON_GPU = [pytest.mark.nvidia, pytest.mark.amd, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def model(request: pytest.FixtureRequest) -> GptOss:
    config = make_config(rope=YARN, head_dim=16)
    return GptOss(config, tensors_of(config), torch.float32, request.param)


@pytest.fixture(scope="module")
def texts(model: GptOss) -> list[tuple[Request, list[int]]]:
    """Returns requests, and the tokens of each request if it runs alone and nothing ends it early."""
    lengths = random.Random(0).choices((1, 2, 3, 4, 5, 7, 8, 9, 13, 20, 31), k=TEXTS)
    prompts = random_prompts(lengths, model.config.vocab_size)
    engine = Engine(model, PagedKVCache(model.config, 20, PAGE_SIZE, torch.float32, model.device), decode="eager")
    found = []
    for number, prompt in enumerate(prompts):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        request = Request(prompt, LONGEST, Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=number))
        found.append((request, engine.generate([request])[0].tokens))
    return found


@dataclass
class Wanted:
    """A request in progress: its expected tokens, and its tokens so far."""

    tokens: list[int]
    reason: str
    got: Completion
    cancelled: bool = False
    indices: list[int] = field(default_factory=list)


def draw(texts: list[tuple[Request, list[int]]], chance: random.Random) -> Wanted:
    """Returns a random request: one of the texts, with at most as many tokens to generate, and in half of the cases with stop
    tokens.
    """
    request, tokens = chance.choice(texts)
    max_tokens = chance.randint(1, LONGEST)
    stops = frozenset(chance.choices(range(97), k=chance.choice((0, 0, 1, 8))))
    end = next((index + 1 for index, token in enumerate(tokens[:max_tokens]) if token in stops), None)
    wanted = tokens[: end or max_tokens]
    asked = Request(request.prompt, max_tokens, request.sampling, stops)
    return Wanted(wanted, "length" if end is None else "stop", Completion(asked))


def check_event(event: Event, wanted: Wanted) -> None:
    assert not wanted.cancelled, "a request that was cancelled is heard of no more"
    assert wanted.got.finish_reason is None, "nothing follows the last token"
    wanted.got.add(event)
    wanted.indices.append(event.index)
    assert wanted.got.tokens == wanted.tokens[: len(wanted.got.tokens)]
    assert wanted.indices[-1] == len(wanted.indices) - 1
    assert event.finish_reason == (wanted.reason if len(wanted.indices) == len(wanted.tokens) else None)


def check_pages(engine: Engine) -> None:
    """Checks that every page is free or held by exactly one request."""
    held = [page for sequence in engine._running for page in sequence.pages]
    assert sorted([*held, *engine.cache.allocator.free_pages]) == list(range(PAGES))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_load(model: GptOss, texts: list[tuple[Request, list[int]]], count: int, mode: str) -> None:
    chance = random.Random(count)
    cache = PagedKVCache(model.config, PAGES, PAGE_SIZE, torch.float32, model.device)
    options = {**MODES[mode], **({"decode": "graphs"} if model.device.type == "cuda" and "decode" in MODES[mode] else {})}
    engine = Engine(model, cache, prefill_tokens=11, max_sequences=5, **options)
    requests: dict[int, Wanted] = {}
    while len(requests) < count or not engine.idle:
        for _ in range(min(chance.choice((0, 0, 1, 1, 4)), count - len(requests))):
            wanted = draw(texts, chance)
            requests[engine.add(wanted.got.request)] = wanted
        if requests and chance.random() < 0.08:
            number = chance.choice(list(requests))  # this request may have finished before
            engine.cancel(number)
            if requests[number].got.finish_reason is None:
                requests[number].cancelled = True
        for event in engine.step():
            check_event(event, requests[event.request])
        check_pages(engine)
    assert len(requests) == count
    assert any(wanted.cancelled for wanted in requests.values())
    assert all(wanted.cancelled or wanted.got.tokens == wanted.tokens for wanted in requests.values())
    assert cache.allocator.available == PAGES
    assert engine.step() == []
