"""What a round leaves behind: read by the host once, kept on the device along the accepted path.

Shape suffixes: B rows, N tree nodes, M longest accepted path of the batch (root included), T positions of one row, F feature width, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.verify import Verdict


@dataclass(frozen=True)
class RowOutcome:
    """tokens: accepted drafts, then the bonus token (untrimmed). in_place: the path is nodes 0, 1, 2, … so the cache needs no compaction."""

    accepted: int
    drafted: int
    nodes: int
    tokens: list[int]
    in_place: bool = True


def pack(tree: DraftTree, verdict: Verdict) -> Tensor:
    """int32 [B, 1 or 4 + 2N]: all that the host wants to know of a round, in one small tensor."""
    if tree.width == 1:
        return verdict.next_B[:, None].int()
    few = [verdict.counts_B, verdict.drafted_B, tree.valid_BN.sum(-1) - 1, verdict.next_B]
    return torch.cat([torch.stack(few, 1), verdict.path_BM, tree.tokens_BN.gather(1, verdict.path_BM)], 1).int()


def read(packed_BX: Tensor) -> list[RowOutcome]:
    """The round's one look at the device."""
    if packed_BX.shape[1] == 1:
        return [RowOutcome(0, 0, 0, [token]) for (token,) in packed_BX.tolist()]
    N = (packed_BX.shape[1] - 4) // 2
    outcomes = []
    for accepted, drafted, nodes, bonus, *rest in packed_BX.tolist():
        path, tokens = rest[: accepted + 1], rest[N : N + accepted + 1]
        outcomes.append(RowOutcome(accepted, drafted, nodes, [*tokens[1:], bonus], path == list(range(accepted + 1))))
    return outcomes


class Kept:
    """The first M nodes of each row's accepted path (columns past the row's own count are garbage). tokens_BM int64 on the *CPU*: per row its
    accepted drafts, then the bonus token."""

    def __init__(self, path_BM: Tensor, outcomes: list[RowOutcome]) -> None:
        self.counts = [o.accepted + 1 for o in outcomes]
        self.M = max(self.counts)
        self.in_place = all(o.in_place for o in outcomes)
        self.path_BM = path_BM[:, : self.M]
        self.tokens_BM = torch.tensor([o.tokens + [0] * (self.M - len(o.tokens)) for o in outcomes])

    def along(self, value_BNX: Tensor) -> Tensor:
        """[B,N,…] → [B,M,…]."""
        return value_BNX[:, : self.M] if self.in_place else along(value_BNX, self.path_BM)


def along(value_BNX: Tensor, path_BM: Tensor) -> Tensor:
    """[B,N,…] → [B,M,…]: the values at the nodes of each row's path."""
    index_BM = path_BM.reshape(*path_BM.shape, *[1] * (value_BNX.dim() - 2))
    return value_BNX.gather(1, index_BM.expand(-1, -1, *value_BNX.shape[2:]))


class Columns:
    """Which columns of the features of `taps` are those of `wanted`, in wanted's order; D columns a tap."""

    def __init__(self, taps: tuple[int | str, ...], wanted: tuple[int | str, ...], D: int) -> None:
        self.whole = taps == wanted
        self.slices = [slice(taps.index(t) * D, (taps.index(t) + 1) * D) for t in wanted]

    def of(self, features: Tensor | None) -> Tensor | None:
        """[..., F of taps] → [..., F of wanted]; None if nothing is wanted."""
        if features is None or not self.slices:
            return None
        return features if self.whole else torch.cat([features[..., s] for s in self.slices], -1)
