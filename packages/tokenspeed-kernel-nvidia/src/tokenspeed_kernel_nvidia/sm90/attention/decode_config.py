"""What programs of `decode` are compiled for, and which one serves what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tokenspeed_kernel_nvidia.sm90.attention import served
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

# Widths of keys and of values.
WIDTHS = (*((head_dim, head_dim) for head_dim in served.HEAD_DIMS), *served.OTHER_WIDTHS)
PAGE_SIZES = (1, *served.PAGE_SIZES)
CONSUMERS = 4  # warps that compute; one more loads
SHARED_BYTES = 228 * 1024  # of a multiprocessor
OTHER_BYTES = 3072  # of a CTA, besides tiles and results: 1024 that the system takes, and 1024 to begin at a multiple of that
ROWS = (8, 16, 32, 64)  # query rows of a key head that programs are made for
PIECES = 16  # partial results of a sequence that are merged at once: what registers allow
# What there is to do. Sequences are divided where little or much is visible of them all together, or where they are few and long,
# and not where they are short.
Work = Literal["little", "much", "long", "short", "many short"]
SHORT = ("short", "many short")


@dataclass(frozen=True)
class Row:
    """How a key or value lies in shared memory: in panels, which have a row of 128 or 64 bytes for it.

    Attributes:
        width: its numbers.
        number_bytes: bytes of each.
    """

    width: int
    number_bytes: int

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel's row: 64 where that leaves less of the last panel empty."""
        used = self.width * self.number_bytes
        return 128 if -(-used // 128) * 128 == -(-used // 64) * 64 else 64

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.panel_bytes // self.number_bytes

    @property
    def panels(self) -> int:
        """Panels, of which the last may be wider than what is left of the row. Nobody reads what lies there."""
        return -(-self.width // self.panel)

    @property
    def columns(self) -> int:
        """Columns of all panels."""
        return self.panels * self.panel


@dataclass(frozen=True)
class Config:
    """A program.

    Attributes:
        dtype: of q, the caches and the output.
        head_dim: of keys.
        v_head_dim: of values.
        box: keys that one TMA instruction loads, all of one page. With pages of one token it is 1, and each key's row is copied by
            itself, without TMA.
        rows: query rows of a key head that there is room for: its query heads times the new tokens of a sequence.
        split: whether sequences are divided among groups.
        block: keys of a tile.
        resident: CTAs that share a multiprocessor.
        heads: key heads of a CTA: one, whose tiles its warps take in turn, or as many as there are warps.
        fp8: whether the caches are e4m3. Their numbers become float16 on their way to the products, and queries with them.
        capped: whether scores have a limit, ``logit_cap``.
        abreast: key heads whose rows lie side by side in a tile. With two, of eight query rows each, rows are of 128 bytes where a
            head of 64 in fp8 has 64.
        turned: whether keys and values are the left operands, see `decode_turned_device`.
    """

    dtype: str
    head_dim: int
    v_head_dim: int
    box: int
    rows: int
    split: bool
    block: int
    resident: int
    heads: int = 1
    fp8: bool = False
    capped: bool = False
    abreast: int = 1
    turned: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of a key's or value's number."""
        return 1 if self.fp8 else 2

    @property
    def gathered(self) -> bool:
        """Whether each key's row is copied by itself."""
        return self.box == 1

    @property
    def k_row(self) -> Row:
        """How keys lie in shared memory."""
        return Row(self.abreast * self.head_dim, self.kv_bytes)

    @property
    def v_row(self) -> Row:
        """How values lie in shared memory."""
        return Row(self.abreast * self.v_head_dim, self.kv_bytes)

    @property
    def width(self) -> int:
        """Numbers of a row of results in shared memory, so that a lane's stores go to other banks than its neighbours'. A lane
        stores two numbers at once, four with an fp8 cache."""
        return self.v_head_dim + (16 if self.fp8 else 8)

    @property
    def row_warps(self) -> int:
        """Warps that share the rows of a tile, each with all its keys: a warp's sums have 64 registers a thread at most."""
        return max(1, self.rows // (32 if max(self.head_dim, self.v_head_dim) == 64 else 16))

    @property
    def parts(self) -> int:
        """Warps with results of the same rows, from different tiles."""
        return CONSUMERS // self.readers

    @property
    def readers(self) -> int:
        """Warps that read a tile."""
        return self.row_warps * self.heads

    @property
    def merge_floats(self) -> int:
        """Shared memory for what warps have found, where they share a key head."""
        if self.heads > 1:
            return 4  # nothing, but an array has a size, and this one's a multiple of 16 bytes
        return self.parts * self.rows * self.width

    @property
    def stage_numbers(self) -> int:
        """Keys and values of a tile, in numbers, and what their panels have besides."""
        return self.heads * self.block * (self.k_row.columns + self.v_row.columns)

    @property
    def stages(self) -> int:
        """Tiles on their way. A multiple of the parts, so that a warp meets every phase of the barriers that it waits for."""
        room = SHARED_BYTES // self.resident - OTHER_BYTES - 4 * self.merge_floats
        return room // (self.kv_bytes * self.stage_numbers) // self.parts * self.parts


def config_of(
    dtype: str,
    widths: tuple[int, int],
    page_size: int,
    rows: int,
    work: Work,
    fp8: bool = False,
    capped: bool = False,
    close: bool = False,
) -> Config:
    """The program for some work.

    Figures are microseconds on an H200 of 64 query heads and 8 key heads of dimension 64, in pages of 64, in a CUDA graph with an
    ordinary kernel between calls. They compare: there were few calls in a graph, whose start is in them.

    Args:
        widths: of keys and of values.
        close: whether key heads are even in number, and neighbours in the caches.
    """
    head_dim, v_head_dim = widths
    if close and paired(head_dim, v_head_dim, page_size, rows, work, fp8):
        return Config(dtype, *widths, min(32, page_size), 16, True, 32, 2, 1, fp8, capped, 2)
    if fp8 and rows == 8 and head_dim > 128:
        # Two CTAs a multiprocessor have the registers. 64 x 4096 of 2 key heads of 256: 76.2 us, and 81.9 with queries as the
        # left operands; 32 x 4096 of 8: 132.6, 133.0; of 192/128: 91.7, 91.4. But 80.1, 79.3 at 96, and 82.6, 82.4 at 80.
        return Config(dtype, *widths, min(16, page_size), rows, work not in SHORT, 16, 2, 1, fp8, capped, turned=True)
    block, resident, heads = _tile(head_dim, v_head_dim, rows, work, fp8)
    if page_size == 1 and not fp8 and (rows == 16 or head_dim == 128):
        block = max(16, block // 2)  # to gather rows takes registers too
    return Config(dtype, *widths, min(block, page_size), rows, work not in SHORT, block, resident, heads, fp8, capped)


def paired(head_dim: int, v_head_dim: int, page_size: int, rows: int, work: Work, fp8: bool) -> bool:
    """Whether a program has two key heads abreast, with tiles of 32 keys, and two CTAs a multiprocessor.

    64 x 8192 tokens of 64 query heads and 8 key heads take 133.7 us, and 148.5 with a key head by itself and 64 keys. The loads
    alone take 132.0 and 141.3: rows of 64 bytes are what is slow. Tiles of 16 keys 138.2, of 64 keys 134.3; three CTAs 141.9. A key
    head by itself with 128 keys 146.4, with 32 keys 155.3, and with three CTAs 155.0.
    """
    return fp8 and rows == 8 and head_dim == v_head_dim == 64 and page_size > 1 and work in ("much", "long")


def _tile(head_dim: int, v_head_dim: int, rows: int, work: Work, fp8: bool) -> tuple[int, int, int]:
    """Keys of a tile, CTAs of a multiprocessor, and key heads of a CTA. Figures are of caches in 16 bits."""
    if work == "many short" and rows * head_dim <= 2048 and head_dim <= 128:  # what registers allow
        # Windows of 128, beside a key head a CTA: 128 sequences 14.4, 15.8; 512 43.2, 46.3; but 64 back to back 7.9, 6.9.
        return (32 if head_dim == 64 and rows <= 16 else 16), 2, CONSUMERS
    if head_dim > 128:  # so that each warp has a tile in the ring; queries and sums of wide rows take the registers of two CTAs
        return 16, 1 if v_head_dim > 128 or (fp8 and rows == 8) else 2, 1
    if head_dim == 128:
        return 32, 2, 1  # what registers allow
    if head_dim > 64:
        return 16 if rows > 8 else 32, 2, 1  # so that there is a tile for each warp, and one on its way
    if work in SHORT:
        # 64 windows of 128: 9.4, with 32 keys 9.9. With an fp8 cache the registers are for three CTAs.
        return 16, (3 if fp8 else 4) if rows == 8 else 2, 1
    if rows > 16 or work == "long":
        # The first is what registers allow. 1 x 2K: 6.50, with 64 keys 6.81; 1 x 8K: 9.45, 10.33; 1 x 33K: 21.0, 22.1; 1 x 131K:
        # 66.2, 70.8. A ring of all memory for one CTA, instead of half of it, is no better: 6.43, 9.42, 21.1, 67.1.
        return (16 if fp8 and rows > 16 else 32), 2, 1
    # 64 x 1K: 42.9, with 32 keys 46.4, with three CTAs 46.7; 16 x 8K: 74.6, 74.3, 74.3. 1 x 1K: with 16 keys 6.53, with 64 6.74.
    return 16 if work == "little" else 64, 2, 1


def every_config() -> list[Config]:
    """All that is served."""
    some = {
        config_of(dtype, widths, page_size, rows, work, fp8, capped, close): None
        for close in (False, True)
        for capped in (False, True)
        for dtype in DTYPES.values()
        for widths in WIDTHS
        for rows in ROWS
        for work in get_args(Work)
        for page_size in PAGE_SIZES
        for fp8 in (False, True)
    }
    return list(some)
