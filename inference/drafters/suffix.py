"""SuffixDecoding (arXiv 2411.04975; vLLM's `suffix`): propose what followed where the row's last tokens occurred before, in its own text or in
other answers; the longer the match, the longer the draft.

    row's text ─────────► own index ─► places of the longest match ─► draft by counts ─┐
    answers of all rows ─► store ────► places of the longest match ─► draft by counts ─┴► the higher score

Where the paper walks a suffix tree we keep places: of n-grams of a few sizes, where they lately occurred. The largest n-gram that is known
leads to the places, comparing backwards finds the longest match among them, and counts are those of the places still left as a draft grows:
what a tree would say of the latest MOST occurrences, at O(1) a token. And old tokens can be dropped, which a suffix automaton cannot do.

A token's probability is the product of the count ratios down to it, a draft's score the sum of its probabilities: the tokens that would be
accepted if counts were the truth. They flatter: a score of 1, 2, 4, 8 came with 0.4, 0.5, 1.3, 4.8 accepted tokens.

Defaults: chosen by replaying greedy answers of SmolLM2-135M-Instruct. τ and drafted tokens a round at γ = 8, the store empty at first:

                                                        1,049 mixed prompts    480 of our own
    n-gram, prompt_lookup 2 … 5                               1.58, 1.8            1.83, 2.2
    n-gram, prompt_lookup 1 … 5                               1.72, 4.4            2.01, 4.9
    suffix without store                                      1.67, 1.9            1.95, 2.3
    suffix, vLLM's depth 24 and factor 1                      1.93, 2.4            2.13, 2.5
    suffix, our defaults                                      2.03, 3.7            2.24, 3.7
    suffix, tree dynamic:depth=8,top_k=4,nodes=8              2.08, 3.8            2.29, 3.8
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Sampling
from draftheads.inference.sampling import RowSampling
from draftheads.inference.shapes import MOST_NODES, Dynamic
from draftheads.recipes.schema import RecipeError

# Sizes of the n-grams whose places are known, and how many places of each.
SIZES, MOST = (1, 2, 4, 8), 64
# A place is one int, (number of the text) << SHIFT | index of the token after the n-gram: far smaller than a tuple.
SHIFT = 32


Place = tuple[list[int], int]  # a text, and the index of the token after the match


class SuffixIndex:
    """Texts that grow, and where their n-grams lately occurred. The oldest are dropped while there are more than `most_texts` of them, or
    more than `most_tokens` tokens in all."""

    def __init__(self, most_texts: float = float("inf"), most_tokens: float = float("inf")) -> None:
        self.most_texts, self.most_tokens = most_texts, most_tokens
        self.texts: dict[int, list[int]] = {}
        self.places: dict[tuple[int, ...], tuple[int, ...]] = {}  # oldest first; tuples of ints, which the garbage collector leaves alone
        self.tokens, self.next = 0, 0
        self.oldest, self.cut = 0, 0  # the first number left, and where that text now begins

    def open(self, context: Sequence[int] = ()) -> int:
        """A new text's number. Its `context` is compared with, but nothing in it counts as an occurrence."""
        number = self.next
        self.next += 1
        self.texts[number] = list(context)
        self.tokens += len(context)
        self._drop()
        return number

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Append to a text; one that was dropped stays dropped."""
        text = self.texts.get(number)
        if text is None:
            return
        before = len(text)
        for token in tokens:
            # The n-grams before the token: those that end with the last one stay out, a suffix must not match itself.
            end = len(text)
            place = number << SHIFT | end
            for n in SIZES:
                if n > end:
                    break
                key = tuple(text[end - n :])
                self.places[key] = (*self.places.get(key, ())[1 - MOST :], place)
            text.append(token)
        self.tokens += len(text) - before
        self._drop()

    def find(self, text: list[int], reach: int, but: int = -1) -> tuple[int, list[Place]]:
        """(length of the longest match of the end of `text`, at most `reach`; its places, latest first); text number `but` does not count.
        Looked at are the latest MOST places of the largest n-gram that has any."""
        for n in reversed(SIZES):
            longest, best = 0, list[Place]()
            for place in reversed(self.places.get(tuple(text[-n:]), ()) if n <= min(reach, len(text)) else ()):
                number, end = place >> SHIFT, place & ((1 << SHIFT) - 1)
                if number == but:
                    continue
                other, m, most = self.texts[number], n, min(end, len(text), reach)
                while m < most and other[end - 1 - m] == text[-1 - m]:
                    m += 1
                if m > longest:
                    longest, best = m, []
                if m == longest:
                    best.append((other, end))
            if best:
                return longest, best
        return 0, []

    def _drop(self) -> None:
        """From the oldest text's beginning, a token at a time: no round pays for a whole answer."""
        while self.texts and (len(self.texts) > self.most_texts or self.tokens > self.most_tokens):
            text, place = self.texts[self.oldest], self.oldest << SHIFT | self.cut
            if self.cut == len(text):
                del self.texts[self.oldest]
                self.oldest, self.cut = self.oldest + 1, 0
                continue
            for n in SIZES:
                key = tuple(text[max(0, self.cut - n) : self.cut])
                if place in (places := self.places.get(key, ())):
                    self.places[key] = tuple(p for p in places if p != place)
                    if len(places) == 1:
                        del self.places[key]
            self.cut += 1
            self.tokens -= 1


@dataclass
class Draft:
    """Drafted tokens, the node that each hangs below (0: the root, i + 1: tokens[i]), and the sum of their probabilities."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0
    matched: int = 0


def draft(text: list[int], places: list[Place], nodes: int, depth: int, top_k: int, min_token_prob: float) -> Draft:
    """The likeliest tree by counts, best node first: each node's top_k commonest continuations, none below min_token_prob. A chain is
    top_k = 1. A place in `text` itself reads on into the draft, so a loop of any period is continued."""
    found, path, p, node, pushed = Draft(), list[int](), 1.0, 0, 0
    heap: list[tuple[float, int, int, int, list[int], list[Place]]] = []
    while True:
        branches: dict[int, list[Place]] = {}
        for other, end in places if len(path) < depth else ():
            at = end + len(path)
            if at < len(other):
                branches.setdefault(other[at], []).append((other, end))
            elif other is text:
                branches.setdefault(path[at - len(text)], []).append((other, end))
        for token, left in sorted(branches.items(), key=lambda b: -len(b[1]))[:top_k]:
            likely = p * len(left) / len(places)
            if likely >= min_token_prob:
                heapq.heappush(heap, (-likely, pushed, token, node, path, left))
                pushed += 1
        if len(found.tokens) >= nodes or not heap:
            return found
        negative, _, token, parent, path, places = heapq.heappop(heap)
        p, path = -negative, [*path, token]
        found.tokens.append(token)
        found.parents.append(parent)
        found.score += p
        node = len(found.tokens)


@dataclass
class _Row:
    """own: the index of its text (prompt and output), number 0 in it; answer: the number of its output in the store."""

    own: SuffixIndex
    text: list[int]
    answer: int


class SuffixDrafter(Drafter):
    """The options are vLLM's, without `suffix_decoding_`:

    max_tree_depth       most tokens of match and draft together (vLLM's default is 24)
    max_cached_requests  answers kept in the store; 0: no store, a row is drafted from its own text only
    max_spec_factor      drafted tokens per matched token (vLLM's default is 1)
    min_token_prob       no token is drafted whose probability by counts is below this

    and beside them:

    min_score            no draft is made whose score (see above) is below this: in a composite before a head, 2 … 3 leaves it the rows that
                         it drafts better; 0 alone
    max_cached_tokens    tokens kept in the store, about 0.4 kB each; the oldest are dropped first
    gamma                most drafted tokens of a round; None takes the plan's

    Of the tree shapes it grows Dynamic ones, by counts; where a plan wants another shape it drafts a chain of that depth.

    The store outlives `reset`, so it serves later requests and later calls of decode; `forget` empties it. What a row writes does not depend
    on it, how fast it does: forget() before every repetition of a measurement, or the second one measures recitation.
    """

    name = "suffix"

    def __init__(self, max_tree_depth: int = 48, max_cached_requests: int = 10000, max_spec_factor: float = 2.0, min_token_prob: float = 0.1,
                 *, min_score: float = 0.0, max_cached_tokens: int = 1 << 17, gamma: int | None = None) -> None:
        if max_tree_depth < 2 or max_cached_requests < 0 or not 0 < max_spec_factor < float("inf") or not 0 <= min_token_prob <= 1:
            raise RecipeError(f"suffix: max_tree_depth {max_tree_depth} must be at least 2, max_cached_requests {max_cached_requests} at least 0, "
                              f"max_spec_factor {max_spec_factor} above 0, min_token_prob {min_token_prob} in 0 … 1")
        if not 0 <= min_score < float("inf") or max_cached_tokens < 1 or not (gamma is None or 1 <= gamma <= MOST_NODES):
            raise RecipeError(f"suffix: min_score {min_score} must be at least 0, max_cached_tokens {max_cached_tokens} at least 1, gamma {gamma} in "
                              f"1 … {MOST_NODES}, or None")
        self.max_tree_depth, self.max_cached_requests, self.max_cached_tokens = max_tree_depth, max_cached_requests, max_cached_tokens
        self.max_spec_factor, self.min_token_prob, self.min_score, self.gamma = max_spec_factor, min_token_prob, min_score, gamma
        # Match and draft share the depth in the ratio 1 : factor; a longer match could not make a longer draft.
        self.longest = min(max(1, int(max_tree_depth * max_spec_factor / (1 + max_spec_factor))), max_tree_depth - 1)
        self.reach = max_tree_depth - self.longest
        self.forget()

    def forget(self) -> None:
        """Empty the store. Rows that are being written stay as they are, but their answers are no longer collected."""
        self.store = SuffixIndex(self.max_cached_requests, self.max_cached_tokens)

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Put an answer into the store as if it had been written here."""
        self.store.extend(self._open(prompt), answer)

    def _open(self, prompt: Sequence[int]) -> int:
        """A new answer in the store. The end of the prompt is its context: its first tokens match an earlier answer only behind the same words."""
        return self.store.open(prompt[-self.reach :])

    def reset(self, batch: int, max_len: int, device: torch.device) -> None:
        self.rows: list[_Row | None] = [None] * batch
        self.device = device

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        prompt, own = prompt_T.tolist(), SuffixIndex()
        own.extend(own.open(), [*prompt, root])
        answer = self._open(prompt)
        self.store.extend(answer, [root])
        self.rows[row] = _Row(own, own.texts[0], answer)

    def move(self, source: int, to: int) -> None:
        self.rows[to], self.rows[source] = self.rows[source], None

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for b, (tokens, count) in enumerate(zip(tokens_BM.tolist(), counts_B.tolist(), strict=True)):
            row = self._row(b)
            row.own.extend(0, tokens[:count])
            self.store.extend(row.answer, tokens[:count])

    def propose(self, plan: Plan, sampling: Sampling | RowSampling, noise: Noise) -> DraftTree:
        B = len(noise.seeds_B)
        depth, nodes, top_k = plan.depth, plan.depth, 1
        if isinstance(plan.tree, Dynamic):
            nodes, top_k = plan.tree.nodes, plan.tree.top_k
        elif self.gamma is not None:
            depth = nodes = self.gamma
        room_B = plan.room_B if plan.room_B is not None else (depth,) * B
        return self._tree([self._draft(self._row(b), nodes, min(depth, room_B[b]), top_k) for b in range(B)])

    def _draft(self, row: _Row, nodes: int, depth: int, top_k: int) -> Draft:
        best = Draft()
        for index, but in ((row.own, -1), (self.store, row.answer)) if depth > 0 else ():
            matched, places = index.find(row.text, self.reach, but)
            if places:
                most = min(nodes, self.longest, int(self.max_spec_factor * matched))
                found = draft(row.text, places, most, depth, top_k, self.min_token_prob)
                found.matched = matched
                best = max(best, found, key=lambda d: (d.score, d.matched))
        return best if best.score >= self.min_score else Draft()

    def _tree(self, drafts: list[Draft]) -> DraftTree:
        widest = max(len(d.tokens) for d in drafts)
        # One tensor, one copy to the device. Padding nodes hang below the node before them.
        packed_3BN = torch.tensor([
            [[self._row(b).text[-1], *d.tokens, *[0] * (widest - len(d.tokens))] for b, d in enumerate(drafts)],
            [[-1, *d.parents, *range(len(d.tokens), widest)] for d in drafts],
            [[1] * (1 + len(d.tokens)) + [0] * (widest - len(d.tokens)) for d in drafts],
        ], device=self.device)
        chained = all(d.parents == list(range(len(d.parents))) for d in drafts)
        return DraftTree(packed_3BN[0], packed_3BN[1], packed_3BN[2].bool(), None, [self.name if d.tokens else "none" for d in drafts], chained)

    def _row(self, b: int) -> _Row:
        row = self.rows[b]
        assert row is not None, f"propose or observe on slot {b}, which was never started"
        return row
