"""Tests the parser of assembly text: instructions with operands and modifiers, labels, source lines, kernel descriptor and
metadata.

The texts are written as LLVM's AMDGPU backend prints them (AMDGPUUsage.html, AMDGPUOperandSyntax.html, AMDGPUModifierSyntax.html).
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gfx950_emulator.assembly import Argument, parse
from gfx950_emulator.binding import split_encoding
from gfx950_emulator.constants import CODE_STEP, EXEC, M0, VCC
from gfx950_emulator.decode import decode
from gfx950_emulator.operands import SCALAR_BASE, Operand, parse_operand
from gfx950_emulator.program import Program
from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import UnknownInstruction, describe

from .isa import MASK32

KERNEL = """
	.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
	.text
	.globl	attend                          ; -- Begin function attend
	.p2align	8
	.type	attend,@function
attend:                                 ; @attend
.Lfunc_begin0:
	.cfi_startproc
; %bb.2:
	.file	1 "/home/kernels" "attend.py"
	.file	2 "lib.py"
	.loc	1 74 0 prologue_end             ; attend.py:74:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
	.loc	1 0 0 is_stmt 0                 ; :0:0
.Ltmp0:
	.p2align	8
; %bb.3:
.LBB0_0:
	.cfi_escape 0x0f, 0x04, 0x30, 0x36, 0xe9, 0x02 ; CFA is 0 in private_wave aspace
	s_mov_b64 s[4:5], s[2:3]
	.loc	2 170 27 is_stmt 1              ; lib.py:170:27 @[ lib.py:191:40 @[ attend.py:383:29 ] ]
	v_max3_f32 v1, v2, |v3|, -v4            ; a comment; with s_nop 1 in it
	.loc	1 77 9
	buffer_load_dword v1, v0, s[0:3], 0 offen offset:16 // another one
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	s_cbranch_scc1 .LBB0_1
.Ldata: s_endpgm
.Lfunc_end0:
	.size	attend, .Lfunc_end0-attend
	.section	.rodata,"a",@progbits
	.amdhsa_kernel attend
		.amdhsa_group_segment_fixed_size 0
		.amdhsa_private_segment_fixed_size 0x20
		.amdhsa_user_sgpr_count 12
		.amdhsa_next_free_vgpr .Lattend.vgprs
		.amdhsa_accum_offset 8
		.amdhsa_ieee_mode 1
	.end_amdhsa_kernel
	.text
	.set .Lattend.num_agpr, 4
	.section	.AMDGPU.csdata,"",@progbits
; NumVgprs: 3
	.section	.debug_abbrev,"",@progbits
	.byte	1                               ; Abbreviation Code
	.long	.Ldebug_info_end0-.Ldebug_info_start0 ; Length of Unit
	.asciz	"v_add_u32 v0, v0, v0"          ; string offset=0
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           8
        .value_kind:     hidden_global_offset_x
    .name:           attend
    .sgpr_spill_count: 7
    .vgpr_count:     12
    .vgpr_spill_count: 0
    .uses_dynamic_stack: false
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
"""


@pytest.fixture(scope="module")
def kernel():
    return parse(".set .Lattend.vgprs, 12\n" + KERNEL)


def test_instructions(kernel) -> None:
    assert [instruction.mnemonic for instruction in kernel.instructions] == [
        "s_load_dwordx2", "s_waitcnt", "s_branch", "s_mov_b64", "v_max3_f32", "buffer_load_dword", "s_cbranch_scc1", "s_endpgm",
    ]  # fmt: skip
    assert [instruction.index for instruction in kernel.instructions] == list(range(8))
    maximum, load = kernel.instructions[4:6]
    assert maximum.operands == ("v1", "v2", "|v3|", "-v4")
    assert maximum.text == "v_max3_f32 v1, v2, |v3|, -v4"
    assert load.operands == ("v1", "v0", "s[0:3]", "0")
    assert load.modifiers == {"offen": True, "offset": 16}
    lines = (".set .Lattend.vgprs, 12\n" + KERNEL).splitlines()
    assert all(instruction.mnemonic in lines[instruction.line - 1] for instruction in kernel.instructions)


def test_labels_and_entry(kernel) -> None:
    assert kernel.name == "attend"
    assert {name: kernel.labels[name] for name in ("attend", ".Ltmp0", ".LBB0_0", ".LBB0_1", ".Ldata", ".Lfunc_end0")} == {
        "attend": 0, ".Ltmp0": 3, ".LBB0_0": 3, ".LBB0_1": 6, ".Ldata": 7, ".Lfunc_end0": 8,
    }  # fmt: skip
    assert kernel.entry == 0


def test_source_lines(kernel) -> None:
    """Line 0 marks compiler-generated code, which keeps the previous source line."""
    load, _, branch, move, maximum, buffer, *_ = kernel.instructions
    assert load.source == branch.source == move.source == ("/home/kernels/attend.py", 74)
    assert load.location == "attend.py:74:0"
    assert maximum.source == ("lib.py", 170)
    assert maximum.location == "lib.py:170:27 @[ lib.py:191:40 @[ attend.py:383:29 ] ]"
    assert buffer.source == ("/home/kernels/attend.py", 77)
    assert buffer.location == "attend.py:77"


def test_descriptor_and_metadata(kernel) -> None:
    assert kernel.descriptor == {
        "group_segment_fixed_size": 0, "private_segment_fixed_size": 32, "user_sgpr_count": 12, "next_free_vgpr": 12,
        "accum_offset": 8, "ieee_mode": 1,
    }  # fmt: skip
    assert (kernel.vgprs, kernel.agprs) == (8, 4)
    assert kernel.arguments == (
        Argument(0, 8, "global_buffer"), Argument(8, 4, "by_value"), Argument(16, 8, "hidden_global_offset_x"),
    )  # fmt: skip
    assert kernel.metadata.items() >= {"agpr_count": 4, "sgpr_spill_count": 7, "vgpr_count": 12, "vgpr_spill_count": 0}.items()


@pytest.mark.parametrize(("total", "accumulation", "expected"), [(3, 4, (3, 0)), (8, 8, (8, 0)), (20, 8, (8, 12)), (5, 0, (5, 0))])
def test_vector_and_accumulation_registers(total: int, accumulation: int, expected: tuple[int, int]) -> None:
    text = (
        f"k:\n\ts_endpgm\n.amdhsa_kernel k\n.amdhsa_next_free_vgpr {total}\n.amdhsa_accum_offset {accumulation}\n.end_amdhsa_kernel"
    )
    kernel = parse(text)
    assert (kernel.vgprs, kernel.agprs) == expected


def test_arguments_at_the_dash_of_their_list() -> None:
    """YAML allows a list's entries at the indentation of its key."""
    text = """
k:
	s_endpgm
	.amdhsa_kernel k
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
- .args:
  - .offset:         0
    .size:           8
    .value_kind:     global_buffer
  - .name:           n
    .offset:         8
    .size:           4
    .value_kind:     by_value
  .vgpr_count:     5
...
	.end_amdgpu_metadata
"""
    kernel = parse(text)
    assert kernel.arguments == (Argument(0, 8, "global_buffer"), Argument(8, 4, "by_value"))
    assert kernel.metadata == {"vgpr_count": 5}


def test_no_kernel_and_two() -> None:
    with pytest.raises(ValueError, match="found 0"):
        parse("k:\n\ts_endpgm\n")
    with pytest.raises(ValueError, match=r"found 2: \['a', 'b'\]"):
        parse("a:\n\ts_endpgm\n.amdhsa_kernel a\n.end_amdhsa_kernel\n.amdhsa_kernel b\n.end_amdhsa_kernel\n")


def test_the_kernel_need_not_come_first() -> None:
    kernel = parse('helper:\n\ts_setpc_b64 s[30:31]\n"k":\n\ts_nop 0\n\ts_endpgm\n.amdhsa_kernel k\n.end_amdhsa_kernel\n')
    assert kernel.entry == kernel.labels["k"] == 1


@pytest.mark.parametrize("callee", ["near", "a.b.c__i32__", '"quoted"'])
def test_distances_to_functions(callee: str) -> None:
    """Distances are relative to the result of s_getpc_b64, which is the address of the next instruction. Distances may be
    negative."""
    text = f"""
k:
	s_getpc_b64 s[4:5]
	s_add_u32 s4, s4, {callee}@rel32@lo+4
	s_addc_u32 s5, s5, {callee}@rel32@hi+12
	s_nop 0
	s_endpgm
{callee}:
	s_getpc_b64 s[6:7]
	s_add_u32 s6, s6, k@rel32@lo+4
	s_addc_u32 s7, s7, k@rel32@hi+12
	.amdhsa_kernel k
	.end_amdhsa_kernel
"""
    numbers = [int(parse(text).instructions[i].operands[2], 0) for i in (1, 2, 6, 7)]
    forward, backward = 4 * CODE_STEP, -6 * CODE_STEP
    assert numbers == [forward, 0, backward & MASK32, MASK32]


# Instructions


@pytest.mark.parametrize(
    ("text", "operands", "modifiers"),
    [
        ("s_endpgm", (), {}),
        ("s_waitcnt vmcnt(0) lgkmcnt(1)", ("vmcnt(0)",), {"lgkmcnt(1)": True}),
        ("v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xa bound_ctrl:1", ("v1", "v2"),
         {"quad_perm": (1, 0, 3, 2), "row_mask": 15, "bank_mask": 10, "bound_ctrl": 1}),
        ("v_mov_b32_dpp v1, v2 row_half_mirror row_mask:0xf", ("v1", "v2"), {"row_half_mirror": True, "row_mask": 15}),
        ("v_pk_fma_f32 v[0:1], s[4:5], v[6:7], neg(v[8:9]) op_sel:[0,1,0] op_sel_hi:[1, 0, 0] neg_lo:[0,0,1]",
         ("v[0:1]", "s[4:5]", "v[6:7]", "neg(v[8:9])"), {"op_sel": (0, 1, 0), "op_sel_hi": (1, 0, 0), "neg_lo": (0, 0, 1)}),
        ("v_or_b32_sdwa v1, sext(v2), v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD",
         ("v1", "sext(v2)", "v3"), {"dst_sel": "WORD_1", "dst_unused": "UNUSED_PAD", "src0_sel": "BYTE_0", "src1_sel": "DWORD"}),
        ("v_mul_f32_e64 v1, -|v2|, s3 clamp mul:4", ("v1", "-|v2|", "s3"), {"clamp": True, "mul": 4}),
        ("global_load_dword v1, v[2:3], off offset:-16 sc0 sc1", ("v1", "v[2:3]", "off"),
         {"offset": -16, "sc0": True, "sc1": True}),
        ("ds_read2_b32 v[0:1], v2 offset0:3 offset1:255", ("v[0:1]", "v2"), {"offset0": 3, "offset1": 255}),
        ("ds_swizzle_b32 v1, v2 offset:swizzle(SWAP,16)", ("v1", "v2"), {"offset": "swizzle(SWAP,16)"}),
        ('ds_swizzle_b32 v1, v2 offset:swizzle(BITMASK_PERM, "01pip")', ("v1", "v2"), {"offset": 'swizzle(BITMASK_PERM, "01pip")'}),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", ("hwreg(HW_REG_MODE, 23, 1)", "1"), {}),
        ("buffer_load_dwordx4 v1, s[4:7], 0 offen lds", ("v1", "s[4:7]", "0"), {"offen": True, "lds": True}),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[0:7], v[8:11], a[0:3], v12, v13 op_sel:[1,0,0] op_sel_hi:[0,1,0] blgp:4",
         ("a[0:3]", "v[0:7]", "v[8:11]", "a[0:3]", "v12", "v13"), {"op_sel": (1, 0, 0), "op_sel_hi": (0, 1, 0), "blgp": 4}),
        ("v_bitop3_b32 v1,v2,v3,v4 bitop3:0x36", ("v1", "v2", "v3", "v4"), {"bitop3": 0x36}),
        ("s_load_dword\ts1,\ts[2:3],  0x10", ("s1", "s[2:3]", "0x10"), {}),
        ("s_branch .LBB0_12", (".LBB0_12",), {}),
    ],
)  # fmt: skip
def test_operands_and_modifiers(text: str, operands: tuple, modifiers: dict) -> None:
    instruction = parse(f"k:\n\t{text}\n.amdhsa_kernel k\n.end_amdhsa_kernel\n").instructions[0]
    assert instruction.mnemonic == text.split()[0]
    assert instruction.operands == operands
    assert instruction.modifiers == modifiers


@pytest.mark.parametrize(
    ("mnemonic", "parts"),
    [
        ("v_add_u32_e32", ("v_add_u32", "e32")), ("v_add_u32_e64", ("v_add_u32", "e64")), ("v_add_u32_dpp", ("v_add_u32", "dpp")),
        ("v_add_u32_sdwa", ("v_add_u32", "sdwa")), ("v_add3_u32", ("v_add3_u32", "")),
        ("v_fma_f32_e64_dpp", ("v_fma_f32", "e64_dpp")), ("s_add_u32", ("s_add_u32", "")), ("v_exp_f32_e32", ("v_exp_f32", "e32")),
    ],
)  # fmt: skip
def test_encodings(mnemonic: str, parts: tuple[str, str]) -> None:
    assert split_encoding(mnemonic) == parts


# Operands


@pytest.mark.parametrize(
    ("text", "file", "index", "count"),
    [
        ("v0", "v", 0, 1), ("v255", "v", 255, 1), ("v[2:5]", "v", 2, 4), ("v[7]", "v", 7, 1), ("a0", "v", 100, 1),
        ("a[4:7]", "v", 104, 4),
        ("s101", "s", 101, 1), ("s[8:15]", "s", 8, 8), ("vcc", "s", VCC, 2), ("vcc_lo", "s", VCC, 1), ("vcc_hi", "s", VCC + 1, 1),
        ("exec", "s", EXEC, 2), ("exec_lo", "s", EXEC, 1), ("exec_hi", "s", EXEC + 1, 1), ("m0", "s", M0, 1), ("off", "off", 0, 0),
        ("flat_scratch", "s", 102, 2), ("xnack_mask_hi", "s", 105, 1),
    ],
)  # fmt: skip
def test_registers(text: str, file: str, index: int, count: int) -> None:
    """Accumulation registers are numbered after the vector registers, of which there are 100 in this test."""
    operand = parse_operand(text, 100)
    assert (operand.file, operand.index, operand.count) == (file, index, count)
    first = index + (SCALAR_BASE if file == "s" else 0)
    assert list(operand.ids) == list(range(first, first + count))


@pytest.mark.parametrize(
    ("text", "negate", "absolute", "sign_extend"),
    [
        ("v3", False, False, False), ("-v3", True, False, False), ("|v3|", False, True, False), ("-|v3|", True, True, False),
        ("neg(v3)", True, False, False), ("abs(v3)", False, True, False), ("-abs(v3)", True, True, False),
        ("sext(v3)", False, False, True),
        ("neg(|v3|)", True, True, False),
    ],
)  # fmt: skip
def test_input_modifiers(text: str, negate: bool, absolute: bool, sign_extend: bool) -> None:
    operand = parse_operand(text, 8)
    assert operand == Operand("v", 3, 1, negate=negate, absolute=absolute, sign_extend=sign_extend, text=text)


@pytest.mark.parametrize("text", ["", "w3", "v", "v[3", "hwreg(1)", "s[a:b]", "4x", "v3:4"])
def test_what_is_no_operand(text: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        parse_operand(text, 8)


def _double(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        # for uint16, uint32, int32, uint64, int64, float16, float32, float64
        ("0", (0, 0, 0, 0, 0, 0, 0, 0)),
        ("64", (64, 64, 64, 64, 64, 64, 64, 64)),
        ("-1", (0xFFFF, MASK32, MASK32, (1 << 64) - 1, (1 << 64) - 1, 0xFFFF, MASK32, (1 << 64) - 1)),
        ("0x3f800000", (0, 0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000, 0, 0x3F800000, 0x3F800000 << 32)),
        ("0x80000001", (1, 0x80000001, 0x80000001, 0x80000001, 0xFFFFFFFF80000001, 1, 0x80000001, 0x80000001 << 32)),
        ("1.0", (0x3C00, 0x3F800000, 0x3F800000, _double(1.0), _double(1.0), 0x3C00, 0x3F800000, _double(1.0))),
        ("-4.0", (0xC400, 0xC0800000, 0xC0800000, _double(-4.0), _double(-4.0), 0xC400, 0xC0800000, _double(-4.0))),
        ("0.15915494", (0x3118, 0x3E22F983, 0x3E22F983, None, None, 0x3118, 0x3E22F983, None)),
    ],
)
def test_literals_as_bits(text: str, bits: tuple[int | None, ...]) -> None:
    """Decimal literals take the operand's type. Hexadecimal literals are 32 bits: extended to wider integers, or the upper half of
    a double."""
    kinds = (np.uint16, np.uint32, np.int32, np.uint64, np.int64, np.float16, np.float32, np.float64)
    operand = parse_operand(text, 0)
    assert (operand.file, operand.count, list(operand.ids)) == ("literal", 0, [])
    for kind, expected in zip(kinds, bits, strict=True):
        value = operand.bits(np.dtype(kind))
        assert value.dtype == kind
        if expected is not None:
            assert int.from_bytes(value.tobytes(), "little") == expected, kind


# Error messages


def test_unknown_instructions_are_named() -> None:
    text = '\t.file 1 "a.py"\nk:\n\t.loc 1 5 3 ; a.py:5:3\n\ts_nop 0\n\tv_frobnicate_b32 v1, v2\n'
    text += ".amdhsa_kernel k\n.end_amdhsa_kernel\n"
    with pytest.raises(UnknownInstruction) as caught:
        Program(parse(text))
    error = caught.value
    assert error.kernel == "k"
    assert error.source == ("a.py", 5)
    assert error.instruction.mnemonic == "v_frobnicate_b32"
    assert str(error) == (
        "instruction v_frobnicate_b32 is not implemented\n  in kernel k, at a.py:5:3 (assembly line 5): v_frobnicate_b32 v1, v2"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v_add_u32_e32 v1, v2, w3", "operand 'w3' is not known"),
        ("s_mov_b32 s1, s2 twisted", "modifier twisted of s_mov_b32 is not implemented"),
        ("global_load_dword v1, v[2:3], off glitter:3 sc1", "modifier glitter of global_load_dword"),
    ],
)
def test_operands_and_modifiers_that_are_not_known(text: str, message: str) -> None:
    kernel = parse(f"k:\n\t{text}\n.amdhsa_kernel k\n.end_amdhsa_kernel\n")
    with pytest.raises(UnknownInstruction, match=message) as caught:
        decode(kernel.instructions[0], kernel)
    assert f"in kernel k (assembly line 2): {text}" in str(caught.value)


def test_cache_hints_mean_nothing() -> None:
    kernel = parse("k:\n\tglobal_load_dword v1, v[2:3], off sc0 sc1 nt\n.amdhsa_kernel k\n.end_amdhsa_kernel\n")
    assert decode(kernel.instructions[0], kernel).memory.size == 4


def test_places_without_an_instruction() -> None:
    assert describe("k", None) == "in kernel k"


# Blocks


def test_blocks_end_at_branches_barriers_and_labels_that_are_jumped_to() -> None:
    text = """
        s_nop 0
        s_cbranch_scc1 .Ltwo
        s_nop 1
        .Lone:
        s_nop 2
        .Ltwo:
        s_nop 3
        s_barrier
        s_branch .Lone
        .Lunused:
        s_endpgm
    """
    program = Snippet(text).program
    blocks = {start: (block.end, block.close and program.mnemonic_of(block.close)) for start, block in program.blocks.items()}
    assert blocks == {
        0: (2, "s_cbranch_scc1"), 2: (3, None), 3: (4, None), 4: (6, "s_barrier"), 6: (7, "s_branch"), 7: (8, "s_endpgm"),
        8: (9, "s_endpgm"),
    }  # fmt: skip
    assert [len(program.blocks[start].body) for start in blocks] == [1, 1, 1, 1, 0, 0, 0]
    assert program.instruction_of(program.bound[4]).text == "s_nop 3"
