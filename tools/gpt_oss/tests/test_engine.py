from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of

from gpt_oss.batch import Phase
from gpt_oss.cache import OutOfPages, PagedKVCache
from gpt_oss.config import Config, alternating
from gpt_oss.engine import Engine
from gpt_oss.model import GptOss
from gpt_oss.request import MOST_LISTED, Completion, Event, Request
from gpt_oss.sampling import Sampling
from tokenspeed_kernel import CompilationForbiddenError, KernelRegistry, compile_policy, register_kernel
from tokenspeed_kernel_base import compilation

LENGTHS = (3, 29, 8, 17, 1, 40)


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def config() -> Config:
    return make_config(layer_types=alternating(3), rope=YARN)


@pytest.fixture(scope="module")
def model(config: Config) -> GptOss:
    return GptOss(config, tensors_of(config), torch.float32)


@pytest.fixture(scope="module")
def prompts(config: Config) -> list[list[int]]:
    return random_prompts(LENGTHS, config.vocab_size)


def make_engine(model: GptOss, pages: int = 200, **options: Any) -> Engine:
    return Engine(model, PagedKVCache(model.config, pages, 4, torch.float32), **options)


def alone(model: GptOss, request: Request) -> Completion:
    """Returns the completion of a request that runs alone, with its prompt in one chunk."""
    return make_engine(model).generate([request])[0]


def recomputed(model: GptOss, prompt: list[int], count: int) -> list[int]:
    """Returns the greedy continuation without engine, cache or batch. For every token, the whole sequence runs again."""
    from gpt_oss.batch import Piece, make_batch

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.forward(make_batch([Piece(tokens)], None, "cpu"), None)[-1].argmax()))
    return tokens[len(prompt) :]


def worst_logit(a: Completion, b: Completion) -> float:
    return (torch.stack(a.logits) - torch.stack(b.logits)).abs().max().item()


def test_greedy_is_what_recomputing_everything_gives(model: GptOss, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        assert alone(model, Request(prompt, 12)).tokens == recomputed(model, prompt, 12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_tokens": 512},
        {"prefill_tokens": 7},
        {"prefill_tokens": 1},
        {"prefill_tokens": 33, "max_sequences": 2},
        {"prefill_tokens": 5, "max_sequences": 3, "pages": 24},
    ],
    ids=str,
)
def test_batched_equals_one_by_one(model: GptOss, prompts: list[list[int]], options: dict[str, int], mode: dict[str, Any]) -> None:
    # Prompts and continuations differ in length, so some sequences finish while others start.
    requests = [Request(prompt, 4 + 3 * i, keep_logits=True) for i, prompt in enumerate(prompts)]
    engine = make_engine(model, **options, **mode)
    completions = engine.generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        by_itself = alone(model, request)
        assert completion.tokens == by_itself.tokens
        assert len(completion.tokens) == request.max_tokens
        assert completion.finish_reason == "length"
        assert worst_logit(completion, by_itself) < 1e-4
    assert engine.cache.allocator.available == engine.cache.allocator.total


def test_log_probabilities(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    """They are those of the logits, whatever the sampling and the other requests of a pass."""
    wanted = [None, 0, 3, MOST_LISTED]
    samplings = [Sampling(), Sampling(0.7, top_k=5, seed=3)]
    pairs = list(zip(prompts, itertools.cycle(wanted)))
    requests = [Request(p, 4, samplings[i % 2], keep_logits=True, logprobs=count) for i, (p, count) in enumerate(pairs)]
    for completion, (_, count) in zip(make_engine(model, prefill_tokens=33, **mode).generate(requests), pairs, strict=True):
        assert len(completion.logprobs) == len(completion.likely) == (0 if count is None else 4)
        logits = torch.stack(completion.logits)[: len(completion.logprobs)].log_softmax(-1)
        for row, token, logprob, likely in zip(logits, completion.tokens, completion.logprobs, completion.likely, strict=False):
            assert logprob == pytest.approx(row[token].item(), abs=1e-5)
            values, tokens = row.topk(count or 0)
            assert [token for token, _ in likely] == tokens.tolist()
            assert [value for _, value in likely] == pytest.approx(values.tolist(), abs=1e-5)


def test_every_phase_is_run(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    engine = make_engine(model, prefill_tokens=16, **mode)
    engine.generate([Request(prompt, 5) for prompt in prompts[::-1]])
    assert all(engine.steps[phase] for phase in Phase)


def test_prefill_budget_holds_and_is_used(model: GptOss, prompts: list[list[int]]) -> None:
    engine = make_engine(model, prefill_tokens=10)
    engine.generate([Request(prompt, 1) for prompt in prompts])
    assert sum(engine.steps.values()) == -(-sum(LENGTHS) // 10)


def test_requests_may_come_late(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    engine = make_engine(model, prefill_tokens=8, **mode)
    found: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}
    queue = list(prompts)
    while queue or not engine.idle:
        if queue:
            request = Request(queue.pop(), 6)
            expected[engine.add(request)] = alone(model, request).tokens
        for event in engine.step():
            found.setdefault(event.request, []).append(event.token)
    assert found == expected


def test_waits_for_pages(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    """The cache has room for only one request of the largest size, so requests run one after another, in order."""
    requests = [Request(prompt, 8) for prompt in prompts]
    engine = make_engine(model, pages=12, **mode)
    order: list[int] = []
    completions = engine.generate(requests, lambda event: order.append(event.request) if event.finish_reason else None)
    assert [c.tokens for c in completions] == [alone(model, request).tokens for request in requests]
    assert order[-1] == 5, "the largest came last and still got its turn"
    assert engine.cache.allocator.available == 12


def test_a_small_request_does_not_overtake(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    engine = make_engine(model, pages=12, **mode)
    first, big, small = (engine.add(Request(prompt, 4)) for prompt in (prompts[1], prompts[5], prompts[4]))
    finished = []
    while not engine.idle:
        finished += [event.request for event in engine.step() if event.finish_reason]
    assert finished.index(first) < finished.index(big)
    assert set(finished) == {first, big, small}


def test_pages_held_by_others_are_reported_rather_than_waited_for(model: GptOss, prompts: list[list[int]]) -> None:
    engine = make_engine(model, pages=12)
    elsewhere = engine.cache.allocator.allocate(8)
    number = engine.add(Request(prompts[1], 4))
    with pytest.raises(OutOfPages, match="8 pages of 4 tokens are needed, 4 of 12 are free"):
        engine.step()
    engine.cache.allocator.free(elsewhere)
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.request for event in events] == [number] * 4


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "prompt must hold at least one token id"),
        ([1], 0, "max_tokens must be an int of at least 1, got 0"),
        ([1, 97, -1], 4, r"prompt\[1\] must be a token id from 0 to 96, got 97"),
        ([1] * 120, 9, "at most the context of 128 tokens, got 120 and 9"),
        ([1] * 40, 10, "fit the cache of 12 pages of 4 tokens, got 40 and 10, which need 13 pages"),
    ],
)
def test_requests_that_can_never_run(model: GptOss, prompt: list[int], max_tokens: int, message: str) -> None:
    engine = make_engine(model, pages=12)
    with pytest.raises(ValueError, match=message):
        engine.generate([Request([1, 2], 2), Request(prompt, max_tokens)])
    assert engine.idle, "the request before the wrong one must not stay behind"


def test_the_last_page_is_used_to_its_end(model: GptOss) -> None:
    # The cache stores 41 + 8 - 1 tokens, which fill exactly 12 pages of 4 tokens.
    assert len(make_engine(model, pages=12).generate([Request([1] * 41, 8)])[0].tokens) == 8


@pytest.mark.parametrize("name", ["prefill_tokens", "max_sequences"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError), ("9", TypeError), (None, TypeError)],
)
def test_impossible_engines(model: GptOss, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} must be an int of at least 1, got "):
        make_engine(model, **{name: value})


def test_an_engine_is_of_a_model_and_a_cache(model: GptOss) -> None:
    with pytest.raises(TypeError, match=r"^model must be a GptOss, got None"):
        Engine(None, PagedKVCache(model.config, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^cache must be a PagedKVCache, got 200"):
        Engine(model, 200)  # type: ignore[arg-type]


def test_stop_tokens(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    for prompt in prompts:
        free = alone(model, Request(prompt, 12)).tokens
        stop = free[5]
        stopped = make_engine(model, **mode).generate([Request(prompt, 12, stop_tokens=frozenset({stop}))])[0]
        assert stopped.tokens == free[: free.index(stop) + 1]
        assert stopped.finish_reason == "stop"


def test_stopping_on_the_last_token_is_a_stop(model: GptOss, prompts: list[list[int]]) -> None:
    first = alone(model, Request(prompts[0], 1)).tokens[0]
    assert alone(model, Request(prompts[0], 1, stop_tokens=frozenset({first}))).finish_reason == "stop"


# -- sampling -----------------------------------------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=5, seed=2),
    Sampling(1.5, top_p=0.8, seed=3),
    Sampling(),
    Sampling(1.0, 20, 0.9, seed=4),
    Sampling(1.0, seed=5),
]


def sampled(prompts: Iterable[list[int]]) -> list[Request]:
    return [Request(prompt, 10, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]


def test_sampling_does_not_depend_on_the_company(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    requests = sampled(prompts)
    expected = [alone(model, request).tokens for request in requests]
    for options in ({}, {"prefill_tokens": 5}, {"max_sequences": 2}):
        assert [c.tokens for c in make_engine(model, **options, **mode).generate(requests)] == expected
    backwards = make_engine(model, **mode).generate(requests[::-1])
    assert [c.tokens for c in backwards[::-1]] == expected


def test_sampling_depends_on_the_seed(model: GptOss, prompts: list[list[int]]) -> None:
    texts = {tuple(alone(model, Request(prompts[0], 10, Sampling(1.0, seed=seed))).tokens) for seed in range(8)}
    assert len(texts) == 8


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(model: GptOss, prompts: list[list[int]]) -> None:
    greedy = alone(model, Request(prompts[1], 10)).tokens
    for sampling in (Sampling(1.0, top_k=1, seed=9), Sampling(1.0, top_p=1e-6, seed=9)):
        assert alone(model, Request(prompts[1], 10, sampling)).tokens == greedy


# -- streaming ----------------------------------------------------------------------------------------------------------------


def test_stream(model: GptOss, prompts: list[list[int]], mode: dict[str, Any]) -> None:
    requests = [Request(prompt, 3 + i) for i, prompt in enumerate(prompts)]
    by_request: dict[int, list[Event]] = {}
    for event in make_engine(model, prefill_tokens=9, **mode).stream(requests):
        by_request.setdefault(event.request, []).append(event)
    for number, request in enumerate(requests):
        events = by_request[number]
        assert [event.token for event in events] == alone(model, request).tokens
        assert [event.index for event in events] == list(range(request.max_tokens))
        assert [event.finish_reason for event in events] == [None] * (request.max_tokens - 1) + ["length"]
        assert all(event.logits is None for event in events)


def test_tokens_come_before_everything_is_done(model: GptOss, prompts: list[list[int]]) -> None:
    engine = make_engine(model)
    stream = engine.stream([Request(prompts[0], 30)])
    next(stream)
    assert not engine.idle
    stream.close()
    assert engine.idle, "closing a stream cancels its requests"
    assert engine.cache.allocator.available == 200


def test_cancel(model: GptOss, prompts: list[list[int]]) -> None:
    engine = make_engine(model, max_sequences=1)
    running, waiting, other = (engine.add(Request(prompts[0], 20)) for _ in range(3))
    engine.step()
    for number in (running, waiting, 99):
        engine.cancel(number)
    assert {event.request for _ in range(5) for event in engine.step()} == {other}


def test_generate_wants_an_idle_engine(model: GptOss) -> None:
    engine = make_engine(model)
    engine.add(Request([1], 2))
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.generate([Request([2], 2)])


def test_nothing_to_do(model: GptOss) -> None:
    engine = make_engine(model)
    assert engine.idle
    assert engine.step() == []
    assert engine.generate([]) == []


def test_compilations_are_counted_and_may_be_forbidden(model: GptOss, prompts: list[list[int]]) -> None:
    """A forbidden compilation is handled like any other failure: the step changes nothing. The request continues when compilation
    is allowed."""
    registry, name = KernelRegistry.get(), "compiling_rmsnorm"
    request = Request(prompts[0], 3)
    expected = alone(model, request).tokens

    @register_kernel(
        "norm", "rmsnorm", name=name, solution="made_up", signatures=None, traits={"residual": any, "wide_residual": any}
    )
    def compiling(x: Any, weight: Any, eps: float, residual: Any, out: Any, residual_out: Any) -> Any:
        compilation.start("scale<4>", "Made-up").finish()
        return registry.get_impl("reference_rmsnorm")(x, weight, eps, residual, out, residual_out)

    try:
        engine = make_engine(model)
        engine.add(request)
        with compile_policy("forbid"), pytest.raises(CompilationForbiddenError, match=r"for norm\.rmsnorm \(compiling_rmsnorm\)"):
            engine.step()
        assert not engine.compilations
        assert [event.token for _ in range(3) for event in engine.step()] == expected
        assert {(event.program, event.kernel) for event in engine.compilations} == {("scale<4>", name)}
    finally:
        registry.unregister(name)
