"""Draft heads. `head: {type: eagle3}` in a recipe means the one DraftHead in heads/eagle3.py: found by its file name, no registry.

A head file holds exactly one DraftHead subclass; its `Config` has `resolve(geometry)`, which fills the defaults that come from the
target and raises RecipeError where the two don't fit.
"""

from __future__ import annotations

import builtins
import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from draftheads.recipes.schema import Geometry, RecipeError, validate

if TYPE_CHECKING:
    from torch import Tensor

    from draftheads.heads.base import DraftHead

_NOT_HEADS = {"base", "config", "tree", "layers", "slots", "feedback", "layered", "block", "induction", "losses", "vocab", "checkpoint", "formats"}


def head_types() -> list[str]:
    """The values `head.type` may have, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_HEADS)


def head_class(type: str) -> type[DraftHead]:
    """The DraftHead of heads/<type>.py. RecipeError, with the nearest name, for an unknown type."""
    from draftheads.heads.base import DraftHead

    known = head_types()
    if type not in known:
        near = difflib.get_close_matches(str(type), known, n=1)
        raise RecipeError(f"head.type: no head {type!r}; " + (f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(known)}"))
    module = importlib.import_module(f"{__name__}.{type}")
    own = [c for c in vars(module).values() if isinstance(c, builtins.type) and issubclass(c, DraftHead) and c.__module__ == module.__name__]
    (found,) = own
    return found


def head_section(section: dict[str, Any]) -> Any:
    """A recipe's `head` section, validated, with the head's own defaults: what can be said without the target. RecipeError names the key."""
    if "type" not in section:
        raise RecipeError(f"head.type is missing; valid: {', '.join(head_types())}")
    return validate(head_class(section["type"]).Config, section, "head")


def head_config(section: dict[str, Any], geometry: Geometry) -> Any:
    """The same with the target's defaults filled in; RecipeError where head and target don't fit."""
    return head_section(section).resolve(geometry)


def build_head(section: dict[str, Any], geometry: Geometry, draft_ids: Tensor | None = None) -> DraftHead:
    """A fresh head (weights from torch's global generator, borrowed weights NaN until `borrow`).

    draft_ids: sorted int64 target ids of the reduced vocabulary. Without them a reduced vocabulary is the first draft_vocab_size ids, which
    has the right shapes for planning and is a poor vocabulary to train.
    """
    return head_class(section["type"] if "type" in section else "").build(head_config(section, geometry), geometry, draft_ids)
