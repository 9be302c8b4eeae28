"""The DraftHead contract: one module, used by training (`unroll`), decoding (`extend`, `begin`, `step`) and export (`state_dict`).

Training and drafting run the same layer functions; a test proves that they compute the same numbers.

Shape suffixes: B rows, T slots, J unroll steps, M new pairs, F feature width (taps · D), D hidden, V target vocabulary, U draft vocabulary (Vd),
W drafted tokens of one level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from draftheads.heads.vocab import checked_ids, draft_maps
from draftheads.recipes.schema import Geometry, RecipeError


@dataclass
class DraftBatch:
    """Aligned training input, made by train/align.py and nowhere else. Slot t pairs the feature f_t with the token x_{t+1}.

    features_BTF   float32, raw taps at slot t
    tokens_BTJ     int64, tokens_BTJ[b, t, j] = x_{t+1+j}: the token fed at slot t in unroll step j (0 where there is none)
    positions_BT   int64, position of slot t in its document: RoPE position of slot t at step j is positions_BT + j
    documents_BT   int64, document number inside the row, −1 for padding: no attention across documents
    valid_BTJ      bool, slot t contributes to the loss at step j
    """

    features_BTF: Tensor
    tokens_BTJ: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    valid_BTJ: Tensor


@dataclass
class Unrolled:
    """states: J tensors [B, T, S], what `logits` turns into draft logits of step j. S is the head's own business: a head whose logits also need
    the token before them packs its embedding behind the hidden state."""

    states: list[Tensor]


class DraftHead(nn.Module, ABC):
    """Subclass once per file in heads/, with a pydantic `Config` beside it (fields of the recipe's `head` section, extra forbidden).

    Borrowed weights: `embed_VD` (the target's input embedding) and, unless the head trains its own, rows of the target's lm_head.
    They are non-persistent buffers that start as NaN, so that a forgotten `borrow` shows at once, and are never saved.
    """

    Config: ClassVar[type[BaseModel]]
    taps: tuple[int | str, ...]
    config: Any
    geometry: Geometry
    # int64 [U], offset map: target id = draft id + d2t[draft id]. A persistent buffer. Identity (zeros) when the vocabulary is whole.
    d2t: Tensor
    # Values of `geometry` that an imported head has otherwise than its target (rotary parameters, epsilon).
    own: dict[str, Any] = {}
    # The most levels a draft can have, None: as many as there is room for.
    max_depth: int | None = None

    @classmethod
    @abstractmethod
    def build(cls, config: Any, geometry: Geometry, draft_ids: Tensor | None) -> DraftHead:
        """A fresh head for a target of this geometry; draft_ids (sorted int64 [U]) are the target ids of the reduced vocabulary, None = all."""

    def set_vocabulary(self, draft_ids: Tensor | None, size: int | None) -> int:
        """For __init__: register d2t and t2d (bool [V]: is this target id in the draft vocabulary). -> U"""
        ids_U = checked_ids(draft_ids, size, self.geometry.vocab_size)
        d2t_U, t2d_V = draft_maps(ids_U, self.geometry.vocab_size)
        self.register_buffer("d2t", d2t_U)
        self.register_buffer("t2d", t2d_V)
        return len(ids_U)

    def target_ids_U(self) -> Tensor:
        """int64 [U], sorted: the target id of each draft id."""
        return self.target_ids(torch.arange(len(self.d2t), device=self.d2t.device))

    def rows_UD(self, lm_head_VD: Tensor) -> Tensor:
        """The target's lm_head rows of the draft vocabulary. RecipeError if it is not the lm_head of the head's target."""
        V, D = self.geometry.vocab_size, self.geometry.hidden_size
        if lm_head_VD.shape[1] != D or lm_head_VD.shape[0] < V:
            raise RecipeError(f"the target's lm_head is {tuple(lm_head_VD.shape)}, the head was built for ({V}, {D})")
        whole = len(self.d2t) == len(lm_head_VD)
        return lm_head_VD.detach() if whole else lm_head_VD.detach()[self.target_ids_U().to(lm_head_VD.device)]

    @abstractmethod
    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Fill the borrowed buffers (and initialise trained copies that start from them, only if never trained)."""

    # ---- training
    def fit_start(self, batches: Iterable[DraftBatch]) -> None:
        """Optional: fit first weights to some training rows. Called once on fresh weights, after `borrow`, on the main process only.

        batches: one row each, on the head's device, made as they are read: read no more than needed. Draws from torch's global generator only.
        """

    def check_steps(self, steps: int) -> None:
        """RecipeError if the head cannot be unrolled to so many steps (a block of another length, more steps than it has heads)."""

    def thin(self, valid_TJ: Tensor, generator: torch.Generator) -> Tensor:
        """bool [T, J], within valid_TJ: which of a row's loss slots are trained this time, for heads that would be too dear everywhere (anchors of a
        block, rollouts of P-EAGLE). A slot that is kept at step j is kept at all earlier steps, and one at step 0 at least, where
        there is one. The default keeps all."""
        return valid_TJ

    @abstractmethod
    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        """All steps of the training-time test, vectorised over slots. steps ≤ J. What is no loss slot (batch.valid_BTJ) may hold anything finite."""

    @abstractmethod
    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        """[..., S] → [..., U] draft-vocabulary logits of unroll step `step`, the same for all steps in heads with one lm_head. Separate from
        unroll, so that the loss applies it to gathered valid slots in chunks."""

    def regressed(self, states: Tensor) -> Tensor:
        """[..., S] → [..., D]: the part of a state that is to be the target's post-norm state at the label's position (loss smooth_l1)."""
        raise NotImplementedError

    def confidence(self, states: Tensor) -> Tensor:
        """[..., S] → [...]: logits of the probability that the draft is accepted here (loss confidence)."""
        raise NotImplementedError

    # ---- drafting
    @abstractmethod
    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> Any:
        """Static per-row buffers (the head's own KV cache and the state of the last pair) for max_len pairs and, behind them, a draft of at
        most `drafts` tokens. Compared by identity. If it has its keys and values in a DraftSlots named `slots`, drafting can be captured."""

    @abstractmethod
    def clear(self, state: Any, row: int) -> None:
        """Forget the row's committed pairs: a new prompt begins in its slot."""

    @abstractmethod
    def extend(self, state: Any, features_BMF: Tensor, tokens_BM: Tensor, counts_B: Tensor, rows: slice) -> None:
        """Commit counts_B new (feature, token) pairs for the rows of `rows`; overwrites whatever drafting left in those slots."""

    @abstractmethod
    def begin(self, state: Any, rows: slice, depth: int | None = None) -> Tensor:
        """Begin a draft of at most `depth` levels (None: max_depth) behind the committed pairs of `rows`; what an earlier draft left is
        forgotten. -> draft logits [B, U] of the first drafted token. The committed state is unchanged by this and by `step`.

        Heads that draft all levels at once do so here (depth is theirs to use: no more levels will be asked for)."""

    @abstractmethod
    def step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        """Add one level to the draft: W drafted tokens (target ids) a row, each below the node of the level before that parents_BW (int64)
        names by its place there; the first level's parent is the root, 0. -> draft logits [B, W, U] of what follows each of them.

        A chain is W = 1 with parents 0. All levels together may hold as many tokens as new_state was told."""

    @abstractmethod
    def move(self, state: Any, source: int, to: int) -> None:
        """Copy row `source` of the state to row `to`."""

    # ---- export
    @abstractmethod
    def engine_config(self) -> dict[str, Any]:
        """What config.json of a checkpoint says: the layout of the engine that comes nearest to reading the folder as it is."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids → target ids."""
        return draft_ids + self.d2t[draft_ids]

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]
