"""A kernel whose parameters are not the operator's, which only shows when it is imported."""


def silu_and_mul(x): ...
