"""Multi-head attention of many queries: one program a tile of packed rows, over the blocks of keys that the tile can see."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.common import next_power_of_2, tensor_descriptor
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


# Keys and values that all heads of a sequence may take before its heads go one after another: what stays in a second-level cache.
_HEADS_TOGETHER_BYTES = 16 << 20


class Tiles(NamedTuple):
    """How a program walks its keys.

    Attributes:
        block_m: rows of a tile.
        block_n: keys at once.
        num_warps, num_stages: of a program, and blocks of keys on the way.
        edges: "branch": one loop, that masks where a block lies at an edge; "apart": blocks that need no mask have their own loop.
        descriptors: keys come by tensor maps where those can describe them; wants edges apart.
        edge_stages: as num_stages, of the loops over edges.
        registers: of a thread at most, so that more programs share a multiprocessor; None for as many as the compiler likes.
        edges_first: the last edge goes first. Any order will do for the softmax, but not for what the compiler makes of it.
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
    """Which keys a query may not see: later ones, and those before its window."""

    causal: bool
    windowed: bool


class Tile(NamedTuple):
    """What a program computes, and how; where not said, see `Tiles`.

    Attributes:
        d_low, d_high: columns of a head, as two powers of two; the second may be 0. See `split_width`.
        block_w: columns of values, a power of two.
        heads_first: whether programs of all heads of a tile follow each other, rather than those of all tiles of a head.
        stages, edge_stages: of the loops over blocks without and with a mask.
        shortest: sequences of fewer queries are passed over.
        at_once: see `Call.at_once`.
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
    """A head's columns as one or two powers of two: 96 is 64 and 32, 192 is 128 and 64.

    The second is 32 or more, and another than what the value's columns ``v_width`` fill. Where they were alike, and keys and values
    took turns in one piece of shared memory, what Triton 3.6 compiled for sm_90 was wrong or read out of bounds.
    """
    whole = max(16, next_power_of_2(width))
    half = whole // 2
    rest = max(32, next_power_of_2(width - half))
    return (half, rest) if rest < half and rest != v_width else (whole, 0)


def _block_w(width: int, v_width: int) -> int:
    """A value's columns as a power of two; as many as a key's where a value has less than 64 and a key more.

    What Triton 3.6 compiled for sm_90 was wrong for 32 columns of values beside 64 or 128 of keys, and right where they were alike.
    """
    whole = max(16, int(next_power_of_2(width)))
    whole_v = max(16, int(next_power_of_2(v_width)))
    return whole if whole_v < min(64, whole) else whole_v


def attend(tiles: Tiles, call: Call) -> None:
    """Launches `tiles_kernel`."""
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
    """Whether tensor maps can describe ``[..., heads, dim]`` as rows of all heads, each ``width`` columns."""
    dim, size = x.shape[-1], x.element_size()
    whole = x.stride(-1) == 1 and x.stride(-2) == dim and (x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1))
    return whole and dim == width and x.data_ptr() % 16 == 0 and x.stride(-3) * size % 16 == 0


def _rows(x: Tensor, rows: int, columns: int) -> Any:
    """A tensor map of ``[..., heads, dim]`` as rows of all heads, for blocks of some rows and columns; None for no columns."""
    heads, dim = x.shape[-2:]
    shape = [x.numel() // (heads * dim), heads * dim]
    return tensor_descriptor.TensorDescriptor(x, shape, [x.stride(-3), 1], [rows, columns]) if columns else None
