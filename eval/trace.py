"""How an answer came about, token by token: for the report's coloured traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftheads.eval.records import Block
from draftheads.eval.subject import Prompt
from draftheads.inference import metrics
from draftheads.inference.text import TextStream


def traces(tokenizer: Any, prompts: Sequence[Prompt], blocks: Iterable[Block], name: str) -> list[dict[str, Any]]:
    """One answer of drafter `name` per category, round by round."""
    by_id = {p.id: p for p in prompts}
    found: dict[str, dict[str, Any]] = {}
    for block in blocks:
        row = block.runs[name].completions[0]
        if block.category in found or not row.rounds:
            continue
        pieces = token_texts(tokenizer, row.tokens)
        rounds: list[dict[str, Any]] = [{"source": "none", "drafted": 0, "accepted": 0, "pieces": pieces[:1]}]
        at = 1
        for r in row.rounds:
            rounds.append({"source": r.source, "drafted": r.drafted, "accepted": min(r.accepted, r.emitted), "pieces": pieces[at : at + r.emitted]})
            at += r.emitted
        prompt = by_id[row.request.id]
        found[block.category] = {
            "id": prompt.id, "category": prompt.category, "prompt": prompt.text, "drafter": name, "tau": metrics.tau(row.rounds),
            "finish_reason": row.finish_reason, "rounds": rounds,
        }
    return list(found.values())


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Text of each token in its context; a token that ends inside a character contributes to the one that completes it."""
    stream = TextStream(tokenizer, show_special=True)
    pieces = [stream.push([token]) for token in tokens]
    return [*pieces[:-1], pieces[-1] + stream.finish()] if pieces else []
