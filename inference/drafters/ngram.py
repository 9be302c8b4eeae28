"""Prompt lookup: if the last n tokens occurred before in prompt + output, propose what followed them then. No training, no device work.

Longest match first (prompt_lookup_max … prompt_lookup_min, vLLM's names), and among equally long ones the most recent; engines take the
first. Measured on 266 answers of SmolLM2-135M-Instruct (γ = 8, prompt_lookup_max 5): τ 1.84 against 1.83 with prompt_lookup_min 2, 2.03
against 1.97 with 1. A copy that reaches the end of the text goes on into its own draft, so a loop of any period is continued to the full length.

Each row keeps a dict from n-gram to the index after its latest occurrence, extended by the new tokens only: O(1) a token, not a scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.recipes.schema import RecipeError


class NgramIndex:
    """One row's tokens and where each of their n-grams was last followed by something."""

    def __init__(self, tokens: list[int], prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.tokens = tokens
        self.sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self.after: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # n-grams that end before this index are in `after`

    def extend(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)

    def draft(self, length: int) -> list[int]:
        """Up to `length` tokens that followed the latest earlier occurrence of the longest matching suffix; [] if there is none."""
        self._index()
        tokens = self.tokens
        for n in reversed(self.sizes):
            start = self.after.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if start is not None:
                drafts = tokens[start : start + length]
                while len(drafts) < length:
                    at = start + len(drafts) - len(tokens)
                    drafts.append(drafts[at])
                return drafts
        return []

    def _index(self) -> None:
        # The n-grams that end with the last token stay out: a suffix must not match itself.
        tokens, after = self.tokens, self.after
        for end in range(self.indexed + 1, len(tokens)):
            for n in self.sizes:
                if n > end:
                    break
                after[tuple(tokens[end - n : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)


class NgramDrafter(Drafter):
    """prompt_lookup_min: shortest suffix that may be looked up (higher = fewer, better drafts; in a composite the rest goes to the head).
    prompt_lookup_max: longest one.
    gamma: tokens copied per round; None takes the plan's."""

    name = "ngram"

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5, gamma: int | None = None) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise RecipeError(f"ngram: prompt_lookup_min {prompt_lookup_min} must be at least 1 and at most prompt_lookup_max {prompt_lookup_max}")
        self.prompt_lookup_min, self.prompt_lookup_max, self.gamma = prompt_lookup_min, prompt_lookup_max, gamma

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.rows: list[NgramIndex | None] = [None] * batch
        self.device = device

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.rows[row] = NgramIndex([*prompt_T.tolist(), root], self.prompt_lookup_min, self.prompt_lookup_max)

    def move(self, source: int, to: int) -> None:
        self.rows[to] = self.rows[source]

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for b, (tokens, count) in enumerate(zip(tokens_BM.tolist(), counts_B.tolist(), strict=True)):
            self._row(b).extend(tokens[:count])

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        B = len(noise.seeds_B)
        gamma = plan.depth if self.gamma is None else self.gamma
        drafts = [self._row(b).draft(min(gamma, plan.room_B[b]) if plan.room_B is not None else gamma) for b in range(B)]
        widest = max(map(len, drafts))
        root_B = torch.tensor([self._row(b).tokens[-1] for b in range(B)], device=self.device)
        drafts_BG = torch.tensor([d + [0] * (widest - len(d)) for d in drafts], dtype=torch.long, device=self.device).reshape(B, widest)
        tree = DraftTree.chain(root_B, drafts_BG, torch.tensor([len(d) for d in drafts], device=self.device))
        tree.source_B = [self.name if d else "none" for d in drafts]
        return tree

    def _row(self, b: int) -> NgramIndex:
        row = self.rows[b]
        assert row is not None, f"propose or observe on slot {b}, which was never started"
        return row
