"""The host's side of one active row: what it has written, when it ends, what was recorded for it.

Nothing after the end is kept: a block of tokens is cut at the first end-of-sequence id, at the first token at which the decoded text
contains a stop string, or at the length limit, whichever comes first.

Shape suffixes: M positions of one round or prefill, T positions of the row, F feature width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftheads.inference.requests import Captured, Completion, Limits, Request, RoundStat
from draftheads.inference.target import Target


@dataclass
class StopStrings:
    """decode: token ids → text, special tokens included (a stop string may be one)."""

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def cut(self, written: list[int], block: list[int]) -> int | None:
        """How many tokens of `block` until the text contains a stop string; None if it does not.

        Only the tail is decoded: a character is at most 4 tokens (bytes), 64 more tokens cover special ones that decode to nothing.
        """
        tail = 4 * max(map(len, self.strings)) + 64
        before = written[-tail:]
        if not self._inside(before + block):
            return None
        return next((i for i in range(1, len(block)) if self._inside(before + block[:i])), len(block))

    def _inside(self, tokens: list[int]) -> bool:
        text = self.decode(tokens)
        return any(s in text for s in self.strings)


@dataclass
class Row:
    """limit: how many tokens it may write in all. chunks: (features or None, final, lse) of consecutive positions, if captured."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    rounds: list[RoundStat] = field(default_factory=list)
    chunks: list[tuple[Tensor | None, Tensor, Tensor]] = field(default_factory=list)
    certificate: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    decode_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def add(self, block: list[int], eos_ids: Collection[int], stops: StopStrings | None) -> list[int]:
        """Append a block; returns what was kept of it, and sets finish_reason if this was the end."""
        kept, reason = (block, None) if len(block) < self.room else (block[: self.room], "length")
        cut = stops.cut(self.tokens, kept) if stops is not None else None
        if cut is not None:
            kept, reason = kept[:cut], "stop_string"
        for i, token in enumerate(kept):
            if token in eos_ids:
                kept, reason = kept[: i + 1], "eos"
                break
        self.tokens.extend(kept)
        self.finish_reason = reason
        return kept

    def certify(self, values_M3: list[list[float]]) -> None:
        for values in values_M3:
            self.certificate = [total + value for total, value in zip(self.certificate, values, strict=True)]

    def complete(self, certificate: bool) -> Completion:
        assert self.finish_reason is not None
        z = self.certificate if certificate else [None, None, None]
        return Completion(self.request, self.tokens, self.finish_reason, self.rounds, self._captured(), decode_s=self.decode_s,
                          prefill_s=self.prefill_s, logprob_sum=z[0], entropy_sum=z[1], variance_sum=z[2])

    def _captured(self) -> Captured | None:
        if not self.chunks:
            return None
        T = len(self.request.prompt_ids) + len(self.tokens) - 1
        features, final, lse = zip(*self.chunks, strict=True)
        # Recorded in inference mode; training may want to save them for backward.
        with torch.inference_mode(False):
            final_TD = _joined(final, T)
            none = final_TD.new_zeros(T, 0)
            return Captured(_joined(features, T) if features[0] is not None else none, final_TD, _joined(lse, T))


def _joined(chunks: tuple[Tensor, ...], T: int) -> Tensor:
    """float32 on the CPU, an ordinary (non-inference) tensor of its own memory."""
    with torch.inference_mode():
        whole = torch.cat([c.detach() for c in chunks])[:T]
    return whole.clone().to("cpu", torch.float32)


def longest(target: Target, limits: Limits) -> int:
    """Most tokens (prompt and output) a row may have: the limit, or the target's own positions if those are fewer."""
    return min(limits.max_len, target.geometry.max_positions)


def refusal(request: Request, target: Target, limits: Limits) -> str | None:
    """Why this request cannot be served, in one line, or None."""
    length, room = len(request.prompt_ids), longest(target, limits)
    if length == 0:
        return f"request {request.id}: the prompt has no tokens"
    if length >= room:
        return (f"request {request.id}: its prompt has {length} tokens, which leaves no room for an answer: max_len is {limits.max_len} and "
                f"{target.name} has {target.geometry.max_positions} positions; shorten the prompt or raise max_len")
    most = len(target.embed_VD)
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < most:
        return f"request {request.id}: token ids from {min(request.prompt_ids)} to {max(request.prompt_ids)}; {target.name} has 0 … {most - 1}"
    if not -(2**63) <= request.seed < 2**63:
        return f"request {request.id}: seed {request.seed} is no 64-bit integer"
    if request.temperature is not None and not 0 <= request.temperature < float("inf"):
        return f"request {request.id}: temperature {request.temperature}; it must be a number, at least 0"
    if _max_new(request, limits) < 1:
        return f"request {request.id}: max_new_tokens is {_max_new(request, limits)}, it must be at least 1"
    return None


def row_limit(request: Request, target: Target, limits: Limits) -> int:
    """How many tokens this request may get."""
    return min(_max_new(request, limits), longest(target, limits) - len(request.prompt_ids))


def _max_new(request: Request, limits: Limits) -> int:
    return limits.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
