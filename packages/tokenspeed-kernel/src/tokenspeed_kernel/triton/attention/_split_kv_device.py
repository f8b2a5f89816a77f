"""Device code of `_split_kv`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E


@triton.jit
def first_block(length, q_len, window_left, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of the first key that the oldest of ``q_len`` queries sees, of a sequence of ``length`` tokens."""
    if WINDOWED:
        first = tl.maximum(length - q_len - window_left, 0) // BLOCK_N
    else:
        first = length * 0
    return first


@triton.jit
def blocks_of(length, q_len, window_left, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of keys that some query sees."""
    return (length + BLOCK_N - 1) // BLOCK_N - first_block(length, q_len, window_left, WINDOWED, BLOCK_N)


@triton.jit
def lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE: tl.constexpr):
    """Keys of AT_ONCE sequences from ``start`` on, and which of them there are."""
    at = start + tl.arange(0, AT_ONCE)
    lengths = tl.load(cache_seqlens + at, mask=at < batch, other=0)
    return tl.minimum(tl.maximum(lengths, 0), capacity), at < batch


@triton.jit
def _served_from(cache_seqlens, cu_seqlens_q, start, batch, capacity, q_len, AT_ONCE: tl.constexpr):
    """The same, 0 of those that are not served here, see `blocks_a_unit`."""
    lengths, real = lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE)
    if cu_seqlens_q is not None:
        at = start + tl.arange(0, AT_ONCE)
        new = tl.load(cu_seqlens_q + at + 1, mask=real, other=0) - tl.load(cu_seqlens_q + at, mask=real, other=0)
        lengths = tl.where((new > 0) & (new <= q_len), lengths, 0)
    return lengths, real


@triton.jit
def served_length(cache_seqlens, cu_seqlens_q, sequence, capacity, q_len):
    """Keys of one sequence; 0 if it is not served here, see `blocks_a_unit`."""
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
    if cu_seqlens_q is not None:
        new = tl.load(cu_seqlens_q + sequence + 1) - tl.load(cu_seqlens_q + sequence)
        length = tl.where((new > 0) & (new <= q_len), length, 0)
    return length


@triton.jit
def blocks_a_unit(
    cache_seqlens,
    cu_seqlens_q,
    batch,
    capacity,
    q_len,
    window_left,
    least,
    wave,
    waves_units,
    long,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The share: one wave of units where they are short, ``waves_units`` of them where they are long.

    With cu_seqlens_q only sequences of 1 to ``q_len`` new tokens count. Others are served elsewhere: each has one empty unit.
    """
    total = 0
    for start in range(0, batch, AT_ONCE):
        lengths, _ = _served_from(cache_seqlens, cu_seqlens_q, start, batch, capacity, q_len, AT_ONCE)
        total += tl.sum(blocks_of(lengths, q_len, window_left, WINDOWED, BLOCK_N))
    finest = (total + waves_units - 1) // waves_units
    return tl.maximum(tl.maximum(finest, tl.minimum((total + wave - 1) // wave, long)), least)


@triton.jit
def units_of(blocks, share):
    """Units of a sequence; one that is empty has a unit too, whose program writes what attention to nothing is."""
    return tl.maximum((blocks + share - 1) // share, 1)


@triton.jit
def find_unit(
    unit,
    share,
    cache_seqlens,
    cu_seqlens_q,
    batch,
    capacity,
    q_len,
    window_left,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """``(sequence, its first unit)`` of a unit; sequence is ``batch`` where the unit is beyond the last."""
    sequence = 0
    first = 0
    before = 0
    for start in range(0, batch, AT_ONCE):
        lengths, real = _served_from(cache_seqlens, cu_seqlens_q, start, batch, capacity, q_len, AT_ONCE)
        units = tl.where(real, units_of(blocks_of(lengths, q_len, window_left, WINDOWED, BLOCK_N), share), 0)
        ends = before + tl.cumsum(units, 0)
        passed = (ends <= unit) & real
        sequence += tl.sum(passed.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(units)
    return sequence, first


@triton.jit
def units_before(
    sequence,
    share,
    cache_seqlens,
    cu_seqlens_q,
    capacity,
    q_len,
    window_left,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The first unit of a sequence."""
    first = 0
    for start in range(0, sequence, AT_ONCE):
        lengths, real = _served_from(cache_seqlens, cu_seqlens_q, start, sequence, capacity, q_len, AT_ONCE)
        units = units_of(blocks_of(lengths, q_len, window_left, WINDOWED, BLOCK_N), share)
        first += tl.sum(tl.where(real, units, 0))
    return first


@triton.jit(do_not_specialize=["batch", "capacity", "window_left", "least", "wave", "waves_units", "long"])
def merge_units_kernel(
    partial,  # float32 [units, heads, rows, width]
    partial_lse,  # float32 [units, heads, rows], base 2
    out,  # [batch * q_len, heads * group, width]
    lse,  # float32 [batch * q_len, heads * group] or None
    sinks,  # [heads * group] or None
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has Q_LEN queries
    parts,  # int32 [batch, 2]: the first unit and their number, or None where they follow from the lengths
    batch,
    capacity,
    window_left,
    least,
    wave,
    waves_units,
    long,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):
    sequence = tl.program_id(0)
    if parts is None:
        share = blocks_a_unit(
            cache_seqlens, cu_seqlens_q, batch, capacity, Q_LEN, window_left, least, wave, waves_units, long, WINDOWED, BLOCK_N,
            AT_ONCE,
        )  # fmt: skip
        length = served_length(cache_seqlens, cu_seqlens_q, sequence, capacity, Q_LEN)
        units = units_of(blocks_of(length, Q_LEN, window_left, WINDOWED, BLOCK_N), share)
        first = units_before(sequence, share, cache_seqlens, cu_seqlens_q, capacity, Q_LEN, window_left, WINDOWED, BLOCK_N, AT_ONCE)
    if EARLY:  # until here the kernel that makes the units may be running; no program ends before it has
        tl.extra.cuda.gdc_wait()
    if parts is not None:
        first = tl.load(parts + sequence * 2)
        units = tl.load(parts + sequence * 2 + 1)
    if units == 1:
        return
    token = sequence.to(tl.int64) * Q_LEN
    queries = Q_LEN
    if cu_seqlens_q is not None:
        token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        queries = (tl.load(cu_seqlens_q + sequence + 1) - token).to(tl.int32)
    column = tl.arange(0, BLOCK_W)
    TILES: tl.constexpr = (GROUP * Q_LEN + ROWS - 1) // ROWS
    for item in range(tl.program_id(1), HEADS * TILES, tl.num_programs(1)):
        head = item // TILES
        row = item % TILES * ROWS + tl.arange(0, ROWS)
        real = row < GROUP * queries
        q_head = head * GROUP + row % GROUP
        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if sinks is not None:
            largest = tl.load(sinks + q_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total = tl.where(largest == -float("inf"), 0.0, 1.0)
        merged = tl.zeros([ROWS, BLOCK_W], tl.float32)
        for start in range(0, units, UNITS):
            at = start + tl.arange(0, UNITS)
            where = ((first + at).to(tl.int64)[:, None] * HEADS + head) * (GROUP * Q_LEN) + row[None, :]
            usable = (at < units)[:, None] & real[None, :]
            part_lse = tl.load(partial_lse + where, mask=usable, other=-float("inf"))
            part = tl.load(
                partial + where[:, :, None] * WIDTH + column[None, None, :],
                mask=usable[:, :, None] & (column < WIDTH)[None, None, :],
                other=0.0,
            )
            raised = tl.maximum(largest, tl.max(part_lse, 0))
            shift = tl.where(raised == -float("inf"), 0.0, raised)
            weight = tl.exp2(part_lse - shift[None, :])
            decay = tl.exp2(largest - shift)
            total = total * decay + tl.sum(weight, 0)
            merged = merged * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
            largest = raised
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
        row_token = token + row // GROUP
        to = out + row_token[:, None] * out_stride_t + q_head[:, None] * out_stride_h + column[None, :] * out_stride_d
        tl.store(to, merged.to(out.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])
        if lse is not None:
            shift = tl.where(largest == -float("inf"), 0.0, largest)
            tl.store(lse + row_token * (HEADS * GROUP) + q_head, (shift + tl.log2(total)) * LN_2, mask=real)
