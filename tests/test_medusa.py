"""Medusa, Hydra and Hydra++: unroll = a plain loop over positions = stepwise drafting, and the mutants that must break it.

tests/test_contract.py asks the same of every head type in its default form; here are the variants that it does not know of, trees three wide, and
what only these heads promise. Every parameter is random where nothing else is said.

Shape suffixes: N slots of a document, F feature width, B rows, W nodes of a level, U draft vocabulary, V target's, D target hidden, J steps.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import test_contract as contract
import torch
from torch.nn.functional import silu

from draftheads.data.features import Row
from draftheads.heads import build_head, head_config
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.heads.hydra import Hydra
from draftheads.heads.medusa import Medusa
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Limits
from draftheads.inference.shapes import Static
from draftheads.recipes.schema import Recipe, RecipeError, TrainSection
from draftheads.train.align import align
from draftheads.train.run import check_head
from draftheads.train.step import TrainStep, chunks_of

V, H, J = contract.V, contract.H, 4
VARIANTS = {
    "medusa": {"type": "medusa", "medusa_num_layers": 2},
    "hydra": {"type": "hydra", "hydra_num_layers": 2},
    "hydra++": {"type": "hydra", "hydra_num_layers": 2, "prefix_layer": True},
}
HYDRAS = ["hydra", "hydra++"]


def make(variant: str, draft: int | None = 50, **more):
    """A head with every parameter random, and the embedding and lm_head that it borrowed."""
    borrowed = torch.randn(V, H), torch.randn(V, H) * 0.15
    return contract.make_head(**VARIANTS[variant], geometry=contract.awkward(), borrowed=borrowed, draft=draft, **more), *borrowed


def fresh(variant: str):
    """A head as training begins it, with the whole vocabulary."""
    head = build_head(VARIANTS[variant], contract.awkward())
    borrowed = torch.randn(V, H), torch.randn(V, H)
    head.borrow(*borrowed)
    return head, *borrowed


def reference(head, embed_VD, lm_head_VD, features_NF, tokens) -> list[list[torch.Tensor]]:
    """Draft logits [U] of each slot and step of one document (tokens[i] is x_{i+1}), from the saved tensors alone, one slot at a time."""
    w = {k: v.double() if v.is_floating_point() else v for k, v in head.state_dict().items()}
    ids_U, c, eps = torch.arange(len(w["d2t"])) + w["d2t"], head.config, head.geometry.rms_norm_eps
    f, e = features_NF.double(), embed_VD.double()
    blocks, lm_heads = ("blocks", "lm_heads") if isinstance(head, Medusa) else ("hydra_mlp", "hydra_lm_head")

    def lin(x, name):
        return w[name + ".weight"] @ x + w.get(name + ".bias", torch.zeros(())).double()

    def rms(x, name):
        return x / (x.square().mean() + eps).sqrt() * w[name + ".weight"]

    def rope(x_D, position):
        half = len(x_D) // 2
        turned = torch.empty_like(x_D)
        for i in range(half):
            cos, sin = (g(position * 10000.0 ** (-i / half)) for g in (math.cos, math.sin))
            turned[i], turned[i + half] = x_D[i] * cos - x_D[i + half] * sin, x_D[i + half] * cos + x_D[i] * sin
        return turned

    def prefixed(t):
        n = [rms(f[s], "prefix_layer.input_layernorm") for s in range(t + 1)]
        D, groups, out = c.head_dim, c.num_heads // c.num_kv_heads, []
        for q in range(c.num_heads):
            mine, theirs = slice(q * D, (q + 1) * D), slice(q // groups * D, (q // groups + 1) * D)
            query = rope(lin(n[t], "prefix_layer.self_attn.q_proj")[mine], t)
            scores = [query @ rope(lin(n[s], "prefix_layer.self_attn.k_proj")[theirs], s) / D**0.5 for s in range(t + 1)]
            p = torch.stack(scores).softmax(0)
            out.append(sum(p[s] * lin(n[s], "prefix_layer.self_attn.v_proj")[theirs] for s in range(t + 1)))
        h = f[t] + lin(torch.cat(out), "prefix_layer.self_attn.o_proj")
        m, at = rms(h, "prefix_layer.post_attention_layernorm"), "prefix_layer.mlp."
        return rms(h + lin(silu(lin(m, at + "gate_proj")) * lin(m, at + "up_proj"), at + "down_proj"), "prefix_norm")

    found = []
    for t in range(len(f)):
        given, steps = prefixed(t) if "prefix_norm.weight" in w else f[t], []
        for j in range(J):
            x = given if isinstance(head, Medusa) else torch.cat([given, *(e[tokens[t + i]] for i in range(j + 1))])
            for layer in range(2):
                at = f"{blocks}.{j}.{layer}."
                kept = lin(x, at + "res_connection") if at + "res_connection.weight" in w else x
                x = kept + silu(lin(x, at + "linear"))
            rows_UD = w.get(f"{lm_heads}.{j}.weight", lm_head_VD.double()[ids_U])
            steps.append(rows_UD @ x)
        found.append(steps)
    return found


@torch.no_grad()
def unroll_gap(head, embed_VD, lm_head_VD, change=lambda batch: batch) -> float:
    """unroll of padded rows with several documents against the reference. change: a mutant's batch."""
    rows = [contract.documents(head, lengths, J, seed) for seed, lengths in enumerate([(4, 1), (3, 2), (6,)])]
    states, worst = head.unroll(change(contract.batch_of(rows, J)), J).states, 0.0
    for r, row in enumerate(rows):
        start = 0
        for features, tokens in row:
            for t, steps in enumerate(reference(head, embed_VD, lm_head_VD, features, tokens)):
                worst = max([worst, *(contract.gap(head.logits(states[j][r, start + t], j), steps[j]) for j in range(J))])
            start += len(features)
    return worst


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_unroll_equals_a_loop_over_positions(variant, freeze):
    assert unroll_gap(*make(variant, freeze_lm_head=freeze)) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_mutants_of_unroll_are_seen(variant, monkeypatch):
    head, *borrowed = make(variant)
    assert unroll_gap(head, *borrowed, lambda b: replace(b, features_BTF=b.features_BTF.roll(1, 1))) > 1e-3, "features of the slot before"
    if variant in HYDRAS:
        assert unroll_gap(head, *borrowed, lambda b: replace(b, tokens_BTJ=b.tokens_BTJ.roll(-1, 2))) > 1e-3, "tokens of the next step"
    if variant == "hydra++":
        assert unroll_gap(head, *borrowed, lambda b: replace(b, positions_BT=b.positions_BT * 2)) > 1e-3, "other positions"
        assert unroll_gap(head, *borrowed, lambda b: replace(b, documents_BT=b.documents_BT.clamp(max=0))) > 1e-3, "one document reads another"
    logits = type(head).logits
    monkeypatch.setattr(type(head), "logits", lambda self, states, step=0: logits(self, states, (step + 1) % J))
    assert unroll_gap(head, *borrowed) > 1e-3, "the lm_head of the next step"


# ---- drafting


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_says_what_unrolling_says(variant, freeze):
    head, *_ = make(variant, freeze_lm_head=freeze)
    assert contract.drafting_gap(head) < 1e-5
    assert contract.drafting_gap(head, shift=1) > 1e-3, "the mutant with features of the token before"
    assert contract.drafting_gap(head, forget=True) > 1e-3, "the mutant that loses pairs"
    assert (contract.drafting_gap(head, flat=True) > 1e-3) == (variant in HYDRAS), "only heads that read the draft care for its branches"
    if variant == "hydra++":
        assert contract.drafting_gap(head, captured=True) < 1e-5


@torch.no_grad()
def test_a_captured_step_may_view_more_slots_than_the_prefix_layer_has():
    """A captured step reads as many slots as a draft could need; the prefix layer keeps none for drafts."""
    head, *_ = make("hydra++")
    features_BMF, tokens_BM, found = torch.randn(2, 3, H), torch.randint(V, (2, 3)), []
    for view in (None, 400):
        state = head.new_state(2, 16)
        state.slots.view = view
        head.extend(state, features_BMF, tokens_BM, torch.tensor([3, 1]), slice(0, 2))
        found.append(head.begin(state, slice(0, 2), 4))
    assert contract.gap(found[1], found[0]) < 1e-5


@torch.no_grad()
def tree_gap(head) -> float:
    """Two levels of three nodes behind rows of unequal lengths, against unroll along the path of every node."""
    parents, lengths, state = [[0, 0, 0], [2, 0, 2]], [5, 3], head.new_state(3, 16)
    texts = contract.documents(head, lengths, 0, 5)
    features_BMF, tokens_BM = torch.randn(2, 5, H), torch.randint(V, (2, 5))
    for b, (features, tokens) in enumerate(texts):
        features_BMF[b, : len(features)], tokens_BM[b, : len(features)] = features, tokens
    head.extend(state, features_BMF, tokens_BM, torch.tensor(lengths), slice(0, 2))
    levels_BW = [torch.randint(V, (2, 3)) for _ in parents]
    found = [head.begin(state, slice(0, 2), 3)[:, None]]
    found += [head.step(state, level_BW, torch.tensor([p, p]), slice(0, 2)) for level_BW, p in zip(levels_BW, parents, strict=True)]
    worst = 0.0
    for b, (features, tokens) in enumerate(texts):
        paths = [[[]], [[int(t)] for t in levels_BW[0][b]]]
        paths.append([[*paths[1][p], int(t)] for p, t in zip(parents[1], levels_BW[1][b], strict=True)])
        for d, level in enumerate(paths):
            for node, path in enumerate(level):
                text = torch.cat([tokens, torch.tensor([*path, *[0] * (J - d)], dtype=torch.long)])
                states = head.unroll(contract.batch_of([[(features, text)]], J), J).states
                worst = max(worst, contract.gap(found[d][b, node], head.logits(states[d][0, -1], d)))
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_three_wide(variant, monkeypatch):
    head, *_ = make(variant)
    assert tree_gap(head) < 1e-5
    extend = type(head).extend
    monkeypatch.setattr(type(head), "extend", lambda self, state, f, x, counts, rows: extend(self, state, f.roll(1, 1), x, counts, rows))
    assert tree_gap(head) > 1e-3, "the feature of the wrong slot"


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_steps_than_heads_are_refused(variant):
    head, *_ = make(variant)
    batch = contract.batch_of([contract.documents(head, (4,), J + 1, 0)], J + 1)
    for refuse in (lambda: head.check_steps(J + 1), lambda: head.unroll(batch, J + 1)):
        with pytest.raises(RecipeError, match=rf"5 steps, head\.{head.config.type}_num_heads is 4") as error:
            refuse()
        assert "\n" not in str(error.value)
    recipe = Recipe.model_validate({"target": {"name": "t"}, "head": VARIANTS[variant], "train": {"unroll": [{"until": 1.0, "steps": 5}]}})
    with pytest.raises(RecipeError, match="5 steps"):
        check_head(recipe, contract.awkward())
    state, zero_11 = head.new_state(1, 8), torch.zeros(1, 1, dtype=torch.long)
    head.extend(state, torch.randn(1, 1, H), zero_11, torch.tensor([1]), slice(0, 1))
    head.begin(state, slice(0, 1))
    for _ in range(J - 1):
        head.step(state, zero_11, zero_11, slice(0, 1))
    with pytest.raises(ValueError, match="draft no level 5"):
        head.step(state, zero_11, zero_11, slice(0, 1))


@pytest.mark.parametrize("type", ["medusa", "hydra"])
def test_one_tap_is_read(type):
    geometry = contract.awkward()
    assert head_config({"type": type}, geometry).taps == ("final",)
    assert head_config({"type": type, "taps": [3]}, geometry).taps == (3,)
    with pytest.raises(RecipeError, match=r"reads one tap, found \[1, 3\]; leave taps out"):
        head_config({"type": type, "taps": [1, 3]}, geometry)


# ---- training


@torch.no_grad()
def test_heads_begin_as_the_target():
    """At first every head says what the target says of the next token."""
    for variant in VARIANTS:
        head, _, lm_head_VD = fresh(variant)
        batch = contract.batch_of([contract.documents(head, (6,), J, 0)], J)
        batch.features_BTF *= 3
        expected = batch.features_BTF @ lm_head_VD.T
        far = [(head.logits(s, j) - expected).norm() / expected.norm() for j, s in enumerate(head.unroll(batch, J).states)]
        if variant == "hydra++":  # through a layer of small random weights, and a norm that must learn the size of the states
            assert min(far) > 0.5
            head.fit_start(iter([batch]))
            far = [(head.logits(s, j) - expected).norm() / expected.norm() for j, s in enumerate(head.unroll(batch, J).states)]
        assert max(far) < (0.25 if variant == "hydra++" else 1e-5), variant


def random_rows(count: int = 3, length: int = 12) -> list[Row]:
    states = [torch.randn(length - 1, H) for _ in range(count)]
    flags_L, lse_T = torch.ones(length, dtype=torch.bool), torch.zeros(length - 1)
    return [Row(str(i), "", torch.randint(V, (length,)), flags_L, features_TF=f, final_TD=f, lse_T=lse_T)
            for i, f in enumerate(states)]


def learnt(variant: str, late: bool = False) -> list[float]:
    """Accuracy of each step on random rows learnt by heart. late: a mutant whose head j is trained on the label of step j + 1."""
    head, _, lm_head_VD = fresh(variant)
    step, train, rows = TrainStep(head, lm_head_VD, None, {"ce": 1.0}), TrainSection(loss_decay=1.0), random_rows()
    right = align(rows, steps=J, supervise="answers", max_len=99)
    aligned = right
    if late:
        more = align(rows, steps=J + 1, supervise="answers", max_len=99)
        batch = replace(more.batch, tokens_BTJ=right.batch.tokens_BTJ, valid_BTJ=more.batch.valid_BTJ[..., 1:])
        aligned = replace(more, batch=batch, labels_BTJ=more.labels_BTJ[..., 1:], teacher_index_BTJ=more.teacher_index_BTJ[..., 1:],
                          answers_BTJ=more.answers_BTJ[..., 1:])
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=5e-3)
    for _ in range(60):
        loss, _ = step(aligned, chunks_of(aligned, train, step.known_V, 64), 3.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, sums = step(right, chunks_of(right, train, step.known_V, 64), 3.0)
    return (sums["hits"] / sums["answers"]).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_rows_are_learnt_by_heart(variant):
    assert learnt(variant) == [1.0] * J
    assert max(learnt(variant, late=True)) < 0.5, "head j trained on the label of step j + 1"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_trained_parameter_gets_a_gradient(variant):
    for freeze in (True, False):
        head, *_ = make(variant, freeze_lm_head=freeze)
        batch = contract.batch_of([contract.documents(head, (5, 3), J, 0), contract.documents(head, (4,), J, 1)], J)
        sum(head.logits(s[batch.documents_BT >= 0], j).square().mean() for j, s in enumerate(head.unroll(batch, J).states)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in head.trainable_parameters())
        assert any("lm_head" in name for name, _ in head.named_parameters()) != freeze


# ---- through decode, and on disk


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_is_the_targets(variant):
    target = contract.make_target("2 layers")
    head = contract.make_head(**VARIANTS[variant], geometry=target.geometry, borrowed=(target.embed_VD, target.lm_head_VD), draft=100)
    requests, limits = contract.make_requests((9, 3, 14)), Limits(max_new_tokens=8, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    for shape in (None, Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))):
        done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=2, plan=Plan(9, tree=shape))
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        assert all(r.drafted <= J for c in done for r in c.rounds), "no more levels than heads"
        assert any(r.source == "head" for c in done for r in c.rounds)


def test_hydra_plus_plus_is_a_head_like_all_others(monkeypatch, tmp_path):
    """What tests/test_contract.py asks of every head type, asked of the form with the prefix layer."""
    monkeypatch.setitem(contract.SETTINGS, "hydra", {"prefix_layer": True})
    contract.check_rows("hydra")
    contract.check_vocabulary("hydra")
    contract.check_decoding("hydra", contract.make_target("2 layers"))
    contract.check_saving("hydra", tmp_path / "ckpt")
    contract.check_overfitting("hydra", tmp_path / "rows")


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_and_names(variant, freeze, tmp_path):
    head, *borrowed = make(variant, freeze_lm_head=freeze)
    save_head(head, tmp_path / "a", HeadMeta(target="tiny"))
    again, _ = load_head(tmp_path / "a", geometry=contract.awkward())
    saved = head.state_dict()
    assert again.state_dict().keys() == saved.keys()
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), saved.values(), strict=True))
    again.borrow(*borrowed)
    batch = contract.batch_of([contract.documents(head, (5,), J, 0)], J)
    states = zip(again.unroll(batch, J).states, head.unroll(batch, J).states, strict=True)
    assert all(torch.equal(again.logits(a, j), head.logits(b, j)) for j, (a, b) in enumerate(states))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    if isinstance(head, Hydra):
        assert saved["hydra_mlp.2.0.res_connection.weight"].shape == (H, 4 * H)
        assert ("hydra_lm_head.3.weight" in saved) != freeze
        assert config["hydra_head_arch"] == ("prefix-mlp" if variant == "hydra++" else "mlp")
        return
    parts = {f"{n}.{m}.linear.{p}" for n in range(J) for m in range(2) for p in ("weight", "bias")}
    lm_heads = set() if freeze else {f"lm_heads.{n}.weight" for n in range(J)}
    assert saved.keys() == {f"blocks.{p}" for p in parts} | lm_heads | {"d2t", "t2d"}
    assert [k for k in config if "num" in k and "heads" in k] == ["medusa_num_heads"], "vLLM takes any such key for the number of heads"
    assert config["medusa_fc_bias"] is True, "vLLM drops the biases without it"
    assert (config["vocab_size"], config["truncated_vocab_size"], config["medusa_num_layers"]) == (V, 50, 2)
    assert "truncated_vocab_size" not in make(variant, draft=None)[0].engine_config()
