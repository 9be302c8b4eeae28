"""Which prompts a run is made of: read, deduplicated, unlike the evaluation's, capped and mixed; every one left out is counted by reason.

    records ─► Conversations ─► no duplicate ─► shares no 13 words in a row with an evaluation prompt ─► at most per_category of a category
      ─► at most `limit`, evenly over the categories ─► list, counts of dropped by reason

The order depends on the content and the seed only, so a smaller limit is a prefix of a larger one, and a source may change its order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from draftheads.data.conversations import Conversation, Dropped, parse
from draftheads.data.hygiene import Seen
from draftheads.data.sources import records
from draftheads.recipes.schema import Recipe, RecipeError

EVALUATION = "draftheads.eval.prompts"  # by name: what data reads is no import of eval


def read_prompts(
    spec: str | list[str], *, limit: int | None = None, seed: int = 0, system: str | None = None, builtin: str = "draftheads.data.prompts",
    per_category: int | None = None, held_out: Seen | None = None, streaming: bool = False, most: int | None = None,
) -> tuple[list[Conversation], dict[str, int]]:
    """Read, check, deduplicate and select. spec: 'builtin' (the *.jsonl files of package `builtin`), a file, a Hub data set ('org/name',
    'org/name:split', 'org/name/config:split'), or a list of those. `system` is given to conversations that have none. held_out: what they
    may not share a run of words with. per_category, limit: at most so many; most: of each source, read the first so many records.

    Returns the conversations, mixed over the categories in an order that depends on their content and the seed only, and how many
    records were dropped, by reason. Raises RecipeError for a missing file, a bad line (named), or where nothing usable is left.
    """
    specs = [spec] if isinstance(spec, str) else spec
    dropped: Counter[str] = Counter()
    kept: dict[str, Conversation] = {}
    keys: set[str] = set()
    for item in specs:
        for source, record in records(item, builtin, streaming=streaming, most=most):
            keys.update(map(str, record))
            try:
                conversation = parse(record, source=source, system=system)
            except Dropped as reason:
                dropped[str(reason)] += 1
                continue
            key = conversation.hash
            if key in kept:
                dropped["duplicate"] += 1
            elif held_out is not None and held_out.shared(conversation) is not None:
                dropped[f"shares {held_out.n} words with an evaluation prompt"] += 1
            else:
                kept[key] = conversation
    if not kept:
        why = ", ".join(f"{n} × {reason}" for reason, n in dropped.most_common()) or "it is empty"
        if all(reason.startswith("shares ") or reason == "duplicate" for reason in dropped) and dropped:
            raise RecipeError(f"no usable prompt in {', '.join(specs)}: {why}; give other prompts, or keep them with data.overlap_words: null")
        raise RecipeError(f"no usable prompt in {', '.join(specs)}: {why}. Wanted records with messages, conversations, instruction, "
                          f"prompt or text" + (f"; found the keys {', '.join(sorted(keys)[:12])}" if keys else ""))
    selected = _select(_unique_ids(kept.values()), seed, per_category)
    if len(selected) < len(kept):
        dropped[f"more than {per_category} of a category"] += len(kept) - len(selected)
    return selected[:limit], dict(dropped)


def recipe_prompts(recipe: Recipe, limit: int | None = None) -> tuple[list[Conversation], dict[str, int]]:
    """What a recipe trains on: read_prompts as its data section says, without what its evaluation asks. limit: instead of a larger data.limit."""
    data = recipe.data
    held_out = None
    if data.overlap_words is not None:
        held_out = Seen(read_prompts(recipe.eval.prompts, builtin=EVALUATION)[0], data.overlap_words)
    most = min((n for n in (limit, data.limit) if n is not None), default=None)
    return read_prompts(data.prompts, limit=most, seed=data.seed, system=data.system, per_category=data.per_category, held_out=held_out,
                        streaming=data.streaming, most=data.max_records)


def _unique_ids(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Ids key resuming and noise: of two different conversations of one id, or with a row of one id (`a@1`, and the first turn of `a`), both
    get the content's hash appended."""
    conversations = list(conversations)
    ids = [{c.id, *(c.row_id(turn + 1) for turn in range(c.turns))} for c in conversations]
    times = Counter(name for names in ids for name in names)
    return [c if all(times[n] == 1 for n in names) else replace(c, id=f"{c.id}#{c.hash[:8]}") for c, names in zip(conversations, ids, strict=True)]


def _select(conversations: list[Conversation], seed: int, per_category: int | None) -> list[Conversation]:
    """Round-robin over the categories, inside a category by hash: neither depends on the order of the file."""
    by_category: dict[str, list[Conversation]] = {}
    for c in sorted(conversations, key=lambda c: _rank(c.hash, seed)):
        by_category.setdefault(c.category, []).append(c)
    categories = sorted(by_category, key=lambda name: _rank(name, seed))
    longest = min(max(map(len, by_category.values())), per_category or len(conversations))
    return [by_category[name][i] for i in range(longest) for name in categories if i < len(by_category[name])]


def _rank(text: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()
