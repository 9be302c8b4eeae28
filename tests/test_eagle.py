"""EAGLE-1, EAGLE-2 and HASS: unroll = an independent forward = stepwise drafting, what trains what, and the mutants that must break it.

Every parameter is random (norms too), the geometry is awkward (head_dim ≠ hidden/heads, grouped queries, two layers, reduced vocabulary), rows are
padded and hold several documents.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_graphs import SHAPES, Traced
from test_graphs import requests as small_requests
from test_graphs import target as small_target

import tiny
from draftheads.data.features import Row
from draftheads.heads import build_head, eagle, head_config
from draftheads.heads.base import DraftBatch
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.heads.eagle import Eagle
from draftheads.heads.losses import Slots, Teacher, smooth_l1
from draftheads.heads.slots import DraftSlots
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.metrics import all_rounds, tau
from draftheads.inference.requests import Limits, Request
from draftheads.inference.shapes import Dynamic
from draftheads.inference.target import Target
from draftheads.recipes.schema import Geometry, RecipeError, TrainSection
from draftheads.train.align import align
from draftheads.train.examples import add_noise, target_features
from draftheads.train.step import TrainStep, chunks_of

V, H, J = 96, 32, 4


def geometry(**changes) -> Geometry:
    base = dict(hidden_size=H, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12, vocab_size=V, max_positions=128)
    return Geometry(**(base | changes))


def randomise(head: Eagle, generator: torch.Generator, std: float = 0.13) -> None:
    with torch.no_grad():
        for p in head.parameters():
            p.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else p.normal_(0, std, generator=generator)


def make_head(seed: int = 0, draft: int | None = 40, **section) -> tuple[Eagle, torch.Tensor, torch.Tensor]:
    """A head with every parameter random, and the embedding and lm_head it borrowed."""
    generator = torch.Generator().manual_seed(seed)
    ids_U = None if draft is None else torch.randperm(V, generator=generator)[:draft].sort().values
    head = build_head({"type": "eagle", "draft_vocab_size": draft} | section, geometry(), ids_U)
    embed_VD, lm_head_VD = torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator) * 0.15
    head.borrow(embed_VD, lm_head_VD)
    randomise(head, generator)
    return head, embed_VD, lm_head_VD


class Plain:
    """EAGLE for one text, in loops over tokens, heads and keys: float64, from the saved tensors and what was borrowed, nothing else."""

    def __init__(self, head: Eagle, embed_VD, lm_head_VD, theta: float = 10000.0):
        self.w = {k.removeprefix("layers.0."): v.double() for k, v in head.state_dict().items()}
        ids_U = (torch.arange(len(self.w["d2t"])) + self.w["d2t"]).long()
        self.embed_VD, self.lm_head_UD = embed_VD.double(), self.w.get("lm_head.weight", lm_head_VD.double()[ids_U])
        self.c, self.eps, self.theta = head.config, head.geometry.rms_norm_eps, theta
        self.keys, self.values = [], []

    def branch(self) -> Plain:
        """A copy that has read the same."""
        other = object.__new__(Plain)
        other.__dict__ = self.__dict__ | {"keys": list(self.keys), "values": list(self.values)}
        return other

    def turn(self, x_D, position: int):
        half = len(x_D) // 2
        turned = []
        for i in range(half):
            angle = torch.tensor(position * self.theta ** (-2 * i / len(x_D))).double()
            turned.append(torch.stack([x_D[i] * angle.cos() - x_D[half + i] * angle.sin(), x_D[half + i] * angle.cos() + x_D[i] * angle.sin()]))
        return torch.stack(turned, 1).flatten()

    def feed(self, token: int, state_H) -> tuple[torch.Tensor, torch.Tensor]:
        """One more token, and the state before it → predicted state, draft logits."""
        w, c, position = self.w, self.c, len(self.keys)
        x = w["fc.weight"] @ torch.cat([self.embed_VD[token], state_H.double()]) + w.get("fc.bias", 0.0)
        q, k, v = ((w[f"self_attn.{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in "qkv")
        self.keys.append([self.turn(k_D, position) for k_D in k])
        self.values.append(v)
        found = []
        for n, q_D in enumerate(q):
            n_kv = n // (c.num_heads // c.num_kv_heads)
            p = torch.stack([self.turn(q_D, position) @ keys[n_kv] for keys in self.keys]).div(c.head_dim**0.5).softmax(0)
            found.append(sum(p[s] * values[n_kv] for s, values in enumerate(self.values)))
        r = x + w["self_attn.o_proj.weight"] @ torch.cat(found)
        m = r / (r.square().mean() + self.eps).sqrt() * w["post_attention_layernorm.weight"]
        out = r + w["mlp.down_proj.weight"] @ (torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ m) * (w["mlp.up_proj.weight"] @ m))
        return out, self.lm_head_UD @ out


def documents(lengths, seed: int):
    """Per document: states [n, H] and tokens x_1 … x_{n+J} (the token at index i is x_{i+1}, paired with state i)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, H, generator=generator) * 2, torch.randint(V, (n + J,), generator=generator)) for n in lengths]


def batch_of(rows) -> DraftBatch:
    """rows: lists of documents, padded to the longest."""
    B, T = len(rows), max(sum(len(f) for f, _ in row) for row in rows)
    b = DraftBatch(torch.zeros(B, T, H), torch.zeros(B, T, J, dtype=torch.long), torch.zeros(B, T, dtype=torch.long),
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


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of the expected values' rms where that is more than 1: nothing norms what the layer feeds back."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt().clamp(min=1))


ROWS = [documents([5, 1, 3], 1), documents([7], 2)]


@torch.no_grad()
def unroll_gap(head: Eagle, embed_VD, lm_head_VD, rows) -> float:
    """Every step at every slot against the plain forward: predicted states and logits."""
    states, worst = head.unroll(batch_of(rows), J).states, 0.0
    for r, row in enumerate(rows):
        t = 0
        for features, tokens in row:
            text = Plain(head, embed_VD, lm_head_VD)
            for i, state_H in enumerate(features):
                out, logits_U = text.feed(int(tokens[i]), state_H)
                rollout = text.branch()
                for j in range(J):
                    if j > 0:
                        out, logits_U = rollout.feed(int(tokens[i + j]), out)
                    worst = max(worst, gap(head.regressed(states[j][r, t]), out), gap(head.logits(states[j][r, t], j), logits_U))
                t += 1
    return worst


@pytest.mark.parametrize("section", [
    {}, {"fc_bias": True, "detach_feedback": True}, {"num_kv_heads": 6, "draft": None}, {"num_kv_heads": 1, "head_dim": 10, "freeze_lm_head": False},
], ids=str)
def test_unroll_equals_an_independent_forward(section):
    assert unroll_gap(*make_head(**section), ROWS if section == {} else ROWS[1:]) < 1e-5


@pytest.mark.parametrize("mutant", ["fc reads the state first", "rope +1", "rope -1", "another norm", "a normed residual"])
def test_mutants_of_unroll_are_seen(mutant, monkeypatch):
    head, *borrowed = make_head()
    rows = [documents([4], 3)]
    if mutant.startswith("fc"):
        inputs = Eagle.inputs
        monkeypatch.setattr(Eagle, "inputs", lambda self, e, g: inputs(self, g, e))
    elif mutant.startswith("rope"):  # only the drafted steps: moving all positions alike changes nothing
        right, by = eagle.step_positions, int(mutant[-2:])
        monkeypatch.setattr(eagle, "step_positions", lambda p, n: right(p, n) + by * (torch.arange(n) > 0)[:, None, None])
    elif mutant.startswith("another"):
        norm = head.layer.post_attention_layernorm
        monkeypatch.setattr(Eagle, "logits", lambda self, states, step=0: self.lm_head(norm(states)))
    else:
        inputs = Eagle.inputs
        monkeypatch.setattr(Eagle, "inputs", lambda self, e, g: (inputs(self, e, g)[0], self.layer.post_attention_layernorm(inputs(self, e, g)[1])))
    assert unroll_gap(head, *borrowed, rows) > 1e-3


# ---- drafting


@torch.no_grad()
def drafting_gap(head: Eagle, seed: int = 0, captured: bool = False) -> float:
    """Three texts extended in uneven pieces; after each a chain and a branched draft of the texts' own tokens against `unroll`, and one of wrong
    tokens, which is rejected: the next piece must cover it. captured: as a captured graph runs it (slots.view)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [documents([n], seed + n) for n in (9, 5, 8)]
    texts, B, everyone, M = [row[0] for row in rows], 3, slice(0, 3), 4
    states = head.unroll(batch_of(rows), J).states
    state, done, worst = head.new_state(B + 1, 12, 16), [0] * B, 0.0
    while any(n < len(f) for n, (f, _) in zip(done, texts, strict=True)):
        counts = [min(rng.randint(0 if sum(done) else 1, M), len(f) - n) for n, (f, _) in zip(done, texts, strict=True)]
        width = M if captured else max(1, *counts)
        features_BMF = torch.randn(B, width, H, generator=generator)  # padding is garbage on purpose
        tokens_BM = torch.randint(V, (B, width), generator=generator)
        for b, (features, tokens) in enumerate(texts):
            features_BMF[b, : counts[b]], tokens_BM[b, : counts[b]] = (x[done[b] : done[b] + counts[b]] for x in (features, tokens))
        if captured:
            state.slots.view = 20
        head.extend(state, features_BMF, tokens_BM, torch.tensor(counts), everyone)
        done = [n + count for n, count in zip(done, counts, strict=True)]

        expected = [torch.stack([head.logits(s[b, n - 1], j) for b, n in enumerate(done)]) for j, s in enumerate(states)]
        ahead = [torch.stack([tokens[n + j] for n, (_, tokens) in zip(done, texts, strict=True)])[:, None] for j in range(J)]
        root_B1, wrong_B1 = torch.zeros_like(ahead[0]), torch.randint(V, (B, 1), generator=generator)
        found = [head.begin(state, everyone)]
        found += [head.step(state, ahead[j], root_B1, everyone)[:, 0] for j in range(J - 1)]
        worst = max([worst, *map(gap, found, expected)])
        head.begin(state, everyone)
        for j in range(J - 1):  # the right token is the second node of the first level, then the first one of a level, below the right one
            level_BW = torch.cat([wrong_B1, ahead[j]] if j == 0 else [ahead[j], wrong_B1], 1)
            parents_BW = torch.cat([root_B1 + (j == 1), root_B1 if j < 2 else root_B1 + 1], 1)
            worst = max(worst, gap(head.step(state, level_BW, parents_BW, everyone)[:, int(j == 0)], expected[j + 1]))
        head.begin(state, everyone)
        head.step(state, torch.cat([wrong_B1, (wrong_B1 + 1) % V], 1), torch.cat([root_B1, root_B1], 1), everyone)
        if captured:
            state.slots.view = None
            state.slots.lengths[everyone] = [n + count for n, count in zip(state.slots.lengths[everyone], counts, strict=True)]
    return worst


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("captured", [False, True])
def test_drafting_equals_unroll(seed, captured):
    assert drafting_gap(make_head(seed, fc_bias=seed == 1)[0], seed, captured) < 1e-5


def test_drafting_one_position_too_far_is_seen(monkeypatch):
    rope = DraftSlots.rope
    # Drafted keys and queries only: extend asks with offset 0 (keys) and −1 (the last pair's query).
    monkeypatch.setattr(DraftSlots, "rope", lambda self, rows, offset, count=1: rope(self, rows, offset + (count == 1 and offset >= 1), count))
    assert drafting_gap(make_head()[0]) > 1e-3


def test_pairs_that_are_lost_are_seen(monkeypatch):
    extend, calls = Eagle.extend, []
    monkeypatch.setattr(Eagle, "extend", lambda self, *args: calls.append(1) or (extend(self, *args) if len(calls) != 2 else None))
    assert drafting_gap(make_head()[0]) > 1e-3


# ---- training

LAYERS = {"tied": ("llama", {"num_hidden_layers": 2, "head_dim": 24, "tie_word_embeddings": True}),
          "QK-norm": ("qwen3", {"num_hidden_layers": 2, "head_dim": 24})}


def make_target(name: str = "tied", seed: int = 0) -> Target:
    family, changes = LAYERS[name]
    return Target.from_model(tiny.model(family, seed, **changes), tiny.tokenizer())


def on_target(target: Target, draft: int | None = None, **section) -> Eagle:
    torch.manual_seed(0)
    ids_U = None if draft is None else torch.randperm(100)[:draft].sort().values
    head = build_head({"type": "eagle", "draft_vocab_size": draft} | section, target.geometry, ids_U)
    head.borrow(target.embed_VD, target.lm_head_VD)
    return head


def make_requests(lengths) -> list[Request]:
    rng = random.Random(0)
    return [Request(str(i), tuple(rng.randrange(4, 100) for _ in range(n)), seed=i) for i, n in enumerate(lengths)]


@torch.no_grad()
def test_the_state_is_post_norm_and_read_by_lm_head_itself():
    """A head that hands its state on unchanged drafts what the target said there; on states taken before the final norm it does not."""
    net = tiny.model(**LAYERS["tied"][1])
    target = Target.from_model(net, tiny.tokenizer())
    head, before = on_target(target), []
    for p in head.parameters():
        p.zero_()
    head.fc.weight[:, 64:] = torch.eye(64)
    ids = torch.randint(4, 100, (1, 9))
    (row,) = target_features(target, head.taps, [Row("a", "", ids[0], torch.ones(9, dtype=torch.bool))])
    handle = net.model.norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
    expected = net(ids).logits[0, :-1]
    handle.remove()
    batch = align([row], steps=1, supervise="all", max_len=99).batch
    assert gap(head.logits(head.unroll(batch, 1).states[0])[0], expected) < 1e-4
    mutant = replace(batch, features_BTF=before[0][:, :-1])
    assert gap(head.logits(head.unroll(mutant, 1).states[0])[0], expected) > 0.1


@pytest.mark.parametrize("detach", [False, True])
def test_the_regression_trains_fc_and_goes_through_the_fed_state_or_not(detach):
    head, *_ = make_head(detach_feedback=detach)
    states = head.unroll(batch_of(ROWS), 2).states
    states[0].retain_grad()
    predicted_MD = head.regressed(states[1]).flatten(0, 1)
    final_MD, nothing_MU = torch.randn_like(predicted_MD), torch.zeros(len(predicted_MD), 40)
    loss_M = smooth_l1(Slots(nothing_MU, Teacher(nothing_MU, torch.zeros(len(final_MD)), torch.zeros(len(final_MD)).long(), final_MD), predicted_MD))
    loss_M.sum().backward()
    assert head.fc.weight.grad[:, :H].abs().max() > 0 and head.fc.weight.grad[:, H:].abs().max() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.trainable_parameters())
    through = states[0].grad is not None and bool(states[0].grad.abs().max() > 0)
    assert through is not detach


def test_a_detached_step_still_trains_by_its_own_step():
    """The fed state is cut off, not the state that the loss reads."""
    head, *_ = make_head(detach_feedback=True)
    states = head.unroll(batch_of(ROWS), 3).states
    for s in states:
        (grad,) = torch.autograd.grad(head.logits(s).square().sum(), head.fc.weight, retain_graph=True)
        assert grad.abs().max() > 0


def learnt(target: Target, loss: dict[str, float], steps: int, noise: float = 0.0, updates: int = 120, **section):
    """A head trained on three rows of the target's own → head, share of right drafts by step, requests, what the target answers."""
    requests, limits = make_requests((6, 9, 4)), Limits(max_new_tokens=12, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    bare = [Row(r.id, "", torch.tensor([*r.prompt_ids, *c.tokens]), torch.arange(len(r.prompt_ids) + 12) >= len(r.prompt_ids))
            for r, c in zip(requests, plain, strict=True)]
    head, train = on_target(target, **section), TrainSection(loss_decay=1.0)
    rows = target_features(target, head.taps, bare)
    step = TrainStep(head, target.lm_head_VD, target.finish_logits, loss)
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=1e-2, betas=(0.9, 0.95))
    for n in range(updates + 1):
        noisy = rows if n == updates else [add_noise(r, noise, 64, n) for r in rows]
        aligned = align(noisy, steps=steps, supervise="answers", max_len=99)
        value, sums = step(aligned, chunks_of(aligned, train, step.known_V), 3.0)
        if n == updates:
            return head, (sums["hits"] / sums["answers"]).tolist(), requests, [c.tokens for c in plain]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (n + 1) / 6, 2.5 * (1 - n / updates))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(head.trainable_parameters(), 0.5)
        optimizer.step()


RECIPES = {"EAGLE-1": ({"smooth_l1": 1.0, "soft_ce": 0.1}, 1, 0.05, {}),
           "HASS": ({"smooth_l1": 1.0, "soft_ce": 0.1, "topk": 1.0}, 3, 0.0, {"detach_feedback": True})}


@pytest.mark.parametrize("name", RECIPES)
def test_rows_learnt_by_heart_are_drafted(name):
    loss, steps, noise, section = RECIPES[name]
    target = make_target(seed=4)  # no near ties: HASS's top-k loss moves the states a little, which flips what differs by 0.01
    head, accuracy, requests, answers = learnt(target, loss, steps, noise, **section)
    assert accuracy == [1.0] * steps
    limits = Limits(max_new_tokens=12, max_len=64, ignore_eos=True)
    done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=2, plan=Plan(steps))
    assert [c.tokens for c in done] == answers
    # The first answer token comes with the prompt; 11 more, steps + 1 a round.
    assert tau(all_rounds(done)) == pytest.approx(11 / -(-11 // (steps + 1)))


# ---- through decode()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [None, Dynamic(3, 3, 8)], ids=["chain", "dynamic"])
def test_greedy_output_is_the_targets(name, shape):
    target = make_target(name)
    head = on_target(target, draft=80)
    randomise(head, torch.Generator().manual_seed(1))
    requests, limits = make_requests((9, 3, 14)), Limits(max_new_tokens=10, max_len=64, ignore_eos=True)
    plain = complete(target, NoDrafter(), requests, limits=limits, batch_size=3)
    for size in (1, 2):
        done = complete(target, HeadDrafter(head, target), requests, limits=limits, batch_size=size, plan=Plan(3, tree=shape))
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        assert any(r.source == "head" for c in done for r in c.rounds)


class Seen(HeadDrafter):
    """Remembers its drafts, but for those near a row's end: eagerly a tree is grown no deeper than there is room."""

    def propose(self, plan, sampling, noise):
        tree = super().propose(plan, sampling, noise)
        self.drafts = getattr(self, "drafts", [])
        if plan.room_B is None or min(plan.room_B) >= plan.depth:
            self.drafts.append((tree.tokens_BN.clone(), tree.parents_BN.clone(), tree.valid_BN.clone()))
        return tree


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_replayed_captures_give_the_eager_drafts(shape):
    target, plan, limits = small_target(), Plan(3, tree=SHAPES[shape]), Limits(16, 128, ignore_eos=True)
    assert isinstance(target.graphs, Traced)
    drafts, tokens = [], []
    for graphs in (False, True):
        head = build_head({"type": "eagle", "draft_vocab_size": 10}, target.geometry, torch.arange(2, 12))
        randomise(head, torch.Generator().manual_seed(3), 0.3)
        head.borrow(target.embed_VD, target.lm_head_VD)
        drafter = Seen(head, target)
        done = complete(target, drafter, small_requests(5, 11), limits=limits, batch_size=2, plan=plan, graphs=graphs)
        drafts.append(drafter.drafts)
        tokens.append([c.tokens for c in done])
    assert target.graphs.failure is None and target.graphs.replays > 10
    assert tokens[0] == tokens[1]
    assert len(drafts[0]) == len(drafts[1]) > 8
    assert len({tuple(d[0][0].tolist()) for d in drafts[1]}) > 4, "a replay that drafts the same again and again"
    assert all(torch.equal(x, y) for eager, traced in zip(*drafts, strict=True) for x, y in zip(eager, traced, strict=True))


# ---- the checkpoint


@pytest.mark.parametrize("bias", [False, True])
def test_names_shapes_and_config_are_the_engines_and_survive_saving(bias, tmp_path):
    head, *borrowed = make_head(draft=None, fc_bias=bias)
    save_head(head, tmp_path / "a", HeadMeta(target="tiny"))
    saved, c = load_file(tmp_path / "a/model.safetensors"), json.loads((tmp_path / "a/config.json").read_text())
    layer = "layers.0."
    assert {name: tuple(t.shape) for name, t in saved.items()} == {
        "fc.weight": (H, 2 * H), **({"fc.bias": (H,)} if bias else {}), "d2t": (V,), "t2d": (V,),
        layer + "self_attn.q_proj.weight": (72, H), layer + "self_attn.k_proj.weight": (24, H), layer + "self_attn.v_proj.weight": (24, H),
        layer + "self_attn.o_proj.weight": (H, 72), layer + "post_attention_layernorm.weight": (H,),
        layer + "mlp.gate_proj.weight": (40, H), layer + "mlp.up_proj.weight": (40, H), layer + "mlp.down_proj.weight": (H, 40),
    }
    assert c["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"] and c["model_type"] == "llama" and c["bias"] is bias
    assert (c["num_hidden_layers"], c["head_dim"], c["num_key_value_heads"], c["vocab_size"], c["rope_theta"]) == (1, 12, 2, V, 10000.0)
    assert c["tie_word_embeddings"] is False
    again, meta = load_head(tmp_path / "a", geometry=geometry())
    assert meta.taps == ("final",)
    batch = batch_of(ROWS)
    assert again.logits(again.unroll(batch, 1).states[0]).isnan().all(), "what is borrowed is NaN until it is lent"
    again.borrow(*borrowed)
    real_BT = batch.documents_BT >= 0
    for mine, theirs in zip(head.unroll(batch, J).states, again.unroll(batch, J).states, strict=True):
        assert torch.equal(head.logits(mine[real_BT]), again.logits(theirs[real_BT]))


def test_config_errors_are_one_line_and_name_the_cure():
    assert head_config({"type": "eagle"}, geometry()).taps == ("final",)
    assert head_config({"type": "eagle", "taps": ["final"]}, geometry()).draft_vocab_size is None
    for section, words in [({"taps": [1]}, ["head.taps", "[1]", "['final']", "leave"]), ({"taps": [0, "final"]}, ["head.taps"]),
                           ({"fc_norm": True}, ["fc_norm"]), ({"num_layers": 2}, ["num_layers"]), ({"detach_fedback": True}, ["detach_feedback"])]:
        with pytest.raises(RecipeError) as error:
            head_config({"type": "eagle"} | section, geometry())
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), str(error.value)
