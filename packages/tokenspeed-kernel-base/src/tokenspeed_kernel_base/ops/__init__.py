"""The operators: one file each, found by `tokenspeed_kernel_base.discovery.import_modules`."""
