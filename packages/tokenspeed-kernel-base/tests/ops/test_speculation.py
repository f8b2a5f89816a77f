"""Tests that verification of drafts preserves the target's distribution, by chi-square tests against Markov chains, whose
distributions are known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel_base.ops.sampling.philox import uniform, uniform_of
from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import sample_top_k_top_p
from tokenspeed_kernel_base.ops.sampling.top_k_top_p_probs import top_k_top_p_probs
from tokenspeed_kernel_base.ops.speculation.verify_draft_probs import verify_draft_probs
from tokenspeed_kernel_base.ops.speculation.verify_draft_tokens import verify_draft_tokens

VOCAB, MANY = 5, 30000
# The probability that random samples of a correct implementation fail a test. Seeds are fixed, so a test fails in every run or in
# none.
ALPHA = 1e-4
CHAIN = [-1, 0, 1, 2]
BUSH = [-1, 0, 0, 0, 1, 1, 2, 4]
TREES = {"chain": CHAIN, "bush": BUSH, "siblings": [-1, 0, 0, 0, 0, 0], "a gap": [-1, 0, -1, 0, 3, 3]}


def transitions(seed: int, warmth: float = 1.0) -> Tensor:
    """Draws the distribution of the next token after each token, float32 ``[VOCAB, VOCAB]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(VOCAB, VOCAB, generator=generator) / warmth, dim=-1)


def sample(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() / probs.double().sum() * counts.sum()
    used = expected > 0
    assert (counts[~used] == 0).all(), "something impossible happened"
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1).double() / 2, statistic / 2))


def drafted(tree: list[int], draft: Tensor, root: int, generator: torch.Generator) -> Tensor:
    """Draws trees, ``[MANY, nodes]``, whose nodes are samples of the draft model."""
    tokens = torch.full((MANY, len(tree)), root)
    for node in range(1, len(tree)):
        tokens[:, node] = sample(draft[tokens[:, max(tree[node], 0)]], generator)
    return tokens


def first_three(tokens: Tensor, counts: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Counts how often each sequence of three tokens is emitted. If a call emits fewer than three tokens, the remaining tokens are
    sampled from the target."""
    emitted = tokens[:, :3].clone()
    for at in range(1, 3):
        more = sample(target[emitted[:, at - 1]], generator)
        emitted[:, at] = torch.where(counts > at, emitted[:, at], more)
    index = (emitted[:, 0] * VOCAB + emitted[:, 1]) * VOCAB + emitted[:, 2]
    return torch.bincount(index, minlength=VOCAB**3)


def wanted_three(target: Tensor, root: int) -> Tensor:
    return torch.einsum("a,ab,bc->abc", target[root], target, target).flatten()


@pytest.mark.parametrize("warmth", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("name", TREES)
def test_drawn_drafts_keep_the_distribution(name: str, warmth: float) -> None:
    tree, root = TREES[name], 2
    target, draft = transitions(1), transitions(2, warmth)
    generator = torch.Generator().manual_seed(len(tree))
    tokens = drafted(tree, draft, root, generator)
    parents = torch.tensor(tree, dtype=torch.int32).expand(MANY, -1)
    seed, offset = torch.arange(MANY) * 7919, torch.full((MANY,), 11)
    arguments = (target[tokens], draft[tokens], tokens, seed, offset, None if name == "chain" else parents)
    emitted, path, counts = verify_draft_probs(*arguments)
    assert ((path >= 0).sum(1) == counts).all()
    assert chi_square_p_value(first_three(emitted, counts, target, generator), wanted_three(target, root)) > ALPHA
    if name == "chain":  # the acceptance rate of the first draft is known
        expected = torch.minimum(target[root], draft[root]).sum().item()
        accepted = (counts > 1).double().mean().item()
        assert abs(accepted - expected) < 4 * math.sqrt(expected * (1 - expected) / MANY)


def test_speculation_by_operators_alone_is_sampling() -> None:
    """Drafts, computes the distributions and verifies with operators alone, with top-p. The first emitted token must be distributed
    like the target's own samples."""
    generator = torch.Generator().manual_seed(3)
    target_logits, draft_logits = (torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    root, seed = torch.full((MANY,), 2), torch.arange(MANY)
    request = (torch.full((MANY,), 0.9), torch.full((MANY,), 4, dtype=torch.int32), torch.full((MANY,), 0.85))

    drafted = sample_top_k_top_p(draft_logits[root], *request, seed, torch.full((MANY,), 8))
    draft_probs = top_k_top_p_probs(draft_logits[root], *request)
    tokens = torch.stack((root, drafted), 1)
    target_probs = torch.stack([top_k_top_p_probs(target_logits[tokens[:, node]], *request) for node in range(2)], 1)
    emitted, _, counts = verify_draft_probs(target_probs, draft_probs.unsqueeze(1), tokens, seed, torch.full((MANY,), 7))

    assert (counts == 2).any()
    assert (counts == 1).any()
    frequencies = torch.bincount(emitted[:, 0], minlength=VOCAB)
    assert (target_probs[0, 0] == 0).any()
    assert chi_square_p_value(frequencies, target_probs[0, 0]) > ALPHA


def test_more_siblings_are_accepted_more_often() -> None:
    target, draft = transitions(1), transitions(2)
    shares = []
    for siblings in range(1, 5):
        tree = [-1] + [0] * siblings
        tokens = drafted(tree, draft, 0, torch.Generator().manual_seed(siblings))
        parents = torch.tensor(tree, dtype=torch.int32).expand(MANY, -1)
        arguments = (target[tokens], draft[tokens], tokens, torch.arange(MANY), torch.zeros(MANY, dtype=torch.int64), parents)
        shares.append((verify_draft_probs(*arguments)[2] > 1).double().mean().item())
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.1


@pytest.mark.parametrize("name", TREES)
def test_chosen_drafts_and_samples_of_the_target_keep_the_distribution(name: str) -> None:
    """Gives all sequences the same drafts, the most probable tokens of the draft model."""
    tree, root = TREES[name], 1
    target, draft = transitions(3), transitions(4)
    tokens, used = [root], [0] * len(tree)
    for node in range(1, len(tree)):
        parent = max(tree[node], 0)
        tokens.append(int(draft[tokens[parent]].argsort(descending=True)[used[parent] % VOCAB]))
        used[parent] += 1
    drafts = torch.tensor(tokens).expand(MANY, -1)
    generator = torch.Generator().manual_seed(7)
    samples = sample(target[drafts].flatten(0, 1), generator).view(MANY, -1)
    parents = torch.tensor(tree, dtype=torch.int32).expand(MANY, -1)
    emitted, _, counts = verify_draft_tokens(samples, drafts, parents)
    assert chi_square_p_value(first_three(emitted, counts, target, generator), wanted_three(target, root)) > ALPHA


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 999), st.data())
def test_greedy_verification_is_greedy_decoding(nodes: int, seed: int, data: st.DataObject) -> None:
    target = transitions(seed).argmax(-1)
    tree = [-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, nodes)]
    drafts = [data.draw(st.integers(0, VOCAB - 1)) for _ in range(nodes)]
    tokens = torch.tensor([drafts])
    emitted, path, counts = verify_draft_tokens(target[tokens], tokens, torch.tensor([tree], dtype=torch.int32))
    count = int(counts)
    decoded = [drafts[0]]
    for _ in range(count):
        decoded.append(int(target[decoded[-1]]))
    assert emitted[0, :count].tolist() == decoded[1:]
    assert (emitted[0, count:] == -1).all()
    assert (path[0, count:] == -1).all()
    walk = path[0, :count].tolist()
    assert walk[0] == 0
    assert all(tree[after] == before for before, after in itertools.pairwise(walk))
    assert not any(tree[node] == walk[-1] and drafts[node] == decoded[-1] for node in range(1, nodes)), "it might have gone on"


def drawn_tree(draw: random.Random, nodes: int) -> list[int]:
    """Draws the parents of a tree; some are outside 0 to i - 1, so their nodes are absent."""
    return [draw.randrange(i) if i and draw.random() < 0.9 else draw.choice([-1, -7, i, nodes + 3]) for i in range(nodes)]


def children(tree: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(tree) if parent == node and node < i]


def test_matching_tokens_are_those_of_a_walk_node_by_node() -> None:
    draw = random.Random(0)
    for _ in range(500):
        nodes, vocab = draw.choice([1, 2, 5, 12]), draw.choice([1, 2, 3])
        tree = drawn_tree(draw, nodes)
        target, drafts = ([draw.randrange(low, vocab) for _ in range(nodes)] for low in (0, -1))
        path = [0]
        while following := [i for i in children(tree, path[-1]) if drafts[i] == target[path[-1]]]:
            path.append(following[0])
        got = verify_draft_tokens(torch.tensor([target]), torch.tensor([drafts]), torch.tensor([tree], dtype=torch.int32))
        padding = [-1] * (nodes - len(path))
        assert [x.tolist() for x in got] == [[[target[i] for i in path] + padding], [path + padding], [len(path)]]


def walk(p: Tensor, q: Tensor, drafts: list[int], tree: list[int], numbers: list[float]) -> tuple[list[int], list[int], float]:
    """Follows steps 1 to 3 of the docstring of `verify_draft_probs` for one sequence. Returns the emitted tokens, the path, and how
    close the nearest decision was."""
    path, emitted, closest = [0], [], 1.0
    while True:
        node = path[-1]
        residual, accepted = p[node].clone(), None
        for child in children(tree, node) if node < len(q) else []:
            token = drafts[child]
            if not 0 <= token < p.shape[1]:
                continue
            margin = float(residual[token] - numbers[child] * q[node, token])
            closest = min(closest, abs(margin))
            if margin > 0:
                accepted = child
                break
            residual = (residual - q[node]).clamp(min=0)
            closest = min(closest, float(residual.sum()))
            residual = residual / residual.sum()
        if accepted is None:
            break
        path.append(accepted)
        emitted.append(drafts[accepted])
    cumulative = residual.cumsum(0) / residual.sum()
    closest = min(closest, float((cumulative - numbers[0]).abs().min()))
    return [*emitted, int((cumulative <= numbers[0]).sum())], path, closest


def test_accepted_and_replaced_drafts_are_those_of_a_walk_node_by_node() -> None:
    torch.manual_seed(0)
    draw, decided = random.Random(0), 0
    for _ in range(300):
        nodes, vocab = draw.choice([1, 2, 4, 9]), draw.choice([2, 3, 7])
        inner = draw.choice([0, 1, nodes - 1, nodes])
        target, draft = (torch.softmax(torch.randn(1, n, vocab) * draw.choice([0.3, 1, 3]), -1) for n in (nodes, inner))
        tree, drafts = drawn_tree(draw, nodes), [draw.randrange(-1, vocab + 1) for _ in range(nodes)]
        seed, offset = (torch.tensor([draw.randrange(-(2**63), 2**63)]) for _ in range(2))
        numbers = [float(uniform_of(seed, offset, i)) for i in range(nodes)]
        emitted, path, closest = walk(target[0].double(), draft[0].double(), drafts, tree, numbers)
        if closest < 1e-6:  # rounding decides
            continue
        decided += 1
        parents = torch.tensor([tree], dtype=torch.int32)
        got = verify_draft_probs(target, draft, torch.tensor([drafts]), seed, offset, parents)
        padding = [-1] * (nodes - len(path))
        assert [x.tolist() for x in got] == [[emitted + padding], [path + padding], [len(path)]]
    assert decided > 280


def test_equal_models_accept_everything_and_strangers_nothing() -> None:
    target = transitions(5)
    tokens = drafted(CHAIN, target, 0, torch.Generator().manual_seed(0))[:100]
    rest = (torch.arange(100), torch.zeros(100, dtype=torch.int64))
    emitted, _, counts = verify_draft_probs(target[tokens], target[tokens], tokens, *rest)
    assert (counts == len(CHAIN)).all()
    assert torch.equal(emitted[:, :3], tokens[:, 1:])
    low, high = torch.zeros(100, 4, VOCAB), torch.zeros(100, 4, VOCAB)
    low[..., 0], high[..., 3:] = 1.0, 0.5
    emitted, _, counts = verify_draft_probs(high, low, torch.zeros(100, 4, dtype=torch.int64), *rest)
    assert (counts == 1).all()
    assert ((emitted[:, 0] == 3) | (emitted[:, 0] == 4)).all()
    assert len(emitted[:, 0].unique()) == 2


def test_rows_that_need_not_be_read_may_hold_anything() -> None:
    target, draft = transitions(1), transitions(2)
    tokens = drafted(CHAIN, draft, 0, torch.Generator().manual_seed(0))[:50]
    arguments: dict[str, Any] = {
        "draft_tokens": tokens,
        "seed": torch.arange(50),
        "offset": torch.zeros(50, dtype=torch.int64),
    }
    target_probs, draft_probs = target[tokens], draft[tokens]
    wanted = verify_draft_probs(target_probs, draft_probs[:, :3], **arguments)
    draft_probs[:, 3] = math.nan
    reached = torch.arange(4) < wanted[2].unsqueeze(1)
    target_probs[~reached] = math.nan
    got = verify_draft_probs(target_probs, draft_probs, **arguments)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_probability_that_is_not_finite_is_that_of_no_token(bad: float) -> None:
    count = 200
    tokens, rest = torch.ones(count, 2, dtype=torch.int64), (torch.arange(count), torch.zeros(count, dtype=torch.int64))
    target, drafts = torch.tensor([0.0, 0.25, 0.25, 0.5]).repeat(count, 2, 1), torch.full((count, 1, 4), 0.25)
    emitted, _, counts = verify_draft_probs(target, drafts, tokens, *rest)
    assert set(emitted[:, 0].tolist()) == {1}  # token 1 has equal probability in both models
    assert (counts == 2).all()

    for spoilt in (target, drafts):  # token 1 must be neither accepted nor sampled
        kept = spoilt[:, :, 1].clone()
        spoilt[:, :, 1] = bad
        emitted, _, counts = verify_draft_probs(target, drafts, tokens, *rest)
        assert (counts == 1).all()
        assert set(emitted[:, 0].tolist()) <= {2, 3}
        spoilt[:, :, 1] = kept

    emitted, _, counts = verify_draft_probs(target, torch.full_like(drafts, math.nan), tokens, *rest)
    assert (counts == 1).all()
    assert set(emitted[:, 0].tolist()) == {1, 2, 3}, "samples of the target"
    emitted, _, _ = verify_draft_probs(torch.full_like(target, bad), drafts, tokens, *rest)
    assert (emitted[:, 0] == 0).all()


def test_random_numbers_are_uniform_and_independent_of_sampling() -> None:
    seed, offset = torch.arange(MANY), torch.full((MANY,), -5)
    numbers = torch.stack([uniform_of(seed, offset, draw) for draw in range(3)] + [uniform(seed, offset).double()])
    assert numbers.dtype == torch.float64
    assert ((numbers >= 0) & (numbers < 1)).all()
    for row in numbers:
        assert chi_square_p_value(torch.histc(row, 50, 0, 1), torch.ones(50)) > ALPHA
    assert torch.corrcoef(numbers).sub(torch.eye(4)).abs().max() < 5 / math.sqrt(MANY)
    assert torch.equal(uniform_of(seed, offset, torch.ones(MANY, dtype=torch.int64)), numbers[1])


def probs_arguments() -> dict[str, Any]:
    target = transitions(1)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    return {
        "target_probs": target[tokens],
        "draft_probs": target[tokens][:, :2],
        "draft_tokens": tokens,
        "seed": torch.tensor([1, 2]),
        "offset": torch.tensor([0, 9]),
        "parents": torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32),
    }


WRONG_PROBS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target_probs": torch.ones(2, 3, 5).half()}, TypeError, "target_probs must be a tensor of float32, got float16"),
    ({"target_probs": torch.ones(2, 4, 5)}, ValueError, "target_probs must be of shape .* where nodes is 3 in draft_tokens"),
    ({"draft_probs": torch.ones(2, 2, 6)}, ValueError, "draft_probs must be of shape .* where vocab is 5 in target_probs"),
    ({"draft_probs": torch.ones(2, 4, 5)}, ValueError, "draft_probs must be of at most 3 rows, one for each node"),
    ({"draft_tokens": torch.ones(2, 3)}, TypeError, "draft_tokens must be a tensor of int32 or int64"),
    ({"parents": torch.ones(2, 3).long()}, TypeError, "parents must be a tensor of int32, got int64"),
    ({"seed": torch.tensor([1, 2, 3])}, ValueError, "seed must be of shape .* where batch is 2"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_PROBS)
def test_wrong_probabilities_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^verify_draft_probs: .*{message}"):
        verify_draft_probs(**{**probs_arguments(), **changes})


def test_wrong_tokens_are_refused() -> None:
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^verify_draft_tokens: target.* int64, got int32"):
        verify_draft_tokens(tokens.int(), tokens)
    with pytest.raises(ValueError, match=r"^verify_draft_tokens: target_tokens .* nodes is 3"):
        verify_draft_tokens(tokens[:, :2], tokens)
    with pytest.raises(ValueError, match=r"^verify_draft_tokens: draft_tokens .* nodes > 0"):
        verify_draft_tokens(tokens[:, :0], tokens[:, :0])


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    arguments = probs_arguments()
    check_custom_op(verify_draft_probs, arguments)
    tokens = arguments["draft_tokens"]
    check_custom_op(verify_draft_tokens, {"target_tokens": tokens, "draft_tokens": tokens, "parents": arguments["parents"]})
