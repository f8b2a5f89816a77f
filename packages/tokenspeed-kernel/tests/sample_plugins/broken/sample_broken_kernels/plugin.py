"""Each function is the entry point of one plugin."""

import sys

from tokenspeed_kernel_base.registry import register_kernel

NOT_CALLABLE = 42


def _rmsnorm(x, weight, eps, residual, out, residual_out):
    raise AssertionError("a kernel of a broken plugin ran")


def _silu_and_mul(x, out):
    raise AssertionError("a kernel of a broken plugin ran")


def raises() -> None:
    raise RuntimeError("the driver is too old")


def exits() -> None:
    sys.exit("no device")


def wants_arguments(registry) -> None: ...


def wrong_signature() -> None:
    def rmsnorm(x, weight): ...

    register_kernel("norm", "rmsnorm", solution="wrong", signatures=None, priority=19)(rmsnorm)


def wrong_signature_later() -> None:
    register_kernel("activation", "silu_and_mul", solution="later", signatures=None, priority=19)(
        "sample_broken_kernels.kernels:silu_and_mul"
    )


def name_clash() -> None:
    register_kernel("norm", "rmsnorm", name="reference_rmsnorm", solution="clash", signatures=None, priority=19)(_rmsnorm)


def equal_priority() -> None:
    register_kernel("norm", "rmsnorm", name="zz_equal_rmsnorm", solution="equal", signatures=None, priority=16)(_rmsnorm)


def half() -> None:
    register_kernel("norm", "rmsnorm", name="half_rmsnorm", solution="half", signatures=None, priority=19)(_rmsnorm)
    register_kernel("activation", "silu_and_mul", name="half_silu_and_mul", solution="half", signatures=None, priority=18)(
        _silu_and_mul
    )
    raise RuntimeError("after two of three")


def misspelt() -> None:
    register_kernel("norm", "rmsnrm", solution="misspelt", signatures=None)(_rmsnorm)
