"""The commands as a user meets them: help, exit codes, one line for every mistake, a whole specdec-eval by subprocess."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from draftheads.eval import cli
from draftheads.eval.cost_model import Costs
from draftheads.eval.launch import training_command
from draftheads.eval.plan import make_plan, target_parameters
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.inference import measure
from draftheads.inference.target import Target
from draftheads.recipes.files import locked
from draftheads.recipes.schema import Geometry, Recipe, RecipeError

RECIPES = Path(cli.__file__).parent.parent / "recipes"


def specdec(*words: object) -> int:
    return cli.guard("specdec", lambda: cli.app([str(w) for w in words], standalone_mode=False, prog_name="specdec"))


def specdec_eval(*words: object) -> int:
    return cli.guard("specdec-eval", lambda: cli.eval_app([str(w) for w in words], standalone_mode=False, prog_name="specdec-eval"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A tiny target and an untrained head of it in a run folder."""
    base = tmp_path_factory.mktemp("cli")
    target = Target.load(str(tiny.save(base / "tiny")))
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "draft_vocab_size": 64, "taps": [1, 2, 3]}, target.geometry, torch.arange(4, 68))
    save_head(head, base / "run" / "ckpt" / "final", HeadMeta(target=target.name, template_hash=target.template_hash))
    prompts = base / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "copy", "messages": [{"role": "user", "content": "abcabc" * (1 + i)}]} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"target": {"name": target.name}, "head": {"type": "eagle3"}, "eval": {"prompts": str(prompts), "max_new_tokens": 8, "bootstrap": 100}}
    (base / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return base / "run"


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


def test_help_of_every_command_teaches_by_example(capsys):
    assert specdec("--help") == 0
    listing = capsys.readouterr().out
    for command in ("distill", "show-mask", "train", "eval", "generate", "tree", "plan"):
        assert command in listing
        assert specdec(command, "--help") == 0
        assert f"specdec {command}" in capsys.readouterr().out.replace("specdec-eval", "specdec eval")
    assert specdec_eval("--help") == 0
    assert "--ckpt" in capsys.readouterr().out


def test_help_imports_no_torch():
    code = "import sys; from draftheads.eval import cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distill", "--recipe", "smolm2-135m.yaml"], "did you mean"),
        (["plan", "--recipe", "smollm2-135m.yaml", "--set", "data.limt=3"], "did you mean 'limit'"),
        (["plan", "--recipe", "smollm2-135m.yaml", "--set", "nonsense"], "--set wants section.key=value"),
        (["plan", "--recipe", "smollm2-135m.yaml", "--set", "head.draft_vocab_size=60000"], "draft_vocab_size"),
        (["plan", "--recipe", "smollm2-135m.yaml", "--set", "data.prompts=/no/such.jsonl"], "no such"),
        (["eval", "--ckpt", "nothing/here"], "no checkpoint at"),
        (["generate", "hello", "--ckpt", "nothing/here"], "no checkpoint at"),
        (["generate", "hello"], "--ckpt DIR"),
        (["generate", "hello", "--target", "x", "--tree", "bush"], "tree 'bush' is not known"),
        (["generate", "hello", "--target", "x", "--copy-first", "head"], "--copy-first is 'head'"),
        (["generate", "hello", "--target", "x", "--temperature", "warm"], "--temperature"),
        (["tree", "--ckpt", "nothing/here"], "no checkpoint at"),
        (["tree", "--ckpt", "nothing/here", "--nodes", "many"], "--nodes is 'many'; wanted 'auto'"),
        (["tree", "--ckpt", "nothing/here", "--nodes", "257"], "1 … 256"),
        (["tree", "--ckpt", "nothing/here", "--depth", "257"], "--depth"),
        (["generate", "hello", "--target", "x", "--gamma", "257"], "--gamma"),
        (["eval", "--ckpt", "nothing", "--tree", "static:none.json"], "cannot read the tree"),
        (["eval"], "--ckpt"),
        (["evil"], "No such command"),
        (["plan", "--recipee", "x"], "No such option"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, said, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES)
    assert specdec(*words) == 2
    line = one_line(capsys)
    assert line.startswith("specdec: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gamma", "two"], "--gamma"),
        (["--gamma", "0"], "eval.gamma"),
        (["--gamma", "257"], "1 … 256"),
        (["--set", "eval.drafters=null", "--draft-model", "ngram"], "eval.draft_model is 'ngram', which names no model"),
        (["--set", "eval.drafters=head", "--draft-model", "x"], "eval.drafters"),
        (["--threads", "0"], "--threads"),
        (["--drafters", "head,magic"], "eval.drafters"),
        (["--drafters", "none,draft_model"], "name it: draft_model: NAME"),
        (["--drafters", "none", "--draft-model", "x"], "add draft_model to drafters (none)"),
        (["--draft-model", "ngram", "--drafters", "none,draft_model"], "eval.draft_model is 'ngram', which names no model"),
        (["--drafters", "none,mtp"], "no multi-token-prediction layers"),
        (["--tree", "dynamic:depht=3"], "unknown option 'depht=3'"),
        (["--lossy", "medusa"], "eval.lossy"),
        (["--copy-first", "head"], "eval.copy_first"),
        (["--set", "eval.min_p=2"], "eval.min_p"),
        (["--categories", "cpy"], "did you mean 'copy'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--max-new-tokens", "600"], "tokens"),
        (["--set", "eval.bootstrapp=3"], "did you mean 'bootstrap'"),
    ],
)
def test_eval_mistakes(words, said, run_folder, capsys):
    assert specdec_eval("--ckpt", run_folder, "--json", *words) == 2
    assert said in one_line(capsys)


def test_bug_leaves_its_traceback_in_a_file(capsys):
    def broken() -> None:
        raise ZeroDivisionError("oops\nsecond line")

    assert cli.guard("specdec", broken) == 1
    line = one_line(capsys)
    log = Path(line.rsplit(" ", 1)[1].strip())
    assert "ZeroDivisionError: oops second line" in line
    assert "in broken" in log.read_text()
    log.unlink()


def test_interrupt_is_130(capsys):
    def stopped() -> None:
        raise KeyboardInterrupt

    assert cli.guard("specdec", stopped) == 130
    assert "same command again" in one_line(capsys)


@pytest.mark.parametrize("way", ["typer.echo", "print", "rich.print"])
def test_a_reader_that_leaves_is_no_fault(way):
    """`specdec … | head -1`: 141 as for any other command, nothing on stderr, no log of a bug."""
    code = f"""
import sys, rich, typer
from draftheads.eval import cli
app = typer.Typer()
@app.command()
def talk() -> None:
    for _ in range(10_000):
        {way}("x" * 100)
sys.exit(cli.guard("specdec", lambda: app([], standalone_mode=False)))
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.readline().startswith(b"xxx")
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait()) == (b"", 141)


def test_specdec_eval_whole_by_subprocess(run_folder, tmp_path):
    words = ["--ckpt", run_folder, "--out", tmp_path / "out", "--gamma", 2, "--per-category", 2, "--threads", 1]
    command = [sys.executable, "-c", "from draftheads.eval.cli import main_eval; main_eval()", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("n-gram + head", "transformers", "lossless", str(tmp_path / "out" / "report.html")):
        assert word in done.stdout
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["summary"]["prompts"] == 2
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_a_quick_look_leaves_the_result_alone(run_folder, tmp_path, capsys):
    shutil.copytree(run_folder, tmp_path / "run")
    words = ["--ckpt", tmp_path / "run", "--json", "--gamma", "2", "--drafters", "none,ngram", "--transformers", "0"]
    assert specdec_eval(*words) == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run/report").iterdir()}
    assert specdec_eval(*words, "--quick") == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/report").iterdir()} == before
    assert (tmp_path / "run/report-quick/report.json").is_file()
    # Other settings in the same folder: what was measured is set aside, not lost.
    assert specdec_eval(*words, "--max-new-tokens", "6") == 0
    (aside,) = (tmp_path / "run/report").glob("records.*.jsonl")
    assert aside.read_bytes() == before["records.jsonl"]
    assert specdec_eval(*words, "--max-new-tokens", "6", "--fresh") == 0
    assert len(list((tmp_path / "run/report").glob("records.*.jsonl"))) == 2
    capsys.readouterr()
    with locked(tmp_path / "run/report/.eval.lock", "", ""):
        assert specdec_eval(*words) == 2
    assert "another process (pid" in (said := one_line(capsys)) and "--out DIR" in said


def test_failed_evaluation_exits_with_1(run_folder, tmp_path, capsys):
    """The records of a finished run in which one answer was altered: rendered again, they fail."""
    words = ["--ckpt", run_folder, "--out", tmp_path, "--json", "--gamma", "2", "--drafters", "none,ngram", "--transformers", "0"]
    assert specdec_eval(*words) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    records = tmp_path / "records.jsonl"
    records.write_text(records.read_text().replace('"verdict": "identical"', '"verdict": "unexplained", "was": 1', 1).replace(
        '"position": null', '"position": 3', 1))
    assert specdec_eval(*words) == 1
    assert json.loads(capsys.readouterr().out)["summary"]["lossless"] is False


def other_tokenizer(folder: Path) -> Path:
    """A model whose ids 68 and 69 mean the other of the two."""
    tiny.save(folder, num_hidden_layers=1)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    vocab = found["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(found))
    return folder


def test_a_draft_model_with_another_tokenizer_is_refused(run_folder, tmp_path, capsys):
    other = other_tokenizer(tmp_path / "other")
    assert specdec_eval("--ckpt", run_folder, "--json", "--draft-model", other) == 2
    assert "their tokenizers differ: id " in one_line(capsys)
    assert specdec("generate", "abc", "--ckpt", run_folder, "--draft", other) == 2
    assert "their tokenizers differ: id " in one_line(capsys)


def test_generate_streams_what_decoding_gives(run_folder, capsys):
    model, tree = run_folder.parent / "tiny", ["--tree", "dynamic:depth=3,top_k=2,nodes=5"]
    words = ["generate", "abcabcabc", "--ckpt", run_folder, "--max-new-tokens", "12", "--repetition-penalty", "1.5", "--no-repeat-ngram-size", "4"]
    texts = {}
    assert specdec(*words[:-4]) == 0
    plain = capsys.readouterr().out
    for extra in (["--draft", "none"], ["--show-accepted"], ["--draft", "ngram"], ["--draft", "suffix"], ["--draft", model], tree,
                  ["--draft", model, "--copy-first", "suffix", *tree], ["--draft", run_folder / "ckpt" / "final", "--tree", "static:0;1;0,0"],
                  ["--lossy", "typical"]):
        assert specdec(*words, *extra) == 0
        shown = capsys.readouterr()
        texts[str(extra)] = shown.out
        assert "τ" in shown.err
        assert "tokens/s" in shown.err
        assert "LOSSY" not in shown.err  # at temperature 0 it is not
    assert len(set(texts.values())) == 1, texts
    assert plain not in texts.values()
    words[2:4] = ["--target", model]
    for extra in ([], ["--draft", "none"], ["--draft", run_folder, "--copy-first", "ngram"]):
        assert specdec(*words, *extra) == 0
        assert capsys.readouterr().out in texts.values()


def test_generate_says_what_it_did(run_folder, capsys):
    words = ["generate", "abc", "--ckpt", run_folder, "--max-new-tokens", "5", "--json"]
    assert specdec(*words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens"]) <= 5
    assert found["tau"] is None or found["tau"] >= 1
    assert (found["drafter"], found["tree"], found["lossy"]) == ("ngram + head", None, None)
    assert specdec(*words, "--draft", "head", "--tree", "sampled:2,1", "--temperature", "1", "--lossy", "typical") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["drafter"], found["tree"], found["lossy"]) == ("head", "sampled:2,1", "typical")
    assert any(r["nodes"] == 4 and r["drafted"] == 2 for r in found["rounds"])
    assert specdec("generate", "abc", "--ckpt", run_folder, "--temperature", "1", "--lossy", "typical", "--max-new-tokens", "3") == 0
    assert "LOSSY (typical acceptance)" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["--draft", "sufix"], "did you mean 'suffix'?"), (["--draft", "mtp"], "no multi-token-prediction layers"), (["--top-p", "0"], "top_p=0"),
    (["--lossy", "medusa"], "lossy='medusa'"), (["--draft", "none", "--copy-first", "ngram"], "for copying alone, draft='ngram'"),
    (["--target", "x"], "give a checkpoint"),
])
def test_generate_mistakes(run_folder, capsys, words, said):
    assert specdec("generate", "abc", "--ckpt", run_folder, *words) == 2
    assert said in one_line(capsys)


def test_a_searched_tree_is_there_to_be_used(run_folder, tmp_path, capsys):
    file = tmp_path / "trees" / "t.json"
    # The target as its own draft: always right, so the best tree is a chain, as deep as was measured.
    words = ["tree", "--ckpt", run_folder, "--draft", run_folder.parent / "tiny", "--nodes", "6", "--depth", "3", "--ranks", "5", "--out", file]
    assert specdec(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text())["choices"] == found["choices"] == [[0], [0, 0], [0, 0, 0]]
    assert found["expected_tau"] == {"1": 2.0, "2": 3.0, "4": 4.0, "6": 4.0}
    costs = Costs.from_json(found["costs"])
    for size, nodes in (("1", 1), ("2", 2), ("6", 3)):
        assert found["speedup"][size] == pytest.approx((1 + nodes) / costs.round("draft_model", nodes))
    assert specdec(*words) == 0
    assert f"static:{file}" in capsys.readouterr().out
    words = ["--max-new-tokens", "6", "--ckpt", run_folder]
    assert specdec("generate", "abc", *words, "--draft", "head", "--tree", f"static:{file}", "--json") == 0
    assert max(r["nodes"] for r in json.loads(capsys.readouterr().out)["rounds"]) == 3
    assert specdec("tree", "--ckpt", run_folder, "--out", tmp_path / "t.yaml") == 2
    assert "ends in .json" in one_line(capsys)
    assert specdec("tree", "--ckpt", run_folder, "--draft", "ngram", "--out", tmp_path / "n.json", "--json") == 2
    assert "grows no trees" in one_line(capsys)


@pytest.mark.parametrize(("dear", "nodes"), [pytest.param(0.0, 3, marks=pytest.mark.slow), (9.0, 1)])
def test_the_size_of_a_tree_is_chosen_by_this_machines_costs(run_folder, tmp_path, capsys, monkeypatch, dear, nodes):
    """Free drafts and verification: as deep as was measured; dear ones: as little as can be."""
    fitted = {"t_ar_s": 1.0, "widths": [1, 2], "v": [1.0, 1.0 + dear], "c": {"draft_model": 0.01 + dear}, "o": {"draft_model": 0.0}}
    monkeypatch.setattr(measure, "fit_costs", lambda samples: fitted)
    file = tmp_path / "t.json"
    words = ["tree", "--ckpt", run_folder, "--draft", run_folder.parent / "tiny", "--depth", "3", "--ranks", "5", "--out", file]
    assert specdec(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(json.loads(file.read_text())["choices"]) == len(found["choices"]) == nodes
    fastest = (1 + nodes) / Costs.from_json(fitted).round("draft_model", nodes)
    assert found["speedup"][str(nodes)] == max(found["speedup"].values()) == pytest.approx(fastest)
    assert specdec(*words) == 0
    assert "× predicted" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--show-accepted"]])
def test_generate_shows_no_stop_string_and_no_special_token(run_folder, capsys, extra):
    def answer(*words):
        assert specdec("generate", "abcabcabc", "--ckpt", run_folder, "--max-new-tokens", "40", *extra, *words) == 0
        return capsys.readouterr().out.removesuffix("\n")

    text = answer()
    assert not any(t in text for t in ("<|im_start|>", "<|im_end|>", "<pad>"))
    stop = text[5:8]
    assert answer("--stop", stop) == text[: text.index(stop)]
    assert json.loads(answer("--stop", stop, "--json"))["text"] == text[: text.index(stop)]


def test_plan_reads_no_model_and_counts_what_the_recipe_says(capsys):
    recipe = RECIPES / "smollm2-135m.yaml"
    assert specdec("plan", "--recipe", recipe, "--tflops", "0.1", "--bandwidth", "20", "--json", "--set", "data.limit=40") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"]["target"] == pytest.approx(134_515_008)
    assert made["tokens"]["rows"] == 40
    assert all(v > 0 for part in ("disk_gib", "memory_gib", "hours") for v in made[part].values())
    assert specdec("plan", "--recipe", recipe, "--tflops", "0.1", "--bandwidth", "20") == 0
    assert "peak memory" in capsys.readouterr().out
    twice = make_plan(Recipe.load(recipe, ["data.limit=80"]), tflops=0.1, bandwidth=20)
    assert twice["tokens"]["all"] == pytest.approx(2 * made["tokens"]["all"], rel=0.2)
    assert twice["disk_gib"]["distill"] == pytest.approx(2 * made["disk_gib"]["distill"], rel=0.2)


def test_parameter_count_is_the_models_own():
    model = tiny.model()
    text = model.config
    geometry = Geometry(hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=text.head_dim or 16, vocab_size=128,
                        max_positions=512)
    assert target_parameters(geometry) == sum(p.numel() for p in model.parameters())


def test_plan_reads_the_config_where_the_recipe_has_no_geometry(tmp_path):
    tiny.save(tmp_path / "target", num_hidden_layers=8)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "r.yaml").write_text("target: {name: ./target}\nhead: {type: eagle3}\ndata: {prompts: ./p.jsonl}\n")
    made = make_plan(Recipe.load(tmp_path / "r.yaml"), tflops=0.1, bandwidth=20)
    assert made["parameters"]["target"] == sum(p.numel() for p in tiny.model(num_hidden_layers=8).parameters())


def test_plan_without_geometry_says_what_to_add(tmp_path):
    (tmp_path / "r.yaml").write_text("target: {name: org/model}\nhead: {type: eagle3}\n")
    with pytest.raises(RecipeError, match=r"target\.geometry"):
        make_plan(Recipe.load(tmp_path / "r.yaml"))


def test_training_command_keeps_the_threads_that_were_asked_for(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = training_command(Path("r.yaml"), [], 1, cuda=False)
    assert words[words.index("--num_cpu_threads_per_process") + 1] == "3"


def test_training_command_starts_as_many_processes_as_asked():
    one = training_command(Path("r.yaml"), ["train.lr=1e-3"], 1, cuda=False)
    assert one[-4:] == ["--recipe", "r.yaml", "--set", "train.lr=1e-3"]
    assert one[-5].endswith("eagle.py")
    assert "--cpu" in one
    two = training_command(Path("r.yaml"), [], 2, cuda=False)
    assert two[two.index("--num_processes") + 1] == "2"
    assert "--multi_gpu" in two
    assert "--cpu" not in two  # with it, accelerate starts one process and says nothing
    assert "--cpu" not in training_command(Path("r.yaml"), [], 1, cuda=True)
