"""What a user names, as a Drafter: the one place, for `generate`, SpeculativeDecoder, `specdec generate` and specdec-eval.

    None, "none"                                    no drafts
    "ngram", "suffix"                               copying, no training
    "mtp"                                           the target's own multi-token-prediction layers
    a folder with draftheads.json, a run's, or a head of another tool's     its draft head
    another folder, Hub id, named target, .gguf     a smaller model; also a Target, or a transformers model
    a Drafter                                       itself

copy_first ("ngram", "suffix") puts copying before whatever else drafts: a Composite.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftheads.heads.checkpoint import adapter_of, load_head
from draftheads.heads.formats.detect import is_head_folder
from draftheads.inference.checkpoints import META, find_folder
from draftheads.inference.drafters.base import Drafter
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.draft_model import DraftModelDrafter
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.mtp import MtpDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

# Any: a transformers causal LM.
Draft = str | os.PathLike[str] | Drafter | Target | Any | None
COPYING, NAMES = ("ngram", "suffix"), ("none", "ngram", "suffix", "mtp")
# Before another drafter: a copy costs next to nothing, so it may be longer than a draft; a suffix with fewer expected tokens is left to the other.
COPIED, MIN_SCORE = 8, 2.0


def choose(draft: Draft, target: Target, *, copy_first: str | None = None, draft_tokenizer: Any = None, int8: bool = False,
           ngram: Mapping[str, Any] | None = None, suffix: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter that `draft` names, for this target.

    draft_tokenizer: of a transformers model given as draft; None: the target's. int8: a head drafts with int8 weights (CPU). ngram, suffix:
    arguments of NgramDrafter and SuffixDrafter. RecipeError, one line: an unknown name, a head made for another target, a model with another
    tokenizer, a target without MTP layers, a copy_first with nothing after it.
    """
    check_draft(draft, copy_first, draft_tokenizer)
    chosen = _one(draft, target, draft_tokenizer, int8, dict(ngram or {}), dict(suffix or {}))
    if copy_first is None:
        return chosen
    if isinstance(chosen, NoDrafter | NgramDrafter | SuffixDrafter):
        raise RecipeError(f"copy_first puts copying before a head or a model, but draft is {chosen.name!r}: for copying alone, draft={copy_first!r}")
    first: Drafter = (NgramDrafter(**{"gamma": COPIED} | dict(ngram or {})) if copy_first == "ngram"
                      else SuffixDrafter(**{"gamma": COPIED, "min_score": MIN_SCORE} | dict(suffix or {})))
    return Composite(first, chosen)


def check_draft(draft: Draft, copy_first: str | None = None, draft_tokenizer: Any = None) -> None:
    """What of `choose`'s errors can be said before a target is loaded."""
    if draft_tokenizer is not None and (draft is None or isinstance(draft, str | os.PathLike | Drafter | Target)):
        raise RecipeError("draft_tokenizer belongs to a transformers model given as draft; names and folders bring their own")
    if copy_first is not None and copy_first not in COPYING:
        raise RecipeError(f"copy_first is {copy_first!r}; wanted one of {', '.join(COPYING)}, or None")
    if copy_first is not None and (draft is None or isinstance(draft, str) and draft in (*COPYING, "none")):
        raise RecipeError(f"copy_first puts copying before a head or a model, but draft is {draft or 'none'!r}: for copying alone, "
                          f"draft={copy_first!r}")
    if isinstance(draft, str | os.PathLike) and draft not in NAMES and head_folder(draft) is None and not Path(draft).expanduser().is_dir():
        if near := difflib.get_close_matches(str(draft), NAMES, n=1):
            raise RecipeError(f"draft {str(draft)!r} is not known; did you mean {near[0]!r}?")


def _one(draft: Draft, target: Target, tokenizer: Any, int8: bool, ngram: dict[str, Any], suffix: dict[str, Any]) -> Drafter:
    if isinstance(draft, Drafter):
        return draft
    if draft is None or draft == "none":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter(**ngram)
    if draft == "suffix":
        return SuffixDrafter(**suffix)
    if draft == "mtp":
        return MtpDrafter(target)
    if isinstance(draft, Target):
        return DraftModelDrafter(draft, target)
    if isinstance(draft, str | os.PathLike):
        folder = head_folder(draft)
        return _head(folder, target, int8) if folder is not None else DraftModelDrafter(_model(str(draft), target), target)
    if not hasattr(draft, "get_output_embeddings"):
        raise RecipeError(f"draft is a {type(draft).__name__}; wanted None, one of {', '.join(NAMES)}, a folder, a model's name, a transformers "
                          "causal LM, or a Drafter")
    return DraftModelDrafter(Target.from_model(draft, tokenizer or target.tokenizer, name="the draft model"), target)


def head_folder(draft: str | os.PathLike[str]) -> Path | None:
    """The checkpoint folder that a path means (a run's, too), None where it names a model. RecipeError where it is a path and neither is there."""
    path = Path(draft).expanduser()
    if path.is_dir():
        return find_folder(path) if (path / META).is_file() or not (path / "config.json").is_file() or is_head_folder(path) else None
    # A Hub id may look like a path; where the folder above is here, it was meant as one.
    return find_folder(path) if path.parent != Path(".") and path.parent.is_dir() and path.suffix != ".gguf" else None


def _head(folder: Path, target: Target, int8: bool) -> Drafter:
    if target.lm_head_VD.is_meta:
        raise RecipeError(f"{folder}: a head shares the target's lm_head, which is offloaded: keep it in memory (device_map), or draft otherwise")
    module, meta = load_head(folder, geometry=target.geometry, template_hash=target.template_hash)
    if adapter_of(folder, meta) != target.adapter:
        has = "the target is as published" if target.adapter is None else "the target is tuned for another head"
        was = "with an adapter of its target" if meta.adapter is not None else "for the target as published"
        raise RecipeError(f"{folder} was trained {was}, and {has}: leave the target to the checkpoint (--ckpt, SpeculativeDecoder.from_checkpoint), "
                          "or Target.load(…, adapter=adapter_of(folder, meta))")
    return HeadDrafter(module, target, int8=int8)


def _model(name: str, target: Target) -> Target:
    try:
        return Target.load(name, dtype=str(target.dtype).removeprefix("torch."), device=target.device)
    except RecipeError as error:
        raise RecipeError(f"draft {name!r} is none of {', '.join(NAMES)}, no checkpoint folder (draftheads.json), and as a model: {error}") from None
