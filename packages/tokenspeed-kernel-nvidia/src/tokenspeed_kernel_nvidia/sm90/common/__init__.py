"""What kernels for Hopper share: pipelines, tiles, softmax, masks, paging, registers, and how launchers call programs."""
