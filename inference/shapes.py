"""What a draft tree looks like, before anything is drafted: Static (Medusa choices), Dynamic (EAGLE-2), Sampled (without replacement).

A shape is plain data; `growth.grow` turns it into a DraftTree. `parse_shape` reads what recipes and command lines say:

    chain                               no tree: a chain of gamma
    dynamic:depth=5,top_k=8,nodes=24    EAGLE-2
    static:FILE.json                    Medusa choices, as `specdec tree` writes them
    static:0;1;2;0,0;0,1;0,0,0          the same, written out
    sampled:3,2,1                       3 children of the root, 2 of each of those, 1 of each of those
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from draftheads.recipes.schema import MOST_DRAFTED, RecipeError

# Nodes of a tree, and tokens that growing it feeds to the draft (whose caches keep this much room). No published tree has more than 64 nodes, and
# a typo should not take the memory.
MOST_NODES = MOST_DRAFTED


@dataclass(frozen=True)
class Static:
    """Fixed paths of ranks (Medusa, arXiv 2401.10774): (0,) is the most likely first token, (0, 2) the third most likely one after it.
    Every path's beginning must be there too."""

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = set(self.choices)
        if not paths or len(paths) != len(self.choices) or any(not p or min(p) < 0 for p in paths):
            raise RecipeError(f"a static tree wants different, non-empty paths of ranks from 0 on, found {self.choices!r:.200}")
        orphan = next((p for p in self.choices if len(p) > 1 and p[:-1] not in paths), None)
        if orphan is not None:
            raise RecipeError(f"static tree: the path {list(orphan)} is there, its beginning {list(orphan[:-1])} is not")
        _check_nodes(len(paths))

    @property
    def depth(self) -> int:
        return max(map(len, self.choices))

    @property
    def nodes(self) -> int:
        return len(self.choices)

    @cached_property
    def ordered(self) -> tuple[tuple[int, ...], ...]:
        """By level, then by rank: the order of the tree's nodes behind the root."""
        return tuple(sorted(self.choices, key=lambda p: (len(p), p)))


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2 (arXiv 2406.16858): at each of `depth` levels the `top_k` likeliest nodes are expanded to their `top_k` likeliest children; of all
    that were seen the `nodes` likeliest (by the product of draft probabilities along the path) are verified."""

    depth: int = 5
    top_k: int = 8
    nodes: int = 24

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.nodes) < 1:
            raise RecipeError(f"{self}: depth, top_k and nodes must be at least 1")
        seen = self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes > seen:
            raise RecipeError(f"{self}: only {seen} nodes are ever seen at this depth and top_k; lower nodes")
        _check_nodes(self.nodes)
        if (self.depth - 1) * self.top_k > MOST_NODES:
            raise RecipeError(f"{self}: {(self.depth - 1) * self.top_k} drafted tokens are expanded, at most {MOST_NODES}; lower depth or top_k")


@dataclass(frozen=True)
class Sampled:
    """At temperature > 0: every node at depth d − 1 gets widths[d − 1] children, drawn without replacement (Gumbel-top-k) from the draft's own
    distribution, and is judged by recursive rejection. Greedy rows take the likeliest ones. (1, 1, 1) is a chain."""

    widths: tuple[int, ...] = (3, 2, 1)

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise RecipeError(f"a sampled tree wants a width of at least 1 for every level, found {self.widths}")
        _check_nodes(self.nodes)

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def nodes(self) -> int:
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total


Shape = Static | Dynamic | Sampled


def _check_nodes(nodes: int) -> None:
    if nodes > MOST_NODES:
        raise RecipeError(f"a tree of {nodes} nodes; at most {MOST_NODES}")


def parse_shape(text: str) -> Shape | None:
    """The shape that `text` names (see above), None for "chain". RecipeError, one line, for anything else."""
    kind, _, rest = text.strip().partition(":")
    rest = rest.strip()
    try:
        if kind == "chain" and not rest:
            return None
        if kind == "dynamic":
            return Dynamic(**_options(rest))
        if kind == "sampled":
            return Sampled(tuple(int(w) for w in rest.split(","))) if rest else Sampled()
        if kind == "static" and rest:
            return Static(_choices(rest))
    except (ValueError, TypeError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"tree {text!r}: {error}") from None
    raise RecipeError(f"tree {text!r} is not known: chain, dynamic:depth=5,top_k=8,nodes=24, static:FILE.json or static:0;1;0,0, sampled:3,2,1")


def _options(text: str) -> dict[str, int]:
    known = [f.name for f in fields(Dynamic)]
    found: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        if key.strip() not in known:
            raise RecipeError(f"dynamic tree: unknown option {part!r}; known: {', '.join(known)}")
        if key.strip() in found:
            raise RecipeError(f"dynamic tree: {key.strip()} is given twice")
        found[key.strip()] = int(value)
    return found


def _choices(text: str) -> tuple[tuple[int, ...], ...]:
    if not text.endswith(".json"):
        return tuple(tuple(int(rank) for rank in path.split(",")) for path in text.split(";"))
    try:
        raw = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the tree {text}: {error}") from None
    paths = raw.get("choices") if isinstance(raw, dict) else raw
    if not isinstance(paths, list) or not all(isinstance(p, list) and all(type(r) is int for r in p) for p in paths):
        raise RecipeError(f"{text} holds no tree: wanted a list of paths of ranks, [[0], [1], [0, 0], …]")
    return tuple(tuple(p) for p in paths)
