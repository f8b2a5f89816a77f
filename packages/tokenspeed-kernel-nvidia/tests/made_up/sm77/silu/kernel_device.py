"""The device code of `silu`. Everything except the kernel's own arithmetic comes from `cutedsl`."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import exp2_ftz, reciprocal_ftz
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import RoundRobin, own_indices
from tokenspeed_kernel_nvidia.sm77.silu.config import Config

THREADS = 128


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Silu()


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, with which the function of `host` is compiled."""
    tokens, size = arguments.size(), arguments.size
    x, out = (arguments.rows(config.dtype, tokens, size()) for _ in range(2))
    return x, out, Int32(0), arguments.stream()


class Silu:
    """The kernel. In a grid of n CTAs, each CTA computes every n-th row. Each thread of a CTA computes every 128th column of the
    row."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, ctas: Int32, stream):
        self.kernel(x, out).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        width = out.shape[1]
        index, step = own_indices()
        rows = RoundRobin(step, x.shape[0])
        while rows.has(index):
            row = rows.item(index)
            column = thread
            while column < width:
                gate, up = Float32(x[row, column]), Float32(x[row, column + width])
                out[row, column] = (gate * reciprocal_ftz(1.0 + exp2_ftz(gate * -LOG2_E)) * up).to(out.element_type)
                column += THREADS
            index = rows.next(index)
