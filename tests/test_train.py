"""Training on a tiny target: the step against its slow twin, the loop's promises (resume to the bit, worlds, kills), and the bad inputs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import tiny
from draftheads.data.distill import distill
from draftheads.data.features import Row, RowStore
from draftheads.eval.plan import count_tokens
from draftheads.heads import build_head
from draftheads.heads.checkpoint import load_head
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.metrics import all_rounds, tau
from draftheads.inference.requests import Limits, Request
from draftheads.inference.target import Target
from draftheads.recipes.schema import Recipe, RecipeError, TrainSection
from draftheads.train import run
from draftheads.train.align import align, nothing
from draftheads.train.examples import Examples, add_noise, draft_vocabulary, survey, target_features
from draftheads.train.figures import Window, metric_sums, summarise
from draftheads.train.loop import fit
from draftheads.train.resume import check_facts, facts_of, newest_state, save_state
from draftheads.train.step import TrainStep, chunks_of
from draftheads.train.timetable import Schedule, rate, unroll_steps
from draftheads.train.trackers import Trackers, tracker_names

ROOT = Path(__file__).resolve().parent.parent
TAPS = (1, 2, 3)


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny.model(), tiny.tokenizer())


@pytest.fixture(scope="module")
def rows(target):
    """Six rows of random text with the target's states: unequal lengths, two turns, one without an answer."""
    g = torch.Generator().manual_seed(1)
    bare = []
    for i, (length, spans) in enumerate([(20, [(8, 20)]), (13, [(4, 9)]), (17, [(3, 6), (9, 17)]), (9, []), (16, [(6, 16)]), (11, [(2, 11)])]):
        flags = torch.zeros(length, dtype=torch.bool)
        for a, b in spans:
            flags[a:b] = True
        bare.append(Row(f"r{i}", "chat", torch.randint(0, 100, (length,), generator=g), flags))
    return target_features(target, TAPS, bare)


def make_step(target, draft=64, **head):
    torch.manual_seed(0)
    net = build_head({"type": "eagle3", "taps": list(TAPS), "draft_vocab_size": draft, **head}, target.geometry,
                     torch.randperm(100)[:draft].sort().values)
    net.borrow(target.embed_VD, target.lm_head_VD)
    return TrainStep(net, target.lm_head_VD[run.step_ids(net)], target.finish_logits)


def run_step(step, rows, train, steps, normaliser, size=None):
    aligned = align(rows, steps=steps, supervise=train.supervise, max_len=train.max_len)
    loss, sums = step(aligned, chunks_of(aligned, train, step.known_V, size), normaliser)
    step.zero_grad()
    loss.backward()
    return loss.detach(), sums, {n: p.grad.clone() for n, p in step.head.named_parameters() if p.requires_grad}


# --- the step ----------------------------------------------------------------------------------------------------------------------------


def slow_loss(step, target, rows, train, steps, normaliser):
    """Row by row, slot by slot, from the full [T, V] softmax of the target."""
    total = torch.zeros(())
    ids_U = run.step_ids(step.head)
    for row in rows:
        aligned = align([row], steps=steps, supervise=train.supervise, max_len=train.max_len)
        states = step.head.unroll(aligned.batch, steps).states
        p_TV = target.logits(row.final_TD).softmax(-1)
        flags, L = row.flags.tolist(), len(row)
        wanted = {}
        for j in range(steps):
            for t in range(L - 2 - j):
                ok = train.supervise == "all" or all(flags[t + 1 : t + 3 + j])
                if ok and not (train.drop_out_of_vocab and int(row.ids[t + 2 + j]) not in set(ids_U.tolist())):
                    wanted[t, j] = t + 1 + j
        share = sum(j == 0 for _, j in wanted)
        for (t, j), teacher in wanted.items():
            log_q_U = step.head.logits(states[j][0, t]).log_softmax(-1)
            weight = train.loss_decay**j / normaliser / (share if train.normalise == "sequence" else 1)
            total = total - weight * (p_TV[teacher, ids_U] * log_q_U).sum()
    return total


@pytest.mark.parametrize("changes", [
    {}, {"normalise": "token"}, {"supervise": "all"}, {"drop_out_of_vocab": True}, {"supervise": "all", "drop_out_of_vocab": True, "loss_decay": 0.5},
], ids=str)
@pytest.mark.parametrize("freeze", [True, False])
def test_loss_and_gradients_equal_the_slow_twin(target, rows, changes, freeze):
    train = TrainSection.model_validate({"max_len": 18} | changes)
    short = [Row(r.id, r.category, r.ids[:18], r.flags[:18], features_TF=r.features_TF[:17], final_TD=r.final_TD[:17], lse_T=r.lse_T[:17])
             for r in rows]
    step = make_step(target, freeze_lm_head=freeze)
    loss, _, grads = run_step(step, short, train, 3, 7.0, size=5)
    step.zero_grad()
    slow = slow_loss(step, target, short, train, 3, 7.0)
    slow.backward()
    assert loss.item() == pytest.approx(slow.item(), rel=1e-5)
    assert set(grads) == {n for n, p in step.head.named_parameters() if p.requires_grad}
    for name, p in step.head.named_parameters():
        if p.requires_grad:
            assert torch.allclose(grads[name], p.grad, atol=2e-6, rtol=1e-4), name
            assert p.grad.abs().sum() > 0, name


def test_chunks_and_micro_batches_do_not_change_the_sum(target, rows):
    train, step = TrainSection(), make_step(target)
    whole, sums, grads = run_step(step, rows, train, 4, 5.0)
    chunked, _, chunked_grads = run_step(step, rows, train, 4, 5.0, size=3)
    parts = [run_step(step, part, train, 4, 5.0) for part in (rows[:1], rows[1:4], rows[4:])]
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-6)
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item(), rel=1e-5)
    for name in grads:
        assert torch.allclose(chunked_grads[name], grads[name], atol=1e-6)
        assert torch.allclose(sum(p[2][name] for p in parts), grads[name], atol=1e-6), name
    for name in sums:
        assert torch.allclose(sum(p[1][name] for p in parts), sums[name]), name


def test_masked_and_empty_micro_batches_contribute_nothing(target, rows):
    """Case 3: every label masked; and a process that has no row at all. Loss 0, zero gradients on every parameter, no NaN."""
    train, step = TrainSection(), make_step(target)
    loss, sums, grads = run_step(step, [rows[3]], train, 3, 4.0)
    empty, no_sums = step(nothing(3, 3 * 64, 64), [], 4.0)
    step.zero_grad()
    empty.backward()
    for name, p in step.head.named_parameters():
        assert torch.equal(grads[name], torch.zeros_like(p)), name
        assert torch.equal(p.grad, torch.zeros_like(p)), name
    assert loss == 0
    assert empty == 0
    for found in (sums, no_sums):
        assert set(found) == {"loss", "supervised", "known", "answers", "slots", "hits", "prefix"}
        assert not any(v.any() for v in found.values())


def test_a_masked_batch_in_the_middle_leaves_the_next_one_sound(target, rows):
    train, step = TrainSection(), make_step(target)
    optimizer = torch.optim.AdamW(step.head.trainable_parameters(), lr=1e-2)
    losses = []
    for batch in (rows[:3], [rows[3]], rows[:3], rows[:3]):
        loss, _, _ = run_step(step, batch, train, 2, 3.0)
        optimizer.step()
        losses.append(loss.item())
        assert all(p.isfinite().all() for p in step.head.parameters())
    assert losses[1] == 0
    assert losses[3] < losses[2] < losses[0]


def test_metrics_by_brute_force(rows):
    """Joint prefixes over answer slots. A label outside the draft vocabulary can't be a hit, and is in the denominator."""
    g = torch.Generator().manual_seed(3)
    aligned = align(rows, steps=3, supervise="all", max_len=99)
    hits = torch.rand(aligned.answers_BTJ.shape, generator=g) < 0.6
    known_V = torch.rand(128, generator=g) < 0.5
    sums = metric_sums(torch.tensor(2.0), hits, aligned, known_V)
    slots, accepted, known, right = 0, 0, 0, [0, 0, 0]
    for b, r in enumerate(rows):
        for t in range(len(r) - 2):
            if not all(r.flags[t + 1 : t + 3]):
                continue
            slots += 1
            known += bool(known_V[r.ids[t + 2]])
            alive = True
            for j in range(3):
                inside = t + 2 + j < len(r) and all(r.flags[t + 1 : t + 3 + j])
                right[j] += inside and bool(hits[b, t, j])
                alive = alive and inside and bool(hits[b, t, j])
                accepted += alive
    window = Window(4)
    window.add(sums)
    window.updates = 1
    figures = summarise(window.totals(Accelerator(cpu=True)), 3)
    assert figures["tau"] == pytest.approx(1 + accepted / slots)
    assert figures["coverage"] == pytest.approx(known / slots)
    assert figures["loss"] == 2.0
    assert len(figures["accuracy"]) == 3
    assert figures["accuracy"][0] == pytest.approx(right[0] / slots)
    marginal = 1 + figures["accuracy"][0] + figures["accuracy"][0] * figures["accuracy"][1]
    assert figures["tau"] != pytest.approx(marginal, abs=1e-6)


def test_a_window_across_two_unroll_stages_means_each_step_over_its_own_slots(rows):
    """All hits: one optimizer step unrolled once, the next one three times. Step 1 and 2 exist for half of the window's slots."""
    window = Window(3)
    for steps in (1, 3):
        aligned = align(rows, steps=steps, supervise="all", max_len=99)
        window.add(metric_sums(torch.tensor(0.0), torch.ones_like(aligned.answers_BTJ), aligned, torch.ones(128, dtype=torch.bool)))
        window.updates += 1
    alone = Window(3)
    alone.add(metric_sums(torch.tensor(0.0), torch.ones_like(aligned.answers_BTJ), aligned, torch.ones(128, dtype=torch.bool)))
    alone.updates = 1
    both, once = (summarise(w.totals(Accelerator(cpu=True)), 3) for w in (window, alone))
    assert both["tau"] == pytest.approx(once["tau"]) and both["tau"] > 3


def test_a_perfect_head_hits_and_out_of_vocabulary_breaks(target, rows):
    """A head whose logits are the true label's one-hot: hit wherever the label is in the vocabulary, and nowhere else."""
    step, train = make_step(target), TrainSection(supervise="answers")
    aligned = align(rows, steps=2, supervise="answers", max_len=99)
    labels = aligned.labels_BTJ.flatten(0, 1)

    class Perfect(nn.Module):
        d2t, geometry = step.head.d2t, step.head.geometry

        def unroll(self, batch, steps):
            return type("U", (), {"states": [labels[:, j].view(*batch.documents_BT.shape, 1).float() for j in range(steps)]})

        def logits(self, states, _step=0):
            return (step.target_ids_U.float() == states).float()

        def trainable_parameters(self):
            return []

    step.head = Perfect()
    with torch.no_grad():
        _, sums = step(aligned, chunks_of(aligned, train, step.known_V, 4), 1.0)
    known = step.known_V[aligned.labels_BTJ] & aligned.answers_BTJ
    assert sums["hits"].tolist() == known.sum((0, 1)).tolist()
    assert 0 < sums["hits"][0] < sums["answers"][0]
    assert sums["prefix"][1] == (known[..., 0] & known[..., 1]).sum()


# --- timetable ---------------------------------------------------------------------------------------------------------------------------


def test_rates_and_stages():
    wsd = TrainSection(lr=1.0, warmup=0.1, decay=0.2, min_lr=0.1)
    rates = [rate(s, 100, wsd) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert set(rates[10:80]) == {1.0}
    assert rates[80:] == sorted(rates[80:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    cosine = [rate(s, 100, wsd.model_copy(update={"schedule": "cosine"})) for s in range(100)]
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    assert cosine[-1] == pytest.approx(0.1)
    assert rate(0, 1, TrainSection()) > 0
    staged = TrainSection.model_validate({"unroll": [{"until": 0.5, "steps": 1}, {"until": 1.0, "steps": 4}]})
    assert [unroll_steps(s, 10, staged) for s in range(10)] == [1] * 5 + [4] * 5


@pytest.mark.parametrize("normalise", ["sequence", "token"])
def test_every_row_once_an_epoch_and_the_same_normaliser_for_all_worlds(normalise):
    train = TrainSection.model_validate({"epochs": 2.5, "batch_tokens": 100, "micro_batch_tokens": 40, "normalise": normalise})
    lengths, shares = [10 + i % 30 for i in range(50)], [i % 9 for i in range(50)]
    one, two = (Schedule(train, list(range(50)), lengths, shares, world) for world in (1, 2))
    assert one.steps() == two.steps()
    seen = []
    for epoch, index in one.steps():
        a, b = one.epoch(epoch)[index], two.epoch(epoch)[index]
        assert len(b) == 2
        assert len(b[0]) == len(b[1])
        flat = [i for rank in a for micro in rank for i in micro]
        assert sorted(flat) == sorted(i for rank in b for micro in rank for i in micro)
        assert one.normaliser(a) == two.normaliser(b)
        seen += flat if epoch == 0 else []
    assert sorted(seen) == list(range(50))
    assert len(one.steps()) == round(2.5 * len(one.epoch(0)))
    longer = Schedule(train.model_copy(update={"steps": 7}), list(range(50)), lengths, shares, 1)
    assert len(longer.steps()) == 7


# --- examples ----------------------------------------------------------------------------------------------------------------------------


def test_survey_counts_what_is_lost_and_refuses_a_mask_that_covers_nothing(tmp_path, rows):
    store = RowStore.write(tmp_path / "a", rows)
    found = survey(store, TrainSection(max_len=12), 128)
    assert (found.rows, found.empty, found.cut) == ([0, 1, 2, 4, 5], 1, 4)
    assert found.lengths == [12, 12, 12, 12, 11]
    assert int(found.tokens_V.sum()) == sum(map(len, rows))
    known_V = torch.zeros(128, dtype=torch.bool)
    known_V[:50] = True
    for drop in (False, True):
        for share, index in zip(found.shares(store, TrainSection(max_len=12, drop_out_of_vocab=drop), known_V), found.rows, strict=True):
            aligned = align([rows[index]], steps=1, supervise="answers", max_len=12)
            valid = aligned.batch.valid_BTJ & (known_V[aligned.labels_BTJ] | (not drop))
            assert share == int(valid.sum())
    with pytest.raises(RecipeError, match="the mask covers nothing"):
        survey(RowStore.write(tmp_path / "b", [rows[3]]), TrainSection(), 128)


def test_draft_vocabulary_has_what_was_produced_the_ends_and_no_padding(tmp_path, target):
    tokenizer = target.tokenizer
    usable = len(tokenizer)
    ids = torch.tensor([50] * 5 + [60, 61, 62] * 4)
    store = RowStore.write(tmp_path, [Row("r", "c", ids, torch.arange(len(ids)) >= 5)])
    found = survey(store, TrainSection(), 128)
    chosen = draft_vocabulary(found, 20, target).tolist()
    assert len(set(chosen)) == 20
    assert {60, 61, 62, 50} | set(target.eos_ids) <= set(chosen)
    assert max(chosen) < usable


def test_noise_is_keyed_by_row_and_scaled_by_the_taps_rms(rows):
    noisy, again, other = (add_noise(rows[0], 0.1, 64, seed) for seed in (5, 5, 6))
    assert torch.equal(noisy.features_TF, again.features_TF)
    assert not torch.equal(noisy.features_TF, other.features_TF)
    change = (noisy.features_TF - rows[0].features_TF).unflatten(-1, (-1, 64)).abs().amax(-1)
    rms = rows[0].features_TF.unflatten(-1, (-1, 64)).square().mean(-1).sqrt()
    assert (change <= 0.1 * rms * 1.0001).all()
    assert (change > 0.05 * rms).all()


def test_features_of_a_forward_are_those_captured_while_generating(distilled):
    store = RowStore.open(distilled.run_dir / "distill")
    target = Target.load(distilled.target.name, dtype="float32")
    for row, online in zip(store, target_features(target, store_taps(distilled, target), list(store)), strict=True):
        for name, scale in (("features_TF", 2e-3), ("final_TD", 2e-3), ("lse_T", 1e-4)):
            a, b = getattr(row, name), getattr(online, name)
            assert (a - b).abs().max() <= scale * b.abs().max(), name


def store_taps(recipe, target):
    return tuple(build_head(recipe.head, target.geometry).taps)


# --- the loop: whole runs ----------------------------------------------------------------------------------------------------------------


def write_recipe(folder: Path, train: dict | None = None, **sections) -> Path:
    tiny.save(folder / "target", num_hidden_layers=8)
    texts = [f"say {i} things {'x' * (i % 7)}" for i in range(16)]
    lines = [{"id": f"p{i}", "category": "ab"[i % 2], "messages": [{"role": "user", "content": text}]} for i, text in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    raw = {
        "run": str(folder / "run"), "target": {"name": "./target", "dtype": "float32"},
        "data": {"prompts": "./prompts.jsonl", "max_new_tokens": 16, "batch_size": 8, "shard_rows": 8, "drop_loops": False},
        "head": {"type": "eagle3", "draft_vocab_size": 64},
        "train": {"steps": 10, "batch_tokens": 256, "micro_batch_tokens": 128, "lr": 1e-2, "log_every": 3, "feature_noise": 0.2,
                  "checkpoint_every": 4, "unroll": [{"until": 0.3, "steps": 1}, {"until": 1.0, "steps": 3}], **(train or {})},
    } | sections
    (folder / "r.yaml").write_text(json.dumps(raw))
    return folder / "r.yaml"


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A recipe whose rows are made already; tests copy its data into run folders of their own."""
    recipe = Recipe.load(write_recipe(tmp_path_factory.mktemp("train")))
    distill(recipe, progress=False)
    return recipe


def new_run(distilled: Recipe, folder: Path, **train) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(distilled.run_dir / "distill", folder / "distill", dirs_exist_ok=True)
    raw = distilled.model_dump() | {"run": str(folder)}
    raw["train"] |= train
    return Recipe.model_validate(raw)


def weights(recipe: Recipe) -> bytes:
    return (recipe.run_dir / "ckpt/final/model.safetensors").read_bytes()


def records(recipe: Recipe) -> list[dict]:
    found = [json.loads(line) for line in (recipe.run_dir / "train.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in found]


@pytest.fixture(scope="module")
def straight(distilled, tmp_path_factory):
    """Ten steps in one go."""
    recipe = new_run(distilled, tmp_path_factory.mktemp("straight"))
    assert run.main(recipe) == 0
    return recipe


def test_only_fresh_weights_are_fitted(distilled, tmp_path, monkeypatch):
    """Once at the start of a run, from clean states; never when a run goes on."""
    from draftheads.heads.eagle3 import Eagle3

    seen, real = [], Eagle3.fit_start

    def spy(head, batches):
        rows = list(batches)
        seen.append(rows)
        real(head, iter(rows))

    monkeypatch.setattr(Eagle3, "fit_start", spy)
    recipe = new_run(distilled, tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert run.main(recipe) == 143
    store = RowStore.open(recipe.run_dir / "distill")
    assert [len(rows) for rows in seen] == [len(store)]
    assert torch.equal(seen[0][0].features_BTF[0], store[0].features_TF[: len(store[0]) - 1].float())
    assert run.main(recipe) == 0
    assert len(seen) == 1
    random = new_run(distilled, tmp_path / "random")
    random.head["induction_init"] = False
    assert run.main(random) == 0
    assert weights(random) != weights(recipe)


def test_a_plan_counts_rows_that_answer_its_prompts(distilled, tmp_path):
    recipe = new_run(distilled, tmp_path / "run")
    store = RowStore.open(recipe.run_dir / "distill")
    assert count_tokens(recipe)["rows"] == len(store)
    fewer = recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit": 3})})
    assert count_tokens(fewer)["rows"] == 3


def test_a_head_section_is_judged_without_the_target(distilled, tmp_path):
    for head, said in (({}, r"head\.type is missing"), ({"type": "eagle3", "induction_init": "maybe"}, "induction_init")):
        with pytest.raises(RecipeError, match=said):
            run.main(distilled.model_copy(update={"head": head, "run": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


def test_a_draft_vocabulary_without_a_token_to_learn_is_refused(distilled, tmp_path):
    recipe = new_run(distilled, tmp_path / "run", max_len=3, supervise="all")
    recipe.head["draft_vocab_size"] = 2
    with pytest.raises(RecipeError, match="holds none of the"):
        run.main(recipe)


def test_a_run_from_before_an_option_is_another_run(distilled, tmp_path):
    """Defaults count: writing one out changes nothing, and a state that knows nothing of it is not gone on with."""
    facts = facts_of(distilled, "h")
    said = distilled.model_copy(update={"head": {**distilled.head, "induction_init": True}})
    check_facts(facts, facts_of(said, "h"), tmp_path)
    del facts["head"]["induction_init"]
    with pytest.raises(RecipeError, match=r"head\.induction_init"):
        check_facts(facts, facts_of(said, "h"), tmp_path)


def stop_after(monkeypatch, steps):
    monkeypatch.setattr(run, "Stopper", lambda accelerator, every: tiny.StopAt(steps))


def test_run_folder_is_complete(straight, capfd):
    folder = straight.run_dir
    head, meta = load_head(folder / "ckpt/final")
    assert head.d2t.numel() == 64
    assert meta.data_hash == RowStore.open(folder / "distill").hash
    assert meta.recipe_hash == straight.hash()
    assert Recipe.load(folder / "recipe.yaml").model_dump(exclude={"run"}) == straight.model_dump(exclude={"run"})
    assert json.loads((folder / "provenance.json").read_text())["versions"]["torch"] == importlib.metadata.version("torch")
    log = records(straight)
    assert [r["step"] for r in log] == [3, 6, 9, 10]
    assert meta.metrics["loss"] == log[-1]["loss"]
    before = weights(straight)
    assert run.main(straight) == 0
    assert "this run is finished" in capfd.readouterr().err
    assert weights(straight) == before


@pytest.mark.parametrize("stop", [5, 8])
def test_ten_steps_are_five_and_five_to_the_bit(distilled, straight, tmp_path, monkeypatch, stop):
    """Case 7, with feature noise, in mid-epoch and in the middle of a log window: weights, metrics, rates, order."""
    recipe = new_run(distilled, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        assert run.main(recipe) == 143
    assert newest_state(recipe.run_dir / "ckpt")[0].step == stop
    assert run.main(recipe) == 0
    assert weights(recipe) == weights(straight)
    assert records(recipe) == records(straight)
    assert (recipe.run_dir / "ckpt/final/draftheads.json").read_bytes() == (straight.run_dir / "ckpt/final/draftheads.json").read_bytes()


def test_a_damaged_state_is_passed_over(distilled, straight, tmp_path, monkeypatch, capfd):
    recipe = new_run(distilled, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        run.main(recipe)
    newest = recipe.run_dir / "ckpt/state-000007"
    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:-100])
    half = recipe.run_dir / "ckpt/.state-000008.abc.part"
    half.mkdir()
    capfd.readouterr()
    assert run.main(recipe) == 0
    said = capfd.readouterr().err
    assert "state-000007 is damaged" in said
    assert "going on after step 4" in said
    assert not half.exists()
    assert weights(recipe) == weights(straight)


def test_a_damaged_state_does_not_take_an_intact_ones_place(tmp_path):
    for step in (2, 4):
        save_state(tmp_path, step, {"w": torch.zeros(1)}, {}, {}, {}, keep=1)
    (tmp_path / "state-000004/optimizer.pt").write_bytes(b"")
    save_state(tmp_path, 3, {"w": torch.zeros(1)}, {}, {}, {}, keep=1)
    assert newest_state(tmp_path)[0].step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["state-000003"]


def test_new_rows_are_not_a_finished_run(straight, tmp_path):
    shutil.copytree(straight.run_dir, tmp_path, dirs_exist_ok=True)
    recipe = Recipe.model_validate(straight.model_dump() | {"run": str(tmp_path)})
    assert run.finished(recipe)
    manifest = tmp_path / "distill/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"hash": "another"}))
    with pytest.raises(RecipeError, match="data.hash was .* is 'another'"):
        run.finished(recipe)
    shutil.rmtree(tmp_path / "distill")
    assert run.finished(recipe)


def test_other_prompts_are_not_a_finished_run(straight, tmp_path):
    """Changed in the recipe, and not distilled yet: the rows on disk are still those of the head."""
    few = straight.data.model_copy(update={"limit": 12})
    with pytest.raises(RecipeError, match=r"other prompts than data.prompts and data.limit \(12\)"):
        run.main(straight.model_copy(update={"data": few}))
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "other"}))
    for name, refused in (("other.jsonl", True), ("gone.jsonl", False)):
        other = straight.model_copy(update={"data": straight.data.model_copy(update={"prompts": str(tmp_path / name)})})
        if refused:
            with pytest.raises(RecipeError, match=r"other prompts"):
                run.finished(other)
        else:
            assert run.finished(other)


def test_another_recipe_is_refused_and_free_keys_are_not(distilled, straight, tmp_path, monkeypatch):
    recipe = new_run(distilled, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        run.main(recipe)
    with pytest.raises(RecipeError, match=r"train\.lr was 0\.01, is 0\.02"):
        run.main(new_run(distilled, tmp_path, lr=0.02))
    with pytest.raises(RecipeError, match=r"train\.seed was 0, is 1"):
        run.main(new_run(distilled, straight.run_dir, seed=1))
    assert run.main(new_run(distilled, tmp_path, log_every=5, checkpoint_every=3, keep=1)) == 0
    assert weights(recipe) == weights(straight)


def test_facts_name_what_differs(distilled):
    before = facts_of(distilled, "a")
    with pytest.raises(RecipeError, match="data.hash was 'a', is 'b'"):
        check_facts(before, facts_of(distilled, "b"), Path("x"))
    check_facts(json.loads(json.dumps(before)), before, Path("x"))


def test_training_learns_and_is_reproducible(distilled, straight, tmp_path):
    recipe = new_run(distilled, tmp_path)
    run.main(recipe)
    assert weights(recipe) == weights(straight)
    other = new_run(distilled, tmp_path / "other", seed=1)
    run.main(other)
    assert weights(other) != weights(straight)


def test_online_features_train_like_captured_ones(distilled, straight, tmp_path):
    raw = distilled.model_dump() | {"run": str(tmp_path)}
    raw["data"] |= {"features": "online"}
    recipe = Recipe.model_validate(raw)
    assert run.main(recipe) == 0
    assert RowStore.open(tmp_path / "distill")[0].features_TF is None
    a, b = records(recipe), records(straight)
    assert a[-1]["loss"] == pytest.approx(b[-1]["loss"], rel=0.02)


def test_overfitting_turns_into_accepted_tokens(distilled, tmp_path):
    """Case 6: 8 rows learnt by heart, chain of 3: at least 0.9 · 4 tokens a round, and what training expected."""
    store = RowStore.open(distilled.run_dir / "distill")
    rows = sorted(store, key=lambda r: -int(r.flags.sum()))[:8]
    recipe = new_run(distilled, tmp_path, steps=150, lr=8e-3, feature_noise=0.0, batch_tokens=4096, micro_batch_tokens=4096,
                     unroll=[{"until": 1.0, "steps": 3}], checkpoint_every=1000, log_every=10)
    target = Target.load(distilled.target.name, dtype="float32")
    found = survey(RowStore.write(tmp_path / "rows", rows), recipe.train, target.geometry.vocab_size)
    torch.manual_seed(0)
    head = build_head(recipe.head | {"draft_vocab_size": None}, target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    step = TrainStep(head, target.lm_head_VD, target.finish_logits)
    examples = Examples(RowStore.open(tmp_path / "rows"), recipe.train, step.known_V, 3 * 64, 64, 256)
    schedule = Schedule(recipe.train, found.rows, found.lengths, found.shares(store, recipe.train, step.known_V), 1)
    figures = fit(step, examples, schedule, recipe, run.make_accelerator(recipe), {})
    assert figures["accuracy"][0] > 0.97
    requests = [Request(r.id, tuple(r.ids[: int((~r.flags).sum())].tolist())) for r in rows]
    done = complete(target, HeadDrafter(head, target), requests, limits=Limits(max_new_tokens=16, max_len=256), batch_size=4, plan=Plan(gamma=3))
    assert [c.tokens for c in done] == [r.ids[r.flags].tolist() for r in rows]
    measured = tau(all_rounds(done))
    print(f"expected {figures['tau']:.2f}, measured {measured:.2f}")
    assert measured >= 0.9 * 4
    assert measured == pytest.approx(figures["tau"], abs=0.3)


# --- trackers ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tracker", "trace"), [
    ("tensorboard", "draftheads/events.out.tfevents*"), pytest.param("wandb", "wandb/offline-run-*", marks=pytest.mark.slow),
])
def test_trackers_write_without_a_network(distilled, tmp_path, tracker, trace):
    pytest.importorskip(tracker)
    recipe = new_run(distilled, tmp_path, steps=2, log_every=1, log=["jsonl", tracker], unroll=[{"until": 1.0, "steps": 1}])
    assert run.main(recipe) == 0
    assert list(tmp_path.glob(trace)), list(tmp_path.rglob("*"))
    assert len(records(recipe)) == 2


def test_wandb_never_asks(distilled, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker_names(new_run(distilled, tmp_path / "run", log=["wandb"]))
    assert os.environ["WANDB_MODE"] == "offline"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="wandb is not installed"):
        tracker_names(new_run(distilled, tmp_path / "run", log=["wandb"]))


def test_records_after_the_state_are_dropped(distilled, tmp_path):
    recipe = new_run(distilled, tmp_path)
    (tmp_path / "train.jsonl").write_text('{"step": 3, "loss": 1}\n{"step": 6, "loss": 1}\n{"step": 9, "lo')
    Trackers(recipe, Accelerator(cpu=True), 5)
    assert (tmp_path / "train.jsonl").read_text() == '{"step": 3, "loss": 1}\n'


# --- the command -------------------------------------------------------------------------------------------------------------------------


def command(recipe: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, str(ROOT / "train/eagle.py"), "--recipe", str(recipe), *(x for o in overrides for x in ("--set", o))]


def call(words: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=900, check=False)


@pytest.mark.parametrize(("overrides", "message"), [
    (["train.epoch=3"], "unknown key 'train.epoch'; did you mean 'epochs'?"),
    (["train.batch_tokens"], "--set wants section.key=value"),
    (["train.log=[tensorbord]"], "train.log"),
])
def test_bad_recipes_are_one_line_and_exit_2(distilled, tmp_path, overrides, message):
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    done = call(command(path, *overrides))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_missing_recipe_is_one_line_and_exit_2(tmp_path):
    done = call(command(tmp_path / "none.yaml"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no recipe at" in done.stderr


@pytest.mark.parametrize(("section", "change", "message"), [
    ("head", {"draft_vocab_size": 4096}, "draft_vocab_size"),
    ("head", {"tap": [1]}, "did you mean 'taps'"),
    ("head", {"type": "eagel3"}, "did you mean 'eagle3'"),
    ("target", {"name": "/nowhere/at/all"}, "/nowhere/at/all"),
    ("data", {"prompts": "/nowhere.jsonl"}, "nowhere.jsonl"),
    ("train", {"max_len": 4}, "the mask covers nothing"),
])
def test_bad_input_is_refused_before_training(distilled, tmp_path, section, change, message):
    recipe = new_run(distilled, tmp_path)
    raw = recipe.model_dump()
    raw[section] = raw[section] | change
    with pytest.raises(RecipeError, match=message) as error:
        run.main(Recipe.model_validate(raw))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ckpt").exists()


def test_the_script_does_not_leave_its_folder_on_the_path():
    code = (f"import runpy, sys; sys.argv = ['eagle.py', '--recipe', 'none.yaml']; sys.path.insert(0, {str(ROOT / 'train')!r})\n"
            f"try: runpy.run_path({str(ROOT / 'train/eagle.py')!r}, run_name='__main__')\n"
            f"except SystemExit as e: print(e.code, {str(ROOT / 'train')!r} in sys.path)")
    assert call([sys.executable, "-c", code]).stdout.split() == ["2", "False"]


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one_over_fifty_steps(distilled, tmp_path):
    """By accelerate's launcher; the world size is asserted, because one way of asking for two processes silently starts one."""
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    launch = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes")
    logs = {}
    for world, flags in ((1, ("1", "--cpu")), (2, ("2", "--multi_gpu"))):
        folder = tmp_path / str(world)
        new_run(distilled, folder)
        done = call(command(path, f"run={folder}", "train.steps=50", "train.log_every=1", "train.micro_batch_tokens=64", "train.lr=0.001",
                            launcher=(*launch, *flags)), OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert f"training on {world} process" in done.stderr
        assert json.loads((folder / "provenance.json").read_text())["processes"] == world
        logs[world] = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(logs[1]) == len(logs[2]) == 50
    for a, b in zip(logs[1], logs[2], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert (a["supervised"], a["lr"], a["epoch"]) == (b["supervised"], b["lr"], b["epoch"])
        assert a["tau"] == pytest.approx(b["tau"], abs=0.02)


@pytest.mark.slow
def test_two_processes_asked_of_cpu_mode_are_reported(distilled, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    new_run(distilled, tmp_path / "run")
    words = command(path, f"run={tmp_path / 'run'}", launcher=("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"))
    done = call(words)
    assert done.returncode == 0, done.stderr
    assert "was asked for 2 processes and started 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["distil", "step 4", "step 9"])
def test_kill_9_and_the_same_command_give_the_same_checkpoint(distilled, straight, tmp_path, moment):
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    run_dir = tmp_path / "run"
    words = command(path, f"run={run_dir}", "train.checkpoint_every=1")
    sign = {"distil": "distill/shard-00000.json", "step 4": "ckpt/state-000004", "step 9": "ckpt/state-000009"}[moment]
    victim = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (run_dir / sign).exists():
        assert victim.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (run_dir / "ckpt/final").exists()
    done = call(words)
    assert done.returncode == 0, done.stderr
    recipe = Recipe.model_validate(distilled.model_dump() | {"run": str(run_dir)})
    assert weights(recipe) == weights(straight)
    assert records(recipe) == records(straight)


@pytest.mark.slow
def test_sigterm_leaves_a_state_and_code_143(distilled, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    new_run(distilled, tmp_path / "run")
    words = command(path, f"run={tmp_path / 'run'}", "train.steps=2000", "train.log_every=1", "train.checkpoint_every=5000")
    victim = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/train.jsonl").exists() or not (tmp_path / "run/train.jsonl").stat().st_size:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.05)
    victim.terminate()
    _, said = victim.communicate(timeout=300)
    assert victim.returncode == 143
    assert "stopped by SIGTERM" in said
    assert newest_state(tmp_path / "run/ckpt")[0].step >= 1


@pytest.mark.slow
def test_a_killed_launcher_does_not_leave_training_behind(distilled, straight, tmp_path):
    """accelerate's launcher, killed, leaves its child alone: it must notice, save and go, and the same command must wait for it, then go on."""
    path = tmp_path / "r.yaml"
    path.write_text(distilled.dump())
    new_run(distilled, tmp_path / "run")
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
                "--dynamo_backend", "no")
    words = command(path, f"run={tmp_path / 'run'}", "train.checkpoint_every=1", launcher=launcher)
    victim = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run/ckpt/state-000002").exists():
        assert victim.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    done = call(words)
    assert done.returncode == 0, done.stderr
    assert "going on after step" in done.stderr
    assert weights(Recipe.model_validate(distilled.model_dump() | {"run": str(tmp_path / "run")})) == weights(straight)
