"""Static trees searched from measured acceptance: the greedy expansion of Medusa (arXiv 2401.10774 §2.3.3), which for these independent estimates is
the optimum that Sequoia (arXiv 2402.12374) finds by dynamic programming.

the target's own answers ─► measure_ranks: which rank has the true next token in the draft's order, d tokens deep? ─► acceptance_DR
    ─► search_static / choose_static: the paths with the largest products ─► Static ─► save_tree ─► recipes' tree: static:FILE.json

Acceptance at depth d is measured behind the true path. A rank counts alike whatever the ranks before it: real drafts are better after a likely
token than after an unlikely one, so a tree that was searched should still be measured.

Shape suffixes: B rows, G drafted tokens of a round, D depths, R ranks, U draft vocabulary, V target vocabulary, T prompt length, M tokens of a round,
F feature width.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.decode import decode
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.graphs import Graphs
from draftheads.inference.growth import DraftVocab
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.shapes import MOST_NODES, Static
from draftheads.inference.target import Target
from draftheads.recipes.files import write_json
from draftheads.recipes.schema import RecipeError

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankCounts:
    """hits_DR int64: how often the true token at depth d + 1 had rank r. reached_D int64: how often there was one to rank, the tokens before it
    having ranks below R each (a tree holds no other paths)."""

    hits_DR: Tensor
    reached_D: Tensor

    @property
    def acceptance_DR(self) -> Tensor:
        """float64: share of hits; 0 where nothing was reached."""
        return self.hits_DR.double() / self.reached_D.clamp(min=1)[:, None]


# ---- measuring


def measure_ranks(target: Target, drafter: Drafter, requests: Iterable[Request], depth: int, ranks: int, *, tree: Static | None = None,
                  sampling: Sampling = Sampling(), limits: Limits = Limits(), batch_size: int = 1) -> RankCounts:  # noqa: B008 - frozen
    """Ranks of the target's own next tokens in the draft's order, at depths 1 … depth, ranks 0 … ranks − 1.

    A rank is taken at every round of a decoding that drafts with `tree`, or (None) with a chain of that depth: rounds begin more often where drafts
    are bad, and a mean over all positions would promise too much. Measure once, search, and measure with what was found for a closer estimate.
    drafter: any that grows its drafts by growth.grow from its `vocab`; RecipeError for others. Prompts count once.
    """
    if depth < 1 or ranks < 1:
        raise RecipeError(f"measure_ranks: depth {depth} and ranks {ranks} must be at least 1")
    if not isinstance(getattr(drafter, "vocab", None), DraftVocab):
        raise RecipeError(f"drafter {drafter.name} grows no trees, so there are no ranks to measure: take a head or a draft model")
    asked = list({r.prompt_ids: r for r in requests}.values())
    options: dict[str, Any] = {"sampling": sampling, "limits": limits, "batch_size": batch_size}
    done = [c for r in decode(target, NoDrafter(), asked, **options) for c in r.finished]
    ranked = _Ranked(drafter, {c.request.prompt_ids: c.tokens for c in done}, depth, ranks, tree)
    try:
        for _ in decode(target, ranked, asked, plan=Plan(depth), graphs=False, **options):
            pass
    finally:
        ranked.give_back()
    return RankCounts(ranked.hits_DR, ranked.reached_D)


@dataclass
class _Script:
    """What the draft is made to say next. truth_BG: draft ids, −1 where none is known; ranks: what was found so far, one [B] a drafted token."""

    truth_BG: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    ranks: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Forced(DraftVocab):
    """Notes the rank of the scripted token, and leaves the draft no other one: it goes on behind the true path."""

    script: _Script = field(default_factory=_Script)

    def usable(self, logits: Tensor) -> Tensor:
        logits_BU = super().usable(logits)
        truth_B1 = self.script.truth_BG[:, len(self.script.ranks), None]
        at_B1 = truth_B1.clamp(min=0)
        its_B1 = logits_BU.gather(1, at_B1)
        before_BU = (logits_BU > its_B1) | ((logits_BU == its_B1) & (torch.arange(logits_BU.shape[1], device=logits_BU.device) < at_B1))
        known_B1 = (truth_B1 >= 0) & (its_B1 > float("-inf"))
        self.script.ranks.append(torch.where(known_B1, before_BU.sum(-1, keepdim=True), -1)[:, 0])
        certain_BU = torch.full_like(logits_BU, float("-inf")).scatter_(1, at_B1, 0.0)
        return torch.where(known_B1, certain_BU, logits_BU)


@dataclass
class _Row:
    """answer: the tokens that the target will write; seen: how many it has."""

    answer: list[int]
    seen: int = 1


class _Ranked(Drafter):
    """`inner`, made to draft the target's own next tokens; of those it proposes as many as `tree` (None: a chain of rank 0) would have held."""

    def __init__(self, inner: Any, answers: dict[tuple[int, ...], list[int]], depth: int, ranks: int, tree: Static | None) -> None:
        self.inner, self.answers, self.depth, self.name, self.taps = inner, answers, depth, inner.name, inner.taps
        self.paths = set(tree.choices) if tree is not None else {(0,) * d for d in range(1, depth + 1)}
        self.hits_DR, self.reached_D = torch.zeros(depth, ranks, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
        self.vocab: DraftVocab = inner.vocab
        self.script = _Script()
        self.draft_id = {token: i for i, token in enumerate(self.vocab.ids_U.tolist())}
        inner.vocab = _Forced(self.vocab.ids_U, self.vocab.size, self.vocab.padding_U, self.script)

    def give_back(self) -> None:
        self.inner.vocab = self.vocab

    def lend(self, graphs: Graphs | None) -> None:
        self.inner.lend(None)

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.rows = [_Row([])] * batch
        self.inner.reset(batch, max_len, device)

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.rows[row] = _Row(self.answers[tuple(prompt_T.tolist())])
        self.inner.start(row, prompt_T, root, features_TF)

    def move(self, source: int, to: int) -> None:
        self.rows[to] = self.rows[source]
        self.inner.move(source, to)

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for row, tokens, count in zip(self.rows, tokens_BM.tolist(), counts_B.tolist(), strict=False):
            expected = row.answer[row.seen : row.seen + count]
            row.seen += count
            if tokens[: len(expected)] != expected:  # near-ties can go another way in a wider forward: from here on nothing is known
                row.answer = []
        self.inner.observe(tokens_BM, counts_B, features_BMF)

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        truth = [row.answer[row.seen : row.seen + self.depth] for row in self.rows[: len(noise.seeds_B)]]
        room_B = tuple(map(len, truth)) if plan.room_B is None else tuple(min(len(t), r) for t, r in zip(truth, plan.room_B, strict=True))
        ids = [[self.draft_id.get(token, -1) for token in t] + [-1] * (self.depth - len(t)) for t in truth]
        self.script.truth_BG, self.script.ranks = torch.tensor(ids, device=noise.seeds_B.device), []
        tree: DraftTree = self.inner.propose(replace(plan, gamma=self.depth, room_B=room_B, tree=None), sampling, noise)
        if tree.width == 1:
            return tree
        ranks = torch.stack(self.script.ranks, 1).tolist()
        counts = [self._count(row[:n]) for row, n in zip(ranks, (tree.valid_BN.sum(-1) - 1).tolist(), strict=True)]
        return DraftTree.chain(tree.tokens_BN[:, 0], tree.tokens_BN[:, 1 : 1 + max(counts)], torch.tensor(counts, device=tree.tokens_BN.device))

    def _count(self, ranks: list[int]) -> int:
        """Takes down one round's ranks (−1: not in the draft's vocabulary). -> how many tokens the tree would have accepted."""
        for d, rank in enumerate(ranks):
            self.reached_D[d] += 1
            if not 0 <= rank < self.hits_DR.shape[1]:
                break
            self.hits_DR[d, rank] += 1
        return next((d for d in range(len(ranks)) if tuple(ranks[: d + 1]) not in self.paths), len(ranks))


# ---- searching


@dataclass(frozen=True)
class Found:
    """expected_tau: tokens a round, bonus token included. speedup: the same per cost of a round, in autoregressive steps."""

    shape: Static
    expected_tau: float
    speedup: float


def search_static(acceptance_DR: Tensor, nodes: int) -> Static:
    """The tree of at most `nodes` nodes with the largest expected τ. Nodes that would never be accepted are left out.

    acceptance_DR[d, r] is the share of rounds in which the token at depth d + 1 has rank r in the draft's order, given that all before were right.
    """
    if nodes < 1:
        raise RecipeError(f"a searched tree wants at least 1 node, found {nodes}")
    return Static(tuple(path for path, _ in islice(_best_first(acceptance_DR), nodes)))


def expected_tau(shape: Static, acceptance_DR: Tensor) -> float:
    """1 + Σ over the nodes of the product of acceptances along the path; what was not measured counts as 0."""
    D, R = acceptance_DR.shape
    measured = acceptance_DR.tolist()
    total = 1.0
    for path in shape.choices:
        product = 1.0
        for d, rank in enumerate(path):
            product *= measured[d][rank] if d < D and rank < R else 0.0
        total += product
    return total


def predict_static(shape: Static, acceptance_DR: Tensor, verify: Callable[[int], float], c: float, o: float = 0.0) -> Found:
    """What to expect of a given tree. Costs: as in `choose_static`."""
    tau = expected_tau(shape, acceptance_DR)
    return Found(shape, tau, tau / (shape.depth * c + verify(shape.nodes + 1) + o))


def choose_static(acceptance_DR: Tensor, verify: Callable[[int], float], c: float, o: float = 0.0, most: int = 64) -> Found:
    """The tree of at most `most` nodes with the largest expected τ / (depth · c + v(nodes + 1) + o), every depth tried; the smaller of two equals.

    verify: v(w), cost of a target forward over w tokens; c: of one draft step; o: of the rest of a round; all in autoregressive steps.
    """
    best: tuple[float, float, list[Ranks]] | None = None
    for depth in range(1, len(acceptance_DR) + 1):
        paths: list[Ranks] = []
        tau = 1.0
        for path, product in islice(_best_first(acceptance_DR[:depth]), min(most, MOST_NODES)):
            paths.append(path)
            tau += product
            speedup = tau / (max(map(len, paths)) * c + verify(len(paths) + 1) + o)
            if best is None or speedup > best[0]:
                best = speedup, tau, list(paths)
    if best is None:
        raise RecipeError(f"a searched tree wants at least 1 node, found {most}")
    return Found(Static(tuple(best[2])), best[1], best[0])


def save_tree(file: str | os.PathLike[str], shape: Static, acceptance_DR: Tensor, **about: Any) -> None:
    """What parse_shape("static:FILE.json") reads, and how it came about. about: further keys that JSON can hold, e.g. target, head."""
    choices = [list(path) for path in shape.ordered]
    write_json(file, {"choices": choices, "expected_tau": expected_tau(shape, acceptance_DR), "acceptance": acceptance_DR.tolist(), **about})


def _best_first(acceptance_DR: Tensor) -> Iterator[tuple[Ranks, float]]:
    """Paths and their products, the largest first, a path before what lies below it; none whose product is 0."""
    rows = acceptance_DR.tolist() if acceptance_DR.dim() == 2 else []
    if not rows or not all(0 <= a <= 1 for row in rows for a in row) or any(sum(row) > 1 + 1e-6 for row in rows):
        raise RecipeError(f"acceptance must be a table [depth, rank] of shares, each depth's sum at most 1, found {acceptance_DR!r:.200}")
    if not any(rows[0]):
        raise RecipeError("no first draft was ever accepted, so there is no tree to search: train the head, or measure on more prompts")
    # A product never exceeds its parent's, so the best node that can be added is the best of all that are left.
    heap: list[tuple[float, Ranks]] = [(-a, (rank,)) for rank, a in enumerate(rows[0]) if a > 0]
    heapq.heapify(heap)
    while heap:
        negative, path = heapq.heappop(heap)
        yield path, -negative
        for rank, a in enumerate(rows[len(path)] if len(path) < len(rows) else []):
            if a > 0:
                heapq.heappush(heap, (negative * a, (*path, rank)))
