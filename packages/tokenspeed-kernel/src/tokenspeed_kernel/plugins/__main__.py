"""``python -m tokenspeed_kernel.plugins`` lists the installed plugins."""

from tokenspeed_kernel_command import main

if __name__ == "__main__":
    main("plugins", "list")
