"""Drafters, one after the other: a row that the first has nothing for is drafted by the second, and so on.

Made for n-gram or suffix first, head last: where the answer copies, copying is nearly free and longer; where it does not, the head drafts.
How good a match must be before it beats the head is the first drafter's own option (NgramDrafter.prompt_lookup_min, SuffixDrafter.min_score).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.graphs import Graphs
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.recipes.schema import RecipeError


class Composite(Drafter):
    """Two or more drafters. Features go to those that want some (their taps must agree). One is asked in a round only if the drafters before
    it left rows that have room, and then for those rows; it observes every round."""

    name = "composite"

    def __init__(self, first: Drafter, second: Drafter, *more: Drafter) -> None:
        self.first = first
        self.drafters = (first, second, *more)
        tapping = [d for d in self.drafters if d.taps]
        if any(d.taps != tapping[0].taps for d in tapping):
            raise ValueError(f"composite: drafters want features of different taps: {', '.join(f'{d.name} {d.taps}' for d in tapping)}")
        self.taps = tapping[0].taps if tapping else ()

    def claim(self) -> None:
        claimed: list[Drafter] = []
        try:
            for drafter in self.drafters:
                drafter.claim()
                claimed.append(drafter)
        except RecipeError:
            for drafter in claimed:
                drafter.release()
            raise

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()

    def lend(self, graphs: Graphs | None) -> None:
        for drafter in self.drafters:
            drafter.lend(graphs)

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        for drafter in self.drafters:
            drafter.reset(batch, max_len, device)

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        for drafter in self.drafters:
            drafter.start(row, prompt_T, root, features_TF if drafter.taps else None)

    def move(self, source: int, to: int) -> None:
        for drafter in self.drafters:
            drafter.move(source, to)

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for drafter in self.drafters:
            drafter.observe(tokens_BM, counts_B, features_BMF if drafter.taps else None)

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        room_B = plan.room_B if plan.room_B is not None else (plan.depth,) * len(noise.seeds_B)
        tree = _asked(self.first, plan, sampling, noise)
        served = _served(tree)
        for drafter in self.drafters[1:]:
            left_B = tuple(0 if s else room for s, room in zip(served, room_B, strict=True))
            if not any(left_B):
                break
            other = _asked(drafter, replace(plan, room_B=left_B), sampling, noise)
            tree = merge(tree, other, served) if any(served) else other
            served = [s or o for s, o in zip(served, _served(other), strict=True)]
        return tree


def merge(one: DraftTree, two: DraftTree, take_one: list[bool]) -> DraftTree:
    """Row b from `one` where take_one[b], else from `two`, padded to the wider. A row without q beside one with q gets q = 0: deterministic
    (see verify). Two chains make a chain; widths are lost, since no level need be whole in every row."""
    N = max(one.width, two.width)
    one, two = one.widened(N), two.widened(N)
    pick_B1 = torch.tensor(take_one, device=one.tokens_BN.device)[:, None]
    q_BNV = None
    if one.q_BNV is not None or two.q_BNV is not None:
        some = one.q_BNV if one.q_BNV is not None else two.q_BNV
        assert some is not None
        q_BNV = torch.where(pick_B1[..., None], one.q_BNV if one.q_BNV is not None else torch.zeros_like(some),
                            two.q_BNV if two.q_BNV is not None else torch.zeros_like(some))
    sources = None
    if one.source_B is not None and two.source_B is not None:
        sources = [a if t else b for t, a, b in zip(take_one, one.source_B, two.source_B, strict=True)]
    return DraftTree(torch.where(pick_B1, one.tokens_BN, two.tokens_BN), torch.where(pick_B1, one.parents_BN, two.parents_BN),
                     torch.where(pick_B1, one.valid_BN, two.valid_BN), q_BNV, sources, chained=one.chained and two.chained)


def _asked(drafter: Drafter, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
    """Its tree, with the rows' sources."""
    tree = drafter.propose(plan, sampling, noise)
    if tree.source_B is None:
        tree.source_B = [drafter.name if s else "none" for s in _served(tree)]
    return tree


def _served(tree: DraftTree) -> list[bool]:
    """Rows with at least one drafted token; the host knows it without asking the device if the drafter named its sources."""
    if tree.width == 1:
        return [False] * len(tree.tokens_BN)
    if tree.source_B is not None:
        return [s != "none" for s in tree.source_B]
    return [bool(v) for v in tree.valid_BN[:, 1:].any(-1).tolist()]
