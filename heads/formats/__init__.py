"""Checkpoints that engines load unmodified: one file per layout, found by its file name, no registry.

A layout has `export(head, meta, tables) -> Files` (what to write) and TAKES (the types of heads that it is for) unless it is only read, and
`read(raw, geometry, ours) -> Found` (a folder's config and tensors as a head section and tensors in our names). Both are pure functions on dicts.
`ours` asks for everything that the engine needs to read the folder rightly, where a published head may leave some of it out. transfer.py does the
rest: files, checks, comparison.

Conversions of tap numbers between conventions live in this folder only. Ours: tap k = hidden_states[k] = output of layer k − 1, as vLLM counts.
No torch is imported here: the command line asks for the names.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftheads.recipes.schema import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

# What the layouts share.
_SHARED = {"compare", "detect", "flat", "folder", "opening", "transfer"}
FORMATS: tuple[str, ...] = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED))


@dataclass(frozen=True)
class Tables:
    """The target's input embedding and lm_head, both [V, D]."""

    embed_VD: Tensor
    lm_head_VD: Tensor


@dataclass
class Files:
    """What an export writes. notes: what the engine must be told beside it, lines of the README."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass
class Raw:
    """What a folder holds; `where` begins every message about it."""

    where: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Found:
    """A head as read. own: values of the target's geometry that this head has otherwise (its rotary base, its norms' epsilon).
    facts: what was assumed or left out, for the user."""

    section: dict[str, Any]
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None = None
    own: dict[str, Any] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)


def layout(name: str, option: str = "--to") -> Any:
    """The module of a layout."""
    return importlib.import_module(f"{__name__}.{layout_name(name, option)}")


def layout_name(name: str, option: str) -> str:
    """The name itself. RecipeError with the nearest one where there is no such layout."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        raise RecipeError(f"{option} {name!r} is no layout; " + (f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(FORMATS)}"))
    return name


def refuse(engine: str, head_type: str, takes: Iterable[str]) -> RecipeError:
    """The error of a layout for a head that is none of its TAKES: it names the layouts that do take such a head."""
    others = [name for name in FORMATS if head_type in getattr(layout(name), "TAKES", ())]
    cure = f"choose another --to ({', '.join(others)})" if others else "no layout takes one: draft with it here (specdec generate, specdec-eval)"
    return RecipeError(f"{engine} has no layout for a {head_type} head; it takes {', '.join(takes)} heads: {cure}")


def shown(names: Iterable[str], most: int = 5) -> str:
    """Names from a file, for a message: the first few, none longer than 80 characters."""
    names = [" ".join(n.split()) for n in names]
    cut = [n if len(n) <= 80 else n[:80] + "…" for n in names[:most]]
    return ", ".join(cut) + (f" and {len(names) - most} more" if len(names) > most else "")
