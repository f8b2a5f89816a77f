"""Records which kernel each call of a model selects, and restricts the eligible kernels, for example to the references."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenspeed_kernel
from tokenspeed_kernel import (
    Explanation,
    KernelRegistry,
    current_platform,
    get_operator,
    kernel_override,
    operators,
    watch_calls,
    why_unreachable,
)
from tokenspeed_kernel.workbench.receipts import reasons_of, row_of

_PREFERRED = 19  # the highest priority that a kernel can have


@dataclass
class Heard:
    """One operator and one kernel that was selected for it, with the calls for which it was selected.

    Attributes:
        explanation: the selection of the first of these calls.
        calls: number of these calls.
    """

    explanation: Explanation
    calls: int = 0

    @property
    def operator(self) -> str:
        return self.explanation.request.operator

    @property
    def kernel(self) -> str:
        chosen = self.explanation.chosen
        return chosen.name if chosen is not None else "none"

    @property
    def why(self) -> str:
        """The reasons why this kernel was selected and the next best kernels were not, in a receipt's words. ``explanation`` has
        all reasons.
        """
        row = row_of(self.explanation)
        return "; ".join((row.reason, *reasons_of(row)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "kernel": self.kernel,
            "calls": self.calls,
            "why": self._within_packages(self.why),
            "explanation": self._within_packages(self.explanation.to_dict()),
        }

    def _within_packages(self, value: Any) -> Any:
        """Returns a value of a report in which paths of source files are shortened. Each path begins at its package, so that
        results do not show installation folders.
        """
        if isinstance(value, dict):
            return {key: self._within_packages(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._within_packages(each) for each in value]
        if not isinstance(value, str):
            return value
        specs = [verdict.spec for verdict in self.explanation.verdicts]
        folders = {spec.origin.rpartition(f"/{spec.package}/")[0] for spec in specs} - {""}
        for folder in folders:
            value = value.replace(f"{folder}/", "")
        return value


class Listener:
    """Records which kernel each call of an operator selects. Recording makes every call slower."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], Heard] = {}

    def __call__(self, call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        operator = f"{call.family}.{call.mode}"
        key = (operator, call.kernel)
        if key not in self._heard:
            self._heard[key] = Heard(get_operator(operator).function.explain(**call.arguments))
        self._heard[key].calls += 1
        return run

    def heard(self) -> list[Heard]:
        """Returns one `Heard` for each pair of operator and kernel, sorted by name."""
        return [self._heard[key] for key in sorted(self._heard)]


@contextlib.contextmanager
def listen() -> Iterator[Listener]:
    """Records the calls of operators inside the block, including the calls that operators make to other operators."""
    listener = Listener()
    with watch_calls(listener):
        yield listener


@contextlib.contextmanager
def portable_only() -> Iterator[None]:
    """Inside the block, in every thread, only the core's own kernels are eligible; kernels of vendor packages are not.

    A model that runs in the block must be created in it, because experts are prepared for the selected kernel.
    """
    registry = KernelRegistry.get()
    core = {op.body.__module__.partition(".")[0] for op in operators()} | {tokenspeed_kernel.__name__}
    others = [spec.name for spec in registry.list_kernels() if spec.package not in core]
    registry.publish(others, public=False)
    try:
        yield
    finally:
        registry.publish(others, public=True)


@contextlib.contextmanager
def preferring(names: Sequence[str]) -> Iterator[None]:
    """Gives kernels the highest priority inside the block, in every thread, so that they are selected whenever they are eligible.

    A model that runs in the block must be created in it, because experts are prepared for the selected kernel.

    Raises:
        ValueError: a named kernel does not exist.
    Warns:
        UserWarning: no call in this process can select a named kernel, for example because of the platform.
    """
    registry = KernelRegistry.get()
    unknown = sorted(set(names) - {spec.name for spec in registry.list_kernels()})
    if unknown:
        raise ValueError(f"preferred kernels must be registered, got {unknown[0]!r}: `tokenspeed-kernel ops OP` shows them")
    declared = registry.declarations(names)
    for spec, _ in declared:
        why = why_unreachable(spec.name, spec.operator, current_platform(), by_name=False)
        if why is not None:
            warnings.warn(f"a preferred kernel that no call can select: {why}", stacklevel=3)  # Python shows each warning text once

    def replaced(priority: int | None) -> None:
        for spec, implementation in declared:
            public = registry.is_public(spec.name)
            registry.unregister(spec.name)
            registry.register(spec if priority is None else replace(spec, priority=priority), implementation)
            registry.publish([spec.name], public)

    replaced(_PREFERRED)
    try:
        yield
    finally:
        replaced(None)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Inside the block, in this thread, every operator runs its reference.

    A model that runs in the block must be created in it, because experts are prepared for the selected kernel.
    """
    registry = KernelRegistry.get()
    with contextlib.ExitStack() as stack:
        for op in operators():
            for spec in registry.get_for_operator(op.family, op.mode):
                if spec.solution == "reference":
                    stack.enter_context(kernel_override(op.family, op.mode, spec.name))
        yield
