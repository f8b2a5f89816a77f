"""Errors that name the argument, what it was, and what it should have been, before anything is launched.

With tokenspeed-kernel in front the operator has checked the arguments already; these are for callers of the plain functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
SINKS = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {list(value.shape)} on {value.device}"
    return repr(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Checker:
    """Checks one call of one function. Shapes are stated by named sizes: the first tensor that has one binds it.

    ``check["heads"]`` is a bound size. Wrong shapes and values raise ValueError, wrong types and dtypes TypeError.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self._sizes: dict[str, tuple[int, str]] = {}
        self._device: tuple[torch.device, str] | None = None

    def __getitem__(self, size: str) -> int:
        return self._sizes[size][0]

    def bind(self, size: str, value: int, source: str) -> None:
        """Gives a size a value that no tensor's shape says."""
        self._sizes[size] = (value, source)

    def fail(self, argument: str, expected: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.function}: {argument} must be {expected}, got {got if isinstance(got, str) else _describe(got)}")

    def require(self, holds: bool, argument: str, expected: str, got: Any) -> None:
        if not holds:
            self.fail(argument, expected, got)

    def tensor(self, argument: str, value: Tensor | None, shape: str | None, dtypes: torch.dtype | Collection[torch.dtype]) -> None:
        """Checks type, dtype, device and shape (names or numbers of sizes, outermost first; None for any). None passes."""
        if value is None:
            return
        if not isinstance(value, Tensor):
            self.fail(argument, "a tensor", type(value).__name__, TypeError)
        allowed = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        if value.dtype not in allowed:
            self.fail(argument, "a tensor of " + " or ".join(map(_name, allowed)), _name(value.dtype), TypeError)
        if self._device is None:
            self._device = value.device, argument
        elif value.device != self._device[0]:
            self.fail(argument, f"on {self._device[0]} as {self._device[1]}", f"a tensor on {value.device}")
        if shape is None:
            return
        names, sizes = shape.split(), list(value.shape)
        wanted = f"of shape [{', '.join(names)}]"
        if len(names) != len(sizes):
            self.fail(argument, wanted, str(sizes))
        for name, size in zip(names, sizes, strict=True):
            if name.isdigit():
                self.require(size == int(name), argument, wanted, str(sizes))
            elif name not in self._sizes:
                self._sizes[name] = (size, argument)
            elif size != self._sizes[name][0]:
                self.fail(argument, f"{wanted} where {name} is {self[name]} in {self._sizes[name][1]}", str(sizes))

    def integer(self, argument: str, value: Any, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(argument, "an int", value, TypeError)
        self.require(value >= least, argument, f"at least {least}", value)


def check_heads(check: Checker) -> None:
    """What kernels for whole heads ask. Call it when q, k and v are bound."""
    for size, tensor in (("head_dim", "q"), ("v_head_dim", "v")):
        check.require(check[size] in HEAD_DIMS, f"{size} of {tensor}", "64 or 128", check[size])
    heads, kv_heads = check["heads"], check["kv_heads"]
    check.require(kv_heads > 0 and heads % kv_heads == 0, "heads of q", f"a multiple of kv_heads = {kv_heads}", heads)


def check_options(check: Checker, window_left: int, logit_cap: float, sinks: Tensor | None, softmax_scale: float | None) -> None:
    """The softmax's options. Call it when ``heads`` is bound."""
    check.integer("window_left", window_left, -1)
    check.require(0 <= logit_cap < math.inf, "logit_cap", "0 (off) or positive and finite", logit_cap)
    check.require(softmax_scale is None or 0 < softmax_scale < math.inf, "softmax_scale", "positive and finite", softmax_scale)
    check.tensor("sinks", sinks, "heads", SINKS)


def check_out(check: Checker, out: Tensor | None, q: Tensor, dtype: torch.dtype | None = None) -> None:
    """``out``, in q's dtype if none is given."""
    check.tensor("out", out, "tokens heads v_head_dim", q.dtype if dtype is None else dtype)


def check_offsets(check: Checker, argument: str, offsets: Tensor | None, tokens: int) -> None:
    """A ``cu_seqlens``: int32 ``[batch + 1]``. Its values are looked at where that waits for no device."""
    if offsets is None:
        return
    check.tensor(argument, offsets, "batch+1", torch.int32)
    check.require(offsets.shape[0] > 0, argument, "of shape [batch + 1]", str(list(offsets.shape)))
    if offsets.device.type == "cpu":
        check_offset_values(check, argument, offsets.tolist(), tokens)


def check_extension(check: Checker, cu_seqlens_q: Tensor, max_seqlen_q: int, tokens: int) -> None:
    """New tokens of sequences. Call it when ``batch`` is bound."""
    check.bind("batch+1", check["batch"] + 1, "cache_seqlens")
    check_offsets(check, "cu_seqlens_q", cu_seqlens_q, tokens)
    check.integer("max_seqlen_q", max_seqlen_q, 0)


def check_offset_values(check: Checker, argument: str, values: Sequence[int], tokens: int) -> None:
    """That offsets on the host begin with 0, do not decrease, and end with the number of tokens."""
    rising = all(left <= right for left, right in itertools.pairwise(values))
    check.require(
        values[0] == 0 and rising and values[-1] == tokens,
        argument,
        f"non-decreasing from 0 to tokens = {tokens}",
        repr(list(values)),
    )


def check_caches(
    check: Checker,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Queries, the keys and values in pages, and their scales. ``heads`` and ``head_dim`` are those of q, in half precision."""
    check.tensor("q", q, "tokens heads head_dim", HALVES)
    check.tensor("k_cache", k_cache, "pages page_size kv_heads head_dim", (q.dtype, FP8))
    check.tensor("v_cache", v_cache, "pages page_size kv_heads v_head_dim", k_cache.dtype)
    check_heads(check)
    check.require(check["page_size"] > 0, "page_size of k_cache", "positive", check["page_size"])
    check.tensor("cache_seqlens", cache_seqlens, "batch", torch.int32)
    check.tensor("page_table", page_table, "batch max_pages", torch.int32)
    check.integer("max_seqlen_k", max_seqlen_k, 0)
    room = check["max_pages"] * check["page_size"]
    if check["batch"]:
        pages = f"{check['max_pages']} pages of {check['page_size']} tokens a sequence"
        check.require(max_seqlen_k <= room, "max_seqlen_k", f"at most {room}, what {pages} hold", max_seqlen_k)
    _check_scale(check, "k_scale", k_scale, "k_cache", k_cache)
    _check_scale(check, "v_scale", v_scale, "v_cache", v_cache)


def _check_scale(check: Checker, argument: str, scale: Tensor | None, scaled: str, cache: Tensor) -> None:
    """The scale of an fp8 cache, one for all or one a key head."""
    if scale is None:
        return
    if cache.dtype != FP8:
        check.fail(argument, f"None, because {scaled} is not fp8 but {_name(cache.dtype)}", scale)
    check.tensor(argument, scale, None, torch.float32)
    shapes = ([], [1], [check["kv_heads"]])
    check.require(list(scale.shape) in shapes, argument, f"of shape [], [1] or [kv_heads] = {shapes[2]}", scale)
