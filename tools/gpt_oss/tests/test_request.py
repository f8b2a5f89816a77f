"""Tests that a request with an invalid field is rejected when it is added. The error names the field, and other requests are not
affected.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpt_oss_models import engine_state, make_config, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_oss import Completion, Engine, GptOss, PagedKVCache, Request, Sampling

NAN, INF = float("nan"), float("inf")
CONFIG = make_config(layer_types=("sliding_attention",), max_position_embeddings=64)
NEIGHBOUR = Request([3, 1, 4, 1, 5], 6, Sampling(1.0, seed=7))


@pytest.fixture(scope="module")
def model() -> GptOss:
    return GptOss(CONFIG, tensors_of(CONFIG), torch.float32)


@pytest.fixture(scope="module")
def undisturbed(model: GptOss) -> list[int]:
    return make_engine(model).generate([NEIGHBOUR])[0].tokens


def make_engine(model: GptOss) -> Engine:
    return Engine(model, PagedKVCache(CONFIG, 24, 4, torch.float32), prefill_tokens=4)


def run(engine: Engine, most: int = 100) -> dict[int, list[int]]:
    """Runs steps until the engine is idle, and returns the generated tokens of each request."""
    found: dict[int, list[int]] = {}
    for _ in range(most):
        if engine.idle:
            return found
        for event in engine.step():
            found.setdefault(event.request, []).append(event.token)
    raise AssertionError(f"not idle after {most} steps")


CHECKED = ("prompt", "max_tokens", "stop_tokens", "logprobs")  # fields of which some values have the right type and are wrong
WRONG_TYPES: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (None, 5, 1.5, "ab", b"ab", bytearray(b"ab"), {1, 2}, {1: 2}, iter([1]), object())),
    *(("prompt", value) for value in (torch.tensor([1, 2]), torch.tensor(1), np.array([1, 2]), np.int64(1))),
    *(("prompt", [1, value]) for value in (None, 2.0, NAN, True, "2", [2], torch.tensor(2), np.int64(2), np.float64(2))),
    *(("max_tokens", value) for value in (None, 2.0, 2.5, NAN, True, "4", [4], torch.tensor(4), np.int64(4), np.float32(4))),
    *(("sampling", value) for value in (None, 0.8, {"temperature": 0.8}, "greedy", Sampling)),
    *(("stop_tokens", value) for value in (None, 5, 5.0, "ab", b"ab", torch.tensor([5]), np.array([5]), {5: 5}, iter([5]))),
    *(("stop_tokens", {value}) for value in (None, 5.0, True, "5", (5,), np.int64(5))),
    *(("stop_tokens", [value]) for value in (None, torch.tensor(5))),
    *(("keep_logits", value) for value in (None, 0, 1, 1.0, "yes", np.True_, torch.tensor(True))),
    *(("logprobs", value) for value in (True, 1.0, "5", [5], np.int64(5), torch.tensor(5))),
]
WRONG_VALUES: list[tuple[str, Any]] = [
    *(("prompt", value) for value in ([], (), range(0), [1, 97], [-1], [2**64], [10**5000])),
    *(("prompt", value) for value in ([1] * 65, range(10**12))),
    *(("max_tokens", value) for value in (0, -1, 63, 2**63, 10**5000)),
    *(("stop_tokens", value) for value in ({97}, frozenset({-1}), [5, 2**64])),
    *(("logprobs", value) for value in (-1, 21, 2**64)),
]
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed", *PENALTIES, "logit_bias")
WRONG_SAMPLING_TYPES: list[tuple[str, Any]] = [
    *((name, value) for name in SAMPLING_FIELDS[:-1] for value in (None, "1", [1], True, torch.tensor(1))),
    *((name, value) for name in ("top_k", "seed") for value in (1.0, NAN, np.int64(1), np.uint8(1))),
    *((name, value) for name in ("temperature", "top_p", *PENALTIES) for value in (np.float32(1), 1j)),
    *(("logit_bias", value) for value in (5, "ab", [5], [(5, 1.0)], {5}, torch.tensor([5]))),
    *(("logit_bias", {1: 1.0, key: 1.0}) for key in ("5", 5.0, None, (5,), np.int64(5))),
    *(("logit_bias", {1: 1.0, 5: value}) for value in (None, "1", [1], True, 1j, np.float32(1), torch.tensor(1))),
]
WRONG_SAMPLING_VALUES: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (NAN, INF, -INF, -1.0, -1e-30, 1e39, 1e300, 10**400)),
    *(("top_k", value) for value in (-1, 2**31, 10**10, 10**5000)),
    *(("top_p", value) for value in (NAN, INF, 0, 0.0, -0.5, 1.1, 1e-50, 10**400)),
    *(("seed", value) for value in (2**63, 2**64, -(2**63) - 1, 10**5000)),
    *((name, value) for name in PENALTIES for value in (NAN, INF, -INF, 101, -2.1, 1e300, 10**400)),
    *(("repetition_penalty", value) for value in (0, 0.0, -1.0, 1e-9)),
    *((name, 2.1) for name in PENALTIES[1:]),
    *(("logit_bias", {1: 1.0, key: 1.0}) for key in (-1, 97, 2**31, 2**64, 10**5000)),
    *(("logit_bias", {1: 1.0, 5: value}) for value in (NAN, INF, -INF, 100.1, -101, 10**400)),
    ("logit_bias", {10**5000: NAN}),
]


def refused(engine: Engine, request: Callable[[], Request], error: type[Exception], field: str) -> None:
    """Checks that adding a request raises this error and changes nothing. The error names the field, its requirement and its
    value."""
    before = engine_state(engine)
    with pytest.raises((TypeError, ValueError), match=rf"^((each of|prompt and) )?{field}\b.* must .*, got ") as caught:
        engine.add(request())
    assert type(caught.value) is error, caught.value
    assert len(str(caught.value)) < 300
    assert engine_state(engine) == before


@pytest.mark.parametrize(
    ("error", "cases", "field"),
    [
        *((TypeError, WRONG_TYPES, field) for field in (*CHECKED, "sampling", "keep_logits")),
        *((ValueError, WRONG_VALUES, field) for field in CHECKED),
    ],
    ids=lambda value: "" if isinstance(value, list) else getattr(value, "__name__", value),
)
def test_a_wrong_field_is_refused_and_harms_no_other(
    model: GptOss, undisturbed: list[int], error: type[Exception], cases: list[tuple[str, Any]], field: str
) -> None:
    engine = make_engine(model)
    neighbour = engine.add(NEIGHBOUR)
    engine.step()
    for value in (value for name, value in cases if name == field):
        refused(engine, lambda value=value: Request(**{"prompt": [1, 2], "max_tokens": 4, field: value}), error, field)
    assert run(engine) == {neighbour: undisturbed}
    assert engine.cache.allocator.available == engine.cache.allocator.total


@pytest.mark.parametrize(
    ("error", "cases"), [(TypeError, WRONG_SAMPLING_TYPES), (ValueError, WRONG_SAMPLING_VALUES)], ids=["types", "values"]
)
@pytest.mark.parametrize("field", SAMPLING_FIELDS)
def test_wrong_sampling_is_refused_where_it_is_made_and_where_it_is_added(
    model: GptOss, undisturbed: list[int], error: type[Exception], cases: list[tuple[str, Any]], field: str
) -> None:
    engine = make_engine(model)
    neighbour = engine.add(NEIGHBOUR)
    for value in (value for name, value in cases if name == field):
        refused(engine, lambda value=value: Request([1], 4, Sampling(**{"temperature": 1.0, field: value})), error, field)
        sampling = Sampling(1.0)
        object.__setattr__(sampling, field, value)  # as unpickling does, which calls no constructor
        refused(engine, lambda sampling=sampling: Request([1], 4, sampling), error, field)
    assert run(engine) == {neighbour: undisturbed}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, r"prompt must hold at least one token id, got \[\]"),
        ({"prompt": [1, 97]}, r"prompt\[1\] must be a token id from 0 to 96, got 97"),
        ({"prompt": [1, 2.0]}, r"prompt\[1\] must be a token id, which is an int, got 2.0 \(float\)"),
        ({"prompt": torch.tensor([1])}, r"such as a list of ints, got a tensor of int64 and shape \[1\]"),
        ({"max_tokens": "4"}, r"max_tokens must be an int of at least 1, got '4' \(str\)"),
        ({"max_tokens": 63}, "prompt and max_tokens must together be at most the context of 64 tokens, got 2 and 63"),
        ({"stop_tokens": {True}}, r"each of stop_tokens must be a token id, which is an int, got True \(bool\)"),
        ({"keep_logits": 1}, r"keep_logits must be True or False, got 1 \(int\)"),
        ({"sampling": Sampling(logit_bias={97: 1.0})}, r"each of logit_bias must be a token id from 0 to 96, got 97"),
    ],
)
def test_what_the_error_says(model: GptOss, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(model).add(Request(**{"prompt": [1, 2], "max_tokens": 4, **changes}))


@pytest.mark.parametrize("value", [None, [1, 2], "ab", {"prompt": [1]}, Request])
def test_what_is_no_request(model: GptOss, value: Any) -> None:
    engine = make_engine(model)
    with pytest.raises(TypeError, match="request must be a Request, got "):
        engine.add(value)
    with pytest.raises(TypeError, match="request must be a Request, got "):
        engine.generate([Request([1]), value])
    with pytest.raises(TypeError, match="request must be a Request, got "):
        next(engine.stream([Request([1]), value]))
    assert engine.idle


def test_an_iterable_that_fails_queues_nothing(model: GptOss) -> None:
    def requests() -> Any:
        yield Request([1])
        raise KeyboardInterrupt

    engine = make_engine(model)
    for start in (engine.generate, lambda wanted: next(engine.stream(wanted))):
        with pytest.raises(KeyboardInterrupt):
            start(requests())
        assert engine.idle


def test_a_request_may_be_changed_once_it_is_added(model: GptOss, undisturbed: list[int]) -> None:
    prompt, stop_tokens = list(NEIGHBOUR.prompt), set()
    engine = make_engine(model)
    number = engine.add(Request(prompt, 6, NEIGHBOUR.sampling, stop_tokens))
    prompt.clear()
    engine.step()
    stop_tokens.update(range(97))
    assert run(engine) == {number: undisturbed}


@pytest.mark.parametrize("prompt", [[3, 1, 4, 1, 5], (3, 1, 4, 1, 5)], ids=["list", "tuple"])
@pytest.mark.parametrize("stop_tokens", [{96}, frozenset(), [96], (96,)], ids=repr)
def test_what_is_accepted(model: GptOss, undisturbed: list[int], prompt: Any, stop_tokens: Any) -> None:
    unseen = {96} - set(undisturbed)
    assert unseen
    assert make_engine(model).generate([Request(prompt, 6, NEIGHBOUR.sampling, stop_tokens)])[0].tokens == undisturbed
    assert len(make_engine(model).generate([Request(range(5), 2)])[0].tokens) == 2


def test_a_request_survives_pickling(model: GptOss, undisturbed: list[int]) -> None:
    assert make_engine(model).generate([pickle.loads(pickle.dumps(NEIGHBOUR))])[0].tokens == undisturbed


# -- arbitrary requests -------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 96), min_size=1, max_size=12)
VALID_SAMPLING = st.builds(
    Sampling,
    temperature=st.just(0) | st.floats(0, 1e38) | st.floats(0, 2) | st.integers(0, int(1e38)),
    top_k=st.integers(0, 2**31 - 1) | st.integers(0, 100),
    top_p=st.floats(1e-37, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    repetition_penalty=st.just(1) | st.floats(0.01, 100),
    frequency_penalty=st.just(0) | st.floats(-2, 2),
    presence_penalty=st.just(0) | st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 96), st.floats(-100, 100) | st.integers(-100, 100), max_size=5),
)
VALID = st.builds(
    Request,
    prompt=TOKENS | TOKENS.map(tuple),
    max_tokens=st.integers(1, 5),
    sampling=VALID_SAMPLING,
    stop_tokens=st.frozensets(st.integers(0, 96), max_size=3) | st.lists(st.integers(0, 96), max_size=3),
    keep_logits=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 100),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.float64(0.5), np.float32(0.5), np.True_, torch.tensor(3), torch.tensor([0.5]), object, 2**64]),
)
KEYS = st.none() | st.booleans() | st.integers() | st.integers(0, 100) | st.floats() | st.text(max_size=3)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
FIELDS = ("prompt", "max_tokens", "sampling", "stop_tokens", "keep_logits", "logprobs", *SAMPLING_FIELDS)


@settings(max_examples=25, deadline=None)
@given(st.lists(VALID, min_size=1, max_size=4))
def test_any_valid_request_runs(model: GptOss, undisturbed: list[int], requests: list[Request]) -> None:
    engine = make_engine(model)
    neighbour = engine.add(NEIGHBOUR)
    numbers = {engine.add(request): request for request in requests}
    found = run(engine)
    assert found.pop(neighbour) == undisturbed
    assert found.keys() == numbers.keys()
    for number, request in numbers.items():
        tokens = found[number]
        assert all(0 <= token < 97 for token in tokens)
        assert len(tokens) == request.max_tokens or tokens[-1] in request.stop_tokens
    assert engine.cache.allocator.available == engine.cache.allocator.total


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_anything_is_run_or_refused(model: GptOss, undisturbed: list[int], data: st.DataObject) -> None:
    """Up to two fields of a valid request have arbitrary values."""
    engine = make_engine(model)
    neighbour = engine.add(NEIGHBOUR)
    values = {"prompt": [1, 2], "max_tokens": 3, "sampling": Sampling(1.0)}
    sampling: dict[str, Any] = {}
    for field in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2, unique=True)):
        (sampling if field in SAMPLING_FIELDS else values)[field] = data.draw(ANYTHING, label=field)
    before = engine_state(engine)
    try:
        if sampling:
            values["sampling"] = Sampling(**{"temperature": 1.0, **sampling})
        accepted = engine.add(Request(**values))
    except (TypeError, ValueError) as error:
        message = str(error)
        assert any(message.startswith((field, f"each of {field}")) for field in FIELDS), message
        assert " must " in message
        assert ", got " in message
        assert engine_state(engine) == before
    else:
        found = run(engine)
        assert found.pop(neighbour) == undisturbed
        assert found.keys() == {accepted}


def test_a_completion_starts_empty() -> None:
    completion = Completion(Request([1]))
    assert completion.tokens == completion.logits == []
    assert completion.finish_reason is None
