"""`ptx` for kernels whose CTAs wait for each other: all of them run together, with flags and counters in global memory.

It adds atomic instructions, reductions over a warp, and products whose right operand lies without a swizzle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import ptx
from .ptx_values import Lanes, Memory, cut, halves, joined, number, parts, register, widen

_TURNS_A_WARP = 60000


class Warp(ptx.Warp):
    """A warp that knows some more instructions."""

    def execute(self, step: ptx.Instruction, lanes: Lanes) -> bool:
        words = step.name.split(".")
        if words[0] in ("atom", "red"):
            self._add_to_global(step, lanes)
        elif words[0] == "redux":
            assert lanes.all(), f"not all lanes are at {step.text}"
            given = number(self.value(step.operands[1]), "s32")
            found = given.sum() if words[2] == "add" else given.max()
            self.assign(step.operands[0], np.full(ptx.LANES, int(found) & 0xFFFFFFFF, np.uint64), "b32", lanes)
        elif words[0] == "bfe":
            x, first, count = (cut(self.value(operand), "b32") for operand in step.operands[1:])
            self.assign(step.operands[0], x >> first & (np.uint64(1) << count) - np.uint64(1), "b32", lanes)
        elif words[0] == "rem":
            a, b = (number(self.value(operand), "s32") for operand in step.operands[1:])
            self.assign(step.operands[0], register(np.fmod(a, np.where(lanes, b, 1))), "b32", lanes)
        elif words[-1] == "u16x2":
            a, b = (halves(self.value(operand)) for operand in step.operands[1:])
            self.assign(step.operands[0], joined(*(np.maximum(x, y) for x, y in zip(a, b, strict=True))), "b32", lanes)
        else:
            return super().execute(step, lanes)
        return True

    def _add_to_global(self, step: ptx.Instruction, lanes: Lanes) -> None:
        """Adds, one lane after another."""
        *to, address, value = step.operands
        addresses, values = self.address(address, "global"), number(self.value(value), "s32")
        before = np.zeros(ptx.LANES, np.uint64)
        for lane in np.nonzero(lanes)[0]:
            place = addresses[lane : lane + 1]
            before[lane] = self.cta.memory.load(place, 4)[0]
            self.cta.memory.store(place, cut(register(before[lane : lane + 1].astype(np.int64) + values[lane]), "b32"), 4)
        if to:
            self.assign(to[0], before, "b32", lanes)

    def _multiply(self, product: ptx.Product) -> None:
        if product.descriptor >> 62:
            super()._multiply(product)
            return
        descriptor, lane = product.descriptor, np.arange(ptx.LANES)
        left = np.zeros((16, 32), np.float32)
        for at, name in enumerate(product.left):
            for element, part in enumerate(parts(self.registers[name], 1)):
                left[lane // 4 + 8 * (at % 2), 4 * (lane % 4) + element + 16 * (at // 2)] = widen(part, product.kinds[0])
        start, along_k, along_columns = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        column, k = np.meshgrid(np.arange(product.columns), np.arange(32), indexing="ij")
        places = start + k // 16 * along_k + column // 8 * along_columns + column % 8 * 16 + k % 16
        right = widen(self.cta.shared.load(places.astype(np.uint64), 1).astype(np.uint16), product.kinds[1])
        result = (left.astype(np.float64) @ right.T.astype(np.float64)).astype(np.float32)
        for at, name in enumerate(product.sums):
            some = result[lane // 4 + 8 * (at // 2 % 2), at // 4 * 8 + 2 * (lane % 4) + at % 2]
            self.registers[name] = register(number(self.registers[name], "f32") + some if product.adds else some)


def launch(
    text: str, arguments: Sequence[Any], threads: int, ctas: int, memory: Memory, chance: random.Random, resident: int = 0
) -> None:
    """Runs a kernel, all CTAs together.

    Args:
        text: PTX.
        arguments: of the kernel: integers, and floats for float32.
        threads: the threads of a CTA.
        ctas: the number of CTAs.
        memory: global memory.
        chance: decides which warp goes on, and when copies arrive.
        resident: how many CTAs there is room for at once; all if it is 0.
    """
    program = ptx.Program(text)
    assert len(arguments) == len(program.parameters), program.parameters
    given = {name: value for (_, name), value in zip(program.parameters, arguments, strict=True)}
    sizes = {"%nctaid.x": ctas, "%nctaid.y": 1, "%nctaid.z": 1}
    waiting = [
        ptx.Cta(program, given, threads, {**sizes, "%ctaid.x": at, "%ctaid.y": 0, "%ctaid.z": 0}, memory, chance)
        for at in range(ctas)
    ]
    running: list[Warp] = []
    ended: list[ptx.Cta] = []
    turns = 0
    while running or waiting:
        present = {id(warp.cta) for warp in running}
        while waiting and (not resident or len(present) < resident):
            cta = waiting.pop(0)
            present.add(id(cta))
            running += [Warp(cta, index) for index in range(threads // ptx.LANES)]
            ended.append(cta)
        warp = chance.choice(running)
        copies = warp.cta.copies
        if copies and chance.random() < 0.3:
            copies.pop(chance.randrange(len(copies)))()
        if warp.waits_at is None:
            warp.run(chance.randrange(1, 300))
        if warp.done.all():
            running.remove(warp)
        turns += 1
        assert turns < _TURNS_A_WARP * len(running) + _TURNS_A_WARP, (
            f"no end: {[(w.cta.place['%ctaid.x'], *w.where()) for w in running]}"
        )
    assert not any(cta.copies for cta in ended), "copies that nobody waited for"
