"""Binds loads, stores, atomics, copies, barriers, and warp-wide instructions."""

from __future__ import annotations

from sm90_emulator.assembly import Statement, bits_of
from sm90_emulator.decoder import Decoder, binder, elements
from sm90_emulator.registers import SINK

_SPACES = {"global": 1, "shared": 2, "const": 1, "local": 4}
# The codes of reductions; they must equal those in copies.h.
_REDUCTIONS = {"add": 1, "min": 2, "max": 3, "inc": 4, "dec": 5, "and": 6, "or": 7, "xor": 8}
_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "b32": 2, "s32": 3, "u64": 4, "b64": 4, "s64": 5, "f16": 6, "f16x2": 6, "f32": 7, "f64": 8,
    "bf16": 10, "bf16x2": 10,
}  # fmt: skip
_SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}


def _space(words: list[str]) -> int:
    for word in words:
        if (space := word.partition("::")[0]) in _SPACES:
            return _SPACES[space]
    return 0


@binder("ld", "ldu")
def _load(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = words[-1]
    targets = elements(statement.operands[0])
    places = [decoder.write(target) for target in targets]
    named = next(target for target in targets if target != "_")
    size, room = bits_of(kind) // 8, bits_of(decoder.declared(named)) // 8
    more = size | (kind[0] == "s") << 8 | max(room, 2) << 16
    listed = decoder.listed(places)
    if "param" in words:
        inside, _, offset = statement.operands[1].strip("[] ").partition("+")
        parameter = decoder.kernel.parameters.get(inside.strip())
        if parameter is None:
            raise decoder.unknown("no such parameter")
        decoder.emit("ldparam", imm=parameter.offset + int(offset or "0", 0), more=more, **listed)
        return
    ordered = not {"relaxed", "acquire", "volatile"}.isdisjoint(words)
    address = decoder.address(statement.operands[1])
    decoder.emit("ld", kind=_space(words), more=more, imm_other=int(ordered), **listed, **address)


@binder("fence", "membar")
def _fence(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    """Binds a fence. The emulator's memory is always ordered, but a fence waits for loads in flight."""
    decoder.emit("fence")


@binder("st")
def _store(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1] == "async":
        _send(decoder, statement, words)
        return
    kind = words[-1]
    if kind.endswith("x2"):
        raise decoder.unknown()
    places = [decoder.read(source, kind) for source in elements(statement.operands[1])]
    address = decoder.address(statement.operands[0])
    decoder.emit("st", kind=_space(words), more=bits_of(kind) // 8, **decoder.listed(places), **address)


@binder("atom", "red")
def _atomic(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1] == "async":
        raise decoder.unknown()
    kind, operands = words[-1], list(statement.operands)
    if words[-2] == "noftz":
        words.pop(-2)
    target = decoder.write(operands.pop(0)) if words[0] == "atom" and not operands[0].startswith("{") else SINK
    how = next((word for word in words if word in _REDUCTIONS or word in ("exch", "cas")), None)
    if how is None:
        raise decoder.unknown()
    address, space = decoder.address(operands[0]), _space(words)
    if how == "cas":
        places = {name: decoder.read(operand, kind) for name, operand in zip("bc", operands[1:3], strict=True)}
        decoder.emit("cas", d=target, kind=space, more=bits_of(kind) // 8, **places, **address)
        return
    more = _TYPES[kind] | (255 if how == "exch" else _REDUCTIONS[how]) << 8 | kind.endswith("x2") << 16
    sources = elements(operands[1])
    if len(sources) > 1 and target != SINK:
        raise decoder.unknown("a vector")
    for index, source in enumerate(sources):
        at = {**address, "imm": address["imm"] + index * bits_of(kind) // 8}
        decoder.emit("atom", d=target, b=decoder.read(source, kind), kind=space, more=more, **at)


@binder("griddepcontrol")
def _grid(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("grid_wait" if words[1] == "wait" else "grid_trigger")


@binder("mapa")
def _map(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, address, rank = statement.operands
    wide = words[-1] == "u64"
    decoder.emit("mapa", d=decoder.write(to), a=decoder.read(address, words[-1]), b=decoder.read(rank, "b32"), kind=int(wide))


@binder("getctarank")
def _rank(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    kind = decoder.registers.kind_of(statement.operands[1], statement.scope) or "b32"
    decoder.emit(
        "rank_of",
        d=decoder.write(statement.operands[0]),
        a=decoder.read(statement.operands[1], kind),
        kind=int(bits_of(kind) == 64),
    )


@binder("isspacep")
def _is_space(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    space = _space(words)
    decoder.emit("is_space", d=decoder.write(statement.operands[0]), a=decoder.read(statement.operands[1], "b64"), kind=space)


# -- exchanges between lanes
# --------------------------------------------------------------------------------------------------------


@binder("shfl")
def _shuffle(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, *operands = statement.operands
    to, _, held = to.partition("|")
    places = dict(zip("abce", (decoder.read(operand, "b32") for operand in operands), strict=True))
    target = decoder.write(held.strip()) if held else -1
    decoder.emit("shfl", d=decoder.write(to.strip()), kind=_SHUFFLES[words[2]], target=target, **places)


@binder("vote")
def _vote(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    name = "ballot" if words[2] == "ballot" else f"vote_{words[2]}"
    place, negated = decoder.predicate(statement.operands[1])
    decoder.emit(name, d=decoder.write(statement.operands[0]), a=place, b=decoder.read(statement.operands[2], "b32"), more=negated)


@binder("match")
def _match(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, _, held = statement.operands[0].partition("|")
    name = f"match_{words[1]}{'_64' if words[-1] == 'b64' else ''}"
    target = decoder.write(held.strip()) if held else -1
    source, mask = decoder.read(statement.operands[1], words[-1]), decoder.read(statement.operands[2], "b32")
    decoder.emit(name, d=decoder.write(to.strip()), a=source, b=mask, target=target)


@binder("redux")
def _reduce(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    source, mask = (decoder.read(operand, "b32") for operand in statement.operands[1:])
    signed = int(words[-1] == "s32")
    decoder.emit("redux", d=decoder.write(statement.operands[0]), a=source, b=mask, kind=_REDUCTIONS[words[2]], more=signed)


@binder("elect")
def _elect(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, _, held = statement.operands[0].partition("|")
    place = decoder.read(statement.operands[1], "b32")
    decoder.emit("elect", d=decoder.write(to.strip()), target=decoder.write(held.strip()), a=place)


@binder("activemask")
def _active(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    decoder.emit("activemask", d=decoder.write(statement.operands[0]))


# -- barriers ----------------------------------------------------------------------------------------------------------------------


@binder("bar", "barrier")
def _barrier(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1] == "warp":
        decoder.emit("bar_warp", a=decoder.read(statement.operands[0], "b32"))
        return
    if words[1] == "cluster":
        decoder.emit(f"cluster_{words[2]}")
        return
    how = "arrive" if "arrive" in words else "sync"
    if "red" in words:
        raise decoder.unknown()
    places = dict(zip("ab", (decoder.read(operand, "b32") for operand in statement.operands), strict=False))
    decoder.emit(f"bar_{how}", **places)


@binder("setmaxnreg")
def _registers(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    count = int(statement.operands[0], 0)
    if words[1] not in ("inc", "dec") or count % 8 or not 24 <= count <= 256:
        raise decoder.unknown("a thread may have 24 to 256 registers, in steps of 8")
    decoder.emit("setmaxnreg", kind=int(words[1] == "inc"), imm=count)


@binder("mbarrier")
def _mbarrier(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    operands = statement.operands
    at = next(index for index, operand in enumerate(operands) if operand.startswith("["))
    address, rest = decoder.address(operands[at]), operands[at + 1 :]
    target = {"d": decoder.write(operands[0])} if at else {}
    what = words[1]
    if what == "init":
        decoder.emit("mbarrier_init", b=decoder.read(rest[0], "b32"), **address)
    elif what == "inval":
        decoder.emit("mbarrier_inval", **address)
    elif what in ("expect_tx", "complete_tx"):
        decoder.emit("mbarrier_expect_tx", b=decoder.read(rest[0], "b32"), kind=2 * (what == "complete_tx"), **address)
    elif what == "arrive" and "noComplete" not in words:
        count = {"b": decoder.read(rest[0], "b32")} if rest else {}
        decoder.emit("mbarrier_arrive", kind=int("expect_tx" in words), **target, **count, **address)
    elif what in ("try_wait", "test_wait"):
        by_parity = "parity" in words
        phase = decoder.read(rest[0], "b32" if by_parity else "b64")
        decoder.emit("mbarrier_wait", b=phase, kind=by_parity + 2 * (what == "try_wait"), **target, **address)
    else:
        raise decoder.unknown()


# -- copies ------------------------------------------------------------------------------------------------------------------------


def _other(decoder: Decoder, operand: str) -> dict[str, int]:
    """Returns the operation's fields for the second address of a copy."""
    found = decoder.address(operand)
    return {"b": found["a"], "imm_other": found["imm"]}


@binder("cp")
def _copy(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if "prefetch" in words:
        return
    if "commit_group" in words:
        decoder.emit("bulk_commit" if "bulk" in words else "cp_async_commit")
    elif "wait_group" in words or "wait_all" in words:
        left = int(statement.operands[0], 0) if statement.operands else 0
        decoder.emit("bulk_wait" if "bulk" in words else "cp_async_wait", imm=left, kind=int("wait_all" in words))
    elif "bulk" in words:
        _bulk(decoder, statement, words)
    elif words[2] == "mbarrier":
        decoder.emit("cp_async_arrive", kind=int("noinc" in words), **decoder.address(statement.operands[0]))
    else:
        _copy_of_lane(decoder, statement)


def _copy_of_lane(decoder: Decoder, statement: Statement) -> None:
    to, source, size, *rest = statement.operands
    fields = decoder.address(to)
    other = decoder.address(source)
    fields |= {"b": other["a"], "target": other["imm"]}
    if rest:
        kind = decoder.registers.kind_of(rest[0], statement.scope)
        if kind == "pred":
            fields["e"] = decoder.predicate(rest[0])[0]
        elif kind != "b64":  # a b64 operand is a cache policy
            fields["c"] = decoder.read(rest[0], "b32")
    decoder.emit("cp_async", more=int(size, 0), **fields)


def _barrier_of(decoder: Decoder, operand: str) -> tuple[int, int]:
    """Returns the register of an mbarrier's address, and the offset to add to this address, encoded as in the field `more`."""
    found = decoder.address(operand)
    return found["a"], found["imm"] << 32


def _bulk(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    operands = list(statement.operands)
    reduction = next((_REDUCTIONS[word] for word in words if word in _REDUCTIONS), 0)
    if "im2col" in words or any(word.startswith("im2col") or "gather" in word or "scatter" in word for word in words):
        raise decoder.unknown()
    spaces = [word.partition("::")[0] for word in words if word.partition("::")[0] in ("shared", "global")]
    tensor = "tensor" in words
    fields: dict[str, int] = {"kind": reduction}
    if spaces == ["shared", "global"]:
        fields |= decoder.address(operands[0])
        fields |= _source(decoder, operands[1], tensor)
        if not tensor:
            fields["c"] = decoder.read(operands[2], "b32")
        rest = operands[2 if tensor else 3 :]
        fields["e"], fields["more"] = _barrier_of(decoder, rest[0])
        if "multicast::cluster" in words:
            fields["target"] = decoder.read(rest[1], "b16")
        decoder.emit("tensor_load" if tensor else "bulk_load", **fields)
    elif spaces == ["global", "shared"]:
        fields |= _source(decoder, operands[0], tensor)
        fields |= decoder.address(operands[1])
        fields["more"] = _TYPES.get(words[-1], 0) << 8
        if not tensor:
            fields["c"] = decoder.read(operands[2], "b32")
        decoder.emit("tensor_store" if tensor else "bulk_store", **fields)
    elif spaces == ["shared", "shared"] and not reduction:
        fields |= decoder.address(operands[0])
        fields |= _other(decoder, operands[1])
        fields["c"] = decoder.read(operands[2], "b32")
        fields["e"], fields["more"] = _barrier_of(decoder, operands[3])
        decoder.emit("bulk_peer", **fields)
    else:
        raise decoder.unknown()


def _source(decoder: Decoder, operand: str, tensor: bool) -> dict[str, int]:
    """Returns the fields for the global-memory side of a copy: an address, or a tensor map with coordinates."""
    if not tensor:
        return _other(decoder, operand)
    inside = operand.strip("[] ")
    address, _, coordinates = inside.partition(",")
    places = [decoder.read(part, "b32") for part in elements(coordinates.strip())]
    return {**_other(decoder, f"[{address}]"), **decoder.listed(places)}


def _send(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, sources, barrier = statement.operands
    kind = words[-1]
    places = [decoder.read(source, kind) for source in elements(sources)]
    place, offset = _barrier_of(decoder, barrier)
    decoder.emit("st_async", e=place, more=offset | bits_of(kind) // 8, **decoder.listed(places), **decoder.address(to))
