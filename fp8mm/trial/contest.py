"""What check.py and time.py share: operands, contestants, configurations."""

import dataclasses

import torch

import tokenspeed_kernel  # registers the kernels
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_nvidia.sm90.gemm import mm_fp8 as module
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8_config import PAIR, Config, clusters_of

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROW, BLOCKS = ("row", "float32", 128), ("block", "float32", 128)
COLUMN, COLUMN64, MX = ("column", "byte", 128), ("column", "float32", 64), ("column", "byte", 32)
CHANGES = {
    "w": {},
    "w.turn": {"turns": True},
    "w.d2": {"depth": 2},
    "w.d2t": {"depth": 2, "turns": True},
    "n": {"halves": 1},
    "n.d2": {"halves": 1, "depth": 2},
    "n.turn": {"halves": 1, "turns": True},
    "w.g4": {"group": 4},
    "w.g16": {"group": 16},
}
USED = {
    ROW: ("w", "w.turn", "w.d2", "w.d2t", "n", "n.d2", "n.turn", "w.g4", "w.g16"),
    BLOCKS: ("w", "w.turn", "n", "n.turn"),
    COLUMN: ("w", "w.turn", "n"),
    COLUMN64: ("w", "w.turn"),
    MX: ("w", "w.turn", "n"),
}


def config(kind, change, out="bfloat16"):
    scales, stored, block = kind
    return dataclasses.replace(Config(scales, stored, out, block), **CHANGES[change])


def every_config():
    found = [config(kind, change) for kind, changes in USED.items() for change in changes]
    return [*found, config(ROW, "w", "float32"), config(ROW, "n", "float32"), config(ROW, "w", "float16")]


def compile_one(found):
    try:
        module.mm_fp8_program(found)
        return ""
    except Exception as error:
        return f"{found}: {type(error).__name__}: {error}"


def operands(kind, m, k, n, seed=0, positive=False):
    draw = torch.Generator("cuda").manual_seed(seed)
    a, w = (torch.randn(rows, k, device="cuda", dtype=BF16, generator=draw).mul_(100 if not positive else 1) for rows in (m, n))
    if positive:
        a, w = a.abs_(), w.abs_()
    a, w = a.clamp_(-440, 440).to(E4M3), w.clamp_(-440, 440).to(E4M3)
    scales, stored, block = kind
    up = lambda x, y: -(-x // y)

    def scale(*shape):
        if stored == "float32":
            return torch.rand(shape, device="cuda", generator=draw) * 0.01 + 0.005
        return torch.randint(118, 124, shape, device="cuda", dtype=torch.uint8, generator=draw)

    if scales == "row":
        a_scale, b_scale = scale(m, 1), scale(n, 1)
    elif scales == "block":
        a_scale, b_scale = scale(m, up(k, 128)), scale(up(n, 128), up(k, 128))
    elif block == 32:  # mxfp8
        a_scale, b_scale = (scale(rows, k // 32) for rows in (m, n))
    elif stored == "byte":  # packed, a scale each column
        a_scale, b_scale = (scale(rows, 4 * up(k, 512)).view(torch.int32) for rows in (m, n))
    else:
        a_scale, b_scale = scale(m, up(k, block)), scale(up(n, block), up(k, block))
    return a, w.t(), a_scale, b_scale.t()


def own(found, a, b, a_scale, b_scale, out, bias=None, needs_compiled=False):
    m, n = out.shape
    lines = module.kind_of(b, a_scale, b_scale)[-1]
    if needs_compiled and not module.mm_fp8_program.is_kept(found):
        raise RuntimeError(f"not compiled: {found}")
    launch = module.mm_fp8_program(found)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    given = (0, 0) if bias is None else (bias.data_ptr(), module.KINDS[bias.dtype])
    arguments = (
        a.view(torch.uint8), b.mT.view(torch.uint8), out, *given, *module.steps_of(a_scale, 1), *module.steps_of(b_scale, 0), lines,
        min(clusters_of(found, m, n), count // PAIR),
    )  # fmt: skip
    return lambda: launch(*arguments)


def triton(a, b, a_scale, b_scale, out):
    values = (a, b, a_scale, b_scale, None, out.dtype, None, out)
    bound = get_operator("gemm.mm").function.bind(*values, solution="triton")
    return lambda: bound(*values)


def cublas(a, b, a_scale, b_scale, out):
    scale = a_scale.mT.contiguous().mT
    call = lambda: torch._scaled_mm(a, b, scale, b_scale, out_dtype=out.dtype, use_fast_accum=False, out=out)
    call()
    return call


def reference(a, b, a_scale, b_scale):
    return get_operator("gemm.mm").function(a, b, a_scale, b_scale, out_dtype=torch.float32, solution="reference")
