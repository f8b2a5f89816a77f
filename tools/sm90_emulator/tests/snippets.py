"""Kernels of a few instructions, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from sm90_emulator.launching import launch
from sm90_emulator.machine import LaunchReport
from sm90_emulator.memory import Memory

LANES = 32


def kernel(body: str, parameters: int = 2, directives: str = "") -> str:
    """Returns the PTX of a kernel whose parameters are addresses, in ``%d0``, ``%d1``... The thread id is in ``%r0``. ``shared`` is
    the dynamic shared memory."""
    given = ", ".join(f".param .align 8 .u64 p{at}" for at in range(parameters))
    loads = "\n".join(f"ld.param.u64 %d{at}, [p{at}];" for at in range(parameters))
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry snippet({given})
{directives}
{{
    .reg .pred %p<32>;
    .reg .b16 %h<64>;
    .reg .b32 %r<600>;
    .reg .f32 %f<600>;
    .reg .b64 %d<64>;
    {loads}
    mov.u32 %r0, %tid.x;
    {body}
    ret;
}}
"""


def lanes(instructions: str, inputs: list[Any], dtype: Any, count: int = LANES, **options: Any) -> Any:
    """Runs instructions in each thread, and returns their result in ``%r100`` (``%d40`` for 64-bit types). Inputs are in ``%r10``,
    ``%r11``... (``%d10``...).

    Args:
        instructions: PTX.
        inputs: arrays with one value of 4 or 8 bytes per thread.
        dtype: dtype of the result, with 4 or 8 bytes.
        count: number of threads.
    """
    memory = Memory(1 << 16)
    addresses = [memory.put(array) for array in inputs]
    size = np.dtype(dtype).itemsize
    out = memory.put(np.zeros(count * size, np.uint8))
    body = []
    for at, array in enumerate(inputs):
        width = array.dtype.itemsize
        register = f"%{'d' if width == 8 else 'r'}{10 + at}"
        body.append(f"mad.wide.u32 %d50, %r0, {width}, %d{at + 1}; ld.global.b{8 * width} {register}, [%d50];")
    result = "%d40" if size == 8 else "%r100"
    body += [instructions, f"mad.wide.u32 %d50, %r0, {size}, %d0; st.global.b{8 * size} [%d50], {result};"]
    run("\n".join(body), memory, [out, *addresses], count, **options)
    return memory.get(out, dtype, count)


def run(
    body: str,
    memory: Memory,
    addresses: list[int],
    threads: int = LANES,
    grid: tuple[int, ...] = (1,),
    directives: str = "",
    **options: Any,
) -> LaunchReport:
    """Runs a kernel that has this body, with addresses as its parameters."""
    return launch(kernel(body, len(addresses), directives), addresses, threads, grid, memory, **options)
