"""The functions that run the commands of ``tokenspeed-kernel``. `tokenspeed_kernel_command` declares the commands.

This package needs the libraries of the extra ``[tools]``.
"""
