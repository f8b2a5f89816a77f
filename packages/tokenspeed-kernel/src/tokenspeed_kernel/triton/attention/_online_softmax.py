"""Host side of the softmax in `_online_softmax_device`."""

from __future__ import annotations

import math


def score_factors(softmax_scale: float, logit_cap: float) -> tuple[float, float]:
    """Returns ``(multiplier, cap_log2)``, the fields of `_online_softmax_device.Scaling`. ``cap_log2`` is 0 without a cap."""
    if logit_cap > 0:
        return softmax_scale / logit_cap, logit_cap * math.log2(math.e)
    return softmax_scale * math.log2(math.e), 0.0
