"""The operators. Each operator has one file, which `tokenspeed_kernel_base.discovery.import_modules` finds."""
