"""Building blocks of the Hopper kernels: pipelines, tiles, softmax, masks, paging, registers, and helpers of launchers."""
