"""Source text for generated functions: how they read an operator's arguments.

The functions are generated because attribute reads dominate the cost of a call: a loop over the parameters would double it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base.parameters import Kind, Parameter


def attribute_of(holder: Parameter, field: Parameter) -> str:
    """Source that reads an attribute. An OBJECT argument may be of any class, so it may lack an attribute that has a default."""
    if field.required or holder.kind is not Kind.OBJECT:
        return field.name
    return f"getattr({holder.name}, {field.attribute!r}, _default_{field.identifier})"


def default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The default values of options and attributes, under their names in the source."""
    every = [field for parameter in parameters for field in (parameter, *parameter.fields)]
    return {f"_default_{p.identifier}": p.default for p in every if not p.required}


def tensor_reads(parameters: Sequence[Parameter]) -> list[tuple[str, str]]:
    """For each tensor, source that reads it, and source that tests whether it is absent; the latter is empty if it never is."""
    found = []
    for parameter in parameters:
        for tensor in parameter.tensors():
            read = tensor.name if tensor is parameter else attribute_of(parameter, tensor)
            absences = [f"{p} is None" for p, may in ((parameter.name, parameter.optional), (read, tensor.optional)) if may]
            found.append((read, " or ".join(dict.fromkeys(absences))))
    return found


class Option(NamedTuple):
    """How generated source reads an option.

    Attributes:
        read: source that reads it.
        key: source of its key, which is equal for equal options of the same type, and different otherwise.
        absent: source that tests whether the option's object is absent; empty if the option has no object or the object is
            required.
        default: name of its default in the source; empty if there is none.
        lasting: whether an identical object always is an equal option. False for resources.
    """

    read: str
    key: str
    absent: str = ""
    default: str = ""
    lasting: bool = True

    def unless_absent(self, source: str) -> str:
        return f"None if {self.absent} else {source}" if self.absent else source


def option_reads(parameters: Sequence[Parameter]) -> list[Option]:
    """Every input of a decision that is compared by value: all but tensors, hints and bounds."""
    found = []
    for parameter in parameters:
        absent = f"{parameter.name} is None" if parameter.optional else ""
        if parameter.kind is Kind.VALUE and not parameter.bound:
            found.append(_value_read(parameter, parameter.name))
        elif parameter.kind is Kind.RESOURCE:
            found.append(Option(parameter.name, f"(type({parameter.name}), {parameter.name}.key)", absent, lasting=False))
        elif parameter.kind is Kind.OBJECT:
            attributes = [_value_read(field, attribute_of(parameter, field)) for field in parameter.fields if not field.is_tensor]
            found += [option._replace(absent=absent) for option in attributes]
    return [*found, Option("override", "override"), Option("solution", "solution")]


def _value_read(parameter: Parameter, read: str) -> Option:
    """The key of an option includes its type; a tuple's key includes its elements' types. A dtype and a frozen dataclass equal no
    value of another type, so their keys need no type."""
    if tuple in parameter.types:
        key = f"({read}, {read} and tuple(map(type, {read})))"
    elif parameter.fields or parameter.types == (torch.dtype,):
        key = read
    else:
        key = f"(type({read}), {read})"
    return Option(read, key, default="" if parameter.required else f"_default_{parameter.identifier}")


def absences(parameters: Sequence[Parameter]) -> list[str]:
    """Tests for the absence of inputs that a decision does not compare by value: tensors, their objects, hints and bounds."""
    found = [absent for _, absent in tensor_reads(parameters) if absent]
    for parameter in parameters:
        if parameter.kind is Kind.HINT or (parameter.optional and (parameter.bound or parameter.kind is Kind.OBJECT)):
            found += [f"{parameter.name} is None"]
    return list(dict.fromkeys(found))


def key_terms(parameters: Sequence[Parameter], written: Sequence[str]) -> str:
    """Source of the whole description, the memo's key.

    The key includes strides if the caller provides memory to write to, because they decide whether tensors overlap. A tensor's
    class distinguishes fake, distributed and quantised tensors from plain ones.
    """
    tensors = tensor_reads(parameters)
    terms = []
    for read, absent in tensors:
        key = f"type({read}), {read}.dtype, {read}.shape, {read}.device, {read}.layout"
        terms.append(f"None if {absent} else ({key})" if absent else key)
    strides = ", ".join(f"None if {absent} else {read}.stride()" if absent else f"{read}.stride()" for read, absent in tensors)
    given = " and ".join(f"{name} is None" for name in written)
    if given:
        terms.append(f"None if {given} else ({strides},)")
    terms += [f"({absent})" for absent in absences(parameters)]
    for option in option_reads(parameters):
        # Most calls leave most options at their defaults, so identity with the default is tested first.
        key = f"{option.default} if {option.read} is {option.default} else {option.key}" if option.default else option.key
        terms.append(option.unless_absent(f"({key})"))
    return ", ".join(terms)


def bounds_of(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.bound]


def within_terms(parameters: Sequence[Parameter]) -> list[str]:
    """Tests that a call's bounds are within the limits of a decision."""
    return [
        (f"({p.name} is None or " if p.optional else "(") + f"type({p.name}) is int and _least_{i} <= {p.name} <= _most_{i})"
        for i, p in enumerate(bounds_of(parameters))
    ]


def limit_names(parameters: Sequence[Parameter]) -> str:
    return "".join(f"_least_{i}, _most_{i}, " for i in range(len(bounds_of(parameters))))
