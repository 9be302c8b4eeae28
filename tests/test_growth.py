"""Growing trees: every shape against a slow twin in Python, with drafts whose logits depend on the whole path; then an EAGLE-3 head, node by
node against the independent forward of test_heads; then through decode(), where no tree may change an answer.

Shape suffixes: as in inference/growth.py; P rows of a table of logits.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import check_counts, requests, target, with_eos
from test_heads import documents, gap, make_head, reference
from torch import Tensor

import tiny
from draftheads.heads import eagle3, feedback
from draftheads.heads.tree import DraftTree
from draftheads.inference import growth
from draftheads.inference.decode import complete
from draftheads.inference.drafters import pairs as pairs_module
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.pairs import HeadStepper
from draftheads.inference.growth import DraftVocab, grow, limited
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.sampling import RowSampling, log_probs
from draftheads.inference.shapes import Dynamic, Sampled, Shape, Static
from draftheads.inference.target import Target

P, V, P_VALUE = 1009, 16, 1e-4
Path = tuple[int, ...]
Grow = Callable[..., DraftTree]


class TableStepper:
    """A draft whose logits are a row of table_PU, chosen by all tokens from the root on."""

    def __init__(self, table_PU: Tensor, root_B: Tensor) -> None:
        self.table_PU, self.root_B = table_PU, root_B

    def begin(self, depth: int) -> Tensor:
        self.at_BW = self.root_B[:, None]
        return self.table_PU[self.root_B]

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        self.at_BW = (self.at_BW.gather(1, parents_BW) * 31 + tokens_BW + 1) % P
        return self.table_PU[self.at_BW]


@dataclass(frozen=True)
class Case:
    """root, temperature and depth limit a row; U ids of the draft, the last `padding` of which must not be proposed."""

    shape: Shape | None
    roots: tuple[int, ...] = (3, 5)
    temperatures: tuple[float, ...] = (0.0, 0.0)
    caps: tuple[int, ...] = (9, 9)
    U: int = 7
    padding: int = 0
    seed: int = 0
    gamma: int = 4
    top_k: int = 0
    spread: float = 2.0

    @property
    def ids(self) -> list[int]:
        return sorted(random.Random(self.seed).sample(range(V), self.U))

    @functools.cached_property
    def table_PU(self) -> Tensor:
        return torch.randn(P, self.U, generator=torch.Generator().manual_seed(self.seed)) * self.spread

    @property
    def plan(self) -> Plan:
        return Plan(self.gamma, tree=self.shape)

    def depth(self, b: int | None = None) -> int:
        return min(self.plan.depth, max(self.caps) if b is None else self.caps[b])

    def alone(self, b: int) -> Case:
        return replace(self, roots=self.roots[b : b + 1], temperatures=self.temperatures[b : b + 1], caps=self.caps[b : b + 1])

    def grow(self, grown: Grow = grow, first_seed: int = 100) -> DraftTree:
        root_B = torch.tensor(self.roots)
        vocab = DraftVocab(torch.tensor(self.ids), V, torch.arange(self.U) >= self.U - self.padding if self.padding else None)
        seeds_B = torch.tensor(self.roots) + first_seed  # so that a row alone has the noise that it has among others
        return grown(TableStepper(self.table_PU, root_B), root_B, self.plan, list(self.caps),
                     RowSampling.of(self.temperatures, Sampling(top_k=self.top_k)), Noise(seeds_B, seeds_B + 7), seeds_B + 7, vocab, "stub")

    # ---- the twins

    def children(self, path: Path) -> list[tuple[int, float]]:
        """(target id, log-probability) of all that may follow the path (the root's token first), the likeliest first."""
        at = path[0]
        for token in path[1:]:
            at = (at * 31 + token + 1) % P
        logits = self.table_PU[at].tolist()[: self.U - self.padding]
        norm = math.log(sum(math.exp(x - max(logits)) for x in logits)) + max(logits)
        return sorted(zip(self.ids, (x - norm for x in logits), strict=False), key=lambda c: -c[1])

    def q(self, path: Path, temperature: float) -> list[float]:
        """What is drawn from after the path, over target ids."""
        ranked = self.children(path)[: self.top_k or None]
        weight = {t: math.exp(p / temperature) for t, p in ranked}
        return [weight.get(t, 0.0) / sum(weight.values()) for t in range(V)]

    def ranked(self, choices: Sequence[Path], b: int) -> list[Path | None]:
        """The paths of a static tree, None where the vocabulary has not so many ranks."""
        found: list[Path | None] = []
        for ranks in sorted(choices, key=lambda p: (len(p), p)):
            path: Path | None = (self.roots[b],)
            for rank in ranks:
                after = self.children(path) if path is not None else []
                path = (*path, after[rank][0]) if path is not None and rank < len(after) else None
            found.append(path if path is not None and len(path) - 1 <= self.depth(b) else None)
        return found

    def likeliest(self, b: int) -> set[Path]:
        """EAGLE-2: expand the top_k best of a level to their top_k best children, keep the best `nodes` of all."""
        assert isinstance(self.shape, Dynamic)
        k = self.shape.top_k
        level, seen = [((self.roots[b],), 0.0)], []
        for _ in range(self.depth()):
            after = [((*path, t), score + p) for path, score in level for t, p in self.children(path)[:k]]
            seen += after
            level = sorted(after, key=lambda c: -c[1])[:k]
        best = sorted(seen, key=lambda c: -c[1])[: self.shape.nodes]
        return {path for path, _ in best if len(path) - 1 <= self.depth(b)}


def paths(tree: DraftTree, b: int) -> list[Path | None]:
    """Of every node its tokens from the root on; None for padding."""
    found: list[Path | None] = []
    for token, parent, valid in zip(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), tree.valid_BN[b].tolist(), strict=True):
        assert parent < len(found) and (parent >= 0 or not found), "parents come before children"
        above: Path | None = () if not found else found[parent]
        assert above is not None or not valid, "a valid node has a valid parent"
        found.append((*above, token) if valid and above is not None else None)
    return found


def everyone(widths: Sequence[int]) -> list[Path]:
    level: list[Path] = [()]
    found: list[Path] = []
    for width in widths:
        level = [(*p, r) for p in level for r in range(width)]
        found += level
    return found


def check(case: Case, grown: Grow = grow) -> None:
    tree = case.grow(grown)
    assert tree.source_B == ["stub" if cap else "none" for cap in case.caps]
    assert tree.chained in (False, bool((tree.parents_BN == torch.arange(-1, tree.width - 1)).all()))
    for b, temperature in enumerate(case.temperatures):
        found = paths(tree, b)
        assert found[0] == (case.roots[b],)
        assert all(set(p[1:]) <= set(case.ids[: case.U - case.padding]) and len(p) - 1 <= case.caps[b] for p in found if p)
        if isinstance(case.shape, Dynamic):
            kept = {p for p in found[1:] if p}
            assert kept == case.likeliest(b) and len(kept) == len([p for p in found[1:] if p]) and tree.q_BNV is None
        elif isinstance(case.shape, Static):
            assert found[1:] == case.ranked([c for c in case.shape.choices if len(c) <= case.depth()], b) and tree.q_BNV is None
        elif temperature == 0:
            widths = case.shape.widths[: case.depth()] if case.shape else (1,) * case.depth()
            assert found[1:] == case.ranked(everyone([min(w, case.U) for w in widths]), b)
        else:
            check_drawn(case, tree, b, found, temperature)
    if isinstance(case.shape, Sampled) and case.depth():
        assert tree.widths == tuple(min(w, case.U) for w in case.shape.widths[: case.depth()])
        assert tree.chained == (max(tree.widths) == 1)
    else:
        assert tree.widths is None and tree.chained == (case.shape is None or case.depth() == 0)


def check_drawn(case: Case, tree: DraftTree, b: int, found: list[Path | None], temperature: float) -> None:
    if tree.width == 1:
        return
    assert tree.q_BNV is not None and tree.q_BNV[b, 0].sum() == 0
    widths = case.shape.widths if isinstance(case.shape, Sampled) else (1,) * case.gamma
    groups: dict[int, list[int]] = {}
    for i in range(1, tree.width):
        groups.setdefault(int(tree.parents_BN[b, i]), []).append(i)
    for parent, children in groups.items():
        path = found[parent]
        assert children == list(range(children[0], children[-1] + 1)), "siblings lie side by side"
        if path is None or len(path) > case.caps[b]:
            assert all(found[i] is None for i in children)
            continue
        q = torch.tensor(case.q(path, temperature))
        kept = [i for i in children if found[i]]
        assert len(kept) == min(widths[len(path) - 1], int((q > 0).sum())), "as many as q has tokens"
        assert kept == children[: len(kept)]
        assert len({int(tree.tokens_BN[b, i]) for i in kept}) == len(kept), "drawn without replacement"
        for i in kept:
            torch.testing.assert_close(tree.q_BNV[b, i], q, atol=1e-5, rtol=1e-4)
            assert q[tree.tokens_BN[b, i]] > 0


@st.composite
def statics(draw: st.DrawFn) -> Static:
    found: list[Path] = []
    for _ in range(draw(st.integers(1, 10))):
        above = draw(st.sampled_from([(), *found]))
        path = (*above, draw(st.integers(0, 3)))
        if path not in found and len(path) <= 4:
            found.append(path)
    return Static(tuple(draw(st.permutations(found))))


@st.composite
def dynamics(draw: st.DrawFn) -> Dynamic:
    depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Dynamic(depth, top_k, draw(st.integers(1, top_k + (depth - 1) * top_k**2)))


SHAPES = st.none() | statics() | dynamics() | st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda w: Sampled(tuple(w)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    B, U = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    return Case(
        draw(SHAPES), tuple(draw(st.lists(st.integers(0, 15), min_size=B, max_size=B, unique=True))),
        tuple(draw(st.lists(st.sampled_from([0.0, 0.7, 1.3]), min_size=B, max_size=B))),
        tuple(draw(st.lists(st.integers(0, 5), min_size=B, max_size=B))), U, draw(st.integers(0, U - 1)), draw(st.integers(0, 50)),
        top_k=draw(st.sampled_from([0, 0, 2])))


@settings(max_examples=300)
@given(cases())
def test_every_shape_equals_its_slow_twin(case: Case) -> None:
    check(case)


@settings(max_examples=100)
@given(cases())
def test_a_row_gets_among_others_what_it_gets_alone(case: Case) -> None:
    tree = case.grow()
    for b in range(len(case.roots)):
        if isinstance(case.shape, Dynamic) and case.caps[b] != max(case.caps):
            continue  # which nodes are the best depends on how deep the deepest row looks
        alone = case.alone(b).grow()
        pairs = [(i, p) for i, p in enumerate(paths(tree, b)) if p]
        single = [(i, p) for i, p in enumerate(paths(alone, 0)) if p]
        assert [p for _, p in pairs] == [p for _, p in single]
        if alone.q_BNV is not None and tree.q_BNV is not None:
            for (i, _), (j, _) in zip(pairs, single, strict=True):
                torch.testing.assert_close(tree.q_BNV[b, i], alone.q_BNV[0, j])


@settings(max_examples=100)
@given(cases())
def test_cutting_a_whole_tree_is_growing_a_shorter_one(case: Case) -> None:
    """A captured draft step is as deep as its shape, whatever the rows have room for."""
    if isinstance(case.shape, Dynamic) or not case.depth():
        return
    whole = replace(case, caps=(9,) * len(case.caps)).grow()
    tree, cut = case.grow(), limited(whole, case.caps, case.plan.depth, "stub")
    assert cut.source_B == tree.source_B and cut.chained == tree.chained
    for b in range(len(case.roots)):
        kept = [(i, p) for i, p in enumerate(paths(cut, b)) if p]
        assert [p for _, p in kept] == [p for p in paths(tree, b) if p]
        if tree.q_BNV is not None:
            assert cut.q_BNV is not None and all(torch.equal(cut.q_BNV[b, i], tree.q_BNV[b, i]) for i, _ in kept)


class Certain(Case):
    """Every draft is sure: all probabilities are exactly 1 or exactly equal."""

    @functools.cached_property
    def table_PU(self) -> Tensor:
        sure_PU = torch.full((P, self.U), -1e30)
        return sure_PU.scatter(1, torch.arange(P)[:, None] % self.U, 0.0)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9])
def test_certain_drafts_keep_their_ancestors(nodes: int) -> None:
    """A child as likely as its parent: whatever is kept, the way to it is kept too."""
    check_ancestors(nodes, grow)


def check_ancestors(nodes: int, grown: Grow) -> None:
    for spread in (Certain(Dynamic(4, 2, nodes)), Case(Dynamic(4, 2, nodes), spread=0.0)):
        tree = spread.grow(grown)
        for b in range(2):
            found = paths(tree, b)
            assert sum(p is not None for p in found) - 1 == nodes and {p[:-1] for p in found[1:] if p} <= set(found)
            if isinstance(spread, Certain) and nodes <= 4:
                sure = [found[0]]
                for _ in range(nodes):
                    sure.append((*sure[-1], spread.children(sure[-1])[0][0]))
                assert found == sure, "the one certain path"


# ---- drawn trees: frequencies


def chi2(seen: Tensor, expected: Tensor) -> float:
    """p-value; 0 if something impossible was seen."""
    if bool((seen[expected == 0] > 0).any()):
        return 0.0
    seen, expected = seen[expected > 0].double(), expected[expected > 0].double()
    assert expected.min() > 5
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))


def drawn(grown: Grow, widths: tuple[int, ...], draws: int = 20_000) -> tuple[Tensor, Tensor]:
    """Draft ids [B, N] of many trees with the same root, after which (and after everything else) the same q_U is drawn from."""
    case = Case(Sampled(widths), (3,) * draws, (0.8,) * draws, (len(widths),) * draws, U=4, seed=2)
    q_U = torch.randn(4, generator=torch.Generator().manual_seed(1))
    seeds_B, ids_U = torch.arange(draws), torch.tensor(case.ids)
    tree = grown(TableStepper(q_U.expand(P, -1), torch.tensor(case.roots)), torch.tensor(case.roots), case.plan, list(case.caps),
                 RowSampling.of(case.temperatures, Sampling()), Noise(seeds_B, seeds_B * 0 + 9), seeds_B * 0 + 9, DraftVocab(ids_U, V), "stub")
    return torch.searchsorted(ids_U, tree.tokens_BN[:, 1:].contiguous()), (q_U / 0.8).softmax(-1)


def p_ordered(grown: Grow) -> float:
    """The joint frequency of three siblings in order: q(a) · q(b)/(1 − q(a)) · q(c)/(1 − q(a) − q(b))."""
    ids_BN, q_U = drawn(grown, (3,))
    q = q_U.tolist()
    expected = torch.zeros(4, 4, 4)
    for a, b, c in ((a, b, c) for a in range(4) for b in range(4) for c in range(4) if len({a, b, c}) == 3):
        expected[a, b, c] = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    seen = torch.bincount(ids_BN[:, 0] * 16 + ids_BN[:, 1] * 4 + ids_BN[:, 2], minlength=64)
    return chi2(seen, expected.flatten() * len(ids_BN))


def p_independent(grown: Grow, first: int, second: int) -> float:
    """The two nodes (drawn in different groups): q(a) · q(b)."""
    ids_BN, q_U = drawn(grown, (2, 2, 1))
    seen = torch.bincount(ids_BN[:, first - 1] * 4 + ids_BN[:, second - 1], minlength=16)
    return chi2(seen, torch.outer(q_U, q_U).flatten() * len(ids_BN))


# Nodes 1, 2 below the root; 3, 4 below 1; 5, 6 below 2; 7 … 10 below 3 … 6.
def test_drawn_siblings_are_draws_without_replacement() -> None:
    assert p_ordered(grow) > P_VALUE


@pytest.mark.parametrize("pair", [(1, 3), (3, 5), (1, 7), (3, 7), (7, 8), (8, 10), (5, 8)])
def test_groups_are_drawn_independently(pair: tuple[int, int]) -> None:
    assert p_independent(grow, *pair) > P_VALUE


# ---- mutants of growth


def mutant(old: str, new: str) -> Grow:
    source = inspect.getsource(growth)
    assert source.count(old) == 1, old
    scope: dict[str, Any] = {"__name__": growth.__name__}  # dataclasses look their module up
    exec(compile(source.replace(old, new), "mutant", "exec"), scope)

    def grown(*arguments: Any) -> DraftTree:
        vocab = arguments[7]
        return scope["grow"](*arguments[:7], scope["DraftVocab"](vocab.ids_U, vocab.size, vocab.padding_U), *arguments[8:])

    return grown


BUSHY = Static(((0,), (1,), (2,), (0, 1), (1, 0), (2, 0), (1, 0, 0), (2, 0, 1)))
WARM = Case(Sampled((2, 2, 2)), temperatures=(0.8, 0.8))
MUTANTS: dict[str, tuple[Grow, Callable[[Grow], None]]] = {
    "static: wrong parents": (mutant("level.parent_L[level.inner_W].expand", "(0 * level.parent_L[level.inner_W]).expand"),
                              functools.partial(check, Case(BUSHY))),
    "static: every node is stepped from the first": (mutant("step(tokens_BL[:, level.inner_W]", "step(tokens_BL[:, : len(level.inner_W)]"),
                                                     functools.partial(check, Case(BUSHY))),
    "static: a rank too many": (mutant("& (level.rank_L == rank_L)", ""), functools.partial(check, Case(BUSHY, U=2))),
    "dynamic: parents of the seen": (mutant("at_BW.repeat_interleave(k, 1)", "at_BW.repeat(1, k)"), functools.partial(check, Case(Dynamic(4, 3, 9)))),
    "dynamic: parents of the expanded": (mutant("pick_BW // k", "pick_BW % k"), functools.partial(check, Case(Dynamic(4, 3, 9)))),
    "dynamic: no sum along the path": (mutant("scores_BW[..., None] + more_BWR", "0 * scores_BW[..., None] + more_BWR"),
                                       functools.partial(check, Case(Dynamic(4, 3, 9)))),
    "dynamic: the later of two equals": (
        mutant("score_BS.sort(dim=-1, descending=True, stable=True).indices",
               "(score_BS.shape[1] - 1 - score_BS.flip(-1).sort(dim=-1, descending=True, stable=True).indices)"),
        functools.partial(check_ancestors, 2)),
    "caps are ignored": (mutant("(depths_BN <= cap_B1)", "(depths_BN <= 99)"), functools.partial(check, Case(BUSHY, caps=(1, 3)))),
    "padding is proposed": (mutant('logits.masked_fill(self.padding_U, float("-inf"))', "logits"),
                            functools.partial(check, Case(Dynamic(3, 3, 9), padding=3))),
    "draft ids as target ids": (mutant("index_copy_(1, self.ids_U, flat_MU)", "index_copy_(1, torch.arange(len(self.ids_U)), flat_MU)"),
                                functools.partial(check, WARM)),
    "q of the processed one only": (mutant("logq_BWU = row_log_probs(logits_BWU, rows)", "logq_BWU = logits_BWU.log_softmax(-1)"),
                                    functools.partial(check, WARM)),
    "what was not drawn": (mutant("q_BWU.gather(-1, best_BWR) > 0)", "possible)"), functools.partial(check, replace(WARM, top_k=1))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_growth_are_noticed(name: str) -> None:
    grown, checked = MUTANTS[name]
    checked(grow)
    with pytest.raises(AssertionError):
        checked(grown)


def test_mutants_of_drawing_are_noticed() -> None:
    assert p_independent(mutant("_NODE = 1 << 32", "_NODE = 0"), 3, 5) < P_VALUE
    assert p_independent(mutant("(roots_B + 1 + level)", "(roots_B + 1 + 0 * level)"), 1, 3) < P_VALUE
    assert p_ordered(mutant("logq_BWU + noise.gumbel(at_BW, DRAFT, U)", "logq_BWU + 0.8 * noise.gumbel(at_BW, DRAFT, U)")) < P_VALUE


# ---- an EAGLE-3 head


class Recorded:
    """The head's own stepper, remembering of every stepped node the path and the logits after it."""

    def __init__(self, inner: Any, root_B: Tensor) -> None:
        self.inner, self.level, self.seen = inner, [[()] for _ in root_B], []
        self.seen: list[tuple[int, Path, Tensor]]

    def begin(self, depth: int) -> Tensor:
        logits_BU = self.inner.begin(depth)
        self.seen = [(b, (), x) for b, x in enumerate(logits_BU)]
        return logits_BU

    def step(self, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        logits_BWU = self.inner.step(tokens_BW, parents_BW)
        self.level = [[(*self.level[b][p], t) for p, t in zip(parents_BW[b].tolist(), tokens_BW[b].tolist(), strict=True)]
                      for b in range(len(tokens_BW))]
        self.seen += [(b, path, logits_BWU[b, w]) for b, level in enumerate(self.level) for w, path in enumerate(level)]
        return logits_BWU


HEAD_SHAPES = {
    "static": BUSHY, "a chain that branches late": Static(((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 1))),
    "static chain": Static(((1,), (1, 2), (1, 2, 0))), "dynamic": Dynamic(4, 3, 12), "sampled": Sampled((3, 2, 1)),
    "late": Sampled((1, 2, 2)), "chain": None,
}


def head_gap(lengths: list[int], shape: Shape | None, variant: str = "eagle3.1", temperature: float = 0.8) -> float:
    """Logits after every node of the tree against those of the same path alone, drafted as a chain by the reference. Twice, after another draft."""
    head, *borrowed = make_head(variant)
    ids_U, B = head.target_ids_U(), len(lengths)
    rows = [documents([n], 5 + n)[0] for n in lengths]
    state = head.new_state(B + 1, max(lengths), 9)  # to the last slot
    features_BMF, tokens_BM = torch.randn(B, max(lengths), rows[0][0].shape[1]), torch.zeros(B, max(lengths), dtype=torch.long)
    for b, (n, (features, tokens)) in enumerate(zip(lengths, rows, strict=True)):
        features_BMF[b, :n], tokens_BM[b, :n] = features, tokens[:n]
    head.extend(state, features_BMF, tokens_BM, torch.tensor(lengths), slice(0, B))
    root_B, worst = torch.tensor([int(tokens[n - 1]) for n, (_, tokens) in zip(lengths, rows, strict=True)]), 0.0
    for plan in (Plan(3, tree=Dynamic(3, 4, 9)), Plan(4, tree=shape)):
        stepper = Recorded(HeadStepper(head, state, slice(0, B)), root_B)
        grow(stepper, root_B, plan, [9] * B, RowSampling.of([temperature] * B, Sampling()), Noise(root_B), root_B, DraftVocab(ids_U, 128), "head")
        for b, path, logits_U in stepper.seen:
            features, tokens = rows[b]
            alone = reference(head, *borrowed, features, tokens[: lengths[b]], path)[-1]
            mine = torch.full((128,), float("-inf")).index_copy(0, ids_U, logits_U.detach())
            worst = max(worst, gap(mine, alone))
        assert len(stepper.seen) >= 2 * B
    return worst


@pytest.mark.parametrize("lengths", [[6], [5, 5, 5], [5, 9, 2]], ids=str)
@pytest.mark.parametrize("shape", HEAD_SHAPES)
def test_a_node_of_a_tree_is_what_its_path_alone_would_be(shape: str, lengths: list[int]) -> None:
    assert head_gap(lengths, HEAD_SHAPES[shape]) < 1e-5


def test_nodes_of_eagle3_without_normed_output() -> None:
    assert head_gap([4, 7], Dynamic(4, 3, 12), "eagle3") < 1e-5


def test_a_draft_that_does_not_fit_says_so() -> None:
    head, *_ = make_head()
    state = head.new_state(1, 8, 4)
    head.extend(state, torch.randn(1, 3, 192), torch.tensor([[1, 2, 3]]), torch.tensor([3]), slice(0, 1))
    root_B, rows = torch.tensor([3]), RowSampling.of([0.0], Sampling())
    with pytest.raises(ValueError, match="5 drafted tokens in a drafting cache made for 4"):
        grow(HeadStepper(head, state, slice(0, 1)), root_B, Plan(tree=Sampled((5, 1))), [9], rows, Noise(root_B), root_B,
             DraftVocab(head.target_ids_U(), 128), "head")


HEAD_MUTANTS = {
    "mask ignores parents": ("descend(state.above_BWA, parents_BW, state.drafted)", "descend(state.above_BWA, 0 * parents_BW, state.drafted)"),
    "everything is seen": ("descend(state.above_BWA, parents_BW, state.drafted)",
                           "torch.ones_like(descend(state.above_BWA, parents_BW, state.drafted))"),
    "rope by slot": ("slots.rope(rows, state.depth)", "slots.rope(rows, state.drafted)"),
    "parents not gathered": ("state.level_BWH.gather(1, parents_BW", "state.level_BWH.gather(1, 0 * parents_BW"),
    "slot by depth": ("cos_sin), state.drafted)", "cos_sin), state.depth)"),
}


@pytest.mark.parametrize("lengths", [[6], [5, 9, 2]], ids=str)
@pytest.mark.parametrize("name", HEAD_MUTANTS)
def test_mutants_of_the_head_are_noticed(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    source, (old, new) = textwrap.dedent(inspect.getsource(eagle3.Eagle3.step)), HEAD_MUTANTS[name]
    assert source.count(old) == 1
    scope = dict(vars(feedback))
    exec(source.replace(old, new), scope)
    monkeypatch.setattr(eagle3.Eagle3, "step", scope["step"])
    assert head_gap(lengths, Dynamic(4, 3, 12)) > 1e-3


# ---- through decode()


@functools.lru_cache
def eagle(family: str = "llama") -> Any:
    head, *_ = make_head(geo=target(family).geometry, taps=[1, 2, 3])
    return head


class Helped(HeadDrafter):
    """The head's trees with the target's own next tokens written along a random way through them: sometimes right, anywhere in the tree."""

    def __init__(self, head: Any, target: Target, answers: dict[Path, list[int]]) -> None:
        super().__init__(head, target)
        self.answers = answers

    def reset(self, batch: int, *rest: Any) -> None:
        super().reset(batch, *rest)
        self.prompts: list[Path] = [()] * batch

    def start(self, row: int, prompt_T: Tensor, *rest: Any) -> None:
        super().start(row, prompt_T, *rest)
        self.prompts[row] = tuple(prompt_T.tolist())

    def move(self, source: int, to: int) -> None:
        super().move(source, to)
        self.prompts[to] = self.prompts[source]

    def propose(self, *arguments: Any) -> DraftTree:
        tree = super().propose(*arguments)
        for b in range(len(tree.tokens_BN)):
            done = self.rows[b].pairs - len(self.prompts[b])
            rng, node = random.Random(1000 * done + len(self.prompts[b])), 0
            for token in self.answers[self.prompts[b]][done + 1 :]:
                below = [i for i in range(1, tree.width) if tree.parents_BN[b, i] == node and tree.valid_BN[b, i]]
                if not below or rng.random() < 0.25:
                    break
                node = rng.choice(below)
                tree.tokens_BN[b, node] = token
        return tree


@functools.cache
def answer(family: str, request: Request, sampling: Sampling) -> list[int]:
    return complete(target(family), NoDrafter(), [request], sampling, Limits(24, 128, ignore_eos=True))[0].tokens


def check_decode(family: str, shape: Shape | None, lengths: list[int], batch_size: int, new: list[int], eos: set[int],
                 sampling: Sampling = Sampling(), head: Any = None) -> float:  # noqa: B008 - frozen
    """-> accepted drafts per round."""
    asked = requests(*lengths)
    answers = {r.prompt_ids: answer(family, r, sampling) for r in asked}
    drafter = Helped(head or eagle(family), target(family), answers)
    asked = [replace(r, max_new_tokens=n) for r, n in zip(asked, new, strict=False)]
    found = complete(with_eos(target(family), *eos), drafter, asked, sampling, Limits(99, 128), batch_size=batch_size, plan=Plan(4, tree=shape))
    for request, done in zip(asked, found, strict=True):
        expected = answers[request.prompt_ids][: request.max_new_tokens]
        ends = [i for i, token in enumerate(expected) if token in eos]
        assert done.tokens == (expected[: ends[0] + 1] if ends else expected)
        assert done.finish_reason == ("eos" if ends else "length")
        check_counts(done)
    rounds = [r for c in found for r in c.rounds]
    return sum(r.accepted for r in rounds) / max(1, len(rounds))


@settings(max_examples=25)
@given(
    family=st.sampled_from(["llama", "gemma3_text"]), shape=SHAPES, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5, unique=True),
    batch_size=st.integers(1, 3), new=st.lists(st.integers(1, 24), min_size=5, max_size=5), eos=st.sets(st.integers(0, 127), max_size=3),
)
def test_trees_never_change_a_greedy_answer(family: str, shape: Shape | None, lengths: list[int], batch_size: int, new: list[int],
                                            eos: set[int]) -> None:
    check_decode(family, shape, lengths, batch_size, new, eos)


@pytest.mark.parametrize("shape", [BUSHY, Dynamic(4, 3, 12), Dynamic(5, 8, 60), Sampled((3, 2, 1)), None], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_right_paths_of_a_tree_are_accepted(family: str, shape: Shape | None) -> None:
    assert check_decode(family, shape, [9, 3, 20, 14, 5], 3, [24] * 5, set()) > 0.9


@pytest.mark.parametrize("shape", [BUSHY, Dynamic(4, 3, 12), Sampled((2, 2, 1, 1))], ids=str)
def test_trees_end_at_the_last_position_of_the_head(shape: Shape) -> None:
    head, *_ = make_head(geo=target().geometry, taps=[1, 2, 3], max_positions=18)
    with pytest.warns(UserWarning, match="position 18"):
        assert check_decode("llama", shape, [9, 3, 20, 14], 2, [24] * 4, set(), head=head) > 0.2


@pytest.mark.parametrize("shape", [BUSHY, Dynamic(4, 3, 12)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(0.9), Sampling(0.7, top_p=0.9)], ids=str)
def test_sampled_answers_with_likeliest_trees_are_the_autoregressive_ones(shape: Shape, sampling: Sampling) -> None:
    for family, batch_size in (("llama", 1), ("gemma3_text", 3)):
        assert check_decode(family, shape, [9, 3, 20, 14], batch_size, [24] * 4, set(), sampling) > 0.9


# ---- drawn trees through decode(): the answers are draws from the target

SMALL, DRAWS, BLOCK, L = 8, 3000, 250, 4


@functools.lru_cache
def small() -> tuple[Target, Any]:
    """A target of 8 tokens and a head that knows 6 of them."""
    base = Target.from_model(tiny.model("llama", vocab_size=SMALL, num_hidden_layers=2, seed=1), tiny.tokenizer(), name="small")
    return base, make_head(geo=base.geometry, taps=[0, 1], draft_ids=torch.tensor([0, 1, 3, 4, 5, 7]))[0]


def p_decoded(shape: Shape, sampling: Sampling) -> tuple[float, float]:
    """χ² of each token given all before it, against the target's own probabilities. -> p-value, accepted drafts per round."""
    base, head = small()
    prompt, found = (5, 0, 6, 4), []
    for first in range(0, DRAWS, BLOCK):
        asked = [Request(str(i), prompt, seed=i) for i in range(first, first + BLOCK)]
        found += complete(base, HeadDrafter(head, base), asked, sampling, Limits(L, 32, ignore_eos=True), batch_size=BLOCK, plan=Plan(3, tree=shape))
    tokens_BL = torch.tensor([c.tokens for c in found])
    statistic, freedom = 0.0, 0
    for length in range(1, L):  # the first token is the prefill's
        prefixes_XL, which_B = tokens_BL[:, :length].unique(dim=0, return_inverse=True)
        with torch.no_grad():
            logits_XV = base.model(torch.cat([torch.tensor(prompt).expand(len(prefixes_XL), -1), prefixes_XL], 1)).logits[:, -1]
        p_XV = log_probs(logits_XV, sampling.temperature, sampling.top_k).exp()
        for x, p_V in enumerate(p_XV):
            seen_V = torch.bincount(tokens_BL[which_B == x, length], minlength=SMALL)
            expected_V = p_V * seen_V.sum()
            if bool((seen_V[p_V == 0] > 0).any()):
                return 0.0, 0.0
            big_V = expected_V >= 5
            cells = [*zip(seen_V[big_V].tolist(), expected_V[big_V].tolist(), strict=True)]
            cells.append((int(seen_V[~big_V].sum()), float(expected_V[~big_V].sum())))
            if cells[-1][1] < 5:
                cells.pop()
            scale = sum(s for s, _ in cells) / max(1e-9, sum(e for _, e in cells))
            statistic += sum((s - e * scale) ** 2 / (e * scale) for s, e in cells if scale > 0)
            freedom += max(0, len(cells) - 1)
    assert freedom > 50
    rounds = [r for c in found for r in c.rounds]
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))
    return p, sum(r.accepted for r in rounds) / len(rounds)


@pytest.mark.parametrize(("widths", "sampling"), [((3, 2), Sampling(0.9)), ((1, 3), Sampling(0.9)), ((6, 1), Sampling(0.9)),
                                                  ((3, 2), Sampling(1.1, top_k=4))], ids=str)
def test_decoded_tokens_are_draws_from_the_target(widths: tuple[int, ...], sampling: Sampling) -> None:
    p, accepted = p_decoded(Sampled(widths), sampling)
    assert p > P_VALUE and accepted > 0.1


def wrong_q(tree: DraftTree) -> DraftTree:
    assert tree.q_BNV is not None
    return replace(tree, q_BNV=(tree.q_BNV > 0) / (tree.q_BNV > 0).sum(-1, keepdim=True).clamp(min=1))


def unlikely_dropped(tree: DraftTree) -> DraftTree:
    assert tree.q_BNV is not None
    likely_BN = tree.q_BNV.gather(-1, tree.tokens_BN[..., None])[..., 0] > 0.1
    likely_BN[:, 0] = True
    return replace(tree, valid_BN=tree.valid_BN & (tree.ancestors_BNN() <= likely_BN[:, None]).all(-1))


def reversed_siblings(tree: DraftTree) -> DraftTree:
    order = torch.tensor([0, 3, 2, 1, 8, 9, 6, 7, 4, 5])
    assert tree.q_BNV is not None and tree.width == 10
    back = order.argsort()
    parents_BN = tree.parents_BN[:, order]
    return replace(tree, tokens_BN=tree.tokens_BN[:, order], valid_BN=tree.valid_BN[:, order], q_BNV=tree.q_BNV[:, order],
                   parents_BN=torch.where(parents_BN >= 0, back[parents_BN.clamp(min=0)], -1))


@pytest.mark.parametrize("wrong", [wrong_q, unlikely_dropped, reversed_siblings])
def test_wrong_drawn_trees_are_noticed(wrong: Callable[[DraftTree], DraftTree], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a q that was not drawn from; unlikely draws dropped; siblings judged in another order than they were drawn in."""
    monkeypatch.setattr(pairs_module, "grow", lambda *arguments: wrong(tree) if (tree := grow(*arguments)).width == 10 else tree)
    assert p_decoded(Sampled((3, 2)), Sampling(0.9))[0] < P_VALUE
