"""A row's state between the kernels of sampling: int64 ``[rows, STATE]``, these fields and `SUMS`."""

from __future__ import annotations

import triton.language as tl

from tokenspeed_kernel.triton.sampling import _state

LARGEST = tl.constexpr(0)  # sort key of the largest logit
THRESHOLD = tl.constexpr(1)  # sort key of the least candidate
CANDIDATES = tl.constexpr(2)  # how many there are
TOTAL = tl.constexpr(3)  # weight of all tokens, if top-k keeps all
LEAST = tl.constexpr(4)  # sort key of the least logit above -inf
DECIDED = tl.constexpr(5)  # 1 if the row has its token
PENDING = tl.constexpr(6)  # 1 if candidates did not decide
LISTED = tl.constexpr(7)  # how many tokens `collect` listed
LEVELS = tl.constexpr(16)
LEVEL_BITS = tl.constexpr(4)
SUMS = tl.constexpr(8)  # tokens down to the end of each level, then their weights: 2 * LEVELS numbers
FINER_SUMS = tl.constexpr(40)  # the same of finer levels
STATE = tl.constexpr(_state.STATE)

# Where count and weight are summed in one int64, the count stands above this many bits. A weight has 41, so that 2^10 fit below.
COUNT_SHIFT = tl.constexpr(51)
ONE_TOKEN = tl.constexpr(1 << 51)
WEIGHT_MASK = tl.constexpr((1 << 51) - 1)
