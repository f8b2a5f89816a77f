"""New sampling on CUDA against the reference, bit for bit, on rows of all kinds."""
import os
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, os.environ["TRIAL"])
from calls import VOCAB, logits  # noqa: E402

from tokenspeed_kernel import sample_top_k_top_p  # noqa: E402
from tokenspeed_kernel.triton.sampling import sample_top_k_top_p as module  # noqa: E402

launcher = sys.modules["tokenspeed_kernel.triton.sampling.sample_top_k_top_p"].sample_top_k_top_p
CUDA = torch.device("cuda")
INF = float("inf")
lines = []


def say(line):
    lines.append(line)
    print(line, flush=True)
    Path(os.environ.get("OUT", "/tmp"), "check.txt").write_text("\n".join(lines) + "\n")


def masked(x):
    x = x.clone()
    for row in range(x.shape[0]):
        keep = torch.randperm(x.shape[1], device=CUDA)[: [1, 3, 40, 41, 200, 3000, 60000][row % 7]]
        y = torch.full_like(x[row], -INF)
        y[keep] = x[row, keep]
        x[row] = y
    return x


KINDS = {
    "wide": lambda x: x,
    "narrow": lambda x: x / 4,
    "flat": lambda x: x / 100,
    "masked": masked,
    "ties": lambda x: (x / 2).round(),
    "rounded": lambda x: (x + 20).bfloat16().float(),
    "descending": lambda x: x.sort(dim=-1, descending=True)[0],
    "ascending": lambda x: x.sort(dim=-1)[0],
    "far above": lambda x: torch.cat([x[:, :-1], torch.full_like(x[:, :1], 500)], dim=1),
    "huge": lambda x: x * 1e37,
    "far from 0": lambda x: x + 1e5,
    "both zeros": lambda x: torch.copysign(torch.zeros_like(x), x),
    "one span is -inf": lambda x: torch.cat([torch.full_like(x[:, :16384], -INF), x[:, 16384:]], dim=1),
}


def mixed(rows, g):
    drawn = torch.rand(5, rows, generator=g)
    temperature = 10 ** (drawn[0] * 4 - 2)
    temperature[: rows // 2] = 0.5 + 2 * drawn[0, : rows // 2]
    temperature[-1] = 0.0
    top_k = torch.where(drawn[1] < 0.5, 0, (drawn[2] ** 4 * VOCAB).int() + 1).int()
    top_p = torch.where(drawn[3] < 0.2, 1.0, drawn[4].clamp(min=1e-4) ** 0.2)
    seed, offset = (torch.randint(-(2**62), 2**62, (rows,), generator=g) for _ in range(2))
    return [x.to(CUDA) for x in (temperature, top_k, top_p, seed, offset)]


def compare(name, x, asked):
    expected = torch.cat(
        [sample_top_k_top_p.operator.body(x[i : i + 16], *(a[i : i + 16] for a in asked)) for i in range(0, len(x), 16)]
    )
    times = []
    for _ in range(2):
        got = launcher(x, *asked)
        torch.cuda.synchronize()
        times.append(int((got != expected).sum()))
    wrong = (got != expected).nonzero().flatten().tolist()
    say(f"{'ok' if not any(times) else 'WRONG'} {name}" + (f" rows {wrong[:8]} got {got[wrong[:4]].tolist()} not {expected[wrong[:4]].tolist()}" if wrong else ""))


g = torch.Generator().manual_seed(7)
for dtype in (torch.float32, torch.bfloat16):
    base = logits(64, torch.float32, CUDA, 11)
    for name, change in KINDS.items():
        try:
            compare(f"{name} {dtype}", change(base).to(dtype), mixed(64, g))
        except Exception:
            say(f"ERROR {name} {dtype} {traceback.format_exc()[-900:]}")
            torch.cuda.synchronize()

# Nothing is written beyond the memory that the launcher takes.
empty, guards = torch.empty, []


def guarded(*shape, dtype=None, device=None, **more):
    if device is None or torch.device(device).type != "cuda" or dtype is None:
        return empty(*shape, dtype=dtype, device=device, **more)
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    number = 1
    for n in shape:
        number *= n
    memory = empty(number + 8192, dtype=dtype, device=device)
    memory[:4096], memory[4096 + number :] = 77, 77
    guards.append((memory, number))
    return memory[4096 : 4096 + number].view(shape)


torch.empty = guarded
try:
    for name in ("wide", "flat", "masked", "ties"):
        guards.clear()
        launcher(KINDS[name](base), *mixed(64, g))
        torch.cuda.synchronize()
        bad = [m.dtype for m, n in guards if not bool((m[:4096] == 77).all() & (m[4096 + n :] == 77).all())]
        say(f"{'ok' if not bad else 'WRONG'} guards of {len(guards)} tensors, {name} {bad}")
finally:
    torch.empty = empty
say("done")
