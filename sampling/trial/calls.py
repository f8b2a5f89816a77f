"""Calls of sampling, by name."""
import torch

VOCAB = 201088


def request(rows, temperature, k, p, device):
    g = torch.Generator().manual_seed(rows)
    return [
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), k, dtype=torch.int32, device=device),
        torch.full((rows,), p, device=device),
        torch.randint(-(2**62), 2**62, (rows,), generator=g).to(device),
        torch.arange(rows, device=device),
    ]


def logits(rows, dtype, device, seed, vocab=VOCAB, kind="normal"):
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g, device=device) * 4
    if kind == "rounded":
        x = (x * 2).bfloat16().float() / 2 + 16
        x = x.bfloat16().float()
    return x.to(dtype)


F, B = torch.float32, torch.bfloat16
CASES = {
    "T1 p.9": (64, 1.0, 0, 0.9, F, "normal"),
    "T1 p.95": (64, 1.0, 0, 0.95, F, "normal"),
    "T2 p.9": (64, 2.0, 0, 0.9, F, "normal"),
    "T2 p.95": (64, 2.0, 0, 0.95, F, "normal"),
    "T.7 k40 p.95": (64, 0.7, 40, 0.95, F, "normal"),
    "no limits": (64, 1.0, 0, 1.0, F, "normal"),
    "T1 p.9 rounded": (64, 1.0, 0, 0.9, F, "rounded"),
    "T1 p.9 bf16": (64, 1.0, 0, 0.9, B, "normal"),
    "T1 k3000": (64, 1.0, 3000, 1.0, F, "normal"),
    "T1 p.9 x256": (256, 1.0, 0, 0.9, F, "normal"),
    "penalties": (64, 0.7, 40, 0.95, F, "normal"),
}
