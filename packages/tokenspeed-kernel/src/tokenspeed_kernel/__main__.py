"""Makes ``python -m tokenspeed_kernel`` run ``tokenspeed-kernel``."""

from tokenspeed_kernel_command import main

if __name__ == "__main__":
    main()
