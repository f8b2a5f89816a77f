"""What every wheel of the project stands on: the operators' declarations, and the framework that turns one into a function.

A vendor wheel needs this and PyTorch, nothing else: its kernels are declared with `tokenspeed_kernel_base.registry`, and its plain
functions are the operators declared in `tokenspeed_kernel_base.ops`, served by its own kernels alone. The wheel
``tokenspeed-kernel`` puts the portable kernels, plugins and the workbench on top. Importing this package imports nothing but the
standard library, and warns of distributions that are another project's.
"""

from tokenspeed_kernel_base.installation import warn_of_wrong_distributions
from tokenspeed_kernel_base.version import __version__

__all__ = ["__version__"]

warn_of_wrong_distributions()
