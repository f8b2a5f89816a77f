"""Records the launches that kernels would make for the largest calls. No kernel runs, and the large tensors are on the meta
device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import Kind, tensor_arguments
from tokenspeed_kernel_base.platform import PlatformInfo, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.workspace import Keeper

# By vendor: the largest number of items (tokens, sequences, keys, pages) of a call, and of bytes of all its tensors. AMD's numbers
# are lower, because a launch on AMD has fewer than 2^32 threads, and a few hundred thousand sequences with many tiles each come
# close.
_SCALES = {"nvidia": (1 << 24, 1 << 38), "amd": (1 << 17, 1 << 33)}
# The largest size of a grid's second and third axis, for both vendors.
_MOST = 65535


class Launch(NamedTuple):
    """A launch that a kernel would make for an enlarged call."""

    case: str
    sizes: dict[str, int]
    function: str
    grid: tuple[int, ...]
    warps: int

    def fits(self, vendor: str) -> bool:
        """Whether the launch is within the driver's limits."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return x < 1 << 31 and max(y, z) <= _MOST and (vendor != "amd" or x * self.warps * 64 < 1 << 32)


def launches_at_scale(spec: KernelSpec, platform: PlatformInfo, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Returns the launches that a Triton or Gluon kernel would make on a platform, for enlarged small cases of its operator. Each
    variable size is enlarged alone, then all together."""
    from triton.runtime.jit import KernelInterface

    from tokenspeed_kernel.workbench.numerics.verify import refusal

    found: list[Launch] = []
    doing: dict[str, Any] = {}

    def record(function: Any, grid: Any) -> Any:
        return lambda *_, **options: found.append(
            Launch(**doing, function=function.fn.__name__, grid=tuple(grid), warps=options.get("num_warps", 4))
        )

    def workspace(_: Keeper, device: int, stream: int, nbytes: int, count: int) -> SimpleNamespace:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return SimpleNamespace(memory=memory, counters=memory.new_empty(count, dtype=torch.int32), memory_at=0)

    monkeypatch.setattr(Keeper, "get", workspace)
    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    kernel, op = KernelRegistry.get().get_impl(spec.name), get_operator(spec.operator)
    with use_platform(platform), torch.no_grad():
        for case in op.all_cases():
            if case.large or case.world_size > 1:
                continue
            drawn = op.complete(case.build("cpu"))
            if refusal(op, spec, drawn) is not None or not all(t.numel() for _, t in tensor_arguments(op.parameters, drawn)):
                continue
            prepared = {name: value for name, value in op.prepared(drawn, spec).items() if value is not drawn[name]}
            for sizes, call in _larger(op, drawn, *_SCALES[platform.vendor]):
                if refusal(op, spec, call) is None:
                    doing.update(case=case.name, sizes=sizes)
                    kernel(**{**call, **prepared})
    return found


def _larger(
    op: Operator[Any, Any], drawn: dict[str, Any], items: int, nbytes: int
) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    """Yields enlarged variants of a call, on the meta device, each with the sizes that were enlarged."""
    from tokenspeed_kernel.workbench.numerics.narrow import axes_of

    axes = axes_of(op, drawn)
    named = {name.removesuffix("+1") for names in axes.values() for name in names}
    variable = [size for size in (*op.varying, *op.capacity, "...") if size in named]
    for sizes in [*([size] for size in variable), *([variable] if len(variable) > 1 else [])]:
        for bounds in {(), op.bounds if len(sizes) == 1 else ()}:
            count = items
            while count >= 256:
                call = _enlarged(op, drawn, axes, sizes, count)
                call.update({name: count for name in bounds if drawn[name] is not None})
                try:
                    op.run_hook("check", call, Checker(op.mode))
                    tensors = [*(tensor for _, tensor in tensor_arguments(op.parameters, call)), *op.outputs_on_meta(call)]
                except (ValueError, TypeError):
                    break  # the check requires other sizes to change with these
                if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= nbytes:
                    yield dict.fromkeys((*sizes, *bounds), count), call
                    break
                count //= 2


def _enlarged(
    op: Operator[Any, Any], drawn: dict[str, Any], axes: dict[str, tuple[str, ...]], sizes: list[str], count: int
) -> dict[str, Any]:
    counts = dict.fromkeys(sizes, count) | {size + "+1": count + 1 for size in sizes}
    tensors = dict(tensor_arguments(op.parameters, drawn))
    rows = {names[0]: tensors[name].shape[0] for name, names in axes.items() if names}

    def enlarged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # The axes of some tensors, such as scales of rows, have no names. Their first axis is enlarged if it has as many elements
        # as the rows of a named size.
        leading = [size for size in sizes if tensor.dim() and rows.get(size) == tensor.shape[0]]
        names = axes.get(name, (*leading[:1], *[""] * (tensor.dim() - len(leading[:1]))))
        return torch.empty([counts.get(n, s) for n, s in zip(names, tensor.shape, strict=True)], dtype=tensor.dtype, device="meta")

    call = dict(drawn)
    for parameter in op.parameters:
        value = drawn[parameter.name]
        if isinstance(value, torch.Tensor):
            call[parameter.name] = enlarged(parameter.name, value) if parameter.kind is Kind.TENSOR else None
        elif parameter.kind is Kind.OBJECT and value is not None:
            inner = {f.attribute: getattr(value, f.attribute) for f in parameter.tensors()}
            call[parameter.name] = replace(value, **{a: enlarged(a, t) for a, t in inner.items() if t is not None})
    return call
