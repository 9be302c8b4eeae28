"""SlotCache: static key/value slots for every layer, full length also where the family slides (the window lives in the mask).

Row b's committed tokens sit in slots 0 … lengths[b]−1, slot = position. A forward writes its T new tokens to slots lengths[b] …
lengths[b]+T−1 without committing them; `advance` keeps the first few (prefill, chain), `commit` compacts a path of a tree. What lies beyond
`lengths` is garbage that masks hide and later forwards overwrite. transformers' DynamicCache is the slow twin in the tests.

Rows are a prefix `slice(0, n)` or a single row `slice(r, r + 1)`.

Shape suffixes: B rows, H key/value heads, S slots, D head dimension, T new tokens, M nodes of a path (padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftheads.recipes.schema import RecipeError

BUCKET = {"cpu": 16}  # slots; a CPU pays for every slot it reads, elsewhere repeating shapes matter more


class SlotCache(Cache):
    """`lengths` is the host's list, `lengths_B` the same on the device (int64). Buffers appear at the first forward, zeroed: a masked
    slot still meets the softmax's zero, and 0 · NaN is NaN. They are inference tensors, written under inference_mode only."""

    def __init__(self, batch: int, max_len: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[])
        self.batch, self.max_len, self.device = batch, max_len, torch.device(device)
        self.lengths = [0] * batch
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.keys: list[Tensor] = []  # one [batch, H, max_len, D] a layer
        self.values: list[Tensor] = []
        self._rows = slice(0, batch)
        self._used = 0
        self._start: int | None = 0
        self._stop = 0
        self._slots: tuple[Tensor, Tensor] | None = None

    # --- what a forward does -------------------------------------------------------------------------------------------------------

    def view(self, used: int) -> int:
        """How many slots attention reads when `used` are in use: rounded up, so that shapes (and captured graphs) repeat."""
        bucket = BUCKET.get(self.device.type, 64)
        return min(self.max_len, -(-used // bucket) * bucket)

    def prepare(self, rows: slice, starts: list[int] | Tensor, tokens: int, used: int) -> None:
        """Say where the next forward writes (slots starts[b] … starts[b]+tokens−1) and how many slots it reads. starts as a tensor: the host does
        not look at them (a captured step), and the caller answers for their room."""
        self._rows, self._used = rows, used
        if isinstance(starts, list):
            if max(starts) + tokens > self.max_len:
                found = f"{max(starts)} cached + {tokens} new tokens"
                raise RecipeError(f"{found} do not fit the cache of {self.max_len}: shorten the prompt or raise max_len")
            if min(starts) == max(starts):
                self._start, self._stop, self._slots = starts[0], starts[0] + tokens, None
                return
            starts = torch.tensor(starts, device=self.device)
        row_B1 = torch.arange(rows.start or 0, (rows.start or 0) + len(starts), device=self.device)[:, None]
        self._start, self._slots = None, (row_B1, starts[:, None] + torch.arange(tokens, device=self.device))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: store [B,H,T,D], return views [B,H,S,D]."""
        while layer_idx >= len(self.keys):
            self.keys.append(key_states.new_zeros(self.batch, key_states.shape[1], self.max_len, key_states.shape[3]))
            self.values.append(value_states.new_zeros(self.batch, value_states.shape[1], self.max_len, value_states.shape[3]))
        keys, values, rows = self.keys[layer_idx], self.values[layer_idx], self._rows
        if self._slots is None:
            new = slice(self._start, self._stop)
            keys[rows, :, new].copy_(key_states)
            values[rows, :, new].copy_(value_states)
        else:  # rows of unequal length
            row_B1, slot_BT = self._slots
            keys[row_B1, :, slot_BT] = key_states.transpose(1, 2)
            values[row_B1, :, slot_BT] = value_states.transpose(1, 2)
        return keys[rows, :, : self._used], values[rows, :, : self._used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths[self._rows], default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._used, 0

    # --- between forwards ----------------------------------------------------------------------------------------------------------

    def advance(self, rows: slice, counts: list[int]) -> None:
        """Commit the first counts[b] of the tokens that the last forward wrote behind each row."""
        self.note(rows, counts)
        self.lengths_B[rows] += torch.tensor(counts, device=self.device)

    def note(self, rows: slice, counts: list[int]) -> None:
        """The host's half of `advance`, where the device has committed by itself."""
        for row, count in zip(range(*rows.indices(self.batch)), counts, strict=True):
            self.lengths[row] += count
            if self.lengths[row] > self.max_len:
                raise ValueError(f"row {row}: {self.lengths[row]} tokens committed to a cache of {self.max_len}")

    def commit(self, rows: slice, nodes_BM: Tensor, counts: list[int]) -> None:
        """Keep a path of the last tree: nodes_BM int64 [B,M], tree indices in path order, root included, of which counts[b] count."""
        self.compact(rows, nodes_BM.to(self.device), torch.tensor(counts, device=self.device))
        self.advance(rows, counts)

    @torch.inference_mode()
    def compact(self, rows: slice, nodes_BM: Tensor, count_B: Tensor) -> None:
        """Move the path's tokens to the slots right behind the committed ones, without committing them. The host is not asked."""
        index_M = torch.arange(nodes_BM.shape[1], device=self.device)
        goal_BM = self.lengths_B[rows][:, None] + index_M
        # Columns past the count copy a slot to itself.
        source_BM = self.lengths_B[rows][:, None] + torch.where(index_M < count_B[:, None], nodes_BM, index_M)
        row_B1 = torch.arange(*rows.indices(self.batch), device=self.device)[:, None]
        for buffer in (*self.keys, *self.values):
            buffer[row_B1, :, goal_BM] = buffer[row_B1, :, source_BM]

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """Row `source` now lives in `to`; `source` becomes empty."""
        if source == to:
            return
        used = self.lengths[source]
        for buffer in (*self.keys, *self.values):
            buffer[to, :, :used] = buffer[source, :, :used]
        self.lengths[to] = used
        self.lengths_B[to] = used
        self.clear(source)

    def clear(self, row: int) -> None:
        self.lengths[row] = 0
        self.lengths_B[row] = 0
