"""The token ids that a draft model and a target share, as what growth.grow drafts from. No drafter is imported here.

Shape suffixes: U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from draftheads.inference.growth import DraftVocab
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

INSTEAD = "take a smaller model of the target's own family, or another drafter"


def shared_vocabulary(draft: Target, target: Target) -> DraftVocab:
    """The ids that both know, as DraftVocab. RecipeError, with the first id that means two different things, if the tokenizers differ, and if
    they share none."""
    V = target.geometry.vocab_size
    U = min(draft.geometry.vocab_size, V)
    if draft.tokenizer is None or target.tokenizer is None:
        return DraftVocab(torch.arange(U, device=target.device), V)
    ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    by_id = {i: token for token, i in theirs.items()}
    clashes = [(i, token) for token, i in ours.items() if by_id.get(i, token) != token or theirs.get(token, i) != i]
    if clashes:
        i, token = min(clashes)
        there = f"is {by_id[i]!r}" if by_id.get(i, token) != token else f"is not {token!r}, which has id {theirs.get(token)}"
        raise RecipeError(f"{draft.name} cannot draft for {target.name}, their tokenizers differ: id {i} is {token!r} in the first and {there} in "
                          f"the second; {INSTEAD}")
    common = sorted(i for token, i in ours.items() if i < U and theirs.get(token) == i)
    if not common:
        raise RecipeError(f"{draft.name} cannot draft for {target.name}: their tokenizers share no token (ids {_span(ours.values())} in the first, "
                          f"{_span(theirs.values())} in the second); {INSTEAD}")
    U = common[-1] + 1
    foreign_U = torch.ones(U, dtype=torch.bool)
    foreign_U[common] = False
    return DraftVocab(torch.arange(U, device=target.device), V, foreign_U.to(target.device) if bool(foreign_U.any()) else None)


def _span(ids: Collection[int]) -> str:
    return f"{min(ids)} … {max(ids)}" if ids else "none"
