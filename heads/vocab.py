"""The reduced draft vocabulary: which target ids the head's lm_head has rows for.

counts of supervised tokens + a weak prior → ranking → exactly `size` ids, sorted → d2t (offsets) and t2d (membership).

Small runs see few distinct tokens, so the tail of the ranking is the prior's: by default the id order of a BPE vocabulary (merges are
numbered by frequency in the tokenizer's own corpus); counts over prompts or any corpus do better.

Shape suffixes: V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from draftheads.recipes.schema import RecipeError

PRIOR_WEIGHT = 0.1  # mass of the prior, as a share of the counted tokens


def build_draft_vocab(
    counts_V: Tensor, size: int, *, required: Iterable[int] = (), forbidden: Iterable[int] = (), prior_V: Tensor | None = None
) -> Tensor:
    """Exactly `size` distinct target ids, sorted, int64 [U].

    counts_V: how often each id was supervised (V = rows of the target's lm_head). required: always in (end tokens, turn ends).
    forbidden: never in (rows of lm_head beyond the tokenizer). prior_V: non-negative, any scale; default 1/(id + 64).
    Ids that occur precede those that don't, as far as they fit. Equal scores: the lower id. RecipeError when it cannot be done.
    """
    V = len(counts_V)
    must, never = _ids(required, V), _ids(forbidden, V)
    if clash := must & never:
        raise RecipeError(f"draft vocabulary: token ids {sorted(clash)} are both required and forbidden")
    if size > V - len(never):
        raise RecipeError(f"head.draft_vocab_size {size} exceeds the {V - len(never)} usable tokens of the target's vocabulary: lower it")
    if size < len(must):
        raise RecipeError(f"head.draft_vocab_size {size} is smaller than the {len(must)} tokens that must be in (end of text, turn ends): raise it")
    counts_V = counts_V.detach().cpu().double()
    prior_V = 1.0 / (torch.arange(V, dtype=torch.float64) + 64) if prior_V is None else prior_V.detach().cpu().double()
    if len(prior_V) != V or bool((prior_V < 0).any()):
        raise ValueError(f"prior_V must be {V} non-negative numbers")
    score_V = counts_V + PRIOR_WEIGHT * counts_V.sum().clamp(min=1) * prior_V / prior_V.sum().clamp(min=1e-300)
    seen_V = counts_V > 0
    seen_V[list(never)] = False
    if int(seen_V.sum()) <= size:
        score_V[seen_V] += score_V.max()
    score_V[list(must)] = float("inf")
    score_V[list(never)] = float("-inf")
    order_V = torch.sort(score_V, descending=True, stable=True).indices
    return order_V[:size].sort().values


def draft_maps(ids_U: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """→ d2t int64 [U], offsets: target id = draft id + d2t[draft id]; t2d bool [V]: is this target id in the draft vocabulary."""
    ids_U = ids_U.long()
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_U.device).index_fill_(0, ids_U, True)
    return ids_U - torch.arange(len(ids_U), device=ids_U.device), t2d_V


def checked_ids(draft_ids: Tensor | None, size: int | None, vocab_size: int) -> Tensor:
    """The ids of a draft vocabulary, int64 [U] on the host; None: the first `size` of them (None: all). RecipeError if they are not what `size` says,
    or don't rise within the target's vocabulary."""
    ids_U = torch.arange(size or vocab_size) if draft_ids is None else draft_ids.detach().cpu().long()
    if len(ids_U) != (size or vocab_size):
        raise RecipeError(f"the draft vocabulary has {len(ids_U)} ids, head.draft_vocab_size asks for {size or vocab_size}")
    if draft_ids is not None and (not bool((ids_U[1:] > ids_U[:-1]).all()) or int(ids_U[0]) < 0 or int(ids_U[-1]) >= vocab_size):
        raise RecipeError(f"the draft vocabulary's ids must rise and lie in 0 … {vocab_size - 1}")
    return ids_U


def vocab_hash(ids_U: Tensor) -> str:
    """16 hex digits that name this vocabulary map."""
    return hashlib.sha256(ids_U.detach().cpu().long().contiguous().numpy().tobytes()).hexdigest()[:16]


def _ids(ids: Iterable[int], vocab_size: int) -> set[int]:
    found = {int(i) for i in ids}
    if outside := sorted(i for i in found if not 0 <= i < vocab_size):
        raise RecipeError(f"draft vocabulary: token ids {outside[:8]} are outside the target's {vocab_size} rows")
    return found
