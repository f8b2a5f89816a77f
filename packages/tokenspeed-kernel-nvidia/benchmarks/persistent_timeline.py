"""A model of the time of one layer in the persistent kernel of `sm90/layers`, for GPT-OSS-120B with one token on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/persistent_timeline.py

The steps of a layer run one after another, because each step needs all results of the preceding step. Memory is busy while the
producer warps load. These warps load the weights of qkv and of the projection as far as the ring buffer has room, and the weights
of the experts as soon as the experts are known. So the time of a layer is the sum of the latencies of the steps, of which one, the
first GEMM of the experts, is bound by memory.

The latencies of the exchanges, and of the steps from the projection on, are those of a trace of an earlier kernel, which had
neither qkv nor attention. The others are estimates. The sum is 37.8 us.

Measurements of `h200_persistent.py`, microseconds of a layer with a context of 1,024: one token 47.1 (commit 703aa7ad) and 48.4
(41e20631), where today's launches took 49.6 and 49.4; four tokens 96.6 and 99.3, today's launches 82.6 and 82.2. A first version
took 55.1 us for one token. What was tried since, and what it changed:

* counters instead of polled words for all exchanges: -4.7; words for qkv and for the attention's output, counters for the others:
  -0.7 more;
* one CTA instead of 16 for the 128 keys of a window, together with the two changes that were removed again: -2.5;
* addresses, lengths and angles in shared memory: -0.2; several lanes that issue the copies of dense weights, and L2 prefetches of
  the dense weights that do not fit into the ring buffer: nothing;
* removed again, because in the trace other steps became longer by as much: experts' results added by every CTA instead of
  exchanging their sums, and the token's row prepared for the experts before these are known. The measured kernels have both.

Steps of the newest trace (41e20631), medians over CTAs, in us:

| step | 1 token | 4 tokens |
|---|---|---|
| input seen, normalised | 3.3, 0.3 | 3.9, 1.0 |
| qkv: MMAs, own words stored | 4.4, 0.7 | 5.4, 2.3 |
| attention: queries seen, values multiplied | 2.3, 1.1 | 6.3, 2.9 |
| attention: partial results, own words stored | 1.5, 2.6 | 1.6, 2.9 |
| attention's output seen | 1.3 | 6.3 |
| projection: MMAs, own words stored | 2.4, 1.0 | 3.2, 1.0 |
| totals seen, norm and router | 1.3, 0.5 | 2.6, 1.6 |
| logits: own words stored, seen | 0.5, 1.5 | 0.6, 0.9 |
| top-k, lists of pairs | 0.4, 0.3 | 0.4, 0.3 |
| w13: item read, rows split, first slab, MMAs | 0.5, 0.2, 0.9, 8.6 | 0.5, 1.2, 0.2, 29.0 |
| w2: activations seen, rows split, first slab, MMAs | 3.2, 1.1, 0.2, 2.4 | 4.6, 1.2, 0.2, 12.1 |
| w2 of all CTAs seen, output written | 4.1 | 6.8, 1.4 |

What the trace says about the difference from the model: the GEMMs with dense weights take twice the estimate, although a part of
the weights is in the ring buffer when they begin. For each 1 KB of weights, a warp read as much of the token from shared memory.
At the end of a layer, CTAs with one panel of w2 wait 2.7 us for those with two. The measured kernel had 140 KB of code and 109
instructions that spill registers. Since then, lanes without a token read nothing, the code has 112 KB, and nothing is spilled. The
present kernel has not been measured.
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
