"""Argument checks whose errors name the argument, its requirement and its value.

An operator's ``check`` hook gets a `Checker` and states shapes by named sizes. The first tensor whose shape names a size binds that
size, and every later tensor must agree::

    check.tensor("q", q, "tokens heads head_dim", FLOATS)
    check.tensor("k", k, "kv_tokens kv_heads head_dim", q.dtype)
    check.divides("kv_heads", "heads")

Wrong shapes and values raise ValueError, wrong types and dtypes TypeError. Both errors are raised before any kernel is launched.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from tokenspeed_kernel_base.signature import dtype_name

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz})
INTS = frozenset({torch.int32, torch.int64})


def describe(value: Any) -> str:
    """Formats a value for an error message. A tensor is described by dtype, shape and device."""
    if isinstance(value, torch.Tensor):
        unusual = unusual_storage(value)
        if unusual:
            return f"a {unusual} {dtype_name(value.dtype)} tensor on {value.device}"
        return f"a {dtype_name(value.dtype)} tensor of shape {list(value.shape)} on {value.device}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unusual_storage(tensor: torch.Tensor) -> str:
    """Returns the kind of storage of a tensor whose shape and strides do not locate its elements: ``"sparse_csr"``, ``"nested"``...
    Returns an empty text for an ordinary tensor.
    """
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").strip("_")
    return "quantized" if tensor.is_quantized else ""


def refuse_gradients(mode: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises RuntimeError if a tensor requires a gradient while gradients are enabled: kernels are for inference and have no
    backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors:
        if tensor.requires_grad:
            raise RuntimeError(
                f"{mode}: {name} requires a gradient, and operators are for inference only: call it under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach()"
            )


class Checker:
    """Checks the arguments of one call of one operator. ``check["heads"]`` is the value of the size ``heads``, once a tensor has
    bound it.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self._sizes: dict[str, tuple[int, str]] = {}
        self._rows: int | None = None
        self.ranges: dict[str, tuple[int, int]] = {}
        self._names: Mapping[str, str] = {}

    def __getitem__(self, size: str) -> int:
        return self._sizes[size][0]

    def sizes(self) -> dict[str, int]:
        """Every bound size by name. ``rows`` is the number of rows in the axes that a leading ``...`` matched. A size ``"batch+1"``
        yields ``batch``; other expressions of sizes are omitted."""
        named = {name[:-2]: value - 1 for name, (value, _) in self._sizes.items() if name.endswith("+1")}
        named |= {name: value for name, (value, _) in self._sizes.items() if name.isidentifier()}
        return named if self._rows is None else {"rows": self._rows, **named}

    def bind(self, size: str, value: int, source: str) -> None:
        """Binds a size to a value that no tensor's shape gives. Messages name ``source`` as the value's origin."""
        self._sizes[size] = (value, source)

    @contextlib.contextmanager
    def naming(self, names: Mapping[str, str]) -> Iterator[None]:
        """Renames arguments in errors that are raised inside the block. ``names`` maps an argument to the name to show, for example
        an option to an attribute of an object.
        """
        before, self._names = self._names, names
        try:
            yield
        finally:
            self._names = before

    def fail(self, argument: str, expected: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
        """Raises ``error`` with the message ``<operator>: <argument> must be <expected>, got <got>``."""
        argument = self._names.get(argument, argument)
        raise error(f"{self.operator}: {argument} must be {expected}, got {got if isinstance(got, str) else describe(got)}")

    def require(self, holds: bool, argument: str, expected: str, got: Any) -> None:
        """Raises ValueError with the message of `fail` unless ``holds``."""
        if not holds:
            self.fail(argument, expected, got)

    def bound(self, argument: str, value: int | None, least: int = 0, most: int = sys.maxsize, why: str = "") -> None:
        """Checks an integer that the operator declares as a bound; None passes.

        The call also declares that the ``check`` hook accepts every value of this argument within these limits. A later call that
        differs only in this value hits the memo and skips the check. So the hook must use the value for nothing else.

        Args:
            argument: its name.
            value: the value.
            least, most: the limits, both included.
            why: the reason for the upper limit, for the message.
        """
        self.ranges[argument] = (least, most)
        if value is None:
            return
        if value < least:
            self.fail(argument, f"at least {least}", value)
        if value > most:
            self.fail(argument, f"at most {most}{', ' * bool(why)}{why}", value)

    def tensor(
        self, argument: str, value: torch.Tensor | None, shape: str, dtype: torch.dtype | Collection[torch.dtype] | None = None
    ) -> None:
        """Checks a tensor's shape and dtype. None always passes: the annotation decides whether None is allowed.

        Args:
            argument: its name.
            value: the tensor.
            shape: the name or the number of each axis' size, outermost first; a leading ``...`` matches any number of axes.
            dtype: the allowed dtype or dtypes.
        """
        if value is None:
            return
        if dtype is not None:
            self.dtype(argument, value, dtype)
        names = shape.split()
        sizes = list(value.shape)
        if names[:1] == ["..."]:
            names = names[1:]
            if self._rows is None:
                self._rows = int(math.prod(sizes[: max(len(sizes) - len(names), 0)]))
            sizes = sizes[max(len(sizes) - len(names), 0) :]
        if len(sizes) != len(names):
            self.fail(argument, f"of shape [{', '.join(shape.split())}]", list(value.shape))
        for name, size in zip(names, sizes, strict=True):
            if name.isdigit():
                wanted, source = int(name), "always"
            elif name in self._sizes:
                wanted, source = self._sizes[name]
            else:
                self._sizes[name] = (size, argument)
                continue
            if size != wanted:
                because = f"{name} is {wanted}" + (f" in {source}" if not name.isdigit() else "")
                self.fail(argument, f"of shape [{', '.join(shape.split())}] where {because}", str(list(value.shape)))

    def dtype(self, argument: str, value: torch.Tensor, dtype: torch.dtype | Collection[torch.dtype]) -> None:
        """Raises TypeError unless the tensor's dtype is ``dtype``, or one of several allowed dtypes."""
        allowed = {dtype} if isinstance(dtype, torch.dtype) else set(dtype)
        if value.dtype not in allowed:
            got = dtype_name(value.dtype)
            if value.dtype == torch.uint8 and allowed & FP8:
                got += f" (where its bytes are fp8, pass {argument}.view(torch.float8_e4m3fn), or the format that they have)"
            self.fail(argument, "a tensor of " + " or ".join(sorted(map(dtype_name, allowed))), got, TypeError)

    def source(self, size: str) -> str:
        """The argument that has bound a size."""
        return self._sizes[size][1]

    def divides(self, divisor: str, dividend: str, note: str = "") -> None:
        """Raises ValueError unless the bound size ``divisor`` divides the bound size ``dividend``. The message contains ``note``,
        a remark about the likely cause."""
        (small, small_source), (large, large_source) = self._sizes[divisor], self._sizes[dividend]
        if small == 0 or large % small:
            self.fail(
                large_source,
                f"such that {dividend} is a multiple of {divisor} = {small} of {small_source}{note and f' ({note})'}",
                f"{dividend} = {large}",
            )

    def one_of(self, argument: str, value: Any, allowed: Collection[Any]) -> None:
        """Raises ValueError unless ``value`` is one of ``allowed``."""
        if value not in allowed:
            self.fail(argument, "one of " + ", ".join(map(describe, allowed)), describe(value))

    def same_shape(
        self,
        argument: str,
        value: torch.Tensor | None,
        like: str,
        model: torch.Tensor,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> None:
        """Checks that an optional tensor has the shape of the tensor ``model``, and its dtype or one of ``dtypes``."""
        if value is None:
            return
        self.dtype(argument, value, dtypes or model.dtype)
        if value.shape != model.shape:
            self.fail(argument, f"of shape {list(model.shape)} like {like}", str(list(value.shape)))
