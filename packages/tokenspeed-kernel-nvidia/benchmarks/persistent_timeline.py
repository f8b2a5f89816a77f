"""A model of the time of one layer in the persistent kernel of `sm90/layers`, for GPT-OSS-120B on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/persistent_timeline.py

The steps of a layer run one after another, because each step needs all results of the preceding step. Memory is busy while the
producer warps load. These warps load the weights of the experts as soon as the experts are known, and the weights of the next
projection as far as the ring buffer has room. So the time of a layer is the sum of three times: loading the experts' weights, the
latencies of the steps, and the part of the projection's load time that no latency hides.

Latencies are in microseconds. "measured" marks a figure that was measured on an H200 in this repository. "assumed" marks an
estimate, which measurements of `h200_persistent.py` can correct.

The first measurement (`h200_persistent.json`) contradicts the model: at one token, a layer takes 32.3 us in the persistent kernel
and 35.5 us with today's launches; at four tokens, 71.0 and 66.7 us. `h200_persistent.py --trace` gave these times of the steps, as
medians over CTAs, in us:

| step | 1 token | 4 tokens |
|---|---|---|
| outputs of the preceding layer seen, attention's output loaded | 1.4 | 2.1 |
| MMAs of the projection | 2.2 | 2.9 |
| totals: own words stored, seen by a thread, seen by all warps | 0.4, 1.0, 1.2 | 0.5, 1.4, 2.4 |
| norm and router | 0.4 | 1.4 |
| logits: stored, seen | 0.2, 1.2 | 0.2, 2.0 |
| top-k, lists of pairs | 0.8 | 1.2 |
| w13: item read, rows split, first slab | 0.5, 1.1, 0.2 | 0.5, 1.1, 0.2 |
| w13: MMAs | 8.2 | 28.1 |
| w2: activations of all CTAs seen, rows split, first slab | 2.7, 1.1, 0.2 | 4.0, 1.1, 0.2 |
| w2: MMAs | 2.4 | 11.8 |
| w2 of all CTAs seen, output written | 4.3, 0.9 | 7.1, 0.9 |

So an exchange between CTAs takes 1.4 to 2.5 us, where the model assumes 0.8. Rows are split twice, for 1.1 us each. CTAs wait up to
4 us for a CTA that has one more panel of w2. If two small layers stay in the L2 cache, a layer takes 17 us for one token, all of it
latency.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_TB_PER_S = 4.35  # measured: read bandwidth of the device, `mm_shapes`
# assumed: the ratio of L2 bandwidth to memory bandwidth, about as measured in the same runs
L2_FACTOR = 1.8
SMS = 132
PROJECTION_BYTES = 2880 * 4096 * 2
ROUTER_BYTES = 128 * 2880 * 2
EXPERT_BYTES = (90 + 45) * (512 + 45 * 2176)  # bytes of one expert, in the layout of `mxfp4.layout`
# Latencies of the steps.
DRAIN = 1.5  # assumed: last slab, partial sums, epilogue, and the counter of w2 (two L2 round trips)
GATE = 1.3  # assumed: fence, counter of the outputs, poll, barrier
ATTENDED = 0.8  # assumed: bulk copy of the attention's output from L2
PROJECT = 0.7  # assumed: 24 stages, eight for each warpgroup, of about 150 cycles
# An exchange of results between all CTAs, by kind of signal (see `config.Exchange`). Assumed for "words" (each word carries the
# layer's tag): a store to L2, and polling of the words. Assumed for "counter" (CTAs count up in global memory): in addition a
# fence, an atomic and a barrier.
EXCHANGE = {"words": 0.8, "counter": 1.3}
NORM = 0.4  # assumed: two barriers and two warp reductions
TOP_K = 0.5  # assumed: four warp maxima, lists of pairs, two barriers
FIRST_BYTES = 1.0  # assumed: latency of memory under load, and the first slab's MMAs
PER_TOKEN = 0.25  # assumed: for each further token, exchange and norm
# measured: README of the runtime, microseconds of today's launches at one token: projection, norm to top-k, experts.
TODAY = {"projection": 7.7, "norm, router and top-k": 4.1, "experts": 22.8}


@dataclass(frozen=True)
class Variant:
    """The parameters of a launch that the model depends on.

    Attributes:
        ring_bytes: bytes of the projection that fit into the ring buffer of a CTA.
        exchange: see `config.Exchange`.
        ahead: bytes of the next projection that each CTA prefetches into L2.
        layers: number of layers of a launch.
    """

    ring_bytes: int = 18 * 8192
    exchange: str = "words"
    ahead: int = 0
    layers: int = 4


def time_of(size: float) -> float:
    """Returns the microseconds to read ``size`` bytes from memory."""
    return size / READ_TB_PER_S / 1e6


def steps(tokens: int, experts: float, variant: Variant) -> dict[str, float]:
    """Returns the microseconds of each step of a layer.

    Args:
        experts: the number of distinct experts that the tokens select.
    """
    exchange = EXCHANGE[variant.exchange]
    further = PER_TOKEN * (tokens - 1)
    chosen = {
        "exchange totals": exchange,
        "norm, router": NORM + further,
        "exchange logits": exchange,
        "top-k": TOP_K,
        "first bytes": FIRST_BYTES,
    }
    hidden = DRAIN + GATE + ATTENDED
    ahead = min(SMS * variant.ahead, PROJECTION_BYTES) if variant.layers > 1 else 0
    # The time to load the whole projection. The prefetched bytes come from L2.
    projection = time_of(PROJECTION_BYTES - ahead) + time_of(ahead) / L2_FACTOR
    in_ring = min(1.0, SMS * variant.ring_bytes / PROJECTION_BYTES)
    left = projection - min(hidden, in_ring * projection)
    # If the prefetches take longer than the steps until the experts are known, they delay the loads of the experts' weights.
    delay = max(0.0, time_of(ahead) - PROJECT - sum(chosen.values()))
    return {
        "gate": GATE,
        "attended": ATTENDED,
        "projection": max(PROJECT, left),
        **chosen,
        "experts": time_of(experts * EXPERT_BYTES + ROUTER_BYTES) + delay,
        "drain": DRAIN,
    }


def predicted_us(tokens: int, experts: float, variant: Variant | None = None) -> float:
    """Returns the predicted microseconds of a layer in the persistent kernel. If ``variant`` is None, returns the time with today's
    launches, for one token."""
    return sum(TODAY.values() if variant is None else steps(tokens, experts, variant).values())


def main() -> None:
    variants = {"words": Variant(), "counter": Variant(exchange="counter"), "ahead": Variant(ahead=1 << 20)}
    for name, variant in variants.items():
        found = steps(1, 4, variant)
        print(f"{name:8} {sum(found.values()):5.1f} us:", ", ".join(f"{step} {us:.1f}" for step, us in found.items()))
    print(f"{'today':8} {sum(TODAY.values()):5.1f} us:", ", ".join(f"{step} {us:.1f}" for step, us in TODAY.items()))
    print(f"{'floor':8} {time_of(PROJECTION_BYTES + ROUTER_BYTES + 4 * EXPERT_BYTES):5.1f} us")


if __name__ == "__main__":
    main()
