"""Derives smaller calls from an operator's call: keeps only the first items of its batch, or reduces the size of an axis that
several of its tensors have. The operator's ``check`` names the axes: a tensor that it checks against ``"tokens heads head_dim"``
has those axes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.verify import check_with_values
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import Kind, tensor_arguments

_ROWS = "..."  # stands for any number of leading axes in a check


class _Reader(Checker):
    """A checker that also records the axis names against which each argument is checked."""

    def __init__(self, operator: str) -> None:
        super().__init__(operator)
        self.axes: dict[str, tuple[str, ...]] = {}

    def tensor(
        self, argument: str, value: Tensor | None, shape: str, dtype: torch.dtype | Collection[torch.dtype] | None = None
    ) -> None:
        super().tensor(argument, value, shape, dtype)
        if value is not None:
            names = shape.split()
            if names[0] == _ROWS:
                leading = value.dim() - len(names) + 1
                names = [_ROWS, *("" for _ in range(leading - 1)), *names[1:]] if leading else names[1:]
            self.axes[argument] = tuple(names)

    def same_shape(
        self, argument: str, value: Tensor | None, like: str, model: Tensor, dtypes: Collection[torch.dtype] | None = None
    ) -> None:
        super().same_shape(argument, value, like, model, dtypes)
        if value is not None and like in self.axes:
            self.axes[argument] = self.axes[like]


def axes_of(op: Operator[Any, Any], arguments: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the axis names of each tensor of a call, if the operator's check names them. ``arguments``: all arguments, with
    defaults.
    """
    reader = _Reader(op.mode)
    op.run_hook("check", arguments, reader)
    tensors = dict(tensor_arguments(op.parameters, arguments))
    return {name: axes for name, axes in reader.axes.items() if name in tensors and len(axes) == tensors[name].dim()}


def narrow(op: Operator[Any, Any], arguments: dict[str, Any], size: str, count: int) -> dict[str, Any]:
    """Returns the arguments of a call with a named size reduced to ``count`` in every tensor that has it. The first elements are
    kept.

    Raises:
        ValueError, TypeError: the operator rejects the smaller call, or no tensor has the size.
    """
    cut = _cut(op, arguments, {size: count})
    check_with_values(op, cut)
    return cut


def first_items(op: Operator[Any, Any], arguments: dict[str, Any], count: int) -> tuple[dict[str, Any], int]:
    """Returns the arguments of a call for the first ``count`` items of its batch, and the number of output rows of these items.

    The first size that the operator declares to vary counts the items (sequences, tokens). If no tensor has that size, the items
    are counted by the first axis of the first tensor.

    Raises:
        ValueError, TypeError: the operator rejects the smaller call, or the call has no such items.
    """
    sizes, rows = _items(op, arguments, count)
    try:
        cut = _cut(op, arguments, sizes)
        check_with_values(op, cut)
    except (ValueError, TypeError):
        # The operator's check may not name the axes of per-row scales. So also cut the tensors whose axes the check does not name.
        cut = _cut(op, arguments, sizes, others=True)
        check_with_values(op, cut)
    return cut, rows


def count_items(op: Operator[Any, Any], arguments: dict[str, Any]) -> int:
    """Returns the number of items of a call's batch, counted as in `first_items`; 0 if the call has no items."""
    axes = axes_of(op, arguments)
    tensors = dict(tensor_arguments(op.parameters, arguments))
    items = _item_size(op)
    for wanted, less in ((f"{items}+1", 1), (items, 0)):
        for name, names in axes.items():
            if names[:1] == (wanted,):
                return len(tensors[name]) - less
    name, names = next(iter(axes.items()), ("", ()))
    return len(tensors[name]) if names else 0


def _item_size(op: Operator[Any, Any]) -> str:
    """Returns the name of the size that counts a batch's items: the first size that the operator declares to vary."""
    return op.varying[0] if op.varying else _ROWS


def _items(op: Operator[Any, Any], arguments: dict[str, Any], count: int) -> tuple[dict[str, int], int]:
    """Returns the reduced sizes, by name, of a call for the first ``count`` items, and the number of these items' output rows."""
    axes = axes_of(op, arguments)
    tensors = dict(tensor_arguments(op.parameters, arguments))
    if not axes:
        raise ValueError(f"the check hook of {op} names no sizes")
    items = _item_size(op)
    offsets = f"{items}+1"
    leader, names = next(iter(axes.items()))
    rows = len(tensors[leader]) if names else 0
    # Only offsets whose last entry is the number of rows show where an item's rows end.
    sums = [tensors[name] for name, n in axes.items() if n == (offsets,) and len(tensors[name]) and int(tensors[name][-1]) == rows]
    if sums:
        end = int(sums[0][count])
        return {names[0]: end, items: count, offsets: count + 1}, end
    whole = next((len(tensors[name]) for name, n in axes.items() if n[:1] == (items,)), 0)
    if whole and names[0] != items and rows % whole == 0:
        end = rows // whole * count
        return {names[0]: end, items: count, offsets: count + 1}, end
    return {names[0]: count}, count


def _cut(op: Operator[Any, Any], arguments: dict[str, Any], sizes: dict[str, int], *, others: bool = False) -> dict[str, Any]:
    axes = axes_of(op, arguments)
    if not any(name in sizes for names in axes.values() for name in names):
        raise ValueError(f"no tensor of {op} has {', '.join(sizes)}")
    before: dict[str, int] = {}

    def cut(name: str, tensor: Tensor) -> Tensor:
        for axis, size in enumerate(axes.get(name, ())):
            if size in sizes:
                before.setdefault(size, tensor.shape[axis])
                tensor = tensor.narrow(axis, 0, sizes[size])
        return tensor

    changed = dict(arguments)
    for parameter in op.parameters:
        value = arguments[parameter.name]
        if isinstance(value, Tensor) and parameter.kind is Kind.TENSOR:
            changed[parameter.name] = cut(parameter.name, value)
        elif parameter.kind is Kind.OBJECT and value is not None:
            inner = {f.attribute: cut(f.name, getattr(value, f.attribute)) for f in parameter.tensors() if f.name in axes}
            changed[parameter.name] = replace(value, **inner) if inner else value
    leading = {before[size]: count for size, count in sizes.items() if size in before}
    for parameter in op.parameters:
        value = changed[parameter.name]
        if parameter.kind is Kind.HINT and isinstance(value, (Tensor, Sequence)) and f"{_item_size(op)}+1" in sizes:
            changed[parameter.name] = value[: sizes[f"{_item_size(op)}+1"]]
        elif others and isinstance(value, Tensor) and parameter.name not in axes and value.dim() and len(value) in leading:
            changed[parameter.name] = value[: leading[len(value)]]
    return changed


class Narrowed:
    """A recipe of a case that makes the arguments of the recipe ``base``, then narrows one size after another.

    The size named ``items`` stands for the items of the batch.
    """

    def __init__(self, op: Operator[Any, Any], base: Any, steps: Sequence[tuple[str, int]]) -> None:
        self.op, self.base, self.steps = op, base, tuple(steps)

    def __call__(self, draw: Draw) -> dict[str, Any]:
        arguments = self.op.complete(self.base(draw))
        for size, count in self.steps:
            if size == "items":
                arguments = first_items(self.op, arguments, count)[0]
            else:
                arguments = narrow(self.op, arguments, size, count)
        return arguments


def narrowed(op: Operator[Any, Any], case: Case, **sizes: int) -> Case:
    """Returns a case with the given sizes reduced, in this order: ``narrowed(op, case, items=3, head_dim=8)``.

    ``items`` is the number of items of the batch.

    Example:
        >>> from tokenspeed_kernel_base.operator import get_operator
        >>> op = get_operator("rmsnorm")
        >>> narrowed(op, op.all_cases()[1], items=3, hidden=8).build()["x"].shape
        torch.Size([3, 8])
    """
    base, steps = (case.make.base, case.make.steps) if isinstance(case.make, Narrowed) else (case.make, ())
    merged = dict(steps[-1:])
    merged.update(sizes)  # reducing the same size again replaces the last step
    return replace(case, make=Narrowed(op, base, (*steps[:-1], *merged.items())))
