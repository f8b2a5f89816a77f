"""Compares the selector with another implementation of the same rules, over random registries and requests.

The oracle is written from the documented rules (traits.py, selection.py, ARCHITECTURE.md). The oracle sees kernels and requests as
plain descriptions, and calls nothing of the package. Constraints are plain descriptions too. `build` converts a constraint into the
form that kernel authors write.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base import measured, selection
from tokenspeed_kernel_base.measured import Found, Tuned
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement, PlatformInfo
from tokenspeed_kernel_base.registry import KernelRegistry, PriorityClashWarning
from tokenspeed_kernel_base.selection import (
    NoKernelFoundError,
    Override,
    SelectionObjective,
    consider,
    make_request,
    select,
)
from tokenspeed_kernel_base.signature import FormatSignature, ScaleFormat, TensorFormat
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.traits import at_least, at_most, between, multiple_of, one_of

# -- constraints: ("value", v), ("set", (v, ...)), ("any",), ("least", n), ("most", n), ("between", a, b), ("multiple", n),
#    ("and", left, right)


def build(rule: tuple[Any, ...], as_list: bool = False) -> Any:
    kind, *rest = rule
    if kind == "value":
        return rest[0]
    if kind == "set":
        return list(rest[0]) if as_list else one_of(*rest[0])
    if kind == "any":
        return any
    if kind == "and":
        left, right = build(rest[0]), build(rest[1])
        return left & right if hasattr(left, "accepts") else right & left
    return {"least": at_least, "most": at_most, "between": between, "multiple": multiple_of}[kind](*rest)


def holds(rule: tuple[Any, ...], value: Any) -> bool:
    kind, *rest = rule
    if kind == "any":
        return True
    if kind == "and":
        return holds(rest[0], value) and holds(rest[1], value)
    if kind in ("value", "set"):
        members = rest if kind == "value" else rest[0]
        return any(isinstance(m, bool) == isinstance(value, bool) and m == value for m in members)  # True is not the number 1
    if type(value) not in (int, float):
        return False
    if kind == "least":
        return value >= rest[0]
    if kind == "most":
        return value <= rest[0]
    if kind == "between":
        return rest[0] <= value <= rest[1]
    return math.fmod(value, rest[0]) == 0


@functools.cache
def _can_hold(rule: tuple[Any, ...]) -> bool:
    """Returns whether any value satisfies the rule. If none does, registration rejects the kernel."""
    return any(holds(rule, value) for value in (True, False, None, "nhd", 0.5, 0.75, 1.5, *range(600)))


FLAGS = ("sinks", "sliding_window", "return_lse")
VALUES: dict[str, tuple[Any, ...]] = {
    "head_dim": (0, 1, 16, 48, 64, 96, 128, 256, 1.5),
    "page_size": (1, 16, 64, 128),
    "layout": ("nhd", "hnd", None),
    "scale": (0.5, 1.0, 2),
}
NUMBERS = (0, 1, 2, 16, 48, 64, 96, 128, 256, 0.75)


simple_numeric = st.one_of(
    st.tuples(st.just("least"), st.sampled_from(NUMBERS)),
    st.tuples(st.just("most"), st.sampled_from(NUMBERS)),
    st.sampled_from([("between", a, b) for a in NUMBERS for b in NUMBERS if a <= b]),
    st.sampled_from([("multiple", n) for n in (1, 2, 16, 24, 32)]),
    st.just(("set", (64, 128))),
    st.just(("set", (16, 48, 96))),
)
flag_rules = st.sampled_from([("value", True), ("value", False), ("set", (True, False)), ("set", (True,)), ("any",)])
rules: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    **dict.fromkeys(FLAGS, flag_rules),
    "layout": st.sampled_from([("value", "nhd"), ("value", None), ("set", ("nhd", "hnd", None)), ("any",), ("most", 3)]),
    **dict.fromkeys(
        ("head_dim", "page_size", "scale"),
        st.one_of(
            st.sampled_from([("value", 64), ("value", 16), ("value", 1), ("any",), ("set", (1, 64)), ("set", (64, 128, "auto"))]),
            simple_numeric,
            st.tuples(st.just("and"), simple_numeric, simple_numeric),
            st.tuples(st.just("and"), st.tuples(st.just("and"), simple_numeric, simple_numeric), simple_numeric),
        ),
    ),
}

# -- kernels and requests as plain descriptions

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MX = TensorFormat(torch.uint8, "mxfp4", ScaleFormat(torch.uint8, "block", (1, 32)))
SIGNATURES = tuple(
    {"a": TensorFormat(a), "b": b if isinstance(b, TensorFormat) else TensorFormat(b), **({"c": TensorFormat(c)} if c else {})}
    for a, b, c in [
        (BF16, BF16, None),
        (F16, F16, None),
        (F32, F32, None),
        (BF16, MX, None),
        (F16, MX, None),
        (BF16, BF16, F32),
        (BF16, F16, F32),
    ]
)
FEATURES = ("triton", "tma", "fp8")
SOLUTIONS = ("triton", "cutedsl", "torch")
TAGS = ("fp8_weights", "waits", "determinism")
ARCHES = (None, (0, 0), (8, 0), (9, 0), (9, 5), (10, 0))


def subsets(pool: tuple[str, ...]) -> st.SearchStrategy[frozenset[str]]:
    every = [frozenset(x for i, x in enumerate(pool) if bits >> i & 1) for bits in range(2 ** len(pool))]
    return st.sampled_from(every)


@dataclass
class Device:
    vendor: str
    arch: tuple[int, int]
    features: frozenset[str]

    @property
    def info(self) -> PlatformInfo:
        return PlatformInfo(self.vendor, ArchVersion(*self.arch), f"test {self.vendor}", features=self.features)


@dataclass
class Kernel:
    name: str
    solution: str
    priority: int
    universal: bool = False
    vendors: frozenset[str] | None = None
    arch: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
    needs: frozenset[str] = frozenset()
    formats: frozenset[int] | None = None
    traits: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    tuned: float | None = None
    as_list: bool = False


@dataclass
class Wish:
    device: Device
    formats: int
    traits: dict[str, Any]
    objective: str
    solution: str | None
    override: str | None
    fixed: frozenset[str] = frozenset()


devices = st.builds(
    lambda where, features: Device(*where, features),
    st.sampled_from(
        [
            ("cpu", (0, 0)),
            ("nvidia", (8, 0)),
            ("nvidia", (9, 0)),
            ("nvidia", (10, 0)),
            ("nvidia", (10, 3)),
            ("amd", (9, 4)),
            ("amd", (9, 5)),
        ]
    ),
    subsets(FEATURES),
)


def rarely(strategy: st.SearchStrategy[Any], empty: Any, among: int = 3) -> st.SearchStrategy[Any]:
    """Returns a strategy that draws ``empty`` most of the time, so that many kernels reach the later gates."""
    return st.integers(0, among - 1).flatmap(lambda draw: st.just(empty) if draw else strategy)


has_flags = st.fixed_dictionaries({flag: st.sampled_from([("set", (True, False)), ("any",)]) for flag in FLAGS})
trait_rules = (
    has_flags
    | st.fixed_dictionaries({}, optional={k: rules[k] for k in (*FLAGS, "head_dim")})
    | st.fixed_dictionaries({}, optional=rules)
)
bounds = st.sampled_from([(lo, hi) for lo in ARCHES for hi in ARCHES if lo is None or hi is None or lo <= hi])


@st.composite
def kernels(draw: st.DrawFn, index: int) -> Kernel:
    return Kernel(
        name=f"k{index}",
        solution=draw(st.sampled_from(SOLUTIONS)),
        priority=draw(st.sampled_from((0, 3, 4, 8, 8, 8, 12, 16, 19))),
        universal=index == 0 and draw(st.booleans()),
        vendors=draw(rarely(st.sampled_from([frozenset({"nvidia"}), frozenset({"amd"}), frozenset({"cpu", "nvidia"})]), None, 6)),
        arch=draw(rarely(bounds, (None, None), 6)),
        needs=draw(rarely(subsets(FEATURES), frozenset(), 6)),
        formats=draw(rarely(st.frozensets(st.integers(0, len(SIGNATURES) - 1), min_size=1, max_size=4), None, 3)),
        traits={name: rule for name, rule in draw(trait_rules).items() if _can_hold(rule)},
        tags=draw(subsets(TAGS)),
        tuned=draw(rarely(st.sampled_from([1.0, 2.5, 40.0]), None, 4)),
        as_list=draw(st.booleans()),
    )


@st.composite
def registries(draw: st.DrawFn) -> list[Kernel]:
    return [draw(kernels(i)) for i in range(draw(st.integers(0, 7)))]


trait_wishes = st.fixed_dictionaries(
    {flag: st.sampled_from([False, False, True]) for flag in FLAGS} | {k: st.sampled_from(v) for k, v in VALUES.items()}
) | st.fixed_dictionaries({}, optional={flag: st.booleans() for flag in FLAGS} | {k: st.sampled_from(v) for k, v in VALUES.items()})


wishes = st.builds(
    Wish,
    device=devices,
    formats=st.integers(0, len(SIGNATURES) - 1),
    traits=trait_wishes,
    objective=st.sampled_from(["default", "default", "portability", "determinism", "accuracy", "debug"]),
    solution=rarely(st.sampled_from(SOLUTIONS), None, 10),
    fixed=subsets(("head_dim", "sinks")),
    override=rarely(st.sampled_from([*(f"k{i}" for i in range(7)), "k0", "k1", "elsewhere", "nobody"]), None, 8),
)

# -- the oracle


ARCHITECTURES = {"nvidia": "this is sm_", "amd": "this is gfx", "cpu": "this is a CPU"}


def first_failure(kernel: Kernel, wish: Wish, overridden: bool) -> tuple[str, Any] | None:
    """Returns the first gate that rejects the kernel, and the facts that the gate's reason must state."""
    device = wish.device
    if wish.solution is not None and kernel.solution != wish.solution:
        return "solution", (kernel.solution, wish.solution)
    if kernel.vendors is not None and device.vendor not in kernel.vendors:
        return "platform", [*(vendor.upper() for vendor in kernel.vendors), ARCHITECTURES[device.vendor]]
    low, high = kernel.arch
    if device.vendor == "cpu" and (low is not None or high is not None):
        return "platform", ["architecture", f"{(low or high)[0]}.{(low or high)[1]}", "CPU"]  # type: ignore[index]
    if low is not None and device.arch < low:
        return "platform", [f"{low[0]}.{low[1]} or later", f"{device.arch[0]}.{device.arch[1]}"]
    if high is not None and device.arch > high:
        return "platform", [f"{high[0]}.{high[1]} or earlier", f"{device.arch[0]}.{device.arch[1]}"]
    if kernel.needs - device.features:
        return "platform", ["needs " + ", ".join(sorted(kernel.needs - device.features)) + ","]
    if kernel.formats is not None and wish.formats not in kernel.formats:
        return "formats", None
    offending = set()
    for name, value in wish.traits.items():
        rule = kernel.traits.get(name)
        if rule is None:
            # A kernel that does not declare a flag does not support the flag.
            if value is True and not kernel.universal:
                offending.add(name)
        elif not holds(rule, value):
            offending.add(name)
    for name, rule in kernel.traits.items():
        # A kernel that requires a flag is not eligible for a request that does not state the flag.
        if name not in wish.traits and repr(rule) in ("('value', True)", "('set', (True,))"):  # compared by repr, because True == 1
            offending.add(name)
    if overridden:
        # An override skips the trait gate, except for traits that describe the operands.
        offending &= wish.fixed
    return ("traits", offending) if offending else None


def place(kernel: Kernel, wish: Wish) -> tuple[Any, ...]:
    """Returns the sort key of a kernel, by override, tuned result, objective, priority and name. The best kernel sorts first."""
    if wish.objective == "debug":
        preference = kernel.priority
    elif wish.objective == "portability":
        demands = [kernel.vendors is not None, kernel.arch[0] is not None, kernel.arch[1] is not None, bool(kernel.needs)]
        # A reference kernel does not count as portable, however few requirements it has.
        preference = sum(demands) if kernel.priority >= 4 else 5
    elif wish.objective in ("default", "accuracy"):  # no operand here is fp8
        preference = 0
    else:
        preference = 0 if wish.objective in kernel.tags else 1
    return (
        kernel.name != wish.override,
        math.inf if kernel.tuned is None else kernel.tuned,
        preference,
        -kernel.priority,
        kernel.name,
    )


def check_reason(kernel: Kernel, wish: Wish, gate: str, facts: Any, reason: str) -> None:
    if gate == "solution":
        assert re.fullmatch(rf"is of solution {facts[0]}, the request is for {facts[1]}", reason), reason
    elif gate == "platform":
        for fact in facts:
            assert fact in reason, (fact, reason)
        others = {"NVIDIA", "AMD"} - {*facts}
        assert not any(re.search(rf"\b{other}\b", reason) for other in others), reason
    elif gate == "formats":
        wanted = SIGNATURES[wish.formats]
        offered = [SIGNATURES[i] for i in kernel.formats or ()]
        phrasings = [
            {
                f"{r}: {wanted.get(r, 'nothing')} wanted, {o.get(r, 'nothing')} offered"
                for r in {*o, *wanted}
                if o.get(r) != wanted.get(r)
            }
            for o in offered
        ]
        fewest = min(map(len, phrasings))
        assert set(reason.split("; ")) in [p for p in phrasings if len(p) == fewest], reason
    else:
        phrases = reason.split("; ")
        named = [re.sub(r"^(does not declare the flag|needs) ", "", phrase) for phrase in phrases]
        named = [re.split(r"\W", phrase)[0] for phrase in named]
        assert sorted(named) == sorted(facts), (reason, facts)
        for name, phrase in zip(named, phrases, strict=True):
            if name not in wish.traits:
                assert "does not set" in phrase, phrase
            elif name not in kernel.traits:
                assert "does not declare the flag" in phrase, phrase
            else:
                assert phrase.startswith(f"{name}={wish.traits[name]} is not "), phrase


@dataclass
class Times:
    """A source of measured results for every request of the operator."""

    results: dict[str, Tuned]

    def has_results(self, operator: str, platform: PlatformInfo) -> bool:
        return True

    def find(self, operator: str, *request: Any) -> Found:
        return Found(self.results)


def _signature(index: int) -> FormatSignature:
    return FormatSignature(tuple(SIGNATURES[index].items()))


def install(described: list[Kernel]) -> dict[str, Any]:
    """Registers the kernels in a fresh registry. Returns their implementations by name."""
    KernelRegistry.reset()
    registry = KernelRegistry.get()
    implementations = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PriorityClashWarning)
        for kernel in described:
            low, high = (ArchVersion(*a) if a is not None else None for a in kernel.arch)
            spec = KernelSpec(
                kernel.name,
                "family",
                "mode",
                solution=kernel.solution,
                capability=CapabilityRequirement(low, high, kernel.needs, kernel.vendors),
                format_signatures=None if kernel.formats is None else frozenset(map(_signature, kernel.formats)),
                traits={name: build(rule, kernel.as_list) for name, rule in kernel.traits.items()},
                priority=kernel.priority,
                tags=kernel.tags,
                universal=kernel.universal,
                origin=f"test:{kernel.name}",
            )
            implementations[kernel.name] = lambda: None
            registry.register(spec, implementations[kernel.name])
    elsewhere = KernelSpec("elsewhere", "family", "other", solution="torch", format_signatures=None, origin="test:elsewhere")
    registry.register(elsewhere, lambda: None)
    measured.use(Times({k.name: Tuned(k.tuned) for k in described if k.tuned is not None}))
    return implementations


def compare(described: list[Kernel], implementations: dict[str, Any], wish: Wish, seen: collections.Counter[str]) -> None:
    request = make_request(
        "family",
        "mode",
        _signature(wish.formats),
        platform=wish.device.info,
        objective=wish.objective,
        traits=wish.traits,
        solution=wish.solution,
    )
    request = dataclasses.replace(request, fixed_traits=wish.fixed)
    override = Override(wish.override, "the test") if wish.override else None
    failures = {k.name: first_failure(k, wish, k.name == wish.override) for k in described}
    passing = sorted((k for k in described if failures[k.name] is None), key=lambda k: place(k, wish))
    expected = passing[0].name if passing else None
    if override and expected != wish.override:
        expected = None  # if the kernel of an override is not eligible, no other kernel is selected
        seen["override refused"] += 1
    elif override:
        seen["override"] += 1

    explanation = consider(request, override)
    assert (explanation.chosen.name if explanation.chosen else None) == expected
    assert sorted(v.spec.name for v in explanation.verdicts) == sorted(failures)
    assert [v.spec.name for v in explanation.verdicts if v.accepted] == [k.name for k in passing]
    by_name = {k.name: k for k in described}
    for verdict in explanation.verdicts:
        failure = failures[verdict.spec.name]
        assert verdict.gate == (failure[0] if failure else None), (verdict, failure)
        seen[verdict.gate or "accepted"] += 1
        if failure is not None:
            check_reason(by_name[verdict.spec.name], wish, *failure, verdict.reason)

    if expected is None:
        with pytest.raises(NoKernelFoundError) as caught:
            select(request, override)
        for name in failures:
            assert re.search(rf"\b{name}\b", str(caught.value))
        seen["none"] += 1
    else:
        selected = select(request, override)
        assert selected.name == expected
        assert selected.impl is implementations[expected]
        assert select(request, override) is selected
        seen["selected"] += 1
        _check_ties(passing, wish, explanation.verdicts[0].reason, seen)


def _check_ties(passing: list[Kernel], wish: Wish, reason: str, seen: collections.Counter[str]) -> None:
    tied = len(passing) > 1 and place(passing[0], wish)[:-1] == place(passing[1], wish)[:-1]
    assert ("ties with" in reason) == tied, reason
    if tied:
        assert f"ties with {passing[1].name} (test:{passing[1].name})" in reason
        seen["tie"] += 1


def _check_clashes(described: list[Kernel], wish: Wish) -> None:
    """Asserts that two kernels of equal priority that are both eligible for a request with every trait were reported at
    registration."""
    if {*FLAGS, *VALUES} - wish.traits.keys():
        return
    passing = [k for k in described if first_failure(k, wish, False) is None]
    reported = {frozenset((c.first.name, c.second.name)) for c in KernelRegistry.get().clashes()}
    for i, one in enumerate(passing):
        for other in passing[i + 1 :]:
            if one.priority == other.priority:
                assert frozenset((one.name, other.name)) in reported


def _run(registries_wanted: int, requests_each: int, derandomize: bool) -> collections.Counter[str]:
    seen: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=registries_wanted,
        deadline=None,
        derandomize=derandomize,
        database=None,
        # No shrinking: it takes minutes for such large inputs. The failing kernels and request are printed instead.
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(registries(), st.lists(wishes, min_size=requests_each, max_size=requests_each))
    def pairs(described: list[Kernel], wanted: list[Wish]) -> None:
        implementations = install(described)
        for wish in wanted:
            compare(described, implementations, wish, seen)
            _check_clashes(described, wish)
            seen["pairs"] += 1

    pairs()
    return seen


def test_selection_agrees_with_the_oracle() -> None:
    seen = _run(registries_wanted=300, requests_each=20, derandomize=True)
    assert seen["pairs"] >= 6_000
    # Each outcome must have occurred often. Otherwise the comparison would prove little.
    for outcome in ("accepted", "selected", "none", "solution", "platform", "formats", "traits"):
        assert seen[outcome] >= 150, seen
    for outcome in ("override", "override refused", "tie"):
        assert seen[outcome] >= 15, seen


@pytest.mark.slow
def test_selection_agrees_with_the_oracle_on_fresh_inputs() -> None:
    assert _run(registries_wanted=4000, requests_each=20, derandomize=False)["pairs"] >= 80_000


def test_the_oracle_notices_a_wrong_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the oracle detects the worst mistake: a selector that treats undeclared traits as supported."""
    lenient = selection.gate

    def gate(spec: KernelSpec, request: Any, **options: Any) -> Any:
        failed = lenient(spec, request, **options)
        return None if failed and failed[0] == "traits" and "does not declare the flag" in failed[1] else failed

    monkeypatch.setattr(selection, "gate", gate)
    with pytest.raises(AssertionError):
        _run(registries_wanted=50, requests_each=20, derandomize=True)


def test_every_objective_is_covered() -> None:
    assert {o.value for o in SelectionObjective} == {
        "default",
        "portability",
        "determinism",
        "accuracy",
        "debug",
    }
