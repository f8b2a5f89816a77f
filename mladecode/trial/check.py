"""Compiles all, then holds every variant against float32 attention, twice."""
import torch, traceback, sys
from common import *

def reference(c):
    q, cache, table = c["q"].float(), c["kv_cache"].float(), c["page_table"].long()
    outs = []
    for b, n in enumerate(c["cache_seqlens"].tolist()):
        if n == 0:
            outs.append(torch.zeros(q.shape[1], 512, device=q.device)); continue
        k = cache[table[b, :-(-n // 64)]].reshape(-1, 576)[:n]
        p = torch.softmax(q[b] @ k.T * c["softmax_scale"], -1)
        outs.append(p @ k[:, :512])
    return torch.stack(outs)

if __name__ == "__main__":
    compile_all(6)
    bad = 0
    CASES = [([8192], 0.1352), ([9000, 1, 0, 700], 0.1352), ([2000, 63, 65, 64] * 20, 0.04), ([40000], 0.02), ([4096] * 40, 0.04)]
    for (heads, fp8), names in USED.items():
        for lengths, scale in CASES:
            c = call_of(0, 0, heads, fp8, lengths, scale=scale)
            want = reference(c)
            for name in reversed(names):
                if "no merge" in name: continue
                try:
                    use(heads, fp8, name)
                    got, lse = mla_decode.mla_decode_with_kvcache(**c, return_lse=True)
                    again = mla_decode.mla_decode_with_kvcache(**c)
                    error = ((got.float() - want).norm() / want.norm()).item()
                    same = torch.equal(got, again)
                    ok = same and error < (0.05 if fp8 else 0.006) and not got.isnan().any().item()
                    bad += not ok
                    print("ok " if ok else "BAD", heads, "fp8" if fp8 else "bf16", len(lengths), name, f"{error:.5f}", same, flush=True)
                except Exception as e:
                    bad += 1
                    print("BAD", heads, fp8, name, type(e).__name__, str(e)[:300], flush=True)
    print("bad:", bad)
