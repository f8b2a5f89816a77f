"""Which kernel serves which operator: recording the selections of a model's calls, and running all operators by reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpt_oss.model import GptOss
from tokenspeed_kernel import Explanation, KernelRegistry, kernel_override, operators


@dataclass
class Heard:
    """An operator that was called, and the kernel that served it.

    Attributes:
        explanation: the selection of the first such call.
        calls: how many such calls there were.
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
        """Why this kernel was chosen and the others were not, in short. The explanation has the reasons in full."""
        verdicts = self.explanation.verdicts
        if self.explanation.chosen is None:
            return self.explanation.problem
        if len(verdicts) == 1:
            return f"{verdicts[0].reason}; the only kernel here"
        parts = [verdicts[0].reason]
        parts += [f"preferred to {v.spec.name} ({v.reason})" for v in verdicts[1:] if v.accepted]
        for gate in dict.fromkeys(v.gate for v in verdicts if not v.accepted):
            parts.append(f"ruled out by {gate}: " + ", ".join(v.spec.name for v in verdicts if v.gate == gate))
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "kernel": self.kernel,
            "calls": self.calls,
            "why": self.why,
            "explanation": self.explanation.to_dict(),
        }


class Listener:
    """Looks operators up in ``ops`` and records which kernel each call selects. That makes every call slower."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._heard: dict[tuple[str, str], Heard] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if not hasattr(function, "operator"):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            heard = Heard(function.explain(*args, **kwargs))
            self._heard.setdefault((heard.operator, heard.kernel), heard).calls += 1
            return function(*args, **kwargs)

        return call

    def heard(self) -> list[Heard]:
        """One entry for each pair of operator and kernel, sorted by name."""
        return [self._heard[key] for key in sorted(self._heard)]


@contextlib.contextmanager
def listen(model: GptOss) -> Iterator[Listener]:
    """Records the model's operator calls inside the block."""
    listener = Listener(model.ops)
    before, model.ops = model.ops, listener
    try:
        yield listener
    finally:
        model.ops = before


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Makes the reference serve every operator inside the block, in this thread.

    A model that runs in the block must be made in it too, because experts are prepared for the kernel that will serve them.
    """
    registry = KernelRegistry.get()
    with contextlib.ExitStack() as stack:
        for op in operators():
            for spec in registry.get_for_operator(op.family, op.mode):
                if spec.solution == "reference":
                    stack.enter_context(kernel_override(op.family, op.mode, spec.name))
        yield
