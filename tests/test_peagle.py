"""P-EAGLE: unroll = one plain causal forward over pairs and masks = drafting; what is trained; the mutants that must break it.

tests/test_contract.py takes it through decode(), saving and over-fitting, as it does every head.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_graphs import SAMPLED, SHAPES, Traced
from test_graphs import requests as small_requests
from test_graphs import target as small_target

import tiny
from draftheads.data.features import Row
from draftheads.heads import build_head, head_config, peagle
from draftheads.heads.base import DraftBatch
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.heads.peagle import PEagle
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Limits, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, RecipeError, TrainSection
from draftheads.train.align import align
from draftheads.train.examples import target_features
from draftheads.train.step import TrainStep, chunks_of

V, H, J = 96, 32, 4


def geometry(**changes) -> Geometry:
    base = dict(hidden_size=H, intermediate_size=40, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=12, vocab_size=V, max_positions=128)
    return Geometry(**(base | changes))


def make_head(seed: int = 0, **section) -> tuple[PEagle, torch.Tensor, torch.Tensor]:
    """A head with every parameter random, and the embedding and lm_head it borrowed."""
    generator = torch.Generator().manual_seed(seed)
    ids_U = torch.randperm(V, generator=generator)[:40].sort().values
    head = build_head({"type": "peagle", "draft_vocab_size": 40, "num_layers": 3, "depths": 5} | section, geometry(), ids_U)
    embed_VD, lm_head_VD = torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator) * 0.15
    head.borrow(embed_VD, lm_head_VD)
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, 0.15, generator=generator)
    return head, embed_VD, lm_head_VD


def plain(head: PEagle, embed_VD, lm_head_VD, features_NF, tokens_N, theta: float = 10000.0) -> torch.Tensor:
    """Draft logits [J, U] behind these pairs: one causal forward over the pairs and J − 1 masks, float64, from the saved tensors."""
    w = {k: v.double() for k, v in head.state_dict().items()}
    c, eps, n = head.config, head.geometry.rms_norm_eps, len(features_NF) + J - 1
    rms = lambda x, name: x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name + ".weight"]  # noqa: E731
    lin = lambda x, name: x @ w[name + ".weight"].T  # noqa: E731
    raw = torch.cat([features_NF.double(), w["mask_hidden"].expand(J - 1, -1)])
    taps = raw.chunk(len(head.taps), -1)
    h = lin(torch.cat([rms(t, f"fc_norm.{i}") for i, t in enumerate(taps)], -1) if c.fc_norm else raw, "fc")
    e = embed_VD.double()[torch.cat([tokens_N, torch.full((J - 1,), c.mask_token_id)])]
    angle = torch.arange(n).double()[:, None] * theta ** (-torch.arange(0, c.head_dim, 2).double() / c.head_dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rope(x_NhD):
        turned = torch.complex(*x_NhD.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    for name in ["midlayer", *(f"layers.{i}" for i in range(1, c.num_layers))]:
        x = rms(h, "midlayer.hidden_norm") if name == "midlayer" else rms(h, name + ".input_layernorm")
        x = torch.cat([rms(e, "midlayer.input_layernorm"), x], -1) if name == "midlayer" else x
        q, k, v = (lin(x, f"{name}.self_attn.{p}_proj").view(n, -1, c.head_dim) for p in "qkv")
        q, k, v = rope(q), rope(k).repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5 + torch.full((n, n), float("-inf")).triu(1), -1)
        h = h + lin(torch.einsum("hqk,khd->qhd", p, v).flatten(1), f"{name}.self_attn.o_proj")
        m = rms(h, f"{name}.post_attention_layernorm")
        h = h + lin(torch.nn.functional.silu(lin(m, f"{name}.mlp.gate_proj")) * lin(m, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    ids_U = (torch.arange(len(w["d2t"])) + w["d2t"]).long()
    return rms(h[-J:], "norm") @ w.get("lm_head.weight", lm_head_VD.double()[ids_U]).T


def documents(head: PEagle, lengths, seed: int):
    """Per document: features [n, F] and tokens x_1 … x_n."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, len(head.taps) * H, generator=generator) * 2, torch.randint(V, (n,), generator=generator)) for n in lengths]


def batch_of(rows) -> DraftBatch:
    """rows: lists of documents, padded to the longest. Tokens of later steps are none of this head's business: −1."""
    B, T, F = len(rows), max(sum(len(f) for f, _ in row) for row in rows), rows[0][0][0].shape[1]
    b = DraftBatch(torch.zeros(B, T, F), torch.full((B, T, J), -1), torch.zeros(B, T, dtype=torch.long),
                   torch.full((B, T), -1), torch.zeros(B, T, J, dtype=torch.bool))
    b.tokens_BTJ[..., 0] = 0
    for r, row in enumerate(rows):
        t = 0
        for d, (features, tokens) in enumerate(row):
            n = len(features)
            b.features_BTF[r, t : t + n], b.positions_BT[r, t : t + n], b.documents_BT[r, t : t + n] = features, torch.arange(n), d
            b.tokens_BTJ[r, t : t + n, 0], b.valid_BTJ[r, t : t + n] = tokens, True
            t += n
    return b


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")


@torch.no_grad()
def unroll_gap(head: PEagle, embed_VD, lm_head_VD) -> float:
    """Every depth at every slot of padded rows of several documents against the plain forward."""
    rows = [documents(head, (5, 1, 3), 1), documents(head, (7,), 2)]
    states, worst = head.unroll(batch_of(rows), J).states, 0.0
    for r, row in enumerate(rows):
        t = 0
        for features, tokens in row:
            for i in range(len(features)):
                expected = plain(head, embed_VD, lm_head_VD, features[: i + 1], tokens[: i + 1])
                worst = max(worst, gap(torch.stack([head.logits(states[j][r, t], j) for j in range(J)]), expected))
                t += 1
    return worst


@pytest.mark.parametrize("section", [
    {}, {"num_layers": 1, "fc_norm": False}, {"num_layers": 4, "num_kv_heads": 6},
    {"freeze_lm_head": False, "mask_token_id": 3, "taps": [3, "final"]},
], ids=str)
def test_unroll_equals_one_plain_forward(section):
    assert unroll_gap(*make_head(**section)) < 1e-5


@pytest.mark.parametrize("mutant", ["rope +1", "rope -1", "a depth unseen", "mask_hidden not through fc", "another mask token", "no mask token"])
def test_mutants_of_unroll_are_seen(mutant, monkeypatch):
    head, *borrowed = make_head()
    attend, masked, right = peagle.attend_unrolled, PEagle.masked, peagle.step_positions
    if mutant.startswith("rope"):  # only depths > 0: moving all positions alike changes nothing
        monkeypatch.setattr(peagle, "step_positions", lambda p, n: right(p, n) + int(mutant[-2:]) * (torch.arange(n) > 0)[:, None, None])
    elif mutant == "a depth unseen":
        less = lambda x: x[:1] + x[2:] if len(x) > 2 else x  # noqa: E731
        monkeypatch.setattr(peagle, "attend_unrolled", lambda q, k, v, m: attend(q, less(k), less(v), m))
    elif mutant == "mask_hidden not through fc":
        monkeypatch.setattr(PEagle, "masked", lambda self: (masked(self)[0], self.mask_hidden[None, :, :H]))
    elif mutant == "another mask token":
        monkeypatch.setattr(PEagle, "masked", lambda self: (self.embed(torch.tensor([[5]])), masked(self)[1]))
    else:
        monkeypatch.setattr(PEagle, "masked", lambda self: (masked(self)[0] * 0, masked(self)[1]))
    assert unroll_gap(head, *borrowed) > 1e-3


# ---- drafting


@torch.no_grad()
def drafting_gap(head: PEagle, seed: int = 0, captured: bool = False) -> float:
    """Three texts extended in uneven pieces, some of them none; after each a draft against `unroll`. captured: with slots.view set."""
    rng, generator, B, M, everyone = random.Random(seed), torch.Generator().manual_seed(seed), 3, 4, slice(0, 3)
    texts = documents(head, (9, 5, 8), seed)
    states = head.unroll(batch_of([[t] for t in texts]), J).states
    state, done, worst = head.new_state(B + 1, 12, 16), [0] * B, 0.0
    while any(n < len(f) for n, (f, _) in zip(done, texts, strict=True)):
        counts = [min(rng.randint(0 if sum(done) else 1, M), len(f) - n) for n, (f, _) in zip(done, texts, strict=True)]
        width = M if captured else max(1, *counts)
        features_BMF = torch.randn(B, width, texts[0][0].shape[1], generator=generator)  # padding is garbage on purpose
        tokens_BM = torch.randint(V, (B, width), generator=generator)
        for b, (features, tokens) in enumerate(texts):
            features_BMF[b, : counts[b]], tokens_BM[b, : counts[b]] = (x[done[b] : done[b] + counts[b]] for x in (features, tokens))
        if captured:
            state.slots.view = len(state.slots.index_S) - 1
        head.extend(state, features_BMF, tokens_BM, torch.tensor(counts), everyone)
        done = [n + count for n, count in zip(done, counts, strict=True)]
        for depth in (2, J, 1, J):  # the last begun forgets the ones before
            found = [head.begin(state, everyone, depth)]
            for d in range(1, depth):
                level_BWU = head.step(state, torch.randint(V, (B, 2)), torch.zeros(B, 2, dtype=torch.long), everyone)
                assert torch.equal(level_BWU[:, 0], level_BWU[:, 1]), "nothing depends on what was drafted"
                found.append(level_BWU[:, 1])
                assert len(found) == d + 1
            expected = [torch.stack([head.logits(states[j][b, done[b] - 1], j) for b in range(B)]) for j in range(depth)]
            worst = max([worst, *map(gap, found, expected)])
        if captured:
            state.slots.view = None
            state.slots.lengths[everyone] = [n + count for n, count in zip(state.slots.lengths[everyone], counts, strict=True)]
    return worst


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("section", [{}, {"num_layers": 1, "fc_norm": False}], ids=str)
def test_drafting_equals_unroll(section, captured):
    assert max(drafting_gap(make_head(seed, **section)[0], seed, captured) for seed in range(2)) < 1e-5


@pytest.mark.parametrize("mutant", ["rope", "deeper masks are seen"])
def test_mutants_of_drafting_are_seen(mutant, monkeypatch):
    head, rope, tril = make_head()[0], peagle.DraftSlots.rope, torch.Tensor.tril
    if mutant == "rope":  # the masked tokens' positions only: the last query's stay
        monkeypatch.setattr(PEagle, "_causal", shifted(PEagle._causal, rope, monkeypatch))
    else:
        monkeypatch.setattr(torch.Tensor, "tril", lambda x, *a: torch.ones_like(x) if x.dim() == 2 else tril(x, *a))
    assert drafting_gap(head) > 1e-3


def shifted(causal, rope, monkeypatch):
    """PEagle._causal, whose drafts (not its pairs) sit a position too far."""

    def wrong(self, slots, rows, e, h, count):
        if count < self.config.num_layers:
            return causal(self, slots, rows, e, h, count)
        with monkeypatch.context() as patch:
            patch.setattr(peagle.DraftSlots, "rope", lambda s, rows, offset, n=1: rope(s, rows, offset + 1, n))
            return causal(self, slots, rows, e, h, count)

    return wrong


def test_a_draft_has_no_more_levels_than_were_begun():
    head = make_head()[0]
    state, zero_11 = head.new_state(1, 8), torch.zeros(1, 1, dtype=torch.long)
    head.extend(state, torch.randn(1, 2, 3 * H), zero_11.expand(1, 2), torch.tensor([2]), slice(0, 1))
    head.begin(state, slice(0, 1), 2)
    head.step(state, zero_11, zero_11, slice(0, 1))
    with pytest.raises(ValueError, match="2 levels"):
        head.step(state, zero_11, zero_11, slice(0, 1))
    head.begin(state, slice(0, 1))
    for _ in range(head.max_depth - 1):
        head.step(state, zero_11, zero_11, slice(0, 1))
    with pytest.raises(ValueError, match="7 pairs do not fit a drafting cache of 6"):
        head.extend(head.new_state(1, 6), torch.randn(1, 7, 3 * H), zero_11.expand(1, 7), torch.tensor([7]), slice(0, 1))


@pytest.mark.parametrize(("shape", "sampling"), [("chain", Sampling()), ("dynamic", Sampling()), ("static", Sampling()), ("sampled", SAMPLED)])
def test_replayed_rounds_give_the_eager_answer(shape, sampling):
    replayed = small_target()
    assert isinstance(replayed.graphs, Traced)
    torch.manual_seed(3)
    head = build_head({"type": "peagle", "draft_vocab_size": 10, "taps": [1, 2, 3], "num_layers": 2}, replayed.geometry, torch.arange(2, 12))
    for p in head.parameters():
        p.data.normal_(0, 0.3)
    asked, limits, plan, found = small_requests(5, 11), Limits(16, 128, ignore_eos=True), Plan(3, tree=SHAPES[shape]), {}
    for graphs in (False, True):
        found[graphs] = complete(replayed, HeadDrafter(head, replayed), asked, sampling, limits, batch_size=2, plan=plan, graphs=graphs)
    assert replayed.graphs.failure is None and replayed.graphs.replays > 4
    for eager, traced in zip(found[False], found[True], strict=True):
        assert traced.tokens == eager.tokens and [r.accepted for r in traced.rounds] == [r.accepted for r in eager.rounds]
    if sampling.temperature == 0:
        bare = complete(replayed, NoDrafter(), asked, sampling, limits, batch_size=2, graphs=False)
        assert [c.tokens for c in bare] == [c.tokens for c in found[False]]


# ---- training


def test_thinning_is_nested_and_repeatable():
    head = make_head(cod_ratio=0.7)[0]
    valid_TJ = torch.rand(4000, J, generator=torch.Generator().manual_seed(0)).cummin(1).values > 0.2
    kept_TJ, again_TJ, other_TJ = (head.thin(valid_TJ, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(kept_TJ, again_TJ) and not torch.equal(kept_TJ, other_TJ)
    assert torch.equal(kept_TJ[:, 0], valid_TJ[:, 0]) and not (kept_TJ & ~valid_TJ).any()
    assert not (kept_TJ[:, 1:] & ~kept_TJ[:, :-1] & valid_TJ[:, :-1]).any()
    torch.testing.assert_close(kept_TJ.sum(0) / valid_TJ.sum(0), 0.7 ** torch.arange(J), atol=0.04, rtol=0)
    assert torch.equal(make_head(cod_ratio=1.0)[0].thin(valid_TJ, torch.Generator()), valid_TJ)


def test_the_thinned_loss_is_the_whole_one_with_another_decay():
    """Exactly so at cod_ratio 1; else in expectation, as the loss is linear in the weights of its slots."""
    target = Target.from_model(tiny.model(num_hidden_layers=4), tiny.tokenizer())
    ids_L = torch.randint(0, 100, (40,), generator=torch.Generator().manual_seed(0))
    rows = target_features(target, (1, 2, 3), [Row("a", "", ids_L, torch.arange(40) >= 10)])
    head = build_head({"type": "peagle", "taps": [1, 2, 3], "num_layers": 2, "cod_ratio": 1.0}, target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    step, train = TrainStep(head, target.lm_head_VD, target.finish_logits), TrainSection(loss_decay=0.9)
    aligned = align(rows, steps=J, supervise="answers", max_len=99)
    whole = chunks_of(aligned, train, step.known_V)
    kept = replace(aligned, kept_BTJ=head.thin(aligned.batch.valid_BTJ[0], torch.Generator())[None])
    losses = [step(a, chunks_of(a, train, step.known_V), 1.0)[0] for a in (aligned, kept)]
    assert torch.equal(*losses)
    losses[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.trainable_parameters())

    head.config = head.config.model_copy(update={"cod_ratio": 0.7})
    total_J, draws, generator = torch.zeros(J), 300, torch.Generator().manual_seed(0)
    for _ in range(draws):
        kept = replace(aligned, kept_BTJ=head.thin(aligned.batch.valid_BTJ[0], generator)[None])
        total_J += sum(c.weights_JC.sum(1) for c in chunks_of(kept, train, step.known_V))
    torch.testing.assert_close(total_J / draws, sum(c.weights_JC.sum(1) for c in whole) * 0.7 ** torch.arange(J), atol=0.03, rtol=0)


# ---- files and settings


def test_files_say_what_vllm_reads(tmp_path):
    head, *borrowed = make_head()
    save_head(head, tmp_path / "ckpt", HeadMeta(target="x"))
    again, _ = load_head(tmp_path / "ckpt", geometry=geometry())
    again.borrow(*borrowed)
    assert unroll_gap(again, *borrowed) < 1e-5
    names = head.state_dict()
    assert names["mask_hidden"].shape == (1, 3 * H)
    assert {n.split(".")[1] for n in names if n.startswith("layers.")} == {"1", "2"} and "midlayer.hidden_norm.weight" in names
    config = head.engine_config()
    assert config["num_hidden_layers"] == 3 and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["mask_token_id"] == config["pard_token"] == config["ptd_token_id"] == V - 1


def test_settings_that_cannot_be():
    for section, words in [({"mask_token_id": V}, f"0 … {V - 1}"), ({"cod_ratio": 0.0}, "cod_ratio"), ({"num_layers": 0}, "num_layers"),
                           ({"norm_output": True}, "norm_output"), ({"depth": 3}, "did you mean 'depths'")]:
        with pytest.raises(RecipeError, match=words) as error:
            head_config({"type": "peagle"} | section, geometry())
        assert "\n" not in str(error.value)
    head = make_head()[0]
    head.check_steps(5)
    with pytest.raises(RecipeError, match="6 unroll steps, head.depths is 5"):
        head.check_steps(6)
