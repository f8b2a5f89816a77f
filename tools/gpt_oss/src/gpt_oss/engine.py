"""Continuous batching: requests come and go, and every step runs all that is ready in one forward pass.

A step takes the next token of every sequence that is generating, and prompt tokens of the others up to a budget. If all its
pieces begin their prompts it is a prefill, if all are generated tokens a decode, otherwise an extend. Requests start in the order
in which they were added, each once there are free pages for its prompt and everything that it may generate. So no request that
has started ever runs out of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.fields import COUNT, describe, instance
from gpt_oss.model import GptOss
from gpt_oss.request import Completion, Event, Request, checked_request
from gpt_oss.sampling import sample


class _Sequence(NamedTuple):
    """A request that has started, and how far it is. A step replaces it instead of changing it.

    Attributes:
        number: the request's number.
        request: the engine's own copy of it.
        pages: the pages that it holds.
        cached: how many of its tokens have their keys and values in the cache.
        generated: how many tokens have been generated.
        last_token: the one generated last, which is not in the cache yet.
    """

    number: int
    request: Request
    pages: tuple[int, ...]
    cached: int = 0
    generated: int = 0
    last_token: int = -1

    def next_tokens(self, budget: int) -> Sequence[int]:
        """The tokens that the next pass runs: the one generated last, or at most ``budget`` tokens of the prompt."""
        if self.generated:
            return (self.last_token,)
        return self.request.prompt[self.cached : self.cached + budget]


class Engine:
    """Runs requests on a model.

    `add` and `step` either do what they say, or raise and change nothing; see `step`. An engine is for one thread.

    Args:
        model: the model.
        cache: its key-value cache. Its size decides how many sequences run at a time.
        prefill_tokens: the most prompt tokens that a step takes; longer prompts are run in several steps.
        max_sequences: the most sequences that run at a time.

    Attributes:
        steps: how many forward passes have been made, by phase.

    Raises:
        TypeError, ValueError: an argument is not as stated; the message names it.
    """

    def __init__(self, model: GptOss, cache: PagedKVCache, prefill_tokens: int = 512, max_sequences: int = 64) -> None:
        instance(GptOss).check("model", model)
        instance(PagedKVCache).check("cache", cache)
        COUNT.check("prefill_tokens", prefill_tokens)
        COUNT.check("max_sequences", max_sequences)
        self.model, self.cache = model, cache
        self.prefill_tokens, self.max_sequences = prefill_tokens, max_sequences
        self.steps = dict.fromkeys(Phase, 0)
        # The rest of the state, with the allocator's free pages. All of it is replaced, never changed in place; see `step`.
        self._waiting: tuple[tuple[int, Request], ...] = ()
        self._running: tuple[_Sequence, ...] = ()
        self._added = 0

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._running

    def add(self, request: Request) -> int:
        """Queues a request and returns its number. Every field is checked first; a request that is refused changes nothing.

        The engine keeps a copy, so the caller may change the prompt's list afterwards.

        Raises:
            TypeError: a field has the wrong type: token ids, counts and seeds are Python ints (a bool, a float, a NumPy scalar or
                a tensor is not one), and so on; see `gpt_oss.Request` and `gpt_oss.Sampling`.
            ValueError: a field has a value that can never run: no token ids or ids outside the vocabulary, settings outside their
                ranges, more tokens than the model's context or the whole cache holds. Both errors name the field, what it must
                be, and what it was.
        """
        return self._queue([self._checked(request)])[0]

    def cancel(self, number: int) -> None:
        """Drops a request and frees its pages. The number of one that has finished, or that never was, is ignored."""
        self._drop([number])

    def step(self) -> list[Event]:
        """Runs one forward pass, if anything waits or runs, and returns the tokens that it generated.

        If `step` raises, whatever the reason (a kernel fails, memory runs out, the user presses Ctrl-C), it has changed nothing:
        no request has started, advanced or finished, and no page has changed hands. All that may be left are keys and values in
        cache slots that no request counts as filled, and the next pass writes those before it reads them. So step again, or cancel
        requests first and then step: every request gets the tokens that it would have got without the failure.

        Two limits. A GPU whose context is lost after an error, as after an illegal memory access, runs nothing more in this
        process. And if an interrupt arrives after `step` has ended but before the caller has the events, the step has happened.

        Raises:
            OutOfPages: nothing runs, and the first waiting request cannot start because somebody else holds pages of the cache.
        """
        # First everything that can fail. It reads the state and does not change it.
        waiting, running, free_pages = self._admitted()
        scheduled = self._scheduled(running)
        if not scheduled:
            return []
        pieces = [Piece(tokens, sequence.cached, sequence.pages) for sequence, tokens in scheduled]
        ready = [index for index, (s, tokens) in enumerate(scheduled) if s.cached + len(tokens) >= len(s.request.prompt)]
        batch = make_batch(pieces, self.cache, self.model.device, logits_of=ready)
        logits = self.model.forward(batch, self.cache)
        events = self._sampled([scheduled[index][0] for index in ready], logits) if ready else []
        running, free_pages = _advanced(running, scheduled, events, free_pages)
        steps = {**self.steps, batch.phase: self.steps[batch.phase] + 1}
        # Then the change: attributes are assigned, nothing is called. Python handles signals only between calls and rounds of
        # loops, so even an interrupt finds either none of this done or all of it.
        self._waiting, self._running, self.steps, self.cache.allocator.free_pages = waiting, running, steps, free_pages
        return events

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Queues requests and yields tokens as they are generated until nothing is left to do.

        Tokens of requests that were queued before are yielded too. If the iterator is closed early, or a step raises, the requests
        that it queued are cancelled; those queued before stay. The events of the current step that have not been yielded by then
        are lost.

        Raises:
            TypeError, ValueError: a request is refused, see `add`; none has been queued then.
        """
        checked = self._all_checked(requests)
        numbers = range(self._added, self._added + len(checked))
        try:
            self._queue(checked)
            while not self.idle:
                yield from self.step()
        finally:
            self._drop(numbers)

    def generate(self, requests: Iterable[Request], on_event: Callable[[Event], object] | None = None) -> list[Completion]:
        """Runs requests to their end, in an idle engine. The completions are in the order of the requests.

        If a step or ``on_event`` raises, the requests are cancelled and the engine is idle again.

        Args:
            requests: what to run.
            on_event: is called with each token as it is generated.

        Raises:
            TypeError, ValueError: a request is refused, see `add`; none has been started then.
            RuntimeError: the engine is not idle. The tokens of its other requests would be lost.
        """
        if not self.idle:
            raise RuntimeError("generate needs an idle engine; with requests under way use add and step, or stream")
        wanted = list(requests)
        checked = self._all_checked(wanted)
        numbers = range(self._added, self._added + len(checked))
        completions = {number: Completion(request) for number, request in zip(numbers, wanted, strict=True)}
        try:
            self._queue(checked)
            while not self.idle:
                for event in self.step():
                    completions[event.request].add(event)
                    if on_event is not None:
                        on_event(event)
        finally:
            self._drop(numbers)
        return list(completions.values())

    # -- queueing -------------------------------------------------------------------------------------------------------------

    def _checked(self, request: Request) -> Request:
        allocator = self.cache.allocator
        checked = checked_request(request, self.model.config.vocab_size, self.model.max_positions)
        needed = self._pages_needed(checked)
        if needed > allocator.total:
            raise ValueError(
                f"prompt and max_tokens must together fit the cache of {allocator.total} pages of {allocator.page_size} tokens, "
                f"got {len(checked.prompt)} and {describe(checked.max_tokens)}, which need {needed} pages"
            )
        return checked

    def _all_checked(self, requests: Iterable[Request]) -> list[Request]:
        return [self._checked(request) for request in requests]

    def _queue(self, checked: Sequence[Request]) -> range:
        """Queues requests that have been checked, and returns their numbers."""
        numbers = range(self._added, self._added + len(checked))
        waiting = (*self._waiting, *zip(numbers, checked, strict=True))
        added = numbers.stop
        self._waiting, self._added = waiting, added
        return numbers

    def _drop(self, numbers: Collection[int]) -> None:
        """Forgets requests and frees their pages."""
        waiting = tuple(entry for entry in self._waiting if entry[0] not in numbers)
        running = tuple(sequence for sequence in self._running if sequence.number not in numbers)
        dropped = [sequence for sequence in self._running if sequence.number in numbers]
        free_pages = _with_pages_of(dropped, self.cache.allocator.free_pages)
        self._waiting, self._running, self.cache.allocator.free_pages = waiting, running, free_pages

    # -- what a step computes: nothing here changes the engine ----------------------------------------------------------------

    def _pages_needed(self, request: Request) -> int:
        # The last token is only ever output, so it needs no room.
        return self.cache.allocator.pages_for(len(request.prompt) + request.max_tokens - 1)

    def _admitted(self) -> tuple[tuple[tuple[int, Request], ...], tuple[_Sequence, ...], tuple[int, ...]]:
        """What waits, what runs and which pages are free once all requests that can start have started."""
        allocator = self.cache.allocator
        running, free_pages = list(self._running), allocator.free_pages
        started = 0
        for number, request in self._waiting:
            needed = self._pages_needed(request)
            # A later, smaller request does not overtake: that could keep a big one waiting for ever.
            if len(running) >= self.max_sequences or (needed > len(free_pages) and running):
                break
            pages, free_pages = allocator.choose(needed, free_pages)  # raises if waiting would not help
            running.append(_Sequence(number, request, pages))
            started += 1
        return self._waiting[started:], tuple(running), free_pages

    def _scheduled(self, running: Iterable[_Sequence]) -> list[tuple[_Sequence, Sequence[int]]]:
        """The sequences that the next pass advances, and the tokens of each that it runs."""
        budget = self.prefill_tokens
        scheduled = []
        for sequence in running:
            tokens = sequence.next_tokens(budget)
            if not sequence.generated:
                budget -= len(tokens)
            if tokens:
                scheduled.append((sequence, tokens))
        return scheduled

    def _sampled(self, sequences: Sequence[_Sequence], logits: Tensor) -> list[Event]:
        """The next token of each sequence, chosen from its row of the logits."""
        choices = [s.request.sampling for s in sequences]
        tokens = sample(self.model.ops, logits, choices, [s.generated for s in sequences]).tolist()
        kept = logits.float().cpu() if any(s.request.keep_logits for s in sequences) else None
        events = []
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            request, index = sequence.request, sequence.generated
            reason = "stop" if token in request.stop_tokens else "length" if index + 1 == request.max_tokens else None
            shown = kept[row] if kept is not None and request.keep_logits else None
            events.append(Event(sequence.number, index, token, reason, shown))
        return events


def _advanced(
    running: Iterable[_Sequence],
    scheduled: Iterable[tuple[_Sequence, Sequence[int]]],
    events: Iterable[Event],
    free_pages: tuple[int, ...],
) -> tuple[tuple[_Sequence, ...], tuple[int, ...]]:
    """The sequences that still run after a pass that ran the scheduled tokens and gave these events, and the free pages then."""
    lengths = {sequence.number: len(tokens) for sequence, tokens in scheduled}
    given = {event.request: event for event in events}
    remaining, finished = [], []
    for sequence in running:
        number, request, pages, cached, generated, last_token = sequence
        event = given.get(number)
        if event is not None:
            generated, last_token = event.index + 1, event.token
            if event.finish_reason is not None:
                finished.append(sequence)
                continue
        cached += lengths.get(number, 0)
        remaining.append(_Sequence(number, request, pages, cached, generated, last_token))
    return tuple(remaining), _with_pages_of(finished, free_pages)


def _with_pages_of(sequences: Iterable[_Sequence], free_pages: tuple[int, ...]) -> tuple[int, ...]:
    """The free pages, and those that these sequences hold."""
    return (*free_pages, *(page for sequence in sequences for page in reversed(sequence.pages)))
