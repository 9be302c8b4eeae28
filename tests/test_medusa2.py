"""Medusa-2: a head and a LoRA adapter of its target, trained together (train.lora), saved, loaded, decoded, judged and exported.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import tiny
from draftheads.data.distill import distill
from draftheads.data.features import Row
from draftheads.eval import cli, subject
from draftheads.eval.drift import compare
from draftheads.eval.run import evaluate
from draftheads.eval.summary import schema
from draftheads.heads import build_head
from draftheads.heads.checkpoint import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, META, Adapter, adapter_of, read_meta
from draftheads.inference import SpeculativeDecoder, generate
from draftheads.inference.adapter import add_adapter, check_modules, merge_adapter, try_adapter, tune, write_adapter
from draftheads.inference.saving import STAMP, save_target
from draftheads.inference.sources import Source
from draftheads.inference.target import Target
from draftheads.recipes.files import sha256_file
from draftheads.recipes.schema import LoraSection, Recipe, RecipeError, TrainSection
from draftheads.train import run
from draftheads.train.align import align, nothing
from draftheads.train.examples import target_features
from draftheads.train.optimizers import make_optimizer
from draftheads.train.step import TrainStep, chunks_of
from draftheads.train.timetable import head_weight
from draftheads.train.tuned import Tuned, held_of

ROOT = Path(__file__).resolve().parent.parent
HEADS = {"medusa": {"type": "medusa", "medusa_num_heads": 3}, "eagle3": {"type": "eagle3", "taps": [1, 2, 3], "draft_vocab_size": 64}}
TRAIN = {"steps": 8, "batch_tokens": 192, "micro_batch_tokens": 96, "lr": 1e-2, "log_every": 2, "checkpoint_every": 3,
         "unroll": [{"until": 1.0, "steps": 3}]}
CHAT = [{"role": "user", "content": "say 3 things"}]


# ---- one micro-batch


def parts(kind: str = "medusa", adapted: bool = False, **lora):
    """A step whose target is tuned, the original, and rows with the original's states. adapted: the adapter is random instead of having no effect."""
    target = Target.from_model(tiny.model(), tiny.tokenizer())
    torch.manual_seed(0)
    head = build_head(HEADS[kind], target.geometry, torch.arange(4, 68) if kind == "eagle3" else None)
    head.borrow(target.embed_VD, target.lm_head_VD)
    tuned = Tuned(Target.from_model(tiny.model(), tiny.tokenizer()), LoraSection(**({"rank": 4} | lora)), tuple(head.taps))
    if adapted:
        with torch.no_grad():
            for p in tuned.adapter().values():
                p.normal_(0, 0.1)
    g = torch.Generator().manual_seed(1)
    bare = []
    for i, (length, a) in enumerate([(20, 8), (13, 4), (9, 5)]):
        bare.append(Row(f"r{i}", "chat", torch.randint(4, 100, (length,), generator=g), torch.arange(length) >= a))
    rows = target_features(target, tuple(head.taps), bare)
    return TrainStep(head, target.lm_head_VD[run.step_ids(head)], target.finish_logits, tuned=tuned), target, rows


def run_step(step, rows, train, weight=1.0, normaliser=3.0, size=5):
    aligned = align(rows, steps=3, supervise=train.supervise, max_len=train.max_len)
    step.zero_grad()
    loss, sums = step(aligned, chunks_of(aligned, train, step.known_V, size), normaliser, held_of(aligned, train, step.known_V, size), weight)
    loss.backward()
    return loss.item(), sums


def slow_kl(step, target, rows, train, normaliser=3.0):
    """Row by row, with the plain logits of both models; gradients by autograd over [T, V]."""
    total = torch.zeros(())
    for row in rows:
        ids = row.ids[None, :-1]
        tuned_TV = step.tuned.model(input_ids=ids).logits[0].log_softmax(-1)
        with torch.no_grad():
            original_TV = target.model(input_ids=ids).logits[0].log_softmax(-1)
        kl_T = (original_TV.exp() * (original_TV - tuned_TV)).sum(-1)
        kept = [t for t in range(len(row) - 1) if train.supervise == "all" or bool(row.flags[t + 1])]
        total = total + kl_T[kept].mean() * ((len(kept) - 1) if train.normalise == "token" else 1) / normaliser
    return total


@pytest.mark.parametrize("changes", [{}, {"normalise": "token"}, {"supervise": "all"}], ids=str)
def test_the_kl_and_its_gradient_are_those_of_the_slow_twin(changes):
    step, target, rows = parts(adapted=True)
    train = TrainSection.model_validate({"lora": {}} | changes)
    _, sums = run_step(step, rows, train, weight=1e-30)  # the head's share vanishes
    found = {n: p.grad.clone() for n, p in step.tuned.adapter().items()}
    step.zero_grad()
    slow = slow_kl(step, target, rows, train)
    slow.backward()
    assert slow.item() > 1e-3
    assert sums["kl"].item() == pytest.approx(slow.item(), rel=1e-4)
    for name, p in step.tuned.adapter().items():
        assert torch.allclose(found[name], p.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("mixed", [False, True])
def test_the_kl_and_its_gradient_are_zero_at_the_start(mixed):
    """Under autocast too: rounding must not pass for a target that has moved."""
    step, _, rows = parts()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        _, sums = run_step(step, rows, TrainSection(lora=LoraSection()), weight=1e-30)
    assert abs(sums["kl"].item()) < 1e-5
    assert max(p.grad.abs().max().item() for p in step.tuned.adapter().values()) < 1e-4


@pytest.mark.parametrize("kind", HEADS)
def test_the_heads_loss_reaches_the_adapter_and_is_that_of_the_head_alone_at_the_start(kind):
    step, target, rows = parts(kind)
    train = TrainSection(lora=LoraSection())
    _, sums = run_step(step, rows, train, weight=0.2)
    moved = [n for n, p in step.tuned.adapter().items() if p.grad.abs().max() > 1e-5]
    # B is 0, so that A has no gradient yet; Medusa reads the last state, EAGLE-3 taps up to 3: nothing above layer 2 can get one from it.
    assert moved and all("lora_B" in n for n in moved)
    assert len(moved) == (28 if kind == "medusa" else 21)
    heads = {n: p.grad.clone() for n, p in step.head.named_parameters() if p.requires_grad}
    alone = TrainStep(step.head, target.lm_head_VD[run.step_ids(step.head)], target.finish_logits)
    aligned = align(rows, steps=3, supervise="answers", max_len=99)
    alone.zero_grad()
    loss, _ = alone(aligned, chunks_of(aligned, train, alone.known_V, 5), 3.0)
    loss.backward()
    assert sums["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    for name, grad in heads.items():
        assert torch.allclose(grad, 0.2 * step.head.get_parameter(name).grad, rtol=1e-3, atol=1e-6), name


def test_a_micro_batch_without_rows_gives_every_parameter_a_zero_gradient():
    step, _, _ = parts()
    loss, sums = step(nothing(3, 64, 64), [], 1.0, [], 0.2)
    loss.backward()
    assert (loss.item(), sums["kl"].item()) == (0.0, 0.0)
    assert all(p.grad is not None and not p.grad.any() for p in step.trainable_parameters())


def test_only_the_adapter_of_the_target_learns_and_only_its_dropout_is_on():
    step, target, rows = parts(dropout=0.5, adapted=True)
    step.train()
    assert not step.tuned.model.get_base_model().training
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in step.tuned.adapter().items())
    ids = rows[0].ids[None]
    a, b = (step.tuned(ids)[0] for _ in range(2))
    assert not torch.equal(a, b)
    step.eval()
    assert torch.equal(step.tuned(ids)[0], step.tuned(ids)[0])


def test_the_adapter_has_its_own_rate_and_the_head_its_weight():
    step, _, _ = parts()
    for lora, scale in (({}, 0.25), ({"lr": 0.0}, 0.0), ({"lr": 1e-3}, 0.1)):
        for kind in ("adamw", "muon"):
            train = TrainSection(lr=1e-2, optimizer=kind, weight_decay=0.1, lora=LoraSection(**lora))
            group = make_optimizer(step.head.trainable_parameters(), train, step.adapter()).param_groups[-1]
            assert (group["lr_scale"], group["muon"], group["weight_decay"]) == (pytest.approx(scale), False, 0.0)
            assert [id(p) for p in group["params"]] == [id(p) for p in step.adapter()]
    train = TrainSection(lora=LoraSection(head_weight=0.4, head_warmup=0.5))
    assert [head_weight(s, 8, train) for s in range(8)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4])
    assert head_weight(0, 8, TrainSection()) == 1.0


def test_bad_sections_are_one_line():
    with pytest.raises(ValueError, match="feature_noise"):
        TrainSection(feature_noise=0.1, lora=LoraSection())
    packed = Target.from_model(tiny.model(), tiny.tokenizer(), packed=True).model  # as training sees it on a CPU
    for model in (tiny.model(), packed):
        for name in ("q_porj", "mlp", "norm"):
            with pytest.raises(RecipeError, match=f"no linear layer {name}; it has down_proj, gate_proj, k_proj, o_proj, q_proj"):
                check_modules(model, [name])
        with pytest.raises(RecipeError, match="lm_head, which the head borrows"):
            check_modules(model, ["q_proj", "lm_head"])


# ---- whole runs


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("medusa2")
    tiny.save(folder / "target")
    lines = [{"id": f"p{i}", "category": "ab"[i % 2], "messages": [{"role": "user", "content": f"say {i} things"}]} for i in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    raw = {"run": str(folder / "run"), "target": {"name": "./target", "dtype": "float32"},
           "data": {"prompts": "./prompts.jsonl", "max_new_tokens": 12, "batch_size": 8, "drop_loops": False, "overlap_words": None},
           "head": HEADS["medusa"], "train": TRAIN | {"lora": {"rank": 4}},
           "eval": {"prompts": "./prompts.jsonl", "per_category": 1, "max_new_tokens": 12, "bootstrap": 100, "gamma": 2, "tau_gamma": 2,
                    "drafters": ["none", "head"], "transformers_fraction": 1.0}}
    (folder / "r.yaml").write_text(yaml.safe_dump(raw))
    recipe = Recipe.load(folder / "r.yaml")
    distill(recipe, progress=False)
    return recipe


def new_run(distilled: Recipe, folder: Path, lora: dict | None, **train) -> Recipe:
    folder.mkdir(parents=True)
    shutil.copytree(distilled.run_dir / "distill", folder / "distill")
    raw = distilled.model_dump() | {"run": str(folder)}
    raw["train"] = raw["train"] | {"lora": lora} | train
    return Recipe.model_validate(raw)


@pytest.fixture(scope="module")
def trained(distilled, tmp_path_factory) -> Recipe:
    """With a rate and a weight at which the tuned target writes another text."""
    recipe = new_run(distilled, tmp_path_factory.mktemp("trained") / "run", {"rank": 4, "lr": 0.05, "head_weight": 5.0})
    assert run.main(recipe) == 0
    return recipe


def final(recipe: Recipe) -> Path:
    return recipe.run_dir / "ckpt" / "final"


def files(recipe: Recipe) -> dict[str, bytes]:
    return {str(p.relative_to(final(recipe))): p.read_bytes() for p in final(recipe).rglob("*.safetensors")}


def peft_merged(recipe: Recipe):
    """The tuned model as peft itself makes it of the checkpoint's adapter."""
    from peft import PeftModel

    return PeftModel.from_pretrained(tiny.model(), final(recipe) / ADAPTER).merge_and_unload().eval()


def greedy(model, ids, new=16) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=2, pad_token_id=3)
    return out[0, len(ids):].tolist()


def test_what_training_leaves(trained):
    meta = read_meta(final(trained))
    assert meta.adapter is not None and sorted(meta.adapter) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    text = (final(trained) / ADAPTER / ADAPTER_CONFIG).read_text()
    assert str(trained.run_dir.parent.parent) not in text and json.loads(text)["base_model_name_or_path"] == ""
    records = [json.loads(line) for line in (trained.run_dir / "train.jsonl").read_text().splitlines()]
    assert all(r["kl"] > 0 for r in records)
    assert run.main(trained) == 0, "a finished run is known as finished"


def test_without_a_rate_the_adapter_does_nothing_and_the_head_is_medusa_1s(distilled, tmp_path):
    """On the same features: the online ones, which are not rounded to fp16. The clip would see the adapter's gradient; Adam knows no scale."""
    both = {"clip_norm": 1e9, "steps": 4}
    two = new_run(distilled, tmp_path / "two", {"rank": 4, "lr": 0.0, "head_weight": 1.0}, **both)
    one = new_run(distilled, tmp_path / "one", None, **both)
    for recipe in (one, two):
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"features": "online"})})
        shutil.rmtree(recipe.run_dir / "distill")
        assert run.main(recipe) == 0
    a, b = _load(one), _load(two)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), atol=2e-4), name
    adapter = _load(two, ADAPTER + "/" + ADAPTER_WEIGHTS)
    assert not any(t.any() for n, t in adapter.items() if "lora_B" in n)


def _load(recipe: Recipe, name: str = "model.safetensors"):
    from safetensors.torch import load_file

    return load_file(final(recipe) / name)


def test_resuming_is_exact(distilled, trained, tmp_path, monkeypatch):
    recipe = new_run(distilled, tmp_path / "run", trained.train.lora.model_dump())
    with monkeypatch.context() as patch:
        patch.setattr(run, "Stopper", lambda *_: tiny.StopAt(5))
        assert run.main(recipe) == 143
    assert run.main(recipe) == 0
    assert files(recipe) == files(trained)
    state = final(recipe).parent / "state-000006"
    assert {n.split(".")[0] for n in _load_file(state / "model.safetensors")} >= {"adapter", "blocks"}


def _load_file(path: Path):
    from safetensors.torch import load_file

    return load_file(path)


def test_a_mutant_that_forgets_the_adapter_in_a_state_is_seen(distilled, trained, tmp_path, monkeypatch):
    recipe = new_run(distilled, tmp_path / "run", trained.train.lora.model_dump())
    with monkeypatch.context() as patch:
        patch.setattr(run, "Stopper", lambda *_: tiny.StopAt(5))
        assert run.main(recipe) == 143
    monkeypatch.setattr(TrainStep, "restore", lambda self, saved: self.head.load_state_dict({n: t for n, t in saved.items() if "adapter." not in n}))
    assert run.main(recipe) == 0
    assert files(recipe) != files(trained)


@pytest.mark.slow
def test_two_processes_give_the_loss_and_the_kl_of_one(distilled, tmp_path):
    path = tmp_path / "r.yaml"
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--num_processes")
    logs = {}
    for world, flags in ((1, ("1", "--cpu")), (2, ("2", "--multi_gpu"))):
        recipe = new_run(distilled, tmp_path / str(world), {"rank": 4}, steps=12, log_every=1, lr=1e-3, micro_batch_tokens=48)
        path.write_text(recipe.dump())
        done = subprocess.run([*launch, *flags, str(ROOT / "train/medusa.py"), "--recipe", str(path)], capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert json.loads((recipe.run_dir / "provenance.json").read_text())["processes"] == world
        logs[world] = [json.loads(line) for line in (recipe.run_dir / "train.jsonl").read_text().splitlines()]
    assert len(logs[1]) == len(logs[2]) == 12
    for a, b in zip(logs[1], logs[2], strict=True):
        assert (a["loss"], a["kl"]) == (pytest.approx(b["loss"], abs=1e-3), pytest.approx(b["kl"], abs=1e-4))
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.05)


@pytest.mark.parametrize("packed", [False, "auto"])
def test_decoding_is_the_merged_models_own_text(trained, packed):
    meta = read_meta(final(trained))
    target = Target.load(meta.target, dtype="float32", packed=packed, adapter=adapter_of(final(trained), meta))
    decoder = SpeculativeDecoder.from_checkpoint(trained.run_dir, target, copy_first=None, gamma=3)
    ids = target.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    merged, original = peft_merged(trained), tiny.model()
    expected = greedy(merged, ids)
    found = decoder.complete([CHAT], limits=_limits(16))[0].tokens
    assert found == expected
    # Mutant: the adapter is not merged. Its text is another, so that the equality above says something.
    assert greedy(original, ids) != expected
    untuned = Target.load(meta.target, dtype="float32", packed=packed)
    untuned.adapter = target.adapter
    mutant = SpeculativeDecoder.from_checkpoint(trained.run_dir, untuned, copy_first=None, gamma=3)
    assert mutant.complete([CHAT], limits=_limits(16))[0].tokens != expected


def _limits(new: int):
    from draftheads.inference.requests import Limits

    return Limits(new)


def test_a_head_and_its_target_belong_together(trained, tmp_path):
    folder, name = final(trained), trained.target.name
    with pytest.raises(RecipeError, match="trained with an adapter of its target, and the target is as published"):
        generate(name, prompts=["a"], draft=str(folder))
    meta = read_meta(folder)
    target = Target.load(name, dtype="float32", adapter=adapter_of(folder, meta))
    target.adapter = Adapter(folder, {"other": "file"})
    with pytest.raises(RecipeError, match="tuned for another head"):
        SpeculativeDecoder(target, folder)


@pytest.mark.parametrize(("harm", "said"), [
    (lambda f: shutil.rmtree(f / ADAPTER), "no adapter_config.json in"),
    (lambda f: (f / ADAPTER / ADAPTER_WEIGHTS).unlink(), "no adapter_model.safetensors in"),
    (lambda f: (f / ADAPTER / ADAPTER_CONFIG).write_text((f / ADAPTER / ADAPTER_CONFIG).read_text().replace('"lora_alpha": 16', '"lora_alpha": 8')),
     "adapter_config.json is not the file that was written"),
    (lambda f: (f / ADAPTER / ADAPTER_WEIGHTS).write_bytes(b"x" + (f / ADAPTER / ADAPTER_WEIGHTS).read_bytes()[1:]), "its sha256 differs"),
])
def test_a_missing_or_altered_adapter_is_one_line(trained, tmp_path, harm, said):
    folder = tmp_path / "final"
    shutil.copytree(final(trained), folder)
    harm(folder)
    with pytest.raises(RecipeError, match=said):
        SpeculativeDecoder.from_checkpoint(folder)


def test_a_foreign_adapter_is_one_line(trained, tmp_path):
    meta = read_meta(final(trained))
    adapter = adapter_of(final(trained), meta)
    for changes, said in (({"num_hidden_layers": 2}, "no unquantised linear layer"), ({"intermediate_size": 80}, r"the target has \(.*\) there")):
        other = tiny.save(tmp_path / said[:5], **changes)
        with pytest.raises(RecipeError, match=f"is no adapter of .*{said}"):
            Target.load(str(other), dtype="float32", adapter=adapter)


def test_names_in_draftheads_json_lead_nowhere_else(trained, tmp_path, capsys):
    """A checkpoint may come from anywhere: its list of files is no list of places to write."""
    folder = tmp_path / "final"
    shutil.copytree(final(trained), folder)
    said = json.loads((folder / META).read_text())
    (folder / "secret").write_text("x")
    said["adapter"]["../../leaked"] = said["adapter"]["../secret"] = "00"
    (folder / META).write_text(json.dumps(said))
    assert specdec("export", "--ckpt", folder, "--to", "vllm", "--out", tmp_path / "a" / "out") == 0
    assert sorted(p.name for p in (tmp_path / "a").rglob("*") if p.is_file()) == sorted(
        [ADAPTER_CONFIG, ADAPTER_WEIGHTS, META, "README.md", "config.json", "model.safetensors"])
    altered = folder / ADAPTER / ADAPTER_CONFIG
    altered.write_text(altered.read_text() + " ")
    assert specdec("export", "--ckpt", folder, "--to", "vllm", "--out", tmp_path / "b") == 2
    assert "its sha256 differs" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_a_tuned_target_is_merged_once_and_trains_no_other_head(trained, distilled, tmp_path, monkeypatch):
    tuned = tmp_path / "tuned"
    assert specdec("export", "--ckpt", final(trained), "--target-out", tuned) == 0
    adapter = adapter_of(final(trained), read_meta(final(trained)))
    expected = AutoModelForCausalLM.from_pretrained(tuned).state_dict()

    # From the Hub, where its stamp went along.
    source = Source("ORG/tuned", "ORG/tuned", local=False)
    monkeypatch.setattr("transformers.utils.cached_file", lambda path, name, **options: str(tuned / name))
    model = AutoModelForCausalLM.from_pretrained(tuned)
    assert tune(model, source, adapter) == adapter
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())

    recipe = new_run(distilled, tmp_path / "run", None)
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"name": str(tuned), "geometry": None})})
    with pytest.raises(RecipeError, match="tuned target of another head"):
        run.main(recipe)
    # What somebody put beside it is not swept away, and a stamp that says nothing is no licence to merge again.
    (tuned / "LICENSE").write_text("mine")
    with pytest.raises(RecipeError, match="holds LICENSE, which no export wrote"):
        save_target(tiny.model(), tiny.tokenizer(), tuned)
    (tuned / STAMP).write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        Target.load(str(tuned), dtype="float32", adapter=adapter)


# ---- the report


def test_the_report_says_whose_text_it_is_and_what_changed(trained, tmp_path):
    outcome = evaluate(subject.open_checkpoint(trained.run_dir), out=tmp_path / "report", quiet=True)
    report = outcome.report
    jsonschema.validate(report, schema())
    found = report["tuned"]
    assert found["statement"] == "Lossless is with respect to the tuned model, not the original."
    assert report["ok"] and report["summary"]["lossless"], "transformers' generate, in the comparison, is the tuned model, too"
    assert "The output is the tuned target's own" in report["verdict"]
    for name in ("report.md", "report.html"):
        assert found["statement"] in (tmp_path / "report" / name).read_text()

    # The figures, from the plain models.
    work = subject.open_checkpoint(trained.run_dir)
    prompts = subject.render_prompts(Target.load(trained.target.name, dtype="float32"), subject.read_conversations(work.recipe.eval)[0], 32)
    models, nll, kl, agree, tokens, text = (tiny.model(), peft_merged(trained)), [0.0, 0.0], 0.0, 0, 0, 0
    for prompt in prompts:
        answer = greedy(models[1], prompt.ids, 12)
        ids = torch.tensor([[*prompt.ids, *answer]])
        with torch.no_grad():
            logp = [m(ids[:, :-1]).logits[0].log_softmax(-1) for m in models]
        own = torch.arange(ids.shape[1] - 1) < len(prompt.ids) - 1
        for i in range(2):
            nll[i] -= logp[i].gather(1, ids[0, 1:, None])[own].sum().item()
        kl += (logp[0].exp() * (logp[0] - logp[1])).sum(-1)[~own].sum().item()
        agree += int((logp[0].argmax(-1) == logp[1].argmax(-1))[~own].sum())
        tokens, text = tokens + len(answer), text + len(prompt.ids) - 1
    assert (found["answer_tokens"], found["prompt_tokens"]) == (tokens, text)
    assert found["kl"] == pytest.approx(kl / tokens, rel=1e-3) and found["kl"] > 1e-3
    assert found["top1_agreement"] == pytest.approx(agree / tokens)
    for i, name in enumerate(("original", "tuned")):
        assert found["perplexity"][name] == pytest.approx(float(torch.tensor(nll[i] / text).exp()), rel=1e-3)
    again = evaluate(subject.open_checkpoint(trained.run_dir), out=tmp_path / "report", quiet=True)
    assert again.report["tuned"] == found, "kept with the records"


def test_a_target_does_not_drift_from_itself():
    target = Target.from_model(tiny.model(), tiny.tokenizer())
    found = compare(target, target, list(range(4, 20)), list(range(20, 30)))
    assert (found["text"], found["answer"], found["agree"]) == (15.0, 10.0, 10.0)
    assert found["kl"] == 0.0 and found["text_original"] == found["text_tuned"] > 0


# ---- export


def specdec(*words: object) -> int:
    return cli.guard("specdec", lambda: cli.app([str(w) for w in words], standalone_mode=False, prog_name="specdec"))


def test_export_takes_the_adapter_along_and_writes_the_tuned_target(trained, tmp_path, capsys):
    goal, tuned = tmp_path / "vllm", tmp_path / "tuned"
    assert specdec("export", "--ckpt", trained.run_dir, "--to", "vllm", "--out", goal, "--target-out", tuned, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["target_folder"] == str(tuned) and "--target-out DIR" in said["notes"][0]
    assert "not for the original" in (goal / "README.md").read_text()
    meta = read_meta(goal)
    assert meta.adapter == read_meta(final(trained)).adapter

    # The folder is an ordinary one, and its model is what peft merges.
    from transformers import AutoTokenizer

    plain, merged = AutoModelForCausalLM.from_pretrained(tuned), peft_merged(trained)
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(plain.state_dict()[name], tensor, atol=1e-6), name
    ids = AutoTokenizer.from_pretrained(tuned).apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]

    # The exported head goes with either: the original and its adapter, or the folder in which it is merged already (once, not twice).
    expected = greedy(merged, ids)
    for target in (Target.load(trained.target.name, dtype="float32", adapter=adapter_of(goal, meta)), Target.load(str(tuned), dtype="float32")):
        assert SpeculativeDecoder(target, goal, gamma=3).complete([CHAT], limits=_limits(16))[0].tokens == expected
    again = Target.load(str(tuned), dtype="float32", adapter=adapter_of(goal, meta))
    assert SpeculativeDecoder(again, goal).complete([CHAT], limits=_limits(16))[0].tokens == expected
    # Written again, as both were ours.
    assert specdec("export", "--ckpt", trained.run_dir, "--to", "vllm", "--out", goal, "--target-out", tuned) == 0


def test_target_out_alone_writes_the_plain_target_of_a_plain_head(distilled, tmp_path, capsys):
    from draftheads.heads.checkpoint import HeadMeta, save_head

    target = Target.load(distilled.target.name, dtype="float32")
    head = build_head(HEADS["medusa"], target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    save_head(head, tmp_path / "head", HeadMeta(target=target.name, template_hash=target.template_hash))
    assert specdec("export", "--ckpt", tmp_path / "head", "--target-out", tmp_path / "out", "--dtype", "bfloat16") == 0
    assert "the target, as it is, bfloat16" in capsys.readouterr().out
    written = Target.load(str(tmp_path / "out"), dtype="bfloat16")
    assert written.adapter is None and written.geometry == target.geometry and written.template_hash == target.template_hash
    assert torch.equal(written.embed_VD, target.embed_VD.bfloat16())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    for words, said in (([], "nothing to write"), (["--target-out", tmp_path / "mine"], "something else"),
                        (["--target-out", tmp_path / "y", "--out", tmp_path / "x"], "without --to LAYOUT")):
        assert specdec("export", "--ckpt", tmp_path / "head", *words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_a_model_believed_quantised_and_a_packed_one(tmp_path):
    model = tiny.model()
    model.config.quantization_config = {"quant_method": "gguf"}
    save_target(model, tiny.tokenizer(), tmp_path / "a")
    assert "quantization_config" not in json.loads((tmp_path / "a" / "config.json").read_text())
    packed = Target.from_model(tiny.model(), tiny.tokenizer(), packed=True)
    with pytest.raises(RecipeError, match="packed=False"):
        save_target(packed.model, packed.tokenizer, tmp_path / "b")
    assert not (tmp_path / "b").exists()


# ---- what goes wrong at the end of long work, found before it


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_of_a_mixture_of_experts_the_plain_linear_layers_are_adapted(family, tmp_path):
    """peft's own "all-linear" takes the fused experts too, as another kind of adapter, which nothing could merge."""
    model, lora = tiny.model(family), LoraSection(rank=2)
    try_adapter(model, lora)
    assert not any("lora" in n for n, _ in model.named_modules()), "the trial leaves the model as it is"
    wrapped = add_adapter(model, lora)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    write_adapter(wrapped, "", None, tmp_path)
    adapter = Adapter(tmp_path, {f: sha256_file(tmp_path / f) for f in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)})
    plain, ids = tiny.model(family), torch.arange(4, 20)[None]
    original = plain(ids).logits
    merge_adapter(plain, adapter, family)
    expected = wrapped.eval()(ids).logits
    assert torch.allclose(plain(ids).logits, expected, atol=1e-3) and not torch.allclose(original, expected, atol=1e-1)


def test_an_adapter_of_another_kind_is_refused_before_the_long_work():
    model = tiny.model("qwen3_moe", mlp_only_layers=[0])  # one plain MLP, whose names peft takes for those of the fused experts
    with pytest.raises(RecipeError, match=r"only plain LoRA can be merged: name others in train.lora.target_modules"):
        try_adapter(model, LoraSection(rank=2, target_modules=["gate_proj", "up_proj", "down_proj"]))
    try_adapter(model, LoraSection(rank=2, target_modules=["q_proj", "o_proj"]))


@pytest.mark.parametrize("name", ["self_attn", "mlp", "input_layernorm", "act_fn", "rotary_emb", "model", "0", ""])
def test_names_of_what_is_no_linear_layer(name):
    with pytest.raises(RecipeError, match="the target has no linear layer .*; it has down_proj"):
        try_adapter(tiny.model(), LoraSection(target_modules=["q_proj", name]))


@pytest.mark.parametrize("lora", [{"rank": 10**12}, {"rank": 10**30}, {"alpha": 1e300}])
def test_no_such_size_is_tried(lora):
    with pytest.raises(ValueError, match="less than or equal"):
        LoraSection(**lora)


def test_a_loss_that_is_no_number_names_the_adapters_rate(distilled, tmp_path):
    with pytest.raises(RecipeError, match=r"lower train\.lr, train\.lora\.lr, train\.lora\.alpha or train\.clip_norm"):
        run.main(new_run(distilled, tmp_path / "run", {"rank": 2, "lr": 1e30}))


@pytest.fixture(scope="module")
def adapter_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(add_adapter(tiny.model(), LoraSection(rank=2)), "", None, folder)
    return folder


def _edited(**values):
    def change(folder: Path) -> None:
        raw = json.loads((folder / ADAPTER_CONFIG).read_text()) | values
        (folder / ADAPTER_CONFIG).write_text(json.dumps(raw))

    return change


def _cast(kind: torch.dtype):
    from safetensors.torch import save_file

    return lambda f: save_file({n: t.to(kind) for n, t in _load_file(f / ADAPTER_WEIGHTS).items()}, f / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(("harm", "said"), [
    *((_edited(lora_alpha=a), "has lora_alpha .*; wanted a number above 0")
      for a in ("16", [16], {}, True, -16, 0, None, 1e300, float("nan"), 10**400)),
    *((_edited(r=r), "has r .*; wanted a whole number from 1") for r in (0, -2, True, "2", 2.0)),
    *((_cast(kind), "matrices of torch") for kind in (torch.int8, torch.float8_e4m3fn)),
    (lambda f: (f / ADAPTER_CONFIG).write_text("[" * 100_000 + "]" * 100_000), "cannot read the adapter"),
])
def test_an_adapter_with_odd_values_is_one_line(adapter_files, tmp_path, harm, said):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_files, folder)
    harm(folder)
    adapter = Adapter(folder, {f: sha256_file(folder / f) for f in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)})
    with pytest.raises(RecipeError, match=said) as error:
        merge_adapter(tiny.model(), adapter, "x")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_places_that_cannot_be_are_refused_before_the_target_is_loaded(trained, tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the target was loaded")

    tuned, here = tmp_path / "tuned", tmp_path / "here"
    here.mkdir()
    save_target(tiny.model(), tiny.tokenizer(), tuned)
    before = {p.name: p.read_bytes() for p in tuned.iterdir()}
    (tmp_path / "link").symlink_to(tuned)
    monkeypatch.setattr("draftheads.inference.target.load_target", never)
    monkeypatch.chdir(here)
    capsys.readouterr()  # the progress of saving
    a, to = tmp_path / "a", ("--to", "vllm")
    for words, said in (
        (["--target", tuned, "--target-out", tuned, "--dtype", "bfloat16"], "is the folder that the target is read from"),
        (["--target", tuned, "--target-out", tmp_path / "link"], "is the folder that the target is read from"),
        ([*to, "--out", a, "--target-out", a], "give them two folders"), ([*to, "--out", a / "head", "--target-out", a], "give them two folders"),
        ([*to, "--out", a, "--target-out", a / "target"], "give them two folders"),
        ([*to, "--out", "."], "the folder that you are in"), (["--target-out", "."], "the folder that you are in"),
        (["--target-out", "x/.."], "the folder that you are in"), (["--target-out", ".."], "one above it"),
        (["--target-out", "~nobody-here/y"], "begins with ~"),
    ):
        assert specdec("export", "--ckpt", final(trained), *words) == 2, words
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in tuned.iterdir()} and not a.exists() and not [*here.iterdir()]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos"),
                                   SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")], ids=type)
def test_a_full_disk_while_a_state_is_written_is_one_line(distilled, tmp_path, monkeypatch, capsys, error):
    recipe = new_run(distilled, tmp_path / "run", {"rank": 2})

    def full(*_, **__):
        raise error

    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    assert cli.guard("specdec", lambda: run.main(recipe)) == 2
    err = capsys.readouterr().err
    assert "state-000003: No space left on device; mend that" in err.splitlines()[-1] and "Traceback" not in err
    assert not [*(recipe.run_dir / "ckpt").glob(".state-*")]
