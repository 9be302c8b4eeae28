"""Two drafters, one after the other: a row that `first` has nothing for is drafted by `second`.

Made for n-gram first, head second: where the answer copies, copying is nearly free and longer; where it does not, the head drafts. How
long a match must be before it beats the head is the first drafter's own option (NgramDrafter.min_match).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling


class Composite(Drafter):
    """Features go to both (their taps must agree where both have some). `second` is not asked in a round that `first` serves whole."""

    name = "composite"

    def __init__(self, first: Drafter, second: Drafter) -> None:
        if first.taps and second.taps and first.taps != second.taps:
            raise ValueError(f"composite: both drafters want features, but different taps: {first.taps} and {second.taps}")
        self.first, self.second = first, second
        self.taps = first.taps or second.taps

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.first.reset(batch, max_len, device)
        self.second.reset(batch, max_len, device)

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.first.start(row, prompt_T, root, features_TF if self.first.taps else None)
        self.second.start(row, prompt_T, root, features_TF if self.second.taps else None)

    def move(self, source: int, to: int) -> None:
        self.first.move(source, to)
        self.second.move(source, to)

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        self.first.observe(tokens_BM, counts_B, features_BMF if self.first.taps else None)
        self.second.observe(tokens_BM, counts_B, features_BMF if self.second.taps else None)

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        one = self.first.propose(plan, sampling, noise)
        served = _served(one)
        one.source_B = _sources(one, served, self.first.name)
        if all(served):
            return one
        room_B = plan.room_B if plan.room_B is not None else (plan.gamma,) * len(served)
        asked = tuple(0 if s else r for s, r in zip(served, room_B, strict=True))
        if not any(asked):
            return one
        two = self.second.propose(replace(plan, room_B=asked), sampling, noise)
        two.source_B = _sources(two, _served(two), self.second.name)
        return merge(one, two, served) if any(served) else two


def merge(one: DraftTree, two: DraftTree, take_one: list[bool]) -> DraftTree:
    """Row b from `one` where take_one[b], else from `two`, padded to the wider. A row without q beside one with q gets q = 0: deterministic
    (see verify)."""
    N = max(one.width, two.width)
    one, two = _widen(one, N), _widen(two, N)
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
                     torch.where(pick_B1, one.valid_BN, two.valid_BN), q_BNV, sources)


def _widen(tree: DraftTree, N: int) -> DraftTree:
    """Pad with invalid nodes, each a child of the node before it."""
    B, width = tree.tokens_BN.shape
    extra = N - width
    if extra == 0:
        return tree
    parents_BE = torch.arange(width - 1, N - 1, device=tree.parents_BN.device).expand(B, -1)
    pad = torch.nn.functional.pad
    return DraftTree(pad(tree.tokens_BN, (0, extra)), torch.cat([tree.parents_BN, parents_BE], 1), pad(tree.valid_BN, (0, extra)),
                     None if tree.q_BNV is None else pad(tree.q_BNV, (0, 0, 0, extra)), tree.source_B)


def _served(tree: DraftTree) -> list[bool]:
    """Rows with at least one drafted token; the host knows it without asking the device if the drafter named its sources."""
    if tree.width == 1:
        return [False] * len(tree.tokens_BN)
    if tree.source_B is not None:
        return [s != "none" for s in tree.source_B]
    return [bool(v) for v in tree.valid_BN[:, 1:].any(-1).tolist()]


def _sources(tree: DraftTree, served: list[bool], name: str) -> list[str]:
    return tree.source_B if tree.source_B is not None else [name if s else "none" for s in served]
