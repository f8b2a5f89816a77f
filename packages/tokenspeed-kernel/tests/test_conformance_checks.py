"""Tests each conformance check on a kernel that satisfies its declaration, and on a kernel that violates it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics import EXACT, CaseResult, Status, compare, verify_case
from tokenspeed_kernel.workbench.numerics.conformance import checks, graphs, guards, waiting
from tokenspeed_kernel.workbench.numerics.conformance.case_space import CaseSpace, edge_values, empty_cases
from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.ops.moe.plan import PLAN_KINDS
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import CANONICAL, KernelSpec
from tokenspeed_kernel_base.traits import ANY, as_constraint, at_least, at_most, between, multiple_of, one_of
from tokenspeed_kernel_base.variation import Variation, Want

CPU = torch.device("cpu")
Impl = Callable[..., Any]
Declare = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@recipe
def _rows(
    rows: int, width: int, dtype: torch.dtype = torch.float32, shifted: bool = False, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        shift = {"shift": draw.normal(width, dtype=dtype)} if shifted else {}
        return {"x": draw.normal(rows, width, dtype=dtype), "padding": torch.arange(rows) % 3 == 2, **shift, **options}

    return make


def _body(x: Tensor, padding: Tensor, shift: Tensor | None = None, negate: bool = False, out: Tensor | None = None) -> Tensor:
    """Doubles rows; padding rows become 0."""
    doubled = torch.where(padding.unsqueeze(1), 0, x * 2)
    doubled = doubled if shift is None else doubled + shift
    return -doubled if negate else doubled


@pytest.fixture
def op(declare: Declare) -> Operator[Any, Any]:
    function = declare(_body, formats=("x",), traits={"width": int, "shift": bool, "negate": bool})

    @function.check
    def _(check: Any, x: Tensor, padding: Tensor, shift: Tensor | None) -> None:
        check.tensor("x", x, "rows width")
        check.tensor("padding", padding, "rows", torch.bool)
        check.tensor("shift", shift, "width")

    function.traits(lambda x, shift, negate: {"width": x.shape[1], "shift": shift is not None, "negate": negate})
    function.fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))

    @function.vary
    def _(variation: Variation, x: Tensor, padding: Tensor) -> dict[str, Tensor]:
        return {"x": x.masked_fill(padding.unsqueeze(1), torch.nan)} if variation.want is Want.UNUSED else {}

    function.cases(
        lambda: [
            Case("small", _rows(4, 6)),
            Case("shifted", _rows(5, 8, shifted=True)),
            Case("float64", _rows(9, 7, torch.float64)),
        ]
    )
    return function.operator  # type: ignore[no-any-return]


def right(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
    made = _body(x, padding, shift, negate)
    return made if out is None else out.copy_(made)


def space(op: Operator[Any, Any], impl: Impl = right, cases: Sequence[Case] | None = None, **declared: Any) -> CaseSpace:
    declared = {"traits": {"shift": any, "negate": any}, **declared}
    spec = KernelSpec(f"kernel_{op.mode}", op.family, op.mode, solution="tried", format_signatures=None, **declared)
    KernelRegistry.get().register(spec, impl)
    return CaseSpace.of(op, spec, CPU, op.all_cases() if cases is None else cases)


def failures(results: Iterator[CaseResult]) -> list[str]:
    listed = list(results)
    assert listed, "something was run"
    return [result.reason for result in listed if result.wrong]


# -- traits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "accepted", "refused"),
    [
        (at_most(256), [1, 3, 255, 256], [257]),
        (at_most(256) & multiple_of(16), [16, 48, 240, 256], [8, 15, 17, 255, 257, 272]),
        (between(64, 128), [64, 66, 127, 128], [32, 63, 129]),
        (at_least(8), [8, 10], [4, 7]),
        (multiple_of(32), [32, 96], [16, 31, 33]),
        (one_of(64, 128), [64, 128], [63, 65, 127, 129]),
        (as_constraint({1, 2}), [1, 2], [3]),
        (ANY, [False, True], []),
        (as_constraint(True), [True], [False]),
        (as_constraint("a"), ["a"], []),
    ],
)
def test_the_edges_of_a_constraint(constraint: Any, accepted: list[Any], refused: list[Any]) -> None:
    assert edge_values(constraint) == (accepted, refused)
    assert all(constraint.accepts(value) for value in accepted)
    assert not any(constraint.accepts(value) for value in refused)


def test_cases_at_the_edges_are_found_and_run(op: Operator[Any, Any]) -> None:
    results = list(checks.trait_edges(space(op, traits={"width": between(2, 40), "shift": any, "negate": any})))
    assert {r.status for r in results} == {Status.PASSED}
    names = [r.case for r in results]
    for wanted in ("width=2, ", "width=40, ", "width=41, ", "shift=True, ", "negate=True, _rows", "negate=False"):
        assert any(name.startswith(wanted) for name in names), (wanted, names)
    assert [r.reason for r in results if r.case.startswith(("width=41", "width=1,"))] == ["rejected, as declared"] * 2


@pytest.mark.parametrize("layers", [1, 3, 48])
def test_the_number_of_items_of_a_list_may_be_the_trait(layers: int) -> None:
    op = get_operator("decoder_layers")
    spec = KernelRegistry.get().get_by_name("composed_decoder_layers")
    space = CaseSpace.of(op, spec, CPU, [case for case in op.all_cases() if case.name == "gpt-oss layers, narrow, one token"])
    (case,) = space.reach("layers", layers, taken=True, most=1)
    assert len(case.build()["weights"].layers) == layers


def test_a_kernel_that_is_wrong_at_an_edge(op: Operator[Any, Any]) -> None:
    def narrow(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        made = right(x, padding, shift, negate, out)
        made[:, 32:] = 0
        return made

    said = failures(checks.trait_edges(space(op, narrow, traits={"width": at_most(40)})))
    assert said
    assert all("declares width: at most 40, but is wrong at width=" in text for text in said)
    assert not any("width=1:" in text or "width=3:" in text for text in said)


def test_a_trait_that_no_case_reaches_is_said(op: Operator[Any, Any]) -> None:
    results = list(checks.trait_edges(space(op, traits={"width": at_most(10**9)})))
    skipped = [r for r in results if r.status is Status.SKIPPED]
    assert skipped
    assert all("could be made to have width=" in r.reason for r in skipped)


@pytest.mark.parametrize(("field", "neutral", "constant"), [("alpha", 1.0, 1.702), ("beta", 0.0, 1.0), ("limit", None, 7.0)])
def test_a_kernel_that_knows_one_value_of_an_option(field: str, neutral: float | None, constant: float) -> None:
    """The kernel computes as GPT-OSS does, whatever number its plan has."""
    op = get_operator("moe.moe_apply")
    cases = [
        case for case in op.all_cases() if case.name in ("dense float32, 4 experts, odd sizes", "dense bfloat16, gpt-oss options")
    ]
    assert len(cases) == 2

    def gpt_oss_kernel(x: Tensor, weights: Any, topk_weights: Tensor, topk_ids: Tensor, plan: Any, out: Tensor | None) -> Any:
        plan = plan if getattr(plan, field) == neutral else dataclasses.replace(plan, **{field: constant})
        return op.reference(x, weights, topk_weights, topk_ids, plan, out)

    tried = space(op, gpt_oss_kernel, cases, traits=dict.fromkeys(PLAN_KINDS, any) | {"weight_layout": CANONICAL})
    (found,) = failures(checks.option_edges(tried))
    assert re.search(rf"is wrong at plan\.{field}=[\d.]+( \(ignores plan\.{field}: .*\))?: output: ", found)


@pytest.mark.parametrize(
    ("mode", "name", "misread"),
    [
        ("mha_with_kvcache", "fp8 q and cache, a scale each", lambda scale: None),
        (
            "mha_extend_with_kvcache",
            "head_dim 256, fp8 q and cache, a scale a kv head, in a window of 30",
            lambda scale: scale[:1].expand_as(scale),
        ),
    ],
    ids=["ignored", "of the first head"],
)
def test_a_kernel_that_misreads_scales(mode: str, name: str, misread: Callable[[Tensor], Tensor | None]) -> None:
    op = get_operator(f"attention.{mode}")
    (case,) = (case for case in op.all_cases() if case.name == name)
    place = [parameter.name for parameter in op.parameters].index("q_scale")

    def wrong(*arguments: Any) -> Any:
        return op.reference(*arguments[:place], misread(arguments[place]), *arguments[place + 1 :])

    traits = dict.fromkeys(op.traits, any)
    assert not failures(checks.option_edges(space(op, op.reference, [case], traits=traits)))
    KernelRegistry.get().unregister(f"kernel_{op.mode}")
    found = failures(checks.option_edges(space(op, wrong, [case], traits=traits)))
    assert any("is wrong at factor of q_scale=" in reason for reason in found)


def test_nothing_to_do(op: Operator[Any, Any]) -> None:
    def none(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        assert len(x), "no rows"
        return right(x, padding, shift, negate, out)

    results = list(checks.empties(space(op)))
    assert "_rows(0, 6)" in [r.case for r in results]
    assert {r.status for r in results} == {Status.PASSED}
    # The operator launches nothing if every output is empty, so a kernel may rely on nonempty inputs.
    assert failures(checks.empties(space_again(op, none))) == []


def space_again(op: Operator[Any, Any], impl: Impl, **declared: Any) -> CaseSpace:
    KernelRegistry.get().unregister(f"kernel_{op.mode}")
    return space(op, impl, **declared)


@pytest.mark.parametrize("op", operators(), ids=str)
def test_every_operator_accepts_empty_tensors(op: Operator[Any, Any]) -> None:
    reference = KernelRegistry.get().get_by_name(f"reference_{op.mode}")
    cases = [case for case in op.all_cases() if not case.large][:2]
    found = list(empty_cases(CaseSpace.of(op, reference, CPU, cases), 4))
    assert found
    for case in found:
        assert verify_case(reference, case, CPU).status is Status.PASSED


def test_device_values_decide_whether_a_case_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls do not check offsets that are on a device, because reading them would synchronise. Wrong offsets could crash the
    process in a reference, so the kit itself must reject them."""
    op = get_operator("kvcache.positions_to_slots")
    spec = KernelRegistry.get().get_by_name("reference_positions_to_slots")
    space = CaseSpace(op, spec, torch.device("cpu"))
    check_call = Operator.check_call
    monkeypatch.setattr(Operator, "check_call", lambda op, arguments: check_call(op, arguments, values=False))  # as on a device
    (case,) = (case for case in op.all_cases() if case.name.startswith("pages of 24"))
    arguments = case.build()
    assert space.look(case) is not None
    wrong = {**arguments, "cu_seqlens_q": torch.tensor([0, 0, 0, 0, 3], dtype=torch.int32)}
    op.check_call(op.complete(wrong))
    assert space.look(Case("offsets end early", lambda draw: wrong)) is None


# -- unused values, layouts and guards ----------------------------------------------------------------------------------------


def test_values_that_must_not_matter(op: Operator[Any, Any]) -> None:
    def multiplies(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        made = x * 2 * (~padding).unsqueeze(1)  # 0 times NaN is NaN
        made = made if shift is None else made + shift
        made = -made if negate else made
        return made if out is None else out.copy_(made)

    assert failures(checks.unused_values(space(op))) == []
    said = failures(checks.unused_values(space_again(op, multiplies)))
    assert said
    assert all(text.startswith("uses values that must not matter, of x: ") and "NaN" in text for text in said)


VARIED = [op for op in operators() if op.has_hook("vary")]
WITH_UNUSED = {op.mode for op in VARIED if "with_kvcache" in op.mode} | {
    "adjust_logits",
    "apply_rope",
    "apply_rope_mla",
    "bmm",
    "build_draft_tree",
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "compact_kv_cache",
    "copy_kv_pages",
    "dequantize_fp8",
    "expand_page_table",
    "gated_delta_rule_decode",
    "gated_delta_rule_prefill",
    "mm",
    "moe_apply",
    "moe_combine",
    "moe_dispatch",
    "positions_to_slots",
    "qk_rmsnorm_rope_store_kv_cache",
    "rmsnorm_qkv_rope",
    "ssd_decode",
    "ssd_prefill",
    "store_index_k_cache",
    "store_kv_cache",
    "store_mla_kv_cache",
    "token_logprobs",
    "top_k_indices",
    "unswizzle_scales",
    "verify_draft_probs",
    "verify_draft_tokens",
    "zero_kv_pages",
}


@pytest.mark.parametrize("op", VARIED, ids=str)
def test_unused_values_change_no_result(op: Operator[Any, Any]) -> None:
    changed = 0
    for case in op.all_cases():
        if case.large:
            continue
        plain, varied = op.complete(case.build()), op.complete(case.build())
        varied.update(op.varied(varied, Variation(Want.UNUSED, Draw())))
        op.check_call(varied)
        changed += any(not torch.equal(_bytes(plain[n]), _bytes(t)) for n, t in varied.items() if isinstance(t, Tensor))
        compared = compare(op.reference(*varied.values()), op.reference(*plain.values()), EXACT)
        assert [c.fault for c in compared if c.fault] == [], case.name
    assert (changed > 0) == (op.mode in WITH_UNUSED)


@pytest.mark.parametrize("op", VARIED, ids=str)
def test_other_values_are_legal_in_the_same_tensors(op: Operator[Any, Any]) -> None:
    """The values for replays of a captured graph must be valid, in tensors of unchanged shapes and dtypes."""
    for case in op.all_cases():
        if case.large:
            continue
        arguments = op.complete(case.build())
        changed = op.varied(arguments, Variation(Want.OTHER, Draw()))
        assert all((t.shape, t.dtype) == (arguments[n].shape, arguments[n].dtype) for n, t in changed.items()), case.name
        op.check_call({**arguments, **changed})


@pytest.mark.parametrize("op", operators(), ids=str)
def test_a_replayed_graph_is_given_other_inputs_that_are_legal(op: Operator[Any, Any]) -> None:
    reference = KernelRegistry.get().get_by_name(f"reference_{op.mode}")
    changed = 0
    for case in op.all_cases():
        if not case.large:
            inputs, drawn = (graphs.Inputs.build(reference, case, CPU, seed) for seed in (0, 1))
            before = {name: tensor.clone() for name, tensor in inputs.plain_tensors().items()}
            inputs.overwrite(graphs._other_values(inputs, drawn, 0))
            op.check_call(inputs.plain)
            changed += any(not torch.equal(_bytes(before[n]), _bytes(t)) for n, t in inputs.plain_tensors().items())
    assert changed > 1


def test_other_values_of_a_paged_call_are_shorter_sequences_in_other_pages() -> None:
    op = get_operator("mha_extend_with_kvcache")
    arguments = op.complete(paged([30, 5], [4, 5], is_causal=True)(Draw()))
    changed = op.varied(arguments, Variation(Want.OTHER, Draw()))
    assert changed["cache_seqlens"].tolist() == [20, 5], "a third shorter, but not without its new tokens"
    assert changed["cu_seqlens_kv"].tolist() == [0, 20, 25]
    table, moved = arguments["page_table"], changed["page_table"]
    assert not torch.equal(table, moved)
    for page, place in zip(table[table >= 0].tolist(), moved[moved >= 0].tolist(), strict=True):
        assert torch.equal(arguments["k_cache"][page], changed["k_cache"][place])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool])
@pytest.mark.parametrize("name", [*guards.LAYOUTS])
def test_layouts_and_guards_keep_the_values(dtype: torch.dtype, name: str) -> None:
    values = torch.randn(3, 4, 5).mul(3).to(dtype)
    laid = guards.LAYOUTS[name](values)
    assert torch.equal(_bytes(laid), _bytes(values))
    assert not laid.is_contiguous()
    guarded = guards.guard("x", laid)
    assert guarded.tensor.stride() == laid.stride()
    assert torch.equal(_bytes(guarded.tensor), _bytes(values))
    assert guarded.fault() == ""
    if dtype.is_floating_point:
        assert bool(guarded.buffer.float()[guarded.outside].isnan().all())


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (-1, "writes 1 elements outside of x, up to 1 before its first"),
        (-7, "up to 7 before its first"),
        (12, "up to 1 behind its last"),
        (20, "up to 9 behind its last"),
    ],
)
def test_a_guard_says_what_was_written(at: int, said: str) -> None:
    guarded = guards.guard("x", torch.randn(3, 4))
    guarded.buffer[guards._GUARD + at] = 1.0
    assert said in guarded.fault()


def test_a_guard_of_what_overlaps_itself() -> None:
    guarded = guards.guard("x", torch.ones(1, 4).expand(3, 4))
    assert guarded.tensor.is_contiguous()
    assert guarded.fault() == ""
    assert guards.guard("nothing", torch.empty(0, 4)).fault() == ""


def test_a_kernel_that_writes_or_reads_out_of_bounds(op: Operator[Any, Any]) -> None:
    def writes(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        made = right(x, padding, shift, negate, out)
        if out is not None and out.storage_offset() + out.numel() < out.untyped_storage().nbytes() // out.element_size():
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return made

    def reads(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        made = right(x, padding, shift, negate, out)
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.numel()
        return made.add_(0 * x.as_strided((1,), (1,), x.storage_offset() + x.numel())) if room > 0 else made

    assert failures(checks.bounds(space(op))) == []
    said = failures(checks.bounds(space_again(op, writes)))
    assert said
    assert all("writes 1 elements outside of out, up to 1 behind its last" in text for text in said)
    said = failures(checks.bounds(space_again(op, reads)))
    assert said
    assert all("uses memory outside its tensors" in text and "NaN" in text for text in said)


def test_a_kernel_that_takes_tensors_to_be_contiguous(op: Operator[Any, Any]) -> None:
    def flat(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        dense = x.as_strided(x.shape, (x.shape[1], 1))
        return right(dense, padding, shift, negate, out)

    assert failures(checks.layouts(space(op))) == []
    said = failures(checks.layouts(space_again(op, flat)))
    assert any("is wrong for tensors that are not contiguous (rows apart)" in text for text in said)


# -- host synchronisation -----------------------------------------------------------------------------------------------------

X, MASK = torch.arange(6.0), torch.tensor([True, False, True, False, True, False])


@pytest.mark.parametrize(
    ("reads", "what"),
    [
        (lambda: X.sum().item(), "Tensor.item"),
        (lambda: int(X[0]), "Tensor.item"),
        (lambda: bool((X > 3).any()), "Tensor.item"),
        (lambda: range(X[2].int()), "Tensor.item"),
        (lambda: X.tolist(), "Tensor.tolist"),
        (lambda: X.cpu(), "Tensor.cpu"),
        (lambda: X.numpy(), "Tensor.numpy"),
        (lambda: X.to("cpu"), "Tensor.to('cpu')"),
        (lambda: X.to(device=torch.device("cpu")), "Tensor.to('cpu')"),
        (lambda: MASK.nonzero(), "torch.nonzero"),
        (lambda: X[MASK], "indexing by a mask"),
        (lambda: torch.masked_select(X, MASK), "torch.masked_select"),
        (lambda: X.unique(), "torch._unique2"),  # type: ignore[no-untyped-call]
        (lambda: torch.equal(X, X), "torch.equal"),
        (lambda: X.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 1])), "torch.repeat_interleave without output_size"),
    ],
)
def test_host_synchronisation_is_found(reads: Callable[[], Any], what: str) -> None:
    with waiting.watching() as seen:
        reads()
    assert [wait.what for wait in seen.found] == [what]
    assert "test_conformance_checks.py:" in seen.found[0].where


@pytest.mark.parametrize(
    "computes",
    [
        lambda: X * 2 + X.sum(),
        lambda: X.clone().masked_fill_(MASK, 0.0),
        lambda: X[torch.tensor([1, 2])],
        lambda: X.clone().index_put_((MASK,), torch.tensor(1.0)),
        lambda: torch.where(MASK, X, 0).to(torch.bfloat16),
        lambda: X.repeat_interleave(2, output_size=12),
        lambda: (X.shape, X.numel(), X.stride(), len(X), X.dtype),
    ],
)
def test_asynchronous_operations_are_not_reported(computes: Callable[[], Any]) -> None:
    with waiting.watching() as seen:
        computes()
    assert seen.found == []


def test_a_kernel_that_waits(op: Operator[Any, Any]) -> None:
    def asks(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        if padding.any():
            return right(x, padding, shift, negate, out)
        return right(x, padding, shift, negate, out)

    assert failures(checks.waits(space(op))) == []
    said = failures(checks.waits(space_again(op, asks)))
    assert said
    assert all(
        "waits for the device: Tensor.item at test_conformance_checks.py:" in text and "if padding.any()" in text for text in said
    )


def test_who_may_wait(op: Operator[Any, Any]) -> None:
    assert checks.host_kernel(space(op)) == ""
    on_host = space_again(op, right, capability=CapabilityRequirement(vendors=frozenset({"cpu"})))
    assert checks.host_kernel(on_host) == "runs on a CPU only"
    assert list(checks.waits(on_host)) == []
    declared = space_again(op, right, tags=frozenset({checks.WAITS}))
    assert "declares that it waits" in checks.host_kernel(declared)
    assert list(checks.graphs(space_again(op, right))) == [], "graphs are for a GPU"


def test_on_a_gpu_pytorchs_sync_debug_mode_is_used(op: Operator[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a GPU, with replaced functions of torch.cuda. PyTorch's sync debug mode must be "error" inside
    `waiting.refusing`, and must be restored after an error."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with contextlib.suppress(RuntimeError), waiting.refusing():
        assert modes == ["error"]
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", 0]


# -- batches ------------------------------------------------------------------------------------------------------------------


def test_batch_invariance(op: Operator[Any, Any]) -> None:
    def by_batch(x: Tensor, padding: Tensor, shift: Tensor | None, negate: bool, out: Tensor | None) -> Tensor:
        made = right(x * (1 + 1e-7 * len(x)), padding, shift, negate, None)
        return made if out is None else out.copy_(made)

    assert list(checks.batch_invariance(space(op))) == [], "not tagged"
    tags = frozenset({checks.BATCH_INVARIANT})
    assert failures(checks.batch_invariance(space_again(op, right, tags=tags))) == []
    said = failures(checks.batch_invariance(space_again(op, by_batch, tags=tags)))
    assert said
    assert all("is tagged batch_invariant, but the first 1 of " in text for text in said)


def test_a_sample_has_each_combination_of_flags(op: Operator[Any, Any]) -> None:
    first = space(op)
    assert [case.name for case in checks.sample(first)] == ["small", "shifted"]
    assert [case.name for case in checks.sample(first, suits=lambda case: case.name != "small")] == ["shifted", "float64"]
    found = space_again(op, right)
    found.wrong = {"small"}
    assert [case.name for case in checks.sample(found)] == ["shifted", "float64"]


def test_sequences_are_items_too() -> None:
    """In a ragged operator, the batch's items are sequences. The check must find a kernel whose results depend on other sequences'
    tokens."""
    op = get_operator("mha_prefill")

    def leaks(*args: Any) -> Any:
        arguments = dict(zip(op.names, args, strict=True))
        result = op.reference(*args)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        outputs[0].add_(arguments["v"].sum().to(outputs[0].dtype) * 2**-6)
        return result

    flags = {"sliding_window": any, "sinks": any, "logit_cap": any, "return_lse": any}
    tags = frozenset({checks.BATCH_INVARIANT})
    spec = KernelSpec("leaks", op.family, op.mode, solution="x", format_signatures=None, traits=flags, tags=tags, priority=1)
    KernelRegistry.get().register(spec, leaks)
    cases = [case for case in op.all_cases() if case.name == "one key head, lengths 0 to 33, float32, lse"]
    said = failures(checks.batch_invariance(CaseSpace.of(op, spec, CPU, cases)))
    assert said
    assert "the first 1 of 4 items have other bits without the rest: output 0" in said[0]
