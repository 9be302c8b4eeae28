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
from draftheads.eval.launch import training_command
from draftheads.eval.plan import make_plan, target_parameters
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
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
    for command in ("distill", "show-mask", "train", "eval", "generate", "plan"):
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
        (["--threads", "0"], "--threads"),
        (["--drafters", "head,magic"], "eval.drafters"),
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


def test_generate_streams_what_decoding_gives(run_folder, capsys):
    texts = []
    for extra in (["--drafter", "none"], ["--show-accepted"], ["--drafter", "ngram"]):
        assert specdec("generate", "abcabcabc", "--ckpt", run_folder, "--max-new-tokens", "12", *extra) == 0
        shown = capsys.readouterr()
        texts.append(shown.out)
        assert "τ" in shown.err
        assert "tokens/s" in shown.err
    assert texts[0] == texts[1] == texts[2]
    assert specdec("generate", "abc", "--ckpt", run_folder, "--max-new-tokens", "5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens"]) <= 5
    assert found["tau"] is None or found["tau"] >= 1
    assert specdec("generate", "abc", "--ckpt", run_folder, "--drafter", "magic") == 2


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
