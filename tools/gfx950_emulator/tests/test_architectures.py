"""Tests what distinguishes the architectures: which instructions exist, compared with LLVM's assembler; devices; errors."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import amd, llvm

from gfx950_emulator import UnknownInstruction, emulated, emulated_gfx942, emulated_gfx950, hardware, timing
from gfx950_emulator.architecture import ARCHITECTURES, GFX942, GFX950
from gfx950_emulator.assembly import parse
from gfx950_emulator.binding import BINDERS
from gfx950_emulator.snippet import Snippet

# Binders that do not stand for one mnemonic of LLVM.
OTHERS = {"v_mfma", "s_sched_barrier"}


def complaint(text: str, arch: str) -> str:
    """Returns what LLVM's assembler prints about a line. Triton's binding prints to the process's standard error."""
    llvm.init_targets()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            amd.assemble_amdgcn(text + "\n", "amdgcn-amd-amdhsa", arch, "")
        except RuntimeError:
            pass  # the printed message has the reason
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


@pytest.mark.skipif(not hasattr(amd, "assemble_amdgcn"), reason="this Triton does not expose LLVM's assembler")
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda architecture: architecture.name)
def test_the_instructions_are_those_of_llvm(architecture) -> None:
    """Each implemented instruction exists on some architecture. `lacks` matches those that exist on others only."""
    missing = {
        arch: {name for name in BINDERS if name not in OTHERS and "not supported on this GPU" in complaint(name, arch)}
        for arch in ARCHITECTURES
    }
    nowhere = set.intersection(*missing.values())  # complete only with an encoding suffix
    lacks = {name for name in BINDERS if architecture.lacks.fullmatch(name)}
    assert lacks == missing[architecture.name] - nowhere
    assert bool(lacks) == (architecture is GFX942)


@pytest.mark.parametrize(
    "line",
    [
        "ds_read_b64_tr_b16 v[0:1], v2",
        "v_permlane32_swap_b32_e32 v0, v1",
        "v_bitop3_b32 v0, v1, v2, v3 bitop3:0x12",
        "v_cvt_pk_bf16_f32 v0, v1, v2",
        "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 1.0",
        "v_maximum3_f32 v0, v1, v2, v3",
        "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0",
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0",
        "global_load_lds_dwordx4 v[0:1], off",
        "buffer_load_dwordx4 v0, s[4:7], 0 offen lds",
    ],
)
def test_an_instruction_that_gfx942_lacks_is_an_error_that_names_it(line: str) -> None:
    Snippet(line)
    mnemonic = line.split()[0]
    with pytest.raises(UnknownInstruction, match=rf"gfx942 has no (.|\n)*: {mnemonic}"):
        Snippet(line, arch="gfx942")


def test_assembly_for_another_architecture_is_refused() -> None:
    text = 'k:\n\ts_endpgm\n\t.amdhsa_kernel k\n\t.end_amdhsa_kernel\n\t.amdgcn_target "amdgcn-amd-amdhsa--{}"\n'
    assert parse(text.format("gfx942:sramecc+:xnack-")).architecture is GFX942
    assert parse(text.format("gfx950")).architecture is GFX950
    newer = text.replace("amdgcn-amd-amdhsa--{}", "amdgpu9.42-amd-amdhsa-unknown-{}")  # as the LLVM of Triton 3.9 writes it
    assert parse(newer.format("gfx942")).architecture is GFX942
    with pytest.raises(ValueError, match="for gfx90a; the emulator knows gfx942, gfx950"):
        parse(text.format("gfx90a"))
    with pytest.raises(ValueError, match="arch must be one of gfx942, gfx950, got 'gfx90a'"), emulated("gfx90a"):
        pass


@triton.jit
def scale(x_ptr, out_ptr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out_ptr + at, tl.exp2(tl.load(x_ptr + at)))


def test_a_kernel_is_compiled_for_each_architecture() -> None:
    x = torch.arange(8192.0) / 1024
    predictions = {}
    for block in (emulated_gfx942, emulated_gfx950, emulated_gfx942):
        out = torch.empty_like(x)
        with block(counters=True) as emulator:
            scale[(8,)](x, out, 1024)
        torch.testing.assert_close(out, torch.exp2(x))
        (launch,) = emulator.launches
        predictions[launch.program.assembly.architecture.name] = timing.predict(launch)
    assert {name: prediction.device for name, prediction in predictions.items()} == {
        "gfx942": hardware.MI300X,
        "gfx950": hardware.MI355X,
    }
    slow, fast = predictions["gfx942"], predictions["gfx950"]
    assert slow.memory_seconds / fast.memory_seconds == pytest.approx(8 / 5.3)
    assert slow.achievable_seconds > fast.achievable_seconds


def test_a_block_inside_a_block_of_the_other_architecture_is_refused() -> None:
    with emulated_gfx950(), pytest.raises(RuntimeError, match="inside"), emulated_gfx942():
        pass
