"""The attention benchmarks' inputs: calls of the operators in the sizes of GPT-OSS, and the reference outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged

PAGE_SIZE = 64
# window_left of a model with a window of 128 tokens: the token itself and the 127 tokens before it.
WINDOW_LEFT = 127
# The number of sequences per call, and of queries per sequence, that are checked: the first, the last, and some in between.
_SEQUENCES, _QUERIES = 4, 16


@dataclass(frozen=True)
class Shape:
    """One call of an attention operator.

    Attributes:
        group: the call's group in tables, bars and plots.
        mode: the name of the operator.
        length: number of tokens per sequence; for paged operators the tokens in the cache.
        batch: number of sequences, all of the same length.
        new: number of new tokens per sequence, for paged operators.
        heads, kv_heads, head_dim, window_left: as in the operator.
    """

    group: str
    mode: str
    length: int
    batch: int
    new: int = 1
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    window_left: int = -1

    @property
    def name(self) -> str:
        """The unique name, from group, length and batch: ``"prefill 1K x 16"``."""
        length = f"{self.length // 1024}K" if self.length % 1024 == 0 else str(self.length)
        return f"{self.group} {length} x {self.batch}"

    @property
    def operator(self) -> str:
        return f"attention.{self.mode}"

    @property
    def paged(self) -> bool:
        return self.mode != "mha_prefill"

    def case(self) -> Case:
        """Returns the call as a case of the operator: bfloat16, with sinks, and with pages in random order."""
        heads: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "sinks": True}
        options: dict[str, Any] = {"window_left": self.window_left} if self.window_left >= 0 else {}
        lengths = [self.length] * self.batch
        if not self.paged:
            return Case(self.name, ragged(lengths, **heads, max_seqlen=self.length, **options), large=True)
        # The page table has no unused entries, because baselines may read every entry.
        pages: dict[str, Any] = {"page_size": PAGE_SIZE, "width": -(-self.length // PAGE_SIZE)}
        if self.mode == "mha_decode_with_kvcache":
            return Case(self.name, paged(lengths, None, **heads, **pages, **options, max_seqlen_q=self.new), large=True)
        return Case(self.name, paged(lengths, [self.new] * self.batch, **heads, **pages, **options, is_causal=True), large=True)


def _shapes() -> Iterator[Shape]:
    for length in (1024, 4096, 8192):
        for batch in (1, 2, 4, 8, 16):
            yield Shape("prefill", "mha_prefill", length, batch)
    for length in (4096, 8192):
        for batch in (1, 4):
            yield Shape("prefill head_dim 128", "mha_prefill", length, batch, heads=32, head_dim=128)
    for length in (1024, 8192):
        yield Shape("window prefill", "mha_prefill", length, 16, window_left=WINDOW_LEFT)
    extend, decode = "mha_extend_with_kvcache", "mha_decode_with_kvcache"
    yield Shape("window extend by 16", extend, 8192, 64, 16, window_left=WINDOW_LEFT)
    yield Shape("extend by 1024", extend, 8192, 8, 1024)
    for length, batches in ((1024, (1, 16, 64, 256)), (8192, (1, 16, 64)), (32768, (1,))):
        for batch in batches:
            yield Shape("decode", decode, length, batch)
    yield Shape("window decode", decode, 8192, 64, window_left=WINDOW_LEFT)
    yield Shape("decode of 4", decode, 8192, 16, 4)


SHAPES = tuple(_shapes())


def sampled_rows(shape: Shape) -> list[int]:
    """Returns the row indices of the output that are checked: some queries of some sequences, including the first and the last."""
    new = shape.new if shape.paged else shape.length
    rows = []
    for sequence in _spread(shape.batch, _SEQUENCES):
        rows += [sequence * new + query for query in _spread(new, _QUERIES)]
    return rows


def _spread(count: int, wanted: int) -> list[int]:
    """Returns at most ``wanted`` of the indices below ``count``: the first, the last, and others at irregular distances."""
    if count <= wanted:
        return list(range(count))
    inner = {1 + (index * 7919) % (count - 2) for index in range(wanted - 2)}
    return sorted({0, count - 1, *inner})


def reference_rows(shape: Shape, arguments: Mapping[str, Any], rows: list[int], *, sinks: bool) -> Tensor:
    """Computes the expected output of some tokens, float32 ``[len(rows), heads, head_dim]``.

    This is the operators' definition in float32: softmax over the scores and the sink, then the weighted sum of the values.
    """
    q, group = arguments["q"], shape.heads // shape.kv_heads
    new = shape.new if shape.paged else shape.length
    scale = 1.0 / math.sqrt(shape.head_dim)
    result = torch.empty(len(rows), shape.heads, shape.head_dim, device=q.device)
    for sequence in dict.fromkeys(row // new for row in rows):
        places = [place for place, row in enumerate(rows) if row // new == sequence]
        chosen = torch.tensor([rows[place] for place in places], device=q.device)
        keys, values = (x.float() for x in _keys_and_values(shape, arguments, sequence))
        queries = q[chosen].float().view(len(places), shape.kv_heads, group, shape.head_dim)
        scores = torch.einsum("rkgd,lkd->rkgl", queries, keys) * scale
        position = shape.length - new + chosen - sequence * new
        distance = position[:, None] - torch.arange(shape.length, device=q.device)
        hidden = distance < 0
        if shape.window_left >= 0:
            hidden |= distance > shape.window_left
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        if sinks:
            sink = arguments["sinks"].float().view(1, shape.kv_heads, group, 1).expand(len(places), -1, -1, -1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        result[places] = torch.einsum("rkgl,lkd->rkgd", weights, values).flatten(1, 2)
    return result


def _keys_and_values(shape: Shape, arguments: Mapping[str, Any], sequence: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of one sequence, ``[length, kv_heads, head_dim]``."""
    if not shape.paged:
        tokens = slice(sequence * shape.length, (sequence + 1) * shape.length)
        return arguments["k"][tokens], arguments["v"][tokens]
    pages = arguments["page_table"][sequence, : -(-shape.length // PAGE_SIZE)].long()
    k, v = (arguments[name][pages].flatten(0, 1)[: shape.length] for name in ("k_cache", "v_cache"))
    return k, v
