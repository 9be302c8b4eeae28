"""Searched trees: against all trees there are; measured ranks against a slow twin over a head's reference forward; and the promise of a tree against
what decode() then measures, with a stub whose ranks are drawn from a known table."""

from __future__ import annotations

import functools
import inspect
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import prompt, requests, target
from test_heads import make_head, reference
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference import metrics, tree_search
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.draft_model import DraftModelDrafter
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.growth import DraftVocab, grow
from draftheads.inference.requests import Limits, Request, RoundStat, Sampling
from draftheads.inference.shapes import Static, parse_shape
from draftheads.inference.target import Target
from draftheads.inference.tree_search import choose_static, expected_tau, measure_ranks, predict_static, save_tree, search_static
from draftheads.recipes.schema import RecipeError

Path = tuple[int, ...]
ACCEPTANCE = torch.tensor([[0.5, 0.2, 0.1], [0.45, 0.25, 0.05], [0.6, 0.1, 0.1]], dtype=torch.float64)


# ---- searching


def all_trees(depth: int, ranks: int, most: int) -> Iterator[frozenset[Path]]:
    """Every set of at most `most` paths that holds the beginning of each of them."""
    seen: set[frozenset[Path]] = {frozenset()}
    for _ in range(most):
        grown = set()
        for tree in seen:
            for above in [(), *tree]:
                grown |= {tree | {(*above, r)} for r in range(ranks) if len(above) < depth}
        new = grown - seen
        yield from new
        seen |= grown


def product(path: Path, table: list[list[float]]) -> float:
    return math.prod(table[d][r] for d, r in enumerate(path))


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Shares in 64ths, zeros and certainties among them."""
    D, R = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = []
    for _ in range(D):
        cuts = sorted(draw(st.lists(st.integers(0, 64), min_size=R, max_size=R)))
        rows.append([(b - a) / 64 for a, b in zip([0, *cuts[:-1]], cuts, strict=True)])
    if not any(rows[0]):
        rows[0][0] = 0.5
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=40)
@given(tables(), st.integers(1, 4))
def test_no_tree_of_as_many_nodes_is_better(table: Tensor, nodes: int) -> None:
    shape = search_static(table, nodes)
    best = max(1 + sum(product(p, table.tolist()) for p in tree) for tree in all_trees(*table.shape, nodes))
    assert shape.nodes <= nodes and expected_tau(shape, table) == pytest.approx(best)
    assert all(product(p, table.tolist()) > 0 for p in shape.choices)


@settings(max_examples=25)
@given(tables(), st.lists(st.integers(0, 8), min_size=4, max_size=4), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.3]))
def test_no_tree_is_faster_than_the_chosen_one(table: Tensor, steps: list[int], c: float, o: float) -> None:
    costs = [1.0 + sum(steps[:i]) / 16 for i in range(5)]  # v(w), rising

    def speedup(tree: frozenset[Path]) -> float:
        return (1 + sum(product(p, table.tolist()) for p in tree)) / (max(map(len, tree)) * c + costs[len(tree)] + o)

    found = choose_static(table, lambda w: costs[w - 1], c, o, most=4)
    assert found.speedup == pytest.approx(max(speedup(tree) for tree in all_trees(*table.shape, 4)))
    assert found.speedup == pytest.approx(speedup(frozenset(found.shape.choices)))
    assert found.expected_tau == pytest.approx(expected_tau(found.shape, table))
    assert predict_static(found.shape, table, lambda w: costs[w - 1], c, o).speedup == pytest.approx(found.speedup)


def test_expected_tau_is_the_sum_over_nodes() -> None:
    shape = Static(((0,), (1,), (0, 0), (1, 2), (0, 0, 1)))
    assert expected_tau(shape, ACCEPTANCE) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.45 + 0.2 * 0.05 + 0.5 * 0.45 * 0.1)
    assert expected_tau(Static(((0,), (7,), (0, 0), (0, 0, 0), (0, 0, 0, 0))), ACCEPTANCE) == pytest.approx(1 + 0.5 + 0.5 * 0.45 * (1 + 0.6))
    assert search_static(ACCEPTANCE, 5).ordered == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))


def test_cheap_verification_makes_wide_trees_and_dear_drafts_shallow_ones() -> None:
    wide, narrow = choose_static(ACCEPTANCE, lambda w: 1.0, 0.01), choose_static(ACCEPTANCE, lambda w: 1 + 0.3 * (w - 1), 0.01)
    assert wide.shape.nodes == 39 and narrow.shape.nodes < 4
    assert choose_static(ACCEPTANCE, lambda w: 1.0, 0.6).shape.depth == 1


@pytest.mark.parametrize("bad", [torch.rand(3), torch.tensor([[0.9, 0.2]]), torch.tensor([[float("nan"), 0.2]]), torch.tensor([[-0.1, 0.2]]),
                                 torch.zeros(2, 3), torch.zeros(0, 3)])
def test_bad_acceptance_is_refused_in_one_line(bad: Tensor) -> None:
    for call in (lambda: search_static(bad, 3), lambda: choose_static(bad, float, 0.1)):
        with pytest.raises(RecipeError) as error:
            call()
        assert "\n" not in str(error.value)


def test_other_bad_input_is_refused() -> None:
    for call in (lambda: search_static(ACCEPTANCE, 0), lambda: choose_static(ACCEPTANCE, float, 0.1, most=0),
                 lambda: search_static(torch.full((9, 9), 1 / 9), 300), lambda: measure_ranks(target(), NgramDrafter(), requests(5), 2, 3),
                 lambda: measure_ranks(target(), DraftModelDrafter(target(), target()), requests(5), 0, 3)):
        with pytest.raises(RecipeError):
            call()


def test_a_saved_tree_is_read_again(tmp_path: File) -> None:
    shape = search_static(ACCEPTANCE, 9)
    save_tree(tmp_path / "tree.json", shape, ACCEPTANCE, target="tiny", head="runs/tiny/ckpt/final")
    read = parse_shape(f"static:{tmp_path / 'tree.json'}")
    assert isinstance(read, Static) and read.ordered == shape.ordered
    raw = json.loads((tmp_path / "tree.json").read_text())
    assert raw["expected_tau"] == expected_tau(shape, ACCEPTANCE) and raw["acceptance"] == ACCEPTANCE.tolist()
    assert raw["target"] == "tiny" and raw["head"] == "runs/tiny/ckpt/final" and [*tmp_path.iterdir()] == [tmp_path / "tree.json"]


# ---- measuring: a stub whose ranks are known


@functools.cache
def fast() -> Target:
    return target("llama", num_hidden_layers=1, seed=3)


@functools.cache
def answers(sampling: Sampling) -> dict[Path, list[int]]:
    done = complete(fast(), NoDrafter(), asked(), sampling, LIMITS, batch_size=8)
    return {c.request.prompt_ids: c.tokens for c in done}


def asked() -> list[Request]:
    return [Request(str(i), prompt(4 + i), seed=i) for i in range(16)]


LIMITS = Limits(160, 256, ignore_eos=True)


class Known(Drafter):
    """Knows the answers. Behind the true path it gives the true next token rank r with probability ACCEPTANCE[depth, r], else rank 60; the numbers
    are drawn anew for every root."""

    name = "known"

    def __init__(self, sampling: Sampling) -> None:
        self.answers, self.vocab = answers(sampling), DraftVocab(torch.arange(128), 128)

    def reset(self, batch: int, *rest: Any) -> None:
        self.rows: list[Any] = [None] * batch

    def start(self, row: int, prompt_T: Tensor, root: int, features_TF: Tensor | None) -> None:
        self.rows[row] = SimpleNamespace(prompt=tuple(prompt_T.tolist()), tokens=[root])

    def move(self, source: int, to: int) -> None:
        self.rows[to] = self.rows[source]

    def observe(self, tokens_BM: Tensor, counts_B: Tensor, features_BMF: Tensor | None) -> None:
        for row, tokens, count in zip(self.rows, tokens_BM.tolist(), counts_B.tolist(), strict=False):
            row.tokens += tokens[:count]

    def begin(self, depth: int) -> Tensor:
        self.level: list[list[Path]] = [[()] for _ in range(self.B)]
        return self.logits()[:, 0]

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        self.level = [[(*level[p], t) for p, t in zip(parents, tokens, strict=True)]
                      for level, parents, tokens in zip(self.level, parents_BW.tolist(), tokens_BW.tolist(), strict=True)]
        return self.logits()

    def logits(self) -> Tensor:
        logits = torch.zeros(self.B, len(self.level[0]), 128)
        for b, level in enumerate(self.level):
            row = self.rows[b]
            truth = self.answers[row.prompt][len(row.tokens) :]
            for w, path in enumerate(level):
                rng = random.Random(f"{row.prompt} {len(row.tokens)} {path}")
                order = rng.sample(range(128), 128)
                if len(path) < min(3, len(truth)) and path == tuple(truth[: len(path)]):
                    rank = rng.choices([0, 1, 2, 60], [*ACCEPTANCE[len(path)].tolist(), 1 - float(ACCEPTANCE[len(path)].sum())])[0]
                    order.remove(truth[len(path)])
                    order.insert(rank, truth[len(path)])
                logits[b, w, order] = -torch.arange(128.0)
        return logits

    def propose(self, plan: Plan, sampling: Any, noise: Any) -> DraftTree:
        self.B = len(noise.seeds_B)
        root_B = torch.tensor([row.tokens[-1] for row in self.rows[: self.B]])
        assert plan.room_B is not None
        return grow(self, root_B, plan, list(plan.room_B), sampling, noise, root_B, self.vocab, self.name)


def test_measured_ranks_are_those_that_were_drawn() -> None:
    for sampling in (Sampling(), Sampling(0.9)):
        drafter = Known(sampling)
        vocab = drafter.vocab
        found = measure_ranks(fast(), drafter, [*asked(), *asked()[:3]], 3, 3, sampling=sampling, limits=LIMITS, batch_size=8)
        assert drafter.vocab is vocab, "the drafter is given back as it was"
        assert found.reached_D[0] > 1200 and found.reached_D[1] <= found.hits_DR[0].sum()
        sigma_DR = (ACCEPTANCE * (1 - ACCEPTANCE) / found.reached_D[:, None]).sqrt()
        assert bool(((found.acceptance_DR - ACCEPTANCE).abs() < 4 * sigma_DR).all())
        assert found.acceptance_DR.dtype == torch.float64 and bool((found.hits_DR.sum(-1) <= found.reached_D).all())


def whole(rounds: list[RoundStat], depth: int) -> list[RoundStat]:
    """Without those that the end of the answer cut short."""
    return [r for r in rounds if r.drafted == depth]


@pytest.mark.parametrize("nodes", [4, 9, 20])
def test_the_promised_tau_is_the_measured_one(nodes: int) -> None:
    shape = search_static(ACCEPTANCE, nodes)
    chain = Static(((0,), (0, 0), (0, 0, 0)))
    promised = {}
    for tree, plan in ((shape, Plan(tree=shape)), (chain, Plan(3))):
        done = complete(fast(), Known(Sampling()), asked(), limits=LIMITS, batch_size=8, plan=plan)
        assert [c.tokens for c in done] == [*answers(Sampling()).values()]
        rounds = whole(metrics.all_rounds(done), plan.depth)
        taus = torch.tensor([r.accepted + 1.0 for r in rounds])
        promised[tree] = expected_tau(tree, ACCEPTANCE)
        assert len(rounds) > 800 and abs(float(taus.mean()) - promised[tree]) < 4 * float(taus.std()) / len(rounds) ** 0.5
    assert promised[shape] > promised[chain] or nodes < 9


# ---- measuring: a head, against a slow twin


@functools.cache
def slow_counts(depth: int, ranks: int, tree: Static | None) -> tuple[Tensor, Tensor]:
    head, base = head_and_target()
    hits_DR, reached_D = torch.zeros(depth, ranks, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    done = complete(base, NoDrafter(), requests(5, 11, 3), limits=Limits(40, 128, ignore_eos=True), capture_taps=head.taps)
    for c in done:
        T, tokens = len(c.request.prompt_ids), [*c.request.prompt_ids, *c.tokens]
        root = T
        assert c.captured is not None
        while root < len(tokens) - 2:
            found: list[int] = []
            for d in range(min(depth, len(tokens) - 2 - root)):
                after = reference(head, base.embed_VD, base.lm_head_VD, c.captured.features_TF[:root], torch.tensor(tokens[1 : root + 1]),
                                  tokens[root + 1 : root + 1 + d])[-1]
                truth = tokens[root + 1 + d]
                found.append(int((after > after[truth]).sum()) if after[truth] > float("-inf") else -1)
            accepted = 0
            for d, rank in enumerate(found):
                if all(0 <= r < ranks for r in found[:d]):
                    reached_D[d] += 1
                    if 0 <= rank < ranks:
                        hits_DR[d, rank] += 1
                in_tree = tuple(found[: d + 1]) in tree.choices if tree is not None else not any(found[: d + 1])
                accepted += in_tree and accepted == d
            root += accepted + 1
    return hits_DR, reached_D


@functools.cache
def head_and_target() -> tuple[Any, Target]:
    base = target("llama")
    return make_head(geo=base.geometry, taps=[1, 2, 3], draft_ids=torch.arange(0, 128, 2))[0], base


WIDE = Static(tuple([(r,) for r in range(30)] + [(r, s) for r in range(12) for s in range(12)]))
CASES: dict[str, tuple[int, int, Static | None]] = {"chain": (3, 64, None), "few ranks": (2, 40, None), "tree": (3, 64, WIDE)}


def check_ranks(name: str, measure: Callable[..., Any] = measure_ranks) -> None:
    depth, ranks, tree = CASES[name]
    head, base = head_and_target()
    hits_DR, reached_D = slow_counts(depth, ranks, tree)
    assert min(reached_D) > 2
    for batch_size in (1, 2):
        found = measure(base, HeadDrafter(head, base), requests(5, 11, 3), depth, ranks, tree=tree, limits=Limits(40, 128, ignore_eos=True),
                        batch_size=batch_size)
        assert torch.equal(found.hits_DR, hits_DR) and torch.equal(found.reached_D, reached_D)


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_head_equal_the_slow_twin(name: str) -> None:
    check_ranks(name)


MUTANTS = {
    "one token late": ("row.answer[row.seen : row.seen + self.depth]", "row.answer[row.seen + 1 : row.seen + 1 + self.depth]"),
    "the draft goes its own way": ("torch.where(known_B1, certain_BU, logits_BU)", "logits_BU"),
    "reached whatever came before": ("                break\n", "                continue\n"),
    "rounds begin after the whole truth": ("not in self.paths), len(ranks))", "in ()), len(ranks))"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_measuring_are_noticed(name: str) -> None:
    source, (old, new) = inspect.getsource(tree_search), MUTANTS[name]
    assert source.count(old) == 1
    scope: dict[str, Any] = {"__name__": tree_search.__name__}
    exec(compile(source.replace(old, new), "mutant", "exec"), scope)
    with pytest.raises(AssertionError):
        for case in ("few ranks", "tree"):
            check_ranks(case, scope["measure_ranks"])


def test_a_target_that_drafts_for_itself_is_always_right() -> None:
    drafter = DraftModelDrafter(target(), target())
    found = measure_ranks(target(), drafter, requests(5, 9), 3, 2, limits=Limits(30, 128, ignore_eos=True), batch_size=2)
    assert found.reached_D[0] > 10 and bool((found.acceptance_DR == torch.tensor([1.0, 0.0])).all())
    assert search_static(found.acceptance_DR, 5).ordered == ((0,), (0, 0), (0, 0, 0))
