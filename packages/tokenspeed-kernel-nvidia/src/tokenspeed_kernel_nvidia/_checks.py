"""Errors that name the argument, what it was, and what it should have been, before anything is launched.

With tokenspeed-kernel in front the operator has checked the arguments already; these are for callers of the plain functions. Calls
like one that was right are not looked at again: what may still be wrong with those, a program refuses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia import _limits

# A caller with ever new shapes must not fill memory.
_MOST_PASSED = 4096
# Of calls that were right, by what makes calls alike: the most tokens of a sequence that their page tables have room for.
_passed: dict[Hashable, int] = {}
# How a call fails that is not right: what is no tensor has been asked for its shape, or a program has refused its arguments. Both
# come before anything is launched, and a check says what is wrong. Other errors are not for it.
REFUSALS = (AttributeError, TypeError, ValueError)


def looks(tensor: Tensor | None) -> Hashable:
    """What matters of a tensor that a program gets by its address, and so does not look at."""
    return None if tensor is None else (tensor.dtype, tensor.get_device(), tensor.shape)


def has_passed(call: Hashable, max_seqlen_k: Any) -> bool:
    """Whether a call is like one that was right, also with this bound of lengths, which may be another at every call."""
    most = _passed.get(call)
    return most is not None and type(max_seqlen_k) is int and 0 <= max_seqlen_k <= most


def pass_on(call: Hashable, most: int) -> None:
    """Remembers that a call was right, and the most that max_seqlen_k may be."""
    if len(_passed) >= _MOST_PASSED:
        _passed.clear()
    _passed[call] = most


def fail(function: str, argument: str, expected: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{function}: {argument} must be {expected}, got {got if isinstance(got, str) else repr(got)}")


def integer(function: str, argument: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(function, argument, "an int", value, TypeError)
    if value < least:
        fail(function, argument, f"at least {least}", value)


def room(function: str, max_seqlen_k: Any, page_table: Tensor, page_size: int) -> int:
    """The most tokens of a sequence that a page table has room for. No bound of lengths may be more."""
    batch, pages = page_table.shape
    integer(function, "max_seqlen_k", max_seqlen_k, 0)
    if batch and max_seqlen_k > pages * page_size:
        hold = f"{pages} pages of {page_size} tokens a sequence hold"
        fail(function, "max_seqlen_k", f"at most {pages * page_size}, what {hold}", max_seqlen_k)
    return pages * page_size


def _fits(shape: torch.Size, sizes: tuple[int | None, ...]) -> bool:
    if len(shape) != len(sizes):
        return False
    for size, wanted in zip(shape, sizes, strict=True):  # noqa: SIM110 (a generator costs three times as much)
        if wanted is not None and size != wanted:
            return False
    return True


class Call:
    """Checks one call of one function. Wrong shapes and values raise ValueError, wrong types and dtypes TypeError.

    Attributes:
        function: its name.
        device: where all tensors must lie, with q.
    """

    def __init__(self, function: str, q: Tensor) -> None:
        self.function = function
        if not isinstance(q, Tensor):
            self.fail("q", "a tensor", type(q).__name__, TypeError)
        self.device = q.device

    def fail(self, argument: str, expected: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
        fail(self.function, argument, expected, got, error)

    def tensor(self, argument: str, value: Any, dtypes: Collection[torch.dtype], shape: str, sizes: tuple[int | None, ...]) -> None:
        """A tensor of one of some dtypes on the call's device.

        Args:
            shape: names of its axes, for the message.
            sizes: of its axes; None for any.
        """
        # Nearly always all is well, so that is found out first, and then what is not.
        if isinstance(value, Tensor) and value.dtype in dtypes and value.device == self.device and _fits(value.shape, sizes):
            return
        if not isinstance(value, Tensor):
            self.fail(argument, "a tensor", type(value).__name__, TypeError)
        if value.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.fail(argument, f"a tensor of {allowed}", str(value.dtype).removeprefix("torch."), TypeError)
        if value.device != self.device:
            self.fail(argument, f"on {self.device} as q", f"a tensor on {value.device}")
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        self.fail(argument, f"of shape [{shape}] = [{wanted}]", str(list(value.shape)))

    def queries(self, q: Tensor) -> None:
        self.tensor("q", q, _limits.HALVES, "tokens, heads, head_dim", (None, None, None))
        if q.shape[2] not in _limits.HEAD_DIMS:
            self.fail("head_dim of q", "64 or 128", q.shape[2])

    def heads(self, q: Tensor, kv_heads: int, ratios: tuple[int, ...] = _limits.GQA_RATIOS) -> None:
        heads = q.shape[1]
        if not kv_heads or heads % kv_heads or heads // kv_heads not in ratios:
            whole = ratios == tuple(range(ratios[0], ratios[-1] + 1))
            served = f"{ratios[0]} to {ratios[-1]}" if whole else " or ".join(map(str, ratios))
            self.fail("heads of q", f"{served} times kv_heads = {kv_heads}", heads)

    def caches(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        cache_seqlens: Tensor,
        ratios: tuple[int, ...] = _limits.GQA_RATIOS,
    ) -> None:
        """Queries, and the keys and values in pages. ``ratios``: of query heads to key heads."""
        self.queries(q)
        self.tensor("k_cache", k_cache, (q.dtype,), "pages, page_size, kv_heads, head_dim", (None, None, None, q.shape[2]))
        self.tensor("v_cache", v_cache, (q.dtype,), "pages, page_size, kv_heads, head_dim", tuple(k_cache.shape))
        _, page_size, kv_heads, _ = k_cache.shape
        self.heads(q, kv_heads, ratios)
        if page_size not in _limits.PAGE_SIZES:
            self.fail("page_size of k_cache", " or ".join(map(str, _limits.PAGE_SIZES)), page_size)
        self.tensor("cache_seqlens", cache_seqlens, (torch.int32,), "batch", (None,))
        self.tensor("page_table", page_table, (torch.int32,), "batch, max_pages", (cache_seqlens.shape[0], None))

    def offsets(self, argument: str, value: Tensor, batch: int | None = None) -> None:
        """A ``cu_seqlens``. Its values are not looked at: they lie on the device."""
        self.tensor(argument, value, (torch.int32,), "batch + 1", (None if batch is None else batch + 1,))
        if not value.shape[0]:
            self.fail(argument, "of shape [batch + 1]", "[0]")

    def window(self, window_left: int) -> None:
        """A window that the window kernels serve, or none."""
        integer(self.function, "window_left", window_left, -1)
        if window_left > _limits.LONGEST_WINDOW:
            self.fail("window_left", f"-1 for all, or at most {_limits.LONGEST_WINDOW}", window_left)

    def options(self, q: Tensor, logit_cap: float, sinks: Tensor | None, softmax_scale: float | None, out: Tensor | None) -> None:
        """What is left of every attention."""
        if logit_cap:
            self.fail("logit_cap", "0: these kernels have none", logit_cap)
        if softmax_scale is not None and not 0 < softmax_scale < math.inf:
            self.fail("softmax_scale", "positive and finite", softmax_scale)
        if sinks is not None:
            self.tensor("sinks", sinks, _limits.SINKS, "heads", (q.shape[1],))
        if out is not None:
            self.tensor("out", out, (q.dtype,), "tokens, heads, head_dim", tuple(q.shape))

    def rows(self, max_seqlen_q: int, q: Tensor, kv_heads: int, batch: int) -> None:
        """As many new tokens of every sequence as there are rows for. Call it when heads are checked."""
        integer(self.function, "max_seqlen_q", max_seqlen_q, 1)
        most = _limits.MOST_ROWS // (q.shape[1] // kv_heads)
        if max_seqlen_q > most:
            heads = f"{q.shape[1]} heads and {kv_heads} kv_heads"
            self.fail("max_seqlen_q", f"at most {most} with {heads}; mha_extend_with_kvcache takes more", max_seqlen_q)
        wanted = batch * max_seqlen_q
        if q.shape[0] != wanted:
            self.fail("q", f"of {wanted} tokens, max_seqlen_q for each length in cache_seqlens", f"{q.shape[0]} tokens")

    def unscaled(self, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
        if q_scale is None and k_scale is None and v_scale is None:
            return
        for argument, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                self.fail(argument, "None: there is no fp8 here", scale)
