"""Makes ``python -m tokenspeed_kernel.workbench.benchmark`` run ``tokenspeed-kernel bench``."""

from tokenspeed_kernel_command import main

if __name__ == "__main__":
    main("bench")
