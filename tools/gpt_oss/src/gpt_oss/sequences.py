"""The engine's state of a started request, and of a pass in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpt_oss.request import MOST_LISTED, Request
from gpt_oss.transfer import Fetched


class Running(NamedTuple):
    """A started request, with its state after all launched passes complete. Immutable: updates make a new object.

    Attributes:
        number: the request's number.
        request: the engine's own copy of the request.
        pages: the cache pages of the request.
        cached: number of the request's tokens whose keys and values are in the cache.
        generated: number of generated tokens, including a token in flight.
        last_token: the last generated token, which is not in the cache yet; None if this token is in flight.
    """

    number: int
    request: Request
    pages: tuple[int, ...]
    cached: int = 0
    generated: int = 0
    last_token: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the request ends at the latest with the token in flight, because ``max_tokens`` is reached."""
        return self.generated >= self.request.max_tokens

    def next_tokens(self, budget: int) -> Sequence[int | None]:
        """Returns the input tokens of the next pass. After the first generated token, this is the last token, or None if the last
        token is in flight. Before, these are at most ``budget`` tokens of the prompt.
        """
        if self.generated:
            return (self.last_token,)
        return self.request.prompt[self.cached : self.cached + budget]

    def after(self, tokens: int) -> Running:
        """Returns the state after the launch of a pass over ``tokens`` tokens. The pass generates a token if it completes the
        prompt.
        """
        cached = self.cached + tokens
        generates = cached >= len(self.request.prompt)
        last_token = None if generates else self.last_token
        return self._replace(cached=cached, generated=self.generated + generates, last_token=last_token)


class Shown(NamedTuple):
    """What events show besides their tokens, on the device.

    Attributes:
        logits: float ``[rows, vocab_size]``; None if no request keeps them.
        logprobs: float32 ``[rows]``, the log-probabilities of the sampled tokens; None if no request asks for them.
        likely: float32 and int32 ``[rows, listed]``, the log-probabilities of the most likely tokens, and these tokens; None if no
            request asks for them.
    """

    logits: Tensor | None = None
    logprobs: Tensor | None = None
    likely: tuple[Tensor, Tensor] | None = None


NOTHING = Shown()


def shown(ops: Any, logits: Tensor, tokens: Tensor, requests: Iterable[Request]) -> Shown:
    """Selects the logits, and launches the computation of the log-probabilities, that the events of a pass show.

    Args:
        ops: the operators.
        logits: float ``[rows, vocab_size]``.
        tokens: integer ``[rows]``, the sampled tokens.
        requests: the requests of the rows.
    """
    wanted = list(requests)
    kept = logits if any(request.keep_logits for request in wanted) else None
    counts = [request.logprobs for request in wanted if request.logprobs is not None]
    if not counts:
        return Shown(kept)
    # Kernels are compiled for classes of numbers of listed tokens. Only two numbers are used, and the warm-up calls both.
    listed = listed_tokens(logits) if max(counts) else 0
    logprobs, likely, likely_tokens, _ = ops.token_logprobs(logits, tokens, listed)
    return Shown(kept, logprobs, (likely, likely_tokens) if listed else None)


def listed_tokens(logits: Tensor) -> int:
    """Returns how many of the most likely tokens of each row are computed, if a request lists any."""
    return min(MOST_LISTED, logits.shape[1])


class Flight:
    """A launched pass, which may still be running on the device; the host does not know its tokens until it completes.

    Args:
        rows: for each sampled row, the request's number, and the number of tokens that it had generated before this one.
        tokens: int64 ``[at least the rows]``, on the device. Owned by this object, unless ``intact`` is given.
        shown: what events show besides their tokens.
        intact: returns whether later work has not overwritten ``tokens`` yet. None: no later work overwrites them.
    """

    def __init__(
        self,
        rows: Iterable[tuple[int, int]],
        tokens: Tensor,
        shown: Shown = NOTHING,
        intact: Callable[[], bool] | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self._on_device, self._intact = tokens, intact
        self._tokens = Fetched(tokens)
        self._logits = None if shown.logits is None else Fetched(shown.logits.float())
        self._logprobs = None if shown.logprobs is None else Fetched(shown.logprobs)
        self._likely = None if shown.likely is None else tuple(map(Fetched, shown.likely))

    @property
    def row_of(self) -> dict[int, int]:
        """Maps a request's number to its row."""
        return {number: row for row, (number, _) in enumerate(self.rows)}

    @property
    def on_device(self) -> Tensor:
        """The sampled tokens on the device, for work that is launched later on the same stream. Waits for the pass if ``tokens``
        was overwritten.
        """
        if self._intact is None or self._intact():
            return self._on_device
        return self._tokens.wait().to(self._on_device.device)

    def tokens(self) -> list[int]:
        """Returns the sampled tokens on the host. Waits for the pass."""
        return self._tokens.wait().tolist()

    def logits(self) -> Tensor | None:
        """Returns the logits, float32 ``[rows, vocab_size]`` in host memory; None if they were not requested. Waits for the
        pass.
        """
        return None if self._logits is None else self._logits.wait()

    def logprobs(self) -> list[float] | None:
        """Returns the log-probability of each sampled token; None if no request asked for them. Waits for the pass."""
        return None if self._logprobs is None else self._logprobs.wait().tolist()

    def likely(self) -> list[list[tuple[int, float]]] | None:
        """Returns a list of pairs for each row: the most likely tokens and their log-probabilities, the most likely first. Returns
        None if no request asked for them. Waits for the pass.
        """
        if self._likely is None:
            return None
        logprobs, tokens = (each.wait().tolist() for each in self._likely)
        return [list(zip(*row, strict=True)) for row in zip(tokens, logprobs, strict=True)]
