"""PairDrafter: what all drafters share that read (feature, token) pairs: heads (head.py) and a target's own MTP layers (mtp.py).

observe ─► pending (feature, token) pairs ─► [propose] extend: pairs into the head's cache ─► growth.grow ─► DraftTree

Pairs are taken in only when there must be a draft: in a composite whose n-gram part serves a round, the head costs next to nothing and still
sees every token. What is proposed, and how (chain or tree, likeliest or drawn), is inference/growth.py's business.

Shape suffixes: B rows, M pairs (padded), T prompt length, F feature width, U draft vocabulary, W tokens of a draft level.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.slots import DraftSlots
from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.graphs import kind
from draftheads.inference.growth import DraftVocab, grow, limited, sprout
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.shapes import MOST_NODES

# More pending pairs than BURST in one row are taken in alone, BLOCK at a time; more than BACKLOG at once, even if nobody asks for drafts.
BURST, BLOCK, BACKLOG = 16, 256, 512


@dataclass
class _Row:
    """pairs: how many the row has in all, pending ones included; it is the position of its root."""

    pairs: int = 0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def waiting(self) -> int:
        return sum(len(tokens_M) for _, tokens_M in self.pending)


@dataclass(frozen=True)
class HeadStepper:
    """The Stepper of a head and the state of some rows."""

    head: Any
    state: Any
    rows: slice

    def begin(self, depth: int) -> Tensor:
        return self.head.begin(self.state, self.rows, depth)

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        return self.head.step(self.state, tokens_BW, parents_BW, self.rows)


class PairDrafter(Drafter):
    """head: a DraftHead, or anything with its drafting methods (new_state, clear, move, extend, begin, step; see heads/base.py).

    Beyond max_positions a row drafts nothing more (one warning); the output is the target's in any case. min_confidence: in a batch of greedy
    rows, chains stop where the running product of the draft's top probabilities falls below it (0: never); the token that would take it below is
    not proposed.
    """

    def __init__(self, head: Any, vocab: DraftVocab, max_positions: int, min_confidence: float = 0.0) -> None:
        self.head, self.vocab, self.max_positions, self.min_confidence = head, vocab, max_positions, min_confidence
        self.max_depth: int | None = getattr(head, "max_depth", None)
        self.warned = False

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        room = min(max_len, self.max_positions)
        if self.graphs is None:
            self.state = self.head.new_state(batch, room, MOST_NODES)
        else:  # graphs hold the addresses of its buffers
            self.state = self.graphs.keep(self, (batch, room), lambda: self.head.new_state(batch, room, MOST_NODES))
            for row in range(batch):
                self.head.clear(self.state, row)
        self.rows = [_Row() for _ in range(batch)]
        self.root_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.fresh: tuple[Tensor, Tensor, Tensor, list[int]] | None = None

    # ---- what was seen

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        assert features_TF is not None
        self._spill()
        tokens_T = torch.cat([prompt_T[1:], prompt_T.new_tensor([root])]).to(self.root_B.device)
        self.rows[row] = _Row(len(tokens_T), [(features_TF, tokens_T)])
        self.root_B[row] = root
        self.head.clear(self.state, row)

    def move(self, source: int, to: int) -> None:
        self._spill()
        self.head.move(self.state, source, to)
        self.rows[to] = self.rows[source]
        self.rows[source] = _Row()
        self.root_B[to] = self.root_B[source]

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        assert features_BMF is not None
        self._spill()
        B, counts = len(tokens_BM), counts_B.tolist()
        # One round that nobody skipped stays whole: in the common case it is `extend`ed as it came.
        tokens_BM = tokens_BM.to(self.root_B.device)
        self.fresh = (features_BMF, tokens_BM, counts_B, counts)
        for row, count in zip(self.rows, counts, strict=False):
            row.pairs += count
        self.root_B[:B] = tokens_BM.gather(1, (counts_B.to(tokens_BM.device) - 1).clamp(min=0)[:, None])[:, 0]
        if any(row.waiting() > BACKLOG for row in self.rows[:B]):
            self._take_in(B)

    def _spill(self) -> None:
        """The last round's pairs become pending pairs of their rows."""
        if self.fresh is None:
            return
        features_BMF, tokens_BM, _, counts = self.fresh
        self.fresh = None
        for b, count in enumerate(counts):
            if count and not self._off(self.rows[b]):
                self.rows[b].pending.append((features_BMF[b, :count], tokens_BM[b, :count]))

    # ---- what is proposed

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        B = len(noise.seeds_B)
        # A draft of depth n feeds pairs up to position pairs + n − 2.
        depth = plan.depth if self.max_depth is None else min(plan.depth, self.max_depth)
        caps = [max(0, min(depth, self.max_positions - row.pairs + 1)) if not self._off(row) else 0 for row in self.rows[:B]]
        if plan.room_B is not None:
            caps = [min(cap, room) for cap, room in zip(caps, plan.room_B, strict=True)]
        root_B = self.root_B[:B].clone()
        rows = sampling if isinstance(sampling, RowSampling) else RowSampling.of([None] * B, sampling, root_B.device)
        if max(caps) > 0:
            if self.graphs is not None and self.min_confidence == 0 and self._whole(B):
                return limited(self._captured(replace(plan, room_B=None), depth, rows, noise.seeds_B, root_B), caps, depth, self.name)
            self._take_in(B)
        roots_B = torch.tensor([row.pairs for row in self.rows[:B]], device=root_B.device)
        return grow(self._stepper(B), root_B, plan, caps, rows, noise, roots_B, self.vocab, self.name, self.min_confidence)

    def _stepper(self, B: int) -> HeadStepper:
        return HeadStepper(self.head, self.state, slice(0, B))

    def _whole(self, B: int) -> bool:
        """The last round's pairs are all that is to be taken in, one round for every row, by a head that can do it without the host."""
        able = isinstance(getattr(self.state, "slots", None), DraftSlots)
        return able and self.fresh is not None and len(self.fresh[3]) == B and not any(row.pending or self._off(row) for row in self.rows[:B])

    def _captured(self, plan: Plan, depth: int, rows: RowSampling, seeds_B: Tensor, root_B: Tensor) -> DraftTree:
        """Take the last round's pairs in and draft, all of it one captured step (see inference/graphs.py)."""
        assert self.graphs is not None and self.fresh is not None
        features_BMF, tokens_BM, counts_B, counts = self.fresh
        self.fresh = None
        B, M, slots = len(counts), tokens_BM.shape[1], self.state.slots
        view = self.graphs.view(max(slots.lengths[:B]) + M + MOST_NODES, slots.max_len + MOST_NODES)

        def draft(features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, root_B: Tensor, seeds_B: Tensor, temperature_B: Tensor) -> DraftTree:
            slots.view = view
            try:
                self.head.extend(self.state, features_BMF, tokens_BM, counts_B, slice(0, B))
                roots_B = slots.lengths_B[:B].clone()
                given = replace(rows, temperature_B=temperature_B)
                return sprout(self._stepper(B), root_B, plan, depth, given, Noise(seeds_B, roots_B), roots_B, self.vocab)
            finally:
                slots.view = None

        inputs = (features_BMF, tokens_BM, counts_B.to(root_B.device), root_B, seeds_B, rows.temperature_B)
        tree = self.graphs.run_draft(self.state, (plan, B, M, view, kind(rows)), draft, inputs)
        slots.lengths[:B] = [n + count for n, count in zip(slots.lengths[:B], counts, strict=True)]
        return tree

    # ---- taking in

    def _off(self, row: _Row) -> bool:
        if row.pairs <= self.max_positions:
            return False
        if not self.warned:
            at = f"position {self.max_positions} (its max_positions)"
            warnings.warn(f"{self.name}: drafting stops at {at}; the target goes on without drafts", stacklevel=4)
            self.warned = True
        row.pending.clear()
        return True

    def _take_in(self, B: int) -> None:
        """All pending pairs of the first B rows into the head's cache."""
        rows, fresh = self.rows[:B], self.fresh
        if fresh is not None and not any(row.pending or self._off(row) for row in rows) and len(fresh[3]) == B:
            self.head.extend(self.state, fresh[0], fresh[1], fresh[2], slice(0, B))
            self.fresh = None
            return
        self._spill()
        for b, row in enumerate(rows):
            if row.waiting() > BURST:
                features_MF, tokens_M = _joined(row)
                for part_F, part in zip(features_MF.split(BLOCK), tokens_M.split(BLOCK), strict=True):
                    self.head.extend(self.state, part_F[None], part[None], torch.tensor([len(part)]), slice(b, b + 1))
        counts = [row.waiting() for row in rows]
        if not any(counts):
            return
        width = next(f.shape[-1] for row in rows for f, _ in row.pending)
        like = next(f for row in rows for f, _ in row.pending)
        features_BMF = like.new_zeros(B, max(counts), width)
        tokens_BM = self.root_B.new_zeros(B, max(counts))
        for b, row in enumerate(rows):
            if row.pending:
                features_BMF[b, : counts[b]], tokens_BM[b, : counts[b]] = _joined(row)
        self.head.extend(self.state, features_BMF, tokens_BM, torch.tensor(counts), slice(0, B))


def _joined(row: _Row) -> tuple[Tensor, Tensor]:
    """Empties row.pending."""
    features, tokens = zip(*row.pending, strict=True)
    row.pending.clear()
    return (features[0], tokens[0]) if len(tokens) == 1 else (torch.cat(features), torch.cat(tokens))
