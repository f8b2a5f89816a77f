"""An operator's parameters, parsed from its signature.

The memo key, the type checks and the schema for torch.compile are derived from these descriptions.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.checks import describe, unusual_storage
from tokenspeed_kernel_base.resources import Resource

_FLOAT32_MAX = torch.finfo(torch.float32).max
_INT64 = torch.iinfo(torch.int64)

# Sequences have fewer tokens than this. So kernels can add a smaller value to an int32 position, or subtract it, without overflow.
NO_LIMIT = 1 << 30


class Kind(enum.Enum):
    TENSOR = "tensor"
    OBJECT = "object"  # holds tensors in named attributes; any object with the required attributes is accepted, also a resource
    VALUE = "value"  # hashable: number, flag, string, dtype, frozen dataclass of these
    HINT = "hint"  # a tensor's values on the host: checked and passed on; kernels may ignore them, and decisions ignore them
    RESOURCE = "resource"  # outlives the call, see `tokenspeed_kernel_base.resources`; its class and ``key`` enter the memo key


HOLD_TENSORS = (Kind.TENSOR, Kind.OBJECT)


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operator, or one attribute of a parameter that is an object.

    Attributes:
        name: the name in the signature; ``object.attribute`` for an attribute of an OBJECT or of a frozen dataclass.
        kind: the kind of the parameter, which determines how its arguments are treated.
        types: the classes that a value may have.
        optional: whether None is allowed.
        default: the default of the signature or of the dataclass's field; `inspect.Parameter.empty` if there is none.
        fields: the attributes of an OBJECT, or of a VALUE that is a dataclass.
        cls: the dataclass that ``fields`` belong to.
        bound: whether the parameter is an integer that bounds a size. A decision holds for a range of its values.
        unlimited: whether the parameter is an integer for which -1, and every value from `NO_LIMIT` on, means no limit.
        remedy: the end of the error message for a value of a wrong type, which says what to pass; may be empty.
    """

    name: str
    kind: Kind
    types: tuple[type, ...]
    optional: bool
    default: Any = inspect.Parameter.empty
    fields: tuple[Parameter, ...] = ()
    cls: type | None = None
    bound: bool = False
    unlimited: bool = False
    remedy: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.kind is Kind.TENSOR

    @property
    def identifier(self) -> str:
        """The name as a Python identifier: the dot between object and attribute is replaced by ``_``."""
        return self.name.replace(".", "_")

    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def attribute(self) -> str:
        """The attribute's own name, without its object's name."""
        return self.name.partition(".")[2]

    def read(self, holder: Any) -> Any:
        """Reads this attribute of an object. Returns the default if there is one and the object lacks the attribute."""
        return getattr(holder, self.attribute) if self.required else getattr(holder, self.attribute, self.default)

    def tensors(self) -> tuple[Parameter, ...]:
        """The tensors of this parameter: the parameter itself, or its attributes that are tensors."""
        if self.kind is Kind.TENSOR:
            return (self,)
        return tuple(field for field in self.fields if field.is_tensor) if self.kind is Kind.OBJECT else ()

    def type_error(self, value: Any) -> str | None:
        """Returns the expected type in words, for an error message; None if the value has this type."""
        if value is None:
            return None if self.optional else self._expected()
        if self.kind is Kind.HINT:
            if isinstance(value, torch.Tensor):
                return None if torch.Tensor in self.types else self._expected()
            return None if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else self._expected()
        if self.kind is Kind.TENSOR and isinstance(value, torch.Tensor):
            unusual = unusual_storage(value)
            return f"{self._expected()} of dense storage (torch.strided, not quantized)" if unusual else None
        if self.kind is Kind.OBJECT:
            missing = [f.attribute for f in self.fields if f.required and not hasattr(value, f.attribute)]
            return f"an object with {', '.join(missing)}" if missing else None
        if isinstance(value, bool) and bool not in self.types:
            return self._expected()
        if tuple in self.types and isinstance(value, tuple):
            ints = all(isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool) for v in value)
            return None if ints else self._expected()
        if isinstance(value, self.types) or (float in self.types and isinstance(value, int)):
            return None
        if int in self.types and isinstance(value, torch.SymInt):
            return None
        return self._expected()

    def range_error(self, value: Any) -> str | None:
        """Returns the expected range in words, for an error message; None if each number in the value fits the int64 or float32
        that kernels receive."""
        if float in self.types and isinstance(value, (int, float)):
            if isinstance(value, float) and not math.isfinite(value):
                return None  # the operator decides whether infinities and NaN have a meaning
            return None if -_FLOAT32_MAX <= value <= _FLOAT32_MAX else f"a float within ±{_FLOAT32_MAX:.3g}"
        if isinstance(value, int):
            given: tuple[Any, ...] = (value,)
        elif isinstance(value, tuple) and tuple in self.types:
            given = value
        else:
            return None
        fits = all(_INT64.min <= number <= _INT64.max for number in given if isinstance(number, int))
        return None if fits else "within the range of int64"

    def normal(self, value: Any) -> Any:
        """Converts a value of the right type to the form that kernels receive. An int for a float option becomes a float. An
        `unlimited` value from `NO_LIMIT` on becomes -1.
        """
        if self.kind is not Kind.VALUE or value is None:
            return value
        if self.fields:
            read = {field.attribute: field.read(value) for field in self.fields}
            made = {field.attribute: field.normal(read[field.attribute]) for field in self.fields}
            changed = {name: new for name, new in made.items() if new is not read[name]}
            return dataclasses.replace(value, **changed) if changed else value
        if float in self.types and isinstance(value, int):
            return float(value)
        return -1 if self.unlimited and value >= NO_LIMIT else value

    def _expected(self) -> str:
        spelled = {torch.Tensor: "a tensor", torch.dtype: "a torch.dtype", tuple: "tuple of int"}
        if self.kind is Kind.HINT:
            spelled[Sequence] = "a sequence of int"
        *others, last = [*(spelled.get(t, t.__name__) for t in self.types), *["None"] * self.optional]
        return f"{', '.join(others)} or {last}" if others else last


def parse_parameters(
    function: Callable[..., Any], hints: Iterable[str] = (), bounds: Iterable[str] = (), unlimited: Iterable[str] = ()
) -> tuple[Parameter, ...]:
    """The parameters of an operator's body. ``hints``, ``bounds`` and ``unlimited`` name the parameters with these roles.

    Raises:
        TypeError: a parameter has no annotation or an unsupported one.
    """
    annotations = resolved_annotations(function)
    hinted, bounding, limiting = set(hints), set(bounds), set(unlimited)
    parsed = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"{function.__qualname__}({parameter.name})"
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{where}: an operator's parameters are positional-or-keyword")
        if parameter.name not in annotations:
            raise TypeError(f"{where} needs an annotation")
        made = _parse(parameter.name, annotations[parameter.name], parameter.default, parameter.name in hinted, where)
        if made.name in bounding:
            if made.kind is not Kind.VALUE or made.types != (int,):
                raise TypeError(f"{where}: a bound must be annotated as int or int | None")
            made = dataclasses.replace(made, bound=True)
        if made.name in limiting:
            if made.bound or made.types != (int,):
                raise TypeError(f"{where}: a parameter in unlimited= must be annotated as int, and must not be in bounds=")
            made = dataclasses.replace(made, unlimited=True)
        parsed.append(made)
    return tuple(parsed)


@functools.cache
def _compiled(annotation: str) -> types.CodeType:
    return compile(annotation, "<annotation>", "eval")


@functools.cache
def resolved_annotations(owner: Any) -> dict[str, Any]:
    """Returns the annotations of a function or class, evaluated if the module postpones their evaluation.

    Like `typing.get_type_hints`, but each annotation text is compiled once. Repeated compilation would dominate the import time of
    the operators.
    """
    names = vars(sys.modules[owner.__module__]) if isinstance(owner, type) else owner.__globals__
    return {
        name: eval(_compiled(told), names) if isinstance(told, str) else told  # the text comes from this project's own source
        for name, told in owner.__annotations__.items()
    }


def _parse(name: str, annotation: Any, default: Any, hint: bool, where: str) -> Parameter:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    optional = type(None) in members
    classes = tuple(typing.get_origin(m) or m for m in members if m is not type(None) and m is not None)
    if hint:
        return Parameter(name, Kind.HINT, classes, optional, default)
    if not all(isinstance(c, type) for c in classes):
        raise TypeError(f"{where}: cannot handle the annotation {annotation}")
    if classes == (torch.Tensor,):
        return Parameter(name, Kind.TENSOR, classes, optional, default)
    if len(classes) == 1 and not issubclass(classes[0], Resource) and dataclasses.is_dataclass(classes[0]):
        cls: Any = classes[0]
        fields = fields_of(name, cls)
        kind = Kind.OBJECT if any(f.is_tensor for f in fields) else Kind.VALUE
        remedy = f": pass a {cls.__name__}" if kind is Kind.OBJECT else ""
        return Parameter(name, kind, classes, optional, default, fields, cls, remedy=remedy)
    if len(classes) == 1 and issubclass(classes[0], Resource):
        return Parameter(name, Kind.RESOURCE, classes, optional, default)
    if any(issubclass(c, Resource) for c in classes):
        raise TypeError(f"{where}: a resource cannot be in a union with anything but None, got {annotation}")
    if torch.Tensor in classes:
        raise TypeError(f"{where}: a tensor cannot be in a union with another type, got {annotation}; use hints= or two parameters")
    return Parameter(name, Kind.VALUE, classes, optional, default)


def fields_of(name: str, cls: Any) -> tuple[Parameter, ...]:
    """The fields of a dataclass, as parameters whose names start with ``name``."""
    annotations = resolved_annotations(cls)
    return tuple(
        _parse(f"{name}.{f.name}", annotations[f.name], _default_of(f), False, f"{cls.__qualname__}.{f.name}")
        for f in dataclasses.fields(cls)
        if f.init
    )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def check_types(operator: str, parameters: Iterable[Parameter], arguments: dict[str, Any]) -> None:
    """Raises TypeError for an argument of a wrong type, and ValueError for a number outside the range of int64 or float32."""
    for parameter in parameters:
        value = arguments[parameter.name]
        _check_type(operator, parameter, value)
        for field in parameter.fields if value is not None else ():
            _check_type(operator, field, field.read(value))


def _check_type(operator: str, parameter: Parameter, value: Any) -> None:
    for expected, error in ((parameter.type_error, TypeError), (parameter.range_error, ValueError)):
        wanted = expected(value)
        if wanted is not None:
            remedy = parameter.remedy if expected == parameter.type_error else ""
            raise error(f"{operator}: {parameter.name} must be {wanted}, got {kind_of(value)}{remedy}")


def kind_of(value: Any) -> str:
    return f"{describe(value)}" if isinstance(value, (torch.Tensor, torch.dtype)) else f"{type(value).__name__} {describe(value)}"


def tensor_arguments(parameters: Iterable[Parameter], arguments: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, with its name."""
    found = []
    for parameter in parameters:
        value = arguments[parameter.name]
        if value is None or parameter.kind not in HOLD_TENSORS:
            continue
        for tensor in parameter.tensors():
            inner = value if tensor is parameter else tensor.read(value)
            if inner is not None:
                found.append((tensor.name, inner))
    return found


def options_given(parameters: Iterable[Parameter], arguments: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that a call sets to a value other than the default. Excludes hints and bounds, which a kernel may always
    ignore.
    """

    def left(parameter: Parameter) -> bool:
        value, default = parameter.normal(arguments[parameter.name]), parameter.default
        return value is default or (parameter.kind is Kind.VALUE and type(value) is type(default) and bool(value == default))

    optional = (p for p in parameters if not p.required and not p.bound and p.kind is not Kind.HINT)
    return frozenset(p.name for p in optional if not left(p))


def with_tensors(
    parameters: Iterable[Parameter], arguments: Mapping[str, Any], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The arguments of a call, with each tensor replaced by ``convert(tensor)``, including tensors in the fields of objects and in
    resources."""
    converted = dict(arguments)
    for parameter in parameters:
        value = arguments[parameter.name]
        if value is None:
            continue
        if parameter.is_tensor:
            converted[parameter.name] = convert(value)
        elif parameter.kind is Kind.RESOURCE:
            converted[parameter.name] = value.converted(convert)
        elif parameter.kind is Kind.OBJECT:
            assert parameter.cls is not None
            inner = {f.attribute: f.read(value) for f in parameter.fields}
            inner = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
            converted[parameter.name] = parameter.cls(**inner)
    return converted


def on_meta(parameters: Iterable[Parameter], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with meta tensors in place of its tensors. The shapes of outputs are computed from meta tensors,
    without allocating memory.
    """
    kept = {p.name: arguments[p.name] for p in parameters if p.kind is Kind.RESOURCE}  # hooks read no tensors of resources
    return {
        **with_tensors(
            (p for p in parameters if p.name not in kept),
            arguments,
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        ),
        **kept,
    }


def resources_given(parameters: Iterable[Parameter], arguments: Mapping[str, Any]) -> list[tuple[str, Resource]]:
    """Every resource among the arguments, with its parameter's name, including resources passed for OBJECT parameters."""
    return [(p.name, arguments[p.name]) for p in parameters if isinstance(arguments[p.name], Resource)]


def resource_arguments(parameters: Iterable[Parameter], arguments: Mapping[str, Any]) -> list[tuple[str, Resource]]:
    """The argument of every RESOURCE parameter, with the parameter's name. Resources passed for OBJECT parameters are left out."""
    named = ((p.name, arguments[p.name]) for p in parameters if p.kind is Kind.RESOURCE)
    return [(name, resource) for name, resource in named if resource is not None]
