import concurrent.futures
import multiprocessing
import time
import traceback

import torch

import contest
from contest import BLOCKS, COLUMN, COLUMN64, MX, ROW, config, operands, own, reference

SHAPES = {ROW: (1000, 2064, 1560), BLOCKS: (1000, 2064, 1560), COLUMN: (1000, 2064, 1560), COLUMN64: (1000, 2064, 1560), MX: (1000, 2080, 1560)}


def compare(kind, change, out_dtype, m, k, n, bias=None, repeats=3):
    a, b, a_scale, b_scale = operands(kind, m, k, n)
    wanted = reference(a, b, a_scale, b_scale).double()
    given = None if bias is None else torch.randn(n, device="cuda").to(bias)
    if given is not None:
        wanted += given.double()
    name = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}[out_dtype]
    out = torch.full((m, n), torch.nan, device="cuda", dtype=out_dtype)
    call = own(config(kind, change, name), a, b, a_scale, b_scale, out, given)
    call()
    torch.cuda.synchronize()
    first = out.clone()
    same = True
    for _ in range(repeats):
        out.fill_(torch.nan)
        call()
        torch.cuda.synchronize()
        same &= bool(torch.equal(out, first))
    off = ((out.double() - wanted).norm() / wanted.norm()).item()
    worst = ((out.double() - wanted).abs().max() / wanted.abs().mean()).item()
    verdict = "ok" if off < 6e-3 and same else "WRONG"
    print(f"{verdict} {kind} {change} {name} {m}x{k}x{n} bias={bias} rel {off:.2e} worst {worst:.2e} same {same}", flush=True)


def warm():
    import time_all

    time_all.warm()


def main():
    begun = time.time()
    with concurrent.futures.ProcessPoolExecutor(5, mp_context=multiprocessing.get_context("spawn")) as pool:
        portable = pool.submit(warm)  # compiles what time_all.py asks of Triton
        for failure in pool.map(contest.compile_one, contest.every_config()):
            if failure:
                print("NOT COMPILED", failure, flush=True)
        print(f"programs after {time.time() - begun:.0f} s", flush=True)
        print("Triton's", portable.exception(), flush=True)
    print(f"compiled in {time.time() - begun:.0f} s", flush=True)
    jobs = [(kind, change, torch.bfloat16, *SHAPES[kind]) for kind, changes in contest.USED.items() for change in changes]
    jobs += [(ROW, "w", torch.float32, 700, 528, 1000, torch.float32), (ROW, "n", torch.float32, 300, 4096, 264),
             (ROW, "w", torch.float16, 129, 16, 520, torch.float16), (ROW, "w", torch.bfloat16, 4096, 7168, 4096, None, 10),
             (BLOCKS, "w", torch.bfloat16, 4096, 2048, 7168, torch.bfloat16, 10)]
    for job in jobs:
        try:
            compare(*job)
        except Exception:
            print("FAILED", job)
            traceback.print_exc()
    # How much sums of positive products lose, which rounding in the matrix unit makes smaller.
    for k in (2048, 8192):
        a, b, a_scale, b_scale = operands(ROW, 256, k, 1024, positive=True)
        wanted = reference(a, b, a_scale, b_scale).double()
        for change in ("w", "w.d2"):
            out = torch.empty(256, 1024, device="cuda", dtype=torch.bfloat16)
            own(config(ROW, change), a, b, a_scale, b_scale, out)()
            print(f"bias of sums k={k} {change}: {((out.double() - wanted) / wanted).mean().item():.2e}")
        for fast in (False, True):
            got = torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
            print(f"bias of sums k={k} cuBLAS fast={fast}: {((got.double() - wanted) / wanted).mean().item():.2e}")
    print(f"done in {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
