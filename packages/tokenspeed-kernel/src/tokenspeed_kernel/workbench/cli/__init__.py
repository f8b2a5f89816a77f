"""What the commands of ``tokenspeed-kernel`` do. `tokenspeed_kernel_command` declares them; this needs the extra ``[tools]``."""
