"""Makes ``python -m tokenspeed_kernel.workbench.numerics`` run ``tokenspeed-kernel verify``."""

from tokenspeed_kernel_command import main

if __name__ == "__main__":
    main("verify")
