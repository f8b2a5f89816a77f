"""Continuous batching: requests come and go, every step runs whatever is ready in one forward pass.

A step takes the next token of every sequence that is generating, and prompt tokens of those that are not there yet, up to a
budget. New prompts alone make a prefill, generating sequences alone a decode, anything else an extend. A request is admitted
once pages for its prompt and everything it may generate are free, in the order of arrival; so none ever runs out on the way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import GptOss
from gpt_oss.sampling import Sampling, sample


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: at most so many are generated.
        sampling: how each is chosen; greedily unless said otherwise.
        stop_tokens: generating one ends the text. It is the last token reported.
        keep_logits: whether the events carry the logits that their token was chosen from.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    keep_logits: bool = False


@dataclass(frozen=True)
class Event:
    """A token was generated.

    Attributes:
        request: the number that `Engine.add` gave.
        index: how many the request had before.
        token: its id.
        finish_reason: ``"stop"`` or ``"length"`` with the last token, None before.
        logits: float32 ``[vocab_size]`` in host memory, if the request keeps them.
    """

    request: int
    index: int
    token: int
    finish_reason: str | None = None
    logits: Tensor | None = None


@dataclass
class Completion:
    """All that was generated for a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logits: list[Tensor] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Appends what an event of this request says."""
        self.tokens.append(event.token)
        self.finish_reason = event.finish_reason
        if event.logits is not None:
            self.logits.append(event.logits)


@dataclass(eq=False)
class _Sequence:
    number: int
    request: Request
    pages: list[int]
    tokens: list[int]  # the prompt, then what was generated
    done: int = 0  # tokens whose keys and values are in the cache

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Engine:
    """Runs requests on a model.

    Args:
        model: the model.
        cache: its key-value cache, whose size says how much runs at a time.
        prefill_tokens: prompt tokens that one step takes at most; longer prompts are cut.
        max_sequences: sequences that run at a time, at most.

    Attributes:
        steps: forward passes made, by phase.
    """

    def __init__(self, model: GptOss, cache: PagedKVCache, prefill_tokens: int = 512, max_sequences: int = 64) -> None:
        if prefill_tokens < 1 or max_sequences < 1:
            raise ValueError(f"prefill_tokens and max_sequences must be at least 1, got {prefill_tokens} and {max_sequences}")
        self.model, self.cache = model, cache
        self.prefill_tokens, self.max_sequences = prefill_tokens, max_sequences
        self.steps = dict.fromkeys(Phase, 0)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[_Sequence] = []
        self._numbers = itertools.count()

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    def add(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
            ValueError: it can never run: no or unknown tokens, longer than the model's context or than the whole cache.
        """
        vocab, context = self.model.config.vocab_size, self.model.max_positions
        prompt, allocator = request.prompt, self.cache.allocator
        if not prompt or request.max_tokens < 1:
            raise ValueError(
                f"a request needs a prompt of at least one token and max_tokens of at least 1, got {len(prompt)} and "
                f"{request.max_tokens}"
            )
        unknown = sorted({token for token in prompt if not 0 <= token < vocab})
        if unknown:
            raise ValueError(f"prompt holds tokens outside the vocabulary of {vocab}: {unknown[:8]}")
        if len(prompt) + request.max_tokens > context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens {request.max_tokens} exceed the context of {context} tokens"
            )
        needed = self._pages_needed(request)
        if needed > allocator.total:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens {request.max_tokens} need {needed} pages of "
                f"{allocator.page_size} tokens, the cache has {allocator.total}"
            )
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Drops a request and frees its pages. One that is finished or unknown is ignored."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        for sequence in [s for s in self._running if s.number == number]:
            self._release(sequence)

    def step(self) -> list[Event]:
        """One forward pass; none if nothing waits or runs. Returns the tokens that it gave.

        Raises:
            OutOfPages: nothing runs, and the first request that waits cannot begin because pages are held elsewhere.
        """
        self._admit()
        scheduled = self._schedule()
        if not scheduled:
            return []
        pieces = [Piece(s.tokens[s.done : s.done + count], s.done, s.pages) for s, count in scheduled]
        ready = [index for index, (s, count) in enumerate(scheduled) if s.done + count == len(s.tokens)]
        batch = make_batch(pieces, self.cache, self.model.device, logits_of=ready)
        logits = self.model.forward(batch, self.cache)
        self.steps[batch.phase] += 1
        for sequence, count in scheduled:
            sequence.done += count
        return self._emit([scheduled[index][0] for index in ready], logits) if ready else []

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Queues requests and yields tokens as they come, those of requests queued before included, until nothing is left.

        Closing the iterator early cancels the requests that it queued.
        """
        numbers = self._add_all(requests)
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self._cancel_all(numbers)

    def generate(self, requests: Iterable[Request], on_event: Callable[[Event], object] | None = None) -> list[Completion]:
        """Runs requests to their end, in an idle engine. The completions are in the order of the requests.

        Args:
            requests: what to run.
            on_event: is called with each token as it comes.

        Raises:
            ValueError: one of them can never run; none has been started then.
            RuntimeError: others are under way, whose tokens would be lost.
        """
        if not self.idle:
            raise RuntimeError("generate needs an idle engine; with requests under way use add and step, or stream")
        wanted = list(requests)
        numbers = self._add_all(wanted)
        completions = {number: Completion(request) for number, request in zip(numbers, wanted, strict=True)}
        try:
            while not self.idle:
                for event in self.step():
                    completions[event.request].add(event)
                    if on_event is not None:
                        on_event(event)
        finally:
            self._cancel_all(numbers)
        return list(completions.values())

    def _add_all(self, requests: Iterable[Request]) -> list[int]:
        numbers: list[int] = []
        try:
            numbers.extend(map(self.add, requests))  # those before a failing one are in the list by then
        except ValueError:
            self._cancel_all(numbers)
            raise
        return numbers

    def _cancel_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.cancel(number)

    # -- scheduling -----------------------------------------------------------------------------------------------------------

    def _pages_needed(self, request: Request) -> int:
        # The last token is only ever output, so it needs no room.
        return self.cache.allocator.pages_for(len(request.prompt) + request.max_tokens - 1)

    def _admit(self) -> None:
        allocator = self.cache.allocator
        while self._waiting and len(self._running) < self.max_sequences:
            number, request = self._waiting[0]
            needed = self._pages_needed(request)
            # A later, smaller request does not overtake: that could keep a big one waiting for ever.
            if needed > allocator.available and self._running:
                return
            pages = allocator.allocate(needed)  # raises where waiting would not help
            self._waiting.popleft()
            self._running.append(_Sequence(number, request, pages, list(request.prompt)))

    def _schedule(self) -> list[tuple[_Sequence, int]]:
        """Sequences and how many of their tokens to run."""
        budget = self.prefill_tokens
        scheduled = []
        for sequence in self._running:
            left = len(sequence.tokens) - sequence.done
            if not sequence.generated:
                left = min(left, budget)
                budget -= left
            if left:
                scheduled.append((sequence, left))
        return scheduled

    def _emit(self, sequences: Sequence[_Sequence], logits: Tensor) -> list[Event]:
        choices = [s.request.sampling for s in sequences]
        tokens = sample(self.model.ops, logits, choices, [s.generated for s in sequences]).tolist()
        kept = logits.float().cpu() if any(s.request.keep_logits for s in sequences) else None
        events = []
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            request = sequence.request
            sequence.tokens.append(token)
            reason = "stop" if token in request.stop_tokens else "length" if sequence.generated == request.max_tokens else None
            shown = kept[row] if kept is not None and request.keep_logits else None
            events.append(Event(sequence.number, sequence.generated - 1, token, reason, shown))
            if reason is not None:
                self._release(sequence)
        return events

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self.cache.allocator.free(sequence.pages)
