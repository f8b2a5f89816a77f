"""Operators as custom operators of PyTorch, for torch.compile, export and fake tensors.

Each operator becomes ``torch.ops.tokenspeed_kernel.<mode>``, whose schema is derived from the parameters. Objects are flattened to
their attributes, and resources are passed as handles. Hints are dropped. A hint is a parameter that repeats a tensor's values on
the host (``cu_seqlens_cpu``, say). Kernels work without hints.

An operator has up to two overloads. ``default`` lacks the optional tensors that a call writes to, such as ``out``. This overload is
functional unless the operator always mutates an argument. The overload ``out`` has all these tensors, and is used by calls that
pass at least one of them. A single overload is impossible: Inductor rejects a call whose only output is new while all its mutable
arguments are None.

A custom operator must return a fixed number of tensors, and no returned tensor may alias an input. So the operator returns a dummy
tensor for each output that the caller provides or that the call lacks. The function that torch.compile traces, made by `define`,
replaces the dummies.

Operators have no gradients. With gradients enabled, a custom operator raises an error for an argument that requires a gradient.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base import resources
from tokenspeed_kernel_base.checks import refuse_gradients
from tokenspeed_kernel_base.parameters import Kind, Parameter, kind_of, resolved_annotations

NAMESPACE = "tokenspeed_kernel"


@functools.cache
def library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType", tuple: "SymInt[]"}


# A handle is an integer in the schema (a SymInt), so that one compiled function works for several resources.
_HANDLE = (int,)


def leaves(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters of the custom operator: objects flattened, hints dropped, resources as handles. An argument for an object may
    also be a resource. So each object's attributes are followed by a handle, by which the kernel receives the resource. The handle
    is None if the argument is no resource.
    """
    spread: list[Parameter] = []
    for parameter in parameters:
        if parameter.kind is Kind.HINT:
            continue
        if parameter.kind is Kind.RESOURCE:
            spread.append(Parameter(parameter.name, Kind.VALUE, _HANDLE, parameter.optional))
            continue
        spread.extend(parameter.fields or (parameter,))
        if parameter.kind is Kind.OBJECT:
            spread.append(Parameter(f"{parameter.name}.handle", Kind.VALUE, _HANDLE, True))
    return spread


def count_outputs(body: Callable[..., Any]) -> int:
    """The largest number of outputs of a body, from its return annotation: None, a tensor, a tuple of tensors, or a union of these.

    Raises:
        TypeError: the annotation is missing or of another form.
    """
    annotation = resolved_annotations(body).get("return", Any)
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    counts = []
    for member in typing.get_args(annotation) if union else (annotation,):
        inner = typing.get_args(member) if typing.get_origin(member) is tuple else (member,)
        if member in (None, type(None)):
            counts.append(0)
        elif inner and all(t is torch.Tensor for t in inner):
            counts.append(len(inner))
        else:
            raise TypeError(f"{body.__qualname__} must return None, a tensor or a tuple of tensors, by its annotation {annotation}")
    return max(counts)


def schema(name: str, parameters: Sequence[Parameter], mutated: Collection[str], outputs: int) -> str:
    """An overload's schema, e.g. ``rmsnorm(Tensor x, Tensor weight, float eps, ...) -> (Tensor, Tensor)``.

    Args:
        name: the operator's name, followed by a dot and the overload's name.
        parameters: the parameters of the overload.
        mutated: names of the parameters that are written to.
        outputs: how many tensors are returned.

    Raises:
        TypeError: a parameter's type has no counterpart in a schema.
    """
    arguments = []
    for index, leaf in enumerate(leaves(parameters)):
        optional = "?" if leaf.optional else ""
        # PyTorch itself passes a keyword ``mode`` to custom operators.
        identifier = "mode_" if leaf.identifier == "mode" else leaf.identifier
        if leaf.is_tensor:
            alias = f"(a{index}!)" if leaf.name in mutated else ""
            arguments.append(f"Tensor{alias}{optional} {identifier}")
            continue
        known = [_SCHEMA_TYPES[t] for t in leaf.types if t in _SCHEMA_TYPES]
        if len(known) != 1:
            raise TypeError(f"{name}: {leaf.name} of type {leaf.types} has no counterpart in a custom operator's schema")
        arguments.append(f"{known[0]}{optional} {identifier}")
    returns = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    return f"{name}({', '.join([*arguments, 'str? override', 'str? solution'])}) -> {returns}"


@dataclass(frozen=True)
class Unfound:
    """A resource that is not looked up yet. While a call is traced, the handle may be a symbol. Reading the symbol's value would
    make torch.compile recompile for every other handle.
    """

    handle: Any

    def find(self) -> resources.Resource:
        return resources.find(int(self.handle))


def gather(parameters: Sequence[Parameter], values: Sequence[Any], find: Callable[[Any], Any] = resources.find) -> list[Any]:
    """The operator's arguments, made from the custom operator's arguments: objects are rebuilt, resources are looked up, and hints
    are None.

    Raises:
        RuntimeError: a resource no longer exists.
    """
    arguments: list[Any] = []
    remaining = iter(values)
    for parameter in parameters:
        if parameter.kind is Kind.HINT:
            arguments.append(None)
        elif parameter.fields:
            assert parameter.cls is not None
            inner = {field.attribute: next(remaining) for field in parameter.fields}
            tuples = {field.attribute for field in parameter.fields if tuple in field.types}
            made = parameter.cls(**{k: tuple(v) if k in tuples and v is not None else v for k, v in inner.items()})
            handle = next(remaining) if parameter.kind is Kind.OBJECT else None
            # While a call is traced, only the object's attributes are needed.
            arguments.append(made if handle is None or find is Unfound else find(handle))
        elif parameter.kind is Kind.RESOURCE:
            value = next(remaining)
            arguments.append(None if value is None else find(value))
        else:
            value = next(remaining)
            arguments.append(tuple(value) if tuple in parameter.types and value is not None else value)
    return arguments


def spread(name: str, parameters: Sequence[Parameter], arguments: Sequence[Any]) -> list[Any]:
    """The custom operator's arguments, made from an operator's arguments: the inverse of `gather`. Errors give the operator's name.

    Raises:
        TypeError: an argument is not a resource of the parameter's class.
    """
    flat: list[Any] = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        if parameter.kind is Kind.HINT:
            continue
        if parameter.fields:
            flat.extend(field.read(argument) for field in parameter.fields)
            if parameter.kind is Kind.OBJECT:
                flat.append(argument.handle if isinstance(argument, resources.Resource) else None)
        elif parameter.kind is Kind.RESOURCE:
            flat.append(_handle_of(name, parameter, argument))
        else:
            flat.append(argument)
    return flat


def _handle_of(name: str, parameter: Parameter, resource: Any) -> int | None:
    """The handle of a resource. Raises TypeError for an object of another class."""
    if resource is None and parameter.optional:
        return None
    wrong = not isinstance(resource, parameter.types)
    if wrong:
        raise TypeError(f"{name}: {parameter.name} must be {parameter.type_error(resource)}, got {kind_of(resource)}")
    handle: int = resource.handle
    return handle


def as_list(result: Any) -> list[torch.Tensor]:
    """An operator's result (None, a tensor, or a tuple of tensors) as a list of tensors."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def from_list(results: Sequence[torch.Tensor]) -> Any:
    """The inverse of `as_list`: a list of tensors as an operator's result."""
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


# Shape of the dummy tensors. No operator has outputs of 12 axes, so the number of axes identifies a dummy.
_STAND_IN_SHAPE = (0,) * 12


def merge_outputs(provided: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a call in order: provided tensors, and new tensors for outputs that the caller did not provide. Drops
    dummies.
    """
    padded = [*provided, *[None] * (len(made) - len(provided))]
    merged = [given if given is not None else new for given, new in zip(padded, made, strict=False)]
    return [t for t in merged if t.dim() != len(_STAND_IN_SHAPE)]


class Lowering(NamedTuple):
    """Maps an operator's calls to calls of its custom operator.

    Attributes:
        call: a function of all parameters, override and solution, that torch.compile can trace.
        choose: takes a call's arguments in order. Returns the overload, and its arguments except override and solution.
    """

    call: Callable[..., Any]
    choose: Callable[[Sequence[Any]], tuple[Callable[..., Any], list[Any]]]


def define(
    namespace: str,
    name: str,
    parameters: Sequence[Parameter],
    outs: Sequence[str],
    mutates: Sequence[str],
    outputs: int,
    call: Callable[..., Any],
    fake: Callable[[dict[str, Any]], Any],
    named: Callable[[dict[str, Any], list[torch.Tensor]], dict[str, torch.Tensor]],
) -> Lowering:
    """Registers the custom operator.

    Args:
        namespace: the custom operator's namespace: ``torch.ops.<namespace>.<name>``.
        name: ``mode`` of the operator.
        parameters: the operator's parameters.
        outs: parameters that receive outputs. The custom operator's outputs are in this order, as in every call.
        mutates: further parameters whose memory is written to.
        outputs: the largest number of outputs of a call.
        call: the public function.
        fake: returns outputs of the right shapes and dtypes, from arguments by name.
        named: takes a call's arguments and new outputs. Returns all outputs of the call by their names in ``outs``.

    Returns:
        The conversion of calls to calls of the custom operator.
    """
    written = frozenset((*outs, *mutates))
    # Flags, not indices: with dynamic shapes, Dynamo treats a closure's integers as symbols.
    avoidable = [p.name in written and p.optional for p in parameters]
    out_positions = [index for out in outs for index, p in enumerate(parameters) if p.name == out]

    def overload(suffix: str, taken: Sequence[Parameter]) -> Callable[..., Any]:
        """Defines an overload that takes the parameters in ``taken``; the operator's other parameters are None in its calls."""

        def by_name(flat: Sequence[Any], find: Callable[[Any], Any] = resources.find) -> dict[str, Any]:
            given = zip((p.name for p in taken), gather(taken, flat, find), strict=True)
            return {**dict.fromkeys(p.name for p in parameters), **dict(given)}

        def returned(arguments: dict[str, Any], results: list[torch.Tensor]) -> Any:
            device = next(a.device for a in arguments.values() if isinstance(a, torch.Tensor))
            made = named(arguments, results)
            new = [made.get(out) if arguments[out] is None else None for out in outs]
            new += results[len(outs) :]
            new += [None] * (outputs - len(new))
            return from_list([torch.empty(_STAND_IN_SHAPE, dtype=torch.bool, device=device) if n is None else n for n in new])

        def run(*values: Any) -> Any:
            *flat, override, solution = values
            arguments = by_name(flat)
            return returned(arguments, as_list(call(**arguments, override=override, solution=solution)))

        def run_fake(*values: Any) -> Any:
            arguments = by_name(values[:-2], Unfound)
            return returned(arguments, as_list(fake(arguments)))

        def without_gradients(*values: Any) -> Any:
            names = [leaf.name for leaf in leaves(taken)]
            refuse_gradients(name, ((n, v) for n, v in zip(names, values, strict=False) if isinstance(v, torch.Tensor)))
            with torch._C._AutoDispatchBelowAutograd():
                return custom_op(*values)

        lib = library(namespace)
        qualified = f"{name}.{suffix}" if suffix else name
        lib.define(schema(qualified, taken, written, outputs))
        lib.impl(qualified, run, "CompositeExplicitAutograd")
        lib.impl(qualified, without_gradients, "Autograd")
        lib.impl(qualified, run_fake, "Meta")
        custom_op: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), suffix or "default")
        return custom_op

    needed = [p for p, avoid in zip(parameters, avoidable, strict=True) if not avoid]
    functional = overload("", needed)
    writing = overload("out", parameters) if any(avoidable) else functional

    def choose(arguments: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        if any(avoid and argument is not None for avoid, argument in zip(avoidable, arguments, strict=True)):
            return writing, spread(name, parameters, arguments)
        kept = [argument for avoid, argument in zip(avoidable, arguments, strict=True) if not avoid]
        return functional, spread(name, needed, kept)

    def lowered(*values: Any) -> Any:
        *arguments, override, solution = values
        custom_op, flat = choose(arguments)
        made = as_list(custom_op(*flat, override, solution))
        return from_list(merge_outputs([arguments[i] for i in out_positions], made))

    return Lowering(lowered, choose)
