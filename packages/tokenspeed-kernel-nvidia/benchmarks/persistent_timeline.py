"""A model of the time of one layer in the persistent kernel of `sm90/layers`, for GPT-OSS-120B with one token on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/persistent_timeline.py

The steps of a layer run one after another, because each step needs all results of the preceding step. Memory is busy while the
producer warps load. These warps load the weights of qkv and of the projection as far as the ring buffer has room, and the weights
of the experts as soon as the experts are known. So the time of a layer is the sum of the latencies of the steps, of which one, the
first GEMM of the experts, is bound by memory.

The latencies of the exchanges, and of the steps from the projection on, are those of a trace of an earlier kernel, which had
neither qkv nor attention. The others are estimates.
"""

from __future__ import annotations

READ_TB_PER_S = 4.35  # measured: read bandwidth of the device, `mm_shapes`
QKV_BYTES = 5120 * 2880 * 2
PROJECTION_BYTES = 2880 * 4096 * 2
ROUTER_BYTES = 128 * 2880 * 2
EXPERT_BYTES = (90 + 45) * (512 + 45 * 2176)  # bytes of one expert, in the layout of `mxfp4.layout`
# Microseconds of each step of a layer with one token.
STEPS = {
    "w2 of all CTAs, output": 4.0,
    "input seen, normalised": 1.9,
    "qkv": 2.7,
    "queries seen": 1.4,
    "attention": 1.0,
    "splits combined": 1.4,
    "attention's output seen": 1.4,
    "projection": 2.2,
    "totals seen, normalised": 3.0,
    "logits seen, top-k, lists": 2.4,
    "w13: rows, first slab": 1.8,
    "w13": 8.2,
    "w2: activations seen, rows, first slab": 4.0,
    "w2": 2.4,
}
# measured: README of the runtime, microseconds of today's launches at one token.
TODAY = {"qkv": 9.9, "attention": 5.1, "projection": 7.7, "norm, router and top-k": 4.1, "experts": 22.8}


def bytes_of(experts: float) -> float:
    """Returns the bytes of a layer's weights, with this many experts."""
    return QKV_BYTES + PROJECTION_BYTES + ROUTER_BYTES + experts * EXPERT_BYTES


def time_of(size: float) -> float:
    """Returns the microseconds to read ``size`` bytes from memory."""
    return size / READ_TB_PER_S / 1e6


def main() -> None:
    for name, found in (("persistent", STEPS), ("today", TODAY)):
        print(f"{name:10} {sum(found.values()):5.1f} us:", ", ".join(f"{step} {us:.1f}" for step, us in found.items()))
    print(f"{'floor':10} {time_of(bytes_of(4)):5.1f} us")


if __name__ == "__main__":
    main()
