"""Measures how long the host takes to launch a prefill pass of GPT-OSS, on a machine without the device.

    python tools/gpt_oss/benchmarks/host_time.py --arch h200 --prefill 1x1024 --dense-weights none,fp8,mxfp4

Selection, launchers and allocations are those of the device. The kernels launch nothing, and PyTorch's GEMMs compute nothing. So
the times leave out what the device's driver takes for a launch, some microseconds for each. Weights and activations are memory that
is never written, so that the layers' sizes are those of the model. All layers with a window share one layer's weights, and so do
the layers without a window.

The table has a pass's microseconds of CPU per layer, and the pass's microseconds outside its layers; the fastest of several passes
counts. It has the calls of Python and C functions, and the operators of PyTorch, per layer. It also has the microseconds of each
operator's call in a loop, where caches and branch predictors are warm: on average over a layer with a window and one without.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import dataclasses
import json
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tokenspeed_kernel
from gpt_oss.batch import Batch, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, preset
from gpt_oss.model import GptOss
from gpt_oss.shapes_only import META, ShapesOnly
from tokenspeed_kernel.workbench.benchmark import collect_metadata
from tokenspeed_kernel.workbench.packing import device_of, without_device
from tokenspeed_kernel_base import calling
from tokenspeed_kernel_base.platform import use_platform

PAGE_SIZE = 64
PASSES, CALLS = 8, 100  # timed passes, and calls of an operator in a series
_KINDS = 2  # layers with a window, and layers without
# Parameters of glibc's mallopt, and values with which freed memory is never returned to the system. PyTorch's allocator for GPUs
# keeps freed memory as well.
_KEEPING_MEMORY = {-1: 2**31 - 1, -2: 2**28, -4: 0}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX


def in_memory(value: Any) -> Any:
    """Returns a tensor in place of a meta tensor, also in the fields of dataclasses; any other value unchanged."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value
        elements = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return torch.empty(elements, dtype=value.dtype).as_strided(value.shape, value.stride())
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    made = {name: in_memory(field) for name, field in fields.items()}
    changed = {name: field for name, field in made.items() if field is not fields[name]}
    return dataclasses.replace(value, **changed) if changed else value


def make_model(name: str, layers: int | None, arch: str, dense_weights: str, longest: int) -> GptOss:
    """Returns a model whose weights are prepared for a device, in memory that is not written.

    Args:
        name: the preset.
        layers: number of layers; None for the preset's.
        arch: the device, or its architecture.
        dense_weights: see `GptOss`.
        longest: the largest number of positions.
    """
    config = preset(name) if layers is None else preset(name).with_layers(layers)
    few = config.with_layers(_KINDS)
    with use_platform(device_of(arch)):
        model = GptOss(few, ShapesOnly(few, torch.bfloat16), torch.bfloat16, META, longest, dense_weights=dense_weights)
    kinds = [in_memory(layer) for layer in model.layers]
    model.config, model.device = config, torch.device("cpu")
    model.layers = [kinds[layer % _KINDS] for layer in range(config.num_hidden_layers)]
    for part in ("embedding", "norm", "unembedding", "cos_sin"):
        setattr(model, part, in_memory(getattr(model, part)))
    return model


@contextlib.contextmanager
def launching_nothing(arch: str) -> Iterator[None]:
    """Inside the block, calls take the paths of calls on a device, whose values the host cannot read, and launch nothing."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(without_device(arch, Path(folder), lambda program: None))
        stack.enter_context(mock.patch.object(calling, "readable", return_value=False))
        yield


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the microseconds of CPU of the fastest of some calls."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return 1e6 * min(found)


class Recording:
    """The public API, with a record of its calls: ``calls`` has each operator's name, and a function that repeats the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Callable[[], Any]]] = []

    def __getattr__(self, name: str) -> Any:
        operator = getattr(tokenspeed_kernel, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, lambda: operator(*args, **kwargs)))
            return operator(*args, **kwargs)

        return call


def measure(model: GptOss, prompts: int, tokens: int) -> dict[str, Any]:
    """Measures the passes of a prefill. Call it inside `launching_nothing`."""
    pages = -(-tokens // PAGE_SIZE)
    cache = PagedKVCache(model.config, prompts * pages, PAGE_SIZE, torch.bfloat16, "cpu")
    pieces = [Piece([0] * tokens, 0, range(first, first + pages)) for first in range(0, prompts * pages, pages)]
    batch = make_batch(pieces, cache, "cpu", logits_of=range(prompts))
    layers, count = model.layers, len(model.layers)
    model.forward(batch, cache)
    few = count // 3 // _KINDS * _KINDS or min(_KINDS, count - 1)
    whole = microseconds(lambda: model.forward(batch, cache), PASSES)
    model.layers = layers[:few]
    part = microseconds(lambda: model.forward(batch, cache), PASSES)
    layer = (whole - part) / (count - few)
    model.layers = layers
    profile = cProfile.Profile()
    profile.runcall(model.forward, batch, cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        model.forward(batch, cache)
    return {
        "pass_us": whole,
        "layer_us": layer,
        "rest_us": whole - layer * count,
        "make_batch_us": microseconds(lambda: make_batch(pieces, cache, "cpu", logits_of=range(prompts)), CALLS),
        "calls_a_layer": pstats.Stats(profile).total_calls / count,  # type: ignore[attr-defined]
        "torch_operators_a_layer": sum(event.name.startswith("aten::") for event in traced.events()) / count,
        "operators_us": operators(model, batch, cache),
    }


def operators(model: GptOss, batch: Batch, cache: PagedKVCache) -> dict[str, float]:
    """Returns the microseconds of each operator's calls in a layer, on average over a layer of each kind."""
    layers, model.ops = model.layers, Recording()
    model.layers = layers[:_KINDS]
    model.forward(batch, cache)
    calls, model.ops, model.layers = model.ops.calls, tokenspeed_kernel, layers
    found: dict[str, float] = {}
    for name, call in calls[:-2]:  # the last two calls are the norm and the GEMM after the layers

        def series(call: Callable[[], Any] = call) -> None:
            for _ in range(CALLS):
                call()

        found[name] = found.get(name, 0.0) + microseconds(series, PASSES) / CALLS / len(model.layers[:_KINDS])
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['dense_weights']:6} {row['prompts']} x {row['tokens']}: {row['pass_us'] / 1e3:.2f} ms a pass, "
            f"{row['layer_us']:.0f} us a layer, {row['rest_us']:.0f} us beside the layers, {row['make_batch_us']:.0f} us to make "
            f"the batch; a layer has {row['calls_a_layer']:.0f} calls and {row['torch_operators_a_layer']:.0f} operators of PyTorch"
        )
        print("       " + ", ".join(f"{name} {us:.1f} us" for name, us in row["operators_us"].items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="h200", help="the device, or its architecture")
    parser.add_argument("--preset", default="gpt-oss-120b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, help="number of layers; left out: the preset's")
    parser.add_argument("--prefill", default="1x1024", help="prompts x tokens of each, several separated by commas")
    parser.add_argument("--dense-weights", default="none,fp8,mxfp4", help="formats of the weights of attention and output matrix")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    options = parser.parse_args(arguments)
    libc = ctypes.CDLL(None)
    for parameter, value in _KEEPING_MEMORY.items():
        libc.mallopt(parameter, value)
    torch.set_num_threads(1)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.prefill.split(",")]
    rows = []
    for dense_weights in options.dense_weights.split(","):
        longest = max(tokens for _, tokens in shapes)
        model = make_model(options.preset, options.layers, options.arch, dense_weights, longest)
        for prompts, tokens in shapes:
            with launching_nothing(options.arch):
                found = measure(model, prompts, tokens)
            rows.append({"dense_weights": dense_weights, "prompts": prompts, "tokens": tokens, **found})
            show(rows[-1:])
    if options.output is not None:
        metadata = dataclasses.asdict(collect_metadata("python tools/gpt_oss/benchmarks/host_time.py", "cpu"))
        result = {"arch": options.arch, "preset": options.preset, "metadata": metadata, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
