"""Device code of `moe_topk`: `route`, which other kernels call too, and the kernel that only routes.

Grid of `topk_kernel`: tiles of ROWS tokens. A program holds the sort keys of all experts of its tokens in registers, int32 [ROWS,
experts padded to a power of two]. For unbiased 16-bit logits, a sort key contains its expert id (``PACKED``). Each round of the
selection is then one reduction instead of two.

Exponentials and divisions are accurate to about one ulp, because approximate ones could change which experts are chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start

# The sort key of padding, of excluded groups and of experts that are already chosen. It is below the sort key of every float,
# including minus infinity.
_REMOVED = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(2**31 - 1)
_SMALLEST_SUM = tl.constexpr(1e-20)
_UNROLLED = tl.constexpr(8)


@triton.jit
def _key(value):
    """Returns int32 sort keys, which sort as the float32 values do, with NaN above all."""
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)  # -0
    return tl.where(value != value, _NAN_KEY, key)


@triton.jit
def _value(key):
    """Returns the float32 value of a sort key: the inverse of `_key`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _key_with_id(logits, ids):
    """Returns int32 sort keys: the sort key of a 16-bit float in the upper 16 bits, the inverted expert id in the lower 16 bits.

    So the largest key also contains its expert id, and among equal floats the lowest id has the largest key.
    """
    infinity: tl.constexpr = 0x7C00 if logits.dtype == tl.float16 else 0x7F80
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    key = bits ^ ((bits >> 31) & 0x7FFF)
    key = tl.where(key == -1, 0, key)
    key = tl.where((bits & 0x7FFF) > infinity, 0x7FFF, key)
    return key * 65536 + (0xFFFF - ids)


@triton.jit
def _exp(x):
    """Returns exp(x) with an error of at most one ulp. ``tl.exp`` may be tens of ulps off, which can change the chosen experts."""
    whole = tl.minimum(tl.maximum(tl.floor(x * 1.4426950216293335), -126.0), 126.0)
    rest = tl.fma(x, 1.4426950216293335, -whole)
    rest = tl.fma(x, 1.9259629911266175e-08, rest)
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(rest) * power


@triton.jit
def _sigmoid(x):
    # Returns ``1 / (1 + exp(-x))`` with a correctly rounded division.
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x))


@triton.jit
def _sqrtsoftplus(x):
    """Returns ``sqrt(log(1 + exp(x)))``, and NaN for NaN. The logarithm is computed as log(1 + u) = 2 artanh(u / (2 + u)). The
    argument of artanh is at most 1/3.
    """
    raised = _exp(-tl.abs(x))
    ratio = tl.div_rn(raised, 2.0 + raised)
    square = ratio * ratio
    series = tl.full(x.shape, 1 / 17, tl.float32)
    for term in tl.static_range(8):
        series = tl.fma(series, square, 1 / (15 - 2 * term))
    return tl.sqrt_rn(tl.where(x > 0.0, x, 0.0) + 2.0 * ratio * series)


@triton.jit
def _score(x, SCORING: tl.constexpr):
    """Returns the score of each logit: its sigmoid or its sqrt-softplus, by ``SCORING``."""
    if SCORING == "sigmoid":
        return _sigmoid(x)
    return _sqrtsoftplus(x)


@triton.jit
def _softmax(x):
    """Returns the softmax of each row. If a row has a NaN, all its results are NaN."""
    raised = _exp(x - tl.max(x, axis=1)[:, None])
    return tl.div_rn(raised, tl.broadcast_to(tl.sum(raised, axis=1)[:, None], raised.shape))


@triton.jit
def _pop_largest(keys, ids, chosen, slot, slots, PACKED: tl.constexpr):
    """Writes the expert id of each row's largest key to ``chosen[:, slot]``, and removes this key from ``keys``. Ties go to the
    lowest id.

    Returns the updated keys and chosen ids.
    """
    best = tl.max(keys, axis=1)[:, None]
    if PACKED:
        struck = keys == best
        best_id = 0xFFFF - (best & 0xFFFF)
    else:
        best_id = tl.min(tl.where(keys == best, ids, 0x7FFFFFFF), axis=1)[:, None]
        struck = ids == best_id
    return tl.where(struck, _REMOVED, keys), tl.where(slots == slot, best_id, chosen)


@triton.jit
def _best(keys, ids, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr, PACKED: tl.constexpr):
    """Returns the expert ids of the ``COUNT`` largest sort keys of each row, largest first."""
    slots = tl.arange(0, COUNT_PADDED)[None, :]
    chosen = tl.zeros([keys.shape[0], COUNT_PADDED], tl.int32)
    if COUNT <= _UNROLLED:
        for slot in tl.static_range(COUNT):
            keys, chosen = _pop_largest(keys, ids, chosen, slot, slots, PACKED)
    else:
        for slot in range(COUNT):
            keys, chosen = _pop_largest(keys, ids, chosen, slot, slots, PACKED)
    return chosen


@triton.jit
def _close_groups(
    keys,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
):
    """Sets the sort keys ``[rows, groups * group]`` of experts outside the TOP_GROUPS best groups to ``_REMOVED``.

    The score of an expert group is the largest score of its experts; if ``TWO``, the sum of the two largest.
    """
    rows: tl.constexpr = keys.shape[0]
    grouped = tl.reshape(keys, [rows, GROUPS_PADDED, GROUP_PADDED])
    group = tl.arange(0, GROUPS_PADDED)[None, :]
    member = tl.arange(0, GROUP_PADDED)[None, None, :]
    worth = tl.max(grouped, axis=2)
    if TWO and GROUP > 1:
        first = tl.min(tl.where(grouped == worth[:, :, None], member, GROUP_PADDED), axis=2)
        second = tl.max(tl.where(member == first[:, :, None], _REMOVED, grouped), axis=2)
        worth = _key(_value(worth) + _value(second))
    worth = tl.where(group < GROUPS, worth, _REMOVED)
    open_groups = tl.zeros([rows, GROUPS_PADDED], tl.int1)
    for _ in range(TOP_GROUPS):
        best = tl.max(worth, axis=1)[:, None]
        best_group = group == tl.min(tl.where(worth == best, group, GROUPS_PADDED), axis=1)[:, None]
        open_groups = open_groups | best_group
        worth = tl.where(best_group, _REMOVED, worth)
    closed = (open_groups == 0)[:, :, None] & (group < GROUPS)[:, :, None] & (member < GROUP)
    return tl.reshape(tl.where(closed, _REMOVED, grouped), [rows, GROUPS_PADDED * GROUP_PADDED])


@triton.jit
def route(
    logits,
    correction_bias,
    weights,
    ids_out,
    token,
    num_tokens,
    logits_row,
    logits_column,
    bias_stride,
    weights_row,
    weights_column,
    ids_row,
    ids_column,
    scaling_factor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Chooses the experts of tokens, and stores their ids and routing weights. ``token``: the tokens' indices, int64 ``[rows]``."""
    group_size: tl.constexpr = EXPERTS // GROUPS
    real = (token < num_tokens)[:, None]
    # Each group is padded, so that a reshape can make groups an axis. A higher expert id has a higher position.
    position = tl.arange(0, GROUPS_PADDED * GROUP_PADDED)
    group = position // GROUP_PADDED
    member = position % GROUP_PADDED
    expert = (group * group_size + member)[None, :]
    exists = ((group < GROUPS) & (member < group_size))[None, :]
    row = logits + token[:, None] * logits_row
    loaded = tl.load(row + expert * logits_column, mask=real & exists, other=0.0)
    wide = loaded.to(tl.float32)

    if PACKED:
        keys = tl.where(exists, _key_with_id(loaded, expert), _REMOVED)
    else:
        ranked = wide
        if BIAS:
            if SCORING == "softmax":
                scores = _softmax(tl.where(exists, wide, float("-inf")))
            else:
                scores = _score(wide, SCORING)
            bias = tl.load(correction_bias + expert * bias_stride, mask=exists, other=0.0)
            ranked = scores + bias.to(tl.float32)
        keys = tl.where(exists, _key(ranked), _REMOVED)
    if GROUPS > 1:
        keys = _close_groups(keys, GROUPS, group_size, GROUPS_PADDED, GROUP_PADDED, TOP_GROUPS, BIAS)
    chosen = _best(keys, expert, TOP_K, TOP_K_PADDED, PACKED)

    slot = tl.arange(0, TOP_K_PADDED)[None, :]
    wanted = real & (slot < TOP_K)
    logit = tl.load(row + chosen * logits_column, mask=wanted, other=0.0).to(tl.float32)
    if SCORING != "softmax":
        weight = tl.where(slot < TOP_K, _score(logit, SCORING), 0.0)
        if RENORMALIZE:
            total = tl.sum(weight, axis=1)[:, None] + _SMALLEST_SUM
            weight = tl.div_rn(weight, tl.broadcast_to(total, weight.shape))
    elif RENORMALIZE:
        weight = _softmax(tl.where(slot < TOP_K, logit, float("-inf")))
    else:
        masked = tl.where(exists, wide, float("-inf"))
        highest = tl.max(masked, axis=1)[:, None]
        total = tl.sum(_exp(masked - highest), axis=1)[:, None]
        weight = tl.div_rn(_exp(logit - highest), tl.broadcast_to(total, logit.shape))
    tl.store(weights + token[:, None] * weights_row + slot * weights_column, weight * scaling_factor, mask=wanted)
    tl.store(ids_out + token[:, None] * ids_row + slot * ids_column, chosen, mask=wanted)


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    logits,
    correction_bias,
    weights,
    ids_out,
    num_tokens,
    logits_row,
    logits_column,
    bias_stride,
    weights_row,
    weights_column,
    ids_row,
    ids_column,
    scaling_factor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Routes ROWS tokens per program. Writes ``weights``, float32 [tokens, top_k], and ``ids_out`` [tokens, top_k].
    start(EARLY)
    route(
        logits,
        correction_bias,
        weights,
        ids_out,
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        num_tokens,
        logits_row,
        logits_column,
        bias_stride,
        weights_row,
        weights_column,
        ids_row,
        ids_column,
        scaling_factor,
        EXPERTS,
        TOP_K,
        TOP_K_PADDED,
        GROUPS,
        GROUPS_PADDED,
        GROUP_PADDED,
        TOP_GROUPS,
        SCORING,
        RENORMALIZE,
        BIAS,
        PACKED,
    )
