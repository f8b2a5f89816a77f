"""A kernel whose parameters differ from the operator's. The mistake is found when the kernel is imported."""


def silu_and_mul(x): ...
