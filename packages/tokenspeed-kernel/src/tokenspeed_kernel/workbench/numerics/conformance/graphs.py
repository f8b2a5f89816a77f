"""Checks that a kernel gives correct results when a CUDA graph of it is replayed. Needs a GPU.

A graph repeats launches as they were captured. A replay gives a wrong result if the kernel reads a length on the host, sizes its
grid by this length, or frees its workspace. To find such kernels, each graph is replayed on the inputs of the capture. Then other
inputs, which the operator's ``vary`` hook makes, are copied over the inputs of the capture, and the graph is replayed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.compare import compare_results
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import check_with_values, written_to
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import Kind
from tokenspeed_kernel_base.selection import gate
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.variation import Variation, Want


@dataclass
class Inputs:
    """The arguments of a call in two copies: plain for the reference, and prepared for the kernel."""

    op: Operator[Any, Any]
    plain: dict[str, Any]
    prepared: dict[str, Any]

    @classmethod
    def build(cls, spec: KernelSpec, case: Case, device: torch.device, seed: int) -> Inputs:
        op = get_operator(spec.operator)
        one, other = (op.complete(case.build(device, seed)) for _ in range(2))
        check_with_values(op, one)
        return cls(op, one, op.prepared(other, spec))

    def plain_tensors(self) -> dict[str, Tensor]:
        """Returns the plain tensor arguments that have the same shape and dtype after preparation.

        Tensors inside objects are left out: they are model weights, which stay constant.
        """
        tensors = {name: value for name, value in self.plain.items() if isinstance(value, Tensor)}
        taken = {name: self.prepared[name] for name in tensors}
        return {
            name: value
            for name, value in tensors.items()
            if isinstance(taken[name], Tensor) and taken[name].shape == value.shape and taken[name].dtype == value.dtype
        }

    def overwrite(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.plain[name].copy_(value)
            self.prepared[name].copy_(value)


def _other_values(inputs: Inputs, drawn: Inputs, seed: int) -> dict[str, Tensor]:
    """Returns other valid tensor inputs for a captured call, with the same shapes and the same host values.

    Inputs made with another seed are used if they have the same shapes and host values. The operator's ``vary`` hook may then
    change them further. If it changes an argument that `Inputs.plain_tensors` leaves out, all its changes are dropped.
    """
    op, mine, theirs = inputs.op, inputs.plain_tensors(), drawn.plain_tensors()
    on_host = [p.name for p in op.parameters if p.kind in (Kind.VALUE, Kind.HINT) and not isinstance(inputs.plain[p.name], Tensor)]
    alike = all(drawn.plain[name] == inputs.plain[name] for name in on_host)
    alike = alike and all(theirs[name].shape == tensor.shape for name, tensor in mine.items())
    values = {name: (theirs[name] if alike else tensor).clone() for name, tensor in mine.items()}
    device = next(iter(mine.values())).device
    changed = op.varied({**inputs.plain, **values}, Variation(Want.OTHER, Draw(device, seed)))
    if changed.keys() <= values.keys():  # not if preparation has put a changed tensor into the kernel's own layout
        values.update(changed)
    return values


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _reference(inputs: Inputs) -> tuple[Any, dict[str, Tensor]]:
    """Runs the reference on copies of the arguments that the operator writes to. Returns its results, and these written
    arguments.
    """
    op = inputs.op
    copies = {name: inputs.plain[name].clone() for name in op.mutates if inputs.plain[name] is not None}
    arguments = {**inputs.plain, **copies}
    return op.reference(*(arguments[name] for name in op.names)), written_to(op, arguments)


def replay_faults(spec: KernelSpec, case: Case, device: torch.device, seed: int = 0) -> list[str]:
    """Captures a kernel's call and replays it. Returns the faults; empty if there are none.

    Raises:
        RuntimeError: the call cannot be captured, for example because it synchronises with the device.
        LookupError: the kernel is not eligible for the case. The message has the reason.
    """
    with torch.no_grad():
        return _replay(spec, case, device, seed)


def _replay(spec: KernelSpec, case: Case, device: torch.device, seed: int) -> list[str]:
    inputs = Inputs.build(spec, case, device, seed)
    op, deterministic = inputs.op, "determinism" in spec.tags
    request = op.request(inputs.prepared)
    rejected = gate(spec, request)
    if rejected is not None:
        raise LookupError(": ".join(rejected))
    tolerance = functools.partial(tolerance_for, request=request, exact=op.exact)
    arguments = [inputs.prepared[name] for name in op.names]
    call: Callable[..., Any] = op.function.bind(*arguments, override=spec.name)
    untouched = {name: tensor.clone() for name, tensor in written_to(op, inputs.prepared).items()}

    def run() -> tuple[Any, dict[str, Tensor]]:
        """Runs the call eagerly, copies what it wrote, then restores the mutated arguments."""
        result = call(*arguments)
        written = {name: tensor.clone() for name, tensor in written_to(op, inputs.prepared).items()}
        put_back()
        return result, written

    def put_back() -> None:
        for name, tensor in written_to(op, inputs.prepared).items():
            tensor.copy_(untouched[name])

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        eager, eagerly_written = run()
    torch.cuda.current_stream(device).wait_stream(stream)
    faults: list[str] = []
    if deterministic:
        again, again_written = run()
        faults += _differing(inputs, again, again_written, eager, eagerly_written, EXACT, "the second eager run")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*arguments)

    def replay() -> tuple[Any, dict[str, Tensor]]:
        put_back()
        for tensor in filter(torch.is_tensor, lowering.as_list(captured)):  # detects elements that the replay does not write
            if tensor.is_contiguous() and tensor.dim():
                _bytes(tensor).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize(device)
        return captured, written_to(op, inputs.prepared)

    allowed = EXACT if deterministic else tolerance
    faults += _differing(inputs, *replay(), eager, eagerly_written, allowed, "the replay of the graph")

    values = _other_values(inputs, Inputs.build(spec, case, device, seed + 1), seed)
    put_back()
    inputs.overwrite(values)
    check_with_values(op, inputs.plain)
    untouched = {name: tensor.clone() for name, tensor in written_to(op, inputs.prepared).items()}
    expected, expected_written = _reference(inputs)
    return faults + _differing(inputs, *replay(), expected, expected_written, tolerance, "the replay of the graph on other inputs")


def _differing(
    inputs: Inputs,
    got: Any,
    written: dict[str, Tensor],
    expected: Any,
    expected_written: dict[str, Tensor],
    tolerance: Any,
    what: str,
) -> list[str]:
    beside = {name: (tensor, expected_written[name]) for name, tensor in written.items()}
    compared = compare_results(inputs.op, inputs.prepared, got, expected, tolerance, beside)
    return [f"{what}: {comparison.name}: {comparison.fault}" for comparison in compared if comparison.fault]
