"""Accesses to scratch memory at an address per lane. `gfx950_emulator.machine.Machine.scratch_rows` has the memory itself."""

from __future__ import annotations

import numpy as np

from gfx950_emulator.group import Group
from gfx950_emulator.instructions.vector_memory import Shape, write_loaded
from gfx950_emulator.memory import Fault


def load_registers(g: Group, at: np.ndarray, lanes: np.ndarray, shape: Shape, row: int, allocated: int) -> None:
    """Loads registers, starting with ``row``, from scratch memory.

    Args:
        g: the group.
        at: int64 [N], offsets in the lane's scratch memory.
        lanes: int64 [N], the lanes' indices in the group.
        shape: the data of a lane.
        row: the first register.
        allocated: bytes that a lane has; 0 means no known limit.

    Raises:
        Fault: a lane accesses memory out of bounds.
    """
    _check(at, shape.size, allocated)
    padded = np.zeros((len(lanes), 4 * shape.dwords), np.uint8)
    cells, places = _cells(g, at, lanes, shape.size)
    padded[:, : shape.size] = cells.reshape(-1)[places]
    if g.shadow is not None:
        for i, missing in enumerate(_unset(g, at, lanes, shape.dwords)):
            before = g.shadow.loaded.get(row + i)
            g.shadow.loaded[row + i] = missing if before is None else before | missing
    values = padded.view(np.uint32).T
    write_loaded(g, row, values[0] if shape.size < 4 else values, lanes, shape)


def store_registers(g: Group, at: np.ndarray, lanes: np.ndarray, shape: Shape, row: int, allocated: int) -> None:
    """Stores registers, starting with ``row``, to scratch memory. Arguments and errors: `load_registers`."""
    _check(at, shape.size, allocated)
    if g.shadow is not None:
        _written(g, at, lanes, row, shape.dwords)
    values = g.registers[row : row + shape.dwords][:, lanes]
    if shape.high:
        values = values >> np.uint32(16)
    cells, places = _cells(g, at, lanes, shape.size)
    cells.reshape(-1)[places] = np.ascontiguousarray(values.T).view(np.uint8)[:, : shape.size]


def _check(at: np.ndarray, size: int, allocated: int) -> None:
    """Raises `Fault` unless all accesses of ``size`` bytes are inside the ``allocated`` bytes of a lane. 0 means no known limit."""
    wrong = (at < 0) | (at + size > allocated if allocated else at >= 1 << 31)
    if wrong.any():
        place = int(at[int(wrong.argmax())])
        raise Fault("out-of-bounds", f"scratch access of {size} bytes at {place:#x}; a lane has {allocated} bytes")


def _cells(g: Group, at: np.ndarray, lanes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scratch memory as bytes, and the indices of the accessed bytes, int64 [N, size]. A lane's dwords are columns."""
    rows = g.machine.scratch_rows(0, int(at.max()) // 4 + size // 4 + 2)
    cells = rows.view(np.uint8)
    byte = at[:, None] + np.arange(size)
    return cells, byte // 4 * cells.shape[1] + 4 * g.columns()[lanes][:, None] + byte % 4


def _unset(g: Group, at: np.ndarray, lanes: np.ndarray, dwords: int) -> list[np.ndarray]:
    """Returns for each loaded dword the lanes of the group, bool [L], whose scratch memory was never written."""
    found = []
    for i in range(dwords):
        missing = np.zeros(g.lanes, bool)
        place = at // 4 + i
        for one in np.unique(place).tolist():
            here = lanes[place == one]
            known = g.shadow.scratch.get(one)
            missing[here] = True if known is None else known[here]
        found.append(missing)
    return found


def _written(g: Group, at: np.ndarray, lanes: np.ndarray, row: int, dwords: int) -> None:
    """Records for the sanitizer that registers, starting with ``row``, are stored. A partial dword counts as written."""
    for i in range(dwords):
        state = g.shadow.unset.get(row + i)
        place = at // 4 + i
        for one in np.unique(place).tolist():
            here = lanes[place == one]
            known = g.shadow.scratch.get(one)
            known = np.ones(g.lanes, bool) if known is None else known.copy()
            known[here] = False if state is None else state[here]
            g.shadow.scratch[one] = known
