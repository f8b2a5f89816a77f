"""Parses PTX: kernels, their parameters, registers, labels and instructions, with the scopes of inline assembly resolved."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_STATEMENT = re.compile(r"\s*(?:(\{)|(\})|([$\w]+)\s*:(?!:)|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
_GUARD = re.compile(r"@\s*(!?)\s*(\S+)\s+")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak|static)\s+)?\.(shared|local|const|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)((?:\[\d*\])*)"
)
_ENTRY = re.compile(r"\.entry\s+([$\w]+)\s*\((.*?)\)\s*(.*?)\{", re.DOTALL)
_DIRECTIVE = re.compile(r"\.(maxnreg|reqntid|maxntid|minnctapersm)\s+(\d+(?:\s*,\s*\d+)*)")
_REGISTERS_OF_ALL = 65536  # number of 32-bit registers of an SM
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[^,]*?)?\s+([$\w]+)(?:\[(\d+)\])?(?=\s*(?:,|$))")


def bits_of(kind: str) -> int:
    """Returns the width of a PTX type in bits: 32 for ``f32``, 1 for ``pred``."""
    if kind == "pred":
        return 1
    if kind.endswith("x2"):
        return {"f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "e4m3x2": 16, "e5m2x2": 16}[kind]
    return int(re.sub(r"\D", "", kind.replace("bf", "f").replace("tf", "f")))


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter, and the range of its bytes in the parameter buffer."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Register:
    """A register: its name, which is unique across scopes, and its declared type."""

    name: str
    kind: str


@dataclass(frozen=True)
class Statement:
    """An instruction of a kernel.

    Attributes:
        name: the mnemonic with its modifiers: ``add.s32``.
        operands: the operands as written.
        guard: the guard predicate, and whether it is negated.
        scope: the scope in which its names are looked up.
        text: the instruction as written.
        source: ``(file, line)`` of the kernel's source, or None.
    """

    name: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    scope: Scope
    text: str
    source: tuple[str, int] | None = None

    @property
    def where(self) -> str:
        """Returns a suffix for errors: ``: add.u32 %r1, %r2, %r3``."""
        return f": {self.text}"


@dataclass(eq=False)
class Scope:
    """The names that are declared in a pair of braces."""

    outer: Scope | None
    number: int
    kinds: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def register(self, name: str) -> Register | None:
        """Returns the register that a name refers to in this scope; None if there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.kinds:
                return Register(f"{name}#{scope.number}" if scope.number else name, scope.kinds[name])
            found = re.fullmatch(r"(.*?)(\d+)", name)
            if found and found[1] in scope.ranges and int(found[2]) < scope.ranges[found[1]][1]:
                return Register(f"{name}#{scope.number}" if scope.number else name, scope.ranges[found[1]][0])
            scope = scope.outer
        return None

    def label(self, name: str) -> int | None:
        """Returns the index of the statement that a label refers to in this scope; None if there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.outer
        return None


@dataclass
class Kernel:
    """A kernel: an entry point of a PTX module.

    Attributes:
        name: the entry's name.
        parameters: the kernel's parameters in order.
        parameter_bytes: size of all parameters together.
        shared: offsets of variables in shared memory; dynamic shared memory begins at ``static_bytes``.
        static_bytes: size of static shared memory, in bytes.
        local: offsets of variables in local memory.
        local_bytes: size of local memory per thread, in bytes.
        statements: all instructions.
        registers: number of registers per thread at kernel start, computed from the kernel's directives on threads and CTAs per SM;
            0 without such directives.
    """

    name: str
    parameters: dict[str, Parameter]
    parameter_bytes: int
    shared: dict[str, int]
    static_bytes: int
    local: dict[str, int]
    local_bytes: int
    statements: list[Statement]
    registers: int = 0


def split_operands(text: str) -> tuple[str, ...]:
    """Splits a list of operands at the commas outside of braces, brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


def parse(text: str) -> dict[str, Kernel]:
    """Parses a PTX module, and returns its kernels by name."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)
    text = re.sub(r"^\s*\.(?:loc|file)\b[^\n]*$", "", text, flags=re.MULTILINE)
    first = _ENTRY.search(text)
    header = text[: first.start()] if first else text
    variables = [found for found in _VARIABLE.finditer(header) if found[1] == "shared"]
    kernels = {}
    for entry in _ENTRY.finditer(text):
        kernel = _kernel(text, entry, variables)
        kernels[kernel.name] = kernel
    return kernels


def _kernel(text: str, entry: re.Match[str], variables: list[re.Match[str]]) -> Kernel:
    parameters, offset = {}, 0
    for found in _PARAMETER.finditer(entry[2]):
        element = bits_of(found[2]) // 8
        size = element * int(found[4] or 1)
        align = int(found[1] or element)
        offset = -(-offset // align) * align
        parameters[found[3]] = Parameter(found[3], offset, size)
        offset += size
    kernel = Kernel(entry[1], parameters, offset, {}, 0, {}, 0, [], _registers(entry[3]))
    dynamic: list[tuple[str, int]] = []
    for found in variables:
        _declare(kernel, found, dynamic)
    _body(kernel, text, entry.end(), dynamic)
    for name, align in dynamic:
        kernel.static_bytes = -(-kernel.static_bytes // align) * align
        kernel.shared[name] = kernel.static_bytes
    return kernel


def _registers(directives: str) -> int:
    """Returns the number of registers per thread at kernel start: an SM's registers divided among its threads, rounded to a
    multiple of 8.
    """
    given = {found[1]: math.prod(map(int, found[2].split(","))) for found in _DIRECTIVE.finditer(directives)}
    if "maxnreg" in given:
        return given["maxnreg"]
    threads = given.get("reqntid") or given.get("maxntid", 0)
    return min(_REGISTERS_OF_ALL // (threads * given.get("minnctapersm", 1)) // 8 * 8, 256) if threads else 0


def _declare(kernel: Kernel, found: re.Match[str], dynamic: list[tuple[str, int]]) -> None:
    """Assigns an offset to a variable in shared or local memory."""
    space, align, kind, name, sizes = found.groups()
    element = bits_of(kind) // 8
    lengths = re.findall(r"\[(\d*)\]", sizes)
    alignment = int(align or element)
    if "" in lengths:
        dynamic.append((name, alignment))
        return
    size = element
    for length in lengths:
        size *= int(length)
    if space == "shared":
        kernel.static_bytes = -(-kernel.static_bytes // alignment) * alignment
        kernel.shared[name] = kernel.static_bytes
        kernel.static_bytes += size
    elif space == "local":
        kernel.local_bytes = -(-kernel.local_bytes // alignment) * alignment
        kernel.local[name] = kernel.local_bytes
        kernel.local_bytes += size


def _body(kernel: Kernel, text: str, at: int, dynamic: list[tuple[str, int]]) -> None:
    scope: Scope | None = Scope(None, 0)
    scopes = 0
    while scope is not None:
        found = _STATEMENT.match(text, at)
        if found is None:
            raise ValueError(f"no PTX: {text[at : at + 80]!r}")
        at = found.end()
        opened, closed, label, statement = found.groups()
        if opened:
            scopes += 1
            scope = Scope(scope, scopes)
        elif closed:
            scope = scope.outer
        elif label:
            scope.labels[label] = len(kernel.statements)
        elif statement.strip():
            _statement(kernel, " ".join(statement.split()), scope, dynamic)


def _statement(kernel: Kernel, text: str, scope: Scope, dynamic: list[tuple[str, int]]) -> None:
    if text.startswith(".reg"):
        declared = _REGISTERS.fullmatch(text)
        if declared is None:
            raise ValueError(f"no declaration: {text}")
        for name in declared[2].split(","):
            name = name.strip()
            if counted := re.fullmatch(r"(.*)<(\d+)>", name):
                scope.ranges[counted[1]] = (declared[1], int(counted[2]))
            else:
                scope.kinds[name] = declared[1]
        return
    if text.startswith("."):
        if found := _VARIABLE.match(text):
            _declare(kernel, found, dynamic)
        return
    guard = _GUARD.match(text)
    rest = text[guard.end() :] if guard else text
    name, _, operands = rest.partition(" ")
    held = (guard[2], bool(guard[1])) if guard else None
    kernel.statements.append(Statement(name, split_operands(operands), held, scope, text))
