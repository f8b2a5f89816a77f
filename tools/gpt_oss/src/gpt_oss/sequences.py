"""What the engine knows of a request that has started, and of a pass whose tokens it may not know yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from gpt_oss.request import Request
from gpt_oss.transfer import Fetched


class Running(NamedTuple):
    """A request that has started, and how far it is once everything that was launched is done. It is replaced, never changed.

    Attributes:
        number: the request's number.
        request: the engine's own copy of it.
        pages: the pages that it holds.
        cached: how many of its tokens have their keys and values in the cache.
        generated: how many tokens have been generated, a token that is in flight included.
        last_token: the one generated last, which is not in the cache yet; None if it is in flight.
    """

    number: int
    request: Request
    pages: tuple[int, ...]
    cached: int = 0
    generated: int = 0
    last_token: int | None = None

    @property
    def complete(self) -> bool:
        """Whether no more tokens can follow, whatever the one in flight turns out to be."""
        return self.generated >= self.request.max_tokens

    def next_tokens(self, budget: int) -> Sequence[int | None]:
        """The tokens that the next pass runs: the one generated last, None if it is in flight; or at most ``budget`` tokens of the
        prompt."""
        if self.generated:
            return (self.last_token,)
        return self.request.prompt[self.cached : self.cached + budget]

    def after(self, tokens: int) -> Running:
        """The same once a pass over that many of its tokens has been launched. It generates a token if the prompt is done."""
        cached = self.cached + tokens
        generates = cached >= len(self.request.prompt)
        last_token = None if generates else self.last_token
        return self._replace(cached=cached, generated=self.generated + generates, last_token=last_token)


class Flight:
    """A pass that has been launched: the device may still be at it, and then the host does not know its tokens.

    Args:
        rows: for each row that a token was sampled for, the request's number, and how many tokens it had before that.
        tokens: int64 ``[at least the rows]``, on the device. Its own from now on, except if ``intact`` is given.
        logits: what they were sampled from, if somebody wants to see that.
        intact: whether the tokens still lie where they did; without it they always do.
    """

    def __init__(
        self,
        rows: Iterable[tuple[int, int]],
        tokens: Tensor,
        logits: Tensor | None = None,
        intact: Callable[[], bool] | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self._on_device, self._intact = tokens, intact
        self._tokens = Fetched(tokens)
        self._logits = None if logits is None else Fetched(logits.float())

    @property
    def row_of(self) -> dict[int, int]:
        """The row of each request."""
        return {number: row for row, (number, _) in enumerate(self.rows)}

    @property
    def on_device(self) -> Tensor:
        """The tokens, on the device, in order with what is launched next. Waits for the pass if they were overwritten since."""
        if self._intact is None or self._intact():
            return self._on_device
        return self._tokens.wait().to(self._on_device.device)

    def tokens(self) -> list[int]:
        """The tokens of the rows. Waits for the pass."""
        return self._tokens.wait().tolist()

    def logits(self) -> Tensor | None:
        """float32 ``[rows, vocab_size]`` in host memory, if they were kept. Waits for the pass."""
        return None if self._logits is None else self._logits.wait()
