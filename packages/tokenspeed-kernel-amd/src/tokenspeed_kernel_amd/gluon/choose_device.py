# mypy: ignore-errors
"""MoE routing from the router's logits, as a device function that other kernels call, and as a separate kernel.

Each logit becomes an integer *sort key* with the same order; NaN is the largest, and -0 equals 0. The sort key of a 16-bit float
has the expert's complement in its lower 16 bits. So the largest key gives the expert with the largest logit; among equal logits,
the expert with the lowest index. The chosen experts are exactly those of the operator's definition.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from tokenspeed_kernel_amd.gluon.softmax_device import LOG2_E

_TAKEN = gl.constexpr(-(2**31))  # the sort key of a chosen expert, below the key of every logit
_NAN = gl.constexpr(2**31 - 1)


@gluon.constexpr_function
def logits_layout(rows, experts, warps):
    """Returns the register layout of router logits [rows, experts]; both sizes are powers of two. One warp holds all logits of a
    row. With fewer rows than warps, rows are replicated across warps."""
    lanes = 64 // max(1, rows // warps) if rows // warps < 64 else 1
    return gl.BlockedLayout([1, max(1, min(8, experts // lanes))], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def keys_of(logits, expert):
    """Returns the int32 sort keys of router logits (see the module). ``expert``: int32 [1, experts], each column's expert."""
    if logits.dtype.primitive_bitwidth == 16:
        infinity: gl.constexpr = 0x7C00 if logits.dtype == gl.float16 else 0x7F80
        bits = logits.to(gl.int16, bitcast=True).to(gl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
        key = gl.where(key == -1, 0, key)
        key = gl.where((bits & 0x7FFF) > infinity, 0x7FFF, key)
        key = key * 65536 + (0xFFFF - expert)
    else:
        bits = logits.to(gl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = gl.where(key == -1, 0, key)
        key = gl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, key)
    return key


@gluon.jit
def value_of(key, dtype: gl.constexpr):
    """Converts a sort key back to its logit, float32."""
    if dtype.primitive_bitwidth == 16:
        high = key >> 16
        value = (high ^ ((high >> 31) & 0x7FFF)).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    else:
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
    return value


@gluon.jit
def choose(logits, stride, tokens, num_experts, scaling, routing: gl.constexpr):
    """Chooses the top-k experts of the first ``routing.rows`` tokens.

    Args:
        logits: points to the first token's logits; rows are ``stride`` elements apart.
        tokens: number of tokens.
        num_experts: number of logits per token.
        scaling: factor by which the top-k weights are multiplied.
        routing: `Routing` of `gluon.choose`.

    Returns:
        ids: int32 [rows, slots]; weights: float32 [rows, slots]. Only the first ``routing.top_k`` slots of rows below ``tokens``
        are valid.
    """
    layout: gl.constexpr = logits_layout(routing.rows, routing.experts, gl.num_warps())
    dtype: gl.constexpr = logits.dtype.element_ty
    row = gl.arange(0, routing.rows, gl.SliceLayout(1, layout))
    expert = gl.arange(0, routing.experts, gl.SliceLayout(0, layout))[None, :]
    slot = gl.arange(0, routing.slots, gl.SliceLayout(0, layout))[None, :]
    exists = (row < tokens)[:, None] & (expert < num_experts)
    values = cdna3.buffer_load(logits, (row * stride)[:, None] + expert, mask=exists)
    keys = gl.where(exists, keys_of(values, expert), _TAKEN)
    ids = gl.zeros([routing.rows, routing.slots], gl.int32, layout)
    found = gl.full([routing.rows, routing.slots], float("-inf"), gl.float32, layout)
    highest = gl.zeros([routing.rows], gl.float32, gl.SliceLayout(1, layout))
    for index in gl.static_range(routing.top_k):
        best = gl.max(keys, axis=1)
        if dtype.primitive_bitwidth == 16:
            best_id = 0xFFFF - (best & 0xFFFF)
            keys = gl.where(keys == best[:, None], _TAKEN, keys)
        else:
            best_id = gl.min(gl.where(keys == best[:, None], expert, 0xFFFF), axis=1)
            keys = gl.where(expert == best_id[:, None], _TAKEN, keys)
        value = value_of(best, dtype)
        if index == 0:
            highest = value
        ids = gl.where(slot == index, best_id[:, None], ids)
        found = gl.where(slot == index, value[:, None], found)
    weights = gl.exp2((found - highest[:, None]) * LOG2_E)
    if routing.renormalize:
        total = gl.sum(weights, axis=1)
    else:
        raised = gl.exp2((values.to(gl.float32) - highest[:, None]) * LOG2_E)
        total = gl.sum(gl.where(exists, raised, 0.0), axis=1)
    return ids, weights * (scaling / total)[:, None]


@gluon.jit
def store_choice(ids, weights, ids_out, weights_out, tokens, routing: gl.constexpr):
    """Stores the result of `choose` for tokens, to ``ids_out`` and ``weights_out``, contiguous [tokens, top_k]."""
    layout: gl.constexpr = ids.type.layout
    row = gl.arange(0, routing.rows, gl.SliceLayout(1, layout))[:, None]
    slot = gl.arange(0, routing.slots, gl.SliceLayout(0, layout))[None, :]
    real = (row < tokens) & (slot < routing.top_k)
    cdna3.buffer_store(ids, ids_out, row * routing.top_k + slot, mask=real)
    cdna3.buffer_store(weights, weights_out, row * routing.top_k + slot, mask=real)


@gluon.jit(do_not_specialize=["tokens"])
def choose_kernel(logits, stride, tokens, num_experts, scaling, ids_out, weights_out, routing: gl.constexpr):
    """Routes tokens, ``routing.rows`` per workgroup. Arguments: see `choose` and `store_choice`."""
    first = gl.program_id(0).to(gl.int64) * routing.rows
    here = (tokens - first).to(gl.int32)
    ids, weights = choose(logits + first * stride, stride, here, num_experts, scaling, routing)
    at = first * routing.top_k
    store_choice(ids, weights, ids_out + at, weights_out + at, here, routing)
