"""Acceptance rules: χ² against the target's exact probabilities, mutants that the same statistic must reject, and a slow twin for trees.

The target is a Markov chain over 8 tokens, so that exact conditional probabilities per prefix are a table; verify() is called directly,
20,000 rows at a time.

Shape suffixes: B rows (draws), N nodes, V vocabulary, L output positions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference import verify as verify_module
from draftheads.inference.drafters.composite import merge
from draftheads.inference.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling, log_probs
from draftheads.inference.verify import Verdict, verify

V, ROOT, L, DRAWS, P_VALUE = 8, 3, 3, 20_000, 1e-4
Verify = Callable[[DraftTree, Tensor, RowSampling, Noise, Tensor], Verdict]
Draft = Callable[..., DraftTree]
Rounds = Callable[[Tensor, Tensor], Noise]


def fresh(seeds_B: Tensor, roots_B: Tensor) -> Noise:
    return Noise(seeds_B, roots_B)


def tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [V (previous token), V] of the target and of a deliberately different draft."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(V, V, generator=g) * 1.5, torch.randn(V, V, generator=g) * 1.5


def sampled_chain(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor) -> DraftTree:
    """γ tokens drawn from the draft chain, with the q they were drawn from."""
    drafts, q, last_B = [], [], root_B
    for j in range(int(gamma_B.max())):
        logq_BV = logq_VV[last_B]
        last_B = (logq_BV + noise.gumbel((positions_B + 1 + j)[:, None], DRAFT, V)[:, 0]).argmax(-1)
        drafts.append(last_B)
        q.append(logq_BV.exp())
    return DraftTree.chain(root_B, torch.stack(drafts, 1), gamma_B, torch.stack(q, 1))


def greedy_chain(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor) -> DraftTree:
    drafts = [root_B]
    for _ in range(int(gamma_B.max())):
        drafts.append(logq_VV[drafts[-1]].argmax(-1))
    return DraftTree.chain(root_B, torch.stack(drafts[1:], 1), gamma_B)


STATIC = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WIDTHS = (3, 2, 1)


def static_tree(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor) -> DraftTree:
    """Paths of ranks, as far as γ: the same shape for every row."""
    order_VV = logq_VV.argsort(-1, descending=True)
    nodes, tokens = [(), *STATIC], [root_B]
    for path in STATIC:
        tokens.append(order_VV[tokens[nodes.index(path[:-1])], path[-1]])
    parents_N = torch.tensor([-1, *(nodes.index(path[:-1]) for path in STATIC)])
    depths_N = torch.tensor([len(path) for path in nodes])
    return DraftTree(torch.stack(tokens, 1), parents_N.expand(len(root_B), -1), depths_N <= gamma_B[:, None])


def dynamic_tree(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor) -> DraftTree:
    """The 7 likeliest paths of at most 3 drafts, by the product of draft probabilities: every root token has a shape of its own."""
    tables = [(torch.tensor(t), torch.tensor(p), torch.tensor(d)) for t, p, d in (likeliest(root, logq_VV) for root in range(V))]
    tokens_VN, parents_VN, depths_VN = (torch.stack(part) for part in zip(*tables, strict=True))
    return DraftTree(tokens_VN[root_B], parents_VN[root_B], depths_VN[root_B] <= gamma_B[:, None])


def likeliest(root: int, logq_VV: Tensor, nodes: int = 7) -> tuple[list[int], list[int], list[int]]:
    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    while len(tokens) <= nodes:
        taken = set(zip(parents, tokens, strict=True))
        score, parent, token = max((scores[i] + float(logq_VV[tokens[i], t]), i, t) for i in range(len(tokens)) if depths[i] < 3
                                   for t in range(V) if (i, t) not in taken)
        for values, value in ((tokens, token), (parents, parent), (depths, depths[parent] + 1), (scores, score)):
            values.append(value)  # type: ignore[attr-defined]
    return tokens, parents, depths


def sampled_tree(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor, widths: tuple[int, ...] = WIDTHS) -> DraftTree:
    """Children without replacement (Gumbel-top-k), each group with the q it was drawn from; where q has fewer tokens, the rest is arbitrary."""
    B, widths = len(root_B), widths[: int(gamma_B.max())]
    level_BW, first, tokens, parents, q = root_B[:, None], 0, [root_B[:, None]], [torch.full((B, 1), -1)], [torch.zeros(B, 1, V)]
    valid = [torch.ones(B, 1, dtype=torch.bool)]
    for depth, width in enumerate(widths):
        W = level_BW.shape[1]
        gumbel_BWV = noise.gumbel((positions_B + 1 + depth)[:, None], DRAFT, W * V).view(B, W, V)
        q.append(logq_VV[level_BW].exp().repeat_interleave(width, 1))
        parents.append((first + torch.arange(W)).repeat_interleave(width).expand(B, -1))
        first, level_BW = first + W, (logq_VV[level_BW] + gumbel_BWV).topk(width).indices.flatten(1)
        tokens.append(level_BW)
        valid.append((gamma_B > depth)[:, None].expand(B, W * width))
    return DraftTree(*(torch.cat(part, 1) for part in (tokens, parents, valid, q)), widths=widths)


def outputs(draft: Draft, rule: Verify, sampling: Sampling, gamma: int | None = 3, rounds: Rounds = fresh,
            draws: int = DRAWS) -> Tensor:
    """The first L tokens [B, L] after ROOT, over as many rounds as that takes. gamma None: rows draft 0 … 3 tokens (a depth limit a row)."""
    target_VV, draft_VV = tables()
    logq_VV = processed(draft_VV, sampling)
    gamma_B = torch.arange(draws) % 4 if gamma is None else torch.full((draws,), gamma)
    out_BL = torch.full((draws, L + 8), -1)
    length_B, root_B = torch.zeros(draws, dtype=torch.long), torch.full((draws,), ROOT)
    while len(todo_A := (length_B < L).nonzero()[:, 0]):  # A rows that are not full yet
        start_A = length_B[todo_A]
        noise = rounds(todo_A, 20 + start_A)
        tree = draft(root_B[todo_A], gamma_B[todo_A], logq_VV, noise, 20 + start_A)
        rows = RowSampling.of([None] * len(todo_A), sampling)
        verdict = rule(tree, target_VV[tree.tokens_BN], rows, noise, 20 + start_A)
        said_AM = torch.nn.functional.pad(tree.tokens_BN.gather(1, verdict.path_BM)[:, 1:], (0, 1))
        said_AM.scatter_(1, verdict.counts_B[:, None], verdict.next_B[:, None])
        for i in range(min(L, tree.width)):
            write_A = i <= verdict.counts_B
            out_BL[todo_A[write_A], start_A[write_A] + i] = said_AM[write_A, i]
        length_B[todo_A], root_B[todo_A] = start_A + verdict.counts_B + 1, verdict.next_B
    return out_BL[:, :L]


def p_value(tokens_BL: Tensor, sampling: Sampling, eos: int | None = None, fewest: int = 10) -> float:
    """χ² of the next token's frequencies given every prefix, summed over prefixes; cells expected below 5 are pooled per prefix.
    Prefixes that contain eos are left out: an answer that has ended has no next token. A token of probability 0 fails at once."""
    p_VV = processed(tables()[0], sampling).exp().double()
    chi2, freedom = 0.0, 0
    key_B, alive_B = torch.full((len(tokens_BL),), ROOT), torch.ones(len(tokens_BL), dtype=torch.bool)  # key: the prefix, its last token last
    for length in range(L):
        token_B = tokens_BL[:, length]
        seen_PV = torch.bincount(key_B[alive_B] * V + token_B[alive_B], minlength=V ** (length + 2)).double().view(-1, V)
        p_PV = p_VV[torch.arange(len(seen_PV)) % V]
        if bool((seen_PV[p_PV == 0] > 0).any()):
            return 0.0
        expected_PV = p_PV * seen_PV.sum(-1, keepdim=True)
        big_PV = expected_PV >= 5
        pooled_P2 = [(x_PV * ~big_PV).sum(-1, keepdim=True) for x_PV in (seen_PV, expected_PV)]
        seen_PC, expected_PC = torch.cat([seen_PV * big_PV, pooled_P2[0]], -1), torch.cat([expected_PV * big_PV, pooled_P2[1]], -1)
        cell_PC = expected_PC >= 5
        seen_PC, expected_PC = seen_PC * cell_PC, expected_PC * cell_PC
        expected_PC = expected_PC * (seen_PC.sum(-1, keepdim=True) / expected_PC.sum(-1, keepdim=True).clamp(min=1e-9))
        chi2 += float(torch.where(cell_PC, (seen_PC - expected_PC) ** 2 / expected_PC.clamp(min=1e-9), 0.0).sum())
        freedom += int((cell_PC.sum(-1) - 1).clamp(min=0).sum())
        alive_B = alive_B & (token_B != (V if eos is None else eos))
        key_B = key_B * V + token_B
    assert freedom >= fewest
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(chi2 / 2.0).double()))


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    return log_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


PROCESSED = {
    "T": Sampling(0.7), "top-k": Sampling(0.7, top_k=3), "top-p": Sampling(0.7, top_p=0.8), "min-p": Sampling(0.9, min_p=0.15),
    "all of them": Sampling(1.2, top_k=5, top_p=0.9, min_p=0.05),
}
HOT, NARROW = PROCESSED["T"], Sampling(0.7, top_k=2)
DRAFTS = {"sampled chain": sampled_chain, "greedy chain": greedy_chain, "static tree": static_tree, "dynamic tree": dynamic_tree,
          "sampled tree": sampled_tree}


@functools.lru_cache
def verified(draft: str, sampling: Sampling, gamma: int | None) -> Tensor:
    return outputs(DRAFTS[draft], verify, sampling, gamma)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", PROCESSED)
@pytest.mark.parametrize("gamma", [3, 1, None], ids=["whole", "bonus", "depth limits"])
def test_tokens_are_draws_from_the_target(draft: str, sampling: str, gamma: int | None) -> None:
    """γ = 1 puts the bonus token inside the tested positions; None mixes rows of 0 … 3 drafts in one tree."""
    assert p_value(verified(draft, PROCESSED[sampling], gamma), PROCESSED[sampling]) > P_VALUE


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", PROCESSED)
def test_an_end_token_inside_the_block_leaves_the_rest_unbiased(draft: str, sampling: str) -> None:
    """Cut at the end token, as decode does: what comes after it does not count."""
    eos = int(processed(tables()[0], PROCESSED[sampling])[ROOT].argmax())
    tokens_BL = verified(draft, PROCESSED[sampling], 3)
    assert bool((tokens_BL[:, 0] == eos).any()) and p_value(tokens_BL, PROCESSED[sampling], eos=eos) > P_VALUE


def test_more_children_than_the_draft_has_tokens() -> None:
    """q is exhausted after two of three children."""
    assert p_value(outputs(sampled_tree, verify, NARROW), NARROW, fewest=3) > P_VALUE


# ---- mutants: each must fail the statistic that the real rule passes


def mutant(old: str, new: str) -> Verify:
    source = inspect.getsource(verify_module)
    assert source.count(old) == 1, old
    scope: dict[str, object] = {"__name__": verify_module.__name__}  # dataclasses look their module up
    exec(compile(source.replace(old, new), "mutant", "exec"), scope)
    return scope["verify"]  # type: ignore[return-value]


def forgot_temperature_on_bonus(tree: DraftTree, logits_BNV: Tensor, rows: RowSampling, noise: Noise, positions_B: Tensor) -> Verdict:
    verdict = verify(tree, logits_BNV, rows, noise, positions_B)
    raw = verify(tree, logits_BNV, replace(rows, temperature_B=torch.ones_like(rows.temperature_B)), noise, positions_B)
    whole_B = (verdict.counts_B == verdict.drafted_B) & (verdict.path_BM == raw.path_BM).all(-1)
    return replace(verdict, next_B=torch.where(whole_B, raw.next_B, verdict.next_B))


def sorted_siblings(tree: DraftTree, logits_BNV: Tensor, rows: RowSampling, noise: Noise, positions_B: Tensor) -> Verdict:
    """Siblings of a γ = 1 tree by probability instead of in the order in which they were drawn."""
    assert tree.q_BNV is not None and tree.widths == WIDTHS[:1]
    order_BN = tree.q_BNV.gather(-1, tree.tokens_BN[..., None])[..., 0].index_fill(1, torch.tensor([0]), 2.0).argsort(-1, descending=True)
    tokens_BN = tree.tokens_BN.gather(1, order_BN)
    verdict = verify(replace(tree, tokens_BN=tokens_BN), logits_BNV.gather(1, order_BN[..., None].expand_as(logits_BNV)), rows, noise, positions_B)
    return replace(verdict, path_BM=order_BN.gather(1, verdict.path_BM))


DELETED = "_normalised(q_BV.scatter(1, token_B1, 0.0), torch.zeros_like(q_BV))"
RESIDUE = "_normalised((p_BV - q_BV).clamp(min=0), p_BV)"
MUTANTS: dict[str, tuple[Verify, str, int, Sampling]] = {
    "residual is p": (mutant("residual_BNV.gather(1, at_B1V), p_BNV", "p_BNV.gather(1, at_B1V), p_BNV"), "sampled chain", 3, HOT),
    "residual of the wrong node": (
        mutant("at_B1V = counts_B[:, None, None]", "at_B1V = (counts_B + 1).clamp(max=N - 1)[:, None, None]"), "sampled chain", 3, HOT),
    "p - q without clamp": (mutant("- q_next_BNV).clamp(min=0)", "- q_next_BNV).abs()"), "sampled chain", 3, HOT),
    "h forgotten in the residual": (mutant("(h_BN[..., None] * p_BNV - q_next", "(p_BNV - q_next"), "sampled chain", 3, HOT),
    "p/q swapped": (mutant("p_BG / q_BG", "q_BG / p_BG"), "sampled chain", 3, HOT),
    "always accepted": (mutant("ACCEPT) < keep_BN", "ACCEPT) < 2"), "sampled chain", 3, HOT),
    "last draft not judged": (mutant("torch.where(index_N == length_B1, h_BN,", "torch.where(index_N == length_B1, 1.0,"), "sampled chain", 3, HOT),
    "no temperature on the bonus token": (forgot_temperature_on_bonus, "sampled chain", 1, HOT),
    "one draw for all depths": (mutant("[:, None] + 1 + depths_BN, TARGET", "[:, None] + 1 + 0 * depths_BN, TARGET"), "greedy chain", 3, HOT),
    "tree: no temperature on the bonus token": (forgot_temperature_on_bonus, "sampled tree", 1, HOT),
    "tree: q not renormalised": (mutant(DELETED, "q_BV.scatter(1, token_B1, 0.0)"), "sampled tree", 3, HOT),
    "tree: the rejected child stays in q": (mutant(DELETED, "q_BV"), "sampled tree", 3, HOT),
    "tree: p stays p": (mutant(RESIDUE, "p_BV"), "sampled tree", 3, HOT),
    "tree: residual not renormalised": (mutant(RESIDUE, "(p_BV - q_BV).clamp(min=0)"), "sampled tree", 3, HOT),
    "tree: accepted with p": (mutant("(u_B < p_B / q_B)", "(u_B < p_B)"), "sampled tree", 3, HOT),
    "tree: siblings not in the order of their draws": (sorted_siblings, "sampled tree", 1, HOT),
    "tree: the child's own q below it": (mutant("below_B.clamp(max=N - 1)], q_BV)", "candidate_B], q_BV)"), "sampled tree", 3, HOT),
    "tree: the parent's p below it": (mutant("p_BNV[row_B, candidate_B], p_BV)", "p_BNV[row_B, node_B], p_BV)"), "sampled tree", 3, HOT),
    "tree: what q cannot have drawn is accepted": (mutant("there_B & (q_B > 0)", "there_B"), "sampled tree", 1, NARROW),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str) -> None:
    rule, draft, gamma, sampling = MUTANTS[name]
    assert p_value(outputs(DRAFTS[draft], rule, sampling, gamma), sampling, fewest=3) < P_VALUE


def test_noise_that_is_not_fresh_each_round_fails() -> None:
    """Drafted and rejected, then drafted again from the same numbers: conditioned on the rejection."""
    hot = Sampling(1.5)
    assert p_value(outputs(sampled_chain, verify, hot, 2, draws=60_000), hot) > P_VALUE
    assert p_value(outputs(sampled_chain, verify, hot, 2, rounds=lambda seeds_B, roots_B: Noise(seeds_B), draws=60_000), hot) < P_VALUE


def test_one_uniform_for_all_siblings_fails() -> None:
    """The second child would be judged by a number that is known to be high. A small bias: it takes a draft near the target, and more draws."""
    hot, rule = Sampling(4.0), mutant("ACCEPT, sibling_B[:, None])", "ACCEPT)")
    assert p_value(outputs(sampled_tree, verify, hot, 1, draws=60_000), hot) > P_VALUE
    assert p_value(outputs(sampled_tree, rule, hot, 1, draws=60_000), hot) < P_VALUE


# ---- exact statements about sampled chains


def one_step(p: list[float], q: list[float], rows: int = 50_000) -> tuple[Tensor, Verdict]:
    noise, positions_B = Noise(torch.arange(rows), torch.full((rows,), 9)), torch.full((rows,), 9)
    q_V, root_B = torch.tensor(q), torch.zeros(rows, dtype=torch.long)
    draft_B = (q_V.log() + noise.gumbel(positions_B[:, None] + 1, DRAFT, len(q))[:, 0]).argmax(-1)
    tree = DraftTree.chain(root_B, draft_B[:, None], None, q_V.expand(rows, 1, -1))
    logits = torch.tensor(p).log().expand(rows, 2, -1)
    return draft_B, verify(tree, logits, RowSampling.of([1.0] * rows, Sampling()), noise, positions_B)


def test_forced_rejection_leaves_only_the_positive_residual() -> None:
    draft_B, verdict = one_step([0.5, 0.3, 0.2], [0.2, 0.5, 0.3])
    rejected_B = verdict.counts_B == 0
    assert 0.27 < rejected_B.float().mean() < 0.33  # total variation 0.3
    assert bool((verdict.next_B[rejected_B] == 0).all()) and not bool((draft_B[rejected_B] == 0).any())
    first_B = torch.where(rejected_B, verdict.next_B, draft_B)
    share = torch.bincount(first_B) / len(first_B)
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)


def test_equal_distributions_never_reject() -> None:
    _, verdict = one_step([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    assert bool((verdict.counts_B == 1).all())


def test_a_token_the_target_cannot_say_is_never_accepted() -> None:
    draft_B, verdict = one_step([0.6, 0.4, 0.0], [0.1, 0.1, 0.8])
    assert bool((verdict.counts_B[draft_B == 2] == 0).all()) and not bool((verdict.next_B == 2).any())


def test_block_verification_accepts_no_less_than_token_wise_rejection() -> None:
    target_VV, draft_VV = tables(4)
    B = DRAWS
    noise, positions_B = Noise(torch.arange(B), torch.full((B,), 5)), torch.full((B,), 5)
    tree = sampled_chain(torch.full((B,), ROOT), torch.full((B,), 3), draft_VV.log_softmax(-1), noise, positions_B)
    verdict = verify(tree, target_VV[tree.tokens_BN], RowSampling.of([1.0] * B, Sampling()), noise, positions_B)
    assert tree.q_BNV is not None
    p_BG = target_VV.softmax(-1)[tree.tokens_BN[:, :-1], tree.tokens_BN[:, 1:]]
    q_BG = tree.q_BNV[:, 1:].gather(-1, tree.tokens_BN[:, 1:, None])[..., 0]
    token_wise = (p_BG / q_BG).clamp(max=1).cumprod(-1).sum(-1).mean()  # exact expectation given the drafts
    assert verdict.counts_B.float().mean() > token_wise + 0.02


def test_impossible_or_unrecorded_q_gives_no_nan() -> None:
    """q = 0 at one drafted token: rejected there. q = 0 at all of them: a deterministic draft (as composites merge them)."""
    q_1GV = torch.full((1, 2, V), 1 / V)
    q_1GV[0, 1] = torch.nn.functional.one_hot(torch.tensor(0), V)
    tree = DraftTree.chain(torch.tensor([ROOT]), torch.tensor([[1, 5]]), None, q_1GV)
    rows, logits = RowSampling.of([1.0], Sampling()), torch.zeros(1, 3, V)
    for seed in range(50):
        noise = Noise(torch.tensor([seed]), torch.tensor([4]))
        verdict = verify(tree, logits, rows, noise, torch.tensor([4]))
        assert int(verdict.counts_B) <= 1 and 0 <= int(verdict.next_B) < V
        unrecorded = replace(tree, q_BNV=torch.zeros_like(tree.q_BNV))
        plain = verify(replace(tree, q_BNV=None), logits, rows, noise, torch.tensor([4]))
        found = verify(unrecorded, logits, rows, noise, torch.tensor([4]))
        assert torch.equal(found.path_BM, plain.path_BM) and torch.equal(found.next_B, plain.next_B)


# ---- exact statements about sampled trees


def one_level(p: list[float], q: list[float], width: int, rows: int = 50_000) -> tuple[DraftTree, Verdict]:
    """`width` children drawn without replacement from q, judged against p; below them the target is uniform."""
    noise, positions_B = Noise(torch.arange(rows), torch.full((rows,), 9)), torch.full((rows,), 9)
    q_V, root_B = torch.tensor(q), torch.zeros(rows, dtype=torch.long)
    kids_BW = (q_V.log() + noise.gumbel(positions_B[:, None] + 1, DRAFT, len(q))[:, 0]).topk(width).indices
    q_BNV = q_V.expand(rows, width + 1, -1)
    tree = DraftTree(torch.cat([root_B[:, None], kids_BW], 1), torch.tensor([-1] + [0] * width).expand(rows, -1),
                     torch.ones(rows, width + 1, dtype=torch.bool), q_BNV, widths=(width,))
    logits_BNV = torch.tensor(p).log().expand(rows, width + 1, -1).clone()
    logits_BNV[:, 1:] = 0
    return tree, verify(tree, logits_BNV, RowSampling.of([1.0] * rows, Sampling()), noise, positions_B)


def first_tokens(tree: DraftTree, verdict: Verdict) -> Tensor:
    return torch.where(verdict.counts_B == 0, verdict.next_B, tree.tokens_BN.gather(1, verdict.path_BM)[:, 1])


def test_equal_distributions_take_the_first_child() -> None:
    _, verdict = one_level([0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05], 3)
    assert bool((verdict.counts_B == 1).all() and (verdict.path_BM[:, 1] == 1).all() and (verdict.drafted_B == 1).all())


@pytest.mark.parametrize("width", [2, 3, 4])
def test_an_exhausted_draft_leaves_the_residual(width: int) -> None:
    """q has two tokens: what the third and fourth child hold was not drawn. Together with the emitted token: exactly p."""
    tree, verdict = one_level([0.4, 0.1, 0.3, 0.2], [0.5, 0.5, 0.0, 0.0], width)
    assert int(verdict.path_BM[:, 1].max()) <= 2
    share = torch.bincount(first_tokens(tree, verdict), minlength=4) / len(verdict.next_B)
    torch.testing.assert_close(share, torch.tensor([0.4, 0.1, 0.3, 0.2]), atol=0.01, rtol=0)


def test_children_the_target_cannot_say_are_never_accepted() -> None:
    tree, verdict = one_level([0.0, 0.0, 0.3, 0.7], [0.45, 0.45, 0.05, 0.05], 3)
    said_B = first_tokens(tree, verdict)
    assert int(said_B.min()) >= 2
    assert abs(float((said_B == 3).float().mean()) - 0.7) < 0.01


def chance(p: list[float], q: list[float], width: int) -> float:
    """Exact probability that one of `width` children is accepted: all orders in which they can be drawn."""
    total = 0.0
    for x, q_x in enumerate(q):
        if q_x <= 0:
            continue
        accept = min(1.0, p[x] / q_x)
        left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        rest = [0.0 if i == x else b for i, b in enumerate(q)]
        if width > 1 and accept < 1 and sum(rest) > 0:
            accept += (1 - accept) * chance([a / sum(left) for a in left], [b / sum(rest) for b in rest], width - 1)
        total += q_x * accept
    return total


def test_every_further_child_is_accepted_as_often_as_enumeration_says() -> None:
    p, q = [0.35, 0.3, 0.2, 0.1, 0.05], [0.1, 0.25, 0.15, 0.3, 0.2]
    exact = [chance(p, q, width) for width in (1, 2, 3, 4)]
    assert all(more > less + 0.03 for less, more in zip(exact, exact[1:-1], strict=False)) and exact[3] > exact[2]
    for width, share in enumerate(exact, 1):
        _, verdict = one_level(p, q, width)
        assert abs(float(verdict.counts_B.float().mean()) - share) < 4 * (share * (1 - share) / 50_000) ** 0.5


def test_a_tree_accepts_more_than_a_chain_of_its_depth() -> None:
    target_VV, draft_VV = tables(4)
    noise, positions_B = Noise(torch.arange(DRAWS), torch.full((DRAWS,), 5)), torch.full((DRAWS,), 5)
    root_B, gamma_B, logq_VV = torch.full((DRAWS,), ROOT), torch.full((DRAWS,), 3), draft_VV.log_softmax(-1)
    rows, mean = RowSampling.of([1.0] * DRAWS, Sampling()), []
    for widths in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 1)):
        tree = sampled_tree(root_B, gamma_B, logq_VV, noise, positions_B, widths)
        mean.append(float(verify(tree, target_VV[tree.tokens_BN], rows, noise, positions_B).counts_B.float().mean()))
    assert mean[0] + 0.05 < mean[1] < mean[2] - 0.02 and mean[2] + 0.05 < mean[3]


@pytest.mark.parametrize("widths", [(3, 2, 1), (1, 2, 2), (2, 3), (4,)])
def test_recursive_rejection_equals_its_slow_twin(widths: tuple[int, ...]) -> None:
    """The same numbers in plain Python, node by node; also when only the parents say what the tree looks like."""
    target_VV, draft_VV = tables(6)
    B, rows = 150, RowSampling.of([0.8] * 150, Sampling(top_k=6))
    noise, positions_B, root_B = Noise(torch.arange(B), torch.arange(B) + 4), torch.arange(B) + 4, torch.arange(B) % V
    logq_VV = log_probs(draft_VV, 0.8, 3)
    tree = sampled_tree(root_B, torch.arange(B) % 3 + 1, logq_VV, noise, positions_B, widths)
    verdict = verify(tree, target_VV[tree.tokens_BN], rows, noise, positions_B)
    p_BNV, found = log_probs(target_VV, 0.8, 6).exp()[tree.tokens_BN], []
    for b in range(B):
        path, p = slow_rejection(tree, p_BNV, b, noise, positions_B)
        gumbel_V = noise.gumbel((positions_B + len(path))[:, None], RESIDUAL, V)[b, 0]
        found.append(len(path) - 1)
        chain = bool((tree.parents_BN[b] == torch.arange(tree.width) - 1)[tree.valid_BN[b]].all())
        if not chain:  # block verification's
            assert verdict.path_BM[b].tolist() == path + [0] * (tree.width - len(path))
            assert int(verdict.next_B[b]) == int((torch.tensor(p).log() + gumbel_V).argmax())
    assert len(set(found)) == len(widths) + 1
    unknown = verify(replace(tree, widths=None), target_VV[tree.tokens_BN], rows, noise, positions_B)
    assert all(torch.equal(getattr(unknown, n), getattr(verdict, n)) for n in ("path_BM", "counts_B", "next_B", "drafted_B"))


def slow_rejection(tree: DraftTree, p_BNV: Tensor, b: int, noise: Noise, positions_B: Tensor) -> tuple[list[int], list[float]]:
    assert tree.q_BNV is not None
    one, path = Noise(noise.seeds_B[b : b + 1], positions_B[b : b + 1]), [0]
    while True:
        p = p_BNV[b, path[-1]].double().tolist()
        kids = [i for i in range(tree.width) if tree.valid_BN[b, i] and tree.parents_BN[b, i] == path[-1]]
        q = tree.q_BNV[b, kids[0]].double().tolist() if kids else []
        for sibling, kid in enumerate(kids):
            x = int(tree.tokens_BN[b, kid])
            if q[x] == 0:
                continue
            if float(one.uniform(positions_B[b : b + 1, None] + len(path), ACCEPT, torch.tensor([[sibling]]))) < p[x] / q[x]:
                path.append(kid)
                break
            p = [max(a - c, 0.0) for a, c in zip(p, q, strict=True)]
            q = [0.0 if t == x else c for t, c in enumerate(q)]
            p, q = [a / sum(p) for a in p], [c / sum(q) if sum(q) else 0.0 for c in q]
        else:
            return path, p


# ---- lossy: typical acceptance


def test_typical_acceptance_takes_the_longest_typical_path() -> None:
    """A slow twin per row; greedy rows of the same batch stay exact; the next token is the target's own draw at the path's end."""
    target_VV, draft_VV = tables(5)
    B, epsilon, alpha = 400, 0.2, 0.5
    sampling = Sampling(0.8, top_k=6, lossy="typical", typical_epsilon=epsilon, typical_alpha=alpha)
    rows = RowSampling.of([0.0 if b % 4 == 0 else None for b in range(B)], sampling)
    noise, positions_B, root_B = Noise(torch.arange(B), torch.full((B,), 7)), torch.full((B,), 7), torch.arange(B) % V
    tree = static_tree(root_B, torch.arange(B) % 4, draft_VV, noise, positions_B)
    logits_BNV = target_VV[tree.tokens_BN]
    verdict = verify(tree, logits_BNV, rows, noise, positions_B)
    exact = verify(tree, logits_BNV, replace(rows, lossy=None), noise, positions_B)
    p_VV = log_probs(target_VV, 0.8, 6).exp()
    for b in range(B):
        if b % 4 == 0:
            assert torch.equal(verdict.path_BM[b], exact.path_BM[b]) and verdict.next_B[b] == exact.next_B[b]
            continue
        paths = {0: [0]}
        for i in range(1, tree.width):
            parent, p_V = int(tree.parents_BN[b, i]), p_VV[tree.tokens_BN[b, tree.parents_BN[b, i]]]
            entropy = -sum(x * math.log(x) for x in p_V.tolist() if x > 0)
            if bool(tree.valid_BN[b, i]) and parent in paths and p_V[tree.tokens_BN[b, i]] > min(epsilon, alpha * math.exp(-entropy)):
                paths[i] = [*paths[parent], i]
        best = max(paths.values(), key=len)
        assert verdict.path_BM[b, : int(verdict.counts_B[b]) + 1].tolist() == best
        gumbel_V = noise.gumbel((positions_B + len(best))[:, None], TARGET, V)[b, 0]
        assert int(verdict.next_B[b]) == int((p_VV[tree.tokens_BN[b, best[-1]]].log() + gumbel_V).argmax())
    assert float(verdict.counts_B.float().mean()) > float(exact.counts_B.float().mean()) + 0.2


def test_typical_acceptance_also_judges_drafts_with_q_and_is_lossy() -> None:
    lossy = replace(HOT, lossy="typical")
    assert p_value(outputs(sampled_chain, verify, lossy), HOT) < P_VALUE
    assert p_value(outputs(sampled_tree, verify, lossy), HOT) < P_VALUE


# ---- trees: a slow twin


def follow(tokens: list[int], parents: list[int], valid: list[bool], choice: list[int]) -> tuple[list[int], int]:
    """The deepest path from the root on which the target chose every next token (twins: any lowest-index deepest one)."""
    def best(node: int) -> list[int]:
        paths = [best(c) for c in range(len(tokens)) if parents[c] == node and valid[c] and tokens[c] == choice[node]]
        return [node, *max(paths, key=len, default=[])]
    path = best(0)
    return path, choice[path[-1]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool], list[int]]:
    N = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, N)]
    tokens = [draw(st.integers(0, 2)) for _ in range(N)]
    valid = [True] * N
    for i in range(1, N):
        valid[i] = valid[parents[i]] and draw(st.booleans() | st.just(True))
    return tokens, parents, valid, [draw(st.integers(0, 2)) for _ in range(N)]


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_tree_paths_equal_the_slow_twin(cases: list[tuple[list[int], list[int], list[bool], list[int]]]) -> None:
    N = max(len(c[0]) for c in cases)
    padded = []
    for tokens, parents, valid, choice in cases:
        extra = N - len(tokens)
        padded.append((tokens + [1] * extra, parents + list(range(len(parents) - 1, N - 1)), valid + [False] * extra, choice + [0] * extra))
    tokens_BN, parents_BN, valid_BN, choice_BN = (torch.tensor([row[i] for row in padded]) for i in range(4))
    logits_BNV = torch.nn.functional.one_hot(choice_BN, V).float()
    rows, noise = RowSampling.of([0.0] * len(cases), Sampling()), Noise(torch.zeros(len(cases), dtype=torch.long))
    verdict = verify(DraftTree(tokens_BN, parents_BN, valid_BN), logits_BNV, rows, noise, tokens_BN[:, 0])
    for b, case in enumerate(cases):
        path, bonus = follow(*case)
        assert int(verdict.counts_B[b]) == len(path) - 1 and int(verdict.next_B[b]) == bonus
        found = verdict.path_BM[b].tolist()
        assert [case[0][n] for n in found[: len(path)]] == [case[0][n] for n in path] and not any(found[len(path) :])
        assert all(case[1][child] == parent for parent, child in zip(found, found[1 : len(path)], strict=False))


# ---- rows do not see each other


@pytest.mark.parametrize("plain", [greedy_chain, static_tree, dynamic_tree])
@pytest.mark.parametrize("drawn", [sampled_chain, sampled_tree])
@pytest.mark.parametrize("lossy", [None, "typical"])
def test_mixed_batches_give_each_row_what_it_gets_alone(plain: Draft, drawn: Draft, lossy: str | None) -> None:
    """Greedy rows, deterministic and sampled drafts, merged as composites do; row by row the verdicts are those of single calls."""
    target_VV, draft_VV = tables(2)
    B, temperatures, sampling = 60, [0.0, 0.8, 0.8] * 20, Sampling(lossy=lossy)
    seeds_B, positions_B, root_B = torch.arange(B), torch.arange(B) % 7 + 3, torch.arange(B) % V
    noise, gamma_B = Noise(seeds_B, positions_B), torch.arange(B) // 3 % 3 + 1
    logq_VV = draft_VV.log_softmax(-1)
    drafts = plain(root_B, gamma_B, logq_VV, noise, positions_B), drawn(root_B, gamma_B, logq_VV, noise, positions_B)
    take_plain = [b % 3 == 1 for b in range(B)]
    tree = merge(*drafts, take_plain)
    together = verify(tree, target_VV[tree.tokens_BN], RowSampling.of(temperatures, sampling), noise, positions_B)
    assert len({int(c) for c in together.counts_B}) > 1
    for b in range(B):
        source = drafts[0 if take_plain[b] else 1]
        one = replace(source, tokens_BN=source.tokens_BN[b : b + 1], parents_BN=source.parents_BN[b : b + 1],
                      valid_BN=source.valid_BN[b : b + 1], q_BNV=None if source.q_BNV is None else source.q_BNV[b : b + 1])
        alone = verify(one, target_VV[one.tokens_BN], RowSampling.of([temperatures[b]], sampling),
                       Noise(seeds_B[b : b + 1], positions_B[b : b + 1]), positions_B[b : b + 1])
        assert int(alone.counts_B) == int(together.counts_B[b]) and int(alone.next_B) == int(together.next_B[b])
        assert alone.path_BM[0].tolist() == together.path_BM[b, : one.width].tolist() and int(alone.drafted_B) == int(together.drafted_B[b])


def test_deterministic_drafts_draw_what_autoregression_draws() -> None:
    """Node at depth d uses the target's noise of position root + 1 + d: the tokens equal those drawn one at a time with the same seeds."""
    target_VV, draft_VV = tables(3)
    B, rows = 500, RowSampling.of([0.9] * 500, Sampling(top_k=5))
    seeds_B, root_B, positions_B = torch.arange(B), torch.arange(B) % V, torch.full((B,), 12)
    tree = static_tree(root_B, torch.full((B,), 3), draft_VV, Noise(seeds_B), positions_B)
    verdict = verify(tree, target_VV[tree.tokens_BN], rows, Noise(seeds_B, positions_B), positions_B)
    last_B = root_B
    path_BN = tree.tokens_BN.gather(1, verdict.path_BM)
    for i in range(4):
        drawn_B = (log_probs(target_VV[last_B], 0.9, 5) + Noise(seeds_B).gumbel((positions_B + 1 + i)[:, None], TARGET, V)[:, 0]).argmax(-1)
        said_B = torch.where(verdict.counts_B == i, verdict.next_B, path_BN[:, i + 1])
        on_B = verdict.counts_B >= i
        assert torch.equal(drawn_B[on_B], said_B[on_B])
        last_B = drawn_B
    assert int(verdict.counts_B.max()) >= 2


# ---- the device is never waited for


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("shape", ["known", "unknown"])
@pytest.mark.parametrize("lossy", [None, "typical"])
def test_a_device_is_not_asked(draft: str, shape: str, lossy: str | None) -> None:
    """Tensors without values, on no CPU: whoever asks for a value (item, bool, nonzero) fails."""
    positions_B = torch.full((4,), 9)
    tree = DRAFTS[draft](torch.full((4,), ROOT), torch.full((4,), 3), tables()[1].log_softmax(-1), Noise(torch.arange(4), positions_B), positions_B)
    there = replace(tree, **{f: value.to("meta") for f, value in vars(tree).items() if isinstance(value, Tensor)})
    if shape == "unknown":
        there = replace(there, widths=None, chained=False)
    rows = replace(RowSampling.of([1.0, 0.0, 1.0, 0.5], Sampling(1.0, 3, 0.9, 0.1, lossy=lossy)), temperature_B=torch.ones(4, device="meta"))
    positions_B = positions_B.to("meta")
    verdict = verify(there, torch.zeros(4, tree.width, V, device="meta"), rows, Noise(positions_B, positions_B), positions_B)
    assert verdict.next_B.shape == (4,) and verdict.path_BM.shape == (4, tree.width)
