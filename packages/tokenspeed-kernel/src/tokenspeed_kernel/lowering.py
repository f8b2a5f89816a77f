"""Operators as custom operators of PyTorch, for torch.compile, export and fake tensors.

Each operator becomes ``torch.ops.tokenspeed_kernel.<mode>``, whose schema is derived from the parameters: objects are spread
over their attributes, hints are dropped (they repeat what a tensor says), outputs come as one list. A custom operator must not
return what it was given, so an output that the caller provides is declared as mutated and left out of the list; `lowered` puts
it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tokenspeed_kernel.parameters import Kind, Parameter

NAMESPACE = "tokenspeed_kernel"

_library: torch.library.Library | None = None


def library() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _library


_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType", tuple: "SymInt[]"}


def leaves(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters of the custom operator: objects spread, hints gone."""
    spread: list[Parameter] = []
    for parameter in parameters:
        if parameter.kind is Kind.HINT:
            continue
        spread.extend(parameter.fields or (parameter,))
    return spread


def schema(name: str, parameters: Sequence[Parameter], mutated: Sequence[str]) -> str:
    """The custom operator's schema, e.g. ``rmsnorm(Tensor x, Tensor weight, float eps, ...) -> Tensor[]``."""
    arguments = []
    for index, leaf in enumerate(leaves(parameters)):
        optional = "?" if leaf.optional else ""
        if leaf.is_tensor:
            alias = f"(a{index}!)" if leaf.name in mutated else ""
            arguments.append(f"Tensor{alias}{optional} {leaf.identifier}")
            continue
        known = [_SCHEMA_TYPES[t] for t in leaf.types if t in _SCHEMA_TYPES]
        if len(known) != 1:
            raise TypeError(f"{name}: {leaf.name} of type {leaf.types} has no counterpart in a custom operator's schema")
        arguments.append(f"{known[0]}{optional} {leaf.identifier}")
    return f"{name}({', '.join([*arguments, 'str? override', 'str? solution'])}) -> Tensor[]"


def gather(parameters: Sequence[Parameter], values: Sequence[Any]) -> list[Any]:
    """The operator's arguments, from those of the custom operator: objects put together again, hints absent."""
    arguments: list[Any] = []
    remaining = iter(values)
    for parameter in parameters:
        if parameter.kind is Kind.HINT:
            arguments.append(None)
        elif parameter.fields:
            assert parameter.cls is not None
            inner = {field.name.partition(".")[2]: next(remaining) for field in parameter.fields}
            tuples = {f.name.partition(".")[2] for f in parameter.fields if tuple in f.types}
            arguments.append(parameter.cls(**{k: tuple(v) if k in tuples and v is not None else v for k, v in inner.items()}))
        else:
            arguments.append(next(remaining))
    return arguments


def as_list(result: Any) -> list[torch.Tensor]:
    """An operator's result (None, a tensor, or a tuple of tensors) as a list."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def from_list(results: Sequence[torch.Tensor]) -> Any:
    """The reverse of `as_list`."""
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def merge_outputs(provided: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All outputs in order: those the caller provided in their places, and those made. Provided ones come first in order."""
    outputs: list[torch.Tensor] = []
    taken = 0
    for output in provided:
        if output is not None:
            outputs.append(output)
        elif taken < len(made):
            outputs.append(made[taken])
            taken += 1
    outputs.extend(made[taken:])
    return outputs


def define(
    name: str,
    parameters: Sequence[Parameter],
    outs: Sequence[str],
    mutates: Sequence[str],
    call: Callable[..., Any],
    fake: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """Registers the custom operator.

    Args:
        name: ``mode`` of the operator.
        parameters: those of the operator.
        outs: parameters that receive outputs 0, 1, ...
        mutates: further parameters that are written to.
        call: the public function.
        fake: outputs of the right shapes and dtypes, from arguments by name.

    Returns:
        A function of all parameters, override and solution, that torch.compile can trace.
    """
    lib = library()
    lib.define(schema(name, parameters, [*outs, *mutates]))  # type: ignore[no-untyped-call]
    out_positions = [[p.name for p in parameters].index(out) for out in outs]

    def run(*values: Any) -> list[torch.Tensor]:
        *flat, override, solution = values
        arguments = gather(parameters, flat)
        result = call(*arguments, override=override, solution=solution)
        provided = [arguments[i] for i in out_positions]
        return [t for t in as_list(result) if not any(t is p for p in provided)]

    def run_fake(*values: Any) -> list[torch.Tensor]:
        arguments = gather(parameters, values[:-2])
        outputs = as_list(fake(dict(zip((p.name for p in parameters), arguments, strict=True))))
        return [t for i, t in enumerate(outputs) if i >= len(out_positions) or arguments[out_positions[i]] is None]

    lib.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", run_fake, lib=lib)
    custom_op = getattr(torch.ops.tokenspeed_kernel, name).default

    def lowered(*values: Any) -> Any:
        *arguments, override, solution = values
        flat: list[Any] = []
        for parameter, argument in zip(parameters, arguments, strict=True):
            if parameter.kind is Kind.HINT:
                continue
            if parameter.fields:
                flat.extend(getattr(argument, field.name.partition(".")[2]) for field in parameter.fields)
            else:
                flat.append(argument)
        made = custom_op(*flat, override, solution)
        return from_list(merge_outputs([arguments[i] for i in out_positions], made))

    return lowered
