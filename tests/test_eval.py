"""Statistics, cost model, losslessness, and a whole evaluation of a tiny random target."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch

import tiny
from draftheads.eval import blocks as blocks_module
from draftheads.eval import calibrate, subject, summary
from draftheads.eval.blocks import also_transformers
from draftheads.eval.cost_model import Costs, choose_gamma, predict
from draftheads.eval.lossless import compare, first_difference, target_logits, tie_bound
from draftheads.eval.records import Journal, read_journal
from draftheads.eval.run import _rounds_ran, evaluate
from draftheads.eval.stats import Throughput, ratio_interval
from draftheads.eval.summary import schema
from draftheads.eval.trace import token_texts
from draftheads.eval.work import Evaluation
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.inference import measure
from draftheads.inference.decode import complete
from draftheads.inference.drafters.base import Plan
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.none import NoDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.requests import Completion, Limits, Request, Round, RoundStat, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Static, parse_shape
from draftheads.inference.target import Target
from draftheads.recipes.schema import EvalSection, RecipeError

# ---- statistics


def test_interval_covers_the_true_ratio_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        tokens = rng.integers(20, 96, size=40)
        base = tokens * rng.uniform(0.9, 1.1, size=40)
        ours = tokens / 1.5 * np.exp(rng.normal(0, 0.2, size=40) - 0.02)
        true = 1.5
        found = ratio_interval(Throughput(tokens, ours), Throughput(tokens, base), samples=400, seed=1)
        covered += found.low <= true <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_pairing_removes_the_spread_between_prompts():
    tokens, seconds = [96, 20, 60, 80], [9.0, 1.0, 20.0, 3.0]  # very different prompts, always exactly twice as fast
    found = ratio_interval(Throughput(tokens, [s / 2 for s in seconds]), Throughput(tokens, seconds))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_of_sums_not_mean_of_ratios():
    found = ratio_interval(Throughput([90, 10], [45.0, 1.0]), Throughput([90, 10], [90.0, 10.0]))
    assert found.value == pytest.approx((100 / 46) / 1.0)


def test_nothing_to_resample():
    assert ratio_interval(Throughput([5], [1.0]), Throughput([5], [2.0])).pair is None
    assert ratio_interval(Throughput([], []), Throughput([], [])).value is None
    assert ratio_interval(Throughput([0, 0], [0.0, 0.0]), Throughput([1, 1], [1.0, 1.0])).value is None
    with pytest.raises(ValueError, match="2 and 1"):
        ratio_interval(Throughput([1, 1], [1.0, 1.0]), Throughput([1], [1.0]))


# ---- cost model

COSTS = Costs(0.03, (1.0, 1.0, 1.1, 1.2, 1.4), {"head": 0.1, "ngram": 0.0}, {"head": 0.1, "ngram": 0.0}, (1, 2, 3, 4, 5))


def stat(drafted: int, accepted: int, source: str = "head", nodes: int | None = None) -> RoundStat:
    return RoundStat(drafted, drafted if nodes is None else nodes, accepted, accepted + 1, source)


def test_prediction_counts_rounds_without_drafts_at_their_own_price():
    speed, tau = predict([stat(4, 4, "ngram"), stat(0, 0, "none")], COSTS)
    assert tau == 3.0
    assert speed == pytest.approx(6 / (1.4 + 1.0))


def test_gamma_is_cut_where_acceptance_stops_paying():
    shallow = [stat(4, 1)] * 10  # the first draft is always right, the second never
    assert choose_gamma(shallow, COSTS, {"head": range(1, 5)}).gamma == {"head": 1}
    deep = [stat(4, 4)] * 10
    assert choose_gamma(deep, COSTS, {"head": range(1, 5)}).gamma == {"head": 4}
    both = choose_gamma([*shallow, *[stat(4, 4, "ngram")] * 10], COSTS, {"ngram": (1, 2, 4), "head": (1, 2, 3, 4)})
    assert both.gamma == {"ngram": 4, "head": 1}
    assert both.speedup == pytest.approx(max(r["speedup"] for r in both.table))
    assert len(both.table) == 12


def test_a_tree_is_verified_at_its_width_and_costs_the_same_however_deep_it_went():
    grown = Costs(0.03, (1.0, 1.0, 1.1, 1.2, 1.4), {"head": 0.0}, {"head": 0.5}, (1, 2, 3, 4, 5))
    speed, tau = predict([stat(2, 2, nodes=4), stat(2, 0, nodes=4)], grown)
    assert (speed, tau) == (pytest.approx(4 / (2 * (1.4 + 0.5))), 2.0)


def test_widths_beyond_the_measured_ones_go_on_rising():
    assert COSTS.verify(6) > COSTS.verify(5) == 1.4
    assert Costs.from_json(json.loads(json.dumps(COSTS.to_json()))).verify(3) == 1.1


# ---- losslessness


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(("logits", "verdict"), [([0.0, 5.0, 4.9995], "tie"), ([0.0, 5.0, 4.99], "unexplained"), ([9.0, 5.0, 4.9999], "unexplained")])
def test_a_tie_needs_both_tokens_at_the_top(logits, verdict):
    """The last case: the two tokens are equal, but neither is the argmax, so neither may be emitted."""
    seen = []
    found = compare([7, 1], [7, 2], lambda prefix: seen.append(prefix) or logits)
    assert (found.verdict, found.position, seen) == (verdict, 1, [[7]])


def test_ending_early_is_never_a_tie():
    assert compare([1, 2, 3], [1, 2], lambda prefix: [0.0] * 9).verdict == "unexplained"
    assert compare([1, 2], [1, 2], lambda prefix: pytest.fail("no need to look")).verdict == "identical"


def test_half_precision_has_its_own_bound():
    assert tie_bound("float32", 30.0) == 1e-3
    assert tie_bound("bfloat16", 32.0) == pytest.approx(0.5)
    assert tie_bound("float16", 32.0) == pytest.approx(1 / 16)


# ---- the target's own fixtures


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target") / "tiny")


def make_checkpoint(folder: Path, target_folder: Path, **changes) -> Path:
    """An untrained head in a run folder, as training would leave it."""
    target = Target.load(str(target_folder))
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "draft_vocab_size": 64, "taps": [1, 2, 3]}, target.geometry, torch.arange(4, 68))
    metrics = changes.pop("metrics", {})
    meta = HeadMeta(target=str(target_folder), template_hash=target.template_hash, recipe_hash="r", data_hash="d", metrics=metrics)
    head.borrow(target.embed_VD, target.lm_head_VD)
    save_head(head, folder / "ckpt" / "final", meta)
    prompts = folder / "prompts.jsonl"
    lines = [{"id": f"{c}-{i}", "category": c, "messages": [{"role": "user", "content": text * (1 + i % 2)}]}
             for c, text in (("copy", "abcabc abc"), ("<b>odd</b>", "what is 2+2?")) for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"target": {"name": str(target_folder)}, "head": {"type": "eagle3"}, "data": {"prompts": str(prompts), "overlap_words": None},
              "eval": {"prompts": str(prompts), "per_category": 2, "max_new_tokens": 12, "bootstrap": 200, "transformers_fraction": 0.5, **changes}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="module")
def run_folder(target_folder, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("run"), target_folder, metrics={"tau": 1.9, "accuracy": [0.5, 0.4, 0.3]})


@pytest.fixture(autouse=True)
def _short_drafts(monkeypatch):
    """Calibration up to γ = 3 and in few rounds: the same code in a fifth of the time."""
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    short = {"LENGTHS": dict.fromkeys(calibrate.LENGTHS, (1, 3)) | {"head": (1, 2, 3)}, "FILLERS": (1, 3),
             "TIMED": dict.fromkeys(calibrate.TIMED, (2,)) | {"head": (1, 3)}, "ROUNDS": 3, "REPEATS": 1, "CALIBRATION_PROMPTS": 4}
    for name, value in short.items():
        patch.setattr(calibrate, name, value)


@pytest.fixture(scope="module")
def outcome(run_folder):
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return evaluate(subject.open_checkpoint(run_folder), quiet=True)


def valid(report: dict) -> dict:
    jsonschema.Draft202012Validator(schema()).validate(report)
    return report


def test_whole_evaluation_of_a_tiny_target(outcome, run_folder):
    report = valid(json.loads((run_folder / "report" / "report.json").read_text()))
    assert report == outcome.report
    assert list(report["by_drafter"]) == ["none", "ngram", "head", "composite"]
    assert set(report["by_category"]) == {"copy", "<b>odd</b>"}
    assert report["summary"]["prompts"] == 4
    assert report["by_drafter"]["none"]["tau"] == pytest.approx(1.0)
    assert report["by_drafter"]["ngram"]["by_category"]["copy"]["prompts"] == 2
    # Greedy, fp32: everything equals everything, transformers included, on its half of the prompts.
    pairs = report["losslessness"]["pairs"]
    assert set(pairs) == {"none/ngram", "none/head", "none/composite", "none/head (γ = 4)", "none/composite (γ = 4)",
                          *(f"transformers/{d}" for d in report["by_drafter"])}
    assert all(c["unexplained"] == 0 for c in pairs.values())
    assert sum(pairs["none/head"].values()) == 4
    assert sum(pairs["transformers/none"].values()) == 2
    assert report["summary"]["lossless"] is True
    assert report["cost_model"]["gamma_chosen"] == "measured"
    assert len(report["cost_model"]["v"]) == 4
    assert report["summary"]["baseline_vs_transformers"] > 0
    assert (report["expected"]["tau"], report["expected"]["gamma"]) == (1.9, 3)
    assert report["expected"]["measured_tau"] >= 1.0
    assert report["expected"]["training_prompts_tau"] >= 1.0
    assert report["at_tau_gamma"]["gamma"] == 4
    assert {t["category"] for t in report["trace"]} == {"copy", "<b>odd</b>"}
    page = (run_folder / "report" / "report.html").read_text()
    assert "&lt;b&gt;odd&lt;/b&gt;" in page
    assert "<b>odd" not in page
    assert (run_folder / "report" / "report.md").read_text().startswith("# Evaluation of")


def test_second_run_measures_nothing_and_a_killed_one_goes_on(outcome, run_folder, monkeypatch):
    records = run_folder / "report" / "records.jsonl"
    whole = records.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(measure, "timed_decode", lambda *a, **k: pytest.fail("measured again"))
        patch.setattr(measure, "sample_costs", lambda *a, **k: pytest.fail("measured again"))
        again = evaluate(subject.open_checkpoint(run_folder), quiet=True)
    assert again.report["summary"] == outcome.report["summary"]
    lines = whole.splitlines(keepends=True)
    blocks = [i for i, line in enumerate(lines) if '"kind": "block"' in line]
    assert len(blocks) == 4
    records.write_text("".join(lines[: blocks[2]]) + lines[blocks[2]][:100])  # killed while writing the third
    ran = []
    original = blocks_module.run_block
    monkeypatch.setattr(blocks_module, "run_block", lambda work, i, *rest: ran.append(i) or original(work, i, *rest))
    resumed = evaluate(subject.open_checkpoint(run_folder), quiet=True)
    assert ran == [2, 3]
    assert resumed.report["cost_model"]["v"] == outcome.report["cost_model"]["v"]
    for name in ("none", "head"):
        assert resumed.report["by_drafter"][name]["tau"] == outcome.report["by_drafter"][name]["tau"]
    changed = evaluate(subject.open_checkpoint(run_folder, ["eval.max_new_tokens=6"]), quiet=True)
    assert changed.report["summary"]["tokens"] < outcome.report["summary"]["tokens"]


def test_sampling_in_batches_is_judged_by_z(target_folder, tmp_path, monkeypatch):
    timed_at, original = [], measure.sample_costs
    monkeypatch.setattr(measure, "sample_costs", lambda *a, **k: timed_at.append(len(a[2])) or original(*a, **k))
    folder = make_checkpoint(tmp_path, target_folder, temperature=0.8, batch_size=2, transformers_fraction=0.0, gamma=2,
                             drafters=["none", "head"], max_new_tokens=16)
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert report["drafter"] == "head"
    assert report["cost_model"]["gamma"] == {"head": {"head": 2}}
    assert set(report["losslessness"]["z"]) == {"none", "head"}
    assert report["summary"]["lossless"] is True
    assert report["losslessness"]["pairs"] == {}
    assert timed_at == [2]  # costs at the evaluation's own batch size
    assert report["summary"]["speedup_vs_transformers"] is None


def test_acceptance_alone_costs_no_measuring_and_end_tokens_may_be_ignored(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "sample_costs", lambda *a, **k: pytest.fail("measured costs"))
    folder = make_checkpoint(tmp_path, target_folder, costs=False, gamma=2, tau_gamma=2, ignore_eos=True, drafters=["none", "head"],
                             transformers_fraction=1.0)
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert report["cost_model"] is None and report["by_drafter"]["head"]["gamma"] == {"head": 2} and report["ok"]
    blocks = [e for e in read_journal(folder / "report" / "records.jsonl") if e["kind"] == "block"]
    assert {len(row["tokens"]) for b in blocks for run in b["runs"].values() for row in run["rows"]} == {12}
    with pytest.raises(RecipeError, match="gamma auto is chosen by them"):
        subject.open_checkpoint(folder, ["eval.gamma=auto"])


EVERYTHING = ["none", "ngram", "suffix", "head", "composite", "draft_model"]


def test_every_drafter_with_trees_and_processors_of_the_history(target_folder, tmp_path):
    tree = "dynamic:depth=3,top_k=2,nodes=5"
    options = {"drafters": EVERYTHING, "draft_model": str(target_folder), "copy_first": "suffix", "tree": tree, "repetition_penalty": 1.2,
               "no_repeat_ngram_size": 3, "min_new_tokens": 3, "transformers_fraction": 1.0}
    folder = make_checkpoint(tmp_path, target_folder, metrics={"tau": 1.9, "accuracy": [0.5, 0.4, 0.3]}, **options)
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    # Token for token: our autoregressive path under the same processors, and transformers' generate with the same options.
    pairs = report["losslessness"]["pairs"]
    assert set(pairs) == {*(f"none/{d}" for d in EVERYTHING[1:]), *(f"transformers/{d}" for d in EVERYTHING)}
    assert all(c["identical"] + c["tie"] == 4 for c in pairs.values()) and report["ok"]
    by = report["by_drafter"]
    assert {n: (list(f["gamma"]), f["tree"]) for n, f in by.items()} == {
        "none": ([], None), "ngram": (["ngram"], None), "suffix": ([], tree), "head": ([], tree), "composite": ([], tree), "draft_model": ([], tree)}
    assert by["draft_model"]["tau"] > 1.5
    assert report["drafting"] == {"tree": tree, "grown_by": ["suffix", "head", "composite", "draft_model"], "copy_first": "suffix",
                                  "draft_model": str(target_folder)}
    assert report["at_tau_gamma"]["by_drafter"].keys() <= {"ngram"}
    assert report["expected"]["training_prompts_tau"] >= 1.0 and report["expected"]["measured_tau"] is None
    costs = report["cost_model"]
    assert costs["c"]["head"] == costs["c"]["draft_model"] == 0 and costs["o"]["draft_model"] > 0 and 6 in costs["widths"]
    assert all(p["before"] > 0 and p["from_rounds"] > 0 for p in costs["predicted"].values())
    assert report["provenance"]["rounds"] == "eager (cpu)" and report["settings"]["tree"] == tree
    blocks = [json.loads(line) for line in (folder / "report" / "records.jsonl").read_text().splitlines() if '"kind": "block"' in line]
    nodes = {name: {r[1] for b in blocks for row in b["runs"][name]["rows"] for r in row["rounds"]} for name in EVERYTHING}
    assert 5 in nodes["head"] & nodes["draft_model"] & nodes["composite"] and 5 not in nodes["ngram"]
    for file in ("report.html", "report.md"):
        text = (folder / "report" / file).read_text().replace("\\_", "_")
        assert tree in text and "suffix + head" in text and "draft model" in text and "repetition_penalty 1.2" in text


def test_transformers_processors_see_padding_so_they_are_compared_without_it_only(target_folder, tmp_path):
    options = {"drafters": ["none"], "batch_size": 2, "transformers_fraction": 1.0, "max_new_tokens": 6}
    folder = make_checkpoint(tmp_path, target_folder, **options)  # prompts of two lengths in each batch
    assert "transformers/none" in evaluate(subject.open_checkpoint(folder), quiet=True).report["losslessness"]["pairs"]
    assert not evaluate(subject.open_checkpoint(folder, ["eval.repetition_penalty=1.2"]), quiet=True).report["losslessness"]["pairs"]


def test_what_has_a_draft_length_takes_it_and_the_rest_grows_the_tree():
    both = object.__new__(Composite)
    ngram, head, suffix = NgramDrafter(), SimpleNamespace(name="head"), SuffixDrafter()
    both.drafters = (ngram, head)
    tree, fixed = Dynamic(3, 2, 5), Static(((0,), (0, 0)))
    assert subject.make_plan(both, {"ngram": 9}, tree) == Plan(9, tree=tree) and ngram.gamma == 9
    assert subject.make_plan(both, {"ngram": 7, "head": 3}, tree) == Plan(3) and ngram.gamma == 7
    assert subject.make_plan(head, {"head": 5}, tree) == Plan(5)
    assert subject.make_plan(ngram, {"ngram": 4}, tree) == Plan(4) and subject.make_plan(NoDrafter(), {}, tree) == Plan(1)
    assert subject.make_plan(suffix, {}, tree).tree == tree and suffix.gamma is None
    both.drafters = (suffix, head)
    assert subject.make_plan(both, {"head": 3}, tree) == Plan(3) and subject.make_plan(both, {}, tree).tree == tree
    assert subject.make_plan(suffix, {"suffix": 6}, fixed).tree is None and suffix.gamma == 6
    for shape in (tree, fixed, Sampled((2, 1))):
        assert parse_shape(subject.tree_text(shape)) == shape


def test_sampling_options_arrive():
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "no_repeat_ngram_size": 4, "min_new_tokens": 5,
              "lossy": "typical"}
    assert subject.sampling(EvalSection(**values)) == Sampling(**values)


def test_ties_are_judged_by_the_processed_logits(target_folder):
    target = Target.load(str(target_folder))
    sampling, ids = Sampling(repetition_penalty=2.0, no_repeat_ngram_size=1, min_new_tokens=30), tuple(range(40, 60))
    (row,) = complete(target, NoDrafter(), [Request("a", ids)], sampling, Limits(20, 64))
    after, raw = target_logits(target, ids, sampling), target_logits(target, ids, Sampling())
    assert [int(np.argmax(after(row.tokens[:n]))) for n in range(20)] == row.tokens
    assert any(int(np.argmax(raw(row.tokens[:n]))) != token for n, token in enumerate(row.tokens))


def test_the_report_says_how_rounds_ran_on_a_gpu(tmp_path):
    target = SimpleNamespace(device=torch.device("cuda"), graphs=SimpleNamespace(status="eager: capturing failed (no)"))
    journal = Journal(tmp_path / "r.jsonl", {})

    def work(decoded=True, drafters=("none", "head"), **option):
        return SimpleNamespace(target=target, decoded=decoded, drafters=drafters, sampling=Sampling(**option))

    assert _rounds_ran(work(), journal) == "eager: capturing failed (no)"
    target.graphs.status = "CUDA graphs: 0 captured"  # of a process that only renders
    assert _rounds_ran(work(decoded=False), Journal(tmp_path / "r.jsonl", {})) == "eager: capturing failed (no)"
    target.graphs.status = "CUDA graphs: 9 captured"
    assert _rounds_ran(work(drafters=("none", "mtp")), journal) == "CUDA graphs: 9 captured; mtp drafts eagerly"
    for option in ({"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": 2}):
        said = _rounds_ran(work(**option), journal)
        assert said.startswith("verifying: eager (") and said.endswith("drafting: CUDA graphs: 9 captured")


def test_warming_up_is_done_with_the_timed_runs_cache(run_folder, tmp_path, monkeypatch):
    """CUDA graphs belong to a cache of one length: with another nothing that was warmed up would count."""
    seen, original = [], measure.timed_decode

    def spy(target, drafter, requests, sampling, limits, **options):
        seen.append((drafter.name, limits.max_len, limits.max_new_tokens))
        return original(target, drafter, requests, sampling, limits, **options)

    monkeypatch.setattr(measure, "timed_decode", spy)
    evaluate(subject.open_checkpoint(run_folder, [], {"drafters": ["none", "ngram"], "transformers_fraction": 0.0}), out=tmp_path, quiet=True)
    (_, timed, _), warm = seen[-1], seen[:2]
    assert warm == [("none", timed, 8), ("ngram", timed, 8)]


def test_no_drafters_at_all_means_the_default_ones(run_folder):
    for drafters in ("eval.drafters=null", "eval.tau_gamma=4"):
        found = subject.open_checkpoint(run_folder, [drafters], {"draft_model": "x"}).recipe.eval
        assert found.drafters == ["none", "ngram", "head", "composite", "draft_model"]


def test_a_sampled_tree_leaves_copying_its_length(target_folder, tmp_path):
    folder = make_checkpoint(tmp_path, target_folder, drafters=["none", "composite"], tree="sampled:2,1", transformers_fraction=0.0, temperature=0.9,
                             min_p=0.02)
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert list(report["summary"]["gamma"]) == ["ngram"] and report["summary"]["tree"] == "sampled:2,1"
    assert report["summary"]["lossless"] is True and report["lossy"] is None
    assert report["at_tau_gamma"]["by_drafter"].keys() <= {"none"}


def test_a_lossy_rule_stamps_the_report_and_accuses_nobody(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(summary.metrics, "martingale_z", lambda rows: 9.0)
    folder = make_checkpoint(tmp_path, target_folder, drafters=["none", "head"], gamma=2, transformers_fraction=0.0, temperature=0.8, lossy="typical")
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert report["ok"] and report["summary"]["lossless"] is None and report["losslessness"]["z"]["head"] == 9.0
    assert report["lossy"] == {"rule": "typical", "epsilon": 0.09, "alpha": 0.3} and report["verdict"].startswith("LOSSY: typical acceptance")
    for file in ("report.html", "report.md"):
        assert "LOSSY: typical acceptance" in (folder / "report" / file).read_text()
    honest = valid(evaluate(subject.open_checkpoint(folder, ["eval.lossy=null"]), quiet=True).report)
    assert not honest["ok"] and "LOSSY" not in honest["verdict"] and honest["summary"]["lossless"] is False


def test_a_lossy_rule_is_still_checked_at_temperature_0(target_folder, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, target_folder, drafters=["none", "ngram"], gamma=2, transformers_fraction=0.0, lossy="typical")
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert report["ok"] and report["summary"]["lossless"] is True and "at temperature 0 the rule is exact" in report["verdict"]
    wrong_tokens_of(monkeypatch, "ngram")
    assert not evaluate(subject.open_checkpoint(folder), quiet=True, fresh=True).report["ok"]


def test_a_suffix_store_knows_earlier_answers_only(target_folder, tmp_path, monkeypatch):
    """While a block is measured: what was written in the blocks before it, in a resumed run too; in the untimed runs nothing of the timed ones."""
    options = {"drafters": ["none", "suffix", "composite"], "copy_first": "suffix", "gamma": 2, "transformers_fraction": 0.0}
    folder = make_checkpoint(tmp_path, target_folder, **options)
    seen, original = [], measure.timed_decode

    def spy(target, drafter, requests, *args, **options):
        store = next((p.store for p in subject.parts(drafter) if isinstance(p, SuffixDrafter)), None)
        before = 0 if store is None else len(store.texts)
        timed = original(target, drafter, requests, *args, **options)
        if store is not None:
            seen.append((drafter.name, [r.id for r in requests], before, store.tokens))
        return timed

    monkeypatch.setattr(measure, "timed_decode", spy)
    evaluate(subject.open_checkpoint(folder), quiet=True)
    blocks = [s for s in seen if s[0] == "suffix" and len(s[1]) == 1][-4:]
    assert [s[2] for s in blocks] == [0, 1, 2, 3]
    assert seen[-1][:1] + seen[-1][2:3] == ("composite", 0) and len(seen[-1][1]) == 4  # at tau_gamma
    records = folder / "report" / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if '"kind": "block"' in line]
    records.write_text("".join(lines[: at[2]]))
    seen.clear()
    evaluate(subject.open_checkpoint(folder), quiet=True)
    again = [s for s in seen if s[0] == "suffix" and len(s[1]) == 1][-2:]
    assert [(s[1], s[2]) for s in again] == [(s[1], s[2]) for s in blocks[2:]]
    assert again[-1][3] == blocks[-1][3]


def wrong_tokens_of(monkeypatch, name):
    original = measure.timed_decode

    def wrong(target, drafter, *args, **options):
        timed = original(target, drafter, *args, **options)
        if drafter.name == name:
            timed.completions[0].tokens[2] ^= 1
        return timed

    monkeypatch.setattr(measure, "timed_decode", wrong)


def test_a_wrong_token_is_caught(target_folder, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, target_folder, gamma=2, drafters=["none", "ngram"], transformers_fraction=0.0)
    wrong_tokens_of(monkeypatch, "ngram")
    report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
    assert report["ok"] is False
    assert report["by_drafter"]["ngram"]["lossless"] is False
    listed = [d for d in report["losslessness"]["divergences"] if d["verdict"] == "unexplained"]
    assert listed
    assert listed[0]["position"] == 2
    assert listed[0]["gap"] > 1e-3


def test_a_wrong_token_of_an_untimed_run_is_caught(target_folder, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, target_folder, gamma=2, drafters=["none", "head"], transformers_fraction=0.0)
    original = Evaluation.decode_untimed

    def wrong(self, name, *args, **options):
        timed = original(self, name, *args, **options)
        timed.completions[1].tokens[2] ^= 1
        return timed

    monkeypatch.setattr(Evaluation, "decode_untimed", wrong)
    for _ in range(2):  # measured, and rendered again from the records
        report = valid(evaluate(subject.open_checkpoint(folder), quiet=True).report)
        assert report["losslessness"]["pairs"]["none/head"]["unexplained"] == 0
        assert report["losslessness"]["pairs"]["none/head (γ = 4)"] == {"identical": 3, "tie": 0, "unexplained": 1}
        assert report["by_drafter"]["head"]["lossless"] is False and report["ok"] is False


# ---- pieces


def test_bad_prompts_are_refused_before_anything_runs(run_folder, tmp_path):
    with pytest.raises(RecipeError, match=r"did you mean 'copy'"):
        evaluate(subject.open_checkpoint(run_folder, ["eval.categories=[cppy]"]), quiet=True)
    with pytest.raises(RecipeError, match=r"has \d+ tokens"):
        evaluate(subject.open_checkpoint(run_folder, ["eval.max_new_tokens=500"]), quiet=True)
    with pytest.raises(RecipeError, match="no prompts file"):
        evaluate(subject.open_checkpoint(run_folder, [f"eval.prompts={tmp_path / 'none.jsonl'}"]), quiet=True)
    with pytest.raises(RecipeError, match=r"unknown key 'eval.gama'; did you mean 'gamma'"):
        subject.open_checkpoint(run_folder, ["eval.gama=3"])


def test_a_checkpoint_cannot_allow_itself_to_run_code(target_folder, tmp_path):
    folder = make_checkpoint(tmp_path, target_folder)
    recipe = json.loads((folder / "recipe.yaml").read_text())
    recipe["target"]["trust_remote_code"] = True
    for place in (folder, folder / "ckpt" / "final"):
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        assert subject.open_checkpoint(folder).recipe.target.trust_remote_code is False
    assert subject.open_checkpoint(folder, ["target.trust_remote_code=true"]).recipe.target.trust_remote_code is True


def test_other_prompts_under_the_same_ids_are_measured_anew(target_folder, tmp_path):
    folder = make_checkpoint(tmp_path, target_folder, gamma=1, drafters=["none"], transformers_fraction=0.0)
    before = evaluate(subject.open_checkpoint(folder), quiet=True).report
    prompts = folder / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("abcabc abc", "xyzxyz xyz"))
    after = evaluate(subject.open_checkpoint(folder), quiet=True).report
    assert after["settings"]["prompts"] != [] and before["trace"][0]["id"] == after["trace"][0]["id"]
    assert before["trace"] != after["trace"]


def test_where_a_checkpoint_is_looked_for(run_folder, tmp_path):
    assert subject.open_checkpoint(run_folder / "ckpt" / "final").name == run_folder.name
    with pytest.raises(RecipeError, match="no checkpoint at"):
        subject.open_checkpoint(tmp_path / "nothing")
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(RecipeError, match="training has not ended"):
        subject.open_checkpoint(tmp_path)


def test_transformers_share_is_spread_evenly():
    for names in ("abcdefg", "abc", "ab"):  # 7, 3 and 2 categories that take turns
        chosen = also_transformers(list(names) * 6, 1 / 3)
        assert sorted(names[i % len(names)] for i in chosen) == sorted([*names, *names])
    assert also_transformers("aabb", 0.0) == set()
    assert also_transformers("ab", 0.1) == {0}
    assert also_transformers("abcab", 1.0) == {0, 1, 2, 3, 4}


def test_timing_leaves_out_prefill_and_first_tokens(target_folder):
    target = Target.load(str(target_folder))
    requests = [Request("a", (5, 6, 7)), Request("b", (8, 9, 10, 11, 12))]
    limits = Limits(8, 64, ignore_eos=True)
    ours = measure.timed_decode(target, NoDrafter(), requests, Sampling(), limits, plan=Plan(), batch_size=2)
    assert [c.request.id for c in ours.completions] == ["a", "b"]
    assert ours.decode_tokens == 14
    assert ours.decode_s > 0
    assert ours.prefill_s > 0
    theirs = measure.timed_generate(measure.plain_model(target), requests, Sampling(), limits, eos_ids=(), pad_id=3)
    assert [c.tokens for c in theirs.completions] == [c.tokens for c in ours.completions]
    assert theirs.decode_tokens == 14


def test_clock_ticks_between_yields_and_stops_for_prefills(monkeypatch):
    """Whatever a round costs is in, wherever in the loop it is spent; a consumer's time and prefills are not."""
    row = Completion(Request("a", (5,)), [1, 2, 3], "length")

    def stub(*_, **__):
        time.sleep(0.2)
        yield Round({}, {}, [], width=0)
        for finished in ([], [row]):
            time.sleep(0.02)
            yield Round({}, {}, finished, width=1)

    monkeypatch.setattr(measure, "decode", stub)
    cpu = type("T", (), {"device": torch.device("cpu")})
    timed = measure.timed_decode(cpu, NoDrafter(), [row.request], Sampling(), Limits(), plan=Plan(), on_round=lambda r: time.sleep(0.3))
    assert 0.04 <= timed.decode_s < 0.2 <= timed.prefill_s < 0.5
    assert timed.decode_tokens == 2


def test_filler_gives_every_width(target_folder):
    target = Target.load(str(target_folder))
    samples = measure.sample_costs(target, {}, [Request("a", (5, 6, 7))], fillers=(1, 3), rounds=3, repeats=1)
    assert set(samples.verify_s) == {1, 2, 4}
    fitted = measure.fit_costs(samples)
    assert fitted["widths"] == [1, 2, 4]
    assert all(v > 0 for v in fitted["v"])


def test_costs_are_a_line_in_gamma_and_interpolated_in_width():
    draft = {"head": {1: [0.012, 0.012, 0.012, 0.5], 4: [0.018] * 3, 8: [0.026] * 3}}  # 10 ms + 2 ms a step, one sample spoilt by a neighbour
    samples = measure.CostSamples({1: [0.09] * 3, 2: [0.1] * 3, 4: [0.12] * 3}, {"head": [0.005] * 9}, draft, [0.1] * 4)
    fitted = measure.fit_costs(samples)
    assert fitted["v"] == pytest.approx([0.9, 1.0, 1.1, 1.2])
    assert (fitted["t_ar_s"], fitted["c"]["head"], fitted["o"]["head"]) == pytest.approx((0.1, 0.02, 0.15))


def test_texts_of_tokens_add_up():
    tokenizer = tiny.tokenizer()
    tokens = tokenizer("hello <|im_end|>")["input_ids"]
    assert "".join(token_texts(tokenizer, tokens)) == tokenizer.decode(tokens)
