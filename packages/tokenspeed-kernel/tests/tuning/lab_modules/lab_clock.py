"""What the kernels of `lab_kernels` share."""

import time


def spend(us):
    end = time.perf_counter_ns() + us * 1000
    while time.perf_counter_ns() < end:
        pass
