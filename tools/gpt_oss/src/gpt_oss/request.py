"""Requests to the engine, and the events and completions of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NoReturn

from torch import Tensor

from gpt_oss.fields import COUNT, FLAG, describe, instance, integer, is_int, optional
from gpt_oss.sampling import Sampling, check_sampling

MOST_LISTED = 20  # the most tokens that an event lists with their log-probabilities


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it. `gpt_oss.Engine.add` documents the checks.

    Attributes:
        prompt: token ids, at least one: a sequence of ints (a list, a tuple, a range), not a string, an array or a tensor.
        max_tokens: the most tokens to generate, at least 1.
        sampling: the sampling parameters; by default greedy.
        stop_tokens: token ids that end the text: a set or a sequence of ints. A generated stop token is the last reported token.
        keep_logits: whether each event includes the model's logits for its token. Penalties and biases do not change them.
        logprobs: if given, each event includes the log-probability of its token, and lists this many of the most likely tokens, 0
            to 20 (`MOST_LISTED`). These are natural logarithms of the model's probabilities; temperature, top_k, top_p, penalties
            and biases do not change them.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Collection[int] = frozenset()
    keep_logits: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class Event:
    """One generated token.

    Attributes:
        request: the number that `gpt_oss.Engine.add` returned.
        index: number of tokens that were generated for the request before this token.
        token: the token id.
        finish_reason: for a request's last token ``"stop"`` (a stop token) or ``"length"`` (``max_tokens`` reached); else None.
        logits: float32 ``[vocab_size]`` in host memory if the request keeps its logits, else None.
        logprob: the token's log-probability if the request asks for it, else None.
        likely: the most likely tokens with their log-probabilities, the most likely first; as many as the request asks for.
    """

    request: int
    index: int
    token: int
    finish_reason: str | None = None
    logits: Tensor | None = None
    logprob: float | None = None
    likely: tuple[tuple[int, float], ...] = ()


@dataclass
class Completion:
    """Everything that was generated for a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likely: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Appends one of this request's events."""
        self.tokens.append(event.token)
        self.finish_reason = event.finish_reason
        if event.logits is not None:
            self.logits.append(event.logits)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
            self.likely.append(event.likely)


def checked_request(request: Request, vocab_size: int, context: int) -> Request:
    """Checks every field of a request, and returns a copy that is independent of the caller's lists.

    Args:
        request: the caller's request.
        vocab_size: the model's vocabulary size; token ids must be below it.
        context: the largest number of tokens of prompt and generated text together.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has an invalid value. Both errors name the field, its valid values, and its actual value.
    """
    instance(Request).check("request", request)
    COUNT.check("max_tokens", request.max_tokens)
    instance(Sampling).check("sampling", request.sampling)
    check_sampling(request.sampling)
    sampling = _own(request.sampling, vocab_size)
    FLAG.check("keep_logits", request.keep_logits)
    optional(integer(0, min(MOST_LISTED, vocab_size))).check("logprobs", request.logprobs)
    prompt, stop_tokens = request.prompt, request.stop_tokens
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes, bytearray)):
        _refuse("prompt", "a sequence of token ids, such as a list of ints", prompt)
    if not isinstance(stop_tokens, (Set, Sequence)) or isinstance(stop_tokens, (str, bytes, bytearray)):
        _refuse("stop_tokens", "a set or a sequence of token ids", stop_tokens)
    if not prompt:
        raise ValueError(f"prompt must hold at least one token id, got {describe(prompt)}")
    if len(prompt) + request.max_tokens > context:
        raise ValueError(
            f"prompt and max_tokens must together be at most the context of {context} tokens, got {len(prompt)} and "
            f"{describe(request.max_tokens)}"
        )
    return Request(
        _token_ids("prompt", prompt, vocab_size),
        request.max_tokens,
        sampling,
        frozenset(_token_ids("stop_tokens", stop_tokens, vocab_size)),
        request.keep_logits,
        request.logprobs,
    )


def _own(sampling: Sampling, vocab_size: int) -> Sampling:
    """Returns the sampling parameters with a copy of the biases. Raises ValueError for a biased token outside the vocabulary."""
    if not sampling.logit_bias:
        return sampling
    bias = dict(sampling.logit_bias)
    _token_ids("logit_bias", bias.keys(), vocab_size)
    return replace(sampling, logit_bias=bias)  # checks the copy, too


def _token_ids(name: str, values: Collection[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the values as a tuple. Raises TypeError or ValueError for the first value that is not a token id of the
    vocabulary.
    """
    ids = tuple(values)
    # No Python loop runs over tokens. Prompts may be long, and the device waits meanwhile.
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for index, token in enumerate(ids):
        place = f"{name}[{index}]" if isinstance(values, Sequence) else f"each of {name}"
        if not is_int(token):
            _refuse(place, "a token id, which is an int", token)
        if not 0 <= token < vocab_size:
            raise ValueError(f"{place} must be a token id from 0 to {vocab_size - 1}, got {describe(token)}")
    return ids


def _refuse(name: str, expected: str, value: object) -> NoReturn:
    raise TypeError(f"{name} must be {expected}, got {describe(value, with_type=True)}")
