"""Runs passes of every size class before the first request, so that no request waits for a kernel to be compiled or loaded.

Kernels and their programs depend on the numbers of tokens and sequences, on the longest chunk, and on the upper bound of the
lengths. They do not depend on values. So the warm-up passes have zeros as tokens, short sequences with the bounds of long
sequences, and one layer of each kind instead of all layers. The passes write nothing to the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gpt_oss.batch import Batch, Phase, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.decoder import Decoder
from gpt_oss.model import GptOss
from gpt_oss.penalties import rehearse, widths
from gpt_oss.sampling import Sampling, sample
from gpt_oss.sequences import listed_tokens
from tokenspeed_kernel import compilations

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """A warm-up that was run.

    Attributes:
        passes: number of passes.
        programs: number of programs that were compiled.
        seconds: duration in seconds.
    """

    passes: int
    programs: int
    seconds: float

    def __str__(self) -> str:
        return f"warmed up with {self.passes} passes in {self.seconds:.1f} s, {self.programs} programs compiled"


class Shape(NamedTuple):
    """The size class of a pass.

    Attributes:
        phase: the kind of the pass.
        lengths: the number of tokens of each chunk.
        max_seqlen_k: upper bound of the sequences' lengths; 0 means the lengths of the chunks themselves.
    """

    phase: Phase
    lengths: tuple[int, ...]
    max_seqlen_k: int = 0


def sizes_up_to(most: int) -> list[int]:
    """Returns the powers of 2 below ``most``, and ``most``.

    >>> sizes_up_to(12)
    [1, 2, 4, 8, 12]
    """
    return [*itertools.takewhile(lambda size: size < most, (1 << power for power in itertools.count())), most]


def shapes(prefill_tokens: int, max_sequences: int, decoded: int, longest: int, page_size: int) -> Iterator[Shape]:
    """Yields the size classes of an engine's passes, except those of its decoder.

    Args:
        prefill_tokens, max_sequences: see `Engine`.
        decoded: the largest number of sequences of a decode pass of `Decoder`; 0 without a decoder.
        longest: number of tokens of the longest sequence.
        page_size: number of tokens per page.
    """
    short, half, long = (max(page_size, bound // page_size * page_size) for bound in (page_size, longest // 2, longest))
    for lengths in _chunks(prefill_tokens, longest, max_sequences, 1):
        yield Shape(Phase.PREFILL, lengths)
        yield from (Shape(Phase.EXTEND, lengths, bound) for bound in (short, long))
    if max_sequences > 1:
        for lengths in _chunks(prefill_tokens + max_sequences - 1, longest, max_sequences, 2):
            yield from (Shape(Phase.MIXED, lengths, bound) for bound in (short, long))
    for count in sizes_up_to(max_sequences):
        if count > decoded:
            yield from (Shape(Phase.DECODE, (1,) * count, bound) for bound in dict.fromkeys((short, half, long)))


def _chunks(most_tokens: int, longest: int, most: int, least: int) -> list[tuple[int, ...]]:
    """Returns the lengths of chunks for passes of ``least`` to ``most`` chunks of at most ``longest`` tokens.

    Every token count is combined with few and with many chunks, and every number of chunks with few and with many tokens. All
    combinations would take several times as long.
    """
    counts = [count for count in sizes_up_to(most) if count >= least]
    steps = dict.fromkeys((*sizes_up_to(min(most_tokens, longest)), *sizes_up_to(most_tokens)))
    sizes = [(tokens, count) for tokens in steps for count in counts]
    ends = [(tokens, count) for tokens, count in sizes if tokens == most_tokens or count in (counts[0], counts[-1])]
    few = [(count, count) for count in counts]
    found = [split(tokens, count) for tokens, count in (*ends, *few) for split in (_equal, _one_long) if tokens >= count]
    return [lengths for lengths in dict.fromkeys(found) if max(lengths) <= longest]


def _equal(tokens: int, count: int) -> tuple[int, ...]:
    return tuple(tokens // count + (index < tokens % count) for index in range(count))


def _one_long(tokens: int, count: int) -> tuple[int, ...]:
    return (1,) * (count - 1) + (tokens - count + 1,)


def warm_up(
    model: GptOss,
    cache: PagedKVCache,
    decoder: Decoder | None,
    prefill_tokens: int,
    max_sequences: int,
    console: Console | None = None,
) -> WarmUp:
    """Runs a pass of each size class of an engine, and logs the duration.

    The compile policy applies. The arguments are those of `Engine`. Every rank of a parallel model must call this function.

    Raises:
        CompilationForbiddenError: the policy is ``"forbid"``, and a program is neither in a pack nor in a cache.
    """
    begun, before = time.perf_counter(), len(compilations())
    page_size = cache.page_size
    longest = min(model.max_positions, cache.allocator.total * page_size)
    decoded = 0 if decoder is None else decoder.sizes[-1]
    passes = list(shapes(prefill_tokens, max_sequences, decoded, longest, page_size))
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=console is None) as progress, _layer_of_each_kind(model):
        for shape in progress.track(passes):
            batch = _batch(shape, model, cache)
            model.forward(batch, cache)
        # A pass over the middle of a prompt needs no logits.
        model.forward(replace(batch, logit_rows=batch.positions[:0]), cache)
        if decoder is not None:
            decoder.warm_up()
    for rows in sizes_up_to(max_sequences):
        logits = torch.zeros(rows, model.config.vocab_size, dtype=model.dtype, device=model.device)
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            tokens = sample(model.ops, logits, [sampling] * rows, [0] * rows)
        for listed in (0, listed_tokens(logits)):
            model.ops.token_logprobs(logits, tokens, listed)
        # One row is run with every list length, several rows with the shortest lists only. Long lists of many rows would need too
        # much memory.
        for width in widths(longest, model.config.vocab_size)[: 1 if rows > 1 else None]:
            rehearse(model.ops, logits, width)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    done = WarmUp(len(passes), len(compilations(before)), time.perf_counter() - begun)
    logger.info("%s", done)
    return done


def _batch(shape: Shape, model: GptOss, cache: PagedKVCache) -> Batch:
    """Makes the batch of a pass of a size class. Each chunk begins its sequence, and all pages are page 0."""
    width = -(-max(*shape.lengths, shape.max_seqlen_k) // cache.page_size)
    pieces = [Piece((0,) * length, pages=(0,) * width) for length in shape.lengths]
    everything = range(len(pieces))
    batch = make_batch(pieces, cache, model.device, logits_of=everything, phase=shape.phase, ops=model.ops)
    assert batch.slot_mapping is not None, "a batch with a cache has slots"
    return replace(
        batch,
        max_seqlen_k=max(batch.max_seqlen_k, shape.max_seqlen_k),
        slot_mapping=torch.full_like(batch.slot_mapping, -1),  # -1: nothing is written to the cache
    )


@contextlib.contextmanager
def _layer_of_each_kind(model: GptOss) -> Iterator[None]:
    """Inside the block, the model has only the first layer, which has no residual, and one layer of each kind of the other
    layers.
    """
    whole = model.layers
    first, *others = whole
    kinds = {(layer.window_left, layer.plan): layer for layer in others}
    model.layers = [first, *kinds.values()]
    try:
        yield
    finally:
        model.layers = whole
