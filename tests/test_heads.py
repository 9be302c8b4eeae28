"""EAGLE-3 and 3.1: unroll = an independent forward = stepwise drafting, and the mutants that must break it.

Every parameter is random (norms too), the geometry is awkward (head_dim ≠ hidden/heads, grouped queries, reduced vocabulary), rows are padded
and hold several documents.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny
from draftheads.heads import build_head, head_config, head_types
from draftheads.heads.base import DraftBatch
from draftheads.heads.eagle3 import Eagle3
from draftheads.heads.losses import Slots, Teacher, soft_ce
from draftheads.heads.slots import DraftSlots
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.noise import Noise
from draftheads.inference.requests import Limits, Request, Sampling
from draftheads.inference.sampling import log_probs
from draftheads.recipes.schema import Geometry, RecipeError

V, H, J = 128, 64, 4
VARIANTS = {"eagle3": (False, False), "eagle3.1": (True, True), "fc_norm only": (True, False)}


def geometry(**changes) -> Geometry:
    base = dict(hidden_size=H, intermediate_size=80, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=24, vocab_size=V, max_positions=256)
    return Geometry(**(base | changes))


def make_head(variant="eagle3.1", seed: int = 0, geo: Geometry | None = None, draft_ids=None, **section):
    """A head with every parameter random, and the embedding and lm_head it borrowed."""
    generator = torch.Generator().manual_seed(seed)
    fc_norm, norm_output = VARIANTS[variant]
    if draft_ids is None:
        draft_ids = torch.randperm(V, generator=generator)[:50].sort().values
    head = build_head({"type": "eagle3", "draft_vocab_size": len(draft_ids), "fc_norm": fc_norm, "norm_output": norm_output} | section,
                      geo or geometry(), draft_ids)
    embed_VD, lm_head_VD = torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator) * 0.15
    head.borrow(embed_VD, lm_head_VD)
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, 0.12, generator=generator)
    return head, embed_VD, lm_head_VD


def reference(head: Eagle3, embed_VD, lm_head_VD, features_NF, tokens_N, drafted, theta: float = 10000.0, argmax: int = 0) -> list[torch.Tensor]:
    """Draft logits over the target's vocabulary (−inf outside the draft's) after the pairs (features, tokens), then after each drafted token.

    Reads nothing but the saved tensors; one plain causal layer, run whole again for every token. argmax: draft that many tokens greedily."""
    w, c, eps = {k: v.double() if v.is_floating_point() else v for k, v in head.state_dict().items()}, head.config, head.geometry.rms_norm_eps
    ids_U = torch.arange(len(w["d2t"])) + w["d2t"]
    rms = lambda x, name: x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name + ".weight"]  # noqa: E731
    lin = lambda x, name: x @ w[name + ".weight"].T  # noqa: E731
    D, Q, K = c.head_dim, c.num_heads, c.num_kv_heads

    def rope(x_NhD):
        angle = torch.arange(len(x_NhD)).double()[:, None] * theta ** (-torch.arange(0, D, 2).double() / D)
        turned = torch.complex(x_NhD[..., : D // 2], x_NhD[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    taps = features_NF.double().chunk(len(head.taps), -1)
    fused = torch.cat([rms(t, f"fc_norm.{i}") for i, t in enumerate(taps)] if c.fc_norm else taps, -1)
    g_NH = lin(rms(fused, "input_norm") if c.norm_before_fc else fused, "fc") + w.get("fc.bias", 0)
    e_NH, found, drafted = embed_VD.double()[tokens_N], [], list(drafted)
    while True:
        x = torch.cat([rms(e_NH, "midlayer.input_layernorm"), rms(g_NH, "midlayer.hidden_norm")], -1)
        q, k, v = (lin(x, f"midlayer.self_attn.{n}_proj").view(len(x), -1, D) for n in "qkv")
        q, k, v = rope(q), rope(k).repeat_interleave(Q // K, 1), v.repeat_interleave(Q // K, 1)
        p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / D**0.5 + torch.full((len(x), len(x)), float("-inf")).triu(1), -1)
        r_NH = rms(g_NH, "midlayer.hidden_norm") if c.norm_before_residual else g_NH
        h = r_NH + lin(torch.einsum("hqk,khd->qhd", p, v).flatten(1), "midlayer.self_attn.o_proj")
        m = rms(h, "midlayer.post_attention_layernorm")
        out = h + lin(torch.nn.functional.silu(lin(m, "midlayer.mlp.gate_proj")) * lin(m, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
        logits_U = rms(out[-1], "norm") @ w.get("lm_head.weight", lm_head_VD.double()[ids_U]).T
        found.append(torch.full((V,), float("-inf")).double().index_copy(0, ids_U, logits_U))
        if argmax and len(found) < argmax:
            drafted.append(int(found[-1].argmax()))
        if len(found) > len(drafted):
            return found
        g_NH = torch.cat([g_NH, (rms(out[-1:], "norm") if c.norm_output else out[-1:])])
        e_NH = torch.cat([e_NH, embed_VD.double()[drafted[len(found) - 1]][None]])


def documents(lengths, seed: int, F: int = 3 * H):
    """Per document: features [n, F] and tokens x_1 … x_{n+J} (the token at index i is x_{i+1}, paired with feature i)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, F, generator=generator) * 3, torch.randint(V, (n + J,), generator=generator)) for n in lengths]


def batch_of(rows, shift: int = 0) -> DraftBatch:
    """rows: lists of documents; padded to the longest. shift ≠ 0 is the classical mistake: tokens one off against features."""
    T = max(sum(len(f) for f, _ in row) for row in rows)
    B, F = len(rows), rows[0][0][0].shape[1]
    b = DraftBatch(torch.zeros(B, T, F), torch.zeros(B, T, J, dtype=torch.long), torch.zeros(B, T, dtype=torch.long),
                   torch.full((B, T), -1), torch.zeros(B, T, J, dtype=torch.bool))
    for r, row in enumerate(rows):
        t = 0
        for d, (features, tokens) in enumerate(row):
            n = len(features)
            b.features_BTF[r, t : t + n], b.positions_BT[r, t : t + n], b.documents_BT[r, t : t + n] = features, torch.arange(n), d
            moved = tokens.roll(-shift)
            b.tokens_BTJ[r, t : t + n] = torch.stack([moved[j : j + n] for j in range(J)], 1)
            b.valid_BTJ[r, t : t + n] = True
            t += n
    return b


def scattered(head: Eagle3, states: torch.Tensor) -> torch.Tensor:
    logits_U = head.logits(states).detach()
    return torch.full((V,), float("-inf")).index_copy(0, head.target_ids_U(), logits_U)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; infinite where the draft vocabularies differ."""
    difference = (a.double() - b.double()).nan_to_num(0.0, posinf=float("inf"), neginf=float("-inf"))
    return float(difference.abs().max())


def unroll_gap(head, embed_VD, lm_head_VD, rows, shift: int = 0) -> float:
    """unroll against the reference, every step, every slot of every document."""
    states = head.unroll(batch_of(rows, shift), J).states
    worst = 0.0
    for r, row in enumerate(rows):
        t = 0
        for features, tokens in row:
            for i in range(len(features)):
                expected = reference(head, embed_VD, lm_head_VD, features[: i + 1], tokens[: i + 1], tokens[i + 1 : i + J].tolist())
                worst = max([worst, *(gap(scattered(head, states[j][r, t + i]), expected[j]) for j in range(J))])
            t += len(features)
    return worst


ROWS = [documents([7, 1, 4], 1), documents([9], 2), documents([3, 3], 3)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_unroll_equals_an_independent_forward(variant):
    assert unroll_gap(*make_head(variant), ROWS) < 1e-5


# Forms that published heads have.
FORMS = [{"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_bias": True},
         {"norm_before_residual": True, "norm_before_fc": True, "fc_bias": True, "norm_output": True}]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_other_forms_equal_an_independent_forward(form):
    head, *borrowed = make_head("eagle3", **form)
    assert unroll_gap(head, *borrowed, ROWS) < 1e-5
    for name in {"norm_before_residual", "norm_before_fc"} & set(form):  # the reference without it: what a head computes that forgot it
        head.config = head.config.model_copy(update={name: False})
        assert unroll_gap(head, *borrowed, ROWS) > 1e-3, name
        head.config = head.config.model_copy(update={name: True})


def test_taps_are_normed_once():
    with pytest.raises(RecipeError, match="norm the taps twice"):
        make_head("eagle3.1", norm_before_fc=True)


@pytest.mark.parametrize("section", [{"num_kv_heads": 6}, {"num_kv_heads": 1, "head_dim": 10}, {"taps": [0, 7, "final"]}, {"taps": [3]},
                                     {"freeze_lm_head": False}])
def test_unroll_of_other_shapes(section):
    head, *borrowed = make_head(**section)
    F = len(head.taps) * H
    assert unroll_gap(head, *borrowed, [documents([5, 2], 4, F), documents([6], 5, F)]) < 1e-5


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("mutant", ["shift +1", "shift -1", "rope +1", "rope -1", "pre/post norm", "normed residual", "d2t"])
def test_mutants_of_unroll_are_seen(variant, mutant, monkeypatch):
    from draftheads.heads import eagle3

    head, *borrowed = make_head(variant)
    rows, shift = ROWS[:2], 0
    if mutant.startswith("shift"):
        shift = int(mutant[-2:])
    elif mutant.startswith("rope"):
        # Only the drafted steps: moving all positions alike changes nothing.
        right, by = eagle3.step_positions, int(mutant[-2:])
        monkeypatch.setattr(eagle3, "step_positions", lambda p, n: right(p, n) + by * (torch.arange(n) > 0)[:, None, None])
    elif mutant == "pre/post norm":
        monkeypatch.setattr(Eagle3, "outputs", lambda self, out: ((out if self.config.norm_output else self.norm(out)), self.norm(out)))
    elif mutant == "normed residual":
        finish = eagle3.MidLayer.finish
        monkeypatch.setattr(eagle3.MidLayer, "finish", lambda self, a, g: finish(self, a, self.hidden_norm(g)))
    else:
        monkeypatch.setattr(Eagle3, "target_ids_U", lambda self: torch.arange(len(self.d2t)))
    assert unroll_gap(head, *borrowed, rows, shift) > 1e-3


def drafting_gap(head: Eagle3, seed: int, stale: bool = False) -> float:
    """new_state, extend in random chunks, a draft of the document's own tokens, against unroll. Between two extends the cache is
    littered by drafting wrong tokens. stale: the mutant whose extend leaves drafted entries where they are."""
    rng = random.Random(seed)
    rows = [documents([n], seed + n) for n in (11, 6, 9)]
    expected = head.unroll(batch_of(rows), J).states
    B = len(rows)
    state, done = head.new_state(B + 1, 16), [0] * B
    everyone, worst = slice(0, B), 0.0
    while any(done[b] < len(rows[b][0][0]) for b in range(B)):
        counts = [min(rng.randint(0 if sum(done) else 1, 4), len(rows[b][0][0]) - done[b]) for b in range(B)]
        M = max(max(counts), 1)
        features_BMF, tokens_BM = torch.randn(B, M, 3 * H), torch.randint(V, (B, M))  # padding is garbage on purpose
        for b, ((features, tokens),) in enumerate(rows):
            features_BMF[b, : counts[b]], tokens_BM[b, : counts[b]] = features[done[b] : done[b] + counts[b]], tokens[done[b] : done[b] + counts[b]]
        before = state.slots.keys_LBKSD[0].clone(), state.slots.values_LBKSD[0].clone()
        head.extend(state, features_BMF, tokens_BM, torch.tensor(counts), everyone)
        if stale:
            for b in range(B):
                kept = slice(done[b], done[b] + min(counts[b], 2)) if done[b] else slice(0, 0)
                state.slots.keys_LBKSD[0, b, :, kept], state.slots.values_LBKSD[0, b, :, kept] = before[0][b, :, kept], before[1][b, :, kept]
        done = [d + c for d, c in zip(done, counts, strict=True)]
        if min(done) == 0:
            continue
        seen = draft(head, state, everyone, [torch.stack([rows[b][0][1][done[b] + j] for b in range(B)]) for j in range(J - 1)])
        worst = max([worst, *(gap(seen[j][b], head.logits(expected[j][b, done[b] - 1])) for j in range(J) for b in range(B))])
        draft(head, state, everyone, [torch.randint(V, (B,)) for _ in range(2)])
    return worst


def draft(head, state, rows, tokens):
    """The draft logits [B, U] before and after each forced token of a chain."""
    seen = [head.begin(state, rows)]
    for tokens_B in tokens:
        seen.append(head.step(state, tokens_B[:, None], torch.zeros_like(tokens_B)[:, None], rows)[:, 0])
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_drafting_equals_unroll(variant, seed):
    head, *_ = make_head(variant, seed)
    with torch.no_grad():
        assert drafting_gap(head, seed) < 1e-5


def test_a_stale_draft_cache_is_seen():
    head, *_ = make_head()
    with torch.no_grad():
        assert drafting_gap(head, 0, stale=True) > 1e-3


def test_drafting_rope_mutant_is_seen(monkeypatch):
    """A cache whose drafted tokens sit one position too far."""
    head, *_ = make_head()
    rope = DraftSlots.rope
    # Drafted keys and queries only: extend asks with offset 0 (keys) and −1 (the last pair's query).
    monkeypatch.setattr(DraftSlots, "rope", lambda self, rows, offset, count=1: rope(self, rows, offset + (count == 1 and offset >= 1), count))
    with torch.no_grad():
        assert drafting_gap(head, 0) > 1e-3


def test_move_and_clear():
    head, *_ = make_head()
    state = head.new_state(3, 16)
    features_BMF, tokens_BM = torch.randn(2, 5, 3 * H), torch.randint(V, (2, 5))
    head.extend(state, features_BMF, tokens_BM, torch.tensor([3, 5]), slice(0, 2))
    forced = [torch.tensor([5]), torch.tensor([7])]
    before = draft(head, state, slice(1, 2), forced)
    head.move(state, 1, 0)
    assert all(torch.equal(x, y) for x, y in zip(before, draft(head, state, slice(0, 1), forced), strict=True))
    head.clear(state, 0)
    head.extend(state, features_BMF[1:], tokens_BM[1:], torch.tensor([5]), slice(0, 1))
    torch.testing.assert_close(before, draft(head, state, slice(0, 1), forced))  # extended alone: other rounding


def test_every_trained_parameter_gets_a_gradient_and_padding_none():
    for freeze in (True, False):
        head, *_ = make_head(freeze_lm_head=freeze)
        batch = batch_of(ROWS)
        batch.features_BTF.requires_grad_()
        unrolled = head.unroll(batch, J)
        sum(head.logits(s[batch.documents_BT >= 0]).square().mean() for s in unrolled.states).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in head.trainable_parameters())
        assert len(head.trainable_parameters()) == 16 - freeze
        assert batch.features_BTF.grad[batch.documents_BT < 0].abs().max() == 0


def test_borrowed_weights_are_nan_until_lent_and_never_saved():
    for freeze in (True, False):
        head = build_head({"type": "eagle3", "draft_vocab_size": 50, "freeze_lm_head": freeze}, geometry())
        assert head.logits(head.unroll(batch_of(ROWS), 1).states[0]).isnan().all()
        assert not any("embed" in name for name in head.state_dict())
        assert ("lm_head.weight" in head.state_dict()) == (not freeze)
        embed_VD, lm_head_VD = torch.randn(V, H), torch.randn(V, H)
        head.borrow(embed_VD, lm_head_VD)
        assert head.embed_VD.data_ptr() == embed_VD.data_ptr(), "the embedding is shared, not copied"
        assert torch.equal(head.lm_head.weight, lm_head_VD[head.target_ids_U()])
        # A second loan replaces borrowed rows and leaves trained ones alone.
        head.borrow(embed_VD, lm_head_VD + 1)
        assert torch.equal(head.lm_head.weight, lm_head_VD[head.target_ids_U()] + freeze)


def test_rope_is_the_targets_and_survives_a_cast():
    for parameters in ({"rope_type": "default", "rope_theta": 1e5},
                       {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64}):
        model = tiny.model("llama", num_hidden_layers=1, head_dim=24, rope_parameters=parameters)
        head, *_ = make_head(geo=geometry(rope_parameters=parameters))
        positions_BT = torch.arange(200)[None]
        expected = model.model.rotary_emb(torch.zeros(1), positions_BT)
        assert all(torch.allclose(a, b) for a, b in zip(head.cos_sin(positions_BT), expected, strict=True))
        cos, _ = head.bfloat16().cos_sin(positions_BT)
        assert torch.allclose(cos.float(), expected[0], atol=1e-2)


def test_unroll_under_bfloat16_autocast_is_close_and_silent():
    head, *_ = make_head()
    batch = batch_of(ROWS)
    exact = head.unroll(batch, J).states
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        rough = head.unroll(batch, J).states
    real_BT = batch.documents_BT >= 0
    assert all((a - b.float())[real_BT].norm() < 0.05 * a[real_BT].norm() for a, b in zip(exact, rough, strict=True))


def test_making_a_drafter_draws_no_random_numbers():
    head, *borrowed = make_head()
    before = torch.get_rng_state()
    HeadDrafter(head, stub_target(*borrowed))
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.requires_grad for p in head.parameters())


def test_config_errors_are_one_line_and_name_the_cure():
    assert "eagle3" in head_types()
    deep, shallow = geometry(), geometry(num_layers=4)
    assert head_config({"type": "eagle3"}, deep).taps == (2, 4, 5)
    assert head_config({"type": "eagle3", "taps": [1, 2, 3]}, shallow).taps == (1, 2, 3)
    for section, geo, words in [
        ({"type": "eagle3"}, shallow, ["head.taps", "[2, 2, 1]", "4 layers", "set head.taps"]),
        ({"type": "eagle3"}, geometry(num_layers=2), ["head.taps"]),
        ({"type": "eagle3", "taps": [1, 1, 3]}, deep, ["distinct"]),
        ({"type": "eagle3", "taps": [5, 3]}, deep, ["rising"]),
        ({"type": "eagle3", "taps": [2, 8]}, deep, ["0 … 7"]),
        ({"type": "eagle3", "taps": []}, deep, ["head.taps"]),
        ({"type": "eagle3", "draft_vocab_size": 129}, deep, ["129", "128"]),
        ({"type": "eagle3", "hidden_size": 32}, deep, ["32", "64"]),
        ({"type": "eagle3", "num_kv_heads": 4}, deep, ["multiple"]),
        ({"type": "eagle3", "draft_vocab": 8}, deep, ["did you mean 'draft_vocab_size'"]),
        ({"type": "egale3"}, deep, ["did you mean 'eagle3'"]),
        ({}, deep, ["head.type"]),
    ]:
        with pytest.raises(RecipeError) as error:
            head_config(section, geo)
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), str(error.value)
    for ids in (torch.tensor([1, 2]), torch.tensor([3, 2, 1]), torch.tensor([1, 1, 2]), torch.tensor([1, 2, V])):
        with pytest.raises(RecipeError):
            build_head({"type": "eagle3", "draft_vocab_size": 3}, deep, ids)


def test_losses_against_their_definition():
    generator = torch.Generator().manual_seed(0)
    teacher_MV, draft_MU = torch.randn(6, 20, generator=generator) * 3, (torch.randn(6, 8, generator=generator) * 2).requires_grad_()
    ids_U, lse_M = torch.arange(3, 11), teacher_MV.logsumexp(-1)
    p_MU = teacher_MV.softmax(-1)[:, ids_U]
    labels_M = torch.tensor([0, 3, -1, 7, 2, 2])
    slots = Slots(draft_MU, Teacher(teacher_MV[:, ids_U], lse_M, labels_M))
    loss_M = soft_ce(slots)
    expected_M = -(p_MU * draft_MU.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss_M, expected_M)
    grads = [torch.autograd.grad(x.sum(), draft_MU, retain_graph=True)[0] for x in (loss_M, expected_M)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(slots.alpha_M, torch.minimum(p_MU, draft_MU.softmax(-1)).sum(-1))
    assert torch.allclose(Slots(teacher_MV, Teacher(teacher_MV, lse_M, labels_M)).alpha_M, torch.ones(6))


# ---- HeadDrafter


def stub_target(embed_VD, lm_head_VD, geo=None, usable: int = V):
    return SimpleNamespace(geometry=geo or geometry(), embed_VD=embed_VD, lm_head_VD=lm_head_VD, device=torch.device("cpu"),
                           dtype=torch.float32, tokenizer=range(usable))


class Rows:
    """A stand-in for decode: rows with endless random documents, of which `drafter` is shown what `decode` would show."""

    def __init__(self, drafter: HeadDrafter, lengths, seed: int = 0):
        self.drafter, self.documents = drafter, documents([400] * len(lengths), seed)
        drafter.reset(len(lengths) + 1, 512, torch.device("cpu"))
        self.pairs = list(lengths)
        for b, n in enumerate(lengths):
            features, tokens = self.documents[b]
            drafter.start(b, torch.cat([torch.tensor([0]), tokens[: n - 1]]), int(tokens[n - 1]), features[:n])

    def observe(self, counts):
        M = max(counts)
        features, tokens = zip(*[(f[p : p + M], t[p : p + M]) for p, (f, t) in zip(self.pairs, self.documents, strict=True)], strict=True)
        self.drafter.observe(torch.stack(tokens), torch.tensor(counts), torch.stack(features))
        self.pairs = [p + c for p, c in zip(self.pairs, counts, strict=True)]

    def propose(self, gamma: int, sampling=None, room=None, seeds=None):
        seeds_B = torch.tensor(seeds or range(len(self.pairs)))
        return self.drafter.propose(Plan(gamma, room), sampling or Sampling(), Noise(seeds_B, torch.tensor(self.pairs)))

    def expected(self, head, borrowed, b: int, gamma: int):
        features, tokens = self.documents[b]
        return reference(head, *borrowed, features[: self.pairs[b]], tokens[: self.pairs[b]], [], argmax=gamma)


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
def test_drafter_proposes_what_the_reference_drafts(variant):
    head, *borrowed = make_head(variant)
    rows, rng = Rows(HeadDrafter(head, stub_target(*borrowed)), [5, 30, 1]), random.Random(1)
    for _ in range(12):
        if rng.random() < 0.6:  # else the head is idle: a composite's other part served the round
            room = tuple(rng.randint(0, 5) for _ in rows.pairs)
            tree = rows.propose(4, room=room)
            for b in range(3):
                assert tree.valid_BN[b].sum() - 1 == min(4, room[b]), "every row drafts as much as it has room for"
                assert tree.tokens_BN[b, 0] == rows.documents[b][1][rows.pairs[b] - 1]
                expected = [int(x.argmax()) for x in rows.expected(head, borrowed, b, 4)]
                assert tree.tokens_BN[b, 1:][tree.valid_BN[b, 1:]].tolist() == expected[: min(4, room[b])]
            assert tree.q_BNV is None
            assert tree.source_B == ["head" if r else "none" for r in room]
        rows.observe([rng.randint(1, 5) for _ in rows.pairs])
    # A row leaves, the last one takes its slot, another prompt begins.
    rows.drafter.move(2, 0)
    rows.pairs[0], rows.documents[0] = rows.pairs[2], rows.documents[2]
    features, tokens = documents([400], 99)[0]
    rows.drafter.start(2, torch.cat([torch.tensor([0]), tokens[:19]]), int(tokens[19]), features[:20])
    rows.pairs[2], rows.documents[2] = 20, (features, tokens)
    for _ in range(3):
        tree = rows.propose(3)
        assert tree.tokens_BN[:, 1:].tolist() == [[int(x.argmax()) for x in rows.expected(head, borrowed, b, 3)] for b in range(3)]
        rows.observe([2, 1, 4])


def test_missing_d2t_is_seen():
    head, *borrowed = make_head()
    rows = Rows(HeadDrafter(head, stub_target(*borrowed)), [5])
    rows.drafter.vocab = replace(rows.drafter.vocab, ids_U=torch.arange(50))
    assert rows.propose(3).tokens_BN[0, 1:].tolist() != [int(x.argmax()) for x in rows.expected(head, borrowed, 0, 3)]


def test_a_long_idle_time_is_bounded_and_never_stale():
    head, *borrowed = make_head(geo=geometry(max_positions=4096))
    rows = Rows(HeadDrafter(head, stub_target(*borrowed, geometry(max_positions=4096))), [3])
    rows.documents = documents([1500], 7)
    rows.drafter.reset(2, 2048, torch.device("cpu"))
    features, tokens = rows.documents[0]
    rows.drafter.start(0, torch.cat([torch.tensor([0]), tokens[:2]]), int(tokens[2]), features[:3])
    for _ in range(280):
        rows.observe([5])
        assert rows.drafter.rows[0].waiting() <= 520
    assert rows.propose(3).tokens_BN[0, 1:].tolist() == [int(x.argmax()) for x in rows.expected(head, borrowed, 0, 3)]


def test_sampled_drafts_come_with_the_exact_q():
    head, *borrowed = make_head()
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9)
    rows = Rows(HeadDrafter(head, stub_target(*borrowed)), [5, 9])
    tree = rows.propose(3, sampling)
    assert tree.q_BNV is not None
    for b in range(2):
        features, tokens = rows.documents[b]
        drafts = tree.tokens_BN[b, 1:].tolist()
        logits = reference(head, *borrowed, features[: rows.pairs[b]], tokens[: rows.pairs[b]], drafts[:-1])
        for i, token in enumerate(drafts):
            expected_V = log_probs(logits[i], 0.7, 20, 0.9).exp()
            torch.testing.assert_close(tree.q_BNV[b, i + 1], expected_V, atol=1e-5, rtol=1e-4)
            assert tree.q_BNV[b, i + 1, token] > 0
    alone = Rows(HeadDrafter(head, stub_target(*borrowed)), [5])
    assert torch.equal(alone.propose(3, sampling).tokens_BN[0], tree.tokens_BN[0]), "a row's draws do not depend on its batch-mates"
    # The draws follow q: first tokens of many seeds.
    many = [int(alone.propose(1, sampling, seeds=[s]).tokens_BN[0, 1]) for s in range(600)]
    frequency_V = torch.bincount(torch.tensor(many), minlength=V) / 600
    assert (frequency_V - tree.q_BNV[0, 1]).abs().max() < 0.07


def test_greedy_and_sampled_rows_in_one_batch():
    from draftheads.inference.sampling import RowSampling

    head, *borrowed = make_head()
    rows = Rows(HeadDrafter(head, stub_target(*borrowed)), [5, 9])
    tree = rows.propose(3, RowSampling.of([0.0, 0.8], Sampling()))
    assert tree.tokens_BN[0, 1:].tolist() == [int(x.argmax()) for x in rows.expected(head, borrowed, 0, 3)]
    assert (tree.q_BNV[0, 1:].amax(-1) == 1).all()
    assert (tree.q_BNV[1, 1:].amax(-1) < 1).all()


def test_min_confidence_stops_before_the_product_falls_below():
    head, *borrowed = make_head()
    rows = Rows(HeadDrafter(head, stub_target(*borrowed), min_confidence=0.02), [5, 9, 14])
    lengths = set()
    for _ in range(6):
        tree = rows.propose(4)
        for b in range(3):
            tops = [float(x.softmax(-1).max()) for x in rows.expected(head, borrowed, b, 4)]
            expected = [float(torch.tensor(tops[: i + 1]).prod()) >= 0.02 for i in range(4)]
            assert tree.valid_BN[b, 1:].tolist() == expected[: tree.width - 1]
            lengths.add(sum(expected))
        rows.observe([2, 1, 3])
    assert len(lengths) > 1, "the threshold of this test should cut some chains"
    rows.drafter.min_confidence = 1.1
    assert rows.propose(4).width == 1


def test_max_positions_switches_drafting_off_with_one_warning():
    head, *borrowed = make_head(max_positions=32)
    rows = Rows(HeadDrafter(head, stub_target(*borrowed)), [28, 5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            tree = rows.propose(4)
            drafted = tree.valid_BN.sum(-1) - 1
            assert drafted.tolist() == [max(0, min(4, 32 - p + 1)) for p in rows.pairs]
            rows.observe([3, 2])
    assert ["position 32" in str(w.message) for w in caught] == [True]
    long = Rows(HeadDrafter(head, stub_target(*borrowed)), [48])
    with pytest.warns(UserWarning, match="position 32"):
        assert long.propose(4).width == 1


def test_padding_rows_of_the_lm_head_are_never_proposed():
    head, *borrowed = make_head(draft_ids=torch.arange(V))
    rows = Rows(HeadDrafter(head, stub_target(*borrowed, usable=100)), [5])
    plain = Rows(HeadDrafter(head, stub_target(*borrowed)), [5])
    proposed, free = set(), set()
    for s in range(40):
        for sampling in (Sampling(), Sampling(temperature=2.0)):
            tree = rows.propose(4, sampling, seeds=[s])
            proposed |= set(tree.tokens_BN[0, 1:].tolist())
            free |= set(plain.propose(4, sampling, seeds=[s]).tokens_BN[0, 1:].tolist())
            assert tree.q_BNV is None or tree.q_BNV[..., 100:].max() == 0
        rows.observe([1])
        plain.observe([1])
    assert max(proposed) < 100 <= max(free)


def test_int8_drafts_are_close_and_independent_of_batch_mates():
    from draftheads.inference.int8 import can_int8

    if not can_int8():
        pytest.skip("no int8 kernels in this torch or processor")
    head, *borrowed = make_head()
    rows = Rows(HeadDrafter(head, stub_target(*borrowed), int8=True), [5, 9, 14])
    alone = Rows(HeadDrafter(head, stub_target(*borrowed), int8=True), [5])
    sampling, hits, total = Sampling(temperature=0.8), 0, 0
    for _ in range(8):
        tree, single = rows.propose(3, sampling), alone.propose(3, sampling)
        assert torch.equal(tree.tokens_BN[0], single.tokens_BN[0])
        for b in range(3):
            q_V = rows.expected(head, borrowed, b, 1)[0].div(0.8).softmax(-1)
            assert (tree.q_BNV[b, 1] - q_V).abs().sum() < 0.25, "total variation of at most 1/8"
        tree = rows.propose(1)
        hits += sum(int(tree.tokens_BN[b, 1]) == int(rows.expected(head, borrowed, b, 1)[0].argmax()) for b in range(3))
        total += 3
        rows.observe([2, 1, 3])
        alone.observe([2])
    assert hits >= 0.8 * total


# ---- through decode()


class HalfWrong(HeadDrafter):
    """Proposes the head's drafts with the target's own next tokens written over some of them, and remembers what the head drafted."""

    def __init__(self, head, target, answers):
        super().__init__(head, target)
        self.answers, self.seen = answers, []

    def propose(self, plan, sampling, noise):
        tree = super().propose(plan, sampling, noise)
        for b, seed in enumerate(noise.seeds_B.tolist()):
            pairs, drafts = self.rows[b].pairs, tree.tokens_BN[b, 1:][tree.valid_BN[b, 1:]].tolist()
            self.seen.append((seed, pairs, drafts))
            right = self.answers[seed][pairs + 1 :]
            rng = random.Random(1000 * seed + pairs)
            for i in range(len(drafts)):
                if i < len(right) and rng.random() < 0.75:
                    tree.tokens_BN[b, 1 + i] = right[i]
        return tree


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
def test_unroll_equals_what_decode_drafts(variant):
    from draftheads.inference.decode import complete
    from draftheads.inference.target import Target

    target = Target.from_model(tiny.model("llama", num_hidden_layers=8, head_dim=24), tiny.tokenizer())
    head, *_ = make_head(variant, geo=target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    rng = random.Random(0)
    requests = [Request(str(i), tuple(rng.randrange(4, 128) for _ in range(n)), seed=i) for i, n in enumerate((5, 23, 11, 2))]
    limits = Limits(max_new_tokens=24, max_len=96, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits)
    answers = {i: [*r.prompt_ids, *c.tokens] for i, (r, c) in enumerate(zip(requests, plain, strict=True))}
    drafter = HalfWrong(head, target, answers)
    done = complete(target, drafter, requests, limits=limits, batch_size=3, plan=Plan(4), capture_taps=head.taps)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert 1 < sum(r.accepted for c in done for r in c.rounds) / sum(len(c.rounds) for c in done) < 3, "half right, half wrong"
    assert len(drafter.seen) > 20
    for seed, pairs, drafts in drafter.seen:
        captured = done[seed].captured
        tokens_N = torch.tensor(answers[seed][1 : pairs + 1])
        expected = reference(head, target.embed_VD, target.lm_head_VD, captured.features_TF[:pairs], tokens_N, [], argmax=4)
        assert drafts == [int(x.argmax()) for x in expected][: len(drafts)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)])
def test_decode_with_head_and_composite(sampling):
    """Greedy output is the target's; sampled output does not depend on batch size; both with a head that stops at position 32."""
    from draftheads.inference.decode import complete
    from draftheads.inference.target import Target

    target = Target.from_model(tiny.model("llama", num_hidden_layers=8), tiny.tokenizer())
    head, *_ = make_head(geo=target.geometry, max_positions=32)
    rng = random.Random(0)
    requests = [Request(str(i), tuple(rng.randrange(4, 128) for _ in range(n)), seed=i) for i, n in enumerate((28, 3, 40))]
    limits = Limits(max_new_tokens=12, max_len=80, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, sampling, limits)
    for make in (lambda: HeadDrafter(head, target), lambda: Composite(NgramDrafter(), HeadDrafter(head, target))):
        with pytest.warns(UserWarning, match="position 32"):
            single, batched = (complete(target, make(), requests, sampling, limits, batch_size=n, plan=Plan(3)) for n in (1, 3))
        assert [c.tokens for c in single] == [c.tokens for c in batched]
        if sampling.temperature == 0:
            assert [c.tokens for c in single] == [c.tokens for c in plain]
        assert any(r.source == "head" for c in single for r in c.rounds)
