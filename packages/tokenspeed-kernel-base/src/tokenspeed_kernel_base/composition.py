"""Operators whose bodies call other operators.

Such a body says what several steps give together: a normalisation and the product that reads it, say. A kernel may do them all in
one launch. Where none does, the body itself runs, and each operator that it calls, a *part*, is dispatched to its best kernel. So
the operator is right everywhere at once, and model code that calls it need not know which kernels there are.

::

    @operator("gemm", "mm_add", formats=("a", "b"), composed=True)
    def mm_add(a: Tensor, b: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        return mm(a, b) + residual

From it follow two kernels. ``reference_mm_add`` runs the body with the reference of each part; fused kernels are measured against
it. ``composed_mm_add`` runs it with the parts' best kernels, and ranks below every other kernel of the operator but the reference.

A composed kernel costs a call no more than its parts would, called one by one. What the operator was called with, its
description, settles shapes, dtypes and options of all parts. So each is decided when the body first runs for a description, and
then called directly. For that the body is compiled a second time, with a name of its own in the place of each part that stands
outside of loops and nested functions; parts within those are looked up at every call, as are parts with bounds.

A body must give its parts arguments whose shapes, dtypes and options follow from the description: no branch of it may depend on
values. Its results are contiguous tensors of their own, or what its caller provided.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed_kernel_base import lowering

COMPOSED = "composed"

# A part stands for itself; where it can be decided once, ``decide`` gives what to call from then on, or None to ask again.
Decide = Callable[[Any, tuple[Any, ...]], tuple[Callable[..., Any], bool]]

_NESTED = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.FunctionDef)


class _Sites(ast.NodeTransformer):
    """Gives each part a name of its own, and its arguments in the order of the operator's parameters.

    Attributes:
        parts: the operators' functions, by these names.
        defaults: values of arguments that are left out, by name.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self.parts: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, _NESTED) else super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        super().generic_visit(node)
        function = self._body.__globals__.get(node.func.id) if isinstance(node.func, ast.Name) else None
        op = getattr(function, "operator", None)
        if op is None or not hasattr(function, "caller"):
            return node
        where = f"{self._body.__module__}.{self._body.__qualname__}"
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise TypeError(f"{where}: {op.mode} must be called with arguments one by one, so that they can be put in order")
        given = dict(zip(op.names, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
        unknown = sorted(given.keys() - set(op.names))
        missing = [p.name for p in op.parameters if p.required and p.name not in given]
        if unknown or missing or len(node.args) > len(op.names):
            raise TypeError(
                f"{where}: {op.mode} is called with arguments that are not its own, or without some: {unknown + missing}"
            )
        site = f"_part_{len(self.parts)}_{op.mode}"
        self.parts[site] = function
        ordered = []
        for parameter in op.parameters:
            if parameter.name in given:
                ordered.append(given[parameter.name])
                continue
            default = f"_default_{op.mode}_{parameter.name}"
            self.defaults[default] = parameter.default
            ordered.append(ast.Name(default, ast.Load()))
        return ast.copy_location(ast.Call(ast.Name(site, ast.Load()), ordered, []), node)


class Composition:
    """The body of an operator that is composed of others.

    Args:
        body: it. Its source must be at hand.

    Attributes:
        parts: the operators that it calls, in order, those in loops aside.

    Raises:
        TypeError: it calls no operator, or one in a way that says not which argument is which.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        filename, first = body.__code__.co_filename, body.__code__.co_firstlineno
        lines, _ = inspect.getsourcelines(body)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list, function.returns = [], None
        for argument in function.args.args:
            argument.annotation = None
        function.args.defaults = []  # all arguments are given
        sites = _Sites(body)
        function.body = [sites.visit(statement) for statement in function.body[ast.get_docstring(function) is not None :]]
        if not sites.parts:
            raise TypeError(f"{body.__module__}.{body.__qualname__} is said to be composed, and calls no operator outside of loops")
        ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
        linecache.checkcache(filename)  # tracebacks show the lines of the body itself
        self._code = compile(tree, filename, "exec")
        self._sites, self._defaults = sites.parts, sites.defaults
        self.parts = tuple(function.operator for function in sites.parts.values())

    def with_parts(self, parts: Mapping[str, Callable[..., Any]]) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The body with these in the place of its parts, and the namespace that it finds them in."""
        namespace = {**self._body.__globals__, **self._defaults, **parts}
        exec(self._code, namespace)  # the source is the body's own
        made = namespace[self._body.__name__]
        assert isinstance(made, types.FunctionType)
        return made, namespace

    @functools.cached_property
    def by_reference(self) -> Callable[..., Any]:
        """The body with the reference of each part. Takes all parameters in order."""
        return self.with_parts({name: function.operator.reference for name, function in self._sites.items()})[0]

    def decided(self, decide: Decide) -> Callable[..., Any]:
        """A function for calls of one description: the body, whose parts are decided when it first runs, and then called directly.

        Args:
            decide: gives, for a part's function and its arguments, what to call, and whether that holds for all further calls.
        """

        def undecided(name: str, function: Any) -> Callable[..., Any]:
            def first(*args: Any) -> Any:
                call, lasting = decide(function, args)
                if lasting:
                    namespace[name] = call
                return call(*args)

            return first

        found = {n: f if f.operator.bounds else undecided(n, f) for n, f in self._sites.items()}
        made, namespace = self.with_parts(found)
        return made


class Composed:
    """The kernel that runs an operator's body with the best kernel of each part.

    Args:
        read: gives the body.
        positions: gives, for a call's arguments, where the parameters of its outputs stand, in the outputs' order.
    """

    def __init__(self, read: Callable[[], Composition], positions: Callable[[tuple[Any, ...]], Sequence[int]]) -> None:
        self._read, self._positions = read, positions

    def __call__(self, *args: Any) -> Any:
        """Runs it once, and looks each part up."""
        return self.decided(_ask, args)(*args)

    def decided(self, decide: Decide, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What runs calls like this one; see `Composition.decided`."""
        call = self._read().decided(decide)
        given = [(index, position) for index, position in enumerate(self._positions(args)) if args[position] is not None]
        if not given:
            return call

        def into(*args: Any) -> Any:
            results = lowering.as_list(call(*args))
            for index, position in given:
                if results[index] is not args[position]:
                    args[position].copy_(results[index])
                    results[index] = args[position]
            return lowering.from_list(results)

        return into


def _ask(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], bool]:
    return function, False
