"""Counter-based noise: every random number is a hash of (row seed, absolute position, purpose, index), never of a generator's state.

So a row's draws do not depend on its batch-mates, on the batch size, or on how many tokens a round accepted, and they are the same
integers on every device. The target's own draw for the token at absolute position P always uses (seed, P, TARGET): with deterministic
drafts the sampled output is therefore the autoregressive one with the same seed.

The trap is reuse. DRAFT and ACCEPT numbers of a position can be looked at in one round and rejected, and the position is drafted again
in the next round; using the same numbers again would condition them on the earlier rejection and bias the output. These two purposes are
therefore also keyed by the position of the round's root (`rounds_B`), which is different in every round of a row.

Shape suffixes: B rows, N nodes or positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TARGET, DRAFT, ACCEPT, RESIDUAL = 1, 2, 3, 4

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """seeds_B: int64 [B], one seed a row. rounds_B: int64 [B], position of this round's root (see above), or None outside rounds."""

    seeds_B: Tensor
    rounds_B: Tensor | None = None

    def uniform(self, positions_BN: Tensor, purpose: int, siblings_BN: Tensor | None = None) -> Tensor:
        """float32 [B,N], strictly inside (0, 1). siblings_BN: further keys, for candidates that are judged at the same position."""
        # Positions fit into the low half; both halves are absorbed one after the other, and sibling 0 is "no sibling".
        low_BN, high_BN = self._keys(positions_BN if siblings_BN is None else positions_BN + (siblings_BN << 32), purpose)
        return _unit(_mix32(_mix32(low_BN) ^ high_BN))

    def gumbel(self, positions_BN: Tensor, purpose: int, V: int) -> Tensor:
        """float32 [B,N,V], standard Gumbel: argmax(log p + gumbel) is a draw from p."""
        low_BN, high_BN = self._keys(positions_BN, purpose)
        index_V = torch.arange(V, dtype=torch.int32, device=positions_BN.device)
        hash_BNV = _mix32(_mix32(index_V * _i32(0x9E3779B9) + low_BN[..., None]) ^ high_BN[..., None])
        # −log(1−u) keeps the resolution of small u, which decides the argmax: the largest Gumbel is ln 2³², not ln 2²⁴.
        return torch.log1p(_unit(hash_BNV).neg_()).neg_().log_().neg_()

    def _keys(self, positions_BN: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
        """Two independent int32 [B,N] keys of (seed, round, position, purpose)."""
        rounds_B = self.rounds_B if self.rounds_B is not None and purpose in (DRAFT, ACCEPT) else torch.zeros_like(self.seeds_B)
        lanes = []
        for start in (0x243F6A88, 0x85A308D3):
            key = torch.full_like(self.seeds_B[:, None], start)
            # One after another, mixed in between: two parts that merely added up would let position + 1 stand in for purpose + 1.
            for part in (self.seeds_B[:, None], rounds_B[:, None], torch.full_like(key, purpose), positions_BN):
                key = _absorb(_absorb(key, part & _MASK), (part >> 32) & _MASK)
            lanes.append(key.to(torch.int32))
        return lanes[0], lanes[1]


def _absorb(key: Tensor, part: Tensor) -> Tensor:
    """A 32-bit finaliser computed in int64 (products wrap, the mask keeps the low half): for a given part a bijection of the low 32 bits."""
    x = ((key ^ part) + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _mix32(x: Tensor) -> Tensor:
    """The same finaliser in int32, where it vectorises. A signed shift copies the sign bit, hence the masks."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _i32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _unit(hash_i32: Tensor) -> Tensor:
    """int32 → float32 in (0,1). 31 bits as a non-negative integer: float32 is exact near 0. Rounding could reach 1.0 (log1p → −inf): clamp."""
    return (hash_i32 & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _i32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
