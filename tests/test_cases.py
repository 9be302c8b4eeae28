"""Public cases that no other test shows whole (shared/cases/open-cases.md), and bad input by the commands' own front doors.

The other cases: 1 test_template, 2 test_conversations, test_distill, 3 test_align, test_train, 4 test_vocab, 6 test_train, test_metrics,
test_report, 7 test_train, 8 test_decode, 9 test_verify, 10 test_decode, test_heads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from test_decode import WRONG, Replay

import tiny
from draftheads.data.distill import distill
from draftheads.data.features import Row, RowStore
from draftheads.data.select import read_prompts
from draftheads.eval import cli, launch
from draftheads.eval.lossless import compare
from draftheads.eval.records import Journal
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, load_head, save_head
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.head import HeadDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.requests import Limits, Request
from draftheads.inference.target import Target
from draftheads.recipes.files import blocked
from draftheads.recipes.schema import Recipe, RecipeError
from draftheads.train import run
from draftheads.train.align import align
from draftheads.train.examples import survey, target_features
from draftheads.train.resume import newest_state
from draftheads.train.step import TrainStep, chunks_of

ROOT = Path(__file__).resolve().parent.parent


def write_recipe(folder: Path, target: Path, records: list[dict] | None = None, **sections: dict) -> Path:
    """A small recipe of everything: 6 prompts, 4 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    talks = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i} things {'x' * i}"}]} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (talks if records is None else records)))
    raw = {
        "run": str(folder / "run"), "target": {"name": str(target), "dtype": "float32"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 12, "batch_size": 6, "drop_loops": False,
                 "overlap_words": None},  # they are evaluated too
        "head": {"type": "eagle3", "taps": [1, 2, 3], "draft_vocab_size": 64},
        "eval": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 8, "bootstrap": 100},
        "train": {"steps": 4, "batch_tokens": 128, "lr": 1e-2, "log_every": 1, "checkpoint_every": 2, "unroll": [{"until": 1.0, "steps": 2}]},
    }
    for name, values in sections.items():
        raw[name] = raw[name] | values
    (folder / "r.yaml").write_text(yaml.safe_dump(raw))
    return folder / "r.yaml"


def records_of(recipe: Recipe) -> list[dict]:
    return [json.loads(line) for line in (recipe.run_dir / "train.jsonl").read_text().splitlines()]


def weights(recipe: Recipe) -> bytes:
    return (recipe.run_dir / "ckpt/final/model.safetensors").read_bytes()


# --- case 2: a tokenizer without a chat template ----------------------------------------------------------------------------------------


def test_plain_text_and_ids_train_without_a_chat_template_and_chat_asks_for_one(tmp_path):
    folder = tiny.save(tmp_path / "target", template=None)
    texts = [{"id": f"t{i}", "text": "Once upon a time " + "x" * i} for i in range(4)]
    recipe = Recipe.load(write_recipe(tmp_path / "text", folder, texts))
    assert run.main(recipe) == 0
    assert load_head(recipe.run_dir / "ckpt/final")[0].d2t.numel() == 64

    target = Target.load(str(folder))
    ids = target.tokenizer("tokens made elsewhere")["input_ids"]
    row = Row("own", "c", torch.tensor(ids), torch.arange(len(ids)) >= 9)
    store = RowStore.write(tmp_path / "rows", target_features(target, (1, 2, 3), [row]))
    assert survey(store, recipe.train, 128).lengths == [len(ids)]
    head = build_head(recipe.head | {"draft_vocab_size": None}, target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    step, aligned = TrainStep(head, target.lm_head_VD, target.finish_logits), align(list(store), steps=2, supervise="answers", max_len=99)
    loss, sums = step(aligned, chunks_of(aligned, recipe.train, step.known_V), 1.0)
    assert torch.isfinite(loss)
    assert sums["supervised"].sum() > 0

    chat = write_recipe(tmp_path / "chat", folder)
    with pytest.raises(RecipeError, match="no chat template: set target.chat_template"):
        distill(Recipe.load(chat), progress=False)
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    assert len(distill(Recipe.load(chat, [f"target.chat_template={tmp_path / 'own.jinja'}"]), progress=False)) == 6


# --- case 3: a batch with every label masked, in a whole run -----------------------------------------------------------------------------


def test_steps_without_any_label_leave_the_run_sound(tmp_path):
    """A draft vocabulary of 2 and its labels only: most global batches (one row each) have no loss slot at all."""
    path = write_recipe(tmp_path, tiny.save(tmp_path / "target"), head={"draft_vocab_size": 2},
                        train={"drop_out_of_vocab": True, "batch_tokens": 40, "micro_batch_tokens": 40, "steps": 12})
    recipe = Recipe.load(path)
    assert run.main(recipe) == 0
    log = records_of(recipe)
    losses = [r["loss"] for r in log]
    assert 0 < losses.count(0.0) < len(losses), losses
    assert all(0 <= x < 100 for x in losses)
    load_head(recipe.run_dir / "ckpt/final")  # refuses what is not finite


# --- case 4: fewer tokens seen than the draft vocabulary holds; lm_head wider than the tokenizer -----------------------------------------


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """100 tokens, 128 lm_head rows."""
    folder = tiny.save(tmp_path_factory.mktemp("padded") / "target")
    tiny.tokenizer(100).save_pretrained(folder)
    return folder


def test_train_and_decode_with_a_wide_lm_head_and_few_tokens_seen(padded, tmp_path):
    recipe = Recipe.load(write_recipe(tmp_path, padded, data={"max_new_tokens": 4}))
    assert run.main(recipe) == 0
    target = Target.load(str(padded))
    assert len(target.tokenizer) == 100
    assert target.geometry.vocab_size == 128
    store = RowStore.open(recipe.run_dir / "distill")
    produced = {int(i) for row in store for i in row.ids[row.flags]}
    head, _ = load_head(recipe.run_dir / "ckpt/final", geometry=target.geometry, template_hash=target.template_hash)
    ids = head.target_ids(torch.arange(64)).tolist()
    assert len(set(ids)) == 64 > len(produced)
    assert {i for i in produced if i < 100} | {2} <= set(ids)
    assert max(ids) < 100
    assert head.t2d.shape == (128,)

    class Watched(HeadDrafter):
        seen: set[int] = set()

        def propose(self, *args):
            tree = super().propose(*args)
            self.seen |= set(tree.tokens_BN[:, 1:][tree.valid_BN[:, 1:]].tolist())
            return tree

    asked = [Request(str(i), tuple(range(10, 15 + i)), seed=i) for i in range(3)]
    limits = Limits(20, 128, ignore_eos=True)
    plain = complete(target, NoDrafter(), asked, limits=limits)
    drafted = complete(target, Watched(head, target), asked, limits=limits, batch_size=2)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    assert Watched.seen
    assert Watched.seen <= set(ids)


@pytest.mark.parametrize(("size", "said"), [(120, "120 exceeds the 100 usable"), (200, "200 exceeds the target's"), (0, "draft_vocab_size")])
def test_a_draft_vocabulary_that_cannot_be_is_refused_before_distilling(padded, tmp_path, size, said):
    with pytest.raises(RecipeError, match=said):
        run.main(Recipe.load(write_recipe(tmp_path, padded, head={"draft_vocab_size": size})))
    assert not (tmp_path / "run/distill").exists()


# --- case 7: tied embeddings; another number of processes --------------------------------------------------------------------------------


def test_a_tied_target_with_a_reduced_vocabulary_resumes_to_the_bit(tmp_path, monkeypatch):
    folder = tiny.save(tmp_path / "target", tie_word_embeddings=True)
    assert Target.load(str(folder)).geometry.tie_word_embeddings
    changes = {"head": {"draft_vocab_size": 32, "freeze_lm_head": False}, "train": {"feature_noise": 0.2}}
    straight = Recipe.load(write_recipe(tmp_path / "a", folder, **changes))
    assert run.main(straight) == 0
    halves = Recipe.load(write_recipe(tmp_path / "b", folder, **changes))
    with monkeypatch.context() as patch:
        patch.setattr(run, "Stopper", lambda accelerator, every: tiny.StopAt(2))
        assert run.main(halves) == 143
    assert newest_state(halves.run_dir / "ckpt")[0].step == 2
    assert run.main(halves) == 0
    assert weights(halves) == weights(straight)
    head, _ = load_head(halves.run_dir / "ckpt/final")
    assert head.lm_head.weight.shape == (32, 64)
    assert json.loads((halves.run_dir / "ckpt/final/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, first, second):
    """The same global batches, no row twice or lost: the losses are those of a run by one process."""
    folder = tiny.save(tmp_path / "target")
    train = {"micro_batch_tokens": 64, "keep": 9}
    straight = Recipe.load(write_recipe(tmp_path / "one", folder, train=train))
    assert run.main(straight) == 0
    recipe = write_recipe(tmp_path / "two", folder, train=train)
    ckpt = tmp_path / "two/run/ckpt"
    for world in (first, second):
        done = subprocess.run(launch.training_command(recipe, [], world, cuda=False), capture_output=True, text=True, check=False,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900)
        assert done.returncode == 0, done.stderr
        assert f"training on {world} process" in done.stderr
        if world == first:  # as if it had been stopped after step 2
            shutil.rmtree(ckpt / "final")
            assert newest_state(ckpt)[0].step == 2
    assert "going on after step 2" in done.stderr
    one, two = records_of(straight), records_of(Recipe.load(recipe))
    assert [r["step"] for r in two] == [1, 2, 3, 4]
    for a, b in zip(one, two, strict=True):
        assert (a["supervised"], a["lr"], a["epoch"]) == (b["supervised"], b["lr"], b["epoch"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


# --- case 8: equality ----------------------------------------------------------------------------------------------------------------


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def test_fifty_prompts_of_64_tokens_equal_transformers(tmp_path):
    """Good and bad drafts, a chain and a tree, and a head of random weights."""
    target = Target.from_model(tiny.model(), tiny.tokenizer())
    target.eos_ids = frozenset()
    asked = [Request(str(i), prompt(5 + i % 7, i), seed=i) for i in range(50)]
    answers = {}
    for length in range(5, 12):  # transformers answers prompts of one length together: no padding in the reference
        group = [r for r in asked if len(r.prompt_ids) == length]
        ids = torch.tensor([r.prompt_ids for r in group])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=3)
        answers |= {r.prompt_ids: row[length:].tolist() for r, row in zip(group, out, strict=True)}
    assert all(len(a) == 64 for a in answers.values())
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "taps": [1, 2, 3]}, target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    for drafter in (Replay(answers, WRONG["always right"]), Replay(answers, WRONG["never right"], "tree"),
                    Replay(answers, WRONG["sometimes right"], "tree"), HeadDrafter(head, target)):
        found = complete(target, drafter, asked, limits=Limits(64, 128), batch_size=50, plan=Plan(4))
        assert [c.tokens for c in found] == [answers[r.prompt_ids] for r in asked]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_window_in_every_second_layer(attention):
    """Window 8, prompt 20, 40 new tokens, drafts wrong half of the time, chain and tree, beside a shorter prompt."""
    model = tiny.model("gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    model.set_attn_implementation(attention)
    target = Target.from_model(model, tiny.tokenizer())
    target.eos_ids = frozenset()
    asked = [Request("long", prompt(20, 1)), Request("short", prompt(6, 2))]
    answers = {}
    for request in asked:
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=3)
        answers[request.prompt_ids] = out[0, ids.shape[1] :].tolist()
    for shape in ("chain", "tree"):
        for batch_size in (1, 2):
            found = complete(target, Replay(answers, WRONG["half right"], shape), asked, limits=Limits(40, 128), batch_size=batch_size)
            assert [c.tokens for c in found] == list(answers.values())
            assert all(any(r.accepted for r in c.rounds) and any(r.accepted < r.drafted for r in c.rounds) for c in found)


def test_bfloat16_differs_in_near_ties_only():
    target = Target.from_model(tiny.model().to(torch.bfloat16), tiny.tokenizer())
    asked = [Request(str(i), prompt(5 + i % 7, i)) for i in range(12)]
    limits = Limits(24, 128, ignore_eos=True)
    plain = complete(target, NoDrafter(), asked, limits=limits)
    answers = {r.prompt_ids: c.tokens for r, c in zip(asked, plain, strict=True)}
    for drafter in (NgramDrafter(1, 4), Replay(answers, WRONG["sometimes right"])):
        for request, ours, theirs in zip(asked, plain, complete(target, drafter, asked, limits=limits, batch_size=4), strict=True):
            def logits(prefix: list[int], start: tuple[int, ...] = request.prompt_ids) -> list[float]:
                return target.model(torch.tensor([[*start, *prefix]])).logits[0, -1].float().tolist()

            found = compare(ours.tokens, theirs.tokens, logits, "bfloat16")
            assert found.verdict in ("identical", "tie"), found


# --- bad input: one line, exit code 2, before long work ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("bad")
    target = Target.load(str(tiny.save(base / "target")))
    head = build_head({"type": "eagle3", "draft_vocab_size": 64, "taps": [1, 2, 3]}, target.geometry, torch.arange(4, 68))
    save_head(head, base / "run/ckpt/final", HeadMeta(target=target.name, template_hash=target.template_hash))
    path = write_recipe(base, base / "target")
    shutil.copy(path, base / "run/recipe.yaml")
    return base / "run"


def specdec(*words: object) -> int:
    return cli.guard("specdec", lambda: cli.app([str(w) for w in words], standalone_mode=False, prog_name="specdec"))


def specdec_eval(*words: object) -> int:
    return cli.guard("specdec-eval", lambda: cli.eval_app([str(w) for w in words], standalone_mode=False, prog_name="specdec-eval"))


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "error: " in err
    return err


@pytest.mark.parametrize(("text", "said"), [
    ("run: 2024-13-45", "not valid YAML"), ("run: !!map [1]", "not valid YAML"), ("run: 0b_", "not valid YAML"),
    ("data: {prompts: \"./a\\0b\"}", "no path"),
    ("run: ok\ntrain: {lr: .inf}", "train.lr"), ("run: ok\ntrain: {clip_norm: .inf}", "clip_norm"), ("run: ok\ndata: {prompts: ~}", "data.prompts"),
])
def test_odd_recipes(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text("target: {name: smollm2-135m}\nhead: {type: eagle3}\n" + text)
    with pytest.raises(RecipeError, match=said) as error:
        Recipe.load(tmp_path / "r.yaml")
    assert "\n" not in str(error.value)


def test_a_value_that_is_no_yaml_is_taken_as_text(tmp_path):
    (tmp_path / "r.yaml").write_text("target: {name: smollm2-135m}\nhead: {type: eagle3}\n")
    assert Recipe.load(tmp_path / "r.yaml", ["data.system=2024-13-45"]).data.system == "2024-13-45"


def test_half_a_surrogate_pair_is_dropped_and_counted(tmp_path):
    lines = [r'{"prompt": "a \ud800 b"}', r'{"id": "\udfff", "prompt": "c"}', r'{"category": "\udfff", "prompt": "d"}', '{"prompt": "fine"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    found, dropped = read_prompts(str(tmp_path / "p.jsonl"))
    assert [c.messages[0]["content"] for c in found] == ["fine"]
    assert dropped == {"half a surrogate pair": 3}
    (tmp_path / "p.jsonl").write_text("[" * 100_000)
    with pytest.raises(RecipeError, match="line 1: not valid JSON"):
        read_prompts(str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(("change", "said"), [
    ({"data": {"max_new_tokens": 1}}, "the mask covers nothing.*max_new_tokens is 1"),
    ({"train": {"max_len": 9}}, "the mask covers nothing.*max_len 9"),
])
def test_a_mask_that_will_cover_nothing_is_refused_before_distilling(run_folder, tmp_path, change, said):
    recipe = Recipe.load(write_recipe(tmp_path, run_folder.parent / "target", **change))
    with pytest.raises(RecipeError, match=said):
        distill(recipe, progress=False)
    assert not list((tmp_path / "run/distill").glob("shard-*"))


@pytest.mark.parametrize(("words", "said"), [
    (["a\udcff"], "the prompt holds bytes"), (["a", "--system", "\udcff"], "--system holds bytes"), (["a", "--stop", ""], "--stop is empty"),
    (["x" * 600], "600|6.. tokens"), (["a", "--device", "foo"], "device foo"),
])
def test_generate_with_odd_words(run_folder, capsys, words, said):
    assert specdec("generate", *words, "--ckpt", run_folder) == 2
    assert re.search(said, one_line(capsys))


@pytest.mark.parametrize(("words", "said"), [
    (["--set", "eval=3"], "eval"),
    (["--device", "foo"], "device foo"), (["--device", "cuda:99"], "device cuda:99"), (["--out", "prompts.jsonl"], "prompts.jsonl: File exists"),
    (["--out", "prompts.jsonl/x"], "Not a directory"),
])
def test_places_that_are_not_there(run_folder, capsys, monkeypatch, words, said):
    monkeypatch.chdir(run_folder.parent)
    assert specdec_eval("--ckpt", run_folder, "--json", *words) == 2
    assert said in one_line(capsys)


def test_a_run_folder_that_is_a_file(run_folder, capsys):
    base = run_folder.parent
    assert specdec("distill", "--recipe", base / "r.yaml", "--set", f"run={base / 'prompts.jsonl'}") == 2
    assert "prompts.jsonl" in one_line(capsys)
    assert blocked(OSError(5, "Input/output error", "x")) is None


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints(run_folder, tmp_path, capsys):
    def damaged(change) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(run_folder, tmp_path / "run")
        change(tmp_path / "run/ckpt/final")
        assert specdec_eval("--ckpt", tmp_path / "run", "--json", "--drafters", "none,head") == 2
        return one_line(capsys)

    def meta(**values):
        def change(folder: Path) -> None:
            raw = json.loads((folder / "draftheads.json").read_text())
            (folder / "draftheads.json").write_text(json.dumps(raw | values))

        return change

    assert "sha256 differs" in damaged(lambda f: flip(f / "model.safetensors", -1000))
    assert "cannot read" in damaged(lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]))
    assert "no config.json" in damaged(lambda f: (f / "config.json").unlink())
    assert "format" in damaged(meta(format="abc"))
    other = tiny.save(tmp_path / "other", num_hidden_layers=5)
    assert "num_layers 4 ≠ 5" in damaged(meta(target=str(other)))
    assert "/gone" in damaged(meta(target="/gone"))


def test_altered_shards_of_the_right_size_are_made_again(run_folder, tmp_path):
    """A flipped bit in states, in the header, in the text beside them: found before training, and only that shard is redone."""
    recipe = Recipe.load(write_recipe(tmp_path, run_folder.parent / "target", data={"shard_rows": 3}))
    before = distill(recipe, progress=False).hash
    folder = tmp_path / "run/distill"
    kept = (folder / "shard-00001.json").stat().st_mtime_ns
    for name, at in (("shard-00000.safetensors", -50), ("shard-00000.safetensors", 12), ("shard-00000.safetensors", 6), ("shard-00000.jsonl", 0)):
        whole = (folder / name).read_bytes()
        flip(folder / name, at)
        assert distill(recipe, progress=False).hash == before
        assert (folder / name).read_bytes() == whole
    assert (folder / "shard-00001.json").stat().st_mtime_ns == kept
    flip(folder / "shard-00000.jsonl", 0)
    with pytest.raises(RecipeError, match=r"shard-00000\.jsonl cannot be read"):
        RowStore.open(folder)[0]


def test_a_journal_of_garbage_is_begun_anew(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b"5\n[]\n\xff\n")
    assert Journal(tmp_path / "records.jsonl", {"a": 1}).entries == []
    with (tmp_path / "records.jsonl").open("a") as out:
        out.write("[1]\n")
    assert Journal(tmp_path / "records.jsonl", {"a": 1}).entries == []


@pytest.mark.parametrize("code", [0, 2, 143])
def test_the_scripts_exit_code_comes_through_the_launcher(code):
    """accelerate's launcher ends with 1, whatever its script ended with."""
    script = f"import os, sys; open(os.environ['DRAFTHEADS_EXIT_CODE'], 'w').write('{code}'); sys.exit({int(code > 0)})"
    assert launch.run_launcher([sys.executable, "-c", script]) == code
    assert launch.run_launcher([sys.executable, "-c", "raise SystemExit(7)"]) == 7


LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]]).wait())
"""
TRAINING = """
import pathlib, signal, sys, time
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
pathlib.Path(sys.argv[1]).touch()
while not ended:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path(sys.argv[2]).touch()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_training_behind_the_launcher_and_waits_for_its_state(tmp_path, number, code):
    started, saved = tmp_path / "started", tmp_path / "saved"
    run = "import sys; from draftheads.eval import cli, launch; sys.exit(cli.guard('specdec', lambda: launch.run_launcher(sys.argv[1:])))"
    words = [sys.executable, "-c", run, sys.executable, "-c", LAUNCHER, TRAINING, str(started), str(saved)]
    process = subprocess.Popen(words, start_new_session=True)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == code
    assert saved.exists()


@pytest.mark.slow
def test_specdec_train_answers_bad_input_with_one_line_and_2(run_folder, tmp_path):
    path = write_recipe(tmp_path, run_folder.parent / "target", head={"draft_vocab_size": 4096})
    command = [sys.executable, "-c", "from draftheads.eval.cli import main; main()", "train", "--recipe", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "draft_vocab_size" in done.stderr
