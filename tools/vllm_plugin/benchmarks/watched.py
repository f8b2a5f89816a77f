"""Records the logits of a model in vLLM, in the model's process, which may be another one than the benchmark's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


class Watched:
    """Records the model's logits, in the model's process, without synchronising with the device."""

    def __init__(self, model: Any) -> None:
        self.keep = False
        self.logits: list[Any] = []
        self.bad: Any = None
        # Maps a layer's name to the router's logits of each step. Compiled modules do not call hooks, so ``--eager`` is needed.
        self.routing: dict[str, list[Any]] = {}
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            self.look(logits)
            return logits

        model.compute_logits = compute_logits

    def watch_routers(self, model: Any) -> None:
        """Stores the routers' logits in the steps in which the model's logits are stored."""
        for name, module in model.named_modules():
            if name.endswith(".mlp.router"):
                module.register_forward_hook(functools.partial(self.see_routing, self.routing.setdefault(name, [])))

    def see_routing(self, kept: list[Any], module: Any, given: Any, logits: Any) -> None:
        if self.keep:
            kept.append(logits.detach().clone())

    def look(self, logits: Any) -> None:
        """Counts non-finite logits, and stores the logits if requested."""
        bad = (~logits.isfinite()).sum()
        self.bad = bad if self.bad is None else self.bad + bad
        if self.keep:
            self.logits.append(logits.detach().to("cpu"))


def record(model: Any, routers: bool) -> None:
    """Records the model's logits until `write_recorded`; with ``routers``, also its routers'. Runs in the model's process."""
    if not hasattr(model, "recorded"):
        model.recorded = Watched(model)
        if routers:
            model.recorded.watch_routers(model)
    model.recorded.keep = True


def write_recorded(model: Any, folder: Path) -> None:
    """Writes what was recorded since `record` to ``recorded.pt``: logits, and each router's logits by its name, step by step. All
    ranks have the same logits, so only the first one writes. Runs in the model's process.
    """
    import torch

    found: Watched = model.recorded
    found.keep = False
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        routing = {name: [step.cpu() for step in steps] for name, steps in found.routing.items()}
        torch.save({"logits": found.logits, "routing": routing}, folder / "recorded.pt")
    found.logits.clear()
    for steps in found.routing.values():
        steps.clear()
