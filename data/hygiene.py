"""Held-out prompts must be unseen: n-gram overlap between training and evaluation prompts.

The usual rule (GPT-3 and since): a training prompt is contaminated if it shares a run of 13 words with an evaluation prompt. Shorter
texts are compared whole. Words are lower-cased runs of letters and digits, so punctuation and layout hide nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from draftheads.data.conversations import Conversation

WORD = re.compile(r"\w+")
WORDS = 13


def grams(text: str, n: int = WORDS) -> Iterator[str]:
    """All runs of n words, joined by blanks; the whole text where it has fewer."""
    words = WORD.findall(text.lower())
    if words:
        yield from (" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1)))


class Seen:
    """The runs of n words in some prompts. User and assistant turns count; a system prompt may well be shared by design."""

    def __init__(self, held_out: Iterable[Conversation], n: int = WORDS) -> None:
        self.n = n
        self._ids: dict[bytes, str] = {}
        for conversation in held_out:
            for text in _texts(conversation):
                for gram in grams(text, n):
                    self._ids.setdefault(_key(gram), conversation.id)

    def shared(self, conversation: Conversation) -> tuple[str, str] | None:
        """(id of the held-out prompt, the words shared with it), or None."""
        for text in _texts(conversation):
            for gram in grams(text, self.n):
                if (found := self._ids.get(_key(gram))) is not None:
                    return found, gram
        return None


def contaminated(train: Iterable[Conversation], held_out: Iterable[Conversation], n: int = WORDS) -> dict[str, tuple[str, str]]:
    """Training id → (held-out id, the shared words), for every training prompt that shares an n-gram with a held-out one."""
    seen = Seen(held_out, n)
    return {c.id: found for c in train if (found := seen.shared(c)) is not None}


def _key(gram: str) -> bytes:
    """Long evaluation prompts have millions of runs: eight bytes each, and not their words."""
    return hashlib.blake2b(gram.encode(), digest_size=8).digest()


def _texts(conversation: Conversation) -> list[str]:
    return [conversation.text] if conversation.text else [m["content"] for m in conversation.messages if m["role"] not in ("system", "tool")]
