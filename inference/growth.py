"""Growing a DraftTree from anything that can say what follows a drafted token: a head, a smaller model, the target's own MTP layers.

    stepper.begin ─► logits of the root's children ─► choose ─► stepper.step(level) ─► logits of their children ─► … ─► DraftTree

Every shape is grown level by level, all nodes of a level in one step, with tensors only (no Python per node, and nothing is asked of the device
unless min_confidence is). A chain, Static and Dynamic propose likeliest tokens: deterministic drafts, whose acceptance needs no q. In sampled rows a
chain and Sampled draw from the draft's own processed distribution and record it as q. Which nodes a Sampled tree has never depends on what was drawn:
dropping unlikely draws would bias the output (reference: RSD, arXiv 2402.14160).

Shape suffixes: B rows, N tree nodes, U draft vocabulary, V target vocabulary, W nodes of a level that are expanded, R children per node.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Plan
from draftheads.inference.noise import DRAFT, Noise
from draftheads.inference.sampling import RowSampling, row_log_probs
from draftheads.inference.shapes import Dynamic, Sampled, Static


class Stepper(Protocol):
    """A draft in the making, one level at a time; see DraftHead.begin and DraftHead.step, which this is with the state inside."""

    def begin(self, depth: int) -> Tensor:
        """Draft logits [B, U] of the first drafted token, of a draft of at most `depth` levels."""

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        """W drafted tokens (target ids), below the nodes parents_BW of the level before (0 for the first). -> logits [B, W, U]."""


@dataclass(frozen=True)
class DraftVocab:
    """ids_U: int64, the target id of each draft id. size: V. padding_U: bool, ids never to be proposed (no tokenizer has them), or None."""

    ids_U: Tensor
    size: int
    padding_U: Tensor | None = None

    def usable(self, logits: Tensor) -> Tensor:
        """float32 logits [..., U] without the padding ids."""
        logits = logits.float()
        return logits if self.padding_U is None else logits.masked_fill(self.padding_U, float("-inf"))

    def scatter(self, q: Tensor) -> Tensor:
        """A distribution over draft ids [..., U] as one over target ids [..., V]."""
        flat_MU = q.reshape(-1, q.shape[-1])
        return flat_MU.new_zeros(len(flat_MU), self.size).index_copy_(1, self.ids_U, flat_MU).view(*q.shape[:-1], self.size)


def grow(stepper: Stepper, root_B: Tensor, plan: Plan, caps: Sequence[int], rows: RowSampling, noise: Noise, roots_B: Tensor, vocab: DraftVocab,
         name: str, min_confidence: float = 0.0) -> DraftTree:
    """A tree of plan's shape behind the roots, no deeper in row b than caps[b] (0: nothing).

    min_confidence: in a batch of greedy rows, chains stop where the running product of the draft's top probabilities falls below it (0: never).
    name: what `source_B` calls these drafts. The rest is `sprout`'s.
    """
    caps = [min(cap, plan.depth) for cap in caps]
    if max(caps) <= 0:
        return limited(DraftTree.chain(root_B, root_B[:, None][:, :0]), caps, 0, name)
    stop = _Confidence(caps, min_confidence) if min_confidence > 0 and plan.tree is None and all(rows.greedy) else None
    tree = sprout(stepper, root_B, plan, max(caps), rows, noise, roots_B, vocab, stop)
    return limited(tree, caps if stop is None else stop.counts, max(caps), name)


def limited(tree: DraftTree, caps: Sequence[int], depth: int, name: str) -> DraftTree:
    """A tree of that depth without what is deeper than caps[b]; rows that may draft nothing have the source "none"."""
    if tree.chained and tree.width - 1 > max(caps):
        N = max(caps) + 1
        tree = replace(tree, tokens_BN=tree.tokens_BN[:, :N], parents_BN=tree.parents_BN[:, :N], valid_BN=tree.valid_BN[:, :N],
                       q_BNV=None if tree.q_BNV is None or N == 1 else tree.q_BNV[:, :N], widths=None)
    if tree.width > 1 and min(caps) < min(depth, tree.width - 1):
        cap_B1 = torch.tensor(caps, device=tree.tokens_BN.device)[:, None]
        depths_BN = torch.arange(tree.width, device=cap_B1.device) if tree.chained else tree.depths_BN()
        tree.valid_BN = tree.valid_BN & (depths_BN <= cap_B1)
    tree.source_B = [name if cap > 0 else "none" for cap in caps]
    return tree


def sprout(stepper: Stepper, root_B: Tensor, plan: Plan, depth: int, rows: RowSampling, noise: Noise, roots_B: Tensor, vocab: DraftVocab,
           stop: _Confidence | None = None) -> DraftTree:
    """`depth` levels of plan's shape, the same for all rows, without looking at the host: this part can be captured as a CUDA graph.

    root_B int64: the last accepted tokens. roots_B int64: their absolute positions, which key the noise of drawn tokens.
    """
    if plan.tree is None:
        return _chain(stepper, root_B, depth, rows, noise, roots_B, vocab, stop)
    if isinstance(plan.tree, Static):
        return _static(stepper, root_B, plan.tree, depth, vocab)
    if isinstance(plan.tree, Dynamic):
        return _dynamic(stepper, root_B, plan.tree, depth, vocab)
    return _sampled(stepper, root_B, plan.tree, depth, rows, noise, roots_B, vocab)


# ---- chains


def _chain(stepper: Stepper, root_B: Tensor, depth: int, rows: RowSampling, noise: Noise, roots_B: Tensor, vocab: DraftVocab,
           stop: _Confidence | None) -> DraftTree:
    sampled = not all(rows.greedy)
    parents_B1 = torch.zeros_like(root_B)[:, None]
    drafts: list[Tensor] = []
    q: list[Tensor] = []
    for j in range(depth):
        logits_BU = vocab.usable(stepper.begin(depth) if j == 0 else stepper.step(drafts[-1][:, None], parents_B1)[:, 0])
        if stop is not None and stop(logits_BU, j):
            break
        if sampled:
            ids_B1, q_B1U = _draw(logits_BU[:, None], 1, rows, noise, roots_B, j)
            q.append(vocab.scatter(q_B1U[:, 0]))
            drafts.append(vocab.ids_U[ids_B1[:, 0, 0]])
        else:
            drafts.append(vocab.ids_U[logits_BU.argmax(-1)])
    if not drafts:
        return DraftTree.chain(root_B, root_B[:, None][:, :0])
    return DraftTree.chain(root_B, torch.stack(drafts, 1), None, torch.stack(q, 1) if sampled else None)


class _Confidence:
    """Greedy rows stop drafting where the running product of top probabilities falls below `least`; asks the device at every step."""

    def __init__(self, caps: Sequence[int], least: float) -> None:
        self.counts, self.running, self.least = list(caps), [1.0] * len(caps), least

    def __call__(self, logits_BU: Tensor, j: int) -> bool:
        """Whether no row wants draft j."""
        for b, p in enumerate((logits_BU.amax(-1) - logits_BU.logsumexp(-1)).exp().tolist()):
            self.running[b] *= p
            if self.running[b] < self.least:
                self.counts[b] = min(self.counts[b], j)
        return max(self.counts) <= j


def _draw(logits_BWU: Tensor, R: int, rows: RowSampling, noise: Noise, roots_B: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """R draft ids without replacement for each of the W nodes of a level: ids [B, W, R] in draw order, and the q [B, W, U] they were drawn from.

    Gumbel-top-k: the R largest of log q + Gumbel are R draws without replacement, in order. Greedy rows take the likeliest tokens, with q = 1 for
    a single one and q = 0 ("not drawn") for several: `verify` then judges them as the deterministic drafts that they are. (All rows greedy: q
    is not looked at.)
    """
    W, U = logits_BWU.shape[1:]
    if all(rows.greedy):
        return logits_BWU.topk(R, -1).indices, logits_BWU
    logq_BWU = row_log_probs(logits_BWU, rows)
    at_BW = (roots_B + 1 + level)[:, None] + torch.arange(W, device=roots_B.device) * _NODE
    greedy_B11 = (rows.temperature_B == 0)[:, None, None]
    scores_BWU = torch.where(greedy_B11, logits_BWU, logq_BWU + noise.gumbel(at_BW, DRAFT, U))
    best_BWR = scores_BWU.topk(R, -1).indices if R > 1 else scores_BWU.argmax(-1, keepdim=True)
    certain_BWU = torch.zeros_like(logq_BWU) if R > 1 else torch.zeros_like(logq_BWU).scatter_(-1, best_BWR, 1.0)
    return best_BWR, torch.where(greedy_B11, certain_BWU, logq_BWU.exp())


# Positions are below 2³²; the nodes of a level are told apart in the bits above, so that no two draw from the same numbers.
_NODE = 1 << 32


# ---- trees


@dataclass(frozen=True)
class _Level:
    """One level of a static tree: of each node the place of its parent among the expanded nodes before it, and its rank there; `inner`: which of
    them have children (None: none has, the tree ends)."""

    parent_L: Tensor
    rank_L: Tensor
    ranks: int
    inner_W: Tensor | None


@functools.cache
def _levels(shape: Static, depth: int, device: torch.device) -> tuple[list[_Level], Tensor]:
    """The levels, and the whole tree's parents_N. Made once: host lists that become device tensors do not belong into a round. Never dropped:
    captured steps read them where they lie."""
    paths = [p for p in shape.ordered if len(p) <= depth]
    parents = {p[:-1] for p in paths}
    index = {(): 0} | {p: i + 1 for i, p in enumerate(paths)}
    place: dict[tuple[int, ...], int] = {(): 0}
    levels = []
    for d in range(1, max(map(len, paths)) + 1):
        level = [p for p in paths if len(p) == d]
        inner = [i for i, p in enumerate(level) if p in parents]
        levels.append(_Level(
            torch.tensor([place[p[:-1]] for p in level], device=device), torch.tensor([p[-1] for p in level], device=device),
            1 + max(p[-1] for p in level), torch.tensor(inner, device=device) if inner else None,
        ))
        place = {level[i]: w for w, i in enumerate(inner)}
    return levels, torch.tensor([-1, *(index[p[:-1]] for p in paths)], device=device)


def _static(stepper: Stepper, root_B: Tensor, shape: Static, depth: int, vocab: DraftVocab) -> DraftTree:
    """Only nodes that have children are stepped; a level's nodes take their ranks among their parent's likeliest tokens."""
    B = len(root_B)
    levels, parents_N = _levels(shape, depth, root_B.device)
    tokens, valid = [root_B[:, None]], [torch.ones_like(root_B, dtype=torch.bool)[:, None]]
    logits_BWU, alive_BW = vocab.usable(stepper.begin(depth))[:, None], valid[0]
    for level in levels:
        top_BWR, ids_BWR = logits_BWU.topk(min(level.ranks, logits_BWU.shape[-1]), -1)
        # A rank that the vocabulary does not have is a node that is not there, and so is one that must not be proposed.
        rank_L = level.rank_L.clamp(max=top_BWR.shape[-1] - 1)
        tokens_BL = vocab.ids_U[ids_BWR[:, level.parent_L, rank_L]]
        valid.append((top_BWR[:, level.parent_L, rank_L] > float("-inf")) & (level.rank_L == rank_L) & alive_BW[:, level.parent_L])
        tokens.append(tokens_BL)
        if level.inner_W is not None:
            alive_BW = valid[-1][:, level.inner_W]
            logits_BWU = vocab.usable(stepper.step(tokens_BL[:, level.inner_W], level.parent_L[level.inner_W].expand(B, -1)))
    return DraftTree(torch.cat(tokens, 1), parents_N.expand(B, -1), torch.cat(valid, 1))


def _dynamic(stepper: Stepper, root_B: Tensor, shape: Dynamic, depth: int, vocab: DraftVocab) -> DraftTree:
    """Scores are sums of draft log-probabilities along the path. A child's is never above its parent's, and a stable sort keeps a parent before a
    child of the same score (probability 1): whoever is chosen, its ancestors are."""
    B, device = len(root_B), root_B.device
    logp_BU = vocab.usable(stepper.begin(depth)).log_softmax(-1)
    k = min(shape.top_k, logp_BU.shape[-1])
    scores_BW, ids_BW = logp_BU.topk(k, -1)
    tokens_BW = vocab.ids_U[ids_BW]
    seen_score, seen_token = [scores_BW], [tokens_BW]
    seen_parent = [torch.full((B, k), -1, device=device)]  # index among the seen nodes; −1: the root
    at_BW = torch.arange(k, device=device).expand(B, -1)  # where the expanded nodes stand among the seen ones
    parents_BW = torch.zeros_like(at_BW)
    total = k
    for _ in range(1, depth):
        logp_BWU = vocab.usable(stepper.step(tokens_BW, parents_BW)).log_softmax(-1)
        more_BWR, ids_BWR = logp_BWU.topk(k, -1)
        score_BC = (scores_BW[..., None] + more_BWR).flatten(1)
        token_BC = vocab.ids_U[ids_BWR].flatten(1)
        seen_score.append(score_BC)
        seen_token.append(token_BC)
        seen_parent.append(at_BW.repeat_interleave(k, 1))
        scores_BW, pick_BW = score_BC.topk(k, -1)
        tokens_BW, parents_BW, at_BW = token_BC.gather(1, pick_BW), pick_BW // k, total + pick_BW
        total += score_BC.shape[1]
    score_BS, token_BS, parent_BS = torch.cat(seen_score, 1), torch.cat(seen_token, 1), torch.cat(seen_parent, 1)
    nodes = min(shape.nodes, total)
    chosen_BN = score_BS.sort(dim=-1, descending=True, stable=True).indices[:, :nodes].sort(-1).values  # seen order: parents first
    new_BS = torch.zeros_like(token_BS).scatter_(1, chosen_BN, torch.arange(1, nodes + 1, device=device).expand(B, -1))
    parent_BN = parent_BS.gather(1, chosen_BN)
    parent_BN = torch.where(parent_BN < 0, 0, new_BS.gather(1, parent_BN.clamp(min=0)))
    tokens_BN = torch.cat([root_B[:, None], token_BS.gather(1, chosen_BN)], 1)
    parents_BN = torch.cat([torch.full_like(root_B, -1)[:, None], parent_BN], 1)
    valid_BN = torch.cat([torch.ones_like(root_B, dtype=torch.bool)[:, None], score_BS.gather(1, chosen_BN) > float("-inf")], 1)
    return DraftTree(tokens_BN, parents_BN, valid_BN)


def _sampled(stepper: Stepper, root_B: Tensor, shape: Sampled, depth: int, rows: RowSampling, noise: Noise, roots_B: Tensor,
             vocab: DraftVocab) -> DraftTree:
    B, device = len(root_B), root_B.device
    logits_BWU = vocab.usable(stepper.begin(depth))[:, None]
    widths = tuple(min(w, logits_BWU.shape[-1]) for w in shape.widths[:depth])
    tokens, parents, valid, q = [root_B[:, None]], [torch.full((1,), -1, device=device)], [torch.ones(B, 1, dtype=torch.bool, device=device)], []
    first, W = 0, 1  # the level before: index of its first node, and how many it has
    for d, R in enumerate(widths):
        best_BWR, q_BWU = _draw(logits_BWU, R, rows, noise, roots_B, d)
        tokens_BC = vocab.ids_U[best_BWR].flatten(1)
        parent_C = torch.arange(W, device=device).repeat_interleave(R)
        # What has no probability was not drawn: the support was smaller than R.
        possible = logits_BWU.gather(-1, best_BWR) > float("-inf")
        drawn = torch.where((rows.temperature_B == 0)[:, None, None], possible, q_BWU.gather(-1, best_BWR) > 0).flatten(1)
        valid.append(drawn & valid[-1][:, parent_C])
        tokens.append(tokens_BC)
        parents.append(parent_C + first)
        if not all(rows.greedy):
            q.append(vocab.scatter(q_BWU)[:, parent_C])
        first, W = first + W, W * R
        if d + 1 < len(widths):
            logits_BWU = vocab.usable(stepper.step(tokens_BC, parent_C.expand(B, -1)))
    tokens_BN = torch.cat(tokens, 1)
    q_BNV = torch.cat([q[0].new_zeros(B, 1, vocab.size), *q], 1) if q else None
    return DraftTree(tokens_BN, torch.cat(parents).expand(B, -1), torch.cat(valid, 1), q_BNV,
                     chained=all(w == 1 for w in widths), widths=widths)
