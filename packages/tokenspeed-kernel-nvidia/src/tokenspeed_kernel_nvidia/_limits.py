"""What the kernels for Hopper serve, exactly: the plugin's traits and the plain functions' checks are made of these."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)
# Of sinks.
SINKS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Of keys and values alike.
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
# Query heads that share a key head: in decode, and in prefill and extend, whose tiles are whole groups of heads. Of the ratios in
# between some would need more registers than there are.
DECODE_GQA_RATIOS = tuple(range(1, 17))
GQA_RATIOS = (1, 2, 4, 8, 16)
# Tokens to the left that the window kernels see besides the token itself.
LONGEST_WINDOW = 127
# Rows that are decoded at once: new tokens of a sequence times the query heads of a key head.
MOST_ROWS = 64
