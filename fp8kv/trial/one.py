"""Runs one call by both kernels, and compares."""
import sys, time, traceback
import torch
from shapes import ALL, DECODE, VARIANTS, cute, made, portable, tail, vary
name, variant = list(ALL)[int(sys.argv[1])], sys.argv[2]
t = time.time()
given = made(name)
tail(2, 16)
vary(VARIANTS.get(name, {}).get(variant, {}))
cute(name, given)
torch.cuda.synchronize()
print(f"{name} {variant}: cute ran {time.time() - t:.0f} s", flush=True)
results = {}
for waves, shares in ((0, 1), (2, 16), (4, 32)) if name in DECODE else ((0, 1),):
    tail(waves, shares)
    given["out"].fill_(float("nan"))
    cute(name, given)
    torch.cuda.synchronize()
    results[waves, shares] = given["out"].float().clone()
given["out"] = torch.empty_like(given["out"])
portable(name, given)
wanted = given["out"].float()
size = wanted.square().mean().sqrt()
for key, x in results.items():
    rms = ((x - wanted).square().mean().sqrt() / size).item()
    worst = ((x - wanted).abs().max() / size).item()
    print(f"{name} {variant} {key}: rms {rms:.5f} worst {worst:.4f} {'ok' if rms < 0.01 and worst < 0.2 else 'WRONG'} {time.time() - t:.0f} s", flush=True)
