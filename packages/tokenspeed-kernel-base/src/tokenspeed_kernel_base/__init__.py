"""The base of every wheel of the project: the operators' declarations, and the framework that turns a declaration into a function.

A vendor wheel needs this package and PyTorch, nothing else. The wheel declares its kernels with `tokenspeed_kernel_base.registry`.
The wheel's functions are the operators of `tokenspeed_kernel_base.ops`. A call of such a function selects among the wheel's own
kernels only. The wheel ``tokenspeed-kernel`` adds the portable kernels, plugins and the workbench.

Importing this package imports only the standard library. The import warns of installed distributions that carry this project's
names but belong to another project.
"""

from tokenspeed_kernel_base.installation import warn_of_wrong_distributions
from tokenspeed_kernel_base.version import __version__

__all__ = ["__version__"]

warn_of_wrong_distributions()
