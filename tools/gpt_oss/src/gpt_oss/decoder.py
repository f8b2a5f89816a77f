"""Decode passes in static buffers, so that a device can run them without Python.

All inputs of a step are on the device: each sequence's last token, length, pages, and sampling parameters. A step reads these
inputs, runs the model, samples, and updates the inputs for the next step. While the set of sequences is unchanged, nothing is
copied to the device. When sequences join or leave, the inputs are uploaded again. A token that the host does not know yet is copied
on the device.

A step consists of two parts: the model's pass, and sampling. On a GPU each part is captured into a CUDA graph when the decoder is
created, for a set of batch sizes. A batch between two sizes is padded with copies of its first sequence. These copies write nothing
to the cache. They select the same experts as the first sequence, so no additional weights are read. If a sequence has penalties or
biases, Python launches the change of the logits between the two parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from gpt_oss.batch import Batch, Phase
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import GptOss
from gpt_oss.penalties import Penalties
from gpt_oss.sequences import Flight, Running, shown
from gpt_oss.transfer import sent

# The fields of `_Rows` whose elements have 64 bits, and those whose elements have 32 bits.
_WIDE = ("tokens", "positions", "offsets", "seeds", "sources")
_NARROW = ("cache_seqlens", "top_k", "temperature", "top_p")
# The parts of a pass, each captured into a graph of its own. A step runs "model", then one of the others.
_PARTS = ("model", "greedy", "sampled")


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Returns the batch sizes for which passes are captured: 1, 2, 4, 8, then multiples of 8, and ``largest``. From 64 on, the
    distance between sizes is a quarter of the previous power of two.
    """
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return (*sizes, largest)


class _Rows:
    """The inputs of a step, one row per sequence. All rows are in one contiguous allocation, so that one copy uploads them.

    Attributes:
        tokens: int64 ``[rows]``, the input token.
        positions: int64 ``[rows]``, the input token's position in its sequence.
        offsets: int64 ``[rows]``, number of tokens that the request generated before the token to sample.
        seeds: int64 ``[rows]``, the requests' seeds.
        sources: int64 ``[rows]``, the row of the pass in flight that produces the input token; -1 if ``tokens`` has the token.
        cache_seqlens: int32 ``[rows]``, number of tokens in the cache, the input token included.
        top_k: int32 ``[rows]``, see `Sampling`.
        temperature, top_p: float32 ``[rows]``, see `Sampling`.
    """

    tokens: Tensor
    positions: Tensor
    offsets: Tensor
    seeds: Tensor
    sources: Tensor
    cache_seqlens: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor

    def __init__(self, rows: int, device: torch.device | str, pinned: bool = False) -> None:
        # Each field is padded to a multiple of 128 bytes, for alignment.
        rows = -(-rows // 32) * 32
        split = 8 * len(_WIDE) * rows
        self.memory = torch.zeros(split + 4 * len(_NARROW) * rows, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.wide = self.memory[:split].view(torch.int64).view(len(_WIDE), rows)
        self.narrow = self.memory[split:].view(torch.int32).view(len(_NARROW), rows)
        for name, field in zip((*_WIDE, *_NARROW), (*self.wide, *self.narrow), strict=True):
            setattr(self, name, field.view(torch.float32) if name in ("temperature", "top_p") else field)


class Decoder:
    """Runs decode passes of an engine.

    Args:
        model: the model.
        cache: its key-value cache.
        sizes: the batch sizes of captured passes, ascending.
        capture: whether passes are captured into CUDA graphs now, and replayed later. If not, Python launches the same passes.
        console: shows the progress; None shows none.
        penalties: the object that changes the logits of sequences with penalties and biases. Passes that do not run in the decoder
            must use the same object. None: one of its own.

    Attributes:
        sizes: the batch sizes of captured passes, ascending.

    Raises:
        RuntimeError: a pass cannot be captured, for example because a kernel synchronises with the device.
    """

    def __init__(
        self,
        model: GptOss,
        cache: PagedKVCache,
        sizes: Sequence[int],
        capture: bool,
        console: Console | None = None,
        penalties: Penalties | None = None,
    ) -> None:
        self._model, self._cache = model, cache
        self._penalties = penalties or Penalties(model.device)
        self.sizes, largest = tuple(sizes), sizes[-1]
        self._captured = capture
        device, allocator = model.device, cache.allocator
        self._rows = _Rows(largest, device)
        width = max(1, min(allocator.pages_for(model.max_positions), allocator.total))
        self._page_table = torch.zeros(largest, width, dtype=torch.int32, device=device)
        # The pages to which a pass may write. -1 means no page. Padding rows contain -1. A sequence's pages are followed by -1,
        # because the position of its last pass may be past its pages.
        self._written_pages = torch.full_like(self._page_table, -1)
        self._logits = torch.zeros(largest, model.config.vocab_size, dtype=model.dtype, device=device)
        self._batches = {size: self._batch(size) for size in self.sizes}
        # The contents of the rows on the device: the batch size, and the request number and length of each sequence. None if
        # unknown.
        self._held: tuple[int, tuple[tuple[int, int], ...]] | None = None
        self._launches = 0
        self._page_rows: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        if capture:
            with self._on_device():
                self._capture(console)

    def launch(self, sequences: Sequence[Running], before: Flight | None) -> Flight:
        """Launches a pass over the last tokens of sequences, the sampling of their next tokens, and their log-probabilities.

        Args:
            sequences: the sequences; at least one, at most the largest size. Each has generated a token.
            before: the pass in flight. It has a row for each sequence whose last token the host does not know yet.
        """
        count = len(sequences)
        size = next(size for size in self.sizes if size >= count)
        wanted = (size, tuple((s.number, s.cached) for s in sequences))
        with self._on_device():
            fed = None
            stale = wanted != self._held
            if stale and before is not None:
                fed = before.on_device.clone()  # copied, because the next lines may overwrite these tokens
            # The next lines change the rows. If a line fails, the contents of the rows are unknown, and the next launch uploads the
            # rows again. The next lines also overwrite the tokens of the last launch. The `Flight` of that launch detects this by
            # the launch counter.
            self._held, self._launches = None, self._launches + 1
            launch = self._launches
            if stale:
                self._load(sequences, size, {} if before is None else before.row_of, fed)
            self._run(size, "model")
            ops, logits, tokens = self._model.ops, self._logits[:count], self._rows.tokens[:count]
            if self._penalties.wanted(sequences):
                # Before sampling, the rows have the input tokens, and the numbers of tokens that were generated with them.
                logits = self._penalties.adjust(ops, logits, tokens, self._rows.offsets[:count], sequences)
            self._run(size, "greedy" if all(s.request.sampling.temperature == 0 for s in sequences) else "sampled")
            more = shown(ops, logits, tokens, (s.request for s in sequences))
            flight = Flight(((s.number, s.generated) for s in sequences), tokens, more, lambda: self._launches == launch)
        self._held = (size, tuple((number, cached + 1) for number, cached in wanted[1]))
        return flight

    def replay(self, size: int, sampled: bool = False) -> None:
        """Launches a pass on the rows that the last pass left, for measurements. The tokens of this pass are discarded."""
        self._held, self._launches = None, self._launches + 1
        with self._on_device():
            self._run(size, "model")
            self._run(size, "sampled" if sampled else "greedy")

    def warm_up(self) -> None:
        """Launches a pass of each size, unless the passes were captured. These passes write nothing to the cache. Call this only
        while no sequence runs.
        """
        if not self._captured:
            with self._on_device():
                for size in self.sizes:
                    self._launch_all(size)

    # -- one pass -------------------------------------------------------------------------------------------------------------

    def _run(self, size: int, part: str) -> None:
        """Replays the graph of a part of a pass, or launches the part from Python."""
        if self._captured:
            self._graphs[size, part].replay()
        else:
            self._launch(size, part)

    def _launch(self, size: int, part: str) -> None:
        """Launches one part of a pass, the model or the sampling, from Python. Each graph captures one such part."""
        if part == "model":
            self.forward(size)
        else:
            self._choose(size, part == "greedy")

    def forward(self, size: int) -> None:
        """Launches the model's pass from Python. The pass computes the logits from the rows and changes no row. So an extra launch,
        for example to record calls, is harmless.
        """
        positions, page_size = self._rows.positions[:size], self._cache.page_size
        slots = self._model.ops.positions_to_slots(positions, self._written_pages[:size], page_size)
        self._model.forward(replace(self._batches[size], slot_mapping=slots), self._cache, out=self._logits[:size])

    def _choose(self, size: int, greedy: bool) -> None:
        """Launches the sampling of tokens, and the update of the rows for the next pass."""
        rows, ops, logits = self._rows, self._model.ops, self._logits[:size]
        if greedy:
            ops.argmax(logits, out=rows.tokens[:size])
        else:
            columns = (rows.temperature, rows.top_k, rows.top_p, rows.seeds, rows.offsets)
            ops.sample_top_k_top_p(logits, *(column[:size] for column in columns), out=rows.tokens[:size])
        rows.wide[_WIDE.index("positions") : _WIDE.index("offsets") + 1, :size].add_(1)
        rows.cache_seqlens[:size].add_(1)

    def _batch(self, size: int) -> Batch:
        """Returns the batch of a pass of ``size`` rows, whose tensors are views of the static buffers."""
        rows = self._rows
        return Batch(
            phase=Phase.DECODE,
            tokens=rows.tokens[:size],
            positions=rows.positions[:size],
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
            cache_seqlens=rows.cache_seqlens[:size],
            max_seqlen_q=1,
            max_seqlen_k=self._page_table.shape[1] * self._cache.page_size,
            slot_mapping=None,
            page_table=self._page_table[:size],
            logit_rows=None,
        )

    # -- contents of the rows -------------------------------------------------------------------------------------------------

    def _load(self, sequences: Sequence[Running], size: int, row_of: dict[int, int], fed: Tensor | None) -> None:
        """Uploads the rows of a pass: the inputs of its sequences, and copies of the first sequence as padding."""
        pinned = self._model.device.type == "cuda"
        filled = [*sequences, *[sequences[0]] * (size - len(sequences))]
        samplings = [s.request.sampling for s in filled]
        known = [s.last_token is not None for s in filled]
        host = _Rows(self._rows.wide.shape[1], "cpu", pinned)
        host.wide[:, :size] = torch.tensor(
            [
                [s.last_token if k else 0 for s, k in zip(filled, known, strict=True)],
                [s.cached for s in filled],
                [s.generated for s in filled],
                [sampling.seed for sampling in samplings],
                [-1 if k else row_of[s.number] for s, k in zip(filled, known, strict=True)],
            ]
        )
        host.narrow[:2, :size] = torch.tensor([[s.cached + 1 for s in filled], [sampling.top_k for sampling in samplings]])
        host.temperature[:size] = torch.tensor([float(sampling.temperature) for sampling in samplings])
        host.top_p[:size] = torch.tensor([float(sampling.top_p) for sampling in samplings])
        self._rows.memory.copy_(host.memory, non_blocking=True)
        if not all(known):
            assert fed is not None, "a token in flight belongs to a pass in flight"
            sources = self._rows.sources[:size]
            tokens = torch.where(sources < 0, self._rows.tokens[:size], fed[sources.clamp(min=0)])
            self._rows.tokens[:size] = tokens
        held = self._page_rows
        self._page_rows = {s.number: held[s.number] if s.number in held else self._pages_of(s) for s in sequences}
        table = sent(torch.stack([self._page_rows[s.number] for s in filled]), self._model.device)
        self._page_table[:size] = table.clamp(min=0)
        self._written_pages[:size] = table
        self._written_pages[len(sequences) : size] = -1

    def _pages_of(self, sequence: Running) -> Tensor:
        """Returns a sequence's row of the page table, on the host: its pages, then -1."""
        row = torch.full((self._page_table.shape[1],), -1, dtype=torch.int32)
        row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        return row

    # -- capturing ------------------------------------------------------------------------------------------------------------

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        device = self._model.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def _launch_all(self, size: int) -> None:
        """Launches every part of a pass from Python, so that kernels are compiled and workspaces are allocated."""
        self._held = None
        self._rows.memory.zero_()
        self._rows.top_p.fill_(1)
        self._rows.cache_seqlens.fill_(1)  # the input token
        for part in _PARTS:
            self._launch(size, part)

    def _capture(self, console: Console | None) -> None:
        """Captures all passes. The largest is captured first, so that the others reuse its memory."""
        columns = (TextColumn("capturing decode passes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        pool = torch.cuda.graph_pool_handle()
        with Progress(*columns, console=console, disable=console is None) as progress:
            for size in progress.track(self.sizes[::-1]):
                self._launch_all(size)
                for part in _PARTS:
                    graph = torch.cuda.CUDAGraph()
                    try:
                        with torch.cuda.graph(graph, pool=pool):
                            self._launch(size, part)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"a decode pass of {size} sequences cannot be captured into a CUDA graph: {error}; "
                            'decode="eager" runs passes without graphs'
                        ) from error
                    self._graphs[size, part] = graph
