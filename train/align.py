"""Alignment: rows as they were generated → what a head is trained on. The only place in the project that shifts tokens, features and masks.

A row is x_0 … x_{L−1} with flags (x_i was produced by the target) and the target's states at 0 … L−2 (the last token was never fed).
Slot t pairs the feature f_t with the token x_{t+1}. At unroll step j

    t:            fed token x_{t+1+j}   label x_{t+2+j}   teacher = the target's state at t+1+j, which predicts the label
    metric slot   iff the target produced every one of x_{t+1} … x_{t+2+j}: exactly the states that drafting meets
    loss slot     the same (`answers`), or wherever the label exists (`all`: soft targets on prompts too)

The usual slips, each of which costs acceptance silently: masking by the flag at t (the first draft after a prompt is never trained, one
or two slots past the end are), and masking by the flag of the label alone (which trains one slot whose fed token is not the target's).

Shape suffixes: B rows, L tokens, T slots (the longest row's L − 1), J unroll steps, F feature width, D hidden, X padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftheads.data.features import Row
from draftheads.heads.base import DraftBatch

Supervise = Literal["answers", "all"]


@dataclass
class Aligned:
    """One micro-batch, padded to its longest row.

    batch              what `DraftHead.unroll` takes; batch.valid_BTJ are the loss slots
    labels_BTJ         int64, x_{t+2+j} (0 where there is none)
    teacher_index_BTJ  int64, b·T + t+1+j: the row of final_BTD.flatten(0, 1) and lse_BT.flatten() that predicts the label (0 where invalid)
    answers_BTJ        bool, the metric slots, whatever is supervised
    final_BTD          float32, the target's post-norm states
    lse_BT             float32, log-sum-exp of the target's full-vocabulary logits
    kept_BTJ           bool, the slots that a head trains this time (DraftHead.thin); None: all. Losses and metrics look at these only
    ids_BT             int64, x_t itself: what the target was fed (for train.lora, which feeds it again)
    next_BT            bool, x_{t+1} is supervised, the first token of an answer included: where a tuned target is held to the original
    """

    batch: DraftBatch
    labels_BTJ: Tensor
    teacher_index_BTJ: Tensor
    answers_BTJ: Tensor
    final_BTD: Tensor
    lse_BT: Tensor
    kept_BTJ: Tensor | None = None
    ids_BT: Tensor | None = None
    next_BT: Tensor | None = None

    def to(self, device: torch.device) -> Aligned:
        moved: Aligned = _to(self, device)
        return moved


def align(rows: Sequence[Row], *, steps: int, supervise: Supervise, max_len: int) -> Aligned:
    """Pad and shift rows that carry features. Rows longer than max_len tokens are cut. Raises ValueError on rows without features."""
    if not rows or any(r.features_TF is None or r.final_TD is None or r.lse_T is None for r in rows):
        raise ValueError("align wants at least one row, and rows that carry features, final states and log-sum-exps")
    lengths_B = torch.tensor([min(len(r), max_len) for r in rows])
    B, T, J = len(rows), int(lengths_B.max()) - 1, steps
    if T < 1:
        raise ValueError("align wants rows of at least two tokens")

    ids_BX = torch.zeros(B, T + 1 + J, dtype=torch.int64)
    flags_BX = torch.zeros(B, T + 1 + J, dtype=torch.bool)
    features_BTF = torch.zeros(B, T, rows[0].features_TF.shape[-1])  # type: ignore[union-attr]
    final_BTD = torch.zeros(B, T, rows[0].final_TD.shape[-1])  # type: ignore[union-attr]
    lse_BT = torch.zeros(B, T)
    for b, row in enumerate(rows):
        length = int(lengths_B[b])
        ids_BX[b, :length] = row.ids[:length]
        flags_BX[b, :length] = row.flags[:length]
        features_BTF[b, : length - 1] = row.features_TF[: length - 1]  # type: ignore[index]
        final_BTD[b, : length - 1] = row.final_TD[: length - 1]  # type: ignore[index]
        lse_BT[b, : length - 1] = row.lse_T[: length - 1]  # type: ignore[index]

    slots_T, steps_J = torch.arange(T), torch.arange(J)
    ahead_TJ = slots_T[:, None] + steps_J[None]  # t + j
    # The label's teacher state is at t+1+j; it exists iff the label x_{t+2+j} does, because the last token alone was never fed.
    labelled_BTJ = ahead_TJ[None] + 2 < lengths_B[:, None, None]
    answers_BTJ = produced_BTJ(flags_BX, T, J)
    teacher_index_BTJ = torch.arange(B)[:, None, None] * T + ahead_TJ[None] + 1
    return Aligned(
        batch=DraftBatch(
            features_BTF=features_BTF,
            tokens_BTJ=ids_BX[:, ahead_TJ + 1],
            positions_BT=slots_T.expand(B, T).clone(),
            documents_BT=torch.where(slots_T[None] + 1 < lengths_B[:, None], 0, -1),
            valid_BTJ=labelled_BTJ if supervise == "all" else answers_BTJ,
        ),
        labels_BTJ=ids_BX[:, ahead_TJ + 2],
        teacher_index_BTJ=torch.where(labelled_BTJ, teacher_index_BTJ, 0),
        answers_BTJ=answers_BTJ,
        final_BTD=final_BTD,
        lse_BT=lse_BT,
        ids_BT=ids_BX[:, :T].clone(),
        next_BT=slots_T[None] + 1 < lengths_B[:, None] if supervise == "all" else flags_BX[:, 1 : T + 1].clone(),
    )


def nothing(steps: int, width: int, hidden: int) -> Aligned:
    """A micro-batch without rows (B = 0): for a process that has none while the others have."""
    none_BTJ = torch.zeros(0, 1, steps, dtype=torch.bool)
    tokens_BTJ, positions_BT = none_BTJ.long(), torch.zeros(0, 1, dtype=torch.int64)
    batch = DraftBatch(torch.zeros(0, 1, width), tokens_BTJ, positions_BT, positions_BT - 1, none_BTJ)
    return Aligned(batch, tokens_BTJ, tokens_BTJ, none_BTJ, torch.zeros(0, 1, hidden), torch.zeros(0, 1),
                   ids_BT=positions_BT, next_BT=none_BTJ[..., 0])


def produced_BTJ(flags_BX: Tensor, slots: int, steps: int) -> Tensor:
    """bool [B,T,J]: every one of the tokens t+1 … t+2+j was produced by the target. flags_BX holds at least slots + 1 + steps columns."""
    window_BTK = flags_BX[:, 1 : slots + 1 + steps].unfold(1, steps + 1, 1)  # flags of t+1 … t+1+J
    return window_BTK.to(torch.uint8).cummin(-1).values[..., 1:].bool()


def loss_labels(ids_L: Tensor, flags_L: Tensor, *, supervise: Supervise, max_len: int) -> Tensor:
    """int64 [n]: the labels of a row's loss slots at step 0: its share of a batch is counted by them, the draft vocabulary ranked by them."""
    ids_L, flags_L = ids_L[:max_len], flags_L[:max_len]
    if len(ids_L) < 3:
        return ids_L[:0]
    if supervise == "all":
        return ids_L[2:]
    slots = len(ids_L) - 2
    padded_BX = torch.cat([flags_L, flags_L.new_zeros(1)])[None]
    return ids_L[2:][produced_BTJ(padded_BX, slots, 1)[0, :, 0]]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _to(getattr(value, f.name), device) for f in fields(value)})
    return value
