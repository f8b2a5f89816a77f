"""A `Batch` describes a batch. It is packed into an int32 tensor, which the mask function passes to the attention function. There
is one tensor for each forward pass and kind of layer.

transformers passes a mask from the mask function to the layers only if the mask is a tensor of four dimensions. So a packed batch
is such a tensor, ``[1, layout, window, entries]``. ``entries`` is the length of the table `Batch.table`. ``layout`` and ``window``
are expanded dimensions without storage. Their sizes encode values that a layer must know on the host. So no layer waits for the
device, and ``torch.compile`` treats these values as constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# The size of dimension 1 of a packed batch, for `Batch.page_size` 0. In ordinary masks this dimension has the size 1.
_LEAST = 2
# The attribute of a packed batch that refers to the unpacked `Batch`, so that only the first layer of a forward pass unpacks it.
_BATCH = "tokenspeed_kernel_batch"


@dataclass(frozen=True)
class Batch:
    """The data that a layer's attention needs about a batch.

    Attributes:
        page_size: number of tokens of a page of the cache. 0: there is no cache, but keys for the query tokens only.
        window_left: number of tokens before each token that it attends to; -1 means all.
        table: int32. Without a cache: ``[sequences + 1]``, the cumulative lengths of the sequences. With a cache:
            ``[batch * (1 + pages)]``, the number of visible tokens of each row, then the page numbers of each row.
        views: parts of the table, see `pages_of`, by the number of rows. Only the first layer of a forward pass makes them.
    """

    page_size: int
    window_left: int
    table: Tensor
    views: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    def pack(self) -> Tensor:
        """Returns the tensor that transformers passes from the mask function to the layers."""
        return self.table.view(1, 1, 1, -1).expand(1, self.page_size + _LEAST, self.window_left + 2, -1)

    def pages_of(self, rows: int, shift: int) -> tuple[Tensor, Tensor]:
        """Returns the number of visible tokens of each row, ``[rows]``, and the page table, ``[rows, pages]``.

        ``shift`` is added to the pages of row 1, twice to those of row 2, and so on.
        """
        found = self.views.get(rows)
        if found is None:
            self.views[rows] = found = self.table[:rows], self.table[rows:].view(rows, -1)
        if not shift:
            return found
        lengths, pages = found
        return lengths, pages + torch.arange(0, rows * shift, shift, dtype=torch.int32, device=pages.device).unsqueeze(1)


def unpack(mask: Tensor | None) -> Batch | None:
    """Returns the batch that a mask describes; None if the mask is not a packed batch."""
    if mask is None:
        return None
    if not torch.compiler.is_compiling() and (batch := getattr(mask, _BATCH, None)) is not None:
        found: Batch = batch
        return found
    if mask.dtype != torch.int32 or mask.ndim != 4:
        return None
    _, layout, window, _ = mask.shape
    batch = Batch(layout - _LEAST, window - 2, mask[0, 0, 0])
    if not torch.compiler.is_compiling():
        setattr(mask, _BATCH, batch)
    return batch


def row_pages(heads: int, tokens: int) -> int:
    """Returns the number of pages from one row of a contiguous cache ``[batch, heads, tokens, dim]`` to the next. Pages begin one
    token after another, whatever their size."""
    return heads * tokens


def kv_heads_of(config: Any) -> int:
    """Returns the number of KV heads in a model's configuration. Some layers may have another number of heads."""
    return getattr(config, "num_key_value_heads", None) or 1
