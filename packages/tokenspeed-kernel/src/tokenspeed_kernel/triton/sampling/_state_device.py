"""A row's state between the kernels of sampling: int64 ``[rows, STATE]``, these fields."""

from __future__ import annotations

import triton.language as tl

from tokenspeed_kernel.triton.sampling import _state

LARGEST = tl.constexpr(0)  # sort key of the largest logit
DECIDED = tl.constexpr(1)  # 1 if the row has its token
LOW = tl.constexpr(2)  # the last token kept is expected at a sort key from here
HIGH = tl.constexpr(3)  # up to here; less than LOW where nothing is expected
COPIED = tl.constexpr(4)  # how many tokens have such keys
LAST = tl.constexpr(5)  # the last token kept, `packed`; written where no token is drawn, and so is the next
KEPT = tl.constexpr(6)  # what all tokens kept weigh together; 0 of a greedy row
STATE = tl.constexpr(_state.STATE)

# Where count and weight are summed in one int64, the count stands above this many bits. A weight has 41, so that 2^10 fit below:
# so many tokens may be summed.
COUNT_SHIFT = tl.constexpr(51)
ONE_TOKEN = tl.constexpr(1 << 51)
WEIGHT_MASK = tl.constexpr((1 << 51) - 1)
