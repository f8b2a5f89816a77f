"""The scales of fp8 queries, keys and values."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats


@dataclass(frozen=True)
class Scales:
    """The scales of fp8 queries, keys or values: one per KV head, or one for all.

    Attributes:
        address: the global address of the first scale; 0 without scales.
        apart: bytes from one KV head's scale to the next; 0 if all heads share one.
    """

    address: Int64
    apart: Int32

    @cute.jit
    def of(self, kv_head: Int32) -> Float32:
        """Loads the scale of a KV head; returns 1 without scales."""
        scale = Float32(1.0)
        if self.address != 0:
            scale = load_floats("global", self.address + Int64(kv_head * self.apart), 1)
        return scale
