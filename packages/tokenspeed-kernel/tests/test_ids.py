"""Calls every kernel with invalid ids from the whole range of their dtype. The result must be that of the operator's reference with
-1 in their place.

A kernel that truncates an int64 id to 32 bits before its range check fails here: -2^32 + 1 would become token, slot or page 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.compare import compare_results, same_bits
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import default_device, refusal, run_kernel, written_to
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

PLATFORM = current_platform()
ON_GPU = not PLATFORM.is_cpu and not PLATFORM.pretended and not PLATFORM.emulated
Arguments = dict[str, Any]


def _negative(_: Arguments) -> int | None:
    """Returns None for an argument of which only negative ids are invalid. For such an argument, too large an id is the caller's
    error."""
    return None


def _vocab(arguments: Arguments) -> int:
    return int(arguments["logits"].shape[1]) + int(arguments.get("first_token", 0))


def _nodes(arguments: Arguments) -> int:
    return int(arguments.get("path", arguments.get("draft_tokens")).shape[1])


# By operator and argument: a function that returns the smallest id that is too large and must be ignored. None: only negative ids
# are ignored.
IDS: dict[str, dict[str, Callable[[Arguments], int | None]]] = {
    "adjust_logits": {"tokens": _vocab},
    "apply_rope": {"slot_mapping": _negative},
    "apply_rope_mla": {"slot_mapping": _negative},
    "build_draft_tree": {"parents": _negative},
    "causal_conv1d_decode": {"state_slots": _negative, "output_slots": _negative},
    "causal_conv1d_prefill": {"state_slots": _negative},
    "compact_kv_cache": {"path": _nodes},
    "copy_kv_pages": {"source_pages": _negative, "target_pages": _negative},
    "decoder_layers": {"slot_mapping": _negative},
    "expand_page_table": {"page_table": _negative},
    "gated_delta_rule_decode": {"state_slots": _negative, "output_slots": _negative},
    "gated_delta_rule_prefill": {"state_slots": _negative},
    "mla_sparse_with_kvcache": {"indices": _negative},
    "moe_apply": {"topk_ids": _negative},
    "moe_apply_add": {"topk_ids": _negative},
    "moe_combine": {"ids": _negative},
    "moe_dispatch": {"topk_ids": _negative},
    "positions_to_slots": {"positions": lambda a: a["page_table"].shape[1] * a["page_size"], "page_table": _negative},
    "qk_rmsnorm_rope_store_kv_cache": {"slot_mapping": _negative},
    "rmsnorm_qkv_rope": {"slot_mapping": _negative},
    "ssd_decode": {"state_slots": _negative, "output_slots": _negative},
    "ssd_prefill": {"state_slots": _negative},
    "store_index_k_cache": {"slot_mapping": _negative},
    "store_kv_cache": {"slot_mapping": _negative},
    "store_mla_kv_cache": {"slot_mapping": _negative},
    "token_logprobs": {"tokens": _vocab},
    "verify_draft_probs": {"draft_tokens": lambda a: a["target_probs"].shape[2], "parents": _nodes},
    "verify_draft_tokens": {"draft_tokens": _negative, "parents": _nodes},
    "zero_kv_pages": {"pages": _negative},
}
# By operator: the argument whose invalid ids mark rows of the output that have no meaning.
MEANINGLESS = {"decoder_layers": "slot_mapping"}
# Integer arguments that are not tested: integers that are not ids, ids that are only copied, and ids that callers must keep in
# range.
OTHERS = {
    "a_scale", "b_scale", "cache_seqlens", "counts", "cu_seqlens", "cu_seqlens_kv", "cu_seqlens_q", "lengths", "offset",
    "page_table", "positions", "root_tokens", "scale", "seed", "target_tokens", "tokens", "top_k", "top_tokens", "topk_length",
    "tree_mask", "x",
}  # fmt: skip


def test_every_integer_argument_is_listed() -> None:
    for op in operators():
        small = (case for case in op.all_cases() if not case.large and case.world_size == 1)
        for case in itertools.islice(small, 5):
            for name, tensor in tensor_arguments(op.parameters, op.complete(case.build())):
                if tensor.dtype in (torch.int32, torch.int64):
                    assert name in IDS.get(op.mode, {}) or name in OTHERS, f"{op}: {name}"


def _outside(dtype: torch.dtype, bound: int | None) -> list[int]:
    """Returns invalid ids other than -1. Ids that do not fit into 32 bits come first."""
    wide = dtype == torch.int64
    largest = torch.iinfo(dtype).max
    values = [*([-(2**32) + 1, -(2**63), -(2**31) - 1] if wide else []), -(2**31)]
    return values if bound is None else [*([2**32 + 1, 2**31] if wide else []), bound, largest, *values]


def _wide(op: Operator[Any, Any], arguments: Arguments, name: str) -> Arguments:
    """Returns the arguments with int64 ids, if the operator accepts int64."""
    own = arguments[name].dtype
    wide = {n: x.long() if n in (name, "target_tokens") and x.dtype == own else x for n, x in arguments.items()}
    try:
        op.check_call(wide)
    except TypeError:
        return arguments
    return wide


def _build(op: Operator[Any, Any], case: Case, name: str) -> Arguments:
    arguments = op.complete(case.build(default_device()))
    return arguments if arguments[name] is None else _wide(op, arguments, name)


def _absent(given: Tensor) -> Tensor:
    """Returns a mask of every second id."""
    return torch.arange(given.numel(), device=given.device).view(given.shape) % 2 == 1


def _results(op: Operator[Any, Any], arguments: Arguments) -> list[Tensor]:
    returned = lowering.as_list(op.reference(*arguments.values()))
    return [*returned, *written_to(op, arguments).values()]


def _call(op: Operator[Any, Any], specs: list[KernelSpec], name: str) -> tuple[KernelSpec, Case] | None:
    """Returns a kernel and a small case whose result depends on which ids are invalid, preferably with many ids; None if there is
    none."""
    costs = {}
    for case in op.all_cases():
        if case.large or case.world_size > 1:
            continue
        arguments = _build(op, case, name)
        if arguments[name] is None or arguments[name].numel() < 2:
            continue
        # With fewer ids in a call, more calls are needed, and an interpreted call has a large fixed cost.
        elements = sum(tensor.numel() for _, tensor in tensor_arguments(op.parameters, arguments))
        cost = (10_000 + elements) / min(arguments[name].numel(), 20)
        costs.update({(spec, case): cost for spec in specs if refusal(op, spec, arguments) is None})
    for spec, case in sorted(costs, key=lambda call: costs[call]):
        plain, changed = _build(op, case, name), _build(op, case, name)
        changed[name] = torch.where(_absent(changed[name]), -1, changed[name])
        pairs = zip(_results(op, plain), _results(op, changed), strict=True)
        if any(not same_bits(one, other) for one, other in pairs):
            return spec, case
    return None


def _faults(op: Operator[Any, Any], spec: KernelSpec, case: Case, name: str) -> Iterator[str]:
    arguments = _build(op, case, name)
    given, absent = arguments[name], _absent(arguments[name])
    values = torch.tensor(_outside(given.dtype, IDS[op.mode][name](arguments)), dtype=given.dtype, device=given.device)
    for shift in range(0, len(values), int(absent.sum())):
        others = values[(absent.flatten().cumsum(0).view(given.shape) - 1 + shift) % len(values)]
        wanted = {**_build(op, case, name), name: torch.where(absent, -1, given)}
        changed = {**_build(op, case, name), name: torch.where(absent, others, given)}
        op.check_call(changed)
        expected = op.reference(*wanted.values())
        got = run_kernel(op, spec, op.prepared(changed, spec))
        if MEANINGLESS.get(op.mode) == name:
            got, expected = (result.masked_fill(absent[:, None], 0) for result in (got, expected))
        written = {n: (x, wanted[n]) for n, x in written_to(op, changed).items()}
        tolerance = functools.partial(tolerance_for, request=op.request(changed), exact=op.exact)
        compared = compare_results(op, changed, got, expected, tolerance, written)
        assert compared
        yield from (f"{comparison.name}: {comparison.fault}" for comparison in compared if comparison.fault)


def _kernels() -> Iterator[Any]:
    """Yields the kernels that can run here, grouped by module, with each id argument of their operator."""
    marks = [getattr(pytest.mark, PLATFORM.vendor)] if ON_GPU else []
    registry = KernelRegistry.get()
    for mode, names in IDS.items():
        modules: dict[str, list[KernelSpec]] = {}
        for spec in registry.get_for_operator(get_operator(mode).family, mode):
            if spec.capability.gap(PLATFORM) is None:
                modules.setdefault(registry.module_of(spec.name), []).append(spec)
        for specs in modules.values():
            yield from (pytest.param(specs, name, marks=marks, id=f"{specs[0].name}-{name}") for name in names)


@pytest.mark.parametrize(("specs", "name"), [*_kernels()])
def test_ids_out_of_range_name_nothing(specs: list[KernelSpec], name: str) -> None:
    op = get_operator(specs[0].operator)
    call = _call(op, specs, name)
    if call is None:
        pytest.skip(f"takes no case in which {name} decides anything")
    assert [*_faults(op, *call, name)] == [], call
