"""What training reads: which rows count, what they weigh, and a micro-batch made ready for the step.

    store ─► survey (tokens and flags only) ─► usable rows, loss slots per row, label counts ─► draft vocabulary
    row indices ─► rows (features from the store, or by a target forward) ─► noise ─► align ─► chunks

Nothing here draws from a global generator: feature noise is keyed by (seed, step, row), so neither the number of processes nor a resumed
run changes it.

Shape suffixes: B rows, T slots, L tokens, F feature width, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftheads.data.features import Row, RowStore
from draftheads.heads.vocab import build_draft_vocab
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError, TrainSection
from draftheads.train.align import Aligned, align, loss_labels, nothing
from draftheads.train.step import Chunk, chunk_size, chunks_of
from draftheads.train.tuned import Held, held_of

MOST_WAITING = 1 << 20


@dataclass
class Survey:
    """One pass over the tokens. rows: indices of the usable rows; lengths: their tokens after cutting; slots: per row its loss slots at step 0;
    labels_V: how often each id is the label of one; produced_V, tokens_V: how often the target produced each id, and how often it occurs at all;
    cut, empty: rows cut at max_len, and left out for want of a loss slot. A few numbers a row, whatever its length."""

    rows: list[int]
    lengths: list[int]
    slots: list[int]
    labels_V: Tensor
    produced_V: Tensor
    tokens_V: Tensor
    cut: int = 0
    empty: int = 0

    def shares(self, store: RowStore, train: TrainSection, known_V: Tensor) -> list[int]:
        """Loss slots at step 0 per usable row that count: what the global normaliser is made of, known to every process."""
        if not train.drop_out_of_vocab:
            return self.slots
        return [int(known_V[_labels(store, i, train)].sum()) for i in self.rows]


def _labels(store: RowStore, index: int, train: TrainSection) -> Tensor:
    return loss_labels(*store.tokens(index), supervise=train.supervise, max_len=train.max_len)


class _Counts:
    """How often each id occurs, counted many rows at a time: a vocabulary is longer than a row."""

    def __init__(self, vocab_size: int) -> None:
        self.total_V = torch.zeros(vocab_size, dtype=torch.int64)
        self.waiting: list[Tensor] = []
        self.size = 0

    def add(self, ids: Tensor) -> None:
        self.waiting.append(ids)
        self.size += len(ids)
        if self.size > MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.total_V += torch.bincount(torch.cat(self.waiting), minlength=len(self.total_V))
        self.waiting, self.size = [], 0


def survey(store: RowStore, train: TrainSection, vocab_size: int) -> Survey:
    """RecipeError when the mask covers nothing."""
    labels, produced, tokens = (_Counts(vocab_size) for _ in range(3))
    found = Survey([], [], [], labels.total_V, produced.total_V, tokens.total_V)
    for index in range(len(store)):
        ids_L, flags_L = store.tokens(index)
        found.cut += len(ids_L) > train.max_len
        if len(ids_L) and int(ids_L.max()) >= vocab_size:
            raise RecipeError(f"row {index} of the data holds token {int(ids_L.max())}, the target's vocabulary has {vocab_size}: other data")
        tokens.add(ids_L)
        produced.add(ids_L[flags_L])
        of_row = loss_labels(ids_L, flags_L, supervise=train.supervise, max_len=train.max_len)
        if not len(of_row):
            found.empty += 1
            continue
        labels.add(of_row)
        found.rows.append(index)
        found.lengths.append(min(len(ids_L), train.max_len))
        found.slots.append(len(of_row))
    for counts in (labels, produced, tokens):
        counts.flush()
    if not found.rows:
        wanted = "three tokens" if train.supervise == "all" else "two successive answer tokens"
        raise RecipeError(f"the mask covers nothing: none of {len(store)} rows has {wanted} within train.max_len "
                          f"{train.max_len}; raise it, or look at the rows with specdec show-mask")
    return found


def draft_vocabulary(found: Survey, size: int, target: Target) -> Tensor:
    """Sorted ids: what the target produced most, then (a small run sees few distinct tokens) what prompts hold, then low ids, the frequent
    ones of a BPE vocabulary. Ends of answers and turns are in; lm_head rows beyond the tokenizer are not."""
    required, forbidden = vocabulary_bounds(size, target)
    V = len(found.produced_V)
    by_id_V = 1.0 / (torch.arange(V, dtype=torch.float64) + 64)
    prior_V = by_id_V / by_id_V.sum() + found.tokens_V / found.tokens_V.sum()
    return build_draft_vocab(found.produced_V, size, required=required, forbidden=forbidden, prior_V=prior_V)


def vocabulary_bounds(size: int, target: Target) -> tuple[list[int], range]:
    """Ids that a draft vocabulary of this size must hold, and those it must not. RecipeError where it cannot be."""
    V = target.geometry.vocab_size
    usable = min(len(target.tokenizer), V)
    required, forbidden = sorted(i for i in target.eos_ids if i < usable), range(usable, V)
    build_draft_vocab(torch.zeros(V), size, required=required, forbidden=forbidden)
    return required, forbidden


@dataclass
class Examples:
    """Micro-batches by row index. chunk: teacher positions of a chunk; fill: adds features to rows that were stored without; thin:
    DraftHead.thin; device: where the step runs."""

    store: RowStore
    train: TrainSection
    known_V: Tensor
    width: int
    hidden: int
    chunk: int
    fill: Callable[[Sequence[Row]], list[Row]] | None = None
    thin: Callable[[Tensor, torch.Generator], Tensor] | None = None
    device: torch.device = torch.device("cpu")

    def prepare(self, rows: Sequence[int], *, steps: int, step: int) -> tuple[Aligned, list[Chunk]]:
        """The micro-batch of these rows for optimizer step `step`, on the host."""
        if not rows:
            return nothing(steps, self.width, self.hidden), []
        read = [self.store[i] for i in rows]
        if self.fill is not None:
            read = self.fill([_cut(r, self.train.max_len) for r in read])
        if self.train.feature_noise:
            read = [add_noise(r, self.train.feature_noise, self.hidden, key(self.train.seed, step, i)) for r, i in zip(read, rows, strict=True)]
        aligned = align(read, steps=steps, supervise=self.train.supervise, max_len=self.train.max_len)
        if self.thin is not None:
            draws = (torch.Generator().manual_seed(key(self.train.seed, step, i, 1)) for i in rows)
            kept = [self.thin(valid_TJ, draw) for valid_TJ, draw in zip(aligned.batch.valid_BTJ, draws, strict=True)]
            aligned = replace(aligned, kept_BTJ=torch.stack(kept))
        chunks = chunks_of(aligned, self.train, self.known_V, self.chunk)
        if aligned.kept_BTJ is not None:
            aligned = replace(aligned, batch=replace(aligned.batch, valid_BTJ=aligned.batch.valid_BTJ & aligned.kept_BTJ))
        return aligned, chunks


    def held(self, aligned: Aligned) -> list[Held]:
        """Where a tuned target is held to the original in this micro-batch (train.lora; nowhere without). On the host."""
        if self.train.lora is None:
            return []
        return held_of(aligned, self.train, self.known_V, chunk_size(self.train, len(self.known_V), self.device))


def add_noise(row: Row, scale: float, hidden: int, seed: int) -> Row:
    """Uniform noise in ± scale · (rms of the tap at that token), as the massive activations of one tap must not set the noise of another."""
    assert row.features_TF is not None
    taps_TKD = row.features_TF.unflatten(-1, (-1, hidden))
    noise_TKD = torch.rand(taps_TKD.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    rms_TK1 = taps_TKD.square().mean(-1, keepdim=True).sqrt()
    return replace(row, features_TF=(taps_TKD + scale * rms_TK1 * noise_TKD).flatten(-2))


def key(*parts: int) -> int:
    """A seed (63 bits) from integers."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


@torch.inference_mode()
def target_features(target: Target, taps: tuple[int | str, ...], rows: Sequence[Row]) -> list[Row]:
    """Rows with the target's states (data.features: online): one forward over the padded rows. float32, on the host."""
    longest = max(map(len, rows)) - 1
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids_BT[b, : len(row) - 1] = row.ids[:-1]  # the last token was never fed when features are captured, and has no label here
    cache = target.new_cache(len(rows), longest)
    final_BTD, features_BTF = target.extend(cache, slice(0, len(rows)), ids_BT.to(target.device), taps=taps)
    assert features_BTF is not None
    filled = []
    for b, row in enumerate(rows):
        final_TD, features_TF = final_BTD[b, : len(row) - 1], features_BTF[b, : len(row) - 1]
        lse_T = torch.cat([target.logits(part).logsumexp(-1) for part in final_TD.split(512)])
        states = [x.float().cpu().clone() for x in (features_TF, final_TD, lse_T)]
        filled.append(replace(row, features_TF=states[0], final_TD=states[1], lse_T=states[2]))
    return filled


def _cut(row: Row, max_len: int) -> Row:
    return replace(row, ids=row.ids[:max_len], flags=row.flags[:max_len])
