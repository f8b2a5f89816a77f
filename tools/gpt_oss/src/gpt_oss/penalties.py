"""Penalties and biases: the tokens of each sequence that `adjust_logits` changes, in lists on the device.

A list has the tokens of the prompt, if the repetition penalty needs them, the tokens with a bias, and the generated tokens with
their counts. The host learns a generated token one pass late, so the device counts: a pass first counts its input tokens, and then
changes its logits. Every entry that it writes depends only on the tokens of the sequence so far, and replaces what an earlier
attempt wrote. So a pass that is repeated after a failure counts no token twice.

The lists are the rows of static tensors, in the order of the pass's rows. While the sequences stay the same, nothing is copied to
the device. When sequences join or leave, or a list is full, the lists move to new tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_oss.request import Request
from gpt_oss.sampling import PENALTIES
from gpt_oss.sequences import Running
from gpt_oss.transfer import sent, to_device

LEAST_WIDTH = 256  # the fewest entries of a row; all numbers of entries are powers of two, so that there are few shapes
_NEVER = 2**62  # more than the number of tokens that a sequence generates
_TOKENS, _COUNTS, _BIAS, _GENERATED = range(4)  # the indices of the attributes of `_Lists` in its memory


@dataclass(frozen=True, eq=False)
class _Lists:
    """The lists of a pass on the device, one row per sequence. A row without penalties and biases lists no token.

    Attributes:
        numbers: the number of the request of each row; None if the request has neither penalties nor biases.
        begun: for each row, the number of entries before generated tokens. The i-th generated token can take entry ``begun + i``.
        entries: int32 ``[4, rows, width]``, the memory of tokens, counts, bias and generated.
        tokens: int32 ``[rows, width]``, the listed tokens, each once in a row; -1 in unused entries.
        counts: int32 ``[rows, width]``, how often each listed token was generated; -1 for a token that is listed for its bias only.
            Unused entries have any count.
        bias: float32 ``[rows, width]``, the biases of the listed tokens.
        generated: int32 ``[rows, width]``, the generated tokens in order, then -1.
        starts: int64 ``[rows, 1]``, ``begun`` on the device.
        counted_from: int64 ``[rows]``, the number of generated tokens from which a row's input token is counted: 1, or `_NEVER` in
            rows without penalties.
        penalties: float32 ``[3, rows]``: for repetition, frequency and presence.
    """

    numbers: tuple[int | None, ...]
    begun: tuple[int, ...]
    entries: Tensor
    starts: Tensor
    counted_from: Tensor
    penalties: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.entries[_TOKENS]

    @property
    def counts(self) -> Tensor:
        return self.entries[_COUNTS]

    @property
    def bias(self) -> Tensor:
        return self.entries[_BIAS].view(torch.float32)

    @property
    def generated(self) -> Tensor:
        return self.entries[_GENERATED]

    @property
    def width(self) -> int:
        return self.entries.shape[2]

    def count(self, inputs: Tensor, generated: Tensor) -> None:
        """Counts the input tokens of a pass. Changes tokens, counts and generated.

        Args:
            inputs: int64 ``[rows]``, the input tokens. In a sequence that has generated tokens, this is the last of them.
            generated: int64 ``[rows]``, the number of tokens that each sequence has generated.
        """
        uncounted = generated < self.counted_from
        # In uncounted rows, the next lines write -1 to entries of tokens and generated that are -1 already.
        token = inputs.to(torch.int32, copy=True).masked_fill_(uncounted, -1).unsqueeze(1)
        index = (generated - 1).masked_fill_(uncounted, 0).unsqueeze(1)
        self.generated.scatter_(1, index, token)
        count = (self.generated == token).sum(1, keepdim=True, dtype=torch.int32)
        # The token's entry is the one that lists it already, or an entry of its own, which follows all listed tokens.
        found = (self.tokens == token).scatter_(1, self.starts + index, True)
        entry = found.view(torch.uint8).argmax(1, keepdim=True)
        self.tokens.scatter_(1, entry, token)
        self.counts.scatter_(1, entry, count)

    def apply(self, ops: Any, logits: Tensor) -> None:
        """Changes the logits, ``[rows, vocab_size]``, of listed tokens in place."""
        ops.adjust_logits(logits, self.tokens, self.counts, self.bias, *self.penalties, out=logits)


class Penalties:
    """Changes the logits of an engine's passes by the penalties and biases of its requests.

    A failed step need not restore this object, because a repeated pass writes the same entries.

    Args:
        device: the device of the logits.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._lists: _Lists | None = None

    def wanted(self, sequences: Iterable[Running]) -> bool:
        """Returns whether a sequence of a pass has penalties or biases. If none has, frees the lists."""
        found = any(sequence.request.sampling.adjusts_logits for sequence in sequences)
        if not found:
            self._lists = None
        return found

    def adjust(self, ops: Any, logits: Tensor, inputs: Tensor, generated: Tensor, sequences: Sequence[Running]) -> Tensor:
        """Counts the input tokens of a pass on the device, and changes the logits of this pass in place.

        Args:
            ops: the operators.
            logits: float ``[rows, vocab_size]``.
            inputs: int64 ``[rows]``, the last input token of each sequence.
            generated: int64 ``[rows]``, the number of tokens that each sequence has generated.
            sequences: the sequences of the rows. A sequence that has generated tokens and has penalties or biases was one of the
                sequences of the last call that did not fail, or of a later one.

        Returns:
            The model's logits, for events: a copy if a request wants them or log-probabilities; otherwise the changed logits.
        """
        lists = self._lists
        if lists is None or lists.numbers != _numbers(sequences) or _needed(lists.begun, sequences) > lists.width:
            lists = self._moved(sequences)
            self._lists = lists  # until this line the old lists are complete, so that a failure loses nothing
        kept = logits.clone() if any(s.request.keep_logits or s.request.logprobs is not None for s in sequences) else logits
        if any(sequence.request.sampling.counts_tokens for sequence in sequences):
            lists.count(inputs, generated)
        lists.apply(ops, logits)
        return kept

    def _moved(self, sequences: Sequence[Running]) -> _Lists:
        """Returns new lists for these sequences. The list of a sequence that has one is copied."""
        old, device = self._lists, self._device
        numbers = _numbers(sequences)
        row_of: dict[int | None, int] = {}
        if old is not None:
            row_of = {number: row for row, number in enumerate(old.numbers) if number is not None}
        copied = {row: row_of[number] for row, number in enumerate(numbers) if number in row_of}
        fresh = {row: s for row, s in enumerate(sequences) if numbers[row] is not None and row not in copied}
        assert not any(s.generated for s in fresh.values()), "a sequence that has generated tokens has a list"
        first = {row: _first_entries(sequence.request) for row, sequence in fresh.items()}
        begun = [first[row].shape[1] if row in first else 0 for row in range(len(sequences))]
        if old is not None:
            for row, old_row in copied.items():
                begun[row] = old.begun[old_row]
        width = max(LEAST_WIDTH, 1 << (_needed(begun, sequences) - 1).bit_length())
        entries = _unused(4, len(sequences), width, device)
        if old is not None and copied:
            rows, old_rows = to_device([*copied, *copied.values()], torch.int64, device).view(2, -1)
            common = min(width, old.width)
            entries[:, rows, :common] = old.entries[:, old_rows, :common]
        if first:
            longest = max(each.shape[1] for each in first.values())
            uploaded = _unused(3, len(first), longest, "cpu")
            for place, each in enumerate(first.values()):
                uploaded[:, place, : each.shape[1]] = each
            entries[:3, to_device([*first], torch.int64, device), :longest] = sent(uploaded, device)
        samplings = [sequence.request.sampling for sequence in sequences]
        counted_from = [1 if sampling.counts_tokens else _NEVER for sampling in samplings]
        starts, counted = to_device([*begun, *counted_from], torch.int64, device).view(2, -1)
        values = [float(getattr(sampling, name)) for name in PENALTIES for sampling in samplings]
        penalties = to_device(values, torch.float32, device).view(len(PENALTIES), -1)
        return _Lists(numbers, tuple(begun), entries, starts.unsqueeze(1), counted, penalties)


def widths(longest: int, vocab_size: int) -> list[int]:
    """Returns the numbers of entries that lists can have, ascending.

    Args:
        longest: number of tokens of the longest sequence.
        vocab_size: the model's vocabulary size; every token may have a bias.
    """
    found = [LEAST_WIDTH]
    while found[-1] <= longest + vocab_size:
        found.append(2 * found[-1])
    return found


def rehearse(ops: Any, logits: Tensor, width: int) -> None:
    """Launches what `Penalties.adjust` launches for rows that list no tokens. So the logits do not change.

    Args:
        ops: the operators.
        logits: float ``[rows, vocab_size]``.
        width: number of entries of a row, one of `widths`.
    """
    rows, device = len(logits), logits.device
    none = torch.zeros(rows, dtype=torch.int64, device=device)
    lists = _Lists(
        (None,) * rows,
        (0,) * rows,
        _unused(4, rows, width, device),
        none.unsqueeze(1),
        torch.full_like(none, _NEVER),
        torch.ones(len(PENALTIES), rows, device=device),
    )
    lists.count(none, none)
    lists.apply(ops, logits)


def _numbers(sequences: Iterable[Running]) -> tuple[int | None, ...]:
    """Returns the number of each sequence's request; None for a request that has neither penalties nor biases."""
    return tuple(s.number if s.request.sampling.adjusts_logits else None for s in sequences)


def _needed(begun: Sequence[int], sequences: Iterable[Running]) -> int:
    """Returns the number of entries that a pass needs in a row: the first entries, one for each generated token, and one that is
    never used in rows that are not counted.
    """
    pairs = zip(begun, sequences, strict=True)
    return max(first + (max(s.generated, 1) if s.request.sampling.counts_tokens else 1) for first, s in pairs)


def _unused(planes: int, rows: int, width: int, device: torch.device | str) -> Tensor:
    """Returns unused entries: -1, and 0 as bias."""
    entries = torch.full((planes, rows, width), -1, dtype=torch.int32, device=device)
    entries[_BIAS].zero_()
    return entries


def _first_entries(request: Request) -> Tensor:
    """Returns the entries of a list before a token is generated, int32 ``[3, listed]`` on the host: the tokens, their counts, and
    the bits of their biases.
    """
    sampling = request.sampling
    bias = sampling.logit_bias or {}
    # The order is that of the biases, then that of the other tokens. No Python loop runs over the prompt.
    counts = dict.fromkeys(bias, -1) | dict.fromkeys(request.prompt if sampling.repetition_penalty != 1 else (), 0)
    entries = torch.zeros(3, len(counts), dtype=torch.int32)
    entries[_TOKENS] = torch.tensor([*counts], dtype=torch.int32)
    entries[_COUNTS] = torch.tensor([*counts.values()], dtype=torch.int32)
    entries[_BIAS, : len(bias)] = torch.tensor([*map(float, bias.values())], dtype=torch.float32).view(torch.int32)
    return entries
