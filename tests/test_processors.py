"""History-dependent processors: node by node what transformers' own processors give for that node's history, on random trees.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.heads.tree import DraftTree
from draftheads.inference import processors
from draftheads.inference.processors import History, wanted
from draftheads.inference.requests import Sampling

V, BEYOND, SLOTS, MAX_LEN, EOS = 5, 2, 4, 40, (2, 4)  # prompts may hold ids that the logits have no column for


@dataclass
class Row:
    prompt: list[int]
    blocks: list[list[int]]  # what each round wrote; all rows have equally many
    tokens: list[int]  # drafted nodes, from index 1 on
    parents: list[int]
    valid: list[bool]

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *(t for block in self.blocks for t in block)]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    ids = st.integers(0, V - 1)
    rounds, N, found = draw(st.integers(0, 3)), draw(st.integers(1, 9)), []
    for _ in range(draw(st.integers(1, SLOTS))):
        prompt = draw(st.lists(st.integers(0, V + BEYOND - 1), min_size=1, max_size=9))
        parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, N)]
        valid = [True] * N
        for i in range(1, N):
            valid[i] = valid[parents[i]] and draw(st.booleans() | st.just(True))
        blocks = [draw(st.lists(ids, min_size=1, max_size=3)) for _ in range(rounds)]
        found.append(Row(prompt, blocks, [draw(ids) for _ in range(N - 1)], parents, valid))
    return found


samplings = st.builds(
    Sampling, repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]), no_repeat_ngram_size=st.integers(0, 5), min_new_tokens=st.integers(0, 7))


def filled(found: list[Row], sampling: Sampling, module: object = processors) -> History:
    """Rows are started in other slots' places, written to and moved, as decode does; a round's columns past a row's own count are garbage."""
    history = module.History(SLOTS, MAX_LEN, V, EOS, sampling, "cpu")  # type: ignore[attr-defined]
    for b, row in enumerate(found):
        history.start(b, torch.full((MAX_LEN,), 1))  # somebody was here before
        history.start(SLOTS - 1, torch.tensor(row.prompt))
        history.move(SLOTS - 1, b)
        if b == SLOTS - 1:
            history.start(b, torch.tensor(row.prompt))
    for i in range(len(found[0].blocks)):
        blocks = [row.blocks[i] for row in found]
        M = max(map(len, blocks))
        history.extend(torch.tensor([[*block, *[3] * (M - len(block))] for block in blocks]), torch.tensor([len(block) for block in blocks]))
    return history


def tree_of(found: list[Row]) -> DraftTree:
    return DraftTree(torch.tensor([[row.history[-1], *row.tokens] for row in found]), torch.tensor([row.parents for row in found]),
                     torch.tensor([row.valid for row in found]))


def expected(row: Row, node: int, logits_V: Tensor, sampling: Sampling) -> Tensor:
    """transformers, one node at a time, with logits for the ids beyond the vocabulary too (they are cut off afterwards)."""
    from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    path: list[int] = []
    while node > 0:
        path.insert(0, row.tokens[node - 1])
        node = row.parents[node]
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.min_new_tokens:
        chain.append(MinNewTokensLengthLogitsProcessor(len(row.prompt), sampling.min_new_tokens, list(EOS)))
    wide = torch.cat([logits_V, torch.zeros(BEYOND)])[None]
    return chain(torch.tensor([[*row.history, *path]]), wide)[0, :V]


def differs(found: list[Row], sampling: Sampling, seed: int, module: object = processors) -> bool:
    N = len(found[0].parents)
    logits_BNV = torch.randn(len(found), N, V, generator=torch.Generator().manual_seed(seed))
    before_BNV = logits_BNV.clone()
    out_BNV = filled(found, sampling, module).process(logits_BNV, tree_of(found), slice(0, len(found)))
    assert torch.equal(logits_BNV, before_BNV)
    return any(not torch.equal(out_BNV[b, i], expected(row, i, logits_BNV[b, i], sampling))
               for b, row in enumerate(found) for i in range(N) if row.valid[i])


@settings(max_examples=250, deadline=None)
@given(rows(), samplings, st.integers(0, 999))
def test_every_node_gets_what_transformers_gives_its_history(found: list[Row], sampling: Sampling, seed: int) -> None:
    assert not differs(found, sampling, seed)


def mutant(old: str, new: str) -> object:
    source = inspect.getsource(processors)
    assert source.count(old) == 1, old
    scope: dict[str, object] = {"__name__": processors.__name__}
    exec(compile(source.replace(old, new), "mutant", "exec"), scope)
    return type("Mutant", (), {"History": scope["History"]})


FIXED = [
    Row([1, 0, 3, 1, 0], [[3], [2, 1]], [0, 3, 3, 1, 0, 3], [-1, 0, 1, 0, 3, 4, 5], [True] * 7),
    Row([6], [[2], [2]], [0, 2, 3, 1, 3, 2], [-1, 0, 1, 2, 2, 4, 5], [True] * 6 + [False]),
    Row([0, 1, 2, 5, 2, 3, 1], [[0, 1, 2], [0]], [1, 2, 0, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 0], [True] * 7),
]
MUTANTS: dict[str, tuple[Callable[[], object], Sampling]] = {
    "path tokens not penalised": (lambda: mutant("scatter_(2, path_BNN, True)", "clone()"), Sampling(repetition_penalty=1.3)),
    "siblings penalised too": (lambda: mutant("torch.where(ancestors_BNN, tree", "torch.where(ancestors_BNN | True, tree"),
                               Sampling(repetition_penalty=1.3)),
    "garbage beyond the history": (lambda: mutant("< lengths_B[:, None]\n    row_BV", "< 99\n    row_BV"), Sampling(repetition_penalty=1.3)),
    "negative logits divided": (lambda: mutant("logits_BNV * penalty", "logits_BNV / penalty"), Sampling(repetition_penalty=1.3)),
    "drafted n-grams not seen": (lambda: mutant("same_BNN = ancestors_BNN & (", "same_BNN = ancestors_BNN & False & ("),
                                 Sampling(no_repeat_ngram_size=2)),
    "n-grams of other branches": (lambda: mutant("same_BNN = ancestors_BNN & (", "same_BNN = (ancestors_BNN | True) & ("),
                                  Sampling(no_repeat_ngram_size=2)),
    "context of the node, not of its parent": (lambda: mutant("tree.parents_BN.clamp(min=0)[..., None].expand",
                                                              "torch.arange(N).expand(B, N)[..., None].expand"), Sampling(no_repeat_ngram_size=2)),
    "context without the path": (lambda: mutant("torch.where(depths_BN > k, drafted_BN, written_BN)", "written_BN"),
                                 Sampling(no_repeat_ngram_size=3)),
    "depth not counted": (lambda: mutant("[:, None] + depths_BN\n            early", "[:, None] + 0 * depths_BN\n            early"),
                          Sampling(min_new_tokens=4)),
    "prompt counted": (lambda: mutant("(lengths_B - self.prompts_B[rows])", "lengths_B"), Sampling(min_new_tokens=4)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str) -> None:
    make, sampling = MUTANTS[name]
    assert not differs(FIXED, sampling, 0) and differs(FIXED, sampling, 0, make())


def test_prefill_in_any_slots_sees_the_prompt_only() -> None:
    """As decode prefills slots 2 and 3: process with the prompts in, then extend those slots by the first tokens."""
    sampling = Sampling(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=1)
    found = [Row([1, 0, 3, 1], [], [], [-1], [True]), Row([0, 0], [], [], [-1], [True])]
    history = History(SLOTS, MAX_LEN, V, EOS, sampling, "cpu")
    for slot, row in zip((2, 3), found, strict=True):
        history.start(slot, torch.tensor(row.prompt))
    logits_BNV = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(1))
    out_BNV = history.process(logits_BNV, tree_of(found), slice(2, 4))
    assert all(torch.equal(out_BNV[b, 0], expected(row, 0, logits_BNV[b, 0], sampling)) for b, row in enumerate(found))
    assert bool(out_BNV[:, 0, list(EOS)].isinf().all())
    history.extend(torch.tensor([[4], [1]]), torch.tensor([1, 1]), slice(2, 4))
    found = [Row(row.prompt, [[first]], [], [-1], [True]) for row, first in zip(found, (4, 1), strict=True)]
    out_BNV = history.process(logits_BNV, tree_of(found), slice(2, 4))
    assert all(torch.equal(out_BNV[b, 0], expected(row, 0, logits_BNV[b, 0], sampling)) for b, row in enumerate(found))


def test_without_an_end_token_the_minimum_forbids_nothing() -> None:
    history = History(1, MAX_LEN, V, (), Sampling(min_new_tokens=3), "cpu")
    history.start(0, torch.tensor([1]))
    logits_BNV = torch.zeros(1, 1, V)
    tree = DraftTree.chain(torch.tensor([1]), torch.zeros(1, 0, dtype=torch.long))
    assert torch.equal(history.process(logits_BNV, tree, slice(0, 1)), logits_BNV)


def test_only_processors_that_are_on_are_wanted() -> None:
    assert not wanted(Sampling(0.7, top_k=3, top_p=0.9, min_p=0.1))
    assert wanted(Sampling(repetition_penalty=1.1)) and wanted(Sampling(no_repeat_ngram_size=2)) and wanted(Sampling(min_new_tokens=1))


def test_a_full_row_takes_its_neighbours_padding() -> None:
    history = History(2, MAX_LEN, V, EOS, Sampling(repetition_penalty=2.0), "cpu")
    history.start(0, torch.zeros(MAX_LEN - 1, dtype=torch.int64))
    history.start(1, torch.tensor([0]))
    history.extend(torch.tensor([[1, 2, 2], [1, 2, 3]]), torch.tensor([1, 3]))
    tree = DraftTree.chain(torch.tensor([1, 3]), torch.zeros(2, 0, dtype=torch.long))
    assert history.process(torch.ones(2, 1, V), tree, slice(0, 2)).tolist() == [[[0.5, 0.5, 1, 1, 1]], [[0.5, 0.5, 0.5, 0.5, 1]]]


def test_a_device_is_not_asked() -> None:
    """Tensors without values, on no CPU: whoever asks for a value (item, bool, nonzero) fails."""
    history = History(SLOTS, MAX_LEN, V, (), Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=2), "meta")
    history.start(0, torch.zeros(7, dtype=torch.int64, device="meta"))
    history.move(0, 2)
    history.extend(torch.zeros(3, 2, dtype=torch.int64, device="meta"), torch.ones(3, dtype=torch.int64, device="meta"))
    tree = tree_of(FIXED[:1])
    tree = DraftTree(tree.tokens_BN.to("meta"), tree.parents_BN.to("meta"), tree.valid_BN.to("meta"))
    assert history.process(torch.zeros(1, 7, V, device="meta"), tree, slice(0, 1)).shape == (1, 7, V)
