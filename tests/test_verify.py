"""Acceptance rules: χ² against the target's exact probabilities, mutants that the same statistic must reject, and a slow twin for trees.

The target is a Markov chain over 8 tokens, so that exact conditional probabilities per prefix are a table; verify() is called directly,
20,000 rows at a time.

Shape suffixes: B rows (draws), N nodes, V vocabulary, L output positions.
"""

from __future__ import annotations

import inspect
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
from draftheads.inference.noise import DRAFT, TARGET, Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling, log_probs
from draftheads.inference.verify import Verdict, verify

V, ROOT, L, DRAWS, P_VALUE = 8, 3, 3, 20_000, 1e-4
Verify = Callable[[DraftTree, Tensor, RowSampling, Noise, Tensor], Verdict]
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


def bushy_tree(root_B: Tensor, gamma_B: Tensor, logq_VV: Tensor, noise: Noise, positions_B: Tensor) -> DraftTree:
    """Two children of the root, two of the first child, one of the second, one grandchild."""
    two = logq_VV.topk(2).indices
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3])
    tokens = [root_B, two[root_B, 0], two[root_B, 1]]
    tokens += [two[tokens[1], 0], two[tokens[1], 1], two[tokens[2], 0]]
    tokens.append(two[tokens[3], 0])
    tokens_BN = torch.stack(tokens, 1)
    return DraftTree(tokens_BN, parents.expand(len(root_B), -1), torch.ones_like(tokens_BN, dtype=torch.bool))


def outputs(draft: Callable[..., DraftTree], rule: Verify, sampling: Sampling, gamma: int | None = 3, rounds: Rounds = fresh,
            draws: int = DRAWS) -> Tensor:
    """The first L tokens [B, L] after ROOT, over as many rounds as that takes. gamma None: rows draft 0 … 3 tokens (a depth limit a row)."""
    target_VV, draft_VV = tables()
    logq_VV = log_probs(draft_VV, sampling.temperature, sampling.top_k, sampling.top_p)
    rows = RowSampling.of([None] * draws, sampling)
    seeds_B = torch.arange(draws)
    gamma_B = torch.arange(draws) % 4 if gamma is None else torch.full((draws,), gamma)
    out_BL = torch.full((draws, L + 8), -1)
    length_B, root_B = torch.zeros(draws, dtype=torch.long), torch.full((draws,), ROOT)
    while int(length_B.min()) < L:
        positions_B = 20 + length_B
        noise = rounds(seeds_B, positions_B)
        tree = draft(root_B, gamma_B, logq_VV, noise, positions_B)
        verdict = rule(tree, target_VV[tree.tokens_BN], rows, noise, positions_B)
        path_BN = tree.tokens_BN.gather(1, verdict.path_BM)
        for i in range(1, tree.width + 1):
            token_B = path_BN[:, i] if i < tree.width else torch.zeros_like(root_B)
            token_B = torch.where(verdict.counts_B + 1 == i, verdict.next_B, token_B)
            write_B = (i <= verdict.counts_B + 1) & (length_B + i <= L)
            at_B = (length_B + i - 1).clamp(max=L + 7)
            out_BL[write_B, at_B[write_B]] = token_B[write_B]
        length_B, root_B = length_B + verdict.counts_B + 1, verdict.next_B
    return out_BL[:, :L]


def p_value(tokens_BL: Tensor, sampling: Sampling, eos: int | None = None) -> float:
    """χ² of the next token's frequencies given every prefix, summed over prefixes; cells expected below 5 are pooled per prefix.
    Prefixes that contain eos are left out: an answer that has ended has no next token. A token of probability 0 fails at once."""
    p_VV = log_probs(tables()[0], sampling.temperature, sampling.top_k, sampling.top_p).exp().double()
    chi2, freedom = 0.0, 0
    previous_BL = torch.cat([torch.full((len(tokens_BL), 1), ROOT), tokens_BL[:, :-1]], 1)
    for length in range(L):
        key_B = torch.zeros(len(tokens_BL), dtype=torch.long)
        alive_B = torch.ones(len(tokens_BL), dtype=torch.bool)
        for i in range(length):
            key_B = key_B * V + tokens_BL[:, i]
            alive_B &= tokens_BL[:, i] != (V if eos is None else eos)
        for key in key_B[alive_B].unique():
            some = alive_B & (key_B == key)
            p_V = p_VV[previous_BL[some, length][0]]
            seen_V = torch.bincount(tokens_BL[some, length], minlength=V).double()
            if bool((seen_V[p_V == 0] > 0).any()):
                return 0.0
            expected_V = p_V * int(some.sum())
            big_V = expected_V >= 5
            pairs = [*zip(seen_V[big_V].tolist(), expected_V[big_V].tolist(), strict=True)]
            rest = (float(seen_V[~big_V].sum()), float(expected_V[~big_V].sum()))
            if rest[1] >= 5:
                pairs.append(rest)
            if len(pairs) > 1:
                scale = max(sum(s for s, _ in pairs), 1e-9) / sum(e for _, e in pairs)
                chi2 += sum((s - e * scale) ** 2 / (e * scale) for s, e in pairs)
                freedom += len(pairs) - 1
    assert freedom >= 20
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(chi2 / 2.0).double()))


PROCESSED = [Sampling(0.7), Sampling(0.7, top_k=3), Sampling(0.7, top_p=0.8), Sampling(1.2, top_k=5, top_p=0.9)]
DRAFTS = {"sampled": sampled_chain, "greedy": greedy_chain, "tree": bushy_tree}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", PROCESSED, ids=str)
def test_tokens_are_draws_from_the_target(draft: str, sampling: Sampling) -> None:
    assert p_value(outputs(DRAFTS[draft], verify, sampling), sampling) > P_VALUE


@pytest.mark.parametrize("draft", ["sampled", "greedy"])
@pytest.mark.parametrize("gamma", [1, 2, None])
def test_bonus_tokens_and_depth_limits(draft: str, gamma: int | None) -> None:
    """γ = 1 and 2 put the bonus token inside the tested positions; None mixes rows of 0 … 3 drafts in one tree."""
    assert p_value(outputs(DRAFTS[draft], verify, PROCESSED[0], gamma), PROCESSED[0]) > P_VALUE


def test_an_end_token_inside_the_block_leaves_the_rest_unbiased() -> None:
    eos = int(log_probs(tables()[0], 0.7)[ROOT].argmax())
    tokens_BL = outputs(sampled_chain, verify, PROCESSED[0])
    assert bool((tokens_BL[:, 0] == eos).any()) and p_value(tokens_BL, PROCESSED[0], eos=eos) > P_VALUE


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
    whole_B = (verdict.counts_B == tree.width - 1) & (raw.counts_B == tree.width - 1)
    return replace(verdict, next_B=torch.where(whole_B, raw.next_B, verdict.next_B))


MUTANTS: dict[str, tuple[Verify, str, int]] = {
    "residual is p": (mutant("residual_BNV.gather(1, at_B1V), p_BNV", "p_BNV.gather(1, at_B1V), p_BNV"), "sampled", 3),
    "residual of the wrong node": (
        mutant("at_B1V = counts_B[:, None, None]", "at_B1V = (counts_B + 1).clamp(max=N - 1)[:, None, None]"), "sampled", 3),
    "p - q without clamp": (mutant("- q_next_BNV).clamp(min=0)", "- q_next_BNV).abs()"), "sampled", 3),
    "h forgotten in the residual": (mutant("(h_BN[..., None] * p_BNV - q_next", "(p_BNV - q_next"), "sampled", 3),
    "p/q swapped": (mutant("p_BG / q_BG", "q_BG / p_BG"), "sampled", 3),
    "always accepted": (mutant("ACCEPT) < keep_BN", "ACCEPT) < 2"), "sampled", 3),
    "last draft not judged": (mutant("torch.where(index_N == length_B1, h_BN,", "torch.where(index_N == length_B1, 1.0,"), "sampled", 3),
    "no temperature on the bonus token": (forgot_temperature_on_bonus, "sampled", 1),
    "one draw for all depths": (mutant("[:, None] + 1 + depths_BN, TARGET", "[:, None] + 1 + 0 * depths_BN, TARGET"), "greedy", 3),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str) -> None:
    rule, draft, gamma = MUTANTS[name]
    assert p_value(outputs(DRAFTS[draft], rule, PROCESSED[0], gamma), PROCESSED[0]) < P_VALUE


def test_noise_that_is_not_fresh_each_round_fails() -> None:
    """Drafted and rejected, then drafted again from the same numbers: conditioned on the rejection."""
    hot = Sampling(1.5)
    assert p_value(outputs(sampled_chain, verify, hot, 2, draws=60_000), hot) > P_VALUE
    assert p_value(outputs(sampled_chain, verify, hot, 2, rounds=lambda seeds_B, roots_B: Noise(seeds_B), draws=60_000), hot) < P_VALUE


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


def test_mixed_batches_give_each_row_what_it_gets_alone() -> None:
    """A greedy row, a deterministic draft and a sampled draft in one tree with q; row by row the verdicts are those of single calls."""
    target_VV, draft_VV = tables(2)
    B, temperatures = 60, [0.0, 0.8, 0.8] * 20
    seeds_B, positions_B, root_B = torch.arange(B), torch.arange(B) % 7 + 3, torch.arange(B) % V
    noise, gamma_B = Noise(seeds_B, positions_B), torch.arange(B) % 3 + 1
    logq_VV = draft_VV.log_softmax(-1)
    sampled = sampled_chain(root_B, gamma_B, logq_VV, noise, positions_B)
    greedy = greedy_chain(root_B, gamma_B, logq_VV, noise, positions_B)
    take_greedy = [b % 3 == 1 for b in range(B)]
    tree = merge(greedy, sampled, take_greedy)
    together = verify(tree, target_VV[tree.tokens_BN], RowSampling.of(temperatures, Sampling()), noise, positions_B)
    assert len({int(c) for c in together.counts_B}) > 1
    for b in range(B):
        source = greedy if take_greedy[b] else sampled
        one = DraftTree(source.tokens_BN[b : b + 1], source.parents_BN[b : b + 1], source.valid_BN[b : b + 1],
                        None if source.q_BNV is None else source.q_BNV[b : b + 1])
        alone = verify(one, target_VV[one.tokens_BN], RowSampling.of([temperatures[b]], Sampling()),
                       Noise(seeds_B[b : b + 1], positions_B[b : b + 1]), positions_B[b : b + 1])
        assert int(alone.counts_B) == int(together.counts_B[b]) and int(alone.next_B) == int(together.next_B[b])


def test_deterministic_drafts_draw_what_autoregression_draws() -> None:
    """Node at depth d uses the target's noise of position root + 1 + d: the tokens equal those drawn one at a time with the same seeds."""
    target_VV, draft_VV = tables(3)
    B, rows = 500, RowSampling.of([0.9] * 500, Sampling(top_k=5))
    seeds_B, root_B, positions_B = torch.arange(B), torch.arange(B) % V, torch.full((B,), 12)
    tree = bushy_tree(root_B, torch.full((B,), 3), draft_VV, Noise(seeds_B), positions_B)
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
