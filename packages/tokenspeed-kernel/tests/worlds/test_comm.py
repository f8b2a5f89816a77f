"""Tests operators between processes, in several processes: on GPUs, and on a CPU over gloo, where Triton interprets the kernels on
peer memory.

python packages/tokenspeed-kernel/tests/worlds/test_comm.py --ranks 2 --replays 10000     # the stress test alone, on GPUs
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_steps import KINDS, Step, wrong

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.comm.all_reduce import one_shot_all_reduce
from tokenspeed_kernel.workbench.numerics import CaseResult, assert_none_wrong, verify_case
from tokenspeed_kernel.workbench.worlds import WorldError, run_world
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, ONE_SHOT, ONE_SHOT_MOST, TWO_SHOT, UNIT, PeerMemory, one_shot_most
from tokenspeed_kernel_base.ops.comm.pretended import as_rank_of
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry

triton = pytest.importorskip("triton")
numpy = pytest.importorskip("numpy")

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the processes that a test starts interpret Triton. This process has imported Triton already and does not interpret
    it."""
    versions = [tuple(int(part) for part in module.__version__.split(".")[:2]) for module in (triton, numpy)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 converts arrays of one element to scalars, which NumPy 2.4 refuses")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def comm_operators() -> list[Operator[Any, Any]]:
    """Returns the operators that have cases of several ranks."""
    return [op for op in operators() if any(case.world_size > 1 for case in op.all_cases())]


# -- the functions that the processes run; one world of processes runs several tests, because starting it takes seconds
# ---------------------------------


def every_case(large: bool) -> dict[str, list[CaseResult]]:
    """Verifies each kernel of each operator on the cases for this number of ranks. Returns the results by kernel."""
    found: dict[str, list[CaseResult]] = {}
    for op in comm_operators():
        for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
            cases = [case for case in op.all_cases() if case.world_size == dist.get_world_size() and (large or not case.large)]
            found[spec.name] = [verify_case(spec, case) for case in cases]
    return found


def sums_of_peers() -> list[str]:
    """Compares the results of both protocols with sums that each rank computes itself. Returns the faults. Shapes change from call
    to call, so peer memory has various old contents."""
    group = ProcessGroup.with_peer_memory(one_shot_bytes=1 << 16, two_shot_bytes=1 << 16)
    wrong = []
    shapes = [(1, 64), (5, 360), (2, 2048), (3, 264)]
    for turn in range(2):
        for rows, hidden in shapes[turn:] + shapes[:turn]:
            for dtype in (torch.float32, torch.float16):
                for kind in KINDS:
                    said = _wrong_sums(group, kind, rows, hidden, dtype, turn)
                    wrong += [f"{each} of {kind} {rows} x {hidden} {dtype} in turn {turn}" for each in said]
    return wrong


def _wrong_sums(group: ProcessGroup, kind: str, rows: int, hidden: int, dtype: torch.dtype, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(100 * seed + hidden)
    device = group.device or torch.device("cpu")
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device)  # noqa: E731
    every, residual, weight = draw(group.world_size, rows, hidden), draw(rows, hidden), draw(hidden)
    every[:, 0, :8] = -0.0  # the bit pattern that marks memory as not yet written
    total = every[0].float()
    for other in every[1:]:  # in rank order, like the kernels, so the bits are equal
        total = total + other.float()
    normed, summed = rmsnorm(total.to(dtype), weight, 1e-5, residual, solution="reference")
    x = every[group.rank].clone()
    wrong = []
    if not torch.equal(tk.all_reduce(x, group, override=f"triton_{kind}_all_reduce"), total.to(dtype)):
        wrong.append("sum")
    # In place, as a serving engine calls it.
    tk.all_reduce_rmsnorm(x, weight, group, 1e-5, residual, x, residual, override=f"triton_{kind}_all_reduce_rmsnorm")
    if not torch.equal(residual, summed):
        wrong.append("sum with residual")
    if not torch.allclose(x.float(), normed.float(), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5):
        wrong.append("norm")
    return wrong


def calls_that_differ() -> list[str]:
    """Makes calls that differ between ranks, and returns the errors. Errors after which the group still works come first."""
    rank = dist.get_rank()
    group = ProcessGroup.with_peer_memory(one_shot_bytes=1 << 14, two_shot_bytes=1 << 14)
    ones = functools.partial(torch.ones, device=group.device or "cpu")
    weight, said = ones(64), []
    calls: list[Callable[[], Any]] = [
        lambda: tk.all_reduce(ones(64 + 4 * rank), group, solution="triton"),
        lambda: tk.all_reduce_rmsnorm(ones(2 + rank, 64), weight, group),
        lambda: tk.all_reduce(ones(64), group, override=f"triton_{KINDS[rank]}_all_reduce"),
        lambda: tk.all_gather(ones(2 + rank), group),
        lambda: tk.reduce_scatter(ones(2 + 2 * rank), group),
        lambda: tk.moe_combine(ones(2, 3 + rank), ones(2, 1, dtype=torch.int32), group),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="every rank must make the same call") as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(ValueError, match=r"x must be .*32768 bytes") as caught:
        tk.all_reduce(ones(8192), group, override="triton_one_shot_all_reduce")
    with pytest.raises(ValueError, match=r"one_shot_bytes must be at most 16384, .*got 32768"):
        ProcessGroup.with_peer_memory(one_shot_bytes=1 << 15)
    assert ProcessGroup.with_peer_memory() is group
    plain = tk.all_reduce.explain(ones(64), ProcessGroup.of())
    assert "protocol=none: made by ProcessGroup.of, without peer memory is not one_shot" in str(plain)
    assert "link=none" in str(plain)
    link = group.traits["link"]
    assert link == "host memory" if group.device is None else link in ("pcie", "nvlink, no multicast", "nvlink, multicast not used")
    assert f"link={link}, protocol=one_shot" in str(tk.all_reduce.explain(ones(64), group))
    if rank == 0:  # the other rank never comes
        group.time_limit_s = 1.0
        with pytest.raises(RuntimeError, match="waited 1 s for all ranks") as late:
            tk.all_reduce(ones(128), group)
        said.append(str(late.value))
    return said


def words_of_ranks() -> list[str]:
    """Writes to the other rank's shared words, and returns the errors of wrong calls."""
    group = ProcessGroup.with_peer_memory()
    shared = group.shared_words("test", 5)
    assert shared is group.shared_words("test", 5)
    assert len(shared.addresses) == group.world_size
    if group.device is None:  # all ranks' memory is in this process
        assert all(not memory.any() for memory in shared.memory)
        dist.barrier()
        for memory in shared.memory:
            memory[group.rank] = 7 + group.rank
        dist.barrier()
        assert all(memory.tolist() == [7, 8, 0, 0, 0] for memory in shared.memory)
        assert [memory.data_ptr() for memory in shared.memory] == [*shared.addresses]
    said = []
    for wrong_group, name, count in ((ProcessGroup.of(), "alone", 1), (group, "other", 1 + group.rank)):
        with pytest.raises(ValueError, match="must") as caught:
            wrong_group.shared_words(name, count)
        said.append(str(caught.value))
    return said


def experts_of_ranks() -> list[float]:
    """Computes an MoE with its experts distributed over the ranks, and with all experts on one rank. Returns the largest difference
    of each call."""
    group, differences = ProcessGroup.of(), []
    experts, hidden, top_k = 4 * group.world_size, 16, 3
    for tokens, used in ((9, experts), (1, experts), (5, 4)):  # in the last call, all selected experts are on rank 0
        generator = torch.Generator().manual_seed(tokens)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: B023, E731
        w13, w2 = draw(experts, 24, hidden), draw(experts, hidden, 12)
        x, weights = draw(group.world_size, tokens, hidden)[group.rank], draw(group.world_size, tokens, top_k)[group.rank].abs()
        ids = draw(group.world_size, tokens, used)[group.rank].topk(top_k).indices.to(torch.int32)
        ids[0, 0] = -1
        plan = tk.moe_apply.plan(experts, top_k, hidden, 12, dtype=torch.float32, device="cpu")
        wanted = tk.moe_apply(x, MoEWeights(w13, None, None, w2, None, None), weights, ids, plan)

        own = slice(4 * group.rank, 4 * group.rank + 4)
        local = tk.moe_apply.plan(4, top_k, hidden, 12, dtype=torch.float32, device="cpu")
        rows, row_weights, row_ids = tk.moe_dispatch(x, weights, ids, experts, group)
        made = tk.moe_apply(rows, MoEWeights(w13[own], None, None, w2[own], None, None), row_weights, row_ids, local)
        differences.append(float((tk.moe_combine(made, row_ids, group) - wanted).abs().max()))
    return differences


def ranks_out_of_step(replays: int, seed: int = 0) -> list[str]:
    """Replays graphs of several calls in a random order that all ranks share, with other values each time and random delays of each
    rank. On a CPU, runs the calls without graphs.

    Returns:
        The faults, by graph.
    """
    group = ProcessGroup.with_peer_memory(one_shot_bytes=1 << 22, two_shot_bytes=1 << 22)
    cuda = group.backend == "nccl"
    common, own = random.Random(seed), random.Random(seed + 1 + group.rank)
    sizes = [(1, 2880), (64, 2880), (7, 64), (300, 2880), (33, 520)] if cuda else [(1, 64), (3, 264)]
    steps = [Step(group, rows, hidden, kind) for rows, hidden in sizes for kind in KINDS]
    for step in steps:
        step.run_once()
        if cuda:
            torch.cuda.synchronize()
            step.capture()
    for _ in range(replays):
        step = common.choice(steps)
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(10**6)) if cuda else time.sleep(0.01 * own.random())  # type: ignore[no-untyped-call]
        step.replay() if cuda else step.run_once()
        if own.random() < 0.001:
            time.sleep(0.005)
    outcomes: list[list[tuple[int, int]]] = [[]] * group.world_size
    dist.all_gather_object(outcomes, [step.outcome() for step in steps])
    return [f"{step}: {said}" for step, found in zip(steps, zip(*outcomes, strict=True), strict=True) if (said := wrong(found))]


def one_stays_away() -> str:
    """Returns the error of a rank whose kernel waits for a rank that never makes the call."""
    group = ProcessGroup.with_peer_memory()
    group.peer_time_limit_s = 1.0
    x = torch.ones(64, 64, device="cuda")
    tk.all_reduce(x, group)
    torch.cuda.synchronize()
    if group.rank == 1:
        return ""
    tk.all_reduce(x, group)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def one_is_killed() -> None:
    """Kills rank 1 while the other rank's kernel waits for it."""
    group = ProcessGroup.with_peer_memory()
    group.peer_time_limit_s = 0.5
    x = torch.ones(64, 64, device="cuda")
    tk.all_reduce(x, group)
    torch.cuda.synchronize()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tk.all_reduce(x, group)
    torch.cuda.synchronize()


def compiled() -> float:
    """Returns the largest difference between the results of a compiled function and of a direct call."""
    group = ProcessGroup.with_peer_memory()
    device = group.device or "cpu"
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    function = torch.compile(lambda x: tk.all_reduce_rmsnorm(x, weight, group) + 1, fullgraph=True, backend="aot_eager")
    # Both sums are rounded alike. Subtracting 1 from the compiled result would leave the rounding error of the addition.
    return float((function(x) - (tk.all_reduce_rmsnorm(x, weight, group) + 1)).abs().max())


# -- tests ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted")
def test_every_kernel_on_every_case_for_two() -> None:
    first, second = run_world(every_case, 2, (False,))
    for outcomes in (first, second):
        assert_none_wrong([each for results in outcomes.values() for each in results])
    passed = {name for name, results in first.items() if any(each.status.value == "passed" for each in results)}
    # With two ranks the two-shot kernels are not eligible; `test_sums_of_peers` requests them by name. CuteDSL kernels need a GPU.
    assert {name for name in first if "two_shot" in name or name.startswith("cutedsl")} == first.keys() - passed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.nvidia, two_gpus])])
def test_words_of_ranks(device: str) -> None:
    first, second = run_world(words_of_ranks, 2, device=device)
    assert first[1] == second[1]
    assert "alone: group must have peer memory" in first[0]
    assert "count=1) on rank 0, shared_words(name=other, count=2) on rank 1" in first[1]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_of_peers(world_size: int) -> None:
    assert run_world(sums_of_peers, world_size) == [[]] * world_size


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.nvidia, two_gpus])])
def test_calls_that_differ(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("interpreted")
    (*differing, late), others = run_world(calls_that_differ, 2, device=device)
    assert differing == others
    assert "all_reduce(x: float32 [64], by=one_shot) on rank 0, all_reduce(x: float32 [68], by=one_shot) on rank 1" in differing[0]
    assert "by=one_shot) on rank 0, all_reduce(x: float32 [64], by=two_shot) on rank 1" in differing[2]
    assert "all_gather(x: float32 [2]) on rank 0, all_gather(x: float32 [3]) on rank 1" in differing[3]
    assert "rank 0 of 2 waited 1 s for all ranks to make this call for the first time" in late


@pytest.mark.usefixtures("interpreted")
def test_experts_of_ranks() -> None:
    for differences in run_world(experts_of_ranks, 2):
        assert max(differences) < 1e-4


def test_protocols_by_size() -> None:
    """The size of a message must determine the protocol by a table that is the same in every process."""
    assert [one_shot_most(size) for size in (2, 3, 4, 5, 8, 16)] == [ONE_SHOT_MOST[size] for size in (2, 3, 4, 8, 8, 8)]
    memory = PeerMemory(1, 4, torch.device("cpu"), 1 << 20, 1 << 20)
    assert memory.protocol(ONE_SHOT_MOST[4], CHUNK) == ONE_SHOT
    assert memory.protocol(ONE_SHOT_MOST[4] + CHUNK, CHUNK) == TWO_SHOT
    assert memory.protocol(1 << 20, CHUNK) == TWO_SHOT
    assert memory.protocol((1 << 20) + CHUNK, CHUNK).startswith("none: ")
    assert memory.protocol(100, CHUNK) == "none: 100 bytes are not a multiple of 16"
    # The size of a row is rounded up to a multiple of `UNIT`, and each rank's share to whole rows.
    assert PeerMemory(0, 2, torch.device("cpu"), 5 * UNIT, 0).protocol(5 * 16, 16) == ONE_SHOT
    assert (
        PeerMemory(0, 2, torch.device("cpu"), 5 * UNIT, 0).protocol(6 * 16, 16)
        == "none: 3072 bytes exceed the 2560 bytes of peer memory for one_shot"
    )
    assert PeerMemory(0, 2, torch.device("cpu"), 0, 5 * UNIT).protocol(6 * 16, 16) == TWO_SHOT


@pytest.mark.parametrize(("world_size", "rows", "protocol"), [(2, 8192, ONE_SHOT), (4, 32, ONE_SHOT), (4, 64, TWO_SHOT)])
def test_fused_operators_use_the_protocol_of_all_reduce(world_size: int, rows: int, protocol: str) -> None:
    with as_rank_of(world_size):
        group = tk.ProcessGroup.with_peer_memory()
        x, weight = torch.empty(rows, 2880, dtype=torch.bfloat16), torch.empty(2880, dtype=torch.bfloat16)
        calls: dict[str, dict[str, Any]] = {
            "all_reduce": {},
            "all_reduce_rmsnorm": {"weight": weight, "residual": x},
            "all_reduce_rmsnorm_quantize": {"weight": weight, "residual": x, "quantization": tk.Quantization.fp8()},
        }
        for name, more in calls.items():
            op = tk.get_operator(name)
            assert op.request(op.complete({"x": x, "group": group, **more})).traits["protocol"] == protocol, name


def test_memory_of_ranks_does_not_overlap() -> None:
    """Messages of two ranks to rank 0 must use disjoint memory, in both halves of the double buffer, and must stay within rank 0's
    memory."""
    size = 3
    memories = [PeerMemory(rank, size, torch.device("cpu"), 3 * UNIT, 7 * UNIT) for rank in range(size)]
    bases = [10**6 * (rank + 1) for rank in range(size)]
    for memory in memories:
        memory.found(bases)
    spans: list[tuple[int, int]] = []
    for sender in memories[1:]:
        to_first = size - 1 - sender.rank  # targets begin with the rank after the sender
        for turn in range(2):
            one = sender.one_shot[to_first] + turn * size * sender.one_shot_bytes
            two = sender.two_shot[to_first] + turn * size * sender.share_bytes
            spans += [(one, one + sender.one_shot_bytes), (two, two + sender.share_bytes)]
    # Sums of rows may share an address, because each row's sum has one sender, the row's owner.
    assert {sender.sums[size - 1 - sender.rank] for sender in memories[1:]} == {memories[0].sums_source}
    for turn in range(2):
        begin = memories[0].sums_source + turn * memories[0].two_shot_bytes
        spans.append((begin, begin + memories[0].two_shot_bytes))
    spans.sort()
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert spans[0][0] >= bases[0]
    assert spans[-1][1] == bases[0] + memories[0].nbytes


def test_no_vector_is_sent_by_several_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compilation must fail if several threads would send the same vector. A duplicate could arrive after the vector was read, and
    be mistaken for a vector of a later call."""
    from rank_kernels import send
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target))

    def compiled_for(count: int) -> Any:
        source = ASTSource(send, {"address": "i64", "COUNT": "constexpr"}, {"COUNT": count})
        return triton.compile(source, target=target, options={"num_warps": 4})

    assert "st.relaxed.sys" in compiled_for(128).asm["ptx"]
    with pytest.raises(triton.compiler.CompilationError) as refused:
        compiled_for(64)
    messages, error = [], refused.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__  # type: ignore[assignment]
    assert "a vector would be sent by several threads" in "".join(messages)


def test_a_process_that_is_alone_has_no_peers() -> None:
    group = ProcessGroup.with_peer_memory()
    assert group is ProcessGroup.of()
    assert (group.peers, group.peer_gap) == (None, "the group has one rank")
    with pytest.raises(ValueError, match=r"all_reduce: group .* peer memory .* has one rank"):
        one_shot_all_reduce(torch.ones(4), group, None)


@pytest.mark.usefixtures("interpreted")
def test_ranks_out_of_step() -> None:
    assert run_world(ranks_out_of_step, 2, (3,)) == [[], []]


@pytest.mark.nvidia
@two_gpus
def test_every_kernel_on_every_case_on_two_gpus() -> None:
    for outcomes in run_world(every_case, 2, (True,), device="cuda"):
        assert [f"{e.kernel} on {e.case}: {e.reason}" for results in outcomes.values() for e in results if e.wrong] == []
        assert outcomes["triton_one_shot_all_reduce_rmsnorm"][-1].status.value == "passed"
        if torch.cuda.get_device_capability() == (9, 0) and "cutedsl_decoder_layers" in outcomes:
            assert outcomes["cutedsl_decoder_layers"][-1].status.value == "passed"


@pytest.mark.nvidia
@two_gpus
def test_sums_of_peers_on_two_gpus() -> None:
    assert run_world(sums_of_peers, 2, device="cuda") == [[], []]


@pytest.mark.nvidia
@two_gpus
def test_ranks_out_of_step_on_two_gpus() -> None:
    assert run_world(ranks_out_of_step, 2, (2000,), device="cuda") == [[], []]


@pytest.mark.nvidia
@two_gpus
def test_a_rank_that_stays_away_ends_the_wait_on_two_gpus() -> None:
    said, _ = run_world(one_stays_away, 2, device="cuda")
    assert "launch failure" in said


@pytest.mark.nvidia
@two_gpus
def test_a_rank_that_is_killed_ends_the_wait_on_two_gpus() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(one_is_killed, 2, device="cuda")
    assert "rank 1 of 2: ended without a result" in str(caught.value)
    assert "launch failure" in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.nvidia, two_gpus])])
def test_compiled(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("interpreted")
    assert run_world(compiled, 2, device=device) == [0.0, 0.0]


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=10000)
    options = parser.parse_args()
    began = time.monotonic()
    wrong = run_world(ranks_out_of_step, options.ranks, (options.replays,), device="cuda")
    said = wrong if any(wrong) else "nothing wrong"
    print(f"{options.replays} replays on {options.ranks} ranks in {time.monotonic() - began:.0f} s: {said}")
    raise SystemExit(any(wrong))
