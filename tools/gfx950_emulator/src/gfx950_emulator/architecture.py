"""The architectures that the emulator executes, and how their instruction sets and number formats differ.

Both have the instructions of CDNA3. gfx950 (CDNA4) adds instructions, replaces the FNUZ encodings of fp8 by the OCP encodings, and
has no xf32 MFMAs. A test compares `Architecture.lacks` with LLVM's assembler, for every instruction that the emulator implements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gfx950_emulator.formats import BF8, BF8_FNUZ, FP8, FP8_FNUZ, Format
from gfx950_emulator.hardware import MI300X, MI355X, Device

# (result type, size, K, type of A and B) -> passes of 4 cycles
Passes = dict[tuple[str, int, int, str], int]

# LLVM SISchedule.td: SIDPGFX942FullSpeedModel and SIDPGFX950FullSpeedModel
_PASSES: Passes = {
    ("f32", 32, 2, "f32"): 16, ("f32", 16, 4, "f32"): 8,
    ("f32", 32, 8, "f16"): 8, ("f32", 16, 16, "f16"): 4, ("f32", 32, 8, "bf16"): 8, ("f32", 16, 16, "bf16"): 4,
    ("f32", 32, 16, "8-bit"): 8, ("f32", 16, 32, "8-bit"): 4, ("i32", 32, 16, "i8"): 8, ("i32", 16, 32, "i8"): 4,
    ("f64", 16, 4, "f64"): 8,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """An architecture, with a device that has it.

    Attributes:
        name: the compiler's name.
        version: the version in AMD's numbering.
        device: the device that is emulated.
        formats: the encodings of fp8 and bf8, by these names.
        passes: the MFMAs with one block, and their time in the matrix core.
        lacks: matches mnemonics, without encoding suffix, that other architectures have. MFMAs are in `passes`.
        widest_direct_load: bytes per lane of the widest direct load to LDS.
    """

    name: str
    version: tuple[int, int]
    device: Device
    formats: dict[str, Format]
    passes: Passes
    lacks: re.Pattern[str]
    widest_direct_load: int

    def __hash__(self) -> int:
        return hash(self.name)


GFX942 = Architecture(
    name="gfx942",
    version=(9, 4),
    device=MI300X,
    formats={"fp8": FP8_FNUZ, "bf8": BF8_FNUZ},
    passes=_PASSES,
    lacks=re.compile(
        r"buffer_atomic_pk_add_bf16|ds_read_b\d+_tr_b\d+|global_load_lds_dwordx[34]|v_ashr_pk_[iu]8_i32|v_bitop3_b\d+"
        r"|v_cvt_f32_bf16|v_cvt_pk_b?f16_f32|v_cvt_scalef32_\w+|v_cvt_sr_b?f16_f32|v_dot2c?_f32_bf16|v_permlane\d+_swap_b32"
        r"|v_(pk_)?(maximum|minimum)3_f\d+|v_prng_b32|v_smfmac_[fi]32_(16x16x(64_b?f16|128_\w+)|32x32x(32_b?f16|64_\w+))"
    ),
    widest_direct_load=4,
)

GFX950 = Architecture(
    name="gfx950",
    version=(9, 5),
    device=MI355X,
    formats={"fp8": FP8, "bf8": BF8},
    passes={
        **_PASSES,
        ("f32", 32, 16, "f16"): 8, ("f32", 16, 32, "f16"): 4, ("f32", 32, 16, "bf16"): 8, ("f32", 16, 32, "bf16"): 4,
        ("f32", 32, 64, "f8f6f4"): 8, ("f32", 16, 128, "f8f6f4"): 4, ("i32", 32, 32, "i8"): 8, ("i32", 16, 64, "i8"): 4,
        ("f64", 16, 4, "f64"): 16,
    },
    lacks=re.compile(r"(?!)"),
    widest_direct_load=16,
)  # fmt: skip

ARCHITECTURES = {architecture.name: architecture for architecture in (GFX942, GFX950)}
