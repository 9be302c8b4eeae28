"""HeadDrafter: a DraftHead as a Drafter; the only caller of a DraftHead's drafting methods.

observe ─► pending (feature, token) pairs ─► [propose] extend: pairs into the head's cache ─► draft_chain ─► DraftTree

Pairs are taken in only when the head must propose: in a composite whose n-gram part serves a round, the head costs next to nothing and
still sees every token. Drafts are argmaxes in greedy rows; in sampled rows they are drawn from the head's own processed distribution (the
sampling options of the target applied to the draft), which goes into the tree as q.

Shape suffixes: B rows, M pairs (padded), T prompt length, F feature width, G drafted tokens, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftheads.heads.base import DraftHead
from draftheads.heads.checkpoint import check_geometry
from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.int8 import can_int8, int8_linears
from draftheads.inference.noise import DRAFT, Noise
from draftheads.inference.packed import pack_linears
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling, row_log_probs
from draftheads.inference.target import Target

# More pending pairs than BURST in one row are taken in alone, BLOCK at a time; more than BACKLOG at once, even if nobody asks for drafts.
BURST, BLOCK, BACKLOG = 16, 256, 512


@dataclass
class _Row:
    """pairs: how many the row has in all, pending ones included; it is the position of its root."""

    pairs: int = 0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def waiting(self) -> int:
        return sum(len(tokens_M) for _, tokens_M in self.pending)


class HeadDrafter(Drafter):
    """int8: on a CPU, draft with int8 weights (inference/int8.py): several times cheaper steps for a slightly worse draft.

    min_confidence: greedy rows stop drafting where the running product of the draft's top probabilities falls below it (0: never);
    the token that would take it below is not proposed.

    Beyond the head's max_positions a row drafts nothing more (one warning); the output is the target's in any case.
    Ids beyond the tokenizer (padding rows of the lm_head) are never proposed.
    """

    name = "head"

    def __init__(self, head: DraftHead, target: Target, *, min_confidence: float = 0.0, int8: bool = False) -> None:
        check_geometry(head.geometry, target.geometry, "the head")
        self.head = inference_copy(head, target, int8)
        self.int8 = int8
        self.taps = tuple(head.taps)
        self.min_confidence = min_confidence
        self.vocab_size = target.geometry.vocab_size
        self.max_positions: int = getattr(head.config, "max_positions", None) or target.geometry.max_positions
        self.ids_U = self.head.target_ids(torch.arange(len(self.head.d2t), device=self.head.d2t.device))
        usable = len(target.tokenizer) if target.tokenizer is not None else self.vocab_size
        self.padding_U = self.ids_U >= usable if int(self.ids_U[-1]) >= usable else None
        self.warned = False

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.state = self.head.new_state(batch, min(max_len, self.max_positions))
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
        self.fresh = (features_BMF, tokens_BM, counts_B, counts)
        for row, count in zip(self.rows, counts, strict=False):
            row.pairs += count
        self.root_B[:B] = tokens_BM.gather(1, (counts_B - 1).clamp(min=0)[:, None])[:, 0]
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
        # The last step of a chain of n feeds the pair at position pairs + n − 2.
        caps = [max(0, min(plan.gamma, self.max_positions - row.pairs + 1)) if not self._off(row) else 0 for row in self.rows[:B]]
        if plan.room_B is not None:
            caps = [min(cap, room) for cap, room in zip(caps, plan.room_B, strict=True)]
        root_B = self.root_B[:B].clone()
        if max(caps) <= 0:
            return self._tree(root_B, [], [0] * B, None)
        self._take_in(B)
        rows = sampling if isinstance(sampling, RowSampling) else RowSampling.of([None] * B, sampling, root_B.device)
        if all(rows.greedy):
            pick, counts = self._greedy(caps)
            return self._tree(root_B, self.head.draft_chain(self.state, max(caps), pick, slice(0, B)), counts, None)
        q: list[Tensor] = []
        pick = self._sampled(rows, noise, torch.tensor([row.pairs for row in self.rows[:B]], device=root_B.device), q)
        return self._tree(root_B, self.head.draft_chain(self.state, max(caps), pick, slice(0, B)), caps, q)

    def _tree(self, root_B: Tensor, chosen: list[Tensor], counts: list[int], q: list[Tensor] | None) -> DraftTree:
        counts = [min(c, len(chosen)) for c in counts]
        widest = max(counts)
        drafts_BG = torch.stack(chosen[:widest], 1) if widest else root_B.new_zeros(len(root_B), 0)
        counts_B = None if min(counts) == widest else torch.tensor(counts, device=root_B.device)
        tree = DraftTree.chain(root_B, drafts_BG, counts_B, torch.stack(q[:widest], 1) if q and widest else None)
        tree.source_B = [self.name if c else "none" for c in counts]
        return tree

    def _greedy(self, caps: list[int]) -> tuple[Callable[[int, Tensor], Tensor | None], list[int]]:
        """The pick function of greedy rows, and the list in which it leaves how many tokens each row proposes."""
        counts = list(caps)
        confidence_B: list[float] = [1.0] * len(caps)

        def pick(j: int, logits_BU: Tensor) -> Tensor | None:
            logits_BU = self._usable(logits_BU)
            top_B, ids_B = logits_BU.max(-1)
            if self.min_confidence > 0:
                for b, p in enumerate((top_B.float() - logits_BU.float().logsumexp(-1)).exp().tolist()):
                    confidence_B[b] *= p
                    if confidence_B[b] < self.min_confidence:
                        counts[b] = min(counts[b], j)
                if max(counts) <= j:
                    return None
            return self.ids_U[ids_B]

        return pick, counts

    def _sampled(self, rows: RowSampling, noise: Noise, root_positions_B: Tensor, q: list[Tensor]) -> Callable[[int, Tensor], Tensor]:
        """The pick function for batches with a sampled row; appends to `q` the distributions [B, V] that the tokens were drawn from."""
        greedy_B1 = (rows.temperature_B == 0)[:, None]

        def pick(j: int, logits_BU: Tensor) -> Tensor:
            logits_BU = self._usable(logits_BU).float()
            logp_BU = row_log_probs(logits_BU[:, None], rows)[:, 0]
            scores_BU = logp_BU + noise.gumbel((root_positions_B + 1 + j)[:, None], DRAFT, logits_BU.shape[-1])[:, 0]
            ids_B = torch.where(greedy_B1, logits_BU, scores_BU).argmax(-1)
            q_BU = torch.where(greedy_B1, torch.zeros_like(logp_BU).scatter_(1, ids_B[:, None], 1.0), logp_BU.exp())
            q.append(q_BU.new_zeros(len(q_BU), self.vocab_size).index_copy_(1, self.ids_U, q_BU))
            return self.ids_U[ids_B]

        return pick

    def _usable(self, logits_BU: Tensor) -> Tensor:
        return logits_BU if self.padding_U is None else logits_BU.masked_fill(self.padding_U, float("-inf"))

    # ---- taking in

    def _off(self, row: _Row) -> bool:
        if row.pairs <= self.max_positions:
            return False
        if not self.warned:
            warnings.warn(f"drafting stops at position {self.max_positions} (head.max_positions); the target goes on without drafts", stacklevel=4)
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


def inference_copy(head: DraftHead, target: Target, int8: bool = False) -> DraftHead:
    """The head as drafting wants it: on the target's device, in its dtype, weights borrowed, linears packed on a CPU. The original is
    left as it is (a packed head can neither train nor be saved)."""
    cpu = target.device.type == "cpu" and target.dtype == torch.float32
    with torch.random.fork_rng(devices=[]):  # a drafter made in mid-training leaves the training's random numbers alone
        copy = type(head).build(head.config, head.geometry, head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device)))
    copy.load_state_dict(head.state_dict())
    copy = copy.to(target.device, target.dtype).eval().requires_grad_(False)
    copy.borrow(target.embed_VD, target.lm_head_VD)
    if cpu and int8 and can_int8():
        int8_linears(copy)
    elif cpu:
        _own_linears(copy)
        pack_linears(copy)
    return copy


def _own_linears(module: nn.Module) -> None:
    """Subclasses of nn.Linear (borrowed weights) become plain ones on the same weight, so that they are packed too."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and type(child) is not nn.Linear:
                plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(child.weight.detach(), requires_grad=False)
                setattr(parent, name, plain)
