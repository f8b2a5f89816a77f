"""``python -m tokenspeed_kernel.workbench.numerics`` is ``tokenspeed-kernel verify``."""

from tokenspeed_kernel.__main__ import main

if __name__ == "__main__":
    main("verify")
