"""Hooks of ``sglang_engine.py`` in SGLang's scheduler process: random weights, the times of steps, and logits.

SGLang finds `register` by an entry point in ``sglang.srt.plugins``. The files go to the folder that the environment variable `OUT`
names; without this variable, nothing is registered.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "vllm_plugin" / "benchmarks"))

OUT = "SGLANG_BENCHMARK_OUT"
# Files in the folder: the times of steps, and what serves the model. While `KEEP` exists, the logits of each step are stored. While
# `WATCH` exists, logits that are not finite are counted in `BAD`.
STEPS, SERVING, KEEP, WATCH, BAD = "steps", "serving.json", "keep", "watch", "bad"


def register() -> None:
    """Registers the hooks with SGLang."""
    if OUT not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder = Path(os.environ[OUT])
    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", draw_weights, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.process_batch_result", Steps(folder).add, HookType.AFTER)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.sample", Logits(folder).look, HookType.BEFORE)


def draw_weights(model: Any, *_: Any, **__: Any) -> None:
    """Fills a model's parameters in place with the random weights of vLLM's benchmark."""
    import torch

    draw = import_module("random_gpt_oss").draw
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name.replace("_weight_bias", "_bias"), parameter.data)


class Steps:
    """Writes a line for each step of the scheduler: when its result had been processed, its mode, and its number of requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: Any = None

    def add(self, result: None, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Is called after SGLang has processed a step's result."""
        now = time.perf_counter()
        if self.file is None:
            self.file = (self.folder / STEPS).open("a", buffering=1)
            try:
                found = serving(scheduler.tp_worker.model_runner)
            except (AttributeError, ImportError) as error:  # the engine must go on, because its figures are still needed
                found = {"failed": repr(error)}
            (self.folder / SERVING).write_text(json.dumps(found))
        self.file.write(f"{now:.7f} {batch.forward_mode.name} {len(batch.reqs)}\n")


class Logits:
    """Stores or checks the logits from which tokens are drawn."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.bad = folder, 0, 0
        # For each layer, the router's logits of the last step. Graphs call no hooks.
        self.routing: dict[int, Any] | None = None

    def look(self, runner: Any, logits_output: Any, *_: Any, **__: Any) -> None:
        """Is called before SGLang draws a step's tokens. Steps whose logits are stored have one request. Without graphs, the
        experts of the request's last token are stored too, but not those of the first step, before which no hook was registered.
        """
        import torch

        if self.routing is None:
            self.watch_routers(runner.model)
        if (self.folder / KEEP).exists():
            part = self.folder / "logits.part"
            torch.save({"logits": logits_output.next_token_logits.detach().cpu(), **self.experts(runner)}, part)
            part.rename(self.folder / f"logits-{self.number:05}.pt")
            self.number += 1
        elif (self.folder / WATCH).exists():
            self.bad += int((~logits_output.next_token_logits.isfinite()).sum())
            (self.folder / BAD).write_text(str(self.bad))

    def watch_routers(self, model: Any) -> None:
        """Keeps the logits of the model's routers."""
        self.routing = {}
        routers = [module for name, module in model.named_modules() if name.endswith(".mlp.router")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(functools.partial(self.see, self.routing, layer))

    @staticmethod
    def see(routing: dict[int, Any], layer: int, module: Any, given: Any, made: Any) -> None:
        """Is called after a router. ``made`` is its logits ``[tokens, experts]`` and its bias."""
        routing[layer] = made[0][-1:].detach().clone()

    def experts(self, runner: Any) -> dict[str, Any]:
        """Returns the experts of the last token, ``[1, layers, top_k]``, if all routers were seen."""
        import torch

        best = import_module("float32").best
        if not self.routing:
            return {}
        top_k = runner.model_config.hf_config.num_experts_per_tok
        every = [best(logits, top_k) for _, logits in sorted(self.routing.items())]
        self.routing.clear()
        return {"experts": torch.stack(every, 1).cpu()}


def serving(runner: Any) -> dict[str, Any]:
    """Returns what serves the model: classes of SGLang or of the plugin, and the plugin's receipt."""
    methods = [getattr(module, "quant_method", None) for module in runner.model.modules() if hasattr(module, "w13_weight")]
    backend = runner.attn_backend
    parts = [getattr(backend, name, backend) for name in ("full_attn_backend", "decode_backend", "prefill_backend")]
    found: dict[str, Any] = {
        "attention": sorted({f"{type(part).__module__}.{type(part).__name__}" for part in (backend, *parts)}),
        "experts": sorted({f"{type(method).__module__}.{type(method).__name__}" for method in methods}),
    }
    if "tokenspeed_kernel_sglang.record" in sys.modules:
        receipt = import_module("tokenspeed_kernel_sglang").receipt()
        found["receipt"] = [[row.part, row.kind, row.layers, receipt.outcome(row)] for row in receipt.rows]
    return found
