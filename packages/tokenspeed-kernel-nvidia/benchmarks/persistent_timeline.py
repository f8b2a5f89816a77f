"""The time of one layer in the persistent kernel of `sm90/layers`, for GPT-OSS-120B with one token on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/persistent_timeline.py

The steps of a layer run one after another, because each step needs all results of the preceding step. Memory is busy while the
producer warps load. These warps load the weights of qkv and of the projection as far as the ring buffer has room, and the weights
of the experts as soon as the experts are known. So the time of a layer is the sum of the latencies of the steps, of which one, the
first GEMM of the experts, is bound by memory. The model's sum, made before the kernel, is 37.8 us.

Measurements of `h200_persistent.py`, microseconds of a layer with a context of 1,024. Separate launches take 50, 59, 82 and 127 for
one, two, four and eight tokens. The versions of the kernel, for one token:

* 55.1: the first version;
* 47.1: counters instead of polled words for most exchanges, one CTA instead of 16 for the 128 keys of a window;
* 46.3: no spilled registers, less code;
* 45.6: panels of the experts split between CTAs (stream-K), and one copy instead of eight for each stage of dense weights. Each
  step became shorter, but loads that other warps wait for became longer by as much: the copies had been slow enough before;
* 43.5: at most 4 to 6 stages of a CTA in flight. Bulk copies of all 18 stages are a queue of 4 us in front of every other load,
  also of loads that hit L2. Keys and values are prefetched into L2 before the weights of their layer;
* 40.3: no fences. A fence waits for all stores, which takes long while weights are loaded. Counters are now hints, and only the
  tags of the words say that data are there. Activations and the experts' results have tags, too;
* 39.7: stages of 9 KB, of which five hold eight rows of qkv; the token's row is split for the experts while the logits travel;
* 38.4: readers poll the experts' results without a counter, because few threads read them; no sorting of one token's experts; at
  most 9 stages in flight once the MMAs of a dense GEMM have begun.

Two tokens take 51.5, four 79, eight 128.5. What changed nothing, or made it slower: prefetches of dense weights into L2 (0.4 us
slower), holding back the loads of w2 until the activations have arrived, polling words without counters (0.3 to 2.3 us slower
for each of four exchanges), more or fewer stages of dense weights in flight (2: 0.7 to 2.3 us slower; 9: 0.4 to 1).

With fp8 weights of qkv and of the projection, layers of one, two and four tokens take 36.8, 51.6 and 77.9; bfloat16 weights take
38.2, 52.0 and 79.5 in the same run (`h200_persistent_fp8.json`). So half of the bytes saves only 1.4: all weights of qkv are then
in shared memory before the input is normalised, but the MMA warps still need 2.9 for them, and 2.3 for the projection. Conversion
to bfloat16, with twice as many instructions, took 37.9 a layer. Two GPUs with half of each layer take 30.8 for one token
(`h200_ranks.json`): the steps between the GEMMs do not become shorter.

What remains, from the trace: from the last MMAs of w13 to the first of w2 4.5 us, and from the last MMAs of w2 to the next layer's
first MMAs 4.5 us, although a load from L2 takes 0.7: w2's and qkv's weights are loaded at the same time, and SMs differ by 1 to 2
us in the time of their loads. Readers of the layer's output first wait for the counter and then load words: two latencies.
"""

from __future__ import annotations

READ_TB_PER_S = 4.35  # measured: read bandwidth of the device, `mm_shapes`
DENSE_ELEMENTS = 5120 * 2880 + 2880 * 4096  # of qkv and of the projection
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


def bytes_of(experts: float, dense_bytes: int = 2) -> float:
    """Returns the bytes of a layer's weights, with this many experts, and ``dense_bytes`` bytes for an element of qkv."""
    return DENSE_ELEMENTS * dense_bytes + ROUTER_BYTES + experts * EXPERT_BYTES


def time_of(size: float) -> float:
    """Returns the microseconds to read ``size`` bytes from memory."""
    return size / READ_TB_PER_S / 1e6


def main() -> None:
    for name, found in (("persistent", STEPS), ("today", TODAY)):
        print(f"{name:10} {sum(found.values()):5.1f} us:", ", ".join(f"{step} {us:.1f}" for step, us in found.items()))
    print(f"{'floor':10} {time_of(bytes_of(4)):5.1f} us")


if __name__ == "__main__":
    main()
