"""Continuous batching: requests may join and finish at every step, and a step runs all ready tokens in one forward pass.

A step takes the next token of every generating sequence, and prompt tokens of the other sequences up to a budget. These chunks
determine the kind of pass, see `gpt_oss.batch.Phase`. Requests start in the order in which they were added. A request starts when
there are enough free pages for its prompt and all tokens that it may generate. So a started request never runs out of pages.

On a GPU the host is one pass ahead: a step launches the next pass before it reads the tokens of the previous pass. The next pass
does not need these tokens on the host, because they are passed on the device and all lengths are known. Only the end of a text is
detected one pass late. By then the device has computed one token too many, which is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

import tokenspeed_kernel
from gpt_oss.batch import Phase, Piece, make_batch, phase_of
from gpt_oss.cache import PagedKVCache
from gpt_oss.decoder import Decoder, batch_sizes
from gpt_oss.fields import COUNT, FLAG, describe, instance, one_of, optional
from gpt_oss.model import GptOss
from gpt_oss.penalties import Penalties
from gpt_oss.request import Completion, Event, Request, checked_request
from gpt_oss.sampling import sample
from gpt_oss.sequences import Flight, Running, shown
from gpt_oss.transfer import to_device
from gpt_oss.warmup import WarmUp, warm_up
from tokenspeed_kernel import Compilation, compilations

logger = logging.getLogger(__name__)

# A sequence, and its input tokens in a pass; None stands for a token that is still in flight.
_Scheduled = tuple[Running, Sequence["int | None"]]

DECODE_MODES = ("eager", "static", "graphs")


class Engine:
    """Runs requests on a model.

    `add` and `step` either succeed, or raise and change nothing; see `step`. An engine is not thread-safe.

    Args:
        model: the model.
        cache: the model's KV cache. Its size limits the number of sequences that run at a time.
        prefill_tokens: the largest number of prompt tokens per step. Longer prompts run in several steps.
        max_sequences: the largest number of sequences that run at a time.
        decode: how decode passes run. ``"graphs"``: in static buffers, captured into CUDA graphs now and replayed later.
            ``"static"``: in static buffers, but launched from Python. ``"eager"``: like other passes. None means ``"graphs"`` on a
            GPU, otherwise ``"eager"``.
        overlap: whether a step launches a pass before it reads the tokens of the previous pass, so that the device never waits for
            the host. The step then returns the events of the previous pass. None means True if decode passes are graphs.
        decode_sizes: the batch sizes of static decode passes, ascending. Smaller batches are padded to the next size. Batches that
            are larger than all sizes run like other passes. None means default sizes up to ``max_sequences``.
        console: shows the progress of capturing and warming up; None shows none.
        warm: ``"all"`` runs a pass of every size class now: prefill, extend, mixed and decode passes, see `gpt_oss.warmup`. Then no
            request waits for a compilation. None runs only the decode passes that are captured.
        receipt: a file that the receipt of this process's kernels is written to when the engine is ready, as JSON. A line in the
            log summarises the receipt. The receipt has the calls of the passes that have run, so that ``warm="all"`` makes it
            complete.

    Attributes:
        steps: the number of forward passes, by phase.
        warmed: the duration of the warm-up, and its number of compiled programs; None if ``warm`` is None.
        decoder: the object that runs decode passes; None if decode passes run like other passes.

    Raises:
        TypeError, ValueError: an argument is not as stated; the message names it.
        RuntimeError: a pass cannot be captured. The message has the reason.
        OSError: the receipt cannot be written.
        CompilationForbiddenError: a pass that runs now needs a program that must be compiled, and the policy is ``"forbid"``.
    """

    def __init__(
        self,
        model: GptOss,
        cache: PagedKVCache,
        prefill_tokens: int = 512,
        max_sequences: int = 64,
        decode: str | None = None,
        overlap: bool | None = None,
        decode_sizes: Sequence[int] | None = None,
        console: Console | None = None,
        warm: str | None = None,
        receipt: str | Path | None = None,
    ) -> None:
        instance(GptOss).check("model", model)
        instance(PagedKVCache).check("cache", cache)
        COUNT.check("prefill_tokens", prefill_tokens)
        COUNT.check("max_sequences", max_sequences)
        optional(one_of(*DECODE_MODES)).check("decode", decode)
        optional(FLAG).check("overlap", overlap)
        optional(one_of("all")).check("warm", warm)
        on_gpu = model.device.type == "cuda"  # PyTorch's device type of AMD GPUs is also "cuda"
        if decode is None:
            decode = "graphs" if on_gpu else "eager"
        if decode == "graphs" and not on_gpu:
            raise ValueError(f"decode must be 'eager' or 'static' on a device without graphs, got 'graphs' on {model.device}")
        self.model, self.cache = model, cache
        self.prefill_tokens, self.max_sequences = prefill_tokens, max_sequences
        self.overlap = decode == "graphs" if overlap is None else overlap
        sizes = _checked_sizes(batch_sizes(max_sequences) if decode_sizes is None else decode_sizes)
        self._penalties = Penalties(model.device)
        self.decoder = None if decode == "eager" else Decoder(model, cache, sizes, decode == "graphs", console, self._penalties)
        self.steps = dict.fromkeys(Phase, 0)
        # These tuples and the allocator's free pages are the state that `step` changes. `step` replaces the tuples, and never
        # changes a tuple in place.
        self._waiting: tuple[tuple[int, Request], ...] = ()
        self._running: tuple[Running, ...] = ()
        self._added = 0
        self._in_flight: Flight | None = None
        self.warmed: WarmUp | None = None
        if warm is not None:
            self.warmed = warm_up(model, cache, self.decoder, prefill_tokens, max_sequences, console)
        if receipt is not None:
            made = tokenspeed_kernel.receipt()
            made.save(receipt)
            logger.info("%s; %s", made.summary, receipt)
        self._compiled_before = len(compilations())

    @property
    def compilations(self) -> list[Compilation]:
        """The programs that this process has compiled since the engine was created. A request waited for each compilation."""
        return compilations(self._compiled_before)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._waiting and not self._running

    def add(self, request: Request) -> int:
        """Queues a request and returns its number. Every field is checked first; a rejected request changes nothing.

        The engine keeps a copy, so the caller may change the prompt's list afterwards.

        Raises:
            TypeError: a field has the wrong type: token ids, counts and seeds are Python ints (bools, floats, NumPy scalars and
                tensors are rejected), and so on; see `gpt_oss.Request` and `gpt_oss.Sampling`.
            ValueError: a field has a value that can never run: no token ids or ids outside the vocabulary, settings outside their
                ranges, more tokens than the model's context or the whole cache holds. Both errors name the field, what it must
                be, and what it was.
        """
        return self._queue([self._checked(request)])[0]

    def cancel(self, number: int) -> None:
        """Drops a request and frees its pages. Does nothing if the number is unknown or its request has finished."""
        self._drop([number])

    def step(self) -> list[Event]:
        """Launches one forward pass, if any request is waiting or running, and returns the tokens that the pass generated. If
        passes overlap, returns the tokens of the previous pass.

        If `step` raises for any reason (a kernel fails, memory runs out, the user presses Ctrl-C), it has changed nothing: no
        request has started, advanced or finished, and no page was allocated or freed. The failed pass may have written keys and
        values to cache slots that no request counts as filled. The next pass overwrites these slots before it reads them. So the
        caller may call `step` again, after cancelling requests or not: every request gets the same tokens as without the failure.

        There are two limits. If an error such as an illegal memory access has destroyed the GPU's context, this process cannot use
        the GPU any more. If an interrupt arrives after `step` has ended, but before the caller has the events, the step has taken
        effect and its events are lost.

        Raises:
            OutOfPages: no request runs, and the first waiting request cannot start because other code has allocated the pages.
        """
        # The first lines do everything that can fail. They read the engine's state, and do not change it.
        before, pool = self._in_flight, self.cache.allocator
        waiting, running, free_pages = self._admitted()
        scheduled = self._scheduled(running)
        launched, steps = None, self.steps
        if scheduled:
            count = len(self.compilations)
            phase, launched = self._launched(scheduled, before)
            _log_compilations(self.compilations[count:], phase)
            steps = {**steps, phase: steps[phase] + 1}
        running = _launched_of(running, scheduled)
        read, in_flight = (before, launched) if self.overlap else (launched, None)
        events = [] if read is None else _events(read, running)
        running, free_pages = _told(running, events, free_pages)
        # Then the engine's state changes. The next line assigns attributes and calls nothing. Python handles signals only at calls
        # and loop iterations, so an interrupt happens either before or after all of these assignments.
        self._waiting, self._running, self._in_flight, self.steps, pool.free_pages = waiting, running, in_flight, steps, free_pages
        return events

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Queues requests and yields tokens as they are generated until nothing is left to do.

        Tokens of requests that were queued before this call are yielded, too. If the iterator is closed early or a step raises, the
        requests of this call are cancelled; requests that were queued before stay. Events of the current step that have not been
        yielded are lost.

        Raises:
            TypeError, ValueError: a request is rejected, see `add`. If this happens, no request of this call has been queued.
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
            requests: the requests to run.
            on_event: called with each token as it is generated.

        Raises:
            TypeError, ValueError: a request is rejected, see `add`. If this happens, no request of this call has been started.
            RuntimeError: the engine is not idle. The tokens of the other requests would be lost.
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
        """Removes requests from the engine, waiting or running, and frees their pages."""
        waiting = tuple(entry for entry in self._waiting if entry[0] not in numbers)
        running = tuple(sequence for sequence in self._running if sequence.number not in numbers)
        dropped = [sequence for sequence in self._running if sequence.number in numbers]
        free_pages = _with_pages_of(dropped, self.cache.allocator.free_pages)
        self._waiting, self._running, self.cache.allocator.free_pages = waiting, running, free_pages

    # -- computations of a step, which do not change the engine ---------------------------------------------------------------

    def _pages_needed(self, request: Request) -> int:
        # The last generated token is never an input, so it needs no cache slot.
        return self.cache.allocator.pages_for(len(request.prompt) + request.max_tokens - 1)

    def _admitted(self) -> tuple[tuple[tuple[int, Request], ...], tuple[Running, ...], tuple[int, ...]]:
        """Returns the waiting requests, the running sequences, and the free pages, as they are after every request that can start
        has started.
        """
        allocator = self.cache.allocator
        running, free_pages = list(self._running), allocator.free_pages
        started = 0
        for number, request in self._waiting:
            needed = self._pages_needed(request)
            # A later, smaller request must not start first, because a large request could then wait forever.
            if len(running) >= self.max_sequences or (needed > len(free_pages) and running):
                break
            pages, free_pages = allocator.choose(needed, free_pages)  # raises if no running request can free pages
            running.append(Running(number, request, pages))
            started += 1
        return self._waiting[started:], tuple(running), free_pages

    def _scheduled(self, running: Iterable[Running]) -> list[_Scheduled]:
        """Returns the sequences of the next pass, and the input tokens of each."""
        budget = self.prefill_tokens
        scheduled = []
        for sequence in running:
            if sequence.complete:
                continue
            tokens = sequence.next_tokens(budget)
            if not sequence.generated:
                budget -= len(tokens)
            if tokens:
                scheduled.append((sequence, tokens))
        return scheduled

    def _launched(self, scheduled: Sequence[_Scheduled], before: Flight | None) -> tuple[Phase, Flight]:
        """Launches a pass, and the sampling of the next tokens. Returns the kind of the pass, and the pass in flight."""
        decoder, decodes = self.decoder, all(sequence.generated for sequence, _ in scheduled)
        if decoder is not None and decodes and len(scheduled) <= decoder.sizes[-1]:
            return Phase.DECODE, decoder.launch([sequence for sequence, _ in scheduled], before)
        # A token that is in flight is 0 in the batch. `_feed` then copies the actual token on the device.
        pieces = [Piece([0 if t is None else t for t in tokens], s.cached, s.pages) for s, tokens in scheduled]
        ready = [index for index, (s, tokens) in enumerate(scheduled) if s.cached + len(tokens) >= len(s.request.prompt)]
        ops = self.model.ops
        batch = make_batch(pieces, self.cache, self.model.device, logits_of=ready, phase=phase_of(pieces), ops=ops)
        self._feed(batch.tokens, scheduled, before)
        logits = self.model.forward(batch, self.cache)
        sequences = [scheduled[index][0] for index in ready]
        choices = [sequence.request.sampling for sequence in sequences]
        indices = [sequence.generated for sequence in sequences]
        kept = logits
        if self._penalties.wanted(sequences):
            inputs, generated = batch.tokens[batch.logit_rows], to_device(indices, torch.int64, logits.device)
            kept = self._penalties.adjust(ops, logits, inputs, generated, sequences)
        tokens = sample(ops, logits, choices, indices) if ready else batch.tokens[:0]
        rows = ((sequence.number, sequence.generated) for sequence in sequences)
        return batch.phase, Flight(rows, tokens, shown(ops, kept, tokens, (sequence.request for sequence in sequences)))

    def _feed(self, tokens: torch.Tensor, scheduled: Iterable[_Scheduled], before: Flight | None) -> None:
        """Copies tokens that are in flight, on the device, to their positions in the input of a pass."""
        numbers, places, place = [], [], 0
        for sequence, its in scheduled:
            if its[0] is None:
                numbers.append(sequence.number)
                places.append(place)
            place += len(its)
        if numbers:
            assert before is not None, "a token in flight belongs to a pass in flight"
            row_of = before.row_of
            rows = to_device([row_of[number] for number in numbers], torch.int64, tokens.device)
            tokens[to_device(places, torch.int64, tokens.device)] = before.on_device[rows]


def _log_compilations(compiled: Sequence[Compilation], phase: Phase) -> None:
    if compiled:
        seconds = sum(each.seconds for each in compiled)
        logger.warning("a %s pass compiled %d programs in %.1f s: %s", phase.value, len(compiled), seconds, compiled[0])


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    for index, size in enumerate(sizes):
        COUNT.check(f"decode_sizes[{index}]", size)
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"decode_sizes must be at least one size, ascending, got {describe(list(sizes))}")
    return tuple(sizes)


def _launched_of(running: Iterable[Running], scheduled: Iterable[_Scheduled]) -> tuple[Running, ...]:
    """Returns the state of the sequences after a pass over the scheduled tokens has been launched."""
    lengths = {sequence.number: len(tokens) for sequence, tokens in scheduled}
    return tuple(s.after(lengths[s.number]) if s.number in lengths else s for s in running)


def _events(flight: Flight, running: Iterable[Running]) -> list[Event]:
    """Waits for a pass, and returns the tokens that the pass generated for sequences that are still running."""
    requests = {sequence.number: sequence.request for sequence in running}
    tokens, logits, logprobs, likely = flight.tokens(), flight.logits(), flight.logprobs(), flight.likely()
    events = []
    for row, ((number, index), token) in enumerate(zip(flight.rows, tokens, strict=True)):
        request = requests.get(number)
        if request is None:  # the request was cancelled, or its previous token was a stop token
            continue
        reason = "stop" if token in request.stop_tokens else "length" if index + 1 == request.max_tokens else None
        kept = logits[row] if logits is not None and request.keep_logits else None
        if logprobs is None or request.logprobs is None:
            events.append(Event(number, index, token, reason, kept))
        else:
            listed = () if likely is None else tuple(likely[row][: request.logprobs])
            events.append(Event(number, index, token, reason, kept, logprobs[row], listed))
    return events


def _told(
    running: Iterable[Running], events: Iterable[Event], free_pages: tuple[int, ...]
) -> tuple[tuple[Running, ...], tuple[int, ...]]:
    """Returns the sequences that are still running after these events, and the free pages with those of finished sequences."""
    given = {event.request: event for event in events}
    remaining, finished = [], []
    for sequence in running:
        event = given.get(sequence.number)
        if event is not None and event.finish_reason is not None:
            finished.append(sequence)
        elif event is not None and event.index + 1 == sequence.generated:
            remaining.append(sequence._replace(last_token=event.token))
        else:
            remaining.append(sequence)
    return tuple(remaining), _with_pages_of(finished, free_pages)


def _with_pages_of(sequences: Iterable[Running], free_pages: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the free pages together with the pages of these sequences."""
    return (*free_pages, *(page for sequence in sequences for page in reversed(sequence.pages)))
