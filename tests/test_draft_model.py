"""A smaller model as a drafter: its logits are its own forward's along every path, and the output stays the target's."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from test_graphs import Traced
from torch import Tensor

import tiny
from draftheads.inference.decode import complete
from draftheads.inference.drafters import draft_model
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.draft_model import DraftModelDrafter, first_layers
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Completion, Limits, Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Shape, Static
from draftheads.inference.target import Target
from draftheads.inference.vocabulary import shared_vocabulary
from draftheads.recipes.schema import RecipeError

BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)))
SHAPES: dict[str, Shape | None] = {"chain": None, "static": BUSHY, "dynamic": Dynamic(4, 3, 12), "sampled": Sampled((2, 2, 1, 1))}


@functools.lru_cache
def model(family: str = "llama", layers: int = 4, seed: int = 0, vocab: int = 128, positions: int = 512) -> Target:
    changes: dict[str, Any] = dict(num_hidden_layers=layers, vocab_size=vocab, max_position_embeddings=positions)
    if family == "gemma3_text":
        changes["layer_types"] = (["sliding_attention"] * 3 + ["full_attention"])[-layers:]
    return Target.from_model(tiny.model(family, seed, **changes), tiny.tokenizer(min(vocab, 128)), name=f"{family}-{layers}-{seed}")


@functools.lru_cache
def cut(family: str = "llama", layers: int = 3) -> Target:
    return Target.from_model(first_layers(model(family).model, layers), tiny.tokenizer(), name=f"{family}-cut-{layers}")


def text(length: int, seed: int) -> list[int]:
    return torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests(*lengths: int, **fields: Any) -> list[Request]:
    return [Request(str(i), tuple(text(n, 100 + i)), seed=i, **fields) for i, n in enumerate(lengths)]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.tokens for c in completions]


@functools.lru_cache
def autoregressive(target: Target, lengths: tuple[int, ...], limits: Limits) -> list[list[int]]:
    return tokens(complete(target, NoDrafter(), requests(*lengths), limits=limits))


# ---- the draft's own logits


def walk(drafter: DraftModelDrafter, texts: list[list[int]], splits: list[list[int]], widths: tuple[int, ...]) -> list[tuple[int, list[int], Tensor]]:
    """Start each text at its first split, observe it up to its last; then draft a full tree of these widths. -> (row, path, logits)."""
    drafter.reset(len(texts) + 1, 96, drafter.device)
    for b, (row, split) in enumerate(zip(texts, splits, strict=True)):
        drafter.start(b, torch.tensor(row[: split[0]]), row[split[0]], None)
    for r in range(1, len(splits[0])):
        counts = [split[r] - split[r - 1] for split in splits]
        news = [row[split[r - 1] + 1 : split[r] + 1] for row, split in zip(texts, splits, strict=True)]
        drafter.observe(torch.tensor([n + [7] * (max(counts) - len(n)) for n in news]), torch.tensor(counts), None)
        if r == 1:  # a draft that nobody accepts leaves its garbage behind
            forgotten = draft_model._ModelStepper(drafter, len(texts))
            forgotten.begin(1)
            for width in (2, 2):
                forgotten.step(torch.full((len(texts), width), 9), torch.zeros(len(texts), width, dtype=torch.long))
            drafter.move(0, len(texts))  # there and back
            drafter.start(0, torch.tensor([5, 6]), 7, None)
            drafter.move(len(texts), 0)
    stepper, B = draft_model._ModelStepper(drafter, len(texts)), len(texts)
    paths: list[list[int]] = [[]]
    logits_BWU = stepper.begin(3)[:, None]
    found: list[tuple[int, list[int], Tensor]] = [(b, [], logits_BWU[b, 0]) for b in range(B)]
    for depth, width in enumerate(widths):
        # All of the level's nodes, listed backwards: a node's place tells nothing about its parent's.
        level = [(i, [*p, (11 * depth + 5 * w + 3 * i) % 90 + 4]) for i, p in enumerate(paths) for w in range(width)][::-1]
        paths = [p for _, p in level]
        logits_BWU = stepper.step(torch.tensor([p[-1] for p in paths]).expand(B, -1), torch.tensor([i for i, _ in level]).expand(B, -1))
        found += [(b, p, logits_BWU[b, w]) for b in range(B) for w, p in enumerate(paths)]
    return found


def off(draft: Target, texts: list[list[int]], splits: list[list[int]], widths: tuple[int, ...]) -> float:
    """Largest difference from transformers' own forward of the draft along each path."""
    drafter = DraftModelDrafter(draft, draft)
    worst = 0.0
    for b, path, logits_U in walk(drafter, texts, splits, widths):
        whole = torch.tensor([[*texts[b][: splits[b][-1] + 1], *path]])
        with torch.no_grad():
            expected_U = draft.model(whole, use_cache=False).logits[0, -1]
        worst = max(worst, float((logits_U - expected_U[: len(logits_U)]).abs().max()))
    return worst


TEXTS = [text(30, 1), text(12, 2), text(60, 3)]
SPLITS = [[12, 13, 17], [2, 5, 6], [20, 24, 48]]  # the last row has more pending tokens than are fed together
WIDTHS = [(1, 1, 1, 1), (2, 1, 2), (1, 2, 2, 1), (3,)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_logits_are_the_drafts_own_along_every_path(family: str, widths: tuple[int, ...]) -> None:
    draft = model(family, 2)
    assert off(draft, TEXTS, SPLITS, widths) < 1e-4
    assert off(draft, TEXTS[:1], SPLITS[:1], widths) < 1e-4


@pytest.mark.parametrize("wrong", ["stale", "position", "siblings", "accepted twice"])
def test_a_broken_stepper_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "stale":  # what was observed last is not fed
        whole = DraftModelDrafter.observe
        monkeypatch.setattr(DraftModelDrafter, "observe", lambda self, ids, counts, features: whole(
            self, ids, counts - (counts > 1).long(), features))
    elif wrong == "accepted twice":
        advance = draft_model.DraftModelDrafter.feed

        def feed(self: DraftModelDrafter, B: int) -> Tensor:
            self.rows[0].pending *= 2
            return advance(self, B)

        monkeypatch.setattr(DraftModelDrafter, "feed", feed)
    elif wrong == "position":  # every level at the root's
        forward = Target.forward
        monkeypatch.setattr(Target, "forward", lambda self, ids, positions, mask, cache, rows, starts, taps=(): forward(
            self, ids, positions.clamp(max=int(cache.lengths_B[rows].max())), mask, cache, rows, starts, taps))
    else:  # every node sees all of its level
        mask = draft_model.level_mask
        monkeypatch.setattr(draft_model, "level_mask", lambda length_B, view, above, drafted: mask(
            length_B, view, None if above is None else torch.ones_like(above), drafted))
    assert off(model("llama", 2), TEXTS, SPLITS, (2, 1, 2)) > 1e-2


# ---- decoding


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_greedy_output_is_the_targets(family: str, batch_size: int, shape: str) -> None:
    """By another model, by a cut of the target, by the target itself; prompts and answers longer than the window; refills."""
    target, limits, lengths = model(family), Limits(max_new_tokens=24, ignore_eos=True), (9, 4, 17, 30, 6)
    accepted = {}
    for draft in (model("llama", 2, 7), cut(family), target):
        found = complete(target, DraftModelDrafter(draft, target), requests(*lengths), limits=limits, batch_size=batch_size,
                         plan=Plan(4, tree=SHAPES[shape]))
        assert tokens(found) == autoregressive(target, lengths, limits), draft.name
        assert {r.source for c in found for r in c.rounds} <= {"draft_model", "none"}
        accepted[draft.name] = sum(r.accepted for c in found for r in c.rounds)
    assert accepted[target.name] > accepted["llama-2-7"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_target_as_its_own_draft_is_always_right(batch_size: int) -> None:
    target = model()
    found = complete(target, DraftModelDrafter(target, target), requests(9, 4, 17, 30), limits=Limits(max_new_tokens=21, ignore_eos=True),
                     batch_size=batch_size, plan=Plan(4))
    assert all([r.emitted for r in c.rounds] == [5, 5, 5, 5] for c in found)


def test_a_row_is_drafted_alike_in_any_batch() -> None:
    target, options = model(), dict(limits=Limits(max_new_tokens=20, ignore_eos=True), plan=Plan(3, tree=Static(((0,), (1,), (0, 0), (1, 0)))))
    alone, together = (complete(target, DraftModelDrafter(cut(), target), requests(9, 4, 17, 40, 6), batch_size=n, **options) for n in (1, 3))
    assert [[r.accepted for r in c.rounds] for c in alone] == [[r.accepted for r in c.rounds] for c in together]


def test_behind_ngrams_it_catches_up() -> None:
    """Rounds that n-grams serve leave pending tokens, more than are fed together."""
    target, limits = model(), Limits(max_new_tokens=60, ignore_eos=True)
    wanted = [Request(str(i), tuple(text(8, i) * 3), seed=i) for i in range(4)]
    plain = complete(target, NoDrafter(), wanted, limits=limits)
    both = Composite(NgramDrafter(prompt_lookup_min=1), DraftModelDrafter(target, target))
    found = complete(target, both, wanted, limits=limits, batch_size=2, plan=Plan(4))
    assert tokens(found) == tokens(plain)
    rounds = [r for c in found for r in c.rounds]
    assert {"ngram", "draft_model"} <= {r.source for r in rounds}
    assert all(r.accepted == r.drafted for r in rounds if r.source == "draft_model")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_end_inside_the_block(batch_size: int) -> None:
    target = copy.copy(model())
    answer = autoregressive(target, (9, 14), Limits(max_new_tokens=24, ignore_eos=True))
    target.eos_ids = frozenset({answer[0][6], answer[1][11]})
    for draft in (model(), model("llama", 2, 7)):
        found = complete(target, DraftModelDrafter(draft, target), requests(9, 14), limits=Limits(max_new_tokens=24), batch_size=batch_size,
                         plan=Plan(5))
        plain = complete(target, NoDrafter(), requests(9, 14), limits=Limits(max_new_tokens=24))
        assert tokens(found) == tokens(plain) and found[0].finish_reason == "eos" and len(found[0].tokens) <= 7


@pytest.mark.parametrize("shape", ["chain", "sampled"])
def test_sampled_drafts_carry_q(shape: str) -> None:
    target, seen = model(), []

    class Watched(DraftModelDrafter):
        def propose(self, plan: Plan, sampling: Any, noise: Any) -> Any:
            seen.append(super().propose(plan, sampling, noise))
            return seen[-1]

    found = complete(target, Watched(cut(), target), requests(9, 14, 5), Sampling(temperature=0.8, top_k=20),
                     Limits(max_new_tokens=20, ignore_eos=True), batch_size=3, plan=Plan(3, tree=SHAPES[shape]))
    drawn = [t for t in seen if t.width > 1]
    assert drawn and sum(r.accepted for c in found for r in c.rounds) > 0
    for tree in drawn:
        assert tree.q_BNV is not None
        chance_BN = tree.q_BNV.gather(2, tree.tokens_BN[..., None])[..., 0]
        assert bool((chance_BN[:, 1:] > 0)[tree.valid_BN[:, 1:]].all()) and torch.allclose(tree.q_BNV[:, 1:].sum(-1), torch.ones(()))


def test_the_target_as_its_own_sampled_draft_is_always_right() -> None:
    """q = p: block verification accepts everything. With q of another temperature it would not."""
    target = model()
    found = complete(target, DraftModelDrafter(target, target), requests(9, 14), Sampling(temperature=0.8),
                     Limits(max_new_tokens=16, ignore_eos=True), plan=Plan(4))
    assert all([r.accepted for r in c.rounds] == [4, 4, 4] for c in found)


def test_min_confidence_shortens_chains() -> None:
    target, limits = model(), Limits(max_new_tokens=20, ignore_eos=True)
    drafted = []
    for least in (0.0, 0.3, 1.1):
        found = complete(target, DraftModelDrafter(cut(), target, min_confidence=least), requests(9, 14), limits=limits, plan=Plan(4))
        assert tokens(found) == autoregressive(target, (9, 14), limits)
        drafted.append(sum(r.drafted for c in found for r in c.rounds))
    assert drafted[0] > drafted[1] > drafted[2] == 0


# ---- the draft's limits


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "static"])
def test_beyond_its_positions_the_draft_is_silent(batch_size: int, shape: str) -> None:
    """The draft's 24 positions end inside a block, before the first token (a prompt of 30), and never (a prompt of 4, a short answer)."""
    target, limits = model(), Limits(max_new_tokens=30, ignore_eos=True)
    weights = copy.deepcopy(target.model)
    weights.config.max_position_embeddings = 24
    drafter = DraftModelDrafter(Target.from_model(weights, tiny.tokenizer(), name="short"), target)
    wanted = [*requests(9, 30, 20, 24, 23), Request("x", tuple(text(4, 9)), max_new_tokens=6)]
    with pytest.warns(UserWarning, match="short drafts up to its position 24 only") as caught:
        found = complete(target, drafter, wanted, limits=limits, batch_size=batch_size, plan=Plan(4, tree=SHAPES[shape]))
    assert len([w for w in caught if "position 24" in str(w.message)]) == 1
    assert tokens(found) == tokens(complete(target, NoDrafter(), wanted, limits=limits))
    for request, completion in zip(wanted, found, strict=True):
        known = len(request.prompt_ids) + 1  # tokens before the round, root included; the draft feeds up to position known + drafted − 2
        for r in completion.rounds:
            assert r.drafted == 0 or known + r.drafted - 2 < 24
            if shape == "chain" and r.emitted:
                room = max(0, min(4, 24 - known + 1, len(request.prompt_ids) + len(completion.tokens) - known - 1))
                assert r.drafted == room and r.accepted == room  # it is the target: always right
            known += r.emitted


# ---- vocabularies


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(160, 128), (128, 160), (100, 128), (160, 160)])
def test_lm_heads_of_other_sizes(draft_rows: int, target_rows: int) -> None:
    """Rows beyond the tokenizer, and ids that one side does not have, are never proposed; the target may still write them."""
    target, draft = model(vocab=target_rows), model("llama", 2, 7, draft_rows)
    drafter, proposed = DraftModelDrafter(draft, target), []
    whole = drafter.propose

    def propose(plan: Plan, sampling: Any, noise: Any) -> Any:
        tree = whole(plan, sampling, noise)
        proposed.append(int(tree.tokens_BN[:, 1:].max()) if tree.width > 1 else 0)
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    limits = Limits(max_new_tokens=30, ignore_eos=True)
    found = complete(target, drafter, requests(9, 5), limits=limits, batch_size=2, plan=Plan(4, tree=SHAPES["dynamic"]))
    assert tokens(found) == autoregressive(target, (9, 5), limits)
    assert len(drafter.vocab.ids_U) == min(draft_rows, target_rows, 128) and drafter.vocab.size == target_rows
    assert 0 < max(proposed) < min(draft_rows, target_rows, 128)
    if target_rows > 128:
        assert max(t for c in found for t in c.tokens) >= 128, "the target should have written an id that the draft has no row for"


def test_other_tokenizers_are_refused() -> None:
    target = model()
    other = copy.copy(model("llama", 2))
    other.name, other.tokenizer = "stranger", type(tiny.tokenizer())(tokenizer_object=swapped())
    with pytest.raises(RecipeError, match=r"stranger cannot draft for llama-4-0.* id 41 is 'E' in the first and is 'D' in the second"):
        DraftModelDrafter(other, target)


def swapped() -> Any:
    """The tiny tokenizer with two letters exchanged."""
    from tokenizers import Tokenizer

    whole = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    vocab = whole["model"]["vocab"]
    vocab["D"], vocab["E"] = vocab["E"], vocab["D"]
    return Tokenizer.from_str(json.dumps(whole))


def test_ids_that_only_one_side_knows_are_never_proposed() -> None:
    target, draft = copy.copy(model()), copy.copy(model("llama", 2))
    target.tokenizer = tiny.tokenizer(110)
    vocab = shared_vocabulary(draft, target)
    assert len(vocab.ids_U) == 110 and vocab.padding_U is None
    holes = tiny.tokenizer(128)
    draft.tokenizer = type("Holes", (), {"get_vocab": lambda self: {t: i for t, i in holes.get_vocab().items() if i not in (50, 60)}})()
    target.tokenizer = holes
    vocab = shared_vocabulary(draft, target)
    assert vocab.padding_U is not None and vocab.padding_U.nonzero().flatten().tolist() == [50, 60]


def test_tokenizers_that_share_no_token_are_said_to() -> None:
    target, draft = copy.copy(model()), copy.copy(model("llama", 2))
    whole = tiny.tokenizer().get_vocab()
    for side, ids in ((draft, range(0, 50)), (target, range(50, 128))):
        side.tokenizer = type("Part", (), {"get_vocab": lambda self, ids=ids: {t: i for t, i in whole.items() if i in ids}})()
    with pytest.raises(RecipeError, match=r"tokenizers share no token \(ids 0 … 49 in the first, 50 … 127 in the second\); take a") as caught:
        shared_vocabulary(draft, target)
    assert "None" not in str(caught.value)


# ---- cuts


def test_first_layers_shares_weights_and_leaves_the_model_alone() -> None:
    whole = tiny.model("gemma3_text")
    ids = torch.tensor([text(20, 3)])
    with torch.no_grad():
        before = whole(ids, output_hidden_states=True)
        short = first_layers(whole, 2)
        expected = whole.lm_head(whole.model.norm(before.hidden_states[2]))
        assert torch.allclose(short(ids).logits, expected, atol=1e-5)
        assert torch.equal(whole(ids).logits, before.logits)
    assert len(whole.model.layers) == 4 and short.config.num_hidden_layers == 2 and len(short.config.layer_types) == 2
    assert {p.data_ptr() for p in short.parameters()} < {p.data_ptr() for p in whole.parameters()}
    for layers in (0, 5):
        with pytest.raises(RecipeError, match=f"first_layers: {layers} of a model of 4 layers"):
            first_layers(whole, layers)


def test_a_cut_may_be_packed_beside_its_target() -> None:
    from draftheads.inference.packed import can_pack

    if not can_pack():
        pytest.skip("this torch cannot pack")
    whole = tiny.model()
    short = first_layers(whole, 4)
    target = Target.from_model(whole, tiny.tokenizer(), packed=True)
    draft = Target.from_model(short, tiny.tokenizer(), packed=True)
    found = complete(target, DraftModelDrafter(draft, target), requests(9), limits=Limits(max_new_tokens=11, ignore_eos=True), plan=Plan(4))
    assert tokens(found) == autoregressive(model(), (9,), Limits(max_new_tokens=11, ignore_eos=True))
    assert [r.accepted for r in found[0].rounds] == [4, 4]
    with pytest.raises(RecipeError, match="packed=False"):
        first_layers(whole, 2)


# ---- captured steps


@pytest.mark.parametrize(("family", "shape", "temperature"), [
    ("llama", "chain", 0.0), ("llama", "chain", 0.8), pytest.param("llama", "sampled", 0.8, marks=pytest.mark.slow), ("llama", "dynamic", 0.0),
    ("gemma3_text", "static", 0.0)])
def test_captured_drafts_are_the_eager_ones(family: str, shape: str, temperature: float) -> None:
    target = copy.copy(model(family))
    target.graphs = Traced()
    options: dict[str, Any] = dict(limits=Limits(max_new_tokens=16, max_len=96, ignore_eos=True), batch_size=2, plan=Plan(3, tree=SHAPES[shape]))
    drafter = DraftModelDrafter(cut(family, 2), target)
    eager, captured = (complete(target, drafter, requests(9, 4, 17), Sampling(temperature), graphs=g, **options) for g in (False, True))
    assert tokens(eager) == tokens(captured) and target.graphs.failure is None and target.graphs.replays > 4
    assert [[r.accepted for r in c.rounds] for c in eager] == [[r.accepted for r in c.rounds] for c in captured]
