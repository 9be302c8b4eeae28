"""Captured steps, without a GPU: the very functions that CUDA graphs capture are traced once and replayed from the trace.

Tracing shares two rules with capturing: what a step does with host numbers is baked in, and what it asks of the device fails. A replayed trace that
gives the eager answer, round after round, is a step that a graph may hold. Streams, shared memory and lifetimes only a GPU can show.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tiny
from draftheads.heads import build_head
from draftheads.inference import sampling as sampling_module
from draftheads.inference import step as step_module
from draftheads.inference import verify as verify_module
from draftheads.inference.cache import SlotCache
from draftheads.inference.decode import complete, decode
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.graphs import Captured, Graphs, StepFn
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Static
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError


class Traced(Graphs):
    """Captures by tracing; replays the trace. What tracing executed is undone, since capturing executes nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.replays = 0

    def view(self, used: int, most: int) -> int:
        return min(most, -(-used // 48) * 48)  # several views within a short test

    def capture(self, step: StepFn, inputs: Sequence[Tensor | None]) -> Captured:
        static = tuple(None if t is None else t.clone() for t in inputs)
        given = [t for t in static if t is not None]
        buffers = [b for owned in self._owned.values() for kept in owned.kept.values() for b in tensors(kept)]
        before = [b.clone() for b in buffers]
        holes: list[bool] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            found = step(*(None if t is None else next(rest) for t in static))
            holes[:] = [t is None for t in found]
            return [t for t in found if t is not None]

        with pytest.MonkeyPatch.context() as m:  # a GPU takes no shortcut that asks
            m.setattr(sampling_module, "free_to_ask", lambda tensor: False)
            m.setattr(verify_module, "free_to_ask", lambda tensor: False)
            m.setattr(proxy_tensor, "set_meta", lambda proxy, value: proxy)  # half of the time, for a description of every value that nobody reads
            graph = make_fx(flat)(*given)
        for b, saved in zip(buffers, before, strict=True):
            b.copy_(saved)
        asked = [n for n in graph.graph.nodes if "_local_scalar_dense" in str(n.target) or "nonzero" in str(n.target)]
        assert not asked, f"the step asks the device: {asked}"
        outputs: list[Tensor] = []

        def replay() -> None:
            self.replays += 1
            new = graph(*given)
            if not outputs:
                outputs.extend(t.clone() for t in new)
            for out, t in zip(outputs, new, strict=True):
                out.copy_(t)

        replay_outputs = _Late(outputs, holes)
        return Captured(replay, static, replay_outputs)  # type: ignore[arg-type]


class _Late:
    """The outputs, which exist after the first replay."""

    def __init__(self, outputs: list[Tensor], holes: list[bool]) -> None:
        self.outputs, self.holes = outputs, holes

    def __iter__(self) -> Any:
        rest = iter(self.outputs)
        return iter([None if hole else next(rest) for hole in self.holes])


def tensors(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, SlotCache):
        return [*thing.keys, *thing.values, thing.lengths_B]
    return [t for value in vars(thing).values() for t in (tensors(value) if hasattr(value, "__dict__") else [])] if hasattr(thing, "__dict__") else []


@functools.cache
def base(family: str) -> Target:
    """A vocabulary so small that even a random head is right now and then."""
    return Target.from_model(tiny.model(family, vocab_size=12), tiny.tokenizer(), name=family)


def target(family: str = "llama") -> Target:
    """A target of its own graphs."""
    fresh = copy.copy(base(family))
    fresh.graphs = Traced()
    return fresh


def head(target: Target, taps: list[int]) -> HeadDrafter:
    torch.manual_seed(3)
    module = build_head({"type": "eagle3", "draft_vocab_size": 10, "taps": taps}, target.geometry, torch.arange(2, 12))
    for p in module.parameters():
        p.data.normal_(0, 0.3)
    module.borrow(target.embed_VD, target.lm_head_VD)
    return HeadDrafter(module, target)


def requests(*lengths: int) -> list[Request]:
    g = torch.Generator().manual_seed(5)
    return [Request(str(i), tuple(torch.randint(2, 12, (n,), generator=g).tolist()), seed=i) for i, n in enumerate(lengths)]


SHAPES = {"chain": None, "dynamic": Dynamic(3, 3, 6), "static": Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 1))), "sampled": Sampled((2, 2))}
SAMPLED = Sampling(0.9, top_k=10, top_p=0.95)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_replayed_rounds_give_the_eager_answer(shape: str, sampling: Sampling, family: str) -> None:
    asked, limits, plan = requests(5, 11, 7, 3), Limits(30, 128, ignore_eos=True), Plan(3, tree=SHAPES[shape])
    replayed = target(family)
    found = {}
    for graphs in (False, True):
        drafter = head(replayed, [1, 2, 3])
        found[graphs] = complete(replayed, drafter, asked, sampling, limits, batch_size=2, plan=plan, graphs=graphs)
    assert replayed.graphs.failure is None and replayed.graphs.replays > 20
    assert sum(r.accepted for c in found[True] for r in c.rounds) > 10
    for eager, traced in zip(found[False], found[True], strict=True):
        # Sampled drafts near a row's end: eagerly a tree is grown no deeper than needed.
        assert traced.tokens == eager.tokens and [r.accepted for r in traced.rounds] == [r.accepted for r in eager.rounds]


@pytest.mark.parametrize("drafter", [NoDrafter, NgramDrafter])
def test_drafters_without_a_device_are_replayed_too(drafter: Any) -> None:
    asked, limits, replayed = requests(9, 4, 6), Limits(25, 128, ignore_eos=True), target()
    eager = complete(replayed, drafter(), asked, limits=limits, batch_size=2, graphs=False)
    traced = complete(replayed, drafter(), asked, limits=limits, batch_size=2, graphs=True)
    assert [c.tokens for c in traced] == [c.tokens for c in eager] and replayed.graphs.replays > 10


def test_a_second_call_uses_the_same_buffers_and_captures_nothing_new() -> None:
    asked, limits, replayed = requests(9, 4), Limits(25, 128, ignore_eos=True), target()
    drafter = head(replayed, [1, 2, 3])
    complete(replayed, drafter, asked, limits=limits, graphs=True)
    first = complete(replayed, drafter, asked, limits=limits, graphs=True)  # what had been met once is captured now
    captured = replayed.graphs.status
    second = complete(replayed, drafter, asked, limits=limits, graphs=True)
    assert [c.tokens for c in first] == [c.tokens for c in second] and replayed.graphs.status == captured


def test_states_and_certificates_come_out_of_replays() -> None:
    asked, limits, replayed = requests(9, 4, 6), Limits(20, 128, ignore_eos=True), target()
    drafter = head(replayed, [1, 2, 3])
    runs = [complete(replayed, drafter, asked, SAMPLED, limits, batch_size=2, graphs=g, capture_taps=(2,), certificate=True) for g in (False, True)]
    for eager, traced in zip(*runs, strict=True):
        assert eager.captured is not None and traced.captured is not None
        for name in ("features_TF", "final_TD", "lse_T"):
            torch.testing.assert_close(getattr(traced.captured, name), getattr(eager.captured, name), atol=1e-4, rtol=1e-4)
        assert traced.logprob_sum == pytest.approx(eager.logprob_sum, abs=1e-3)


def test_a_failed_capture_goes_on_eagerly_and_says_so() -> None:
    asked, limits, replayed = requests(9, 4), Limits(12, 128, ignore_eos=True), target()

    def refuse(step: StepFn, inputs: Any) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    replayed.graphs.capture = refuse  # type: ignore[method-assign]
    eager = complete(replayed, NoDrafter(), asked, limits=limits, graphs=False)
    with pytest.warns(UserWarning, match="CUDA graphs are off"):
        found = complete(replayed, NoDrafter(), asked, limits=limits, graphs=True)
    assert [c.tokens for c in found] == [c.tokens for c in eager]
    assert "operation not permitted" in replayed.graphs.status


def test_two_decodes_at_a_time_do_not_share_buffers() -> None:
    asked, limits, replayed = requests(9, 4), Limits(25, 128, ignore_eos=True), target()
    alone = [complete(replayed, NoDrafter(), [r], limits=limits, graphs=False)[0].tokens for r in asked]
    for _ in range(2):  # the second time with graphs captured
        first = decode(replayed, NoDrafter(), asked[:1], limits=limits, graphs=True)
        begun = [next(first) for _ in range(4)]
        second = complete(replayed, NoDrafter(), asked[1:], limits=limits, graphs=True)
        rest = [c for r in [*begun, *first] for c in r.finished]
        assert [rest[0].tokens, second[0].tokens] == alone


@pytest.mark.parametrize("graphs", [False, True])
def test_a_drafter_decodes_one_thing_at_a_time(graphs: bool) -> None:
    asked, limits, replayed = requests(9, 4), Limits(25, 128, ignore_eos=True), target()
    drafter = NgramDrafter()
    first = decode(replayed, drafter, asked[:1], limits=limits, graphs=graphs)
    next(first)
    with pytest.raises(RecipeError, match="in the middle of another decode"):
        complete(replayed, Composite(drafter, NoDrafter()), asked[1:], limits=limits, graphs=graphs)
    first.close()  # type: ignore[attr-defined]
    assert complete(replayed, Composite(drafter, NoDrafter()), asked[1:], limits=limits, graphs=graphs)


def test_a_row_beyond_the_heads_positions_leaves_the_others_captured_drafts_alone() -> None:
    asked, limits, replayed = requests(5, 11, 7, 3, 9, 12), Limits(20, 128, ignore_eos=True), target()
    found = []
    for graphs in (False, True):
        drafter = head(replayed, [1, 2, 3])
        drafter.max_positions = 20
        with pytest.warns(UserWarning, match="drafting stops at position 20"):
            found.append(complete(replayed, drafter, asked, limits=limits, batch_size=2, graphs=graphs))
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]


def test_a_composite_that_serves_rounds_between_leaves_the_heads_drafts_right() -> None:
    """What the head has not taken in yet must survive the replays of rounds that n-grams served."""
    asked, limits, replayed = requests(12, 9), Limits(40, 128, ignore_eos=True), target()
    runs = [complete(replayed, Composite(NgramDrafter(1, 3), head(replayed, [1, 2, 3])), asked, limits=limits, graphs=g) for g in (False, True)]
    assert {r.source for c in runs[1] for r in c.rounds} >= {"ngram", "head"}
    for eager, traced in zip(*runs, strict=True):
        assert traced.tokens == eager.tokens and [r.accepted for r in traced.rounds] == [r.accepted for r in eager.rounds]


def test_a_step_that_bakes_the_length_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: positions from the host's lengths, as the eager path may take them."""
    asked, limits, replayed = requests(9, 4), Limits(20, 128, ignore_eos=True), target()
    eager = complete(replayed, NoDrafter(), asked, limits=limits, graphs=False)
    extend = Target.extend

    def baked(self: Target, cache: SlotCache, rows: slice, ids: Tensor, **options: Any) -> Any:
        if options.get("view") is not None:
            lengths, cache.lengths_B = cache.lengths_B, torch.tensor(cache.lengths)
            try:
                return extend(self, cache, rows, ids, **options)
            finally:
                cache.lengths_B = lengths
        return extend(self, cache, rows, ids, **options)

    monkeypatch.setattr(Target, "extend", baked)
    found = complete(replayed, NoDrafter(), asked, limits=limits, graphs=True)
    assert [c.tokens for c in found] != [c.tokens for c in eager]


def test_a_step_that_asks_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = step_module.verify

    def asks(tree: Any, logits_BNV: Tensor, *rest: Any) -> Any:
        assert float(logits_BNV.sum()) < 1e9
        return verify(tree, logits_BNV, *rest)

    monkeypatch.setattr(step_module, "verify", asks)
    with pytest.warns(UserWarning, match="CUDA graphs are off"):
        complete(target(), NoDrafter(), requests(9), limits=Limits(8, 64, ignore_eos=True), graphs=True)
