"""Device code that the attention kernels share: scores, one step of the online softmax, and its end.

Everything is in base 2, because the hardware's exponential is: with ``multiplier = softmax_scale * log2(e)`` a score is
``products * multiplier`` and its weight ``exp2(score - largest)``. Under a logit cap ``multiplier`` is ``softmax_scale / cap`` and
``cap_log2 = cap * log2(e)``, so that a score is ``cap_log2 * tanh(products * multiplier)``. `score_factors` makes both.

The state of a row is ``(largest, total)``, float32: the largest score so far and the sum of weights relative to it, from -inf and
0. A row that has seen nothing weighs nothing, rather than NaN.
"""

from __future__ import annotations

import math


def score_factors(softmax_scale: float, logit_cap: float) -> tuple[float, float]:
    """``(multiplier, cap_log2)`` for `scored`; ``cap_log2`` is 0 without a cap."""
    if logit_cap > 0:
        return softmax_scale / logit_cap, logit_cap * math.log2(math.e)
    return softmax_scale * math.log2(math.e), 0.0
