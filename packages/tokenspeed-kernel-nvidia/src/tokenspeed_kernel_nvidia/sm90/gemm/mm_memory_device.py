"""How `mm_device` reads and copies memory: single instructions, and vectors of any dtype."""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32, cute

from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import Config


def type_of(name: str) -> type[Numeric]:
    """CuteDSL's type of an activation or a result."""
    return Float32 if name == "float32" else dtype_of(name)


def load_words_if(space: str, address: Any, condition: Boolean) -> Any:
    """Four neighbouring words, or zeros."""
    kept = ".L1::no_allocate" if space == "global" else ""  # what the kernel before wrote is not to be had by ".nc"
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        f"@p ld.{space}{kept}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}]; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(condition)],
    )


def copy_to_shared(to: Int32, address: Int64, size: Int32, barrier: Int32) -> None:
    """Starts a bulk copy, whose bytes the barrier counts. Addresses and size: multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[to, address, size, barrier],
    )


def prefetch_to_l2(address: Int64, size: Int32) -> None:
    """Starts to bring bytes to the L2 cache. Address and size: multiples of 16."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, size])


@dataclass(frozen=True)
class Vector:
    """Numbers, one for each column of the result, of a dtype that is known at run time.

    Attributes:
        address: where they lie, one after another.
        kind: their dtype, see `launch.KINDS`; 0 for none.
    """

    address: Int64
    kind: Int32

    @cute.jit
    def load(self, index: Int32) -> Float32:
        """0 if there are none."""
        found = Float32(0.0)
        if self.kind == 1:
            found = cute.make_ptr(Float32, self.address, cute.AddressSpace.gmem)[index]
        elif self.kind == 2:
            found = cute.make_ptr(cutlass.BFloat16, self.address, cute.AddressSpace.gmem)[index].to(Float32)
        elif self.kind == 3:
            found = cute.make_ptr(cutlass.Float16, self.address, cute.AddressSpace.gmem)[index].to(Float32)
        return found


def storage_of(config: Config) -> Any:
    """Shared memory of a CTA."""

    @cute.struct
    class Storage:
        full: cute.struct.MemRange[Int64, config.stages]
        empty: cute.struct.MemRange[Int64, config.stages]
        results: cute.struct.Align[cute.struct.MemRange[Float32, config.result_floats], 16]
        ring: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.stages * config.stage_bytes], 128]

    return Storage
