"""`silu_and_mul` for the made-up architecture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES, launched_on
from tokenspeed_kernel_nvidia.sm77.silu.config import Config, every_config
from tokenspeed_kernel_nvidia.sm77.target import ARCH, CUTEDSL_SM77


@program(arch=ARCH, configs=every_config)
def silu_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm77.silu import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@register_kernel(
    "activation",
    "silu_and_mul",
    name="cutedsl_silu_and_mul_sm77",
    solution="cutedsl",
    capability=CUTEDSL_SM77,
    signatures=format_signatures(("x",), "dense", DTYPES),
    priority=Priority.PERFORMANT,
)
def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    written = x.new_empty(*x.shape[:-1], x.shape[-1] // 2) if out is None else out
    rows = min(sm_count_of(x.get_device()), x.numel() // x.shape[-1])
    launched = launched_on(silu_program(Config(DTYPES[x.dtype])), (x,), written, (), (rows,), ())
    return deliver(launched, out)
