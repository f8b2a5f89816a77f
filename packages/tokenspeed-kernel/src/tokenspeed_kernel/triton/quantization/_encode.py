"""Device code that turns float32 values into narrow formats and back, bit for bit like ``ops/quantization/encodings.py``.

8-bit floats and e2m1 codes are uint8 here, so that no kernel needs the compiler to know the format. Where the hardware converts
as the formats are specified (NVIDIA from sm_89 on, e4m3fn and e5m2: to nearest even, saturating, NaN to ``0x7f``) it does so;
elsewhere integer arithmetic does. Which of the two is decided on the host (`abilities`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.platform import ArchVersion, platform_of

device_code = DeviceModule(__name__ + "_device")


_FP8_NATIVE_SINCE = ArchVersion(8, 9)
_BFLOAT16_PAIRS_SINCE = ArchVersion(9, 0)

FP8_NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz"}


class Abilities(NamedTuple):
    """What a device does by itself.

    Attributes:
        native: float32 to and from e4m3fn and e5m2, as specified.
        bfloat16_pairs: arithmetic on two bfloat16 in a register, `pack_scaled_e2m1`.
        interpreted: Triton's interpreter stands in for the device. It rounds twice in ``tl.fma``, and does not round to bfloat16.
    """

    native: bool
    bfloat16_pairs: bool
    interpreted: bool


def abilities(device: torch.device) -> Abilities:
    platform = platform_of(device)
    return Abilities(
        native=platform.is_nvidia and platform.arch_version >= _FP8_NATIVE_SINCE,
        bfloat16_pairs=platform.is_nvidia and platform.arch_version >= _BFLOAT16_PAIRS_SINCE,
        interpreted=platform.is_cpu,
    )


def division_steps(dtype: torch.dtype) -> int:
    """Corrections that `divide` needs for values of this dtype.

    One correction leaves the quotient within 2^-23 units of the true one before it is rounded, which is not enough if the true
    one is as near to the middle of two float32 numbers beside a boundary of the narrow format. With at most 11 bits in x no such
    divisor exists (a test samples them); float32 values get a second correction, after which the quotient is the
    correctly rounded one (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    return 2 if dtype == torch.float32 else 1
