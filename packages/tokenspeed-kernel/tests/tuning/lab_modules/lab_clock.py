"""What the kernels of `lab_kernels` share: a clock that a kernel sets forward, so that no busy machine makes one slower."""


class Clock:
    """Stands in for the module ``time``. Reading it takes 20 microseconds, which is what a call takes that spends nothing."""

    def __init__(self):
        self.ns = 0

    def perf_counter_ns(self):
        self.ns += 20_000
        return self.ns

    def monotonic(self):
        return self.perf_counter_ns() / 1e9


clock = Clock()


def spend(us):
    clock.ns += us * 1000
