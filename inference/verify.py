"""Acceptance rules, pure: (tree, processed logits, sampling, noise) → accepted path and the next token. Lossless, all but the last.

- greedy: the longest path of argmax matches, then the argmax after it.
- deterministic trees of any shape, temperature > 0: draw *one* y ~ p at each node and descend if a child holds y, else emit y. Trying the
  siblings one after another with q = 1 and renormalising telescopes to exactly this. The draw at absolute position P uses the target's own
  noise of P, so the output is token for token what autoregressive sampling with the same seed gives.
- sampled chains (the tree carries q): block verification, arXiv 2403.10444 algorithm 2; never accepts less than token-wise rejection.
- sampled trees (children drawn without replacement from q): recursive rejection, arXiv 2402.14160 (RSD) and 2402.12374 (Sequoia).
- lossy, only where sampling.lossy says so: Medusa's typical acceptance, arXiv 2401.10774 §2.3.1.

Shape suffixes: B rows, N tree nodes (of a chain: N = γ + 1; index i = "i drafts accepted"), M path positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.noise import ACCEPT, RESIDUAL, TARGET, Noise
from draftheads.inference.sampling import RowSampling, free_to_ask, row_log_probs


@dataclass
class Verdict:
    """path_BM int64 [B,N]: nodes of the accepted path in order, root first; 0 beyond counts_B. counts_B: accepted drafts (root not counted).
    next_B: the bonus token. drafted_B: length of the longest valid path. logp_BNV: the processed distributions, None if all rows are greedy."""

    path_BM: Tensor
    counts_B: Tensor
    next_B: Tensor
    drafted_B: Tensor
    logp_BNV: Tensor | None = None


def verify(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, noise: Noise, positions_B: Tensor) -> Verdict:
    """logits_BNV: float32 logits at every node, before temperature. positions_B: absolute position of the root.

    A row of a tree with q is judged as deterministic if it is greedy, or if q of each of its drafted tokens is 0 (no q recorded) or 1
    (one-hot): so a row's output does not depend on who drafted for its batch-mates.
    """
    if all(sampling.greedy):
        return _follow(tree, logits_BNV.argmax(-1))
    N, V = logits_BNV.shape[1:]
    logp_BNV = row_log_probs(logits_BNV, sampling)
    ancestors_BNN = tree.ancestors_BNN() if N > 1 else None
    drawn = None
    if tree.q_BNV is not None and ancestors_BNN is not None and sampling.lossy is None:
        q_BN = tree.q_BNV.gather(-1, tree.tokens_BN[..., None])[..., 0]
        sampled_B = (tree.valid_BN & (q_BN > 0) & (q_BN < 1))[:, 1:].any(-1) & (sampling.temperature_B > 0)
        ask = free_to_ask(logits_BNV)
        if not ask or bool(sampled_B.any()):
            drawn = _judge_drawn(tree, logp_BNV, noise, positions_B, ancestors_BNN)
            if ask and bool(sampled_B.all()):
                return drawn
    depths_BN = ancestors_BNN.sum(-1) - 1 if ancestors_BNN is not None else torch.zeros_like(tree.tokens_BN)
    scores_BNV = logp_BNV + noise.gumbel(positions_B[:, None] + 1 + depths_BN, TARGET, V)
    if any(sampling.greedy):
        scores_BNV = torch.where((sampling.temperature_B == 0)[:, None, None], logits_BNV.float(), scores_BNV)
    choice_BN = scores_BNV.argmax(-1)
    match_BN = None
    if sampling.lossy == "typical":
        match_BN = torch.where((sampling.temperature_B == 0)[:, None], _matches(tree, choice_BN), _typical(tree, logp_BNV, sampling))
    verdict = _follow(tree, choice_BN, ancestors_BNN, match_BN)
    verdict.logp_BNV = logp_BNV
    return verdict if drawn is None else _choose(sampled_B, drawn, verdict)


def _choose(first_B: Tensor, first: Verdict, second: Verdict) -> Verdict:
    """Row b of `first` where first_B[b], else of `second`."""
    return Verdict(torch.where(first_B[:, None], first.path_BM, second.path_BM), torch.where(first_B, first.counts_B, second.counts_B),
                   torch.where(first_B, first.next_B, second.next_B), torch.where(first_B, first.drafted_B, second.drafted_B), first.logp_BNV)


# ---- the target chose a token after every node


def _follow(tree: DraftTree, choice_BN: Tensor, ancestors_BNN: Tensor | None = None, match_BN: Tensor | None = None) -> Verdict:
    """Follow the matching nodes from the root as far as they go, then say what the target chose there, choice_BN[b, i] after node i.
    match_BN: which nodes match their parents; by default those that the target chose."""
    B, N = choice_BN.shape
    if N == 1:
        zero_B = torch.zeros_like(choice_BN[:, 0])
        return Verdict(zero_B[:, None], zero_B, choice_BN[:, 0], zero_B)
    ancestors_BNN = tree.ancestors_BNN() if ancestors_BNN is None else ancestors_BNN
    depths_BN = ancestors_BNN.sum(-1) - 1
    index_N = torch.arange(N, device=choice_BN.device)
    match_BN = tree.valid_BN & ((_matches(tree, choice_BN) if match_BN is None else match_BN) | (index_N == 0))
    alive_BN = ~(ancestors_BNN & ~match_BN[:, None, :]).any(-1)
    # More than one path can match (twin siblings, lossy rules): the deepest node wins, the lowest index among equals (argmax promises no order).
    leaf_B = torch.where(alive_BN, depths_BN * N + (N - 1 - index_N), -1).argmax(-1)
    return _path_to(tree, leaf_B, choice_BN.gather(1, leaf_B[:, None])[:, 0], ancestors_BNN)


def _matches(tree: DraftTree, choice_BN: Tensor) -> Tensor:
    return tree.tokens_BN == choice_BN.gather(1, tree.parents_BN.clamp(min=0))


def _typical(tree: DraftTree, logp_BNV: Tensor, sampling: RowSampling) -> Tensor:
    """bool [B,N]: p(token) > min(ε, α e^(−H)), p and its entropy H (nats) being the target's at the parent. The less certain the target is,
    the more is typical."""
    entropy_BN = torch.special.entr(logp_BNV.exp()).sum(-1)
    bar_BN = (sampling.typical_alpha * (-entropy_BN).exp()).clamp(max=sampling.typical_epsilon)
    parents_BN = tree.parents_BN.clamp(min=0)
    row_B1 = torch.arange(len(parents_BN), device=parents_BN.device)[:, None]
    return logp_BNV[row_B1, parents_BN, tree.tokens_BN].exp() > bar_BN.gather(1, parents_BN)


def _path_to(tree: DraftTree, leaf_B: Tensor, next_B: Tensor, ancestors_BNN: Tensor) -> Verdict:
    N = tree.width
    depths_BN = ancestors_BNN.sum(-1) - 1
    index_N = torch.arange(N, device=leaf_B.device)
    on_path_BN = ancestors_BNN.gather(1, leaf_B[:, None, None].expand(-1, 1, N))[:, 0]
    # Parents come before children, so the path's order is the order of the indices.
    path_BN = torch.where(on_path_BN, index_N, N).sort(-1).values
    counts_B = depths_BN.gather(1, leaf_B[:, None])[:, 0]
    drafted_B = torch.where(tree.valid_BN, depths_BN, 0).amax(-1)
    return Verdict(torch.where(path_BN < N, path_BN, 0), counts_B, next_B, drafted_B)


# ---- the draft was drawn from q


def _judge_drawn(tree: DraftTree, logp_BNV: Tensor, noise: Noise, positions_B: Tensor, ancestors_BNN: Tensor) -> Verdict:
    """Block verification for chains, recursive rejection for trees; both where the host cannot know which of them a row is (composites)."""
    p_BNV, index_N = logp_BNV.exp(), torch.arange(tree.width, device=positions_B.device)
    # By its parents alone: a bushy tree whose siblings happen to be invalid is judged as it would be beside other rows.
    chain_B = (tree.parents_BN == index_N - 1).all(-1)
    chains = _all_or_none(tree, chain_B)
    if chains is not False:
        counts_B, next_B = block_verify(tree, p_BNV, noise, positions_B)
        block = Verdict(torch.where(index_N <= counts_B[:, None], index_N, 0), counts_B, next_B, tree.valid_BN.sum(-1) - 1, logp_BNV)
        if chains:
            return block
    bushy = _path_to(tree, *recursive_verify(tree, p_BNV, noise, positions_B), ancestors_BNN)
    bushy.logp_BNV = logp_BNV
    return bushy if chains is False else _choose(chain_B, block, bushy)


def _all_or_none(tree: DraftTree, chain_B: Tensor) -> bool | None:
    """True: all rows are chains. False: none is. None: some, or not known without asking a GPU."""
    if tree.chained or (tree.widths is not None and max(tree.widths) == 1):
        return True
    if tree.widths is not None and tree.widths[0] > 1:
        return False
    chains = chain_B.tolist() if free_to_ask(chain_B) else [True, False]
    return None if len(set(chains)) == 2 else chains[0]


def block_verify(tree: DraftTree, p_BNV: Tensor, noise: Noise, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification of chains whose tokens were drawn from tree.q_BNV: (accepted counts_B, next_B), int64.

    h_0 = 1, h_i = min(1, h_{i−1} p_i/q_i). R_i = Σ(h_i p − q)₊ over the next token. Scanning from the end, the prefix of length i < γ is
    kept with probability R_i / (R_i + 1 − h_i), the whole chain with h_γ. The next token is drawn from (h_i p − q)₊, after a whole
    chain from p. A drafted token with p = 0 makes h_i = 0 and is never kept; so does one that q says cannot have been drawn.
    """
    assert tree.q_BNV is not None
    N, V = p_BNV.shape[1:]
    index_N = torch.arange(N, device=p_BNV.device)
    token_BG1 = tree.tokens_BN[:, 1:, None]
    p_BG = p_BNV[:, :-1].gather(-1, token_BG1)[..., 0]
    q_BG = tree.q_BNV[:, 1:].gather(-1, token_BG1)[..., 0]
    possible_BG = (p_BG > 0) & (q_BG > 0) & tree.valid_BN[:, 1:]
    ratio_BG = torch.where(possible_BG, p_BG / q_BG, 0.0)
    h = [torch.ones_like(p_BNV[:, 0, 0])]
    for i in range(N - 1):
        h.append((h[-1] * ratio_BG[:, i]).clamp(max=1))
    h_BN = torch.stack(h, 1)
    length_B1 = tree.valid_BN.sum(-1, keepdim=True) - 1
    # After the last drafted token there is no q: the residual is p itself.
    q_next_BNV = torch.cat([tree.q_BNV[:, 1:], torch.zeros_like(tree.q_BNV[:, :1])], 1)
    q_next_BNV = torch.where((index_N < length_B1)[..., None], q_next_BNV, 0.0)
    residual_BNV = (h_BN[..., None] * p_BNV - q_next_BNV).clamp(min=0)
    mass_BN = residual_BNV.sum(-1)
    missing_BN = mass_BN + 1 - h_BN
    keep_BN = torch.where(missing_BN > 0, mass_BN / missing_BN, 1.0)
    keep_BN = torch.where(index_N == length_B1, h_BN, keep_BN).masked_fill(index_N > length_B1, 0)
    keep_BN[:, 0] = 1
    kept_BN = noise.uniform(positions_B[:, None] + index_N, ACCEPT) < keep_BN
    counts_B = torch.where(kept_BN, index_N, 0).amax(-1)
    at_B1V = counts_B[:, None, None].expand(-1, 1, V)
    residual_B1V, p_B1V = residual_BNV.gather(1, at_B1V), p_BNV.gather(1, at_B1V)
    # Rounding can empty a residual that is reached with probability 0: then p, not NaN.
    residual_B1V = torch.where((residual_B1V.sum(-1, keepdim=True) > 0), residual_B1V, p_B1V)
    scores_B1V = residual_B1V.log() + noise.gumbel((positions_B + 1 + counts_B)[:, None], RESIDUAL, V)
    return counts_B, scores_B1V.argmax(-1)[:, 0]


def recursive_verify(tree: DraftTree, p_BNV: Tensor, noise: Noise, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Recursive rejection for trees whose siblings were drawn without replacement from tree.q_BNV: (last accepted node_B, next_B), int64.

    At a node, p is the target's distribution and q the one that its children were drawn from. Children x in the order in which they were
    drawn: accept with min(1, p(x)/q(x)) and go on below x; else p ← norm(p − q)₊, q ← norm(q without x). After the last child, or where
    there is none, the next token is drawn from what p has become. A child with p = 0 is rejected; one with q = 0 cannot have been drawn
    (q was exhausted) and is passed over.
    """
    assert tree.q_BNV is not None
    N, V = p_BNV.shape[1:]
    first_BN, after_BN = _children(tree)
    row_B = torch.arange(len(positions_B), device=positions_B.device)
    node_B, depth_B, sibling_B = (torch.zeros_like(positions_B) for _ in range(3))
    child_B = first_BN[:, 0]
    p_BV, q_BV = p_BNV[:, 0], tree.q_BNV[row_B, child_B.clamp(max=N - 1)]
    # One trial a step; no path has more of them than nodes, nor more than the widths of its levels.
    for _ in range(N - 1 if tree.widths is None else sum(tree.widths)):
        there_B = child_B < N
        if free_to_ask(positions_B) and not bool(there_B.any()):
            break
        candidate_B = child_B.clamp(max=N - 1)
        token_B1 = tree.tokens_BN[row_B, candidate_B][:, None]
        p_B, q_B = p_BV.gather(1, token_B1)[:, 0], q_BV.gather(1, token_B1)[:, 0]
        u_B = noise.uniform((positions_B + 1 + depth_B)[:, None], ACCEPT, sibling_B[:, None])[:, 0]
        judged_B = there_B & (q_B > 0)
        accept_B = judged_B & (p_B > 0) & (u_B < p_B / q_B)
        reject_B1 = (judged_B & ~accept_B)[:, None]
        # A residual that rounding emptied is reached with probability 0: then p, not NaN.
        p_BV = torch.where(reject_B1, _normalised((p_BV - q_BV).clamp(min=0), p_BV), p_BV)
        q_BV = torch.where(reject_B1, _normalised(q_BV.scatter(1, token_B1, 0.0), torch.zeros_like(q_BV)), q_BV)
        below_B = first_BN[row_B, candidate_B]
        p_BV = torch.where(accept_B[:, None], p_BNV[row_B, candidate_B], p_BV)
        q_BV = torch.where(accept_B[:, None], tree.q_BNV[row_B, below_B.clamp(max=N - 1)], q_BV)
        node_B = torch.where(accept_B, candidate_B, node_B)
        depth_B = depth_B + accept_B
        sibling_B = torch.where(accept_B, 0, sibling_B + 1)
        child_B = torch.where(there_B, torch.where(accept_B, below_B, after_BN[row_B, candidate_B]), child_B)
    scores_BV = p_BV.log() + noise.gumbel((positions_B + 1 + depth_B)[:, None], RESIDUAL, V)[:, 0]
    return node_B, scores_BV.argmax(-1)


def _children(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """int64 [B,N] each: a node's first valid child, and its next valid sibling; N where there is none."""
    N = tree.width
    index_N = torch.arange(N, device=tree.parents_BN.device, dtype=torch.int32)
    parents_BN = torch.where(tree.valid_BN, tree.parents_BN, -2).to(torch.int32)  # −2: nobody's children
    child_BNN = parents_BN[:, None, :] == index_N[:, None]
    after_BNN = (parents_BN[:, None, :] == parents_BN[..., None]) & (index_N > index_N[:, None])
    first_BN, next_BN = (torch.where(found_BNN, index_N, N).amin(-1).long() for found_BNN in (child_BNN, after_BNN))
    return first_BN, next_BN


def _normalised(x_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    mass_B1 = x_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, x_BV / mass_B1, otherwise_BV)
