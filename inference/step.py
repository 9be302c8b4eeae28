"""What a round does after drafting, as one function on fixed shapes: forward the tree, process, verify, commit the accepted path.

    tree ─► target.extend ─► logits ─► processors (per path) ─► verify ─► compact and commit ─► one small copy to the host

Eagerly the host reads the verdict before it commits and so may skip what is not needed (a chain lies in place; only the longest accepted path is
kept). Captured as a CUDA graph (inference/graphs.py) everything happens on the device, at the full width of the tree, and the host reads afterwards.

Shape suffixes: B rows, N tree nodes, M nodes kept of each row (padded), F feature width, D hidden, V vocabulary, X packed numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.cache import SlotCache
from draftheads.inference.graphs import kind
from draftheads.inference.noise import Noise
from draftheads.inference.outcome import Kept, RowOutcome, along, pack, read
from draftheads.inference.processors import History
from draftheads.inference.sampling import RowSampling
from draftheads.inference.target import Target
from draftheads.inference.verify import Verdict, verify


@dataclass
class Stepped:
    """A round's results along the accepted paths (columns past a row's count are garbage); None where not asked for. tokens_BM, on the CPU: accepted
    drafts, then the bonus token. lse_BM: log-sum-exp of the raw logits. logp_BMV: processed distributions."""

    outcomes: list[RowOutcome]
    tokens_BM: Tensor
    features_BMF: Tensor | None
    final_BMD: Tensor | None
    lse_BM: Tensor | None
    logp_BMV: Tensor | None

    @property
    def counts(self) -> list[int]:
        return [o.accepted + 1 for o in self.outcomes]


class Step:
    """states: also return final states and log-sum-exp. logp: also return the processed distributions. graphs: capture (not with `history`)."""

    def __init__(self, target: Target, cache: SlotCache, taps: tuple[int | str, ...], *, history: History | None = None, states: bool = False,
                 logp: bool = False, graphs: bool = False) -> None:
        self.target, self.cache, self.taps, self.history, self.states, self.logp = target, cache, taps, history, states, logp
        self.graphs = target.graphs if graphs and history is None else None

    def __call__(self, rows: slice, tree: DraftTree, seeds_B: Tensor, sampling: RowSampling) -> Stepped:
        """Verify `tree` behind the rows and commit what it accepts."""
        return self._eager(rows, tree, seeds_B, sampling) if self.graphs is None else self._captured(rows, tree, seeds_B, sampling)

    def _verify(self, rows: slice, tree: DraftTree, seeds_B: Tensor, sampling: RowSampling, view: int | None
                ) -> tuple[Tensor, Tensor | None, Tensor, Verdict]:
        positions_B = self.cache.lengths_B[rows].clone()
        shape = tree if tree.width > 1 else None
        final_BND, features_BNF = self.target.extend(self.cache, rows, tree.tokens_BN, tree=shape, taps=self.taps, view=view)
        logits_BNV = self.target.logits(final_BND)
        processed_BNV = logits_BNV if self.history is None else self.history.process(logits_BNV, tree, rows)
        return final_BND, features_BNF, logits_BNV, verify(tree, processed_BNV, sampling, Noise(seeds_B, positions_B), positions_B)

    def _eager(self, rows: slice, tree: DraftTree, seeds_B: Tensor, sampling: RowSampling) -> Stepped:
        final_BND, features_BNF, logits_BNV, verdict = self._verify(rows, tree, seeds_B, sampling, None)
        outcomes = read(pack(tree, verdict))
        kept = Kept(verdict.path_BM, outcomes)
        if kept.in_place:
            self.cache.advance(rows, kept.counts)
        else:
            self.cache.commit(rows, kept.path_BM, kept.counts)
        return Stepped(
            outcomes, kept.tokens_BM, None if features_BNF is None else kept.along(features_BNF), kept.along(final_BND) if self.states else None,
            kept.along(logits_BNV.logsumexp(-1)) if self.states else None,
            kept.along(verdict.logp_BNV) if self.logp and verdict.logp_BNV is not None else None,
        )

    def _captured(self, rows: slice, tree: DraftTree, seeds_B: Tensor, sampling: RowSampling) -> Stepped:
        assert self.graphs is not None
        if tree.widths is None and (N := min(self.graphs.width(tree.width), self.cache.max_len - max(self.cache.lengths[rows]))) > tree.width:
            tree = tree.widened(N)
        lengths = self.cache.lengths[rows]
        view = self.graphs.view(max(lengths) + tree.width, self.cache.max_len)
        key = (self.taps, self.states, self.logp, len(lengths), tree.width, tree.chained, tree.widths, tree.q_BNV is None, view, kind(sampling))

        def step(tokens_BN: Tensor, parents_BN: Tensor, valid_BN: Tensor, q_BNV: Tensor | None, seeds_B: Tensor, temperature_B: Tensor
                 ) -> tuple[Tensor | None, ...]:
            given = DraftTree(tokens_BN, parents_BN, valid_BN, q_BNV, chained=tree.chained, widths=tree.widths)
            final_BND, features_BNF, logits_BNV, verdict = self._verify(rows, given, seeds_B, replace(sampling, temperature_B=temperature_B), view)
            path_BM = verdict.path_BM
            if not tree.chained:
                self.cache.compact(rows, path_BM, verdict.counts_B + 1)
            self.cache.lengths_B[rows] += verdict.counts_B + 1
            return (
                pack(given, verdict), None if features_BNF is None else along(features_BNF, path_BM),
                along(final_BND, path_BM) if self.states else None, along(logits_BNV.logsumexp(-1), path_BM) if self.states else None,
                along(verdict.logp_BNV, path_BM) if self.logp and verdict.logp_BNV is not None else None,
            )

        inputs = (tree.tokens_BN, tree.parents_BN, tree.valid_BN, tree.q_BNV, seeds_B, sampling.temperature_B)
        packed_BX, features_BMF, final_BMD, lse_BM, logp_BMV = self.graphs.run(self.cache, key, step, inputs)
        assert packed_BX is not None
        outcomes = read(packed_BX)
        self.cache.note(rows, [o.accepted + 1 for o in outcomes])
        tokens_BM = torch.tensor([o.tokens + [0] * (tree.width - len(o.tokens)) for o in outcomes])
        # They are looked at beyond this round (recorded, or pending in a drafter that another one stood in for); the next replay writes over them.
        features_BMF, final_BMD, lse_BM = (None if t is None else t.clone() for t in (features_BMF, final_BMD, lse_BM))
        return Stepped(outcomes, tokens_BM, features_BMF, final_BMD, lse_BM, logp_BMV)
