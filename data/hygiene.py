"""Held-out prompts must be unseen: n-gram overlap between training and evaluation prompts.

The usual rule (GPT-3 and since): a training prompt is contaminated if it shares a run of 13 words with an evaluation prompt. Shorter
texts are compared whole. Words are lower-cased runs of letters and digits, so punctuation and layout hide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from draftheads.data.conversations import Conversation

WORD = re.compile(r"\w+")


def grams(text: str, n: int = 13) -> Iterator[tuple[str, ...]]:
    """All runs of n words; the whole text where it has fewer."""
    words = WORD.findall(text.lower())
    if words:
        yield from (tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1)))


def contaminated(train: Iterable[Conversation], held_out: Iterable[Conversation], n: int = 13) -> dict[str, tuple[str, str]]:
    """Training id → (held-out id, the shared words), for every training prompt that shares an n-gram with a held-out one.

    User and assistant turns count; a system prompt may well be shared by design.
    """
    seen: dict[tuple[str, ...], str] = {}
    for conversation in held_out:
        for text in _texts(conversation):
            for gram in grams(text, n):
                seen.setdefault(gram, conversation.id)
    found: dict[str, tuple[str, str]] = {}
    for conversation in train:
        hit = next((g for text in _texts(conversation) for g in grams(text, n) if g in seen), None)
        if hit is not None:
            found[conversation.id] = (seen[hit], " ".join(hit))
    return found


def _texts(conversation: Conversation) -> list[str]:
    return [conversation.text] if conversation.text else [m["content"] for m in conversation.messages if m["role"] != "system"]
