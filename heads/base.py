"""The DraftHead contract: one module, used by training (`unroll`), decoding (`extend`, `begin`, `step`) and export (`state_dict`).

Training and drafting run the same layer functions; a test proves that they compute the same numbers.

Shape suffixes: B rows, T slots, J unroll steps, M new pairs, F feature width (taps · D), D hidden, V target vocabulary, U draft vocabulary (Vd),
W drafted tokens of one level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel
from torch import Tensor, nn

from draftheads.recipes.schema import Geometry


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
    """states: J tensors [B, T, D], what `logits` turns into draft logits of step j. extras: named outputs some losses need."""

    states: list[Tensor]
    extras: dict[str, Any] = field(default_factory=dict)


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

    @classmethod
    @abstractmethod
    def build(cls, config: Any, geometry: Geometry, draft_ids: Tensor | None) -> DraftHead:
        """A fresh head for a target of this geometry; draft_ids (sorted int64 [U]) are the target ids of the reduced vocabulary, None = all."""

    @abstractmethod
    def borrow(self, embed_VD: Tensor, lm_head_VD: Tensor) -> None:
        """Fill the borrowed buffers (and initialise trained copies that start from them, only if never trained)."""

    # ---- training
    def fit_start(self, batches: Iterable[DraftBatch]) -> None:
        """Optional: fit first weights to some training rows. Called once on fresh weights, after `borrow`, on the main process only.

        batches: one row each, on the head's device, made as they are read: read no more than needed. Draws from torch's global generator only.
        """

    @abstractmethod
    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        """All steps of the training-time test, vectorised over slots. steps ≤ J."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """[..., D] → [..., U] draft-vocabulary logits. Separate from unroll, so that the loss applies it to gathered valid slots in chunks."""

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
    def begin(self, state: Any, rows: slice) -> Tensor:
        """Begin a draft behind the committed pairs of `rows`; what an earlier draft left is forgotten. -> draft logits [B, U] of the first
        drafted token. The committed state is unchanged by this and by `step`."""

    @abstractmethod
    def step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, rows: slice) -> Tensor:
        """Add one level to the draft: W drafted tokens (target ids) a row, each below the node of the level before that parents_BW (int64)
        names by its place there; the first level's parent is the root, 0. -> draft logits [B, W, U] of what follows each of them.

        A chain is W = 1 with parents 0. All levels together may hold as many tokens as new_state was told."""

    @abstractmethod
    def move(self, state: Any, source: int, to: int) -> None:
        """Copy row `source` of the state to row `to`."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids → target ids."""
        return draft_ids + self.d2t[draft_ids]

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]
