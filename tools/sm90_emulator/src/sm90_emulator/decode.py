"""Binds PTX instructions to the machine's operations, once per kernel: elementwise instructions and branches.

`decode_memory` and `decode_matrix` bind memory, barrier and tensor-core instructions. An instruction or modifier that no binder
knows raises `UnknownInstruction`.
"""

from __future__ import annotations

from sm90_emulator.assembly import Statement, bits_of
from sm90_emulator.build import operations
from sm90_emulator.decoder import Decoder, binder, elements
from sm90_emulator.registers import room_of

_LOGIC = {"b16": "32", "b32": "32", "b64": "64"}
_ROUNDING = {"rz": 1, "rm": 2, "rp": 3}
_IGNORED = {"rn", "approx", "full", "uni", "sync", "aligned", "wrap", "noftz"}

# -- control -----------------------------------------------------------------------------------------------------------------------


@binder("bra")
def _branch(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    target = statement.scope.label(statement.operands[0])
    if target is None:
        raise decoder.unknown("no such label")
    decoder.emit("bra", label=target)


@binder("ret", "exit")
def _exit(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("exit")


@binder("trap")
def _trap(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("trap")


@binder("nanosleep")
def _sleep(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("yield")


# -- moves -------------------------------------------------------------------------------------------------------------------------


@binder("mov")
def _move(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    to, source = statement.operands
    bits = bits_of(kind)
    if to.startswith("{"):
        _unpack(decoder, elements(to), decoder.read(source, kind), bits)
    elif source.startswith("{"):
        _pack(decoder, decoder.write(to), elements(source), bits)
    elif bits == 1:
        place, negated = decoder.predicate(source)
        decoder.emit("mov_pred", d=decoder.write(to), a=place, more=negated)
    else:
        place = decoder.read(source, kind)
        decoder.emit(f"mov_{64 if bits == 64 else 32}", d=decoder.write(to), a=place)


def _unpack(decoder: Decoder, targets: list[str], source: int, bits: int) -> None:
    each = bits // len(targets)
    if (bits, len(targets)) == (64, 4):
        for half, name in enumerate(("low_of_64", "high_of_64")):
            part = decoder.registers.temporary("b32")
            decoder.emit(name, d=part, a=source)
            _unpack(decoder, targets[2 * half : 2 * half + 2], part, 32)
        return
    if (bits, each) == (32, 8):
        for index, target in enumerate(targets):
            if target != "_":
                shifted = decoder.registers.temporary("b32")
                decoder.emit("shr_u32", d=shifted, a=source, b=decoder.registers.constant(8 * index, 128))
                decoder.emit("widen_u8_16", d=decoder.write(target), a=shifted)
        return
    if (bits, each) not in ((64, 32), (32, 16)):
        raise decoder.unknown()
    for target, name in zip(targets, (f"low_of_{bits}", f"high_of_{bits}"), strict=True):
        if target != "_":
            decoder.emit(name, d=decoder.write(target), a=source)


def _pack(decoder: Decoder, to: int, sources: list[str], bits: int) -> None:
    each = bits // len(sources)
    places = [decoder.read(source, f"b{each}") for source in sources]
    if (bits, each) == (64, 16):
        halves = []
        for half in range(2):
            halves.append(decoder.registers.temporary("b32"))
            decoder.emit("pack_32", d=halves[-1], a=places[2 * half], b=places[2 * half + 1])
        decoder.emit("pack_64", d=to, a=halves[0], b=halves[1])
    elif (bits, each) == (32, 8):
        halves = []
        for half in range(2):
            halves.append(decoder.registers.temporary("b16"))
            decoder.emit("pack_16", d=halves[-1], a=places[2 * half], b=places[2 * half + 1])
        decoder.emit("pack_32", d=to, a=halves[0], b=halves[1])
    elif (bits, each) in ((64, 32), (32, 16), (16, 8)):
        # The target register may also be a source, because the operation reads all sources of a lane before it writes the lane.
        decoder.emit(f"pack_{bits}", d=to, a=places[0], b=places[1])
    else:
        raise decoder.unknown()


@binder("selp")
def _select(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, x, y, predicate = statement.operands
    kind = words[-1]
    place, negated = decoder.predicate(predicate)
    name = f"selp_{64 if bits_of(kind) == 64 else 32}"
    decoder.emit(name, d=decoder.write(to), a=decoder.read(x, kind), b=decoder.read(y, kind), c=place, more=4 * negated)


# -- arithmetic --------------------------------------------------------------------------------------------------------------------


def _operation(decoder: Decoder, statement: Statement, name: str, kinds: list[str]) -> None:
    """Emits an operation with a destination register, and with source operands of the given types."""
    places = [decoder.read(operand, kind) for operand, kind in zip(statement.operands[1:], kinds, strict=True)]
    fields = dict(zip("abc", places, strict=False))
    decoder.emit(name, d=decoder.write(statement.operands[0]), **fields)


def _words(decoder: Decoder, words: list[str], *known: str) -> set[str]:
    """Returns the modifiers between an instruction's first word and its type. Modifiers without effect are left out."""
    given = {word for word in words[1:-1] if word not in _IGNORED}
    if given - set(known):
        raise decoder.unknown(f"modifier {', '.join(sorted(given - set(known)))}")
    return given


@binder("add", "sub", "mul", "fma", "mad", "div", "min", "max", "rem", "abs", "neg", "copysign")
def _arithmetic(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    count = len(statement.operands) - 1
    if kind[0] == "f" or kind.startswith("bf"):
        _floats(decoder, statement, words, kind, count)
        return
    bits = bits_of(kind)
    given = _words(decoder, words, "lo", "hi", "wide", "relu", "sat")
    if kind.endswith("x2") or (given == {"relu"} and words[0] in ("min", "max")):
        _operation(decoder, statement, "_".join([words[0], *sorted(given), kind]), [kind] * count)
    elif given - {"lo", "hi", "wide"}:
        raise decoder.unknown()
    elif words[0] in ("mul", "mad"):
        part = next(iter(given))
        signed = part == "wide" or part == "hi"
        kinds = [kind] * count
        if part == "wide" and count == 3:
            kinds[2] = f"{kind[0]}{2 * bits}"
        _operation(decoder, statement, f"{words[0]}_{part}_{kind[0] if signed else ''}{bits}", kinds)
    elif words[0] in ("add", "sub", "neg"):
        _operation(decoder, statement, f"{words[0]}_{bits}", [kind] * count)
    else:
        _operation(decoder, statement, f"{words[0]}_{kind}", [kind] * count)


def _floats(decoder: Decoder, statement: Statement, words: list[str], kind: str, count: int) -> None:
    name = "fma" if words[0] == "mad" else words[0]
    given = _words(decoder, words, "ftz", "NaN", "relu", "rz", "rm", "rp", "sat", "xorsign")
    if modes := given & set(_ROUNDING):
        what = ["add", "sub", "mul", "fma", "div", "sqrt"].index(name)
        if kind != "f32" or given - modes - {"ftz"}:
            raise decoder.unknown()
        places = [decoder.read(operand, kind) for operand in statement.operands[1:]]
        places += [places[0]] * (3 - len(places))
        fields = dict(zip("abc", places, strict=True))
        decoder.emit("rounded_f32", d=decoder.write(statement.operands[0]), kind=what, more=_ROUNDING[modes.pop()], **fields)
        return
    parts = [name]
    if "relu" in given:
        parts.append("relu")
    if "NaN" in given:
        parts.append("nan")
    if "ftz" in given and name in ("add", "sub", "mul", "fma") and kind == "f32":
        parts.append("ftz")
    kinds = [kind] * count
    _operation(decoder, statement, "_".join([*parts, kind]), kinds)
    if "sat" in given:
        to = decoder.write(statement.operands[0])
        decoder.emit("sat_f32", d=to, a=to)


@binder("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")
def _functions(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    given = _words(decoder, words, "ftz")
    flushes = "ftz" in given and f"{words[0]}_ftz_{kind}" in operations()
    _operation(decoder, statement, f"{words[0]}_{'ftz_' if flushes else ''}{kind}", [kind])


@binder("and", "or", "xor")
def _logic(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    if kind != "pred":
        _operation(decoder, statement, f"{words[0]}_{_LOGIC[kind]}", [kind] * 2)
        return
    (x, not_x), (y, not_y) = (decoder.predicate(operand) for operand in statement.operands[1:])
    decoder.emit(f"{words[0]}_pred", d=decoder.write(statement.operands[0]), a=x, b=y, more=not_x + 2 * not_y)


@binder("not", "cnot")
def _not(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    if kind == "pred":
        decoder.emit("not_pred", d=decoder.write(statement.operands[0]), a=decoder.predicate(statement.operands[1])[0])
    else:
        _operation(decoder, statement, f"{words[0]}_{bits_of(kind)}", [kind])


@binder("shl", "shr")
def _shift(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    sign = "s" if kind[0] == "s" else "u"
    name = f"shl_{bits_of(kind)}" if words[0] == "shl" else f"shr_{sign}{bits_of(kind)}"
    _operation(decoder, statement, name, [kind, "b32"])


@binder("shf")
def _funnel(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    _operation(decoder, statement, f"shf_{words[1]}_{words[2]}", ["b32"] * 3)


@binder("bfe", "popc", "clz", "brev", "bfind")
def _bits(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    if len(words) > 2:
        raise decoder.unknown()
    name = f"{words[0]}_{kind}" if words[0] in ("bfe", "bfind") else f"{words[0]}_{bits_of(kind)}"
    _operation(decoder, statement, name, [kind, "b32", "b32"][: len(statement.operands) - 1])


@binder("bfi")
def _insert(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kinds = [words[-1]] * 2 + ["b32"] * 2
    places = dict(zip("abce", map(decoder.read, statement.operands[1:], kinds), strict=True))
    decoder.emit(f"bfi_{bits_of(words[-1])}", d=decoder.write(statement.operands[0]), **places)


@binder("prmt")
def _permute(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1:] != ["b32"]:
        raise decoder.unknown()
    _operation(decoder, statement, "prmt_32", ["b32"] * 3)


@binder("lop3")
def _lookup(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1:] != ["b32"]:
        raise decoder.unknown()
    places = dict(zip("abc", (decoder.read(operand, "b32") for operand in statement.operands[1:4]), strict=True))
    decoder.emit("lop3", d=decoder.write(statement.operands[0]), imm=int(statement.operands[4], 0), **places)


@binder("dp4a")
def _dot(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    _operation(decoder, statement, "_".join(words), ["b32"] * 3)


# -- addresses ---------------------------------------------------------------------------------------------------------------------


@binder("cvta")
def _cast(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, source = statement.operands
    space = next(found for word in words if (found := word.partition("::")[0]) in ("global", "shared", "local", "param", "const"))
    bits, kind = bits_of(words[-1]), decoder.registers.kind_of(source, statement.scope) or words[-1]
    place, target = decoder.read(source, kind), decoder.write(to)
    if space in ("shared", "local"):
        if "to" in words:
            decoder.emit("shared_of_generic", d=target, a=place, more=bits // 8)
        else:
            decoder.emit(f"generic_of_{'shared' if space != 'local' else 'local'}", d=target, a=place, more=bits_of(kind) // 8)
    elif space == "param":
        base = decoder.registers.symbol("<parameters>")
        decoder.emit("sub_64" if "to" in words else "add_64", d=target, a=place, b=base)
    else:
        decoder.emit("mov_64", d=target, a=place)


@binder("createpolicy")
def _policy(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("mov_64", d=decoder.write(statement.operands[0]), a=decoder.registers.constant(0, room_of("b64")))
