"""``python -m tokenspeed_kernel.workbench.numerics`` is ``tokenspeed-kernel verify``."""

from tokenspeed_kernel_command import main

if __name__ == "__main__":
    main("verify")
