"""Acceptance rules, pure: (tree, raw logits, sampling, noise) → accepted path and the next token. All of them are lossless.

- greedy: the longest path of argmax matches, then the argmax after it.
- deterministic trees of any shape, temperature > 0: draw *one* y ~ p at each node and descend if a child holds y, else emit y. Trying the
  siblings one after another with q = 1 and renormalising telescopes to exactly this. The draw at absolute position P uses the target's own
  noise of P, so the output is token for token what autoregressive sampling with the same seed gives.
- sampled chains (the tree carries q): block verification, arXiv 2403.10444 algorithm 2; never accepts less than token-wise rejection.

Shape suffixes: B rows, N tree nodes (of a chain: N = γ + 1; index i = "i drafts accepted"), M path positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.noise import ACCEPT, RESIDUAL, TARGET, Noise
from draftheads.inference.sampling import RowSampling, row_log_probs


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
    """logits_BNV: raw float32 logits at every node. positions_B: absolute position of the root. tree.q_BNV, if given, must be a chain's.

    A row of a tree with q is judged as deterministic if it is greedy, or if q of each of its drafted tokens is 0 (no q recorded) or 1
    (one-hot): so a row's output does not depend on who drafted for its batch-mates.
    """
    if all(sampling.greedy):
        return _follow(tree, logits_BNV.argmax(-1))
    N, V = logits_BNV.shape[1:]
    logp_BNV = row_log_probs(logits_BNV, sampling)
    sampled_B = None
    if tree.q_BNV is not None and N > 1:
        q_BN = tree.q_BNV.gather(-1, tree.tokens_BN[..., None])[..., 0]
        sampled_B = (tree.valid_BN & (q_BN > 0) & (q_BN < 1))[:, 1:].any(-1) & (sampling.temperature_B > 0)
        block = _block(tree, logp_BNV, noise, positions_B)
        # Only a shortcut: a GPU would have to be waited for.
        if logits_BNV.device.type == "cpu" and bool(sampled_B.all()):
            return block
    ancestors_BNN = tree.ancestors_BNN() if N > 1 else None
    depths_BN = ancestors_BNN.sum(-1) - 1 if ancestors_BNN is not None else torch.zeros_like(tree.tokens_BN)
    scores_BNV = logp_BNV + noise.gumbel(positions_B[:, None] + 1 + depths_BN, TARGET, V)
    if any(sampling.greedy):
        scores_BNV = torch.where((sampling.temperature_B == 0)[:, None, None], logits_BNV.float(), scores_BNV)
    verdict = _follow(tree, scores_BNV.argmax(-1), ancestors_BNN)
    verdict.logp_BNV = logp_BNV
    if sampled_B is None:
        return verdict
    return Verdict(torch.where(sampled_B[:, None], block.path_BM, verdict.path_BM), torch.where(sampled_B, block.counts_B, verdict.counts_B),
                   torch.where(sampled_B, block.next_B, verdict.next_B), verdict.drafted_B, logp_BNV)


def _block(tree: DraftTree, logp_BNV: Tensor, noise: Noise, positions_B: Tensor) -> Verdict:
    counts_B, next_B = block_verify(tree, logp_BNV.exp(), noise, positions_B)
    index_N = torch.arange(tree.width, device=counts_B.device)
    return Verdict(torch.where(index_N <= counts_B[:, None], index_N, 0), counts_B, next_B, tree.valid_BN.sum(-1) - 1, logp_BNV)


def _follow(tree: DraftTree, choice_BN: Tensor, ancestors_BNN: Tensor | None = None) -> Verdict:
    """The target chose choice_BN[b, i] as the token after node i: follow it from the root as far as the tree goes."""
    B, N = choice_BN.shape
    if N == 1:
        zero_B = torch.zeros_like(choice_BN[:, 0])
        return Verdict(zero_B[:, None], zero_B, choice_BN[:, 0], zero_B)
    ancestors_BNN = tree.ancestors_BNN() if ancestors_BNN is None else ancestors_BNN
    depths_BN = ancestors_BNN.sum(-1) - 1
    index_N = torch.arange(N, device=choice_BN.device)
    match_BN = tree.valid_BN & ((tree.tokens_BN == choice_BN.gather(1, tree.parents_BN.clamp(min=0))) | (index_N == 0))
    alive_BN = ~(ancestors_BNN & ~match_BN[:, None, :]).any(-1)
    # Twin siblings can both be alive: the deepest node wins, the lowest index among equals (argmax alone promises no order).
    leaf_B = torch.where(alive_BN, depths_BN * N + (N - 1 - index_N), -1).argmax(-1)
    on_path_BN = ancestors_BNN.gather(1, leaf_B[:, None, None].expand(-1, 1, N))[:, 0]
    # Parents come before children, so the path's order is the order of the indices.
    path_BN = torch.where(on_path_BN, index_N, N).sort(-1).values
    counts_B = depths_BN.gather(1, leaf_B[:, None])[:, 0]
    drafted_B = torch.where(tree.valid_BN, depths_BN, 0).amax(-1)
    return Verdict(torch.where(path_BN < N, path_BN, 0), counts_B, choice_BN.gather(1, leaf_B[:, None])[:, 0], drafted_B)


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
