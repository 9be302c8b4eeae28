"""Prompt lookup against a scan; composites: who is asked, what is merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import WRONG, Replay, plain, prompt, target

from draftheads.heads.tree import DraftTree
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite, merge
from draftheads.inference.drafters.ngram import NgramDrafter, NgramIndex
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.recipes.schema import RecipeError


def slow_ngram(tokens: list[int], low: int, high: int, length: int) -> list[int]:
    """The definition, by scanning: longest suffix first, latest earlier occurrence, copying into the draft itself."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                grown = list(tokens)
                for _ in range(length):
                    grown.append(grown[end + len(grown) - len(tokens)])
                return grown[len(tokens) :]
    return []


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), steps=st.lists(st.integers(0, 5), max_size=6), low=st.integers(1, 3),
       extra=st.integers(0, 3), length=st.integers(0, 8))
def test_the_incremental_index_equals_a_scan(tokens: list[int], steps: list[int], low: int, extra: int, length: int) -> None:
    seed = len(tokens)
    index = NgramIndex(list(tokens), low, low + extra)
    text = list(tokens)
    assert index.draft(length) == slow_ngram(text, low, low + extra, length)
    for step in steps:
        new = [(seed * 5 + i * 3) % 4 for i in range(step)]
        index.extend(list(new))
        text += new
        assert index.draft(length) == slow_ngram(text, low, low + extra, length)


def test_a_loop_is_copied_to_the_full_length() -> None:
    assert NgramIndex([9, 1, 2, 1, 2], 2, 4).draft(5) == [1, 2, 1, 2, 1]
    assert NgramIndex([9, 1, 2, 3], 1, 4).draft(5) == []


def test_composite_asks_the_second_only_for_rows_the_first_leaves() -> None:
    asked = [Request("copies", (10, 11, 12, 13) * 4), Request("writes", prompt(9))]
    answers = {r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}

    class OnlyCopies(Replay):
        name = "first"

        def _chain(self, ids: tuple[int, ...], length: int) -> list[int]:
            return super()._chain(ids, length)[:2] if ids[0] == 10 else []

    for batch_size in (1, 2):
        first, second = OnlyCopies(answers), Replay(answers, WRONG["half right"], "tree", taps=(1,))
        found = complete(target(), Composite(first, second), asked, limits=Limits(20, 128, ignore_eos=True), batch_size=batch_size)
        assert [c.tokens for c in found] == [answers[r.prompt_ids][:20] for r in asked]
        for done, source in zip(found, ("first", "replay"), strict=True):
            assert all(r.source == source for r in done.rounds[:-1]) and done.rounds[-1].source in (source, "none")
        assert second.seen[asked[0].prompt_ids][:20] == found[0].tokens  # an idle drafter sees every token
        assert second.asked < first.asked if batch_size == 1 else second.asked > 0
        assert all(r.drafted in (0, 1, 2) for r in found[0].rounds)


def test_composite_wants_one_set_of_taps() -> None:
    with pytest.raises(ValueError, match="different taps"):
        Composite(Replay({}, taps=(1,)), Replay({}, taps=(2,)))
    assert Composite(NgramDrafter(), Replay({}, taps=(2,))).taps == (2,)
    with pytest.raises(ValueError, match="different taps"):
        Composite(NgramDrafter(), Replay({}, taps=(2,)), Replay({}, taps=(3,)))


class Only(Replay):
    """Drafts for prompts that begin with `begin`, at most 2 tokens."""

    def __init__(self, begin: int, answers: dict[tuple[int, ...], list[int]], **options: Any) -> None:
        super().__init__(answers, **options)
        self.begin, self.name = begin, f"only {begin}"

    def _chain(self, ids: tuple[int, ...], length: int) -> list[int]:
        return super()._chain(ids, length)[:2] if ids[0] == self.begin else []


def test_any_number_of_drafters_is_tried_in_order() -> None:
    asked = [Request(str(first), (first, *prompt(6))) for first in (10, 11, 12)]
    answers = {r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}
    for batch_size in (1, 3):
        drafters = [Only(10, answers), Only(11, answers), Replay(answers, shape="tree")]
        found = complete(target(), Composite(*drafters), asked, limits=Limits(22, 128, ignore_eos=True), batch_size=batch_size)
        for request, done, drafter in zip(asked, found, drafters, strict=True):
            assert done.tokens == answers[request.prompt_ids][:22] and done.rounds[0].source == drafter.name
            assert all(d.seen[request.prompt_ids][:22] == done.tokens for d in drafters)  # the idle ones saw every token
            assert all(r.accepted == r.drafted > 0 for r in done.rounds[:-1])
        counts = [d.asked for d in drafters]
        assert counts == sorted(counts, reverse=True) and (batch_size == 3 or counts[0] > counts[1] > counts[2] > 0)


def test_nobody_is_asked_for_rows_that_are_served_or_full() -> None:
    """Row 1 is left by the first drafter: it goes on to the second only while it has room."""
    answers = {(10, 5, 6): [7] * 30, (11, 5, 6): [8] * 30}
    first, second = Only(10, answers), Replay(answers)
    both = Composite(first, second)
    both.reset(2, 64, torch.device("cpu"))
    for b, ids in enumerate(answers):
        both.start(b, torch.tensor(ids), answers[ids][0], None)
    noise = Noise(torch.zeros(2, dtype=torch.long))
    for plan, asked, sources in ((Plan(4, (5, 0)), 0, ["only 10", "none"]), (Plan(4, (0, 3)), 1, ["none", "replay"]),
                                 (Plan(4, (2, 1)), 2, ["only 10", "replay"]), (Plan(4), 3, ["only 10", "replay"])):
        tree = both.propose(plan, Sampling(), noise)
        assert second.asked == asked and tree.source_B == sources
        room_B = plan.room_B or (4, 4)
        assert tree.valid_BN.sum(-1).tolist() == [1 + min(2, room_B[0]), 1 + min(4, room_B[1])]


def test_merging_keeps_a_chain_a_chain_and_nothing_else() -> None:
    one = DraftTree.chain(torch.tensor([1, 2, 3]), torch.tensor([[11], [12], [13]]), torch.tensor([1, 0, 1]))
    two = DraftTree.chain(torch.tensor([1, 2, 3]), torch.tensor([[21, 31], [22, 32], [23, 33]]))
    got = merge(one, two, [True, False, True])
    assert got.chained and got.parents_BN.tolist() == [[-1, 0, 1]] * 3 and got.q_BNV is None
    assert got.valid_BN.tolist() == [[True, True, False], [True, True, True], [True, True, False]]
    assert got.tokens_BN[got.valid_BN].tolist() == [1, 11, 2, 22, 32, 3, 13]

    q_BNV = torch.rand(3, 4, 40)
    tokens_BN = torch.tensor([[1, 21, 31, 7], [2, 22, 32, 8], [3, 23, 33, 9]])
    tree = DraftTree(tokens_BN, torch.tensor([-1, 0, 0, 1]).expand(3, -1), tokens_BN > 0, q_BNV, widths=(2, 1))
    for first, second, take in ((one, tree, [True, False, True]), (tree, one, [False, True, False])):
        got = merge(first, second, take)
        assert not got.chained and got.widths is None
        assert got.parents_BN.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 1], [-1, 0, 1, 2]]
        assert got.tokens_BN[got.valid_BN].tolist() == [1, 11, 2, 22, 32, 8, 3, 13]
        assert got.q_BNV is not None and torch.equal(got.q_BNV[1], q_BNV[1]) and not got.q_BNV[[0, 2]].any()


class Siblings(Replay):
    """Two tokens below the root, drawn without replacement from a uniform distribution over the first 50."""

    def propose(self, plan: Plan, sampling: Any, noise: Any) -> DraftTree:
        self.asked += 1
        root_B = torch.tensor([self.seen[self.rows[b]][-1] for b in range(len(noise.seeds_B))])
        drawn_B2 = torch.stack([torch.randperm(50)[:2] for _ in root_B])
        q_BNV = torch.zeros(len(root_B), 3, 128)
        q_BNV[:, 1:, :50] = 1 / 50
        valid_BN = torch.tensor([[True, room > 0, room > 0] for room in plan.room_B or ()])
        return DraftTree(torch.cat([root_B[:, None], drawn_B2], 1), torch.tensor([-1, 0, 0]).expand(len(root_B), -1), valid_BN, q_BNV, widths=(2,))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_copied_row_is_not_touched_by_a_sampled_tree_beside_it(temperature: float) -> None:
    """The copied row is judged as deterministic, so it stays the autoregressive one whatever q its neighbour brings."""
    asked = [Request("copies", (10, *prompt(6)), seed=3), Request("writes", prompt(9), seed=4)]
    limits, sampling = Limits(24, 128, ignore_eos=True), Sampling(temperature)
    alone = complete(target(), NoDrafter(), asked, sampling, limits)
    answers = {r.prompt_ids: c.tokens for r, c in zip(asked, alone, strict=True)}
    second = Siblings(answers)
    found = complete(target(), Composite(Only(10, answers), second), asked, sampling, limits, batch_size=2)
    assert found[0].tokens == alone[0].tokens and {r.source for r in found[0].rounds[:-1]} == {"only 10"}
    assert second.asked > 0 and {r.source for r in found[1].rounds[:-1]} == {"replay"} and len(found[1].tokens) == 24
    assert temperature > 0 or found[1].tokens == alone[1].tokens


@pytest.mark.parametrize("batch_size", [1, 2])
def test_ngram_suffix_and_a_tree_together_are_still_the_target(batch_size: int) -> None:
    asked = [Request(str(i), ids, seed=i) for i, ids in enumerate([(10, 11, 12, 13) * 4, prompt(9), prompt(5), (10, 11, 12, 13) * 3])]
    answers = {r.prompt_ids: plain("llama", r.prompt_ids) for r in asked}
    drafter = Composite(NgramDrafter(3, 5), SuffixDrafter(min_score=2.5), Replay(answers, WRONG["half right"], "tree", taps=(1,)))
    sources = []
    for _ in range(2):
        found = complete(target(), drafter, asked, limits=Limits(30, 128, ignore_eos=True), batch_size=batch_size, plan=Plan(5))
        assert [c.tokens for c in found] == [answers[r.prompt_ids][:30] for r in asked]
        sources.append([r.source for c in found for r in c.rounds])
    assert {"suffix", "replay"} <= {*sources[0]} and sources[1].count("suffix") > sources[1].count("replay") and len(sources[1]) < len(sources[0])


def test_lookup_sizes_that_mean_nothing_are_refused() -> None:
    for low, high in ((0, 3), (3, 2)):
        with pytest.raises(RecipeError, match="prompt_lookup_min"):
            NgramDrafter(low, high)
