"""DFlash and DSpark: unroll = an independent forward with one explicit mask = drafting, which slots are trained, and the mutants that must break it.

Every parameter is random (norms too), the geometry is awkward (head_dim ≠ hidden/heads, grouped queries, reduced vocabulary), rows are padded and
hold several documents.
"""

from __future__ import annotations

import functools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_graphs import SAMPLED, SHAPES, Traced
from test_graphs import requests as small_requests
from test_graphs import target as small_target

import tiny
from draftheads.data.features import Row
from draftheads.heads import block, build_head, head_config
from draftheads.heads.base import DraftBatch
from draftheads.heads.block import BlockHead
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.heads.dspark import DSpark
from draftheads.heads.slots import DraftSlots
from draftheads.inference import metrics
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, Recipe, RecipeError, TrainSection
from draftheads.train.align import align
from draftheads.train.examples import target_features
from draftheads.train.step import TrainStep, chunks_of

V, H, F, P = 96, 32, 64, 5
KINDS = ["dflash", "dspark"]
STEPS = {"dflash": P - 1, "dspark": P}
SMALL = {"num_layers": 2, "block_size": P, "taps": [1, 3], "mask_token_id": 7}


def geometry(**changes) -> Geometry:
    base = dict(hidden_size=H, intermediate_size=40, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=12, vocab_size=V, max_positions=128)
    return Geometry(**(base | changes))


def randomise(head, generator: torch.Generator, std: float = 0.15) -> None:
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, std, generator=generator)


def make_head(kind: str, seed: int = 0, draft: int | None = 40, **section):
    """A head with every parameter random, and the embedding and lm_head it borrowed."""
    generator = torch.Generator().manual_seed(seed)
    ids_U = None if draft is None else torch.randperm(V, generator=generator)[:draft].sort().values
    rank = {"markov_rank": 6} if kind == "dspark" else {}
    head = build_head({"type": kind, "draft_vocab_size": draft} | SMALL | rank | section, geometry(), ids_U)
    embed_VD, lm_head_VD = torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator) * 0.15
    head.borrow(embed_VD, lm_head_VD)
    randomise(head, generator)
    return head, embed_VD, lm_head_VD


def plain(head, embed_VD, lm_head_VD, features_TF, tokens, i: int, theta: float = 10000.0):
    """Logits of all steps behind slot i of one text: float64, from the saved tensors and what was borrowed, one mask over [context; block]."""
    w, c, n = {k: v.double() for k, v in head.state_dict().items()}, head.config, len(features_TF)
    P = c.block_size
    ids_U = (torch.arange(len(w["d2t"])) + w["d2t"]).long()
    lm_head_UD = w.get("lm_head.weight", lm_head_VD.double()[ids_U])

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + head.geometry.rms_norm_eps).sqrt() * w[name + ".weight"]

    def turned(x_TND, positions_T):
        half = x_TND.shape[-1] // 2
        angle = positions_T.double()[:, None] * theta ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        found = torch.complex(x_TND[..., :half].contiguous(), x_TND[..., half:].contiguous()) * turn
        return torch.cat([found.real, found.imag], -1)

    context = normed(features_TF.double() @ w["fc.weight"].T, "hidden_norm")
    here = torch.cat([torch.arange(n), i + 1 + torch.arange(P)])
    may_read = torch.cat([torch.arange(n) <= i, torch.ones(P, dtype=torch.bool)])
    h = embed_VD.double()[[int(tokens[i])] + [c.mask_token_id] * (P - 1)]
    for layer in (f"layers.{n}." for n in range(c.num_layers)):
        x = normed(h, layer + "input_layernorm")
        everything = torch.cat([context, x])
        read = {"q": x, "k": everything, "v": everything}
        q, k, v = ((y @ w[layer + f"self_attn.{m}_proj.weight"].T).view(len(y), -1, c.head_dim) for m, y in read.items())
        q, k = turned(normed(q, layer + "self_attn.q_norm"), here[n:]), turned(normed(k, layer + "self_attn.k_norm"), here)
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for y in (k, v))
        scores = torch.einsum("phd,shd->hps", q, k) / c.head_dim**0.5
        p = scores.masked_fill(~may_read, float("-inf")).softmax(-1)
        h = h + torch.einsum("hps,shd->phd", p, v).flatten(1) @ w[layer + "self_attn.o_proj.weight"].T
        m = normed(h, layer + "post_attention_layernorm")
        inner = torch.nn.functional.silu(m @ w[layer + "mlp.gate_proj.weight"].T) * (m @ w[layer + "mlp.up_proj.weight"].T)
        h = h + inner @ w[layer + "mlp.down_proj.weight"].T
    h = normed(h, "norm")
    if head.config.type == "dflash":
        return h[1:] @ lm_head_UD.T
    return h @ lm_head_UD.T + w["markov_head.markov_w1.weight"][tokens[i : i + P]] @ w["markov_head.markov_w2.weight"].T


def documents(lengths, seed: int):
    """Per document: features [n, F] and tokens x_1 … x_{n+P} (the token at index i is x_{i+1}, paired with feature i)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, F, generator=generator) * 2, torch.randint(V, (n + P,), generator=generator)) for n in lengths]


def batch_of(rows, J: int = P) -> DraftBatch:
    """rows: lists of documents, padded to the longest."""
    B, T = len(rows), max(sum(len(f) for f, _ in row) for row in rows)
    b = DraftBatch(torch.zeros(B, T, F), torch.zeros(B, T, J, dtype=torch.long), torch.zeros(B, T, dtype=torch.long),
                   torch.full((B, T), -1), torch.zeros(B, T, J, dtype=torch.bool))
    for r, row in enumerate(rows):
        t = 0
        for d, (features, tokens) in enumerate(row):
            n = len(features)
            b.features_BTF[r, t : t + n], b.positions_BT[r, t : t + n], b.documents_BT[r, t : t + n] = features, torch.arange(n), d
            b.tokens_BTJ[r, t : t + n] = torch.stack([tokens[j : j + n] for j in range(J)], 1)
            b.valid_BTJ[r, t : t + n] = True
            t += n
    return b


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")


ROWS = [documents([5, 1, 3], 1), documents([7], 2)]


@torch.no_grad()
def unroll_gap(head, embed_VD, lm_head_VD, rows, valid_BT=None) -> float:
    """Every step at every valid slot against the plain forward; all others are zero."""
    batch, steps, worst = batch_of(rows), STEPS[head.config.type], 0.0
    if valid_BT is not None:
        batch.valid_BTJ &= valid_BT[..., None]
    states = head.unroll(batch, steps).states
    for r, row in enumerate(rows):
        t = 0
        for features, tokens in row:
            for i in range(len(features)):
                if batch.valid_BTJ[r, t, 0]:
                    expected_JU = plain(head, embed_VD, lm_head_VD, features, tokens, i)
                    worst = max(worst, *(gap(head.logits(states[j][r, t], j), expected_JU[j]) for j in range(steps)))
                t += 1
    assert len(states) == steps and all((s[~batch.valid_BTJ[..., 0]] == 0).all() for s in states)
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("section", [
    {}, {"num_kv_heads": 6, "num_layers": 1, "draft": None}, {"num_kv_heads": 1, "head_dim": 10, "freeze_lm_head": False},
], ids=str)
def test_unroll_equals_an_independent_forward(kind, section):
    assert unroll_gap(*make_head(kind, **section), ROWS) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_only_valid_slots_are_computed_whatever_the_others_hold(kind):
    valid_BT = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) < 0.4
    assert 0 < int(valid_BT.sum()) < 12
    assert unroll_gap(*make_head(kind), ROWS, valid_BT) < 1e-5


@pytest.mark.parametrize(("kind", "mutant"), [
    ("dflash", "one context slot more"), ("dflash", "one context slot less"), ("dflash", "position +1"), ("dspark", "position -1"),
    ("dflash", "across documents"), ("dflash", "step off by one"), ("dspark", "previous token shifted"),
])
def test_mutants_of_unroll_are_seen(kind, mutant, monkeypatch):
    head, *borrowed = make_head(kind)
    right_mask, right_positions = block.context_mask, block.block_positions
    if "context" in mutant:
        by = 1 if "more" in mutant else -1
        monkeypatch.setattr(block, "context_mask", lambda documents_BT, slot_BN: right_mask(documents_BT, (slot_BN + by).clamp(0, 5)))
        assert unroll_gap(head, *borrowed, [documents([6], 3)]) > 1e-3
        return
    if "position" in mutant:
        monkeypatch.setattr(block, "block_positions", lambda slot_BN, P: right_positions(slot_BN, P) + int(mutant[-2:]))
    elif "documents" in mutant:
        monkeypatch.setattr(block, "context_mask", lambda documents_BT, slot_BN: right_mask(torch.zeros_like(documents_BT), slot_BN))
    elif "step" in mutant:
        monkeypatch.setattr(type(head), "first_step", 0)
    else:
        state = DSpark.state
        monkeypatch.setattr(DSpark, "state", lambda self, h, previous: state(self, h, previous.roll(1, -1)))
    assert unroll_gap(head, *borrowed, ROWS) > 1e-3


# ---- which slots are trained


@pytest.mark.parametrize("anchors", [3, 100])
def test_thinning_draws_whole_blocks_and_no_more_than_the_anchors(anchors):
    head = make_head("dflash", anchors=anchors)[0]
    valid_TJ = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)).expand(-1, 4) < torch.tensor([0.6, 0.5, 0.3, 0.2])
    drawn = [head.thin(valid_TJ, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) is (anchors == 100)
    for kept_TJ in drawn:
        assert int(kept_TJ[:, 0].sum()) == min(anchors, int(valid_TJ[:, 0].sum()))
        assert torch.equal(kept_TJ[kept_TJ[:, 0]], valid_TJ[kept_TJ[:, 0]]) and not kept_TJ[~kept_TJ[:, 0]].any()
    none_TJ = torch.zeros(5, 4, dtype=torch.bool)
    assert torch.equal(head.thin(none_TJ, torch.Generator()), none_TJ)


def test_every_valid_slot_gets_its_turn():
    head = make_head("dflash", anchors=2)[0]
    valid_TJ = (torch.arange(12)[:, None] % 2 == 0).expand(-1, 4)
    generator = torch.Generator().manual_seed(0)
    seen_T = sum(head.thin(valid_TJ, generator)[:, 0].long() for _ in range(600))
    assert (seen_T[1::2] == 0).all() and ((seen_T[::2] - 200).abs() < 60).all(), seen_T


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_one_length(kind):
    head = make_head(kind)[0]
    assert head.max_depth == STEPS[kind]
    head.check_steps(STEPS[kind])
    for steps in (1, STEPS[kind] - 1, STEPS[kind] + 1):
        with pytest.raises(RecipeError, match=rf"asks for {steps} steps; a block of head.block_size 5 .* set steps to {STEPS[kind]}"):
            head.check_steps(steps)
        with pytest.raises(RecipeError):
            head.unroll(batch_of(ROWS, P + 1), steps)


# ---- drafting


@torch.no_grad()
def drafting_gap(kind: str, seed: int = 0, captured: bool = False) -> float:
    """Three texts extended in uneven pieces, some of them empty; after each a chain and a branched draft of the texts' own tokens, and a short one,
    against `unroll`. captured: as a captured graph runs it (slots.view)."""
    head, J, rng, generator = make_head(kind, seed)[0], STEPS[kind], random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [documents([n], seed + n) for n in (9, 5, 8)]
    texts, B, everyone, M = [row[0] for row in rows], 3, slice(0, 3), 4
    states = head.unroll(batch_of(rows), J).states
    state, done, worst = head.new_state(B + 1, 12, 3), [0] * B, 0.0
    while any(n < len(f) for n, (f, _) in zip(done, texts, strict=True)):
        counts = [min(rng.randint(0 if all(done) else 1, M), len(f) - n) for n, (f, _) in zip(done, texts, strict=True)]
        width = M if captured else max(1, *counts)
        features_BMF = torch.randn(B, width, F, generator=generator)  # padding is garbage on purpose
        tokens_BM = torch.randint(V, (B, width), generator=generator)
        for b, (features, tokens) in enumerate(texts):
            features_BMF[b, : counts[b]], tokens_BM[b, : counts[b]] = (x[done[b] : done[b] + counts[b]] for x in (features, tokens))
        if captured:
            state.slots.view = 18
        head.extend(state, features_BMF, tokens_BM, torch.tensor(counts), everyone)
        done = [n + count for n, count in zip(done, counts, strict=True)]

        expected = [torch.stack([head.logits(s[b, n - 1], j) for b, n in enumerate(done)]) for j, s in enumerate(states)]
        ahead = [torch.stack([tokens[n + j] for n, (_, tokens) in zip(done, texts, strict=True)])[:, None] for j in range(J)]
        root_B1, wrong_B1 = torch.zeros_like(ahead[0]), torch.randint(V, (B, 1), generator=generator)
        found = [head.begin(state, everyone)] + [head.step(state, ahead[j], root_B1, everyone)[:, 0] for j in range(J - 1)]
        found += [head.begin(state, everyone, 2), head.step(state, ahead[0], root_B1, everyone)[:, 0]]
        worst = max([worst, *map(gap, found, expected + expected[:2])])
        with pytest.raises(ValueError, match="begun for 2 levels has no level 3"):
            head.step(state, ahead[1], root_B1, everyone)
        head.begin(state, everyone)
        for j in range(J - 1):  # the right token is the second node of its level
            level_BW, parents_BW = torch.cat([wrong_B1, ahead[j]], 1), torch.cat([root_B1, root_B1 + (j > 0)], 1)
            worst = max(worst, gap(head.step(state, level_BW, parents_BW, everyone)[:, 1], expected[j + 1]))
        if captured:
            state.slots.view = None
            state.slots.lengths[everyone] = [n + count for n, count in zip(state.slots.lengths[everyone], counts, strict=True)]
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("captured", [False, True])
def test_drafting_equals_unroll(kind, seed, captured):
    assert drafting_gap(kind, seed, captured) < 1e-5


@pytest.mark.parametrize(("kind", "mutant"), [
    ("dflash", "rope"), ("dflash", "lost"), ("dspark", "previous token"), ("dflash", "half a block"), ("dflash", "no masks"),
])
def test_mutants_of_drafting_are_seen(kind, mutant, monkeypatch):
    rope, extend, attend, calls = DraftSlots.rope, BlockHead.extend, DraftSlots.attend, []
    if mutant == "rope":  # the block's positions, not the context's
        monkeypatch.setattr(DraftSlots, "rope", lambda self, rows, offset, count=1: rope(self, rows, offset + (count == P), count))
    elif mutant == "lost":
        monkeypatch.setattr(BlockHead, "extend", lambda self, *args: calls.append(1) or (extend(self, *args) if len(calls) != 2 else None))
    elif mutant == "previous token":
        follow = DSpark.follow
        monkeypatch.setattr(DSpark, "follow", lambda self, base, tokens: follow(self, base, (tokens + 1) % V))
    elif mutant == "half a block":  # the anchor and the first mask are read, not the masks behind them
        monkeypatch.setattr(DraftSlots, "attend", lambda self, rows, q, drafted=0, **rest: attend(self, rows, q, 2, **rest))
    else:
        whole = BlockHead.block
        monkeypatch.setattr(BlockHead, "block", lambda self, anchor: whole(self, anchor) if anchor.dim() > 1 else anchor[:, None].expand(-1, P))
    assert drafting_gap(kind) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_half_precision(kind):
    """Autocast in training, a bfloat16 head in drafting: close to float32, and of the dtype that goes on."""
    head, *borrowed = make_head(kind)
    expected = torch.stack([head.logits(s, j) for j, s in enumerate(head.unroll(batch_of(ROWS), STEPS[kind]).states)])
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([head.logits(s, j) for j, s in enumerate(head.unroll(batch_of(ROWS), STEPS[kind]).states)])
    assert gap(found, expected) < 0.05 * float(expected.abs().max())
    head.to(torch.bfloat16).borrow(*borrowed)
    (features, tokens), = ROWS[1]
    state = head.new_state(1, 12)
    head.extend(state, features[None], tokens[None, :7], torch.tensor([7]), slice(0, 1))
    drafted = head.begin(state, slice(0, 1))
    assert drafted.dtype == torch.bfloat16 and gap(drafted[0], expected[0, 1, 6]) < 0.05 * float(expected.abs().max())


@torch.no_grad()
def test_a_moved_and_a_cleared_row():
    head = make_head("dspark")[0]
    (features, tokens), = documents([6], 4)
    state = head.new_state(3, 12)
    head.extend(state, features[None], tokens[None, :6], torch.tensor([6]), slice(2, 3))
    expected = head.begin(state, slice(2, 3)).clone()
    head.move(state, 2, 0)
    head.clear(state, 2)
    assert gap(head.begin(state, slice(0, 1)), expected) == 0
    head.extend(state, features[None], tokens[None, :6], torch.tensor([6]), slice(2, 3))
    assert gap(head.begin(state, slice(2, 3)), expected) == 0
    with pytest.raises(ValueError, match="13 pairs do not fit a drafting cache of 12"):
        head.extend(state, features.repeat(2, 1)[None, :7], tokens[None, :7], torch.tensor([7]), slice(0, 1))


# ---- training and decoding on a target


@functools.cache
def make_target() -> Target:
    return Target.from_model(tiny.model("llama", num_hidden_layers=3, head_dim=24), tiny.tokenizer())


def on_target(target: Target, kind: str, draft: int | None = None, **section):
    torch.manual_seed(0)
    ids_U = None if draft is None else torch.randperm(100)[:draft].sort().values
    head = build_head({"type": kind, "draft_vocab_size": draft, "num_layers": 2, "block_size": 4} | section, target.geometry, ids_U)
    head.borrow(target.embed_VD, target.lm_head_VD)
    return head


def make_requests(lengths) -> list[Request]:
    rng = random.Random(0)
    return [Request(str(i), tuple(rng.randrange(4, 100) for _ in range(n)), seed=i) for i, n in enumerate(lengths)]


LOSSES = {"dflash": {"ce": 1.0}, "dspark": {"ce": 0.1, "tv": 0.9, "confidence": 1.0}}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_learnt_by_heart_are_drafted(kind):
    target, requests, limits, updates = make_target(), make_requests((6, 9, 4)), Limits(max_new_tokens=12, max_len=64, ignore_eos=True), 60
    answers = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    bare = [Row(r.id, "", torch.tensor([*r.prompt_ids, *c.tokens]), torch.arange(len(r.prompt_ids) + 12) >= len(r.prompt_ids))
            for r, c in zip(requests, answers, strict=True)]
    head, train = on_target(target, kind, anchors=8), TrainSection(loss_decay=math.exp(-1 / 4))
    aligned = align(target_features(target, head.taps, bare), steps=head.max_depth, supervise="answers", max_len=99)
    step = TrainStep(head, target.lm_head_VD, target.finish_logits, LOSSES[kind])
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=5e-3)
    for n in range(updates):
        kept = [head.thin(valid_TJ, torch.Generator().manual_seed(n * 8 + b)) for b, valid_TJ in enumerate(aligned.batch.valid_BTJ)]
        thinned = replace(aligned, kept_BTJ=torch.stack(kept))
        chunks = chunks_of(thinned, train, step.known_V)
        thinned = replace(thinned, batch=replace(thinned.batch, valid_BTJ=thinned.batch.valid_BTJ & thinned.kept_BTJ))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (n + 1) / 6, 2.5 * (1 - n / updates))
        value, _ = step(thinned, chunks, 3.0)
        optimizer.zero_grad()
        value.backward()
        if n in (0, 1):
            # The table of tokens starts behind a zero W2: its first gradient is the second step's.
            assert all(p.grad is not None and p.grad.isfinite().all() and (p.grad.any() or (n == 0 and "w1" in name))
                       for name, p in head.named_parameters())
        torch.nn.utils.clip_grad_norm_(head.trainable_parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        _, sums = step(aligned, chunks_of(aligned, train, step.known_V), 3.0)
    assert (sums["hits"] / sums["answers"]).tolist() == [1.0] * head.max_depth
    done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=2, plan=Plan(head.max_depth))
    assert [c.tokens for c in done] == [c.tokens for c in answers]
    # The first answer token comes with the prompt; 11 more, max_depth + 1 a round.
    assert metrics.tau(metrics.all_rounds(done)) == pytest.approx(11 / math.ceil(11 / (head.max_depth + 1)))


@torch.no_grad()
def test_the_confidence_is_a_function_of_the_state():
    head = make_head("dspark")[0]
    states = head.unroll(batch_of(ROWS), P).states[1]
    w, b = head.confidence_head.proj.weight[0], head.confidence_head.proj.bias
    assert head.confidence(states).shape == states.shape[:2] and gap(head.confidence(states), (states * w).sum(-1) + b) < 1e-5
    with pytest.raises(NotImplementedError):
        make_head("dflash")[0].confidence(states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["chain", "dynamic", "static"])
def test_greedy_output_is_the_targets(kind, shape):
    target, plan = make_target(), Plan(3, tree=SHAPES[shape])
    head = on_target(target, kind, draft=80)
    randomise(head, torch.Generator().manual_seed(1))
    requests, limits = make_requests((9, 3, 14)), Limits(max_new_tokens=10, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    for size in (1, 2):
        done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=size, plan=plan)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        assert any(r.source == "head" for c in done for r in c.rounds)


def small_head(target: Target, kind: str):
    head = build_head({"type": kind, "draft_vocab_size": 10, "num_layers": 2, "block_size": 4}, target.geometry, torch.arange(2, 12))
    randomise(head, torch.Generator().manual_seed(3), 0.3)
    head.borrow(target.embed_VD, target.lm_head_VD)
    return head


def z_of_sampled(found_by: type[HeadDrafter]) -> tuple[float, float]:
    """The martingale z of many sampled answers, and the share of drafts that were accepted."""
    target = small_target()
    asked = [Request(str(i), r.prompt_ids, seed=i) for i, r in enumerate(small_requests(*range(5, 29)) * 4)]
    found = complete(target, found_by(small_head(target, "dspark"), target), asked, Sampling(0.9), Limits(max_new_tokens=24, ignore_eos=True),
                     batch_size=48, plan=Plan(3), certificate=True, graphs=False)
    rounds = metrics.all_rounds(found)
    return metrics.martingale_z(found), sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


def test_sampled_chains_are_draws_from_the_target():
    z, accepted = z_of_sampled(HeadDrafter)
    assert abs(z) < 4 and accepted > 0.05, (z, accepted)


def test_drafts_that_were_not_drawn_from_their_q_are_noticed():
    class Biased(HeadDrafter):
        def propose(self, plan, sampling, noise):
            tree = super().propose(plan, sampling, noise)
            return tree if tree.q_BNV is None else replace(tree, q_BNV=torch.nn.functional.normalize(tree.q_BNV**3, p=1, dim=-1))

    assert abs(z_of_sampled(Biased)[0]) > 4


@pytest.mark.parametrize(("kind", "shape", "sampling"), [
    ("dflash", "static", Sampling()), ("dspark", "chain", SAMPLED)], ids=["DFlash, static tree", "DSpark, sampled chain"])
def test_replayed_captures_give_the_eager_drafts(kind, shape, sampling):
    target, plan, limits, found = small_target(), Plan(3, tree=SHAPES[shape]), Limits(14, 128, ignore_eos=True), []
    assert isinstance(target.graphs, Traced)
    for graphs in (False, True):
        drafter = HeadDrafter(small_head(target, kind), target)
        found.append(complete(target, drafter, small_requests(5, 11), sampling, limits, batch_size=2, plan=plan, graphs=graphs))
    assert target.graphs.failure is None and target.graphs.replays > 10
    assert sum(r.accepted for c in found[1] for r in c.rounds) > 1
    for eager, traced in zip(*found, strict=True):
        assert traced.tokens == eager.tokens and [r.accepted for r in traced.rounds] == [r.accepted for r in eager.rounds]


# ---- the checkpoint and the config


@pytest.mark.parametrize("kind", KINDS)
def test_names_shapes_and_config_are_the_engines_and_survive_saving(kind, tmp_path):
    head, *borrowed = make_head(kind)
    save_head(head, tmp_path / "a", HeadMeta(target="tiny"))
    saved, c = load_file(tmp_path / "a/model.safetensors"), json.loads((tmp_path / "a/config.json").read_text())
    layer = {"input_layernorm": (H,), "post_attention_layernorm": (H,), "self_attn.q_proj": (72, H), "self_attn.k_proj": (24, H),
             "self_attn.v_proj": (24, H), "self_attn.o_proj": (H, 72), "self_attn.q_norm": (12,), "self_attn.k_norm": (12,),
             "mlp.gate_proj": (40, H), "mlp.up_proj": (40, H), "mlp.down_proj": (H, 40)}
    markov = {"markov_head.markov_w1.weight": (V, 6), "markov_head.markov_w2.weight": (40, 6), "confidence_head.proj.weight": (1, H + 6),
              "confidence_head.proj.bias": (1,)}
    assert {name: tuple(t.shape) for name, t in saved.items()} == {
        "fc.weight": (H, F), "hidden_norm.weight": (H,), "norm.weight": (H,), "d2t": (40,), "t2d": (V,), **(markov if kind == "dspark" else {}),
        **{f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()},
    }
    assert c["architectures"] == [{"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[kind]] and c["model_type"] == "qwen3"
    assert c["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 2]}, "tap 1 is the output of layer 0"
    assert (c["block_size"], c["num_hidden_layers"], c["num_target_layers"], c["draft_vocab_size"], c["vocab_size"]) == (P, 2, 4, 40, V)
    assert kind == "dflash" or (c["markov_rank"], c["target_layer_ids"], c["mask_token_id"]) == (6, [0, 2], 7)
    again, meta = load_head(tmp_path / "a", geometry=geometry())
    batch = batch_of(ROWS)
    assert meta.taps == (1, 3) and again.logits(again.unroll(batch, STEPS[kind]).states[0]).isnan().any(), "borrowed: NaN until it is lent"
    again.borrow(*borrowed)
    for j, (mine, theirs) in enumerate(zip(head.unroll(batch, STEPS[kind]).states, again.unroll(batch, STEPS[kind]).states, strict=True)):
        assert torch.equal(head.logits(mine, j), again.logits(theirs, j))


def test_a_trained_lm_head_starts_as_the_targets_and_dspark_as_dflash_shifted():
    head = build_head({"type": "dspark", "freeze_lm_head": False, **SMALL}, geometry(), None)
    assert head.lm_head.weight.isnan().all()
    rows = torch.randn(V, H)
    head.borrow(torch.randn(V, H), rows)
    assert torch.equal(head.lm_head.weight, rows)
    states = head.unroll(batch_of(ROWS), P).states[0]
    assert torch.equal(head.logits(states), head.lm_head(states[..., :H])), "no bias at first"


def test_taps_and_masks_have_defaults_that_fit_the_target():
    for layers, taps in ((36, (2, 10, 18, 26, 34)), (30, (2, 9, 15, 21, 28)), (6, (2, 3, 4)), (4, (2,)), (2, (1,)), (1, (0,))):
        found = head_config({"type": "dflash"}, geometry(num_layers=layers))
        assert (found.taps, found.mask_token_id) == (taps, V - 1), layers
    assert head_config({"type": "dflash", "num_taps": 2}, geometry(num_layers=36)).taps == (2, 34)
    assert head_config({"type": "dspark"}, geometry()).block_size == 7
    for section, words in [({"mask_token_id": V}, ["head.mask_token_id is 96", "0 … 95"]), ({"block_size": 1}, ["block_size"]),
                           ({"markov_rank": 4}, ["markov_rank"]), ({"anchor": 4}, ["did you mean 'anchors'"]), ({"taps": [3, 1]}, ["head.taps"])]:
        with pytest.raises(RecipeError) as error:
            head_config({"type": "dflash"} | section, geometry())
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_unrolls_the_block_that_it_names(kind):
    recipe = Recipe.load(Path(__file__).resolve().parent.parent / f"recipes/smollm2-135m-{kind}.yaml")
    ids_U = torch.arange(8192)
    with torch.device("meta"):
        head = build_head(recipe.head, recipe.target.geometry, ids_U)
    for stage in recipe.train.unroll:
        head.check_steps(stage.steps)
    assert recipe.train.loss_decay == pytest.approx(math.exp(-1 / 4), abs=1e-4) and set(recipe.train.loss) <= set(LOSSES["dspark"]) | {"soft_ce"}
