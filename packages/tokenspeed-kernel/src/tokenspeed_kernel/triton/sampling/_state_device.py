"""The state of each row, which one sampling kernel passes to the next: int64 ``[rows, STATE]`` with these fields."""

from __future__ import annotations

import triton.language as tl

from tokenspeed_kernel.triton.sampling import _state

LARGEST = tl.constexpr(0)  # sort key of the largest logit
DECIDED = tl.constexpr(1)  # 1 if the row needs no further kernel
LOW = tl.constexpr(2)  # the smallest sort key that the cutoff token is expected to have
HIGH = tl.constexpr(3)  # the largest sort key that the cutoff token is expected to have; less than LOW if no range is expected
COPIED = tl.constexpr(4)  # the number of tokens with sort keys in [LOW, HIGH], which are copied
LAST = tl.constexpr(5)  # the cutoff token, `packed`; written only if the caller wants no drawn token
KEPT = tl.constexpr(6)  # the total weight of all tokens kept, written whenever LAST is; 0 for a greedy row
STATE = tl.constexpr(_state.STATE)

# A count and a weight are summed in one int64, with the count in the bits from COUNT_SHIFT on. A weight has 41 bits, so sums of up
# to 2^10 weights fit below the count.
COUNT_SHIFT = tl.constexpr(51)
ONE_TOKEN = tl.constexpr(1 << 51)
WEIGHT_MASK = tl.constexpr((1 << 51) - 1)
