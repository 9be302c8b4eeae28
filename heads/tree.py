"""DraftTree: what a drafter proposes and the target verifies in one forward.

Node 0 is the root, the last accepted token (not yet in the target's cache). Every other node is a drafted token whose
parent has a smaller index. A chain is the tree with parents -1, 0, 1, 2, …  Verify width w = N.

Shape suffixes: B rows, N tree nodes, G drafted tokens of a chain (γ), V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """A batch of draft trees, in target ids.

    tokens_BN  int64, target ids; column 0 is the root.
    parents_BN int64, index of the parent node; -1 at the root. Parents come before their children.
    valid_BN   bool; False for padding nodes (they are never accepted). Column 0 is always True; a node is valid only if its parent is.
    q_BNV      float32 or None. For *sampled* drafts: q_BNV[b, i] is exactly the distribution over the target's vocabulary that node
               i's token was drawn from (row 0 is unused). None means deterministic proposals (q is one-hot).
    source_B   optional list, one short name a row ("head", "ngram", …): who drafted it, for the metrics.
    chained    the host's knowledge that every parent is the node before it: a GPU need not be asked. False means "not known to be".
    widths     for trees grown level by level: (w_1, w_2, …), every node at depth d − 1 has w_d children, nodes in level order, siblings
               side by side in the order in which they were drawn. None: any other shape.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    valid_BN: Tensor
    q_BNV: Tensor | None = None
    source_B: list[str] | None = None
    chained: bool = False
    widths: tuple[int, ...] | None = None

    @classmethod
    def chain(cls, root_B: Tensor, drafts_BG: Tensor, counts_B: Tensor | None = None, q_BGV: Tensor | None = None) -> DraftTree:
        """A chain: root, then G drafted tokens; counts_B (int64) says how many of them are real in each row (default all)."""
        B, G = drafts_BG.shape
        index_N = torch.arange(G + 1, device=root_B.device)
        valid_BN = index_N[None] <= (counts_B[:, None] if counts_B is not None else torch.full((B, 1), G, device=root_B.device))
        q_BNV = None if q_BGV is None else torch.cat([torch.zeros_like(q_BGV[:, :1]) if G else q_BGV.new_zeros(B, 1, q_BGV.shape[-1]), q_BGV], 1)
        return cls(torch.cat([root_B[:, None], drafts_BG], 1), (index_N - 1)[None].expand(B, -1).contiguous(), valid_BN, q_BNV, chained=True)

    @property
    def width(self) -> int:
        """N, the number of tokens the target sees in the verify forward."""
        return self.tokens_BN.shape[1]

    def widened(self, N: int) -> DraftTree:
        """The same tree padded to N nodes with invalid ones, each a child of the node before it."""
        B, width = self.tokens_BN.shape
        if N == width:
            return self
        parents_BE = torch.arange(width - 1, N - 1, device=self.parents_BN.device).expand(B, -1)
        pad = torch.nn.functional.pad
        return DraftTree(pad(self.tokens_BN, (0, N - width)), torch.cat([self.parents_BN, parents_BE], 1), pad(self.valid_BN, (0, N - width)),
                         None if self.q_BNV is None else pad(self.q_BNV, (0, 0, 0, N - width)), self.source_B, self.chained)

    def ancestors_BNN(self) -> Tensor:
        """bool [B,N,N]: [b,i,j] is True where j is i or an ancestor of i (what node i may attend to inside the tree)."""
        B, N = self.tokens_BN.shape
        if self.chained:
            return torch.ones(N, N, dtype=torch.bool, device=self.tokens_BN.device).tril_().expand(B, N, N)
        reach_BNN = torch.eye(N, dtype=torch.bool, device=self.tokens_BN.device).expand(B, N, N).clone()
        hop_BN = self.parents_BN
        steps = max(1, (N - 1).bit_length())
        # Pointer doubling: after k rounds every node knows its 2^k nearest ancestors.
        for _ in range(steps):
            known_BN = hop_BN.clamp(min=0)
            above_BNN = reach_BNN.gather(1, known_BN[..., None].expand(-1, -1, N)) & (hop_BN >= 0)[..., None]
            hop_BN = torch.where(hop_BN >= 0, hop_BN.gather(1, known_BN), hop_BN)
            reach_BNN = reach_BNN | above_BNN
        return reach_BNN

    def depths_BN(self) -> Tensor:
        """int64 [B,N]: 0 at the root. The node's position is (position of the root) + depth."""
        return self.ancestors_BNN().sum(-1) - 1
