import multiprocessing, os, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, as_completed
sys.path.insert(0, os.path.dirname(__file__))
import common


def off(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))


def main():
    import torch
    begun = time.time()
    said = lambda *x: print(f"{time.time() - begun:5.1f}", *x, flush=True)
    pool = ProcessPoolExecutor(1 if common.DRY else 8, mp_context=multiprocessing.get_context("spawn"))
    jobs = common.jobs()
    compiled = [] if common.DRY else [pool.submit(common.compile_one, job) for job in common.jobs()]
    device = "cpu" if common.DRY else "cuda"
    triton_results = {}
    for name, (shape, _) in common.SHAPES.items():  # Triton compiles meanwhile
        try:
            a = common.inputs(**shape, device=device)
            triton_results[name] = None if common.DRY else common.triton_extend(**a, return_lse=True)
            said("triton", name)
        except Exception as error:
            said("FAILED triton", name, repr(error)[:300])
    try:
        for each in as_completed(compiled, timeout=max(1.0, 85.0 - (time.time() - begun))):
            said(each.result())
    except TimeoutError:
        said("not all are compiled yet")
    from tokenspeed_kernel_nvidia.sm90.attention import mla_extend
    import tokenspeed_kernel
    for name, (shape, _) in common.SHAPES.items():
        try:
            a = common.inputs(**shape, device=device)
            got, lse = mla_extend.mla_extend_with_kvcache(**a, return_lse=True)
            if common.DRY:
                wanted, wanted_lse = tokenspeed_kernel.mla_extend_with_kvcache(**a, return_lse=True, solution="reference")
            else:
                torch.cuda.synchronize()
                wanted, wanted_lse = triton_results[name]
            seen = wanted_lse.isfinite()
            said(name, "off by", f"{off(got, wanted):.5f}", "lse", f"{float((lse - wanted_lse)[seen].abs().max()):.5f}", "nan", int(got.isnan().sum()),
                 "OK" if off(got, wanted) < (0.05 if "fp8" in name else 0.01) and not got.isnan().any() else "WRONG")
            again, _ = mla_extend.mla_extend_with_kvcache(**a, return_lse=True)
            if not torch.equal(again, got):
                said(name, "WRONG: not the same twice")
        except Exception as error:
            said("FAILED", name, repr(error)[:300])
    for (variant, heads) in common.VARIANTS:
        try:
            for name in ("S9 16h 100x60 of 700 ragged", "S2 16h 8x1024 of 8192") if heads == 16 else ("S7 128h 32x16 of 500",):
                a = common.inputs(**common.SHAPES[name][0], device=device)
                common.use(variant, heads)
                got, lse = mla_extend.mla_extend_with_kvcache(**a, return_lse=True)
                if not common.DRY:
                    said("variant", variant, name, f"{off(got, triton_results[name][0]):.5f}")
        except Exception as error:
            said("FAILED variant", variant, repr(error)[:300])
        finally:
            common.standard()


if __name__ == "__main__":
    if common.DRY:
        import sm90_emulator
        with sm90_emulator.emulated_sm90(multiprocessors=4):
            main()
    else:
        main()
    sys.stdout.flush()
    os._exit(0)
