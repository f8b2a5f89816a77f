"""Multi-head attention with many queries per sequence. A program computes a tile of packed query rows, and loops over the blocks of
keys that the tile sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.common import next_power_of_2, tensor_descriptor
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


# If the keys and values of all heads of a sequence exceed this size, the grid processes one head after another, so that each head's
# keys and values hit L2.
_HEADS_TOGETHER_BYTES = 16 << 20


class Tiles(NamedTuple):
    """The tile sizes, and how a program loops over its blocks of keys.

    Attributes:
        block_m: query rows of a tile.
        block_n: keys per block.
        num_warps, num_stages: warps of a program, and pipeline stages of the loop over keys.
        edges: the treatment of edge blocks, which need a mask. "branch": one loop over all blocks, in which a branch masks edge
            blocks; "apart": separate loops for blocks that need no mask and for edge blocks.
        descriptors: whether to load keys and values through tensor descriptors (TMA) where their layout allows it; requires edges
            "apart".
        edge_stages: pipeline stages of the loops over edge blocks.
        registers: register limit per thread, which allows more CTAs per SM; None for no limit.
        edges_first: whether to process the edge blocks at the end of the range before the unmasked blocks. The softmax allows any
            order, but the compiled code differs.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    edges: str = "branch"
    descriptors: bool = False
    edge_stages: int = 1
    registers: int | None = None
    edges_first: bool = False


class Mask(NamedTuple):
    """Which keys a query does not see: later keys (``causal``), and keys before the query's window (``windowed``)."""

    causal: bool
    windowed: bool


class Tile(NamedTuple):
    """Compile-time constants of `tiles_kernel`. For attributes not listed here, see `Tiles`.

    Attributes:
        d_low, d_high: padded columns of a head, as two powers of two; the second may be 0. See `split_width`.
        block_w: padded columns of values, a power of two.
        heads_first: whether the grid iterates over all heads of a tile first, rather than over all tiles of a head.
        stages, edge_stages: pipeline stages of the loops over blocks without and with a mask.
        shortest: sequences with fewer queries are skipped.
        at_once: how many sequences a program compares at a time when it searches for its sequence.
    """

    block_m: int
    block_n: int
    d_low: int
    d_high: int
    block_w: int
    heads_first: bool
    edges: str
    edges_first: bool
    stages: int
    edge_stages: int
    shortest: int
    at_once: int


def split_width(width: int, v_width: int) -> tuple[int, int]:
    """Splits a key's columns into one or two powers of two: 96 is 64 and 32, 192 is 128 and 64.

    The second power is at least 32, and differs from the padded width ``v_width`` of the values. With equal widths, keys and values
    shared one shared-memory buffer. Triton 3.6 then compiled code for sm_90 that was wrong or read out of bounds.
    """
    whole = max(16, next_power_of_2(width))
    half = whole // 2
    rest = max(32, next_power_of_2(width - half))
    return (half, rest) if rest < half and rest != v_width else (whole, 0)


def _block_w(width: int, v_width: int) -> int:
    """Returns a value's columns, padded to a power of two. If the value has fewer than 64 columns and the key has more columns,
    returns the key's padded width.

    Code that Triton 3.6 compiled for sm_90 was wrong for values of 32 columns with keys of 64 or 128, and right for equal widths.
    """
    whole = max(16, int(next_power_of_2(width)))
    whole_v = max(16, int(next_power_of_2(v_width)))
    return whole if whole_v < min(64, whole) else whole_v


def attend(tiles: Tiles, call: Call) -> None:
    """Launches `tiles_kernel` for a call."""
    slots = call.slots(tiles.block_m)
    if slots == 0:
        return
    block_w = _block_w(call.q.shape[2], call.v.shape[-1])
    d_low, d_high = split_width(call.q.shape[2], block_w)
    operands = call.operands()
    k, v = operands[1:3]
    described = tiles.descriptors and _whole_rows(k, d_low + d_high) and _whole_rows(v, block_w)
    described = described and call.page_size % tiles.block_n == 0
    token_bytes = call.kv_heads * (k.shape[-1] + v.shape[-1]) * k.element_size()
    device_code.tiles_kernel[(slots * call.kv_heads,)](
        *operands,
        *(_rows(x, tiles.block_n, width) if described else None for x, width in ((k, d_low), (k, d_high), (v, block_w))),
        slots,
        **call.constants(),
        MASK=Mask(call.causal, call.window_left >= 0),
        TILE=Tile(
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            d_low=d_low,
            d_high=d_high,
            block_w=block_w,
            heads_first=call.longest * token_bytes <= _HEADS_TOGETHER_BYTES,
            edges=tiles.edges,
            edges_first=tiles.edges_first,
            stages=tiles.num_stages,
            edge_stages=tiles.edge_stages,
            shortest=call.shortest,
            at_once=call.at_once,
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
    )


def _whole_rows(x: Tensor, width: int) -> bool:
    """Whether a tensor descriptor can view ``[..., heads, dim]`` as rows of all heads, with ``width`` columns per head."""
    dim, size = x.shape[-1], x.element_size()
    whole = x.stride(-1) == 1 and x.stride(-2) == dim and (x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1))
    return whole and dim == width and x.data_ptr() % 16 == 0 and x.stride(-3) * size % 16 == 0


def _rows(x: Tensor, rows: int, columns: int) -> Any:
    """Returns a tensor descriptor that views ``[..., heads, dim]`` as rows of all heads, and loads blocks ``[rows, columns]``.

    Returns None if columns is 0.
    """
    heads, dim = x.shape[-2:]
    shape = [x.numel() // (heads * dim), heads * dim]
    return tensor_descriptor.TensorDescriptor(x, shape, [x.stride(-3), 1], [rows, columns]) if columns else None
