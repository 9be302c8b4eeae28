"""The contract of heads/base.py, in one suite that every head passes: what is in heads/ is found and tested, there is no list to add to.

    check_drafting       stepwise drafting (chains and branches, uneven extends, captured form) says what `unroll` says
    check_vocabulary     a reduced vocabulary only leaves tokens out
    check_rows           rows can be moved, cleared and used again
    check_decoding       the same taken through decode(), with half of the drafts wrong, on targets that set traps
    check_lossless       greedy output is the target's, for every shape of draft and batch
    check_saving         save, load: the same logits; borrowed weights are NaN until they are lent
    check_overfitting    what was learnt by heart is accepted, as often as training says

The checks are functions of a head's type: the last test writes a head into a folder of its own and calls them.
"""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from draftheads import heads
from draftheads.data.features import Row, RowStore
from draftheads.heads import build_head, head_class, head_config, head_types
from draftheads.heads.base import DraftBatch, DraftHead
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.heads.slots import DraftSlots
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.metrics import all_rounds, tau
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Static
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, Recipe, RecipeError, TrainSection
from draftheads.train.examples import Examples, target_features
from draftheads.train.run import check_head
from draftheads.train.step import TrainStep

HEADS = head_types()
V, H = 128, 64
# What a head needs to be small; all else is its own default.
SETTINGS: dict[str, dict] = {
    "dflash": {"block_size": 5, "num_layers": 2, "num_taps": 2},
    "dspark": {"block_size": 4, "num_layers": 2, "num_taps": 2, "markov_rank": 16},
    "peagle": {"num_layers": 2, "depths": 4},
}
# Learning eight rows by heart takes these long; their own files have a shorter test of it.
SLOW = {"dflash", "dspark", "eagle", "hydra", "peagle"}
# Other forms of a head that should draft what they are trained to.
VARIANTS: dict[str, list[dict]] = {
    "eagle": [{"fc_bias": True}],
    "eagle3": [{"fc_norm": False, "norm_output": False}, {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "fc_bias": True}],
    "hydra": [{"hydra_num_layers": 3, "lm_head_bias": True}, {"prefix_layer": True}],
    "medusa": [{"medusa_num_heads": 2, "medusa_num_layers": 3}],
    "peagle": [{"norm_before_residual": True}],
}


def section(type: str, geometry: Geometry, **more) -> dict:
    """The smallest recipe section of a head for this target: taps are named only where its own don't fit so shallow a target."""
    wanted = {"type": type, **SETTINGS.get(type, {}), **more}
    try:
        head_config(wanted, geometry)
    except RecipeError as error:
        if "head.taps" not in str(error):
            raise
        L = geometry.num_layers
        wanted["taps"] = sorted({1, L // 2, L - 1})
    return wanted


def make_head(type: str, geometry: Geometry, borrowed=None, *, draft: int | None = 50, seed: int = 0, **more) -> DraftHead:
    """A head with every parameter random, on borrowed (embedding, lm_head), by default random ones. draft: size of its vocabulary."""
    generator, size = torch.Generator().manual_seed(seed), geometry.vocab_size
    ids_U = None if draft is None else torch.randperm(V, generator=generator)[:draft].sort().values
    head = build_head(section(type, geometry, draft_vocab_size=draft, **more), geometry, ids_U)
    if borrowed is None:
        borrowed = torch.randn(size, H, generator=generator), torch.randn(size, H, generator=generator) * 0.15
    head.borrow(*borrowed)
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, 0.12, generator=generator)
    return head


def awkward() -> Geometry:
    """head_dim is not hidden / heads, queries are grouped."""
    return Geometry(hidden_size=H, intermediate_size=80, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=24, vocab_size=V, max_positions=256)


def steps_of(head: DraftHead) -> int:
    """Four unroll steps, or the number that the head can do."""
    for steps in (4, *([head.max_depth] if head.max_depth else []), *range(3, 0, -1), *range(5, 17)):
        try:
            head.check_steps(steps)
        except RecipeError:
            continue
        if head.max_depth is None or steps <= head.max_depth:
            return steps
    raise AssertionError("a head that can be unrolled to no number of steps from 1 to 16")


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of the expected logits' rms where that is more than 1."""
    assert expected.isfinite().all()
    return float((found.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt().clamp(min=1))


# ---- drafting is unrolling


def documents(head: DraftHead, lengths, steps: int, seed: int):
    """Per document: features [n, F] and tokens x_1 … x_{n+steps} (the token at index i is x_{i+1}, paired with feature i)."""
    generator = torch.Generator().manual_seed(seed)
    F = len(head.taps) * H
    return [(torch.randn(n, F, generator=generator), torch.randint(V, (n + steps,), generator=generator)) for n in lengths]


def batch_of(rows, steps: int) -> DraftBatch:
    """rows: lists of documents, end to end, padded to the longest row."""
    B, T, F = len(rows), max(sum(len(f) for f, _ in row) for row in rows), rows[0][0][0].shape[1]
    batch = DraftBatch(torch.zeros(B, T, F), torch.zeros(B, T, steps, dtype=torch.long), torch.zeros(B, T, dtype=torch.long),
                       torch.full((B, T), -1), torch.zeros(B, T, steps, dtype=torch.bool))
    for r, row in enumerate(rows):
        t = 0
        for d, (features, tokens) in enumerate(row):
            n = len(features)
            batch.features_BTF[r, t : t + n], batch.positions_BT[r, t : t + n], batch.documents_BT[r, t : t + n] = features, torch.arange(n), d
            batch.tokens_BTJ[r, t : t + n] = torch.stack([tokens[j : j + n] for j in range(steps)], 1)
            batch.valid_BTJ[r, t : t + n] = True
            t += n
    return batch


@torch.no_grad()
def drafting_gap(head: DraftHead, *, captured: bool = False, shift: int = 0, forget: bool = False, flat: bool = False) -> float:
    """Three documents (two of them in one row of the batch), extended in uneven pieces; after each, a chain and a branched draft of the documents'
    own tokens against `unroll`, and a draft of wrong ones, which must leave no trace.

    captured: with slots.view set, as in a captured graph. The mutants: shift: features are that far off. forget: the second extend is lost.
    flat: branches are said to hang on the first node of the level before.
    """
    steps, rng, generator = steps_of(head), random.Random(0), torch.Generator().manual_seed(1)
    rows = [documents(head, lengths, steps, seed) for seed, lengths in enumerate([(8, 4), (9,)])]
    states = head.unroll(batch_of(rows, steps), steps).states
    texts = [d for row in rows for d in row]
    starts = [(r, sum(len(f) for f, _ in row[:d])) for r, row in enumerate(rows) for d in range(len(row))]
    B, M, everyone = len(texts), 4, slice(0, len(texts))
    state, done, worst, turn = head.new_state(B + 1, 16), [0] * B, 0.0, 0
    while any(n < len(f) for n, (f, _) in zip(done, texts, strict=True)):
        counts = [min(rng.randint(0 if turn else 1, M), len(f) - n) for n, (f, _) in zip(done, texts, strict=True)]
        width = M if captured else max(1, *counts)
        features_BMF = torch.randn(B, width, texts[0][0].shape[1], generator=generator)  # padding is garbage on purpose
        tokens_BM = torch.randint(V, (B, width), generator=generator)
        for b, (features, tokens) in enumerate(texts):
            features_BMF[b, : counts[b]] = features.roll(shift, 0)[done[b] : done[b] + counts[b]]
            tokens_BM[b, : counts[b]] = tokens[done[b] : done[b] + counts[b]]
        if captured:
            state.slots.view = len(state.slots.index_S) - 1
        if not (forget and turn == 1):
            head.extend(state, features_BMF, tokens_BM, torch.tensor(counts), everyone)
        done, turn = [n + count for n, count in zip(done, counts, strict=True)], turn + 1

        at = [(r, start + n - 1) for (r, start), n in zip(starts, done, strict=True)]
        expected = [torch.stack([head.logits(states[j][r, t], j) for r, t in at]) for j in range(steps)]
        ahead = [torch.stack([tokens[n + j] for n, (_, tokens) in zip(done, texts, strict=True)])[:, None] for j in range(steps)]
        root_B1, wrong_B1 = torch.zeros_like(ahead[0]), torch.randint(V, (B, 1), generator=generator)
        found = [head.begin(state, everyone, steps)]
        found += [head.step(state, ahead[j], root_B1, everyone)[:, 0] for j in range(steps - 1)]
        worst = max([worst, *map(gap, found, expected)])
        head.begin(state, everyone, steps)
        for j in range(min(3, steps) - 1):  # the right token is the second node of its level, then the first, below the second
            level_BW = torch.cat([wrong_B1, ahead[j]] if j == 0 else [ahead[j], wrong_B1], 1)
            parents_BW = torch.cat([root_B1, root_B1] if j == 0 or flat else [root_B1 + 1, root_B1], 1)
            worst = max(worst, gap(head.step(state, level_BW, parents_BW, everyone)[:, 1 - j], expected[j + 1]))
        head.begin(state, everyone, steps)
        if steps > 1:
            head.step(state, torch.cat([wrong_B1, wrong_B1 + 1], 1) % V, torch.cat([root_B1, root_B1], 1), everyone)
        if captured:
            state.slots.view = None
            state.slots.lengths[everyone] = [n + count for n, count in zip(state.slots.lengths[everyone], counts, strict=True)]
    return worst


def check_drafting(type: str) -> None:
    for variant in ({"freeze_lm_head": True}, {"freeze_lm_head": False}, *VARIANTS.get(type, ()), {}):
        head = make_head(type, awkward(), **variant)
        assert drafting_gap(head) < 1e-5, variant
        if isinstance(getattr(head.new_state(1, 16), "slots", None), DraftSlots):
            assert drafting_gap(head, captured=True) < 1e-5, variant
    assert drafting_gap(head, shift=1) > 1e-3, "the mutant with features of the token before"
    assert drafting_gap(head, forget=True) > 1e-3, "the mutant that loses pairs"


def check_rows(type: str) -> None:
    head = make_head(type, awkward())
    steps, F = steps_of(head), len(head.taps) * H
    state = head.new_state(3, 16)
    features_BMF, tokens_BM = torch.randn(2, 5, F), torch.randint(V, (2, 5))

    def draft(row: int) -> torch.Tensor:
        rows, zero_11 = slice(row, row + 1), torch.zeros(1, 1, dtype=torch.long)
        return torch.stack([head.begin(state, rows, steps), *(head.step(state, zero_11 + 7, zero_11, rows)[:, 0] for _ in range(steps - 1))])

    head.extend(state, features_BMF, tokens_BM, torch.tensor([3, 5]), slice(0, 2))
    before = draft(1)
    assert gap(draft(0), before) > 1e-3
    head.move(state, 1, 0)
    assert torch.equal(draft(0), before)
    head.clear(state, 1)
    head.extend(state, features_BMF[:1], tokens_BM[:1], torch.tensor([5]), slice(1, 2))
    assert torch.equal(draft(0), before), "the row that was moved is its own"
    assert gap(draft(1), before) > 1e-3
    head.clear(state, 0)
    head.extend(state, features_BMF[1:], tokens_BM[1:], torch.tensor([5]), slice(0, 1))
    assert gap(draft(0), before) < 1e-5


@torch.no_grad()
def check_vocabulary(type: str) -> None:
    """A head with a reduced vocabulary says of its tokens what the same head says without the reduction."""
    borrowed = torch.randn(V, H), torch.randn(V, H)
    whole, small = make_head(type, awkward(), borrowed, draft=None), make_head(type, awkward(), borrowed)
    ids_U = small.target_ids_U()
    for (name, p), q in zip(whole.named_parameters(), small.parameters(), strict=True):
        assert p.shape[1:] == q.shape[1:], name
        q.copy_(p if p.shape == q.shape else p[ids_U])
    steps = steps_of(whole)
    batch = batch_of([documents(whole, (6,), steps, 0)], steps)
    states = [head.unroll(batch, steps).states for head in (whole, small)]
    assert all(gap(small.logits(states[1][j], j), whole.logits(states[0][j], j)[..., ids_U]) < 1e-5 for j in range(steps))


# ---- through decode()

TARGETS = {
    "head_dim": ("llama", {"num_hidden_layers": 8, "head_dim": 24}),
    "attention bias": ("llama", {"num_hidden_layers": 4, "attention_bias": True}),
    "QK-norm": ("qwen3", {"num_hidden_layers": 8, "head_dim": 24}),
    "tied": ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "padded lm_head": ("llama", {"num_hidden_layers": 4, "vocab_size": 160}),
    "2 layers": ("llama", {"num_hidden_layers": 2}),
}


def make_target(name: str) -> Target:
    family, changes = TARGETS[name]
    return Target.from_model(tiny.model(family, **changes), tiny.tokenizer())


class HalfRight(HeadDrafter):
    """The head's drafts, mostly wrong as it is random, with half of them overwritten by the target's own next tokens; remembers what was drafted.
    shift: a mutant that shows the head features of other tokens."""

    def __init__(self, head, target, answers, shift: int = 0):
        super().__init__(head, target)
        self.answers, self.shift, self.seen = answers, shift, []

    def observe(self, tokens_BM, counts_B, features_BMF):
        super().observe(tokens_BM, counts_B, features_BMF.roll(self.shift, -1))

    def propose(self, plan, sampling, noise):
        tree = super().propose(plan, sampling, noise)
        for b, seed in enumerate(noise.seeds_B.tolist()):
            pairs, drafts = self.rows[b].pairs, tree.tokens_BN[b, 1:][tree.valid_BN[b, 1:]].tolist()
            self.seen.append((seed, pairs, drafts))
            right, rng = self.answers[seed][pairs + 1 :], random.Random(1000 * seed + pairs)
            for i in range(min(len(drafts), len(right))):
                if rng.random() < 0.6:
                    tree.tokens_BN[b, 1 + i] = right[i]
        return tree


def make_requests(lengths) -> list[Request]:
    rng = random.Random(0)
    return [Request(str(i), tuple(rng.randrange(4, 100) for _ in range(n)), seed=i) for i, n in enumerate(lengths)]


@torch.no_grad()
def decoding_gap(type: str, target: Target, shift: int = 0) -> float:
    """How much less likely than the likeliest token, by `unroll` of the whole text so far, a drafted token ever was."""
    whole = target.geometry.vocab_size != V
    head = make_head(type, target.geometry, (target.embed_VD, target.lm_head_VD), draft=None if whole else 50)
    steps, usable = steps_of(head), len(target.tokenizer)
    requests, limits = make_requests((5, 20, 2, 9)), Limits(max_new_tokens=14, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=4)
    answers = [[*r.prompt_ids, *c.tokens] for r, c in zip(requests, plain, strict=True)]
    drafter = HalfRight(head, target, answers, shift)
    done = complete(target, drafter, requests, limits=limits, batch_size=3, plan=Plan(steps), capture_taps=tuple(head.taps))
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    rounds = [r for c in done for r in c.rounds]
    assert len({min(r.accepted, 2) for r in rounds}) == 3 or steps == 1, "rounds that reject all, and rounds that accept more"
    ids_U, worst, checked = head.target_ids_U(), 0.0, 0
    for seed, pairs, drafts in drafter.seen:
        features_NF = done[seed].captured.features_TF[:pairs]
        tokens = torch.tensor([*answers[seed][1 : pairs + 1], *drafts, *[0] * (steps - len(drafts))])
        batch = batch_of([[(features_NF, tokens)]], steps)
        batch.valid_BTJ[:, :-1] = False
        states = head.unroll(batch, steps).states
        for j, token in enumerate(drafts):
            assert token < usable
            logits_U = head.logits(states[j][0, pairs - 1], j)[ids_U < usable]
            lost = (logits_U.max() - logits_U[ids_U[ids_U < usable] == token]) / logits_U.square().mean().sqrt().clamp(min=1)
            worst, checked = max(worst, float(lost)), checked + 1
    assert checked > 30
    return worst


def check_decoding(type: str, target: Target) -> None:
    assert decoding_gap(type, target) < 1e-3


@torch.no_grad()
def check_lossless(type: str) -> None:
    target = make_target("2 layers")
    head = make_head(type, target.geometry, (target.embed_VD, target.lm_head_VD), draft=100)
    requests, limits = make_requests((9, 3, 14)), Limits(max_new_tokens=12, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    static = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    for shape in (None, static, Dynamic(depth=3, top_k=3, nodes=8), Sampled((3, 2, 1))):
        drawn = []
        for size in (1, 3):
            plan = Plan(3, tree=shape)
            done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=size, plan=plan)
            assert [c.tokens for c in done] == [c.tokens for c in plain], (shape, size)
            assert any(r.source == "head" for c in done for r in c.rounds)
            if shape is None or isinstance(shape, Sampled):
                warm = complete(target, HeadDrafter(head, target), requests, Sampling(temperature=0.8), limits, batch_size=size, plan=plan)
                drawn.append([c.tokens for c in warm])
        assert not drawn or drawn[0] == drawn[1], "what a row draws does not depend on its batch-mates"


# ---- the checkpoint


@torch.no_grad()
def check_saving(type: str, folder: Path) -> None:
    head = make_head(type, awkward())
    steps = steps_of(head)
    batch = batch_of([documents(head, (6, 3), steps, 0), documents(head, (7,), steps, 1)], steps)

    def everything(of: DraftHead) -> list[torch.Tensor]:
        real_BT, states = batch.documents_BT >= 0, of.unroll(batch, steps).states
        return [of.logits(states[j][real_BT], j) for j in range(steps)]

    borrowed = torch.randn(V, H), torch.randn(V, H)
    head.borrow(*borrowed)
    save_head(head, folder, HeadMeta(target="tiny"))
    again, _ = load_head(folder, geometry=awkward())
    assert not any("embed" in name for name in head.state_dict()), "the target's embedding is not the head's to save"
    again.borrow(*borrowed)
    assert all(map(torch.equal, everything(again), everything(head)))
    other = make_head(type, awkward(), borrowed, seed=1, draft=50)
    assert not any(map(torch.equal, everything(other), everything(head)))
    fresh = build_head(section(type, awkward()), awkward())
    assert all(x.isnan().all() for x in everything(fresh)), "what is borrowed is NaN until it is lent"
    fresh.borrow(*borrowed)
    assert all(x.isfinite().all() for x in everything(fresh))


# ---- training


def replayed(hits_TJ: torch.Tensor, prompt: int, length: int) -> list[int]:
    """Tokens of each round when a text of `length` tokens is decoded by drafts that are right where hits_TJ says so: slot by slot."""
    emitted, pairs = [], prompt  # the prompt's last token came with the first answer token: the root
    while pairs < length - 1:
        right = int(hits_TJ[pairs - 1].to(torch.uint8).cummin(-1).values.sum())
        emitted.append(min(right + 1, length - 1 - pairs))
        pairs += emitted[-1]
    return emitted


def check_overfitting(type: str, folder: Path) -> None:
    """Eight rows learnt by heart; decoding accepts what the head gets right under teacher forcing, round by round."""
    target = Target.from_model(tiny.model("llama", num_hidden_layers=4), tiny.tokenizer())
    requests, limits = make_requests((6, 9, 14, 7, 11, 8, 12, 10)), Limits(max_new_tokens=16, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=8)
    torch.manual_seed(0)
    head = build_head(section(type, target.geometry), target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    steps, train = steps_of(head), TrainSection()
    bare = [Row(r.id, "", torch.tensor([*r.prompt_ids, *c.tokens]), torch.arange(len(r.prompt_ids) + 16) >= len(r.prompt_ids))
            for r, c in zip(requests, plain, strict=True)]
    store = RowStore.write(folder, target_features(target, tuple(head.taps), bare))
    step = TrainStep(head, target.lm_head_VD, target.finish_logits)
    thin = head.thin if head_class(type).thin is not DraftHead.thin else None
    examples = Examples(store, train, step.known_V, len(head.taps) * H, H, 256, thin=thin)
    head.fit_start(examples.prepare([i], steps=1, step=0)[0].batch for i in range(8))
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=8e-3, betas=(0.9, 0.95))
    updates = 120
    for n in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * min(1.0, (n + 1) / 6, 2.5 * (1 - n / updates))
        aligned, chunks = examples.prepare(range(8), steps=steps, step=n)
        loss, _ = step(aligned, chunks, 8.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.trainable_parameters(), 0.5)
        optimizer.step()

    aligned, _ = replace(examples, thin=None).prepare(range(8), steps=steps, step=0)
    with torch.no_grad():
        states = head.unroll(aligned.batch, steps).states
        best_BTJ = torch.stack([head.target_ids(head.logits(s, j).argmax(-1)) for j, s in enumerate(states)], -1)
    hits_BTJ = (best_BTJ == aligned.labels_BTJ) & aligned.answers_BTJ
    assert hits_BTJ[..., 0].sum() > 0.9 * aligned.answers_BTJ[..., 0].sum(), "eight rows can be learnt by heart"
    expected = [replayed(hits_TJ, len(r.prompt_ids), len(row)) for hits_TJ, r, row in zip(hits_BTJ, requests, bare, strict=True)]
    plan = Plan(steps)
    done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=3, plan=plan)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    predicted, measured = sum(map(sum, expected)) / sum(map(len, expected)), tau(all_rounds(done))
    print(f"{type}: {steps} steps, predicted {predicted:.3f}, measured {measured:.3f}")
    assert predicted > 1.8
    assert measured == pytest.approx(predicted, rel=0.02)
    off = HalfRight(head, target, [[]] * 8, shift=1)
    assert tau(all_rounds(complete(target, off, requests, limits=limits, batch_size=3, plan=plan))) < 0.9 * predicted, "a mutant"


# ---- the suite


@pytest.mark.parametrize("type", HEADS)
def test_drafting_says_what_unrolling_says(type):
    check_drafting(type)


@pytest.mark.parametrize("type", HEADS)
def test_rows_are_moved_and_cleared(type):
    check_rows(type)


@pytest.mark.parametrize("type", HEADS)
def test_a_reduced_vocabulary_only_leaves_tokens_out(type):
    check_vocabulary(type)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("type", HEADS)
def test_decode_drafts_what_unrolling_says(type, name):
    check_decoding(type, make_target(name))


@pytest.mark.parametrize("type", HEADS)
def test_features_of_other_channels_are_seen(type):
    assert decoding_gap(type, make_target("2 layers"), shift=1) > 1e-2


@pytest.mark.parametrize("type", HEADS)
def test_greedy_output_is_the_targets(type):
    check_lossless(type)


@pytest.mark.parametrize("type", HEADS)
def test_a_saved_head_is_the_same_head(type, tmp_path):
    check_saving(type, tmp_path / "ckpt")


@pytest.mark.parametrize("type", [pytest.param(t, marks=[pytest.mark.slow] * (t in SLOW)) for t in HEADS])
def test_overfitting_turns_into_accepted_tokens(type, tmp_path):
    check_overfitting(type, tmp_path / "rows")


def test_branches_on_the_wrong_parent_are_seen():
    assert drafting_gap(make_head("eagle3", awkward()), flat=True) > 1e-3


# ---- a head of one's own is one file

TOY = '''
"""A recurrent head: g ← norm(fold(g) + feed(embedding of the token)), begun by the tapped states. No attention, hence no cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftBatch, DraftHead, Unrolled
from draftheads.heads.config import HeadConfig
from draftheads.heads.layers import Norm, borrow_embedding, borrow_rows, lm_head, nan_table


class ToyConfig(HeadConfig):
    type: Literal["toy"] = "toy"
    width: int = Field(256, ge=1)

    def default_taps(self, geometry):
        return (1, "final")


@dataclass(eq=False)
class ToyState:
    """seen_BF: the last pair's features; token_B: its token; level_BWH: the states of the draft's last level."""

    seen_BF: Tensor
    token_B: Tensor
    level_BWH: Tensor | None = None


class Toy(DraftHead):
    Config: ClassVar[type[ToyConfig]] = ToyConfig
    embed_VD: Tensor

    def __init__(self, config, geometry, draft_ids) -> None:
        super().__init__()
        self.config, self.geometry, self.taps = config, geometry, config.taps
        H = geometry.hidden_size
        U = self.set_vocabulary(draft_ids, config.draft_vocab_size)
        self.fc = nn.Linear(len(config.taps) * H, H)
        self.fold, self.feed = nn.Linear(2 * H, config.width), nn.Linear(config.width, H)
        self.norm = Norm(H, geometry.rms_norm_eps)
        self.lm_head = lm_head(H, U, frozen=config.freeze_lm_head)
        self.register_buffer("embed_VD", nan_table(geometry.vocab_size, H), persistent=False)

    @classmethod
    def build(cls, config, geometry, draft_ids):
        return cls(config.resolve(geometry), geometry, draft_ids)

    def borrow(self, embed_VD, lm_head_VD) -> None:
        borrow_embedding(self, embed_VD, self.norm.weight)
        borrow_rows(self.lm_head, self.rows_UD(lm_head_VD), self.norm.weight)

    def next(self, g, tokens):
        e = F.embedding(tokens, self.embed_VD).to(g)
        return self.norm(g + self.feed(F.silu(self.fold(torch.cat([g, e], -1)))))

    def unroll(self, batch: DraftBatch, steps: int) -> Unrolled:
        g, states = self.fc(batch.features_BTF), []
        for j in range(steps):
            g = self.next(g, batch.tokens_BTJ[..., j])
            states.append(g)
        return Unrolled(states)

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        return self.lm_head(states)

    def new_state(self, batch: int, max_len: int, drafts: int = 64) -> ToyState:
        return ToyState(torch.zeros(batch, self.fc.in_features), torch.zeros(batch, dtype=torch.long))

    def clear(self, state, row: int) -> None:
        state.seen_BF[row] = 0

    def move(self, state, source: int, to: int) -> None:
        state.seen_BF[to], state.token_B[to] = state.seen_BF[source], state.token_B[source]

    @torch.no_grad()
    def extend(self, state, features_BMF, tokens_BM, counts_B, rows: slice) -> None:
        last_B, row_B = counts_B - 1, torch.arange(len(counts_B))
        news_B = last_B >= 0
        state.seen_BF[rows] = torch.where(news_B[:, None], features_BMF[row_B, last_B], state.seen_BF[rows])
        state.token_B[rows] = torch.where(news_B, tokens_BM[row_B, last_B], state.token_B[rows])

    @torch.no_grad()
    def begin(self, state, rows: slice, depth=None) -> Tensor:
        state.level_BWH = self.next(self.fc(state.seen_BF[rows]), state.token_B[rows])[:, None]
        return self.lm_head(state.level_BWH)[:, 0]

    @torch.no_grad()
    def step(self, state, tokens_BW, parents_BW, rows: slice) -> Tensor:
        above_BWH = state.level_BWH.gather(1, parents_BW[..., None].expand(-1, -1, state.level_BWH.shape[-1]))
        state.level_BWH = self.next(above_BWH, tokens_BW)
        return self.lm_head(state.level_BWH)

    def engine_config(self) -> dict[str, Any]:
        return {"architectures": ["Toy"], "hidden_size": self.config.hidden_size}
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with one head file, added to where heads are looked for."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads/toy.py").write_text(TOY)
    monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path / "heads")])
    importlib.invalidate_caches()
    yield "toy"
    sys.modules.pop("draftheads.heads.toy", None)
    if hasattr(heads, "toy"):
        del heads.toy


def test_a_head_is_one_file(toy, tmp_path):
    assert head_types() == sorted([*HEADS, "toy"])
    geometry = awkward()
    raw = {"run": str(tmp_path), "target": {"name": "x", "geometry": geometry.model_dump()}, "head": {"type": "toy", "width": 32}}
    recipe = Recipe.model_validate(raw)
    assert head_config(recipe.head, geometry).taps == (1, "final")
    check_head(recipe, geometry)
    with pytest.raises(RecipeError, match="did you mean 'width'"):
        head_config({"type": "toy", "widht": 32}, geometry)
    with pytest.raises(RecipeError, match="did you mean 'toy'"):
        head_config({"type": "tyo"}, geometry)


@pytest.mark.parametrize("check", [check_drafting, check_rows, check_vocabulary, check_lossless])
def test_a_toy_head_passes(toy, check):
    check(toy)


def test_a_toy_head_passes_through_decode_on_every_target(toy):
    for name in TARGETS:
        check_decoding(toy, make_target(name))
    assert decoding_gap(toy, make_target("2 layers"), shift=1) > 1e-2


def test_a_toy_head_is_saved_and_learns(toy, tmp_path):
    check_saving(toy, tmp_path / "ckpt")
    check_overfitting(toy, tmp_path / "rows")


def test_mutants_of_a_toy_head_fail(toy, monkeypatch):
    """What a suite is worth: each of the usual mistakes in a new head makes some check fail."""
    Toy = head_class(toy)
    true_step, true_begin = Toy.step, Toy.begin
    mutants = {
        "every branch hangs on the first": ("step", lambda s, st, t, p, r: true_step(s, st, t, p * 0, r), check_drafting),
        "begin forgets the token": ("begin", lambda s, st, r, d=None: (st.token_B.zero_(), true_begin(s, st, r, d))[1], check_drafting),
        "move copies nothing": ("move", lambda s, st, source, to: None, check_rows),
        "the first rows of lm_head": ("rows_UD", lambda s, lm_head_VD: lm_head_VD[: len(s.d2t)], check_vocabulary),
    }
    for name, (method, wrong, check) in mutants.items():
        with monkeypatch.context() as patch:
            patch.setattr(Toy, method, wrong)
            with pytest.raises(AssertionError):
                check(toy)
                pytest.fail(name)
