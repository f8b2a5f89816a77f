"""Conversions between float32 and narrow formats, bit-identical to ``ops/quantization/encodings.py``.

8-bit floats and e2m1 values are uint8 here, so that no kernel depends on the compiler's support for a format. Kernels use hardware
conversions where these follow the specification: e4m3fn and e5m2 on NVIDIA from sm_89 on (round to nearest even, saturating, NaN to
``0x7f``). For other formats and devices, kernels use integer arithmetic. The host decides which of the two a kernel uses, see
`abilities`.
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
    """Capabilities of a device that decide how kernels convert narrow formats.

    Attributes:
        native: whether kernels use Triton's casts from float32 to e4m3fn and e5m2, and from e4m3fn to float32. True on NVIDIA from
            compute capability 8.9 on, where the hardware rounds and saturates as `encode_fp8` states. Otherwise kernels convert
            with integer arithmetic.
        bfloat16_pairs: whether the device has packed bf16x2 arithmetic, for `pack_scaled_e2m1`.
        interpreted: whether kernels run in Triton's interpreter, which rounds twice in ``tl.fma`` and does not round to bfloat16.
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
    """Returns the number of corrections that `divide` needs for dividends of this dtype.

    After one correction, the quotient before rounding is within 2^-23 ulp of the exact quotient. This error matters in one case
    only: if the exact quotient is within 2^-23 ulp of the midpoint of two float32 values next to a rounding boundary of the narrow
    format. If x has at most 11 significant bits, no divisor gives such a quotient (a test samples divisors). float32 values get a
    second correction, after which the quotient is correctly rounded (Markstein, "Computation of elementary functions on the IBM
    RISC System/6000 processor", 1990).
    """
    return 2 if dtype == torch.float32 else 1
