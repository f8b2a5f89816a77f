"""Tests vector compares against their definition, lane by lane (CDNA4 ISA document, chapter VOPC)."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet

from .oracles import FORMATS, Binary, Case, check, lane_bits, operands

INTEGER = {
    "f": lambda a, b: False, "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt, "ne": operator.ne,
    "ge": operator.ge, "t": lambda a, b: True,
}  # fmt: skip

# For each relation: whether it holds if the first operand is less, equal, greater or unordered.
FLOAT = {
    "f": "", "lt": "<", "eq": "=", "le": "<=", "gt": ">", "lg": "<>", "ge": ">=", "o": "<=>", "u": "?", "nge": "<?", "nlg": "=?",
    "ngt": "<=?", "nle": ">?", "neq": "<>?", "nlt": "=>?", "tru": "<=>?",
}  # fmt: skip


def relation(form: Binary, holds: str) -> Callable[[int, int], bool]:
    def oracle(a: int, b: int) -> bool:
        if form.is_nan(a) or form.is_nan(b):
            return "?" in holds
        if form.is_zero(a) and form.is_zero(b):
            return "=" in holds
        x, y = form.key(a), form.key(b)
        return ("<" if x < y else ">" if x > y else "=") in holds

    return oracle


def in_class(form: Binary) -> Callable[[int, int], bool]:
    def oracle(a: int, classes: int) -> bool:
        negative = form.negative(a)
        if form.is_nan(a):
            bit = 0 if form.is_signalling(a) else 1
        elif form.is_infinite(a):
            bit = 2 if negative else 9
        elif form.exponent(a):
            bit = 3 if negative else 8
        elif form.is_denormal(a):
            bit = 4 if negative else 7
        else:
            bit = 5 if negative else 6
        return bool(classes >> bit & 1)

    return oracle


def _cases() -> list[Case]:
    cases = []
    for prefix in ("v_cmp", "v_cmpx"):
        for width in (16, 32, 64):
            for letter in "iu":
                types = (f"{letter}{width}",) * 2
                cases += [Case(f"{prefix}_{name}_{types[0]}", "lanes", types, oracle, "_e64") for name, oracle in INTEGER.items()]
        for type_, form in FORMATS.items():
            cases += [
                Case(f"{prefix}_{name}_{type_}", "lanes", (type_,) * 2, relation(form, holds), "_e64")
                for name, holds in FLOAT.items()
            ]
            cases.append(Case(f"{prefix}_class_{type_}", "lanes", (type_, "b32"), in_class(form), "_e64"))
    return cases


CASES = _cases()
TESTED = {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compare(case: Case) -> None:
    check(case, waves=2)


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_compare_to_vcc(case: Case) -> None:
    check(Case(case.name, "lanes", case.sources, case.oracle, "_e32"), waves=1)


@pytest.mark.parametrize("name", ["v_cmpx_lt_i32", "v_cmpx_ne_u16", "v_cmpx_nle_f32"])
def test_cmpx_leaves_its_result_in_exec(name: str) -> None:
    """Inactive lanes stay inactive, and the next instruction uses the new EXEC."""
    case = next(case for case in CASES if case.name == name)
    columns = operands(case.sources, 128, 5)
    on = [lane % 3 != 0 for lane in range(128)]
    v = {8: np.array(columns[0], np.uint32), 12: np.array(columns[1], np.uint32), 1: 7}
    snippet = Snippet(f"{case.line()}\nv_mov_b32 v1, 9", v=v, s={"exec": lane_bits(on)}, waves=2).run()
    wanted = [on[lane] and bool(case.expected(columns, lane)) for lane in range(128)]
    assert snippet.lanes("exec").tolist() == wanted
    assert snippet.lanes(20).tolist() == wanted
    assert snippet.v(1).tolist() == [9 if w else 7 for w in wanted]


@pytest.mark.parametrize(
    "form", ["v_cmp_gt_f32_e64 s[20:21], |v8|, -v12", "v_cmp_gt_f32_sdwa s[20:21], |v8|, -v12 src0_sel:DWORD src1_sel:DWORD"]
)
def test_modifiers_of_compared_numbers(form: str) -> None:
    a, b = operands(("f32", "f32"), 64, 3)
    snippet = Snippet(form, v={8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}).run()
    oracle = relation(FORMATS["f32"], ">")
    assert snippet.lanes(20).tolist() == [oracle(x & 0x7FFFFFFF, y ^ 0x80000000) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("select", "pick"),
    [
        ("src0_sel:BYTE_1 src1_sel:DWORD", lambda a, b: (a >> 8 & 0xFF, b & 0xFFFF)),
        ("src0_sel:WORD_1 src1_sel:DWORD", lambda a, b: (a >> 16, b & 0xFFFF)),
        ("src0_sel:BYTE_3 src1_sel:WORD_1", lambda a, b: (a >> 24, b >> 16)),
    ],
)
@pytest.mark.parametrize("second", ["v12", "s4"])
def test_parts_of_registers_are_compared(select: str, pick: Callable[[int, int], tuple[int, int]], second: str) -> None:
    a = [(lane * 0x01020301 + 0x7F) & 0xFFFFFFFF for lane in range(64)]
    b = [0x80407F if second == "s4" else lane * 0x00FF0101 & 0xFFFFFFFF for lane in range(64)]
    snippet = Snippet(
        f"v_cmp_lt_u16_sdwa s[20:21], v8, {second} {select}",
        v={8: np.array(a, np.uint32), 12: np.array(b, np.uint32)},
        s={4: 0x80407F},
    ).run()
    assert snippet.lanes(20).tolist() == [operator.lt(*pick(x, y)) for x, y in zip(a, b, strict=True)]
