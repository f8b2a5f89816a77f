"""Reference attention in float32, with which the kernels' results are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The tolerance relative to a result's norm. Rounding a result to bfloat16 gives an error of 1.7e-3. Kernels round probabilities as
# well.
TOLERANCE = 5e-3
# The tolerance relative to each row's norm. If only softmax weights and outputs are rounded to bfloat16, the error of a row with
# 700 keys is at most 3.6e-3. If a sixteenth of the row's keys is missing, the error is 0.25.
ROW_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Options:
    """Options that all attention operators have.

    Attributes:
        window_left: number of visible tokens before each token; -1 means all.
        sinks: ``[heads]`` or None.
        softmax_scale: the factor of the scores; None means ``1 / sqrt(head_dim)``.
        is_causal: whether later tokens are masked.
        logit_cap: the asymptote of scores; 0 means no cap.
    """

    window_left: int = -1
    sinks: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = True
    logit_cap: float = 0.0


def attend_one(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns the output and the LSE of one sequence in float32. The queries are at the sequence's last positions.

    Args:
        q: ``[q_len, heads, head_dim]``.
        k, v: ``[kv_len, kv_heads, head_dim]``.
    """
    q_len, heads, head_dim = q.shape
    kv_len, kv_heads, _ = k.shape
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    grouped = q.float().view(q_len, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * scale
    if options.logit_cap:
        scores = options.logit_cap * torch.tanh(scores / options.logit_cap)
    place = torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
    behind = place - torch.arange(kv_len, device=q.device)
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if options.is_causal:
        hidden |= behind < 0
    if options.window_left >= 0:
        hidden |= behind > options.window_left
    scores.masked_fill_(hidden, -torch.inf)
    if options.sinks is not None:
        sink = options.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, q_len, 1)
        scores = torch.cat([scores, sink], dim=3)
    lse = scores.logsumexp(dim=3) if scores.shape[3] else scores.new_full(scores.shape[:3], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., :kv_len]
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float())
    return out.reshape(q_len, heads, v.shape[2]), lse.permute(2, 0, 1).reshape(q_len, heads)


def attend_ragged(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], options: Options) -> tuple[Tensor, Tensor]:
    """Computes the attention of concatenated sequences, each to its own keys."""
    return attend_to_others(q, k, v, lengths, lengths, options)


def attend_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_lens: list[int], kv_lens: list[int], options: Options
) -> tuple[Tensor, Tensor]:
    """Computes the attention of sequences' new tokens to a paged cache. A sequence may have fewer cached tokens than queries."""
    parts = []
    for index, queries in enumerate(q.split(q_lens)):
        pages = page_table[index, : -(-kv_lens[index] // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[: kv_lens[index]] for cache in (k_cache, v_cache))
        parts.append(attend_one(queries, k, v, options))
    return _joined(parts, q)


def attend_to_others(
    q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], kv_lens: list[int], options: Options
) -> tuple[Tensor, Tensor]:
    """Computes the attention of concatenated sequences whose keys belong to other tokens than the queries."""
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    return _joined([attend_one(*tensors, options) for tensors in parts], q)


def _joined(parts: list[tuple[Tensor, Tensor]], q: Tensor) -> tuple[Tensor, Tensor]:
    if not parts:
        return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)
    out, lse = (torch.cat(found) for found in zip(*parts, strict=True))
    return out, lse


def check(
    got: Tensor | tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    tolerance: float = TOLERANCE,
    row_tolerance: float = ROW_TOLERANCE,
) -> None:
    """Fails if the error of an output or of its LSE is too large, in total or in any row. The LSE is optional.

    A row that sees no key must be 0. NaN in the output is an error. So if the caller fills the output with NaN before the call,
    unwritten rows are detected.
    """
    out, lse = got if isinstance(got, tuple) else (got, None)
    assert out.shape == wanted[0].shape
    assert not out.isnan().any(), f"{int(out.isnan().any(-1).sum())} rows are NaN"
    size, off = wanted[0].norm(dim=2), (out.float() - wanted[0]).norm(dim=2)
    assert not off[size == 0].any(), "rows that see nothing are not 0"
    limits = torch.finfo(out.dtype)
    # Values below a dtype's smallest normal number have few significant bits, or are 0.
    nothing = limits.smallest_normal * limits.eps * out.shape[2] ** 0.5
    error = float((off - nothing).clamp_min(0).norm() / size.norm().clamp_min(1e-30))
    assert error <= tolerance, f"relative error {error:.2e}, worst rows {worst(out, wanted[0])}"
    faulty = off > row_tolerance * size + nothing
    assert not faulty.any(), f"{int(faulty.sum())} of {faulty.numel()} rows are off, the worst {worst(out, wanted[0])}"
    if lse is not None:
        torch.testing.assert_close(lse, wanted[1], atol=2e-3, rtol=1e-3)


def worst(out: Tensor, wanted: Tensor, count: int = 4) -> list[tuple[int, int, float]]:
    """Returns the rows with the largest errors: token, head, and error."""
    off = (out.float() - wanted).norm(dim=2)
    values, places = off.flatten().topk(min(count, off.numel()))
    heads = off.shape[1]
    return [(int(p) // heads, int(p) % heads, round(float(v), 4)) for v, p in zip(values, places, strict=True)]


@dataclass(frozen=True)
class Paged:
    """Sequences in a paged cache. Pages are in random order, and every slot without a token holds NaN.

    Attributes:
        q_lens, kv_lens: for each sequence, the number of its new tokens, and of all its tokens.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    q_lens: list[int]
    kv_lens: list[int]

    @property
    def cache_seqlens(self) -> Tensor:
        return torch.tensor(self.kv_lens, dtype=torch.int32, device=self.q.device)

    @property
    def cu_seqlens_q(self) -> Tensor:
        return offsets(self.q_lens, self.q.device)

    def freed(self, window_left: int) -> Paged:
        """Returns the same sequences, in which pages that the window hides from all new tokens are freed. Freed pages are -1 in the
        page table and hold NaN. The memory before the caches, where a page -1 would be, also holds NaN.
        """
        table = self.page_table.clone()
        gone = []
        for row, q_len, kv_len in zip(table, self.q_lens, self.kv_lens, strict=True):
            hidden = max(kv_len - q_len - window_left, 0) // self.k_cache.shape[1]
            gone += row[:hidden].tolist()
            row[:hidden] = -1
        caches = []
        for cache in (self.k_cache, self.v_cache):
            guarded = torch.cat((torch.full_like(cache[:1], torch.nan), cache))[1:]
            guarded[gone] = torch.nan
            caches.append(guarded)
        return replace(self, k_cache=caches[0], v_cache=caches[1], page_table=table)

    def wanted(self, options: Options) -> tuple[Tensor, Tensor]:
        return attend_paged(self.q, self.k_cache, self.v_cache, self.page_table, self.q_lens, self.kv_lens, options)


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Returns the prefix sums of lengths, from 0."""
    sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sums.to(device)


def ragged(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random q, k and v of concatenated sequences."""
    draw = torch.Generator(device).manual_seed(seed)
    shapes = [(sum(lengths), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes)
    return q, k, v


def paged(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    v_head_dim: int | None = None,
) -> Paged:
    """Returns random sequences in a paged cache, which has one page more than the sequences need."""
    draw = torch.Generator(device).manual_seed(seed)
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    # Page table entries beyond a sequence's pages may have any value.
    page_table = torch.full((len(kv_lens), max([1, *counts])), 2**31 - 1, dtype=torch.int32)
    used = 0
    shape = (sum(counts) + 1, page_size, kv_heads)
    widths = head_dim, v_head_dim or head_dim
    k_cache, v_cache = (torch.full((*shape, width), torch.nan, dtype=dtype, device=device) for width in widths)
    for index, (count, kv_len) in enumerate(zip(counts, kv_lens, strict=True)):
        pages = order[used : used + count]
        used += count
        page_table[index, :count] = pages
        for cache in (k_cache, v_cache):
            width = cache.shape[3]
            tokens = torch.full((count * page_size, kv_heads, width), torch.nan, dtype=dtype, device=device)
            tokens[:kv_len] = torch.randn((kv_len, kv_heads, width), generator=draw, device=device).to(dtype)
            cache[pages.long().to(device)] = tokens.view(count, page_size, kv_heads, width)
    q = torch.randn((sum(q_lens), heads, head_dim), generator=draw, device=device).to(dtype)
    return Paged(q, k_cache, v_cache, page_table.to(device), q_lens, kv_lens)
