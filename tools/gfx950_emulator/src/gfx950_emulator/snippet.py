"""Runs a few instructions on given registers, for tests of single instructions and for experiments.

>>> import numpy as np
>>> from gfx950_emulator.snippet import Snippet
>>> s = Snippet("v_add_u32_e32 v2, v0, v1", v={0: np.arange(64), 1: 5}).run()
>>> int(s.v(2)[3])
8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gfx950_emulator.assembly import parse
from gfx950_emulator.constants import EXEC, M0, VCC
from gfx950_emulator.counters import Counters
from gfx950_emulator.machine import Batch, Launch
from gfx950_emulator.memory import GlobalMemory
from gfx950_emulator.program import Program
from gfx950_emulator.trace import InstructionTrace
from kernel_emulation.emulator import Allocation

_FRAME = """snippet:
{body}
\ts_endpgm
\t.amdhsa_kernel snippet
\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t.amdhsa_user_sgpr_count 2
\t.amdhsa_next_free_vgpr {vectors}
\t.amdhsa_accum_offset {accumulation}
\t.end_amdhsa_kernel
\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
"""
_NAMES = {"vcc": VCC, "m0": M0, "exec": EXEC}


def _number(register: int | str) -> int:
    """Returns the number of a scalar register, from its name or number."""
    return _NAMES[register] if isinstance(register, str) else register


class Snippet:
    """Instructions with their initial state and, after `run`, their final state.

    Args:
        text: instructions, one per line; labels are allowed.
        v, a: vector and accumulation registers by number: an array of 64 (times waves) values of any 32-bit dtype, or one value.
        s: scalar registers by number, or ``"m0"``. ``"vcc"``, ``"exec"``, and numbers with a value above 32 bits set a pair of
            registers. An array gives one value per wave.
        scc: the scalar condition code.
        waves: number of waves of the workgroup.
        lds: the initial LDS of the workgroup, as bytes or uint8; an int is a number of zero bytes.
        arrays: numpy arrays that the instructions may access; their addresses are ``array.ctypes.data``.
        sanitize: as in `emulated`; registers that are not given are then uninitialised.
        counters: whether to count what the instructions do; the attribute ``counters`` then has the counts.
        tracer: as in `emulated`.
        arch: as in `emulated`.
    """

    def __init__(
        self,
        text: str,
        *,
        v: Mapping[int, Any] | None = None,
        a: Mapping[int, Any] | None = None,
        s: Mapping[int | str, Any] | None = None,
        scc: bool = False,
        waves: int = 1,
        lds: bytes | np.ndarray | int = 0,
        arrays: list[np.ndarray] | None = None,
        sanitize: bool = False,
        registers: int = 64,
        counters: bool = False,
        tracer: InstructionTrace | None = None,
        arch: str = "gfx950",
    ) -> None:
        body = "\n".join(
            "\t" + line.strip() if not line.strip().endswith(":") else line.strip() for line in text.strip().splitlines()
        )
        assembly = parse(_FRAME.format(arch=arch, body=body, vectors=2 * registers, accumulation=registers))
        self._accumulation = assembly.vgprs
        self.program = Program(assembly)
        allocations = [Allocation(x.ctypes.data, x.ctypes.data + x.nbytes, f"array {i}") for i, x in enumerate(arrays or [])]
        local = np.zeros(lds, np.uint8) if isinstance(lds, int) else np.frombuffer(bytes(lds), np.uint8)
        self.counters = Counters(self.program) if counters else None
        kernarg, memory = np.zeros(64, np.uint8), GlobalMemory(allocations)
        launch = Launch(self.program, (1, 1, 1), waves, len(local), kernarg, memory, sanitize, self.counters, tracer=tracer)
        self._batch = Batch(launch, np.zeros(1, np.int64))
        self.group = self._batch.ready[0]
        self.machine = self._batch.machine
        self.machine.local.bytes[: len(local)] = local
        group, shadow = self.group, self.group.shadow
        if shadow is not None and len(local) and not isinstance(lds, int):
            self.machine.local.shadow.owner[: len(local)] = 0
        for base, given in ((0, v or {}), (self._accumulation, a or {})):
            for index, value in given.items():
                group.U[base + index][...] = _bits(value)
                if shadow is not None:
                    shadow._set(base + index, None)
        for key, value in (s or {}).items():
            self._set_scalar(_number(key), value, wide=key in ("vcc", "exec"))
        group.scc = scc

    def _set_scalar(self, index: int, value: Any, wide: bool) -> None:
        group = self.group
        numbers = [int(x) for x in np.atleast_1d(np.asarray(value, object))]
        wide = wide or any(x > 0xFFFFFFFF for x in numbers)
        masked = [x & (0xFFFFFFFFFFFFFFFF if wide else 0xFFFFFFFF) for x in numbers]
        read: Any = masked[0] if len(masked) == 1 else np.array(masked, np.uint64 if wide else np.int64)
        (group.set_s64 if wide else group.set_s32)(index, read)
        if group.shadow is not None:
            from gfx950_emulator.operands import SCALAR_BASE

            for i in range(2 if wide else 1):
                group.shadow._set(SCALAR_BASE + index + i, None)

    def run(self) -> Snippet:
        """Executes the instructions. Raises the same errors as a kernel launch."""
        if not self._batch.run():
            raise self._batch.deadlock()
        return self

    def v(self, index: int, dtype: Any = np.uint32) -> np.ndarray:
        """Returns the values of a vector register, one per lane."""
        return self.group.U[index].view(dtype)

    def a(self, index: int, dtype: Any = np.uint32) -> np.ndarray:
        return self.group.U[self._accumulation + index].view(dtype)

    def v64(self, index: int, dtype: Any = np.uint64) -> np.ndarray:
        """Returns the 64-bit values of a pair of vector registers, one per lane."""
        return self.group.pair(index).view(dtype)

    def s(self, index: int | str) -> int | np.ndarray:
        """Returns the value of a scalar register: an int, or one value per wave."""
        return self.group.s32(_number(index))

    def s64(self, index: int | str) -> int | np.ndarray:
        return self.group.s64(_number(index))

    def lanes(self, index: int | str) -> np.ndarray:
        """Returns the bits of a pair of scalar registers, as one bool per lane."""
        return self.group.lane_mask(_number(index))

    @property
    def scc(self) -> bool | np.ndarray:
        return self.group.scc

    @property
    def lds(self) -> np.ndarray:
        """The workgroup's LDS as uint8."""
        return self.machine.local.bytes[: self.machine.local.size]


def _bits(value: Any) -> np.ndarray | np.uint32:
    """Converts values to the 32 bits that a register holds."""
    if isinstance(value, np.ndarray):
        return value.view(np.uint32) if value.dtype.itemsize == 4 else value.astype(np.int64).astype(np.uint32)
    if isinstance(value, float):
        return np.float32(value).view(np.uint32)
    return np.uint32(int(value) & 0xFFFFFFFF)
