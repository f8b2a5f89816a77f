"""Makes the emulator the device of Triton's kernels. The emulator executes the PTX in Triton's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget

from kernel_emulation import triton_driver
from kernel_emulation.errors import EmulationError
from kernel_emulation.triton_driver import Argument, Driver, pack
from sm90_emulator.emulator import BLOCK
from sm90_emulator.launching import SHARED_BYTES
from sm90_emulator.machine import Geometry
from sm90_emulator.program import load
from sm90_emulator.registers import LANES
from sm90_emulator.tensor_maps import tensor_map

# Triton caches compiled kernels per device index; no real device has this index.
_DEVICE = 90
_TF32 = 11  # the value in `CUtensorMapDataType`


class _Launcher(triton_driver.Launcher):
    """Runs a kernel's launches on the block's emulator."""

    kind = "ptx"

    def launch(self, grid: tuple[int, int, int], arguments: list[Argument]) -> None:
        meta = self.metadata
        if meta.num_ctas != 1:
            raise EmulationError("programs of Triton that are clusters", meta.name)
        kernel = load(self.text, meta.name).kernel
        parameters = list(kernel.parameters.values())
        # Addresses of scratch memory follow a kernel's own parameters. Only device-side descriptors and profilers use scratch
        # memory.
        if len(parameters) - len(arguments) not in (0, 1, 2) or getattr(meta, "global_scratch_size", None):
            raise EmulationError(f"{len(arguments)} arguments for {len(parameters)} parameters", meta.name)
        content = bytearray(kernel.parameter_bytes)
        for parameter, (label, type_, value) in zip(parameters, arguments, strict=False):
            part = pack(type_, value)
            if len(part) != parameter.size:
                raise EmulationError(f"{label} has {len(part)} bytes, {parameter.name} has {parameter.size}", meta.name)
            content[parameter.offset : parameter.offset + parameter.size] = part
        geometry = Geometry(grid, (LANES * meta.num_warps, 1, 1), (1, 1, 1), int(meta.shared))
        BLOCK.active().run(self.text, meta.name, geometry, bytes(content))

    def described(self, type_: str, descriptor: Any, index: int) -> Iterator[tuple[str, Any]]:
        yield "nvTmaDesc", _described(descriptor, self.metadata.tensordesc_meta[index])
        yield from (("i32", size) for size in descriptor.shape)
        yield from (("i64", stride) for stride in descriptor.strides)


def _described(descriptor: Any, meta: dict[str, Any]) -> bytes:
    """Makes the tensor map of a tensor descriptor, with the tile sizes and swizzle that the compiler chose."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta["fp4_padded"] or meta.get("is_im2col"):
        raise EmulationError("tensor descriptors of padded 4-bit floats, or of convolutions")
    kind = _TF32 if getattr(descriptor, "round_f32_to_tf32", False) else TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    strides = [stride * meta["elem_size"] for stride in descriptor.strides]
    nan = descriptor.padding == "nan"
    return tensor_map(descriptor.base.data_ptr(), kind, descriptor.shape, strides, meta["block_size"], meta["swizzle"], nan)


def installed(multiprocessors: int) -> contextlib.AbstractContextManager[None]:
    """Inside the block, the emulator is Triton's device."""
    properties = {
        "max_shared_mem": SHARED_BYTES, "multiprocessor_count": multiprocessors, "warpSize": LANES, "max_num_regs": 65536,
    }  # fmt: skip
    return triton_driver.installed(Driver(_Launcher, GPUTarget("cuda", 90, LANES), _DEVICE, (9, 0), properties))
