"""Deprecated names of operators and their steps: functions that warn, and call the replacement. A deprecated name stays for one
release."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from tokenspeed_kernel_base.operator import get_operator


def deprecated_operator(
    name: str,
    function: Any,
    parameter: str,
    make: Callable[..., Any],
    *,
    without: Collection[str] = (),
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Makes a function with the signature of a removed operator. In the operator that replaces it, the removed operator's options
    are attributes of one parameter.

    The made function takes the required parameters of ``make`` in place of that parameter. The optional parameters of ``make`` come
    before the outputs.

    Args:
        name: the deprecated name.
        function: the operator that replaces the removed one.
        parameter: the replacing operator's parameter whose value ``make`` constructs.
        make: constructs the parameter's value; a class or a function.
        without: parameters of the replacing operator or of ``make`` that the removed operator did not have. The made function
            leaves them at their defaults.
        fixed: values that the made function passes for parameters that the removed operator did not have.

    Returns:
        A plain function with the old signature and the keywords ``override`` and ``solution``. The function warns
        DeprecationWarning at its first call.
    """
    op = function.operator
    missing = {*without, *fixed}
    own = [p for p in inspect.signature(make, eval_str=True).parameters.values() if p.name not in missing]
    options = [p for p in own if p.default is not p.empty]
    signature, parameters = inspect.signature(function), list[inspect.Parameter]()
    for each in signature.parameters.values():
        if each.name == op.outs[0]:
            parameters += options
        if each.name == parameter:
            parameters += [p for p in own if p.default is p.empty]
        elif each.name not in missing:
            parameters.append(each)
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    made = {p.name for p in own}
    instead = ", ".join([f"{make.__qualname__}(...)", *(f"{option}={value}" for option, value in fixed.items())])
    said = f"use {op.mode}(..., {instead})"
    warned = False

    def alias(*args: Any, override: str | None = None, solution: str | None = None, **keywords: Any) -> Any:
        nonlocal warned
        if not torch.compiler.is_compiling() and not warned:
            warned = True
            warnings.warn(f"{name} is deprecated: {said}", DeprecationWarning, stacklevel=2)
        given = {**dict(zip(names, args, strict=False)), **keywords}
        if len(args) > len(names) or len(given) < len(args) + len(keywords) or any(each not in names for each in given):
            raise TypeError(f"{name} takes {', '.join(names)}, each at most once; got {len(args)} and {', '.join(keywords)}")
        value = make(**{each: given.pop(each) for each in made if each in given})
        return function(**given, **fixed, **{parameter: value}, override=override, solution=solution)

    alias.__name__ = alias.__qualname__ = name
    alias.__doc__ = f"Deprecated: {said}."
    alias.__signature__ = inspect.Signature(parameters, return_annotation=signature.return_annotation)  # type: ignore[attr-defined]
    return alias


def deprecated_step(name: str, instead: str) -> Callable[..., Any]:
    """Makes a function with a deprecated name that warns DeprecationWarning and calls ``instead``, a step of an operator:
    ``"moe_apply.plan"``."""
    mode, _, step = instead.partition(".")
    current: Callable[..., Any] = getattr(get_operator(mode).function, step)

    @functools.wraps(current)
    def alias(*args: Any, **keywords: Any) -> Any:
        warnings.warn(f"{name} is deprecated: use {instead}", DeprecationWarning, stacklevel=2)
        return current(*args, **{"called": name, **keywords})

    return alias
