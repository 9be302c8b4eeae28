"""`specdec show-mask`: which tokens training supervises, read back from what it will read. In: a recipe. Out: samples in colour, counts.

Before distillation there is nothing to read back; then conversations of the data that hold answers show how the template is understood.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from draftheads.data.features import RowStore, rows_folder
from draftheads.data.select import recipe_prompts
from draftheads.data.template import answer_mask, check_coverage
from draftheads.inference import sources
from draftheads.recipes.schema import Recipe, RecipeError


def masked_rows(recipe: Recipe, count: int) -> dict[str, Any]:
    """{"source", "supervise", "supervised", "total", "cut", "counts", "rows": [{"id", "category", "finish_reason", "supervised", "total", "spans"}]}.

    The first `count` rows, their spans as [text, supervised]; supervised and total count all rows of a store, or those shown of a data set;
    counts are the store's. supervised: answer tokens (with train.supervise `all` the loss is on prompts too); cut: rows beyond train.max_len.
    RecipeError where nothing has an answer yet, or where the mask covers nothing or everything.
    """
    tokenizer = load_tokenizer(recipe)
    folder = rows_folder(recipe)
    if (folder / "manifest.json").is_file():
        store = RowStore.open(folder)
        shown = [store[i] for i in range(min(count, len(store)))]
        rows = [_row(tokenizer, r.id, r.category, r.finish_reason, r.ids.tolist(), r.flags.tolist()) for r in shown]
        source, counts = str(folder), store.counts
        supervised, total = sum(int(store.tokens(i)[1].sum()) for i in range(len(store))), sum(store.lengths)
        cut = sum(n > recipe.train.max_len for n in store.lengths)
    else:
        conversations, dropped = recipe_prompts(recipe)
        answered = [c for c in conversations if any(m["role"] == "assistant" for m in c.messages)][:count]
        if not answered:
            raise RecipeError(f"nothing to show: there are no distilled rows in {folder}, and the prompts hold no answers; "
                              "run specdec distill first")
        rows = [_row(tokenizer, c.id, c.category, "", *answer_mask(tokenizer, c.messages, tools=c.tools)) for c in answered]
        source = "the conversations as they are in the data; distillation replaces their answers by the target's own"
        counts = {"prompts": len(conversations), "dropped": dropped}
        supervised, total = sum(r["supervised"] for r in rows), sum(r["total"] for r in rows)
        cut = sum(r["total"] > recipe.train.max_len for r in rows)
    check_coverage(supervised, total, "the answer mask")
    sums = {"supervise": recipe.train.supervise, "supervised": supervised, "total": total, "cut": cut}
    return {"source": source, **sums, "counts": counts, "rows": rows}


def load_tokenizer(recipe: Recipe) -> Any:
    """The target's tokenizer alone, with the recipe's chat template."""
    from transformers import AutoTokenizer

    section = recipe.target
    source = sources.locate(section.name, section.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot load the tokenizer of {section.name}: {' '.join(str(error).split())[:200]}") from None
    sources.set_chat_template(tokenizer, section.chat_template)
    return tokenizer


def print_masks(found: dict[str, Any]) -> None:
    """Answers in colour, with [[…]] around it where there is none; then the counts."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    what = "tokens supervised" if found["supervise"] == "answers" else "tokens are the target's answer"
    for row in found["rows"]:
        end = f", ended by {row['finish_reason']}" if row["finish_reason"] else ""
        head = f"── {row['id']} ({row['category']}): {row['supervised']} of {row['total']} {what}{end}"
        console.print(Text(head, style="bold"))
        text = Text()
        for piece, flag in row["spans"]:
            text.append(f"[[{piece}]]" if flag and not console.is_terminal else piece, style="black on green" if flag else "dim")
        console.print(text)
    share = 100 * found["supervised"] / found["total"]
    console.print(Text(f"{found['supervised']:,} of {found['total']:,} {what} ({share:.0f} %), from {found['source']}", style="bold"))
    if found["supervise"] == "all":
        console.print("  train.supervise is all: the loss is on prompt tokens too; accuracy and τ count answers only")
    if found["cut"]:
        console.print(f"  {found['cut']} rows are longer than train.max_len and are cut there")
    for name, value in found["counts"].items():
        if value and isinstance(value, dict):
            console.print(Text(f"  {name}: " + ", ".join(f"{n} × {reason}" for reason, n in value.items())))


def _row(tokenizer: Any, name: str, category: str, reason: str, ids: Sequence[int], flags: Sequence[bool]) -> dict[str, Any]:
    """Runs of equal flags as text. Decoded run by run: a character split by a boundary shows as a replacement mark, which is the truth."""
    spans = []
    for flag, run in itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([i for i, _ in run], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        spans.append([text, flag])
    return {"id": name, "category": category, "finish_reason": reason, "supervised": sum(map(bool, flags)), "total": len(ids), "spans": spans}
