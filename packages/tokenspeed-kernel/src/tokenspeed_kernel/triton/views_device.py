"""Tensors with their strides, for device functions.

Kernels take flat arguments and build these structs themselves, because each struct among a kernel's arguments adds about 0.5 us to
a Triton launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Queries or outputs: ``[tokens, heads, dim]``."""

    first: Any  # a pointer to the first element
    token_stride: Any
    head_stride: Any
    dim_stride: Any


class Heads(NamedTuple):
    """A tensor ``[tokens, heads, dim]`` with unit stride in dim."""

    first: Any
    token_stride: Any
    head_stride: Any


class Cache(NamedTuple):
    """Keys or values: ``[pages, slots, heads, dim]``; or ``[tokens, heads, dim]``, where slots are tokens and no page is used."""

    first: Any
    page_stride: Any
    slot_stride: Any
    head_stride: Any
    dim_stride: Any


class Pages(NamedTuple):
    """The page table ``[batch, max pages per sequence]``."""

    first: Any
    sequence_stride: Any
    page_stride: Any


class Scales(NamedTuple):
    """float32 scales of q, k and v, each a scalar or one per KV head; None for a missing scale."""

    q: Any
    k: Any
    v: Any


@triton.jit
def row_of(rows, token, head):
    """Returns pointers to the first elements of the given tokens and heads of `Rows` or `Heads`."""
    return rows.first + token * rows.token_stride + head * rows.head_stride


@triton.jit
def head_of(cache, head):
    """Returns a pointer to the first key or value of a head: slot 0 of page 0."""
    return cache.first + head.to(tl.int64) * cache.head_stride


@triton.jit
def pages_of(table, sequence):
    """Returns a pointer to a sequence's first entry of the page table."""
    return table.first + sequence.to(tl.int64) * table.sequence_stride
