"""DraftSlots: the key/value cache of a head that drafts with attention of its own, in one or more layers, static.

Row b's committed pairs lie in slots 0 … lengths[b]−1, slot = position. A draft lies behind them: its i-th token in slot lengths[b] + i, whatever
its depth. What an earlier draft left there is garbage that masks hide and later writes cover.

Two ways to find a slot. With `view` None the host's lengths are used: slices, no mask where all rows are equally long (on a CPU each indexed write
or mask costs as much as the arithmetic of a small head). With `view` set nothing depends on the host: the same operations at every length, as a
captured CUDA graph needs them; attention then reads `view` slots.

Shape suffixes: L layers, B rows, K key/value heads, S slots, D head dimension, T new tokens, W tokens of a draft level, A drafted slots so
far, Q folded queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftheads.heads.layers import attend_cached


class DraftSlots:
    """batch rows of at most max_len pairs and, behind them, `drafts` drafted tokens. cos_sin: positions [1, S] → cos, sin [1, S, D]. All layers
    have the same lengths: `write` to each of them before `advance`."""

    def __init__(self, batch: int, max_len: int, drafts: int, kv_heads: int, head_dim: int, like: Tensor,
                 cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]], layers: int = 1) -> None:
        self.max_len, self.drafts = max_len, drafts
        self.view: int | None = None
        # One slot more: it takes what padding writes and is never read.
        S = max_len + drafts + 1
        # Ordinary tensors even when the caller is in inference mode, so that the state may be used outside it too.
        with torch.inference_mode(False), torch.no_grad():
            cache = torch.zeros(2, layers, batch, kv_heads, S, head_dim, device=like.device, dtype=like.dtype)
            self.keys_LBKSD, self.values_LBKSD = cache[0], cache[1]
            cos_1SD, sin_1SD = cos_sin(torch.arange(S, device=like.device)[None])
            self.cos_SD, self.sin_SD = cos_1SD[0], sin_1SD[0]
            self.lengths = [0] * batch
            self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=like.device)
            self.index_S = torch.arange(S, device=like.device)

    def rope(self, rows: slice, offset: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """cos and sin of positions lengths[b] + offset … + count − 1, to multiply [B, K, count, D] with."""
        if (start := self._start(rows)) is not None:
            return self.cos_SD[start + offset : start + offset + count], self.sin_SD[start + offset : start + offset + count]
        at_BT = self._slots(rows, offset, count)
        return self.cos_SD[at_BT][:, None], self.sin_SD[at_BT][:, None]

    def write(self, rows: slice, k_BKTD: Tensor, v_BKTD: Tensor, offset: int, layer: int = 0) -> None:
        """T tokens a row into slots lengths[b] + offset …"""
        keys_BKSD, values_BKSD = self.keys_LBKSD[layer], self.values_LBKSD[layer]
        T = k_BKTD.shape[2]
        start = self._start(rows)
        if start is not None and start + offset + T < len(self.index_S):
            keys_BKSD[rows, :, start + offset : start + offset + T] = k_BKTD
            values_BKSD[rows, :, start + offset : start + offset + T] = v_BKTD
            return
        slot_BT = self._slots(rows, offset, T)
        row_B1 = torch.arange(*rows.indices(len(self.lengths)), device=slot_BT.device)[:, None]
        keys_BKSD[row_B1, :, slot_BT] = k_BKTD.transpose(1, 2)
        values_BKSD[row_B1, :, slot_BT] = v_BKTD.transpose(1, 2)

    def counts(self, rows: slice, counts_B: Tensor) -> list[int] | None:
        """How many pairs each row is about to get, for the host; None with `view` set, when nothing may be asked. ValueError if they do not fit."""
        if self.view is not None:
            return None
        counts: list[int] = counts_B.tolist()
        longest = max(n + count for n, count in zip(self.lengths[rows], counts, strict=True))
        if longest > self.max_len:
            raise ValueError(f"{longest} pairs do not fit a drafting cache of {self.max_len}")
        return counts

    def advance(self, rows: slice, counts_B: Tensor, counts: list[int] | None) -> None:
        """Commit the first counts[b] of the tokens just written. counts None (view set): the caller keeps `lengths`, later."""
        self.lengths_B[rows] += counts_B.to(self.lengths_B.device)
        if counts is not None:
            self.lengths[rows] = [n + count for n, count in zip(self.lengths[rows], counts, strict=True)]

    def attend(self, rows: slice, q_BKQD: Tensor, drafted: int = 0, above_BWA: Tensor | None = None, layer: int = 0) -> Tensor:
        """Queries against all committed slots and, of the first `drafted` behind them, all (above_BWA None) or those marked."""
        lengths = self.lengths[rows]
        n = self.view if self.view is not None else max(lengths) + drafted
        mask_BWS = None
        if above_BWA is not None or self._start(rows) is None:
            if above_BWA is None:
                mask_BWS = (self.index_S[:n] < self.lengths_B[rows, None] + drafted)[:, None]
            else:
                mask_BWS = behind_mask(self.lengths_B[rows], self.index_S[:n], above_BWA)
        return attend_cached(q_BKQD, self.keys_LBKSD[layer, rows, :, :n], self.values_LBKSD[layer, rows, :, :n], mask_BWS)

    def move(self, source: int, to: int) -> None:
        n = self.lengths[source]
        for cache_LBKSD in (self.keys_LBKSD, self.values_LBKSD):
            cache_LBKSD[:, to, :, :n] = cache_LBKSD[:, source, :, :n]
        self.lengths[to] = n
        self.lengths_B[to] = n

    def clear(self, row: int) -> None:
        self.lengths[row] = 0
        self.lengths_B[row] = 0

    def _start(self, rows: slice) -> int | None:
        """The common length of these rows, if the host may use it."""
        lengths = self.lengths[rows]
        return lengths[0] if self.view is None and min(lengths) == max(lengths) else None

    def _slots(self, rows: slice, offset: int, count: int) -> Tensor:
        """int64 [B, count]; what would lie beyond the end goes to the spare slot."""
        return (self.lengths_B[rows, None] + (offset + self.index_S[:count])).clamp(max=len(self.index_S) - 1)


def descend(above_BWA: Tensor | None, parents_BW: Tensor, drafted: int) -> Tensor:
    """Which drafted slots the W tokens of a new level may read: what their parents read, and themselves.

    above_BWA: of the level before, bool; None: so far it was a chain, or nothing. -> bool [B, W, drafted + W]; parents as in DraftHead.step.
    """
    B, W = parents_BW.shape
    own_BWW = torch.eye(W, dtype=torch.bool, device=parents_BW.device).expand(B, W, W)
    if above_BWA is None:
        seen_BWA = own_BWW.new_ones(B, W, drafted)
    else:
        seen_BWA = above_BWA.gather(1, parents_BW[..., None].expand(-1, -1, above_BWA.shape[2]))
    return torch.cat([seen_BWA, own_BWW], 2)


def behind_mask(length_B: Tensor, index_S: Tensor, above_BWA: Tensor) -> Tensor:
    """bool [B, W, S]: which slots W queries may read: every committed one (< length), and of the A behind them those that above_BWA marks."""
    behind_BS, A = index_S - length_B[:, None], above_BWA.shape[2]
    inside_BWS = above_BWA.gather(2, behind_BS.clamp(0, A - 1)[:, None].expand(-1, above_BWA.shape[1], -1))
    return torch.where((behind_BS < 0)[:, None], True, inside_BWS & (behind_BS < A)[:, None])
