"""Executes programs of CuteDSL without a GPU: their PTX, instruction by instruction, a warp at a time, with NumPy.

Not fast, and not all of PTX: what the programs that are tested so consist of, anything else raises NotImplementedError. It finds
wrong addresses, layouts and counts, reads of memory that nobody has written yet, and operands that are overwritten too early:
copies and products that run on their own are done as late or as early as they may be, at random, and memory begins as NaN. Which
warp goes on is random too. CTAs of a cluster run together. It knows nothing of caches, and of what is visible to which proxy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from .ptx_values import (
    Lanes,
    Mbarrier,
    Memory,
    cut,
    halves,
    joined,
    narrowed,
    number,
    parts,
    register,
    rounded_to_e4m3,
    widen,
    width,
)

LANES = 32
SHARED_BASE, GLOBAL_BASE = 1024, 0x7F0000000000
SHARED_BYTES = 227 * 1024
_PATIENCE = 20000  # turns in which nothing happened
_CLUSTER = -1  # a barrier's number
_RANK_BIT = 24  # of an address in shared memory: which CTA of the cluster has it
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


# -- programs ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """``guard``: the predicate and whether it is negated."""

    name: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str


def _operands(text: str) -> tuple[str, ...]:
    """Split at commas that are not in braces."""
    return tuple(part.strip() for part in re.findall(r"((?:\{[^}]*\}|[^,{])+)", text))


def names(operand: str) -> list[str]:
    """The registers of a vector, or of none."""
    return [name.strip() for name in operand.strip("{}").split(",")]


class Program:
    """The kernel of a PTX text."""

    def __init__(self, text: str) -> None:
        head, body = text[text.index(".entry") :].split("{", 1)
        self.parameters = re.findall(r"\.param \.(\w+) (\w+)", head)
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._parse(re.sub(r"//.*", "", body))

    def _parse(self, body: str) -> None:
        scopes: list[tuple[int, list[str]]] = []  # of inline assembly: what is declared inside is renamed
        count, at = 0, 0

        def renamed(text: str) -> str:
            for scope, declared in reversed(scopes):
                for name in declared:
                    text = re.sub(rf"(?<![\w$%.]){name}(?!\w)", f"{name}#{scope}", text)
            return text

        while True:
            at = re.compile(r"\s*").match(body, at).end()  # type: ignore[union-attr]
            if body[at] == "}" and not scopes:
                return
            if body[at] == "}":
                scopes.pop()
                at += 1
            elif body[at] == "{":
                count, at = count + 1, at + 1
                inside = body[at:]
                declared = re.findall(r"\.reg\s+\.\w+\s+([^;]*);", inside[: self._scope_end(inside)])
                labels = re.findall(r"(?:^|[;\s])([A-Za-z_]\w*):(?!:)", inside[: self._scope_end(inside)])
                scopes.append((count, [name for part in declared for name in names(part)] + labels))
            elif label := re.compile(r"([$\w]+):(?!:)").match(body, at):
                self.labels[renamed(label[1])] = len(self.code)
                at = label.end()
            else:
                end = body.index(";", at)
                self._add(renamed(" ".join(body[at:end].split())))
                at = end + 1

    @staticmethod
    def _scope_end(text: str) -> int:
        depth = 1
        for at, letter in enumerate(text):
            depth += (letter == "{") - (letter == "}")
            if not depth:
                return at
        raise ValueError("a brace that is not closed")

    def _add(self, text: str) -> None:
        if text.startswith((".reg", ".pragma")):
            return
        guard = re.match(r"@(!?)(\S+)\s+", text)
        rest = text[guard.end() :] if guard else text
        name, _, operands = rest.partition(" ")
        negated = (guard[2], guard[1] == "!") if guard else None
        self.code.append(Instruction(name, _operands(operands), negated, text))


@dataclass
class Product:
    """A wgmma that has begun: registers of the sums and of the left operand, the right one's descriptor, and whether it adds."""

    sums: list[str]
    left: list[str]
    descriptor: int
    columns: int
    kinds: tuple[str, str]
    adds: bool


@dataclass(eq=False)
class Cta:
    """A CTA while it runs, in a cluster of its own unless `run_together` says otherwise."""

    program: Program
    arguments: dict[str, Any]
    threads: int
    place: dict[str, int]
    memory: Memory
    chance: random.Random
    shared: Memory = field(default_factory=lambda: Memory(SHARED_BYTES, SHARED_BASE))
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    barriers: dict[int, set[Any]] = field(default_factory=dict)
    copies: list[Callable[[], None]] = field(default_factory=list)  # on their way

    peers: list[Cta] = field(default_factory=list)  # the cluster's, this one among them
    arrived: set[Any] = field(default_factory=set)  # warps at the cluster's barrier, which is used once; the first CTA's counts

    def __post_init__(self) -> None:
        self.peers = self.peers or [self]

    def take(self, address: int, value: Lanes, barrier: int) -> None:
        """A number of 32 bits arrives from another CTA."""
        self.shared.store(np.array([address], np.uint64), value, 4)
        self.mbarriers[barrier].arrive(0, arrived=4)

    def meet(self, warp: Warp, waits: bool) -> None:
        """The cluster's barrier."""
        arrived, everyone = self.peers[0].arrived, len(self.peers) * self.threads // LANES
        if waits:
            warp.waits_at = None if len(arrived) == everyone else _CLUSTER
            return
        assert warp not in arrived, "a warp arrives twice"
        arrived.add(warp)
        for other in arrived if len(arrived) == everyone else ():
            if other.waits_at == _CLUSTER:
                other.waits_at = None

    def synchronise(self, warp: Warp, barrier: int, threads: int, waits: bool) -> None:
        waiting = self.barriers.setdefault(barrier, set())
        assert warp not in waiting, "a warp arrives twice"
        waiting.add(warp)
        if waits:
            warp.waits_at = barrier
        if LANES * len(waiting) == threads:
            for other in waiting:
                if other.waits_at == barrier:
                    other.waits_at = None
            waiting.clear()


def run_together(ctas: list[Cta], chance: random.Random) -> None:
    """Runs the CTAs of a cluster."""
    for cta in ctas:
        cta.peers = ctas
    running = [Warp(cta, index) for cta in ctas for index in range(cta.threads // LANES)]
    quiet = 0
    while running:
        warp = chance.choice(running)
        copies = warp.cta.copies
        if copies and (quiet > _PATIENCE // 10 or chance.random() < 0.3):
            copies.pop(chance.randrange(len(copies)))()
            quiet = 0
        quiet = 0 if warp.waits_at is None and warp.run(chance.randrange(1, 300)) else quiet + 1
        if warp.done.all():
            running.remove(warp)
        assert quiet < _PATIENCE * len(ctas), f"nobody goes on: {[w.where() for w in running]}"
    assert not any(cta.copies for cta in ctas), "copies that nobody waited for"


class Warp:
    """A warp. Of lanes that have diverged, those that are behind go on."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.registers: dict[str, Lanes] = {}
        self.at = np.zeros(LANES, np.int64)
        self.done = np.zeros(LANES, bool)
        self.waits_at: int | None = None
        self.clock = 0
        self.products: list[Product] = []
        self.groups: list[list[Product]] = []
        self.copies: list[list[Callable[[], None]]] = [[] for _ in range(LANES)]

    def where(self) -> tuple[int, Any, str]:
        return self.index, self.waits_at, self.cta.program.code[int(self.at[~self.done].min())].text

    def run(self, most: int) -> bool:
        """Some instructions, until it has to wait. Returns whether there was any."""
        program, went_on = self.cta.program, False
        for _ in range(most):
            if self.done.all() or self.waits_at is not None:
                return True
            here = int(self.at[~self.done].min())
            lanes = ~self.done & (self.at == here)
            step = program.code[here]
            active = lanes
            if step.guard is not None:
                holds = cut(self.value(step.guard[0]), "pred") != 0
                active = lanes & (holds != step.guard[1])
            self.at = np.where(lanes, here + 1, self.at)
            if not active.any():
                continue
            if step.name.startswith("bra"):
                self.at = np.where(active, program.labels[step.operands[0]], self.at)
            elif step.name in ("ret", "exit"):
                self.done |= active
            else:
                with np.errstate(all="ignore"):
                    if not self.execute(step, active):
                        return went_on
            went_on = True
        return went_on

    # -- registers -----------------------------------------------------------------------------------------------------------

    def value(self, operand: str) -> Lanes:
        if operand in self.registers:
            return self.registers[operand]
        if operand == "%laneid" or operand == "%tid.x":
            return np.arange(LANES, dtype=np.uint64) + np.uint64(LANES * self.index * (operand == "%tid.x"))
        if operand.startswith("%clock"):
            self.clock += 100
            number_of = self.clock
        elif operand == "__dynamic_shmem__0":
            number_of = SHARED_BASE | self.cta.peers.index(self.cta) << _RANK_BIT
        elif operand in self.cta.place:
            number_of = self.cta.place[operand]
        elif operand.startswith("0f"):
            number_of = int(operand[2:], 16)
        else:
            number_of = int(operand, 0)
        return np.full(LANES, number_of & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def assign(self, name: str, value: Lanes, kind: str, lanes: Lanes) -> None:
        before = self.registers.get(name, np.zeros(LANES, np.uint64))
        self.registers[name] = np.where(lanes, cut(register(value), kind), before)

    def address(self, operand: str, space: str = "shared") -> Lanes:
        base, _, offset = operand.strip("[]").partition("+")
        address = self.value(base.strip()) + np.uint64(int(offset or 0) & 0xFFFFFFFFFFFFFFFF)
        return address if space == "global" else cut(address, "b32") & np.uint64((1 << _RANK_BIT) - 1)

    # -- instructions ----------------------------------------------------------------------------------------------------------

    def execute(self, step: Instruction, lanes: Lanes) -> bool:
        """One instruction. Returns False where the warp has to wait, with the instruction done all the same."""
        words = step.name.split(".")
        if words[0] in ("griddepcontrol", "setmaxnreg", "fence", "createpolicy", "prefetch"):
            return True
        if "sync" in words and words[0] not in ("griddepcontrol",):
            assert lanes.all(), f"not all lanes are at {step.text}"
        for prefix, method in (
            ("cp.async.bulk", self._bulk_copy),
            ("cp.async.mbarrier", self._copies_arrive), ("cp.async", self._copy), ("mbarrier", self._mbarrier),
            ("barrier.cluster", self._cluster), ("st.async", self._send), ("mapa", self._map),
            ("wgmma", self._wgmma), ("mma", self._mma), ("stmatrix", self._stmatrix), ("ldmatrix", self._ldmatrix),
            ("ld", self._load), ("st", self._store),
            ("bar.", self._barrier), ("mov", self._move), ("cvt", self._convert), ("setp", self._compare),
            ("shfl", self._shuffle), ("match", self._match), ("elect", self._elect), ("vote", self._vote),
        ):  # fmt: skip
            if step.name.startswith(prefix):
                return method(step, words, lanes) is not False
        target, kind = step.operands[0], words[-1]
        if kind in ("bf16x2", "f16x2"):
            result, kind = self._halves(step, kind), "b32"
        elif words[0] in ("lop3", "selp", "popc", "prmt"):
            result = self._special(step, words[0])
        else:
            given = [self.value(operand) for operand in step.operands[1:]]
            result, kind = self._arithmetic(step, words, given, lanes)
        self.assign(target, result, kind, lanes)
        return True

    def _arithmetic(self, step: Instruction, words: list[str], given: list[Lanes], lanes: Lanes) -> tuple[Lanes, str]:
        name, kind = words[0], words[-1]
        if name == "mad":
            return given[0] * given[1] + given[2], kind
        if name in ("shl", "shr"):
            by = np.minimum(cut(given[1], "b32"), np.uint64(63))
            x = number(given[0], kind if name == "shr" else "b64")
            moved = x << by if name == "shl" else x >> by.astype(x.dtype)
            return np.where(by < width(kind), moved, np.where(x < 0, -1, 0).astype(x.dtype)), kind
        a, *rest = (number(x, kind) if kind != "pred" else x for x in given)
        b = rest[0] if rest else a
        if name == "mul" and words[1] in ("wide", "hi"):
            product = a.astype(np.int64) * b.astype(np.int64)
            return (product, f"b{2 * width(kind)}") if words[1] == "wide" else (product >> width(kind), kind)
        if name == "fma":
            return (a.astype(np.float64) * b + rest[1]).astype(np.float32), kind
        if name == "div" and kind == "f32":
            return np.where(lanes, a, 1).astype(np.float32) / np.where(lanes, b, 1).astype(np.float32), kind
        if name == "div":
            b = np.where(lanes, b, 1)
            return np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b), kind
        simple: dict[str, Callable[[], Lanes]] = {
            "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "and": lambda: a & b, "or": lambda: a | b,
            "xor": lambda: a ^ b, "not": lambda: ~a, "neg": lambda: -a, "min": lambda: np.minimum(a, b),
            "max": lambda: np.maximum(a, b), "ex2": lambda: np.exp2(a), "rcp": lambda: np.float32(1) / a,
            "rsqrt": lambda: np.float32(1) / np.sqrt(a),
        }  # fmt: skip
        if name not in simple:
            raise NotImplementedError(step.text)
        return simple[name](), kind

    def _special(self, step: Instruction, name: str) -> Lanes:
        a, *rest = (self.value(operand) for operand in step.operands[1:])
        if name == "popc":
            return np.array([int(x).bit_count() for x in cut(a, "b32")], np.uint64)
        if name == "selp":
            return np.where(cut(rest[1], "pred") != 0, a, rest[0])
        if name == "prmt":
            both = cut(a, "b32") | cut(rest[0], "b32") << np.uint64(32)
            return sum(
                (both >> np.uint64(8 * (int(step.operands[3], 0) >> 4 * at & 7)) & 0xFF) << np.uint64(8 * at) for at in range(4)
            )
        table, result = int(step.operands[4], 0), np.zeros(LANES, np.uint64)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (rest[0] if row & 2 else ~rest[0]) & (rest[1] if row & 1 else ~rest[1])
        return result

    def _halves(self, step: Instruction, kind: str) -> Lanes:
        if "e4m3x2" in step.name:
            codes = cut(self.value(step.operands[1]), "b16").astype(np.uint16)
            pairs = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn).float().view(-1, 2).numpy()
            return joined(*(narrowed(pairs[:, half], kind) for half in range(2)))
        if step.name.startswith("cvt"):
            high, low = (number(self.value(operand), "f32") for operand in step.operands[1:])
            return joined(narrowed(low, kind), narrowed(high, kind))
        given = [[widen(half, kind).astype(np.float64) for half in halves(self.value(o))] for o in step.operands[1:]]
        results = []
        for half in range(2):
            product = given[0][half] * given[1][half]
            sum_of = product + given[2][half] if len(given) > 2 else product
            results.append(narrowed(sum_of.astype(np.float32), kind))
        return joined(*results)

    def _compare(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        a, b = (number(self.value(operand), words[-1]) for operand in step.operands[1:3])
        self.assign(step.operands[0], _COMPARE[words[1]](a, b).astype(np.uint64), "pred", lanes)

    def _convert(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        target, *given = step.operands
        if words[-2] == "e4m3x2":  # the first operand becomes the upper byte
            high, low = (rounded_to_e4m3(number(self.value(operand), "f32")) for operand in given)
            self.assign(target, low | high << np.uint64(8), "b16", lanes)
        elif words[2] in ("bf16x2", "f16x2"):
            self.assign(target, self._halves(step, words[2]), "b32", lanes)
        elif words[2] == "f16":
            self.assign(target, widen(halves(self.value(given[0]))[0], "f16"), "f32", lanes)
        else:  # to the nearest, or towards zero, where a float is made or cut
            to, of = words[-2:]
            found = number(self.value(given[0]), of)
            self.assign(target, register(found.astype(np.float32) if to == "f32" else found.astype(np.int64)), to, lanes)

    def _move(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        target, source = step.operands
        if target[0] == "{":
            targets = names(target)
            size = width(words[-1]) // len(targets)
            for at, part in enumerate(targets):
                self.assign(part, self.value(source) >> np.uint64(at * size), f"b{size}", lanes)
        elif source[0] == "{":
            sources = names(source)
            size = width(words[-1]) // len(sources)
            whole = np.zeros(LANES, np.uint64)
            for at, part in enumerate(sources):
                whole |= cut(self.value(part), f"b{size}") << np.uint64(at * size)
            self.assign(target, whole, words[-1], lanes)
        else:
            self.assign(target, self.value(source), words[-1], lanes)

    # -- between lanes and warps -----------------------------------------------------------------------------------------------

    def _shuffle(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        target, source, by = step.operands[0], self.value(step.operands[1]), self.value(step.operands[2]).astype(np.int64)
        lane = np.arange(LANES)
        places = {"idx": by % LANES, "up": np.where(lane >= by, lane - by, lane), "bfly": lane ^ by}
        self.assign(target, source[places[words[2]]], "b32", lanes)

    def _match(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        source = self.value(step.operands[1])
        masks = [sum(1 << lane for lane in range(LANES) if source[lane] == mine) for mine in source]
        self.assign(step.operands[0], np.array(masks, np.uint64), "b32", lanes)

    def _vote(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        mask = sum(1 << lane for lane, held in enumerate(cut(self.value(step.operands[1]), "pred")) if held)
        self.assign(step.operands[0], np.full(LANES, mask, np.uint64), "b32", lanes)

    def _elect(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        target, predicate = step.operands[0].split("|")
        self.assign(target, np.zeros(LANES, np.uint64), "b32", lanes)
        self.assign(predicate, (np.arange(LANES) == 0).astype(np.uint64), "pred", lanes)

    def _barrier(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        if words[1] == "warp":
            return
        threads = int(self.value(step.operands[1])[0]) if len(step.operands) > 1 else self.cta.threads
        self.cta.synchronise(self, int(self.value(step.operands[0])[0]), threads, words[1] != "arrive")

    def _cluster(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        self.cta.meet(self, words[2] == "wait")

    def _map(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        rank = cut(self.value(step.operands[2]), "b32")
        self.assign(step.operands[0], self.address(step.operands[1]) | rank << np.uint64(_RANK_BIT), "b32", lanes)

    def _send(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        to, values, barriers = (self.value(operand.strip("[]")) for operand in step.operands)
        for lane in np.nonzero(lanes)[0]:
            (rank, at), (same, barrier) = (divmod(int(x[lane]), 1 << _RANK_BIT) for x in (to, barriers))
            assert rank == same, "a number and its barrier are in different CTAs"
            peer = self.cta.peers[rank]
            peer.copies.append(partial(peer.take, at, values[lane : lane + 1], barrier))

    def _mbarrier(self, step: Instruction, words: list[str], lanes: Lanes) -> bool:
        barriers = self.cta.mbarriers
        if words[1] in ("try_wait", "test_wait"):
            addresses, phases = self.address(step.operands[1]), cut(self.value(step.operands[2]), "pred")
            ended = [not on or barriers[int(at)].phase != int(p) for at, p, on in zip(addresses, phases, lanes, strict=True)]
            self.assign(step.operands[0], np.array(ended, np.uint64), "pred", lanes)
            return all(ended)
        at_operand = next(at for at, operand in enumerate(step.operands) if operand[0] == "[")
        addresses = self.address(step.operands[at_operand])
        counts = self.value(step.operands[at_operand + 1]) if len(step.operands) > at_operand + 1 else np.ones(LANES)
        for lane in np.nonzero(lanes)[0]:
            at, count = int(addresses[lane]), int(counts[lane])
            if words[1] == "init":
                barriers[at] = Mbarrier(count, count)
            elif "expect_tx" in words:
                barriers[at].arrive(1, expected=count)
            else:
                barriers[at].arrive(count)
        return True

    # -- memory ----------------------------------------------------------------------------------------------------------------

    def _load(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        if words[1] == "param":
            given = self.cta.arguments[step.operands[1].strip("[]")]
            bits = int(np.float32(given).view(np.uint32)) if isinstance(given, float) else int(given)
            self.assign(step.operands[0], np.full(LANES, bits & 0xFFFFFFFFFFFFFFFF, np.uint64), words[-1], lanes)
            return
        memory, addresses, targets, size = self._access(step.operands[1], step.operands[0], words, lanes)
        for at, target in enumerate(targets):
            loaded = np.zeros(LANES, np.uint64)
            loaded[lanes] = memory.load(addresses[lanes] + np.uint64(at * size), size)
            self.assign(target, loaded, words[-1], lanes)

    def _store(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        memory, addresses, sources, size = self._access(step.operands[0], step.operands[1], words, lanes)
        for at, source in enumerate(sources):
            memory.store(addresses[lanes] + np.uint64(at * size), self.value(source)[lanes], size)

    def _access(self, where: str, what: str, words: list[str], lanes: Lanes) -> tuple[Memory, Lanes, list[str], int]:
        space = "global" if "global" in words else "shared"
        vector, size = names(what), width(words[-1]) // 8
        addresses = self.address(where, space)
        assert (addresses[lanes] % np.uint64(size * len(vector)) == 0).all(), "a vector that is not aligned"
        return self.cta.memory if space == "global" else self.cta.shared, addresses, vector, size

    def _bulk_copy(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        if "prefetch" in words:
            sources, counts = self.address(step.operands[0], "global"), cut(self.value(step.operands[1]), "b32")
            for lane in np.nonzero(lanes)[0]:
                self._place_of_bulk(int(sources[lane]), int(counts[lane]))
            return
        to, barriers = self.address(step.operands[0]), self.address(step.operands[3])
        sources, counts = self.address(step.operands[1], "global"), cut(self.value(step.operands[2]), "b32")
        for lane in np.nonzero(lanes)[0]:
            numbers = (int(x[lane]) for x in (to, sources, counts, barriers))
            mask = int(self.value(step.operands[4])[lane]) if "multicast::cluster" in words else 1 << self.cta.peers.index(self.cta)
            arguments = tuple(numbers)
            for rank, peer in enumerate(self.cta.peers):
                if mask >> rank & 1:
                    peer.copies.append(partial(self._deliver_bulk, peer, *arguments))

    def _place_of_bulk(self, source: int, count: int) -> slice:
        assert count > 0 == source % 16 == count % 16, "a bulk copy that is not of 16 bytes each"
        return self.cta.memory.place(source, count)

    def _deliver_bulk(self, cta: Cta, to: int, source: int, count: int, barrier: int) -> None:
        assert to % 16 == 0, "a bulk copy that is not of 16 bytes each"
        cta.shared.data[cta.shared.place(to, count)] = self.cta.memory.data[self._place_of_bulk(source, count)]
        cta.mbarriers[barrier].arrive(0, arrived=count)

    def _copy(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        to, sources, counts = self.address(step.operands[0]), self.address(step.operands[1], "global"), self.value(step.operands[3])
        for lane in np.nonzero(lanes)[0]:
            numbers = (int(x[lane]) for x in (to, sources, counts))
            self.copies[lane].append(partial(self._deliver_copy, *numbers))

    def _deliver_copy(self, to: int, source: int, count: int) -> None:
        assert to % 16 == source % 16 == 0, "a copy that is not aligned"
        shared, memory = self.cta.shared, self.cta.memory
        piece = np.zeros(16, np.uint8)
        if count:
            piece[:count] = memory.data[memory.place(source, count)]
        shared.data[shared.place(to, 16)] = piece

    def _copies_arrive(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        barriers = self.address(step.operands[0])
        for lane in np.nonzero(lanes)[0]:
            self.cta.copies.append(partial(self._deliver_copies, self.copies[lane], int(barriers[lane])))
            self.copies[lane] = []

    def _deliver_copies(self, copies: list[Callable[[], None]], barrier: int) -> None:
        for copy in copies:
            copy()
        self.cta.mbarriers[barrier].arrive()

    # -- matrices --------------------------------------------------------------------------------------------------------------

    def _stmatrix(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        assert "trans" in words
        addresses, shared, lane = self.address(step.operands[0]), self.cta.shared, np.arange(LANES)
        for index, name in enumerate(names(step.operands[1])):
            matrix = np.zeros((8, 8), np.uint16)
            matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1] = halves(self.value(name))
            for row in range(8):
                place = shared.place(int(addresses[8 * index + row]), 16)
                shared.data[place] = matrix[:, row].copy().view(np.uint8)

    def _ldmatrix(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        assert words[4:] == ["x4", "shared", "b16"], step.text
        addresses, shared, lane = self.address(step.operands[1]), self.cta.shared, np.arange(LANES)
        for index, name in enumerate(names(step.operands[0])):
            places = (shared.place(int(addresses[8 * index + row]), 16) for row in range(8))
            matrix = np.stack([shared.data[place].copy().view(np.uint32) for place in places])
            self.assign(name, matrix[lane // 4, lane % 4].astype(np.uint64), "b32", lanes)

    def _mma(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        """A product of a warp, of 16 x 16 and 16 x 8 numbers."""
        kind, lane = words[-2], np.arange(LANES)
        assert words[3:] == ["m16n8k16", "row", "col", "f32", kind, kind, "f32"], step.text
        to, a, b, c = (names(operand) for operand in step.operands)
        left, right = np.zeros((16, 16), np.float64), np.zeros((16, 8), np.float64)
        for at, name in enumerate(a):
            for element, half in enumerate(halves(self.value(name))):
                left[lane // 4 + 8 * (at % 2), 2 * (lane % 4) + element + 8 * (at // 2)] = widen(half, kind)
        for at, name in enumerate(b):
            for element, half in enumerate(halves(self.value(name))):
                right[2 * (lane % 4) + element + 8 * at, lane // 4] = widen(half, kind)
        result = left @ right
        before = [number(self.value(name), "f32") for name in c]
        for at, name in enumerate(to):
            some = result[lane // 4 + 8 * (at // 2), 2 * (lane % 4) + at % 2]
            self.assign(name, register((before[at] + some).astype(np.float32)), "f32", lanes)

    def _wgmma(self, step: Instruction, words: list[str], lanes: Lanes) -> None:
        if words[1] == "mma_async":
            shape = re.search(r"m64n(\d+)k(16|32)\.f32\.(\w+)\.(\w+)", step.name)
            assert shape is not None, step.text
            assert step.operands[4:] == (("1", "1", "0") if shape[2] == "16" else ("1", "1")), step.text
            descriptor = self.value(step.operands[2])
            assert (descriptor == descriptor[0]).all()
            adds = cut(self.value(step.operands[3]), "pred") != 0
            assert (adds == adds[0]).all()
            sums, left = (names(step.operands[at]) for at in range(2))
            self.products.append(Product(sums, left, int(descriptor[0]), int(shape[1]), (shape[3], shape[4]), bool(adds[0])))
        elif words[1] == "commit_group":
            self.groups.append(self.products)
            self.products = []
        elif words[1] == "wait_group":
            while len(self.groups) > int(step.operands[0]):
                for product in self.groups.pop(0):
                    self._multiply(product)

    def _multiply(self, product: Product) -> None:
        """As late as it may be: with what its operands have when somebody waits for it."""
        descriptor, lane = product.descriptor, np.arange(LANES)
        assert (descriptor >> 62, descriptor >> 49 & 7) == (1, 0), "another swizzle than that of 128 bytes"
        size = 1 if product.kinds[0].startswith("e") else 2  # bytes
        left = np.zeros((16, 32 // size), np.float32)
        for at, name in enumerate(product.left):
            for element, part in enumerate(parts(self.registers[name], size)):
                k = 4 // size * (lane % 4) + element + 16 // size * (at // 2)
                left[lane // 4 + 8 * (at % 2), k] = widen(part, product.kinds[0])
        column, k = np.meshgrid(np.arange(product.columns), np.arange(32 // size), indexing="ij")
        start, step = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        linear = start + column // 8 * step + column % 8 * 128 + size * k
        swizzled = linear ^ ((linear >> 7 & 7) << 4)
        right = widen(self.cta.shared.load(swizzled.astype(np.uint64), size).astype(np.uint16), product.kinds[1])
        result = (left.astype(np.float64) @ right.T.astype(np.float64)).astype(np.float32)
        for at, name in enumerate(product.sums):
            group, r, c = at // 4, at // 2 % 2, at % 2
            some = result[lane // 4 + 8 * r, 8 * group + 2 * (lane % 4) + c]
            self.registers[name] = register(number(self.registers[name], "f32") + some if product.adds else some)


def launch(
    text: str,
    arguments: Sequence[Any],
    threads: int,
    grid: tuple[int, ...],
    memory: Memory,
    chance: random.Random,
    cluster: int = 1,
) -> None:
    """Runs a kernel, one cluster after another.

    Args:
        text: PTX.
        arguments: of the kernel, one for each of its parameters: integers, and floats for float32.
        threads, grid: of a CTA; CTAs.
        memory: global.
        chance: decides which warp goes on, and when copies arrive.
        cluster: CTAs of a cluster, neighbours along x.
    """
    program = Program(text)
    assert len(arguments) == len(program.parameters), program.parameters
    given = {name: value for (_, name), value in zip(program.parameters, arguments, strict=True)}
    sizes = {f"%nctaid.{axis}": size for axis, size in zip("xyz", (*grid, 1, 1), strict=False)}
    ctas = []
    for index in np.ndindex(*reversed(grid)):
        place = {f"%ctaid.{axis}": at for axis, at in zip("xyz", (*reversed(index), 0, 0), strict=False)}
        ctas.append(Cta(program, given, threads, {**sizes, **place}, memory, chance))
        if len(ctas) == cluster:
            run_together(ctas, chance)
            ctas = []
