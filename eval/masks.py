"""`specdec show-mask`: which tokens training supervises, read back from what it will read."""

from __future__ import annotations

import itertools
from typing import Any

from draftheads.data.conversations import read_prompts
from draftheads.data.features import RowStore
from draftheads.data.template import answer_mask, check_coverage
from draftheads.inference import sources
from draftheads.recipes.schema import Recipe, RecipeError


def masked_rows(recipe: Recipe, count: int) -> dict[str, Any]:
    """{"source", "supervised", "total", "rows": [{"id", "category", "spans": [[text, supervised], …]}]} of the first `count` rows.

    RecipeError where nothing has an answer yet, or where the mask covers nothing or everything.
    """
    tokenizer = _tokenizer(recipe)
    folder = recipe.run_dir / "distill"
    if (folder / "manifest.json").is_file():
        store = RowStore.open(folder)
        rows = [_row(tokenizer, r.id, r.category, r.ids.tolist(), r.flags.tolist()) for r in (store[i] for i in range(min(count, len(store))))]
        source = str(folder)
    else:
        conversations, _ = read_prompts(recipe.data.prompts, limit=recipe.data.limit, seed=recipe.data.seed, system=recipe.data.system)
        answered = [c for c in conversations if any(m["role"] == "assistant" for m in c.messages)][:count]
        if not answered:
            raise RecipeError(f"nothing to show: there are no distilled rows in {folder}, and the prompts hold no answers; run specdec distill first")
        rows = [_row(tokenizer, c.id, c.category, *answer_mask(tokenizer, c.messages)) for c in answered]
        source = "the conversations as they are in the data; distillation replaces their answers by the target's own"
    supervised, total = sum(r["supervised"] for r in rows), sum(r["total"] for r in rows)
    check_coverage(supervised, total, "the answer mask")
    return {"source": source, "supervised": supervised, "total": total, "rows": rows}


def _tokenizer(recipe: Recipe) -> Any:
    from transformers import AutoTokenizer

    section = recipe.target
    source = sources.locate(section.name, section.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot load the tokenizer of {section.name}: {' '.join(str(error).split())[:200]}") from None
    sources.set_chat_template(tokenizer, section.chat_template, section.name)
    return tokenizer


def _row(tokenizer: Any, name: str, category: str, ids: list[int], flags: list[bool]) -> dict[str, Any]:
    """Runs of equal flags as text. Decoded run by run: a character split by a boundary shows as a replacement mark, which is the truth."""
    spans = []
    for flag, run in itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: bool(pair[1])):
        spans.append([tokenizer.decode([i for i, _ in run], skip_special_tokens=False, clean_up_tokenization_spaces=False), flag])
    return {"id": name, "category": category, "supervised": sum(map(bool, flags)), "total": len(ids), "spans": spans}


def print_masks(found: dict[str, Any]) -> None:
    """Supervised text in green (with [[…]] around it where there is no colour)."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    plain = not console.is_terminal
    for row in found["rows"]:
        console.print(Text(f"── {row['id']} ({row['category']}): {row['supervised']} of {row['total']} tokens supervised", style="bold"))
        text = Text()
        for piece, flag in row["spans"]:
            text.append(f"[[{piece}]]" if flag and plain else piece, style="black on green" if flag else "dim")
        console.print(text)
    console.print(Text(f"{found['supervised']} of {found['total']} tokens supervised; from {found['source']}"))
