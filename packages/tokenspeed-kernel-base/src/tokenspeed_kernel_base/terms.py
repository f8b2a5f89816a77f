"""Source text of what functions generated from an operator's parameters read of their arguments.

The functions are generated because reading attributes is most of what a call costs: a loop over the parameters would double it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base.parameters import Kind, Parameter


def attribute_of(holder: Parameter, field: Parameter) -> str:
    """Source that reads an attribute. Any object passes for an OBJECT, so an attribute with a default may be absent."""
    if field.required or holder.kind is not Kind.OBJECT:
        return field.name
    return f"getattr({holder.name}, {field.attribute!r}, _default_{field.identifier})"


def default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The defaults of options, and of attributes, by the names that the source has for them."""
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
    """How an option is read.

    Attributes:
        read: source that reads it.
        told: source of a value that it shares with the options that it is equal to and no other.
        absent: source of a test whether the object that it is an attribute of is absent; empty where there is none.
        default: the name of its default; empty where there is none.
        lasting: whether the same object is the same option for ever.
    """

    read: str
    told: str
    absent: str = ""
    default: str = ""
    lasting: bool = True

    def unless_absent(self, source: str) -> str:
        return f"None if {self.absent} else {source}" if self.absent else source


def option_reads(parameters: Sequence[Parameter]) -> list[Option]:
    """Everything but tensors that a decision depends on by its value."""
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
    """An option is told by its type, too; a tuple by those of what it holds. A dtype, and an object of ours, is like no other."""
    if tuple in parameter.types:
        told = f"({read}, {read} and tuple(map(type, {read})))"
    elif parameter.fields or parameter.types == (torch.dtype,):
        told = read
    else:
        told = f"(type({read}), {read})"
    return Option(read, told, default="" if parameter.required else f"_default_{parameter.identifier}")


def absences(parameters: Sequence[Parameter]) -> list[str]:
    """Tests of what is absent of all that a decision does not depend on by its value: tensors and their objects, hints, bounds."""
    found = [absent for _, absent in tensor_reads(parameters) if absent]
    for parameter in parameters:
        if parameter.kind is Kind.HINT or (parameter.optional and (parameter.bound or parameter.kind is Kind.OBJECT)):
            found += [f"{parameter.name} is None"]
    return list(dict.fromkeys(found))


def key_terms(parameters: Sequence[Parameter], written: Sequence[str]) -> str:
    """A whole description. Strides belong to it where the caller provides memory to write to, because whether tensors overlap
    depends on them. The class keeps fake, distributed and quantised tensors apart from plain ones."""
    tensors = tensor_reads(parameters)
    terms = []
    for read, absent in tensors:
        told = f"type({read}), {read}.dtype, {read}.shape, {read}.device, {read}.layout"
        terms.append(f"None if {absent} else ({told})" if absent else told)
    strides = ", ".join(f"None if {absent} else {read}.stride()" if absent else f"{read}.stride()" for read, absent in tensors)
    given = " and ".join(f"{name} is None" for name in written)
    if given:
        terms.append(f"None if {given} else ({strides},)")
    terms += [f"({absent})" for absent in absences(parameters)]
    for option in option_reads(parameters):
        # Most options are left out in most calls, so that the default itself is told first.
        told = f"{option.default} if {option.read} is {option.default} else {option.told}" if option.default else option.told
        terms.append(option.unless_absent(f"({told})"))
    return ", ".join(terms)


def bounds_of(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.bound]


def within_terms(parameters: Sequence[Parameter]) -> list[str]:
    """Tests that the bounds of a call are within what a decision holds for."""
    return [
        (f"({p.name} is None or " if p.optional else "(") + f"type({p.name}) is int and _least_{i} <= {p.name} <= _most_{i})"
        for i, p in enumerate(bounds_of(parameters))
    ]


def limit_names(parameters: Sequence[Parameter]) -> str:
    return "".join(f"_least_{i}, _most_{i}, " for i in range(len(bounds_of(parameters))))
