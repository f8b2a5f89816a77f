"""A batch as the mask function describes it to the attention function: one int32 tensor, made once per forward and kind of layer.

transformers carries a mask from the mask function to the layers only if it is a tensor of four dimensions. A batch is such a
tensor, ``[1, layout, window, entries]``. ``entries`` is the size of a table of integers. ``layout`` and ``window`` are expanded
dimensions without storage. Their sizes are facts that a layer must know on the host. So no layer waits for the device, and they
are constants for ``torch.compile``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Values of `Batch.layout`. They differ from 1, the size of this dimension in ordinary masks.
RAGGED, PAGED = 2, 3


@dataclass(frozen=True)
class Batch:
    """What a layer's attention needs to know of a batch.

    Attributes:
        layout: RAGGED: the queries' own tokens are all keys. PAGED: keys lie in a cache, whose pages are single tokens.
        window_left: visible tokens before the token itself; -1 for all.
        table: int32. RAGGED: ``[sequences + 1]``, the cumulative lengths of the sequences. PAGED: ``[batch * (1 + tokens)]``, the
            number of visible tokens of each row, then the pages of each row, oldest first.
    """

    layout: int
    window_left: int
    table: Tensor

    def pack(self) -> Tensor:
        """The tensor that transformers carries."""
        return self.table.view(1, 1, 1, -1).expand(1, self.layout, self.window_left + 2, -1)


def unpack(mask: Tensor | None) -> Batch | None:
    """The batch that a mask describes; None for every other mask."""
    if mask is None or mask.dtype != torch.int32 or mask.ndim != 4:
        return None
    _, layout, window, _ = mask.shape
    return Batch(layout, window - 2, mask[0, 0, 0])


def row_pages(heads: int, tokens: int) -> int:
    """Pages of one token between rows of a contiguous cache ``[batch, heads, tokens, dim]``."""
    return heads * tokens


def kv_heads_of(config: Any) -> int:
    """The number of KV heads that a configuration names; layers may have others."""
    return getattr(config, "num_key_value_heads", None) or 1
