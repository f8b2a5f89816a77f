"""Tests scalar arithmetic and scalar loads against the CDNA3 and CDNA4 ISA documents' definitions, in plain Python on integers.

A scalar register of the emulator holds an int that all waves share, a value per wave, or lanes as booleans. Every instruction is
tested on all three representations, and on mixtures of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import SanitizerError, UnknownInstruction

from .isa import MASK32, MASK64, SPECIAL32, SPECIAL64, WAVE, bits_of, implemented, random_words, signed

# function(a, b, scc, d) -> (result, SCC); None for an unchanged output. Results are modulo 2**32 or 2**64.
Definition = Callable[[int, int, int, int], "tuple[int | None, int | None]"]


def _counted(value: int, bits: int, wanted: int) -> int:
    return sum(1 for i in range(bits) if value >> i & 1 == wanted)


def _lowest(value: int, bits: int, wanted: int) -> int:
    return next((i for i in range(bits) if value >> i & 1 == wanted), -1)


def _leading(value: int, bits: int) -> int:
    return next((i for i in range(bits) if value >> (bits - 1 - i) & 1), -1)


def _leading_signs(value: int, bits: int) -> int:
    sign = value >> (bits - 1)
    return next((i for i in range(1, bits) if value >> (bits - 1 - i) & 1 != sign), -1)


def _reversed(value: int, bits: int) -> int:
    return sum((value >> i & 1) << (bits - 1 - i) for i in range(bits))


def _extract(value: int, control: int, bits: int, is_signed: bool) -> tuple[int, int]:
    offset, width = control & (bits - 1), control >> 16 & 0x7F
    shifted = (signed(value, bits) if is_signed else value) >> offset
    field = shifted & ((1 << width) - 1) & ((1 << bits) - 1)
    if is_signed and 0 < width < bits:
        field = signed(field, width) & ((1 << bits) - 1)
    return field, int(field != 0)


def _absolute_difference(a: int, b: int) -> tuple[int, int]:
    difference = signed(a - b)
    result = abs(difference) & MASK32
    return result, int(result != 0)


def _nonzero(value: int, bits: int) -> tuple[int, int]:
    value &= (1 << bits) - 1
    return value, int(value != 0)


def _overflows(result: int) -> int:
    return int(not -(1 << 31) <= result < 1 << 31)


LOGIC = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip

BINARY32: dict[str, Definition] = {
    "s_add_u32": lambda a, b, c, d: (a + b, a + b >> 32),
    "s_sub_u32": lambda a, b, c, d: (a - b, int(b > a)),
    "s_add_i32": lambda a, b, c, d: (a + b, _overflows(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b, c, d: (a - b, _overflows(signed(a) - signed(b))),
    "s_addc_u32": lambda a, b, c, d: (a + b + c, a + b + c >> 32),
    "s_subb_u32": lambda a, b, c, d: (a - b - c, int(b + c > a)),
    "s_min_i32": lambda a, b, c, d: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
    "s_min_u32": lambda a, b, c, d: (min(a, b), int(a < b)),
    "s_max_i32": lambda a, b, c, d: (max(signed(a), signed(b)), int(signed(a) >= signed(b))),
    "s_max_u32": lambda a, b, c, d: (max(a, b), int(a >= b)),
    "s_lshl_b32": lambda a, b, c, d: _nonzero(a << (b & 31), 32),
    "s_lshr_b32": lambda a, b, c, d: _nonzero(a >> (b & 31), 32),
    "s_ashr_i32": lambda a, b, c, d: _nonzero(signed(a) >> (b & 31), 32),
    "s_bfm_b32": lambda a, b, c, d: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_mul_i32": lambda a, b, c, d: (a * b, None),
    "s_mul_hi_u32": lambda a, b, c, d: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c, d: (signed(a) * signed(b) >> 32, None),
    "s_bfe_u32": lambda a, b, c, d: _extract(a, b, 32, False),
    "s_bfe_i32": lambda a, b, c, d: _extract(a, b, 32, True),
    "s_absdiff_i32": lambda a, b, c, d: _absolute_difference(a, b),
    "s_pack_ll_b32_b16": lambda a, b, c, d: ((b & 0xFFFF) << 16 | a & 0xFFFF, None),
    "s_pack_lh_b32_b16": lambda a, b, c, d: (b >> 16 << 16 | a & 0xFFFF, None),
    "s_pack_hh_b32_b16": lambda a, b, c, d: (b >> 16 << 16 | a >> 16, None),
    "s_cselect_b32": lambda a, b, c, d: (a if c else b, None),
    **{f"s_lshl{n}_add_u32": lambda a, b, c, d, n=n: ((a << n) + b, int((a << n) + b > MASK32)) for n in (1, 2, 3, 4)},
    **{f"s_{name}_b32": lambda a, b, c, d, f=f: _nonzero(f(a, b), 32) for name, f in LOGIC.items()},
}

UNARY32: dict[str, Definition] = {
    "s_mov_b32": lambda a, b, c, d: (a, None),
    "s_cmov_b32": lambda a, b, c, d: (a if c else None, None),
    "s_not_b32": lambda a, b, c, d: _nonzero(~a, 32),
    "s_abs_i32": lambda a, b, c, d: _nonzero(abs(signed(a)), 32),
    "s_brev_b32": lambda a, b, c, d: (_reversed(a, 32), None),
    "s_bcnt0_i32_b32": lambda a, b, c, d: _nonzero(_counted(a, 32, 0), 32),
    "s_bcnt1_i32_b32": lambda a, b, c, d: _nonzero(_counted(a, 32, 1), 32),
    "s_ff0_i32_b32": lambda a, b, c, d: (_lowest(a, 32, 0), None),
    "s_ff1_i32_b32": lambda a, b, c, d: (_lowest(a, 32, 1), None),
    "s_flbit_i32_b32": lambda a, b, c, d: (_leading(a, 32), None),
    "s_flbit_i32": lambda a, b, c, d: (_leading_signs(a, 32), None),
    "s_sext_i32_i8": lambda a, b, c, d: (signed(a, 8), None),
    "s_sext_i32_i16": lambda a, b, c, d: (signed(a, 16), None),
    "s_bitset0_b32": lambda a, b, c, d: (d & ~(1 << (a & 31)), None),
    "s_bitset1_b32": lambda a, b, c, d: (d | 1 << (a & 31), None),
}

# Instructions on 64 bits. The text before the definition says which of destination, first and second source are pairs of registers
# ("d").
WIDE: dict[str, tuple[str, Definition]] = {
    **{f"s_{name}_b64": ("ddd", lambda a, b, c, d, f=f: _nonzero(f(a, b), 64)) for name, f in LOGIC.items()},
    "s_lshl_b64": ("dds", lambda a, b, c, d: _nonzero(a << (b & 63), 64)),
    "s_lshr_b64": ("dds", lambda a, b, c, d: _nonzero(a >> (b & 63), 64)),
    "s_ashr_i64": ("dds", lambda a, b, c, d: _nonzero(signed(a, 64) >> (b & 63), 64)),
    "s_bfe_u64": ("dds", lambda a, b, c, d: _extract(a, b, 64, False)),
    "s_bfe_i64": ("dds", lambda a, b, c, d: _extract(a, b, 64, True)),
    "s_bfm_b64": ("dss", lambda a, b, c, d: (((1 << (a & 63)) - 1) << (b & 63), None)),
    "s_cselect_b64": ("ddd", lambda a, b, c, d: (a if c else b, None)),
    "s_mov_b64": ("dd", lambda a, b, c, d: (a, None)),
    "s_cmov_b64": ("dd", lambda a, b, c, d: (a if c else None, None)),
    "s_not_b64": ("dd", lambda a, b, c, d: _nonzero(~a, 64)),
    "s_wqm_b64": ("dd", lambda a, b, c, d: _nonzero(sum(15 << 4 * i for i in range(16) if a >> 4 * i & 15), 64)),
    "s_brev_b64": ("dd", lambda a, b, c, d: (_reversed(a, 64), None)),
    "s_bitset0_b64": ("ds", lambda a, b, c, d: (d & ~(1 << (a & 63)), None)),
    "s_bitset1_b64": ("ds", lambda a, b, c, d: (d | 1 << (a & 63), None)),
    "s_bitreplicate_b64_b32": ("ds", lambda a, b, c, d: (sum((a >> i & 1) * 3 << 2 * i for i in range(32)), None)),
    "s_bcnt0_i32_b64": ("sd", lambda a, b, c, d: _nonzero(_counted(a, 64, 0), 32)),
    "s_bcnt1_i32_b64": ("sd", lambda a, b, c, d: _nonzero(_counted(a, 64, 1), 32)),
    "s_ff0_i32_b64": ("sd", lambda a, b, c, d: (_lowest(a, 64, 0), None)),
    "s_ff1_i32_b64": ("sd", lambda a, b, c, d: (_lowest(a, 64, 1), None)),
    "s_flbit_i32_b64": ("sd", lambda a, b, c, d: (_leading(a, 64), None)),
    "s_flbit_i32_i64": ("sd", lambda a, b, c, d: (_leading_signs(a, 64), None)),
}

RELATIONS = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
COMPARES: dict[str, tuple[str, Definition]] = {  # instructions without a destination
    **{f"s_cmp_{r}_u32": ("ss", lambda a, b, c, d, f=f: (None, int(f(a, b)))) for r, f in RELATIONS.items()},
    **{f"s_cmp_{r}_i32": ("ss", lambda a, b, c, d, f=f: (None, int(f(signed(a), signed(b))))) for r, f in RELATIONS.items()},
    **{f"s_cmp_{r}_u64": ("dd", lambda a, b, c, d, f=RELATIONS[r]: (None, int(f(a, b)))) for r in ("eq", "lg")},
    **{f"s_bitcmp{n}_b32": ("ss", lambda a, b, c, d, n=n: (None, int(a >> (b & 31) & 1 == n))) for n in (0, 1)},
    **{f"s_bitcmp{n}_b64": ("ds", lambda a, b, c, d, n=n: (None, int(a >> (b & 63) & 1 == n))) for n in (0, 1)},
}

IMMEDIATE: dict[str, Callable[[int, int, int], tuple[int | None, int | None]]] = {  # of the immediate (16 bits), scc and d
    "s_movk_i32": lambda k, c, d: (signed(k, 16), None),
    "s_cmovk_i32": lambda k, c, d: (signed(k, 16) if c else None, None),
    "s_addk_i32": lambda k, c, d: (d + signed(k, 16), _overflows(signed(d) + signed(k, 16))),
    "s_mulk_i32": lambda k, c, d: (d * signed(k, 16), None),
    **{f"s_cmpk_{r}_i32": lambda k, c, d, f=f: (None, int(f(signed(d), signed(k, 16)))) for r, f in RELATIONS.items()},
    **{f"s_cmpk_{r}_u32": lambda k, c, d, f=f: (None, int(f(d, k))) for r, f in RELATIONS.items()},
}

# Functions from S0 and EXEC to the new EXEC.
ON_EXEC = {**LOGIC, "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
SAVEEXEC = {f"s_{name}_saveexec_b64": f for name, f in ON_EXEC.items()}
WREXEC = {f"s_{name}_wrexec_b64": ON_EXEC[name] for name in ("andn1", "andn2")}

LOADS = {
    f"{kind}_{size}": count
    for kind in ("s_load", "s_buffer_load")
    for size, count in (("dword", 1), ("dwordx2", 2), ("dwordx4", 4), ("dwordx8", 8), ("dwordx16", 16))
}

FORMS = {name: ("sss", f) for name, f in BINARY32.items()} | {name: ("ss", f) for name, f in UNARY32.items()} | WIDE
_REGISTERS = {"d": (4, "s[4:5]"), "a": (8, "s[8:9]"), "b": (12, "s[12:13]")}


def test_every_scalar_instruction_has_a_definition() -> None:
    defined = {*FORMS, *COMPARES, *IMMEDIATE, *SAVEEXEC, *WREXEC}
    assert defined == implemented("scalar_alu", "scalar_alu64")
    assert set(LOADS) == implemented("scalar_memory")


def _text(mnemonic: str, operands: str, kinds: str) -> str:
    """Returns the instruction's text with registers of `_REGISTERS`. ``operands`` are among "dab". ``kinds`` has "s" (one register)
    or "d" (a pair) for each operand."""
    written = [_REGISTERS[o][1] if kind == "d" else f"s{_REGISTERS[o][0]}" for o, kind in zip(operands, kinds, strict=True)]
    return f"{mnemonic} {', '.join(written)}"


def _values(kinds: str, seed: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns values of a, b, scc and d, one per wave: first all pairs of special values, then random values."""
    rng = np.random.default_rng(seed)
    wide_a, wide_b = (kind == "d" for kind in kinds)
    pairs = [(a, b) for a in (SPECIAL64 if wide_a else SPECIAL32) for b in (SPECIAL64 if wide_b else SPECIAL32)]
    count = 320 - len(pairs)
    pairs += zip(random_words(rng, count, 64 if wide_a else 32), random_words(rng, count, 64 if wide_b else 32), strict=True)
    a, b = (list(column) for column in zip(*pairs, strict=True))
    scc = [int(x) for x in rng.integers(0, 2, len(pairs))]
    return a, b, scc, random_words(rng, len(pairs), 64)


def _expected(definition: Definition, wide: bool, a: int, b: int, c: int, d: int) -> tuple[int, int]:
    mask = MASK64 if wide else MASK32
    result, scc = definition(a, b, c, d & mask)
    return (d if result is None else result) & mask, c if scc is None else scc


def _per_wave(value: object, waves: int) -> list[int]:
    return [int(x) for x in np.broadcast_to(np.asarray(value), waves)]


def _shape(mnemonic: str) -> tuple[str, str, Definition]:
    """Returns the operands among "dab", the kind "s" or "d" of each, and the definition."""
    if mnemonic in COMPARES:
        kinds, definition = COMPARES[mnemonic]
        return "ab", kinds, definition
    kinds, definition = FORMS[mnemonic]
    return "dab"[: len(kinds)], kinds, definition


def _source_kinds(operands: str, kinds: str) -> str:
    """Returns "s" or "d" for a and for b. An operand that the instruction lacks counts as "s"."""
    given = dict(zip(operands, kinds, strict=True))
    return given.get("a", "s") + given.get("b", "s")


@pytest.mark.parametrize("mnemonic", [*FORMS, *COMPARES])
def test_values_that_differ_between_waves(mnemonic: str) -> None:
    operands, kinds, definition = _shape(mnemonic)
    a, b, scc, d = _values(_source_kinds(operands, kinds), 1)
    waves, wide = len(a), operands[0] == "d" and kinds[0] == "d"
    s = Snippet(
        _text(mnemonic, operands, kinds),
        s={8: _pairs(a), 12: _pairs(b), 4: _pairs(d)},
        scc=np.array(scc, bool),
        waves=waves,
        registers=1,
    ).run()
    result, after = _per_wave(s.s64(4) if wide else s.s(4), waves), _per_wave(s.scc, waves)
    for i in range(waves):
        expected = _expected(definition, wide, a[i], b[i], scc[i], d[i])
        assert (result[i], after[i]) == expected, (hex(a[i]), hex(b[i]), scc[i], hex(d[i]))


def _pairs(values: list[int]) -> np.ndarray:
    """Returns the values of a pair of registers, one per wave. A 32-bit value fills the lower register."""
    return np.array([MASK64 & value for value in values], object)


@pytest.mark.parametrize("mnemonic", [*FORMS, *COMPARES])
def test_values_that_all_waves_share(mnemonic: str) -> None:
    operands, kinds, definition = _shape(mnemonic)
    a, b, scc, d = _values(_source_kinds(operands, kinds), 2)
    wide = operands[0] == "d" and kinds[0] == "d"
    text = _text(mnemonic, operands, kinds)
    for i in (*range(0, len(a) - 64, 7), *range(len(a) - 8, len(a))):
        s = Snippet(text, s={8: _wide(a[i]), 12: _wide(b[i]), 4: _wide(d[i])}, scc=bool(scc[i]), waves=2, registers=1).run()
        assert type(s.s(4)) is int
        result = s.s64(4) if wide else s.s(4)
        assert (result, int(s.scc)) == _expected(definition, wide, a[i], b[i], scc[i], d[i]), (hex(a[i]), hex(b[i]), scc[i])


def _wide(value: int) -> np.ndarray:
    """Returns one value for a pair of registers, even if the value's upper half is 0."""
    return np.array([value | 1 << 64], object)


@pytest.mark.parametrize("mnemonic", [name for name in (*FORMS, *COMPARES) if "b" in _shape(name)[0]])
@pytest.mark.parametrize("shared", ["a", "b", "scc"])
def test_one_value_shared_and_the_other_not(mnemonic: str, shared: str) -> None:
    operands, kinds, definition = _shape(mnemonic)
    a, b, scc, d = _values(_source_kinds(operands, kinds), 3)
    wide, text = operands[0] == "d" and kinds[0] == "d", _text(mnemonic, operands, kinds)
    chosen = list(range(0, len(a), 5))
    for common in (0, 3, len(a) - 3, len(a) - 90):
        x = [a[common if shared == "a" else i] for i in chosen]
        y = [b[common if shared == "b" else i] for i in chosen]
        c = [scc[common if shared == "scc" else i] for i in chosen]
        s = Snippet(
            text,
            s={
                8: _wide(x[0]) if shared == "a" else _pairs(x),
                12: _wide(y[0]) if shared == "b" else _pairs(y),
                4: _wide(d[common]),
            },
            scc=bool(c[0]) if shared == "scc" else np.array(c, bool),
            waves=len(chosen),
            registers=1,
        ).run()
        result, after = _per_wave(s.s64(4) if wide else s.s(4), len(chosen)), _per_wave(s.scc, len(chosen))
        for i in range(len(chosen)):
            assert (result[i], after[i]) == _expected(definition, wide, x[i], y[i], c[i], d[common])


_MASKS = (0, MASK64, 1, 1 << 63, 0x00000000FFFFFFFF, 0xFFFFFFFF00000000, 0x0123456789ABCDEF, 0x8000000180000001)


_ON_PAIRS = [name for name in (*WIDE, *COMPARES) if _source_kinds(*_shape(name)[:2])[0] == "d"]


@pytest.mark.parametrize(
    ("mnemonic", "other"),
    [(name, "lanes") for name in _ON_PAIRS]
    + [(name, other) for name in _ON_PAIRS if _source_kinds(*_shape(name)[:2]) == "dd" for other in ("numbers", "exec")],
)
def test_sources_that_are_lanes(mnemonic: str, other: str) -> None:
    """The first source is a lane mask from a vector compare. If the second source is a pair, it is a lane mask, integers, or
    EXEC."""
    operands, kinds, definition = _shape(mnemonic)
    b_is_pair = _source_kinds(operands, kinds)[1] == "d"
    waves, wide = len(_MASKS), operands[0] == "d" and kinds[0] == "d"
    for turn in range(waves):
        b = [_MASKS[(i + turn) % waves] if b_is_pair else (turn * 9 + i * 7) % 64 for i in range(waves)]
        scc = [(i ^ turn) & 1 for i in range(waves)]
        lanes_a, lanes_b = (np.concatenate([bits_of(m) for m in masks]).astype(np.uint32) for masks in (_MASKS, b))
        text = _text(mnemonic, operands, kinds)
        lines = ["v_cmp_ne_u32_e64 s[8:9], 0, v1"]
        if b_is_pair and other == "lanes":
            lines.append("v_cmp_ne_u32_e64 s[12:13], 0, v2")
        if other == "exec":
            text = text.replace("s[12:13]", "exec")
            lines.append("s_mov_b64 exec, s[12:13]")
        s = Snippet(
            "\n".join([*lines, text]),
            v={1: lanes_a, 2: lanes_b},
            s={12: _pairs(b), 4: _pairs([~m for m in _MASKS])},
            scc=np.array(scc, bool),
            waves=waves,
            registers=4,
        ).run()
        result, after = _per_wave(s.s64(4) if wide else s.s(4), waves), _per_wave(s.scc, waves)
        for i in range(waves):
            assert (result[i], after[i]) == _expected(definition, wide, _MASKS[i], b[i], scc[i], ~_MASKS[i]), (turn, i)


@pytest.mark.parametrize("mnemonic", IMMEDIATE)
def test_immediates(mnemonic: str) -> None:
    rng = np.random.default_rng(4)
    d = [*SPECIAL32, *random_words(rng, 40)]
    for text in ("0", "1", "5", "-1", "-5", "0x7fff", "0x8000", "0x8001", "0xffff", "0x1234"):
        immediate = int(text, 0) & 0xFFFF
        for scc in (0, 1):
            expected = [IMMEDIATE[mnemonic](immediate, scc, x) for x in d]
            together = Snippet(f"{mnemonic} s4, {text}", s={4: np.array(d)}, scc=bool(scc), waves=len(d), registers=1).run()
            single = [Snippet(f"{mnemonic} s4, {text}", s={4: x}, scc=bool(scc), registers=1).run() for x in d[::9]]
            results = [x if result is None else result & MASK32 for x, (result, _) in zip(d, expected, strict=True)]
            after = [scc if flag is None else flag for _, flag in expected]
            assert _per_wave(together.s(4), len(d)) == results
            assert _per_wave(together.scc, len(d)) == after
            assert [s.s(4) for s in single] == results[::9]
            assert [int(s.scc) for s in single] == after[::9]


@pytest.mark.parametrize("mnemonic", [*SAVEEXEC, *WREXEC])
@pytest.mark.parametrize("representation", ["lanes", "numbers", "shared", "vcc"])
def test_changing_exec(mnemonic: str, representation: str) -> None:
    logic = (SAVEEXEC | WREXEC)[mnemonic]
    waves = len(_MASKS)
    for turn in range(waves):
        before = [_MASKS[(i + turn) % waves] for i in range(waves)]
        source = [_MASKS[0 if representation == "shared" else i] for i in range(waves)]
        lanes = np.concatenate([bits_of(m) for m in source]).astype(np.uint32)
        compare = {"lanes": "v_cmp_ne_u32_e64 s[8:9], 0, v1", "vcc": "v_cmp_ne_u32_e32 vcc, 0, v1"}.get(representation, "s_nop 0")
        s = Snippet(
            f"{compare}\ns_mov_b64 exec, s[12:13]\n{mnemonic} s[4:5], {'vcc' if representation == 'vcc' else 's[8:9]'}",
            v={1: lanes},
            s={8: _wide(source[0]) if representation == "shared" else _pairs(source), 12: _pairs(before)},
            waves=waves,
            registers=2,
        ).run()
        after = [logic(a, b) & MASK64 for a, b in zip(source, before, strict=True)]
        assert _per_wave(s.s64("exec"), waves) == after
        assert _per_wave(s.s64(4), waves) == (before if mnemonic in SAVEEXEC else after)
        assert _per_wave(s.scc, waves) == [int(m != 0) for m in after]


# Operands of every kind


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("64", 64), ("-1", MASK32), ("-16", MASK32 - 15), ("0x1234", 0x1234), ("0xdeadbeef", 0xDEADBEEF),
        ("1.0", 0x3F800000), ("-4.0", 0xC0800000), ("0.15915494", 0x3E22F983), ("vcc_lo", 0x89ABCDEF), ("vcc_hi", 0x01234567),
        ("m0", 77), ("exec_lo", 0x0000FFFF), ("exec_hi", 0xFF000000),
    ],
)  # fmt: skip
def test_sources_of_32_bits(text: str, value: int) -> None:
    state = {"vcc": 0x0123456789ABCDEF, "m0": 77, "exec": 0xFF0000000000FFFF}
    assert Snippet(f"s_mov_b32 s4, {text}", s=state, registers=1).run().s(4) == value
    assert Snippet(f"s_add_u32 s4, {text}, s5", s=state | {5: 3}, registers=1).run().s(4) == (value + 3) & MASK32
    differing = Snippet(f"s_add_u32 s4, s5, {text}", s=state | {5: np.arange(8)}, waves=8, registers=1).run()
    assert _per_wave(differing.s(4), 8) == [(value + i) & MASK32 for i in range(8)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-1", MASK64), ("-16", MASK64 - 15), ("0x80000000", 1 << 31), ("0xffff", 0xFFFF), ("1.0", 0x3FF0000000000000),
        ("vcc", 0x0123456789ABCDEF), ("exec", 0xFF0000000000FFFF), ("s[8:9]", 5 << 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first_is_lanes", [False, True])
def test_sources_of_64_bits(text: str, value: int, first_is_lanes: bool) -> None:
    state = {"vcc": 0x0123456789ABCDEF, "exec": 0xFF0000000000FFFF, 8: 5 << 32, 12: 0xF0F0F0F0F0F0F0F0}
    make_lanes = "s_not_b64 s[12:13], exec\n" if first_is_lanes else ""
    first = 0x00FFFFFFFFFF0000 if first_is_lanes else 0xF0F0F0F0F0F0F0F0
    s = Snippet(f"{make_lanes}s_mov_b64 s[4:5], {text}\ns_xor_b64 s[6:7], s[12:13], {text}", s=state, registers=1).run()
    assert s.s64(4) == value
    assert s.s64(6) == first ^ value


@pytest.mark.parametrize("waves", [1, 3])
def test_halves_of_exec_and_vcc(waves: int) -> None:
    low = np.arange(waves) + 5
    s = Snippet(
        "s_mov_b32 exec_lo, s4\ns_mov_b32 vcc_hi, s5\ns_not_b64 s[8:9], exec\ns_mov_b32 exec_hi, s5\ns_mov_b32 s9, s5",
        s={4: low, 5: 0x80000001, "vcc": 7, "exec": MASK64},
        waves=waves,
        registers=1,
    ).run()
    assert _per_wave(s.s64("exec"), waves) == [0x80000001 << 32 | 5 + i for i in range(waves)]
    assert _per_wave(s.s64("vcc"), waves) == [0x80000001 << 32 | 7] * waves
    assert _per_wave(s.s64(8), waves) == [
        0x80000001 << 32 | MASK32 ^ 5 + i for i in range(waves)
    ]  # the upper half of a mask is replaced
    for wave in range(waves):
        expected = bits_of(0x80000001 << 32 | 5 + wave)
        assert (s.lanes("exec")[wave * WAVE : (wave + 1) * WAVE] == expected).all()


def test_register_pairs_that_do_not_belong_together() -> None:
    """Values are correct if the pair s[8:9] holds halves of two different masks, and the pair s[12:13] their lower halves."""
    s = Snippet(
        "v_cmp_ne_u32_e64 s[8:9], 0, v1\nv_cmp_eq_u32_e64 s[10:11], 0, v1\ns_mov_b32 s9, s11\ns_mov_b32 s12, s8\n"
        "s_mov_b32 s13, s10",
        v={1: bits_of(0x0123456789ABCDEF).astype(np.uint32)},
        registers=2,
    ).run()
    assert s.s64(8) == 0xFEDCBA9889ABCDEF
    assert s.s64(12) == 0x7654321089ABCDEF
    assert (s.lanes(8) == bits_of(0xFEDCBA9889ABCDEF)).all()


# Scalar loads


def _memory(words: int) -> np.ndarray:
    return (np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)).astype(np.uint32)


@pytest.mark.parametrize("mnemonic", [name for name in LOADS if name.startswith("s_load")])
@pytest.mark.parametrize(
    ("offset", "register", "bytes_"),
    [
        ("0x0", 0, 0),
        ("0x10", 0, 16),
        ("-0x8", 0, -8),
        ("s6", 20, 20),
        ("s6 offset:0x8", 12, 20),
        ("0x7", 0, 4),
        ("s6", 0xFFFFFFF0, None),
    ],
)
def test_scalar_loads(mnemonic: str, offset: str, register: int, bytes_: int | None) -> None:
    data, count = _memory(64), LOADS[mnemonic]
    base = data.ctypes.data + 64
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    text = f"{mnemonic} {target}, s[8:9], {offset}\ns_waitcnt lgkmcnt(0)"
    if bytes_ is None:  # the offset in a register is unsigned
        with pytest.raises(SanitizerError) as caught:
            Snippet(text, s={8: base, 6: register}, arrays=[data], registers=1).run()
        assert caught.value.kind == "out-of-bounds"
        return
    start = (64 + bytes_) // 4
    s = Snippet(text, s={8: base, 6: register}, arrays=[data], registers=1, sanitize=True).run()
    assert [s.s(16 + i) for i in range(count)] == data[start : start + count].tolist()
    bases = np.array([base, base + 32, base + 4, base], np.uint64)
    s = Snippet(text, s={8: bases, 6: register}, arrays=[data], waves=4, registers=1).run()
    for i in range(count):
        assert _per_wave(s.s(16 + i), 4) == [int(data[start + shift + i]) for shift in (0, 8, 1, 0)]


@pytest.mark.parametrize("mnemonic", [name for name in LOADS if name.startswith("s_buffer")])
@pytest.mark.parametrize("records", [0, 20, 24, 23, 256])
@pytest.mark.parametrize("offset", [0, 8, 16, 60])
def test_scalar_buffer_loads(mnemonic: str, records: int, offset: int) -> None:
    data, count = _memory(80), LOADS[mnemonic]
    state = {8: data.ctypes.data, 10: records, 11: 0x27000}
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    expected = [int(data[offset // 4 + i]) if offset + 4 * i + 4 <= records else 0 for i in range(count)]
    s = Snippet(f"{mnemonic} {target}, s[8:11], {offset:#x}\ns_waitcnt lgkmcnt(0)", s=state, arrays=[data], registers=1).run()
    assert [s.s(16 + i) for i in range(count)] == expected
    offsets = np.array([offset, 4, 44])
    s = Snippet(f"{mnemonic} {target}, s[8:11], s6", s=state | {6: offsets}, arrays=[data], waves=3, registers=1).run()
    for i in range(count):
        assert _per_wave(s.s(16 + i), 3) == [int(data[o // 4 + i]) if o + 4 * i + 4 <= records else 0 for o in offsets]


@pytest.mark.parametrize("address", [0, 8, (1 << 63) - 4, 1 << 63, MASK64 - 3])
def test_scalar_load_from_nowhere(address: int) -> None:
    data = _memory(16)
    for waves in (1, 2):
        bases = np.array([address, data.ctypes.data][:waves], object)
        with pytest.raises(SanitizerError) as caught:
            Snippet("s_load_dwordx2 s[16:17], s[8:9], 0x0", s={8: bases}, arrays=[data], waves=waves, registers=1).run()
        assert caught.value.kind == "out-of-bounds"


def test_scalar_load_past_the_end() -> None:
    data = _memory(16)
    with pytest.raises(SanitizerError, match="past the end"):
        Snippet("s_load_dwordx4 s[16:19], s[8:9], 0x34", s={8: data.ctypes.data}, arrays=[data], registers=1).run()


def test_scalar_load_to_the_wrong_number_of_registers() -> None:
    with pytest.raises(UnknownInstruction, match="4 scalar registers"):
        Snippet("s_load_dwordx4 s[16:17], s[8:9], 0x0", registers=1)
