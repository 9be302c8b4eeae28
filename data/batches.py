"""Which rows make which optimizer step: a pure function of the lengths, so that a resumed run, or one with other processes, sees the same.

    lengths ─► shuffle by (seed, epoch) ─► windows sorted by length ─► global batches of ≤ batch_tokens ─► shuffled
            ─► dealt to ranks ─► micro-batches of ≤ micro_tokens

The padded size of a batch is its longest row times its number of rows. Global batches depend on neither the world size nor micro_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 16  # global batches that are sorted by length together: little padding, and yet every epoch mixes anew


def plan(
    lengths: Sequence[int], *, batch_tokens: int, micro_tokens: int, seed: int, epoch: int, world: int
) -> list[list[list[list[int]]]]:
    """One epoch: a list of global batches, each a list over `world` ranks of lists of micro-batches of row indices.

    Every row appears exactly once. Within a global batch all ranks have equally many micro-batches (the last ones may be empty: a rank
    without rows must still take part in the collectives). A row longer than the limit is a batch, or a micro-batch, of its own.
    lengths are what will be padded: cut them at train.max_len first.
    """
    if batch_tokens < 1 or micro_tokens < 1 or world < 1:
        raise ValueError(f"batch_tokens, micro_tokens and world must be positive, found {batch_tokens}, {micro_tokens}, {world}")
    batches = global_batches(lengths, batch_tokens=batch_tokens, seed=seed, epoch=epoch)
    return [_deal(batch, lengths, micro_tokens, world) for batch in batches]


def global_batches(lengths: Sequence[int], *, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The epoch's optimizer steps as lists of row indices, longest row first."""
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = [int(i) for i in rng.permutation(len(lengths))]
    batches = []
    for window in _windows(order, lengths, batch_tokens * WINDOW):
        rank_in_window = {row: k for k, row in enumerate(window)}  # equal lengths stay in shuffled order
        batches += _cut(sorted(window, key=lambda row: (-lengths[row], rank_in_window[row])), lengths, batch_tokens)
    return [batches[int(i)] for i in rng.permutation(len(batches))]


def _windows(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    windows: list[list[int]] = []
    filled = tokens
    for row in order:
        if filled >= tokens:
            windows.append([])
            filled = 0
        windows[-1].append(row)
        filled += lengths[row]
    return windows


def _cut(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Consecutive rows (longest first) into groups of padded size ≤ tokens."""
    groups: list[list[int]] = []
    for row in rows:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _deal(batch: Sequence[int], lengths: Sequence[int], micro_tokens: int, world: int) -> list[list[list[int]]]:
    """Every world-th row to a rank: ranks get rows of like lengths, so none waits long for another."""
    ranks = [_cut(batch[rank::world], lengths, micro_tokens) for rank in range(world)]
    most = max(map(len, ranks))
    return [micro + [[] for _ in range(most - len(micro))] for micro in ranks]
