"""A `Batch` describes a batch. It is packed into an int32 tensor, which the mask function passes to the attention function. There
is one tensor for each forward pass and kind of layer.

transformers passes a mask from the mask function to the layers only if the mask is a tensor of four dimensions. So a packed batch
is such a tensor, ``[1, layout, window, entries]``. ``entries`` is the length of the table `Batch.table`. ``layout`` and ``window``
are expanded dimensions without storage. Their sizes encode values that a layer must know on the host. So no layer waits for the
device, and ``torch.compile`` treats these values as constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Values of `Batch.layout`, which is the size of a dimension of the packed batch. In ordinary masks this dimension has the size 1.
RAGGED, PAGED = 2, 3


@dataclass(frozen=True)
class Batch:
    """The data that a layer's attention needs about a batch.

    Attributes:
        layout: RAGGED: there are keys for the query tokens only. PAGED: the keys are in a cache with pages of one token.
        window_left: number of tokens before each token that it attends to; -1 means all.
        table: int32. RAGGED: ``[sequences + 1]``, the cumulative lengths of the sequences. PAGED: ``[batch * (1 + tokens)]``, the
            number of visible tokens of each row, then the page numbers of each row, oldest token first.
    """

    layout: int
    window_left: int
    table: Tensor

    def pack(self) -> Tensor:
        """Returns the tensor that transformers passes from the mask function to the layers."""
        return self.table.view(1, 1, 1, -1).expand(1, self.layout, self.window_left + 2, -1)


def unpack(mask: Tensor | None) -> Batch | None:
    """Returns the batch that a mask describes; None if the mask is not a packed batch."""
    if mask is None or mask.dtype != torch.int32 or mask.ndim != 4:
        return None
    _, layout, window, _ = mask.shape
    return Batch(layout, window - 2, mask[0, 0, 0])


def row_pages(heads: int, tokens: int) -> int:
    """Returns the number of one-token pages from one row of a contiguous cache ``[batch, heads, tokens, dim]`` to the next."""
    return heads * tokens


def kv_heads_of(config: Any) -> int:
    """Returns the number of KV heads in a model's configuration. Some layers may have another number of heads."""
    return getattr(config, "num_key_value_heads", None) or 1
