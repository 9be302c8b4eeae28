"""The suffix drafter: its drafts are those that scanning and counting give, its store serves later requests in bounded memory, the output stays
the target's own."""

from __future__ import annotations

import functools
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from draftheads.heads.tree import DraftTree
from draftheads.inference.decode import complete
from draftheads.inference.drafters import suffix
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.suffix import Place, SuffixDrafter, SuffixIndex, draft
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Completion, Limits, Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

CPU = torch.device("cpu")


# ---- the definition, by scanning


class SlowIndex:
    """All occurrences in the order in which they were written."""

    def __init__(self, most_tokens: float) -> None:
        self.texts: list[list[int]] = []
        self.events: list[tuple[int, int]] = []
        self.first, self.cut, self.most_tokens = 0, 0, most_tokens

    def open(self, context: list[int]) -> int:
        self.texts.append(list(context))
        self._drop()
        return len(self.texts) - 1

    def extend(self, number: int, tokens: list[int]) -> None:
        if number < self.first:
            return
        for token in tokens:
            self.events.append((number, len(self.texts[number])))
            self.texts[number].append(token)
        self._drop()

    def find(self, text: list[int], reach: int, but: int) -> tuple[int, list[tuple[int, int]]]:
        for n in (8, 4, 2, 1):
            if n > reach or n > len(text):
                continue
            hits = [(k, end) for k, end in reversed(self.events) if end >= n and self.texts[k][end - n : end] == text[-n:]][: suffix.MOST]
            if matches := [(common(self.texts[k][:end], text, reach), (k, end)) for k, end in hits if k != but]:
                longest = max(m for m, _ in matches)
                return longest, [place for m, place in matches if m == longest]
        return 0, []

    def _drop(self) -> None:
        while self.first < len(self.texts) and sum(map(len, self.texts[self.first :])) - self.cut > self.most_tokens:
            if self.cut == len(self.texts[self.first]):
                self.first, self.cut = self.first + 1, 0
            else:
                self.events = [e for e in self.events if e != (self.first, self.cut)]
                self.cut += 1


def common(one: list[int], two: list[int], reach: int) -> int:
    return next((m for m in range(reach) if m >= min(len(one), len(two)) or one[-1 - m] != two[-1 - m]), reach)


def slow_draft(text: list[int], places: list[Place], nodes: int, depth: int, top_k: int, floor: float) -> tuple[list[tuple[int, ...]], float]:
    """The paths of the nodes, likeliest first; of equally likely ones those seen first."""

    def follows(path: tuple[int, ...]) -> list[int]:
        """What each place that continues with `path` has behind it; -1: nothing."""
        found = []
        for other, end in places:
            line = (other + list(path) if other is text else other)[end:]
            if tuple(line[: len(path)]) == path:
                found.append(line[len(path)] if len(line) > len(path) else -1)
        return found

    chosen: list[tuple[int, ...]] = [()]
    likely, seen = {(): 1.0}, [()]
    while len(chosen) <= nodes:
        path = chosen[-1]
        after = follows(path)
        tokens = sorted(dict.fromkeys(t for t in after if t >= 0), key=lambda t: -after.count(t)) if len(path) < depth else []
        for token in tokens[:top_k]:
            if (p := likely[path] * after.count(token) / len(after)) >= floor:
                likely[(*path, token)] = p
                seen.append((*path, token))
        waiting = [q for q in seen if q not in chosen]
        if not waiting:
            break
        chosen.append(max(waiting, key=lambda q: likely[q]))
    return chosen[1:], sum(likely[q] for q in chosen[1:])


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


steps = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=25)


@settings(max_examples=150)
@given(steps=steps, reach=st.integers(1, 12), most=st.sampled_from([2, 64]), room=st.sampled_from([float("inf"), 30, 8]), nodes=st.integers(0, 9),
       depth=st.integers(1, 6), top_k=st.integers(1, 3), floor=st.sampled_from([0.0, 0.1, 0.3, 0.5]))
def test_drafts_are_those_of_a_scan(steps: Any, reach: int, most: int, room: float, nodes: int, depth: int, top_k: int, floor: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MOST", most if room == float("inf") else 64)  # places beyond MOST do not come back when others are dropped
        fast, slow = SuffixIndex(most_tokens=room), SlowIndex(room)
        rows: list[int] = []
        for row, tokens in steps:
            while row >= len(rows):
                rows.append(fast.open([1, 0]))
                assert slow.open([1, 0]) == rows[-1]
            fast.extend(rows[row], tokens)
            slow.extend(rows[row], tokens)
            assert fast.tokens <= room
            text = slow.texts[rows[row]]
            for but in (-1, rows[row]):  # its own text among them, or not
                matched, places = fast.find(text, reach, but)
                expected, found = slow.find(text, reach, but)
                assert matched == expected and [e for _, e in places] == [e for _, e in found]
                assert all(a == slow.texts[k] for (a, _), (k, _) in zip(places, found, strict=True))
                places = [(text if k == rows[row] else slow.texts[k], end) for k, end in found]
                got = draft(text, places, nodes, depth, top_k, floor)
                wanted, score = slow_draft(text, places, nodes, depth, top_k, floor)
                assert paths(got.tokens, got.parents) == wanted and got.score == pytest.approx(score)


# ---- the drafter, without a target


def propose(drafter: SuffixDrafter, plan: Plan, rows: int = 1) -> DraftTree:
    return drafter.propose(plan, Sampling(), Noise(torch.zeros(rows, dtype=torch.long)))


def begin(drafter: SuffixDrafter, *texts: list[int]) -> None:
    drafter.reset(len(texts), 999, CPU)
    for b, text in enumerate(texts):
        drafter.start(b, torch.tensor(text[:-1], dtype=torch.long), text[-1], None)


def drafted(drafter: SuffixDrafter, plan: Plan, rows: int = 1) -> list[list[int]]:
    tree = propose(drafter, plan, rows)
    assert tree.source_B == ["suffix" if v.sum() > 1 else "none" for v in tree.valid_BN] and bool(tree.valid_BN[:, 0].all())
    return [tokens_N[valid_N][1:].tolist() for tokens_N, valid_N in zip(tree.tokens_BN, tree.valid_BN, strict=True)]


def test_the_longer_the_match_the_longer_the_draft() -> None:
    text = list(range(10, 40))
    for matched in (1, 2, 3, 5):
        for factor in (0.5, 1.0, 2.0):
            begin(drafter := SuffixDrafter(max_spec_factor=factor), [*text, 99, *text[10 : 10 + matched]])
            length = int(factor * matched)
            assert drafted(drafter, Plan(8)) == [text[10 + matched : 10 + matched + min(8, length)]]
    begin(drafter := SuffixDrafter(max_tree_depth=6, max_spec_factor=1.0), [*text, 99, *text[10:18]])
    assert drafted(drafter, Plan(8)) == [text[18:21]]  # match and draft share the depth
    begin(drafter := SuffixDrafter(gamma=2), [*text, 99, *text[10:18]])
    assert drafted(drafter, Plan(8)) == [text[18:20]]


def test_a_draft_ends_where_counts_no_longer_agree() -> None:
    seen = [1, 2, 7, 8, 9, 3, 1, 2, 7, 8, 5, 4, 1, 2, 7, 6, 6, 0, 1, 2]
    for floor, length in ((0.0, 4), (0.3, 4), (0.4, 2), (0.7, 1)):  # 7: 3 of 3, 8: 2 of 3, then 1 of 2: the latest, 5
        begin(drafter := SuffixDrafter(min_token_prob=floor), seen)
        assert drafted(drafter, Plan(4)) == [[7, 8, 5, 4][:length]]
    begin(drafter := SuffixDrafter(min_token_prob=0.3), seen)
    tree = propose(drafter, Plan(4, tree=Dynamic(3, 2, 4)))
    assert tree.tokens_BN.tolist() == [[2, 7, 8, 6, 5]] and tree.parents_BN.tolist() == [[-1, 0, 1, 1, 2]] and not tree.chained
    assert propose(drafter, Plan(4)).chained and propose(drafter, Plan(9, tree=Sampled((2, 2, 1)))).tokens_BN.tolist() == [[2, 7, 8, 5]]


def test_loops_go_on_and_bare_rows_are_left() -> None:
    begin(drafter := SuffixDrafter(), [9, 1, 2, 1, 2, 1, 2], [5], [7, 6], [4, 4])
    assert drafted(drafter, Plan(6), rows=4) == [[1, 2, 1, 2, 1, 2], [], [], [4, 4]]
    assert drafted(drafter, Plan(6, room_B=(3, 0, 1, 0)), rows=4) == [[1, 2, 1], [], [], []]
    caps = propose(drafter, Plan(6, room_B=(1, 1, 1, 0), tree=Dynamic(4, 3, 8)), rows=4)
    assert caps.width == 2 and caps.valid_BN.tolist() == [[True, True], [True, False], [True, False], [True, False]]


def moved_rows(stale: bool = False) -> list[list[int]]:
    """Rows in slots 0 … 2; 0 ends, 2 moves down and goes on, then slot 1 begins anew. Texts are told apart by their tokens."""
    drafter = SuffixDrafter(max_cached_requests=0)
    if stale:
        drafter.move = lambda source, to: None  # type: ignore[method-assign]
    begin(drafter, [10, 11, 12, 10], [20, 21, 22, 20], [30, 31, 32, 30])
    drafter.move(2, 0)
    drafter.observe(torch.tensor([[31, 32, 35, 30], [21, 22, 0, 0]]), torch.tensor([4, 2]), None)
    drafter.start(1, torch.tensor([40, 41, 42]), 40, None)
    tree = propose(drafter, Plan(4), rows=2)
    return [tree.tokens_BN[0].tolist(), tree.tokens_BN[1].tolist()]


def test_rows_move_and_begin_anew() -> None:
    expected = [[30, 31, 32], [40, 41, 42]]
    assert moved_rows() == expected and moved_rows(stale=True) != expected


def test_the_store_serves_other_rows_and_survives_reset_but_not_forget() -> None:
    answer = [50, 51, 52, 53, 54, 55, 56]
    drafter = SuffixDrafter()
    begin(drafter, [1, 2, 50], [1, 2, 50])
    drafter.observe(torch.tensor([answer[1:], [51] + [0] * 5]), torch.tensor([6, 1]), None)
    assert drafted(drafter, Plan(4), rows=2) == [[], answer[2:6]]  # from the row beside it, still being written
    begin(drafter, [3, 4, 5, 6, 1, 2, 50])
    assert drafted(drafter, Plan(4)) == [answer[1:5]]
    begin(off := SuffixDrafter(max_cached_requests=0), [1, 2, 50])
    off.observe(torch.tensor([answer[1:]]), torch.tensor([6]), None)
    begin(off, [1, 2, 50])
    assert drafted(off, Plan(4)) == [[]] and not off.store.texts and not off.store.places
    drafter.forget()
    drafter.observe(torch.tensor([[51]]), torch.tensor([1]), None)
    assert drafted(drafter, Plan(4)) == [[]] and not drafter.store.texts


def test_what_is_remembered_drafts_as_if_it_had_been_written_here() -> None:
    written, told = SuffixDrafter(), SuffixDrafter()
    prompt, answer = [1, 2, 50], [60, 51, 52, 53, 54]
    written.reset(1, 99, CPU)
    written.start(0, torch.tensor(prompt), answer[0], None)
    written.observe(torch.tensor([answer[1:]]), torch.tensor([4]), None)
    told.remember(prompt, answer)
    assert (told.store.texts, told.store.places, told.store.tokens) == (written.store.texts, written.store.places, written.store.tokens)
    for drafter in (written, told):
        begin(drafter, [3, 1, 2, 50, 60])
        assert drafted(drafter, Plan(4)) == [answer[1:]]


def test_what_scores_too_little_is_left_to_the_next_drafter() -> None:
    for least, length in ((0.0, 2), (2.0, 2), (2.5, 0)):
        begin(drafter := SuffixDrafter(min_score=least), [7, 8, 9, 1, 7])
        assert drafted(drafter, Plan(4)) == [[8, 9][:length]]


def test_memory_stays_flat_over_many_requests() -> None:
    drafter, rng = SuffixDrafter(max_cached_requests=50, max_cached_tokens=900), random.Random(0)
    for i in range(2000):
        if i % 10 == 0:
            drafter.reset(3, 99, CPU)
        row = i % 10 if i % 10 < 3 else rng.randrange(3)
        drafter.start(row, torch.tensor([rng.randrange(40) for _ in range(rng.randrange(1, 12))]), 1, None)
        active = min(i % 10 + 1, 3)
        drafter.observe(torch.randint(40, (active, 6)), torch.randint(1, 7, (active,)), None)
        propose(drafter, Plan(4), active)
        store = drafter.store
        assert store.tokens <= 900 and len(store.texts) <= 50
        if i % 100 == 99:
            assert store.tokens == sum(map(len, store.texts.values())) - store.cut  # what is counted is what is there
            live = [place >> suffix.SHIFT for places in store.places.values() for place in places]
            assert len(live) <= 4 * 900 and set(live) <= store.texts.keys() and all(store.places.values())
            assert len(pickle.dumps((store.texts, store.places))) < 100_000


@pytest.mark.parametrize("wrong", [{"max_tree_depth": 1}, {"max_cached_requests": -1}, {"max_spec_factor": 0.0}, {"min_token_prob": 1.5},
                                   {"max_spec_factor": float("nan")}, {"min_score": float("nan")}, {"min_score": -1.0}, {"max_cached_tokens": 0},
                                   {"gamma": 0}, {"gamma": 257}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        SuffixDrafter(**wrong)


# ---- through decode


@functools.cache
def target(family: str) -> Target:
    return Target.from_model(tiny.model(family), tiny.tokenizer(), name=family)


LIMITS = Limits(30, 128, ignore_eos=True)
LASTING = SuffixDrafter()  # its store lives through all examples


def asked(lengths: list[int], new: list[int]) -> list[Request]:
    rng = random.Random(str(lengths))
    return [Request(str(i), tuple(rng.randrange(4, 20) for _ in range(n)), seed=i, max_new_tokens=m)
            for i, (n, m) in enumerate(zip(lengths, new, strict=True))]


@functools.cache
def alone(family: str, request: Request, sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008 - frozen
    return complete(target(family), NoDrafter(), [request], sampling, LIMITS)[0].tokens


@settings(max_examples=20)
@given(family=st.sampled_from(["llama", "gemma3_text"]), sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=5),
       batch_size=st.integers(1, 3), gamma=st.integers(1, 8), tree=st.sampled_from([None, Dynamic(3, 2, 6)]), floor=st.sampled_from([0.0, 0.4]))
def test_drafts_never_change_a_greedy_answer(family: str, sizes: Any, batch_size: int, gamma: int, tree: Any, floor: float) -> None:
    requests = asked(*map(list, zip(*sizes, strict=True)))
    LASTING.min_token_prob = floor
    found = complete(target(family), LASTING, requests, limits=LIMITS, batch_size=batch_size, plan=Plan(gamma, tree=tree))
    assert all(same(family, r, c.tokens) for r, c in zip(requests, found, strict=True))


def same(family: str, request: Request, tokens: list[int]) -> bool:
    """Equal, or different from a place on where two tokens are tied."""
    expected = alone(family, request)
    at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    if at is None:
        return True
    with torch.no_grad():
        top2 = target(family).model(torch.tensor([[*request.prompt_ids, *expected[:at]]])).logits[0, -1].topk(2).values
    return bool(top2[0] - top2[1] <= 1e-3)


def test_a_stale_index_after_a_move_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = asked([5, 6, 7], [4, 20, 20])
    expected = [alone("llama", r) for r in requests]
    run = functools.partial(complete, target("llama"), SuffixDrafter(), requests, limits=LIMITS, batch_size=3)
    assert [c.tokens for c in run()] == expected
    monkeypatch.setattr(SuffixDrafter, "move", lambda self, source, to: None)
    assert [c.tokens for c in run()] != expected


def test_sampled_answers_are_the_autoregressive_ones() -> None:
    requests, sampling = asked([5, 9, 3], [30, 30, 30]), Sampling(0.8, top_k=20)
    drafter = SuffixDrafter(min_token_prob=0.0)
    for _ in range(2):
        for tree in (None, Dynamic(3, 2, 6)):
            found = complete(target("llama"), drafter, requests, sampling, LIMITS, batch_size=2, plan=Plan(4, tree=tree))
            assert [c.tokens for c in found] == [alone("llama", r, sampling) for r in requests]
    assert accepted(found) > 50  # the second time it knows the answers


def accepted(found: list[Completion]) -> int:
    return sum(r.accepted for c in found for r in c.rounds)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_second_run_of_the_same_prompts_is_drafted_better(batch_size: int) -> None:
    requests, drafter = asked([5, 9, 12, 7], [30] * 4), SuffixDrafter()
    runs = []
    for again in range(3):
        if again == 2:
            drafter.forget()
        found = complete(target("llama"), drafter, requests, limits=LIMITS, batch_size=batch_size, plan=Plan(8))
        runs.append(([c.tokens for c in found], accepted(found)))
    assert runs[0][0] == runs[1][0] and runs[0] == runs[2]
    assert runs[1][1] > 4 * 20 > 2 * runs[0][1]
