"""Token ids → text, while they arrive: each `push` returns the text that is certain now.

Held back: an unfinished character (tokens can be single bytes), and the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The deltas of one row; special tokens are left out unless show_special. Without them, the sum is `final_text` of all the tokens."""

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), *, show_special: bool = False) -> None:
        self.tokenizer, self.stop_strings, self.show_special = tokenizer, tuple(stop_strings), show_special
        self.tokens: list[int] = []
        # The text of tokens[context:settled] is out; it is decoded again with what follows, because a token's text may depend on its left
        # neighbour (leading spaces), and only the difference is new.
        self.context = self.settled = 0
        self.held = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """New text, "" while nothing is certain."""
        if self.stopped:
            return ""
        self.tokens.extend(tokens)
        before = self._decode(self.tokens[self.context : self.settled])
        now = self._decode(self.tokens[self.context :])
        if not now.endswith("\ufffd"):
            self.held += now[len(before) :]
            self.context, self.settled = self.settled, len(self.tokens)
        return self._release()

    def finish(self) -> str:
        """What was still held back."""
        if self.stopped:
            return ""
        before = self._decode(self.tokens[self.context : self.settled])
        self.held += self._decode(self.tokens[self.context :])[len(before) :]
        out = self._release()
        if not self.stopped:
            out, self.held = out + self.held, ""
        self.stopped = True
        return out

    def _release(self) -> str:
        cut = min((at for s in self.stop_strings if (at := self.held.find(s)) >= 0), default=None)
        if cut is not None:
            out, self.held, self.stopped = self.held[:cut], "", True
            return out
        keep = max((k for s in self.stop_strings for k in range(1, len(s)) if self.held.endswith(s[:k])), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=not self.show_special, clean_up_tokenization_spaces=False)


def final_text(tokenizer: Any, tokens: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
    """The text of a finished row: special tokens left out, cut before the first stop string."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text[: min((at for s in stop_strings if (at := text.find(s)) >= 0), default=len(text))]
