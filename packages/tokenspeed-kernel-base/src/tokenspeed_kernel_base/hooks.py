"""An operator's hooks: functions that derive properties of a call which options alone cannot express."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tokenspeed_kernel_base.options import Options
from tokenspeed_kernel_base.parameters import parse_parameters

Hook = TypeVar("Hook", bound=Callable[..., Any])

HOOKS = (
    "traits", "check", "check_values", "formats", "fake", "outputs", "cases", "cost", "work", "vary", "intermediates", "decoded",
    "plan", "prepare",
)  # fmt: skip

# ``@function.<name>`` declares these hooks. From then on, the attribute ``function.<name>`` is the function that users call.
STEPS = ("plan", "prepare")

# Hooks that also run when a plan is made.
_PLANNED_HOOKS = frozenset({"traits", "formats"})

# These hooks' results must hold for a whole range of a bound's values, so these hooks cannot have a bound as a parameter.
_UNBOUNDED_HOOKS = frozenset({"traits", "formats", "fake", "outputs"})


class Declaration(Options):
    """An operator's options, body and hooks.

    Attributes:
        body: the PyTorch function that defines what the operator computes. The body ignores outputs that the caller provides.
        parameters: parsed from the body's signature.
        names: names of the parameters.
        host_values: tensors whose values the ``check_values`` hook reads.
        function: the function that users call.
    """

    function: Any

    def __init__(self, options: Options, body: Callable[..., Any]) -> None:
        super().__init__(**vars(options))
        self.outs = tuple(out for out in self.outs if out in body.__annotations__)
        self.body = body
        parameters = parse_parameters(body, self.hints, self.bounds, self.unlimited)
        remedy = f": pass what {self.mode}.plan returns"
        self.parameters = tuple(dataclasses.replace(p, remedy=remedy) if p.name == self.planned else p for p in parameters)
        self.check_options(body, self.parameters)
        self.names = tuple(p.name for p in self.parameters)
        self.host_values: tuple[str, ...] = ()
        self._by_name = {p.name: p for p in self.parameters}
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._wanted: dict[str, tuple[str, ...]] = {}

    def hook_adder(self, name: str) -> Callable[[Hook], Hook]:
        """The decorator that adds a hook, as an attribute of the operator's function. Only the module that declares the operator
        may add hooks, because a hook changes the meaning of every call."""

        def add(hook: Hook) -> Hook:
            self._refuse_strangers(name)
            self._add_hook(name, hook)
            if name in STEPS:
                setattr(self.function, name, getattr(self.function.caller, name))
            return hook

        return add

    def add_check_values(self, *, host: Iterable[str]) -> Callable[[Hook], Hook]:
        """The decorator that adds the ``check_values`` hook; ``host`` names the tensors whose values the hook reads."""
        self._refuse_strangers("check_values")

        def add(hook: Hook) -> Hook:
            self._add_hook("check_values", hook)
            self.host_values = tuple(host)
            return hook

        return add

    def _refuse_strangers(self, name: str) -> None:
        module = sys._getframe(2).f_globals.get("__name__")
        if module != self.body.__module__:
            raise TypeError(f"{self}: its {name} hook is declared in {self.body.__module__}, and {module} cannot add one")

    def _add_hook(self, name: str, hook: Callable[..., Any]) -> None:
        if name in self._hooks:
            raise TypeError(f"{self}: its {name} hook is declared twice")
        leading = 1 if name in ("check", "check_values", "vary", "plan", "prepare") else 0
        code = hook.__code__
        takes_all = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        wanted = self.names if takes_all else code.co_varnames[leading : code.co_argcount + code.co_kwonlyargcount]
        if name in STEPS and self.planned is None:
            raise TypeError(f"{self}: a {name} hook needs planned=, the name of the parameter that takes the plan")
        if name == "plan":  # takes facts about later calls, and no arguments of a call
            self._hooks[name] = hook
            for other in _PLANNED_HOOKS & self._wanted.keys():
                self._check_plan_alone(other, self._wanted[other])
            return
        if name == "formats" and not isinstance(self.formats, Mapping):
            raise TypeError(f"{self}: it has a formats hook, so formats= must be a dict: the names of each operand's formats")
        unknown = set(wanted) - set(self.names)
        if unknown:
            raise TypeError(f"{self}: its {name} hook asks for {', '.join(sorted(unknown))}, which are not parameters")
        if "plan" in self._hooks and name in _PLANNED_HOOKS:
            self._check_plan_alone(name, wanted)
        if name == "prepare" and (len(wanted) != 2 or wanted[1] != self.planned):
            raise TypeError(f"{self}: its prepare hook must ask for what is to be prepared, and then for {self.planned}")
        bounds = set(wanted) & set(self.bounds)
        if bounds and name in _UNBOUNDED_HOOKS:
            raise TypeError(f"{self}: its {name} hook asks for {', '.join(sorted(bounds))}, which only bound a size")
        self._hooks[name], self._wanted[name] = hook, wanted

    def _check_plan_alone(self, name: str, wanted: Iterable[str]) -> None:
        if set(wanted) != {self.planned}:
            raise TypeError(f"{self}: its {name} hook must ask for {self.planned} alone, because plans are made by it, too")

    def run_hook(self, name: str, arguments: Mapping[str, Any], *leading: Any) -> Any:
        """Calls a declared hook with the arguments that it names. The hook gets options in the form that kernels receive. Returns
        None if the operator has no such hook."""
        hook = self._hooks.get(name)
        return None if hook is None else hook(*leading, **{n: self._by_name[n].normal(arguments[n]) for n in self._wanted[name]})

    def has_hook(self, name: str) -> bool:
        return name in self._hooks
