"""A module that imports a package which is not installed."""

import a_gpu_toolchain_that_is_not_installed  # noqa: F401


def register() -> None: ...
