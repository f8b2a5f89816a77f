"""Operators whose bodies call other operators.

Such a body defines the combined result of several steps: a normalisation and the GEMM that reads it, say. A fused kernel may do
them all in one launch. Without one, the body itself runs, and each operator that it calls, a *part*, is dispatched to its best
kernel. So the operator works everywhere, and model code that calls it need not know which kernels there are.

::

    @operator("gemm", "mm_add", formats=("a", "b"), composed=True)
    def mm_add(a: Tensor, b: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        return mm(a, b) + residual

Two kernels follow from the body. ``reference_mm_add`` runs it with the reference of each part; fused kernels are compared with it.
``composed_mm_add`` runs it with the parts' best kernels, and ranks below every other kernel of the operator except the reference.

A call of a composed kernel costs no more than calls of its parts one by one. The description of the operator's call determines
shapes, dtypes and options of all parts. So each part is decided when the body first runs for a description, and then called
directly. For this purpose the body is compiled a second time, with a separate name for each call of a part outside of loops and
nested functions. Parts inside loops and nested functions are looked up at every call, as are parts with bounds.

A body must give its parts arguments whose shapes, dtypes and options follow from the description: no branch of it may depend on
values. Its results are contiguous tensors of their own, or the outputs that its caller provided.
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

# ``decide(part, arguments)`` returns the function to call, and whether further calls of the same description may reuse it.
Decide = Callable[[Any, tuple[Any, ...]], tuple[Callable[..., Any], bool]]

_NESTED = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.FunctionDef)


class _Sites(ast.NodeTransformer):
    """Gives each part a name of its own, and puts its arguments in the order of the operator's parameters.

    Attributes:
        parts: the parts' operator functions, by these names.
        defaults: default values of omitted arguments, by name.
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
        body: the body. Its source must be available.

    Attributes:
        parts: the operators that it calls, in order, except those in loops and nested functions.

    Raises:
        TypeError: the body calls no operator, or calls one so that its arguments cannot be matched to parameters.
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
        """The body with these functions in place of its parts, and the namespace in which it looks them up."""
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
        """A function for calls of one description: the body, whose parts are decided when it first runs and then called directly.

        Args:
            decide: for a part's function and its arguments, returns the function to call, and whether that holds for all further
                calls.
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
        """Runs the body once, and looks up each part."""
        return self.decided(_ask, args)(*args)

    def decided(self, decide: Decide, args: tuple[Any, ...]) -> Callable[..., Any]:
        """A function that runs calls of this description; see `Composition.decided`."""
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
