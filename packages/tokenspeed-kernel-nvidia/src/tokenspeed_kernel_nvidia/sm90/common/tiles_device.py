"""Layouts of tiles in shared memory, and TMA loads and stores of tiles.

A tile of Q, K, V or output has rows of head_dim elements. For GEMMs, a tile's rows are those of an operand, and head_dim stands for
the elements of k of a stage. In shared memory, a tile is a sequence of panels. A panel has 64 columns of 16 bits, or 128 or 64
columns of 8 bits. A panel's rows have 128 (or 64) bytes in the 128-byte (64-byte) swizzle, whose pattern repeats every 8 rows. The
tiles of a ring buffer are adjacent, one per stage.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Numeric, cute
from cutlass.cute.nvgpu import cpasync

PANEL = 64  # 16-bit columns of a panel: 128 bytes


def swizzle(row_bytes: int = 128):
    """Returns the swizzle, in units of bytes, for a panel whose rows have 128 or 64 bytes."""
    return cute.make_swizzle({128: 3, 64: 2}[row_bytes], 4, 3)


# -- global memory -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tma:
    """A TMA view of a tensor in global memory.

    Attributes:
        atom: the copy atom of one box.
        tensor: the tensor of TMA coordinates, with the global tensor's shape.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


def make_tma(operation, tensor: cute.Tensor, box: tuple) -> Tma:
    """Makes the TMA view for copies between a global tensor and boxes in shared memory.

    Args:
        operation: load, multicast load or store.
        box: the shape of a box, ``(rows, columns)`` or ``(rows, columns, heads)``. One row's columns have 128 or 64 bytes. ``rows``
            is a number, or a pair ``(heads, tokens)`` for a tensor viewed by `gqa_packed`. In shared memory, a head's rows are
            consecutive, and heads follow one another.
    """
    rows, columns, *heads = box
    row_stride, row_count = columns, rows
    if isinstance(rows, tuple):
        row_stride, row_count = (columns, columns * rows[0]), rows[0] * rows[1]
    stride = (row_stride, 1, *(row_count * columns for _ in heads))
    swizzled = swizzle(columns * tensor.element_type.width // 8)
    layout = cute.make_composed_layout(swizzled, 0, cute.make_layout(box, stride=stride))
    return Tma(*cpasync.make_tiled_tma_atom(operation, tensor, layout, box))


def gqa_packed(x: cute.Tensor) -> cute.Tensor:
    """Views q or the output, ``[tokens, heads, head_dim]``, as ``((heads, tokens), head_dim)``: a token's heads are consecutive
    rows."""
    layout = cute.make_layout(((x.shape[1], x.shape[0]), x.shape[2]), stride=((x.stride[1], x.stride[0]), x.stride[2]))
    return cute.make_tensor(x.iterator, layout)


def tokens_first(x: cute.Tensor, paged: bool) -> cute.Tensor:
    """Views keys or values as ``(tokens, head_dim, kv_heads)``; a paged cache as ``(page_size, head_dim, kv_heads, pages)``."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0] if paged else [0, 2, 1]))


def _partition(atom: cute.CopyAtom, shared: cute.Tensor, tensor: cute.Tensor, box: tuple):
    """Returns the operands of a TMA copy: the shared memory, and the first box of the tensor."""
    corner = cute.local_tile(tensor, box, ((0,) * len(box[0]) if isinstance(box[0], tuple) else 0, 0))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(corner, 0, 2)
    )  # fmt: skip


@cute.jit
def tma_load(
    atom: cute.CopyAtom,
    tensor: cute.Tensor,
    box: cutlass.Constexpr,
    shared: cute.Tensor,
    barrier: cute.Pointer,
    ctas: cutlass.Constexpr[int] = 0,
) -> None:
    """Issues the TMA load of a tensor's first box to shared memory; ``barrier`` counts the box's bytes.

    Args:
        ctas: multicast mask, with one bit for each CTA of the cluster that receives the box. Each of these CTAs receives the box at
            the same offset, and its own barrier counts the bytes. 0 loads to this CTA alone. ``atom`` must be a multicast atom if
            and only if the mask is not 0.
    """
    target, source = _partition(atom, shared, tensor, box)
    if cutlass.const_expr(ctas != 0):
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(ctas))
    else:
        cute.copy(atom, source, target, tma_bar_ptr=barrier)


@cute.jit
def tma_store(atom: cute.CopyAtom, tensor: cute.Tensor, box: cutlass.Constexpr, shared: cute.Tensor) -> None:
    """Issues the TMA store of shared memory to a tensor's first box, in the current bulk group."""
    source, target = _partition(atom, shared, tensor, box)
    cute.copy(atom, source, target)


# -- shared memory -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """The layout of a ring buffer's tiles in shared memory.

    Attributes:
        rows: number of rows of a tile, 64 or more.
        head_dim: number of elements of a tile's row, a multiple of ``columns``.
        stages: number of tiles, one per stage.
        columns: number of elements of a panel's row.
        row_bytes: bytes of a panel's row.
    """

    rows: int
    head_dim: int
    stages: int
    columns: int = PANEL
    row_bytes: int = 128

    @property
    def panels(self) -> int:
        """The number of panels of a tile."""
        return self.head_dim // self.columns

    @property
    def size(self) -> int:
        """The number of elements of all tiles together."""
        return self.stages * self.rows * self.head_dim

    def _tensor(self, memory, shape: tuple, stride: tuple, dtype: type[Numeric] | None = None) -> cute.Tensor:
        return memory.get_tensor(cute.make_layout(shape, stride=stride), swizzle=swizzle(self.row_bytes), dtype=dtype)

    def tiles(self, memory, rows: int = 0, dtype: type[Numeric] | None = None) -> cute.Tensor:
        """Views the ring as ``(rows, head_dim, stage)``: the A operand of an MMA, the B operand of q @ k.T, or an output tile.

        Args:
            memory: the ring's shared memory, a member of a struct.
            rows: how many leading rows of each tile to view; all if 0.
            dtype: dtype of the elements, if the memory is declared with another dtype.
        """
        columns = self.columns
        shape = (rows or self.rows, (columns, self.panels), self.stages)
        return self._tensor(memory, shape, (columns, (1, self.rows * columns), self.rows * self.head_dim), dtype)

    def transposed(self, memory, dtype: type[Numeric] | None = None) -> cute.Tensor:
        """Views the ring as ``(head_dim, rows, stage)``: the B operand of P @ V. Arguments: see `tiles`."""
        columns = self.columns
        shape = ((columns, self.panels), self.rows, self.stages)
        return self._tensor(memory, shape, ((1, self.rows * columns), columns, self.rows * self.head_dim), dtype)

    def views(self, memory, rows: int) -> cute.Tensor:
        """Views the ring as ``(rows, head_dim, first row / 8, stage)``: overlapping subtiles of ``rows`` rows, which begin at any
        multiple of 8 rows."""
        shape = ((8, rows // 8), (PANEL, self.panels), (self.rows - rows) // 8 + 1, self.stages)
        stride = ((PANEL, 8 * PANEL), (1, self.rows * PANEL), 8 * PANEL, self.rows * self.head_dim)
        return self._tensor(memory, shape, stride)

    def transposed_views(self, memory, rows: int) -> cute.Tensor:
        """Views the ring like `views`, with head_dim as the first axis: B operands of P @ V."""
        shape = ((PANEL, self.panels), (8, rows // 8), (self.rows - rows) // 8 + 1, self.stages)
        stride = ((1, self.rows * PANEL), (PANEL, 8 * PANEL), 8 * PANEL, self.rows * self.head_dim)
        return self._tensor(memory, shape, stride)

    def boxes(self, memory, box: int) -> cute.Tensor:
        """Views the ring as ``(rows of a box, columns, box, panel, stage)``: tiles that TMA fills with boxes of ``box`` rows
        each."""
        columns = self.columns
        shape = (box, columns, self.rows // box, self.panels, self.stages)
        return self._tensor(memory, shape, (columns, 1, box * columns, self.rows * columns, self.rows * self.head_dim))

    def packed_boxes(self, memory, heads: int, tokens: int, count: int = 1, dtype: type[Numeric] | None = None) -> cute.Tensor:
        """Views the ring as ``((heads, tokens), columns, panel, box, stage)``: TMA boxes whose rows are ``heads`` heads of
        ``tokens`` tokens.

        Args:
            count: number of boxes per tile.
            dtype: dtype of the elements, if the memory is declared with another dtype.
        """
        columns = self.columns
        shape = ((heads, tokens), columns, self.panels, count, self.stages)
        stride = ((columns, columns * heads), 1, self.rows * columns, heads * tokens * columns, self.rows * self.head_dim)
        return self._tensor(memory, shape, stride, dtype)

    def chunks(self, memory) -> cute.Tensor:
        """Views the ring as ``(row, (8, chunk of a panel's row), panel, stage)``: chunks of 16 bytes."""
        columns = self.columns
        shape = (self.rows, (8, columns // 8), self.panels, self.stages)
        return self._tensor(memory, shape, (columns, (1, 8), self.rows * columns, self.rows * self.head_dim))
