"""benchmarks/decode.py: it runs end to end on a tiny target, its JSON has the keys, and its arithmetic says what it claims."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from draftheads.eval.cost_model import Costs
from draftheads.heads import build_head
from draftheads.heads.checkpoint import HeadMeta, save_head
from draftheads.inference import measure
from draftheads.inference.drafters.draft_model import first_layers
from draftheads.inference.measure import Timed
from draftheads.inference.requests import Completion, Limits, Request, RoundStat, Sampling
from draftheads.inference.target import Target
from draftheads.recipes.schema import RecipeError

FOLDER = Path(__file__).parent.parent / "benchmarks"
KEYS = {
    "ar_vs_transformers", "efficiency", "overhead", "verify_cost", "draft_cost", "ngram_vs_transformers", "draft_model_vs_transformers", "by_batch",
}


@pytest.fixture(scope="module")
def bench():
    """The script and its modules, as `python benchmarks/decode.py` sees them."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_decode", FOLDER / "decode.py")
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        sys.modules["benchmark_decode"] = script
        spec.loader.exec_module(script)
        import contests
        import costs
        import draft_pair
        import roofline

        yield SimpleNamespace(script=script, contests=contests, costs=costs, draft_pair=draft_pair, roofline=roofline)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("target"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def head_folder(folder, tmp_path_factory):
    target = Target.load(str(folder), device="cpu")
    torch.manual_seed(0)
    head = build_head({"type": "eagle3", "taps": [1, 2, 3]}, target.geometry)
    head.borrow(target.embed_VD, target.lm_head_VD)
    place = tmp_path_factory.mktemp("head") / "final"
    save_head(head, place, HeadMeta(target=str(folder), template_hash=target.template_hash))
    return place


def run(bench, monkeypatch, capsys, *arguments: str) -> dict:
    smallest = dataclasses.replace(
        bench.contests.QUICK, prompts=2, tokens=8, copy_prompts=2, copy_tokens=8, cost_prompts=2, cost_rounds=3, batch_prompts=4, batch_tokens=6
    )
    monkeypatch.setattr(bench.contests, "QUICK", smallest)
    bench.script.app(["--quick", "--json", *arguments], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def all_figures(value):
    if isinstance(value, dict):
        if "value" in value:
            yield value
        for inner in value.values():
            yield from all_figures(inner)


def test_runs_end_to_end_and_has_the_keys(bench, head_folder, monkeypatch, capsys):
    report = run(bench, monkeypatch, capsys, "--ckpt", str(head_folder), "--batches", "1,2", "--device", "cpu")
    assert set(report) >= KEYS | {"provenance", "identical"}
    assert all(report[key] is not None for key in KEYS)
    found = list(all_figures(report))
    assert len(found) > 15
    for figure in found:
        assert {"value", "interval", "n"} <= set(figure)
        assert figure["value"] >= 0 and math.isfinite(figure["value"])
        assert figure["interval"] is None or figure["interval"][0] <= figure["value"] * 1.0001 and figure["n"] > 1
    assert set(report["verify_cost"]["by_width"]) >= {"1", "2", "4", "8", "16"}
    assert set(report["draft_cost"]) == {"ngram", "head", "draft_model"}
    assert set(report["draft_cost"]) == set(report["overhead"]["by_drafter"]) == set(report["efficiency"]["by_drafter"])
    # The worst drafter stands on top.
    assert report["overhead"]["value"] == max(f["value"] for f in report["overhead"]["by_drafter"].values())
    assert report["efficiency"]["value"] == min(f["value"] for f in report["efficiency"]["by_drafter"].values())
    assert set(report["by_batch"]["curves"]["ngram"]) == set(report["by_batch"]["curves"]["head"]) == {"1", "2"}
    assert {"date", "commit", "hardware", "versions", "threads"} <= set(report["provenance"])
    assert {"torch", "transformers"} <= set(report["provenance"]["versions"])
    # Losslessness is part of the comparison: all contenders of every contest wrote the same tokens.
    assert report["identical"] and all(same == total > 0 for same, total in report["identical"].values())
    text = bench.script.table(report)
    assert "ar_vs_transformers" in text and "verify_cost.by_width.4" in text


def test_sections_alone(bench, folder, monkeypatch, capsys):
    report = run(bench, monkeypatch, capsys, "--target", str(folder), "--only", "e", "--batches", "2", "--device", "cpu")
    assert set(report) >= KEYS
    assert [key for key in KEYS if report[key] is not None] == ["by_batch"]


def test_random_weights_of_a_geometry(bench, monkeypatch, capsys):
    """The GPU's section, with what needs a GPU left out."""
    report = run(bench, monkeypatch, capsys, "--geometry", "tiny", "--device", "cpu")
    found = report["roofline"]
    assert found["ar_share"]["value"] > 0 and found["draft_step_over_roofline"]["value"] >= 0
    assert set(found["step_ms"]) == {"eager"} and found["graphed_against_eager"] is None
    assert set(found["verify_cost"]["by_width"]) >= {"1", "2", "4", "8", "16"}
    assert found["host_copies"] == {"none": None, "head": None}
    # Layers and lm_head are read, of the embedding one row; the norms are small and count.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert found["weights_gb"] == pytest.approx((4 * layer + 64 + 128 * 64) * 4 / 1e9)


@pytest.mark.parametrize(("arguments", "says"), [
    (["--only", "z"], "--only"), (["--batches", "0"], "--batches"), (["--batches", "two"], "--batches"), (["--geometry", "huge"], "--geometry huge"),
])
def test_bad_input_is_one_line(bench, arguments, says):
    with pytest.raises(RecipeError, match=says) as caught:
        bench.script.app([*arguments, "--device", "cpu"], standalone_mode=False)
    assert "\n" not in str(caught.value)


def test_help_teaches():
    done = subprocess.run([sys.executable, str(FOLDER / "decode.py"), "--help"], capture_output=True, text=True, timeout=60, check=True)
    for word in ("(a)", "(f)", "--quick", "--json", "--only", "--batches", "--geometry", "transformers"):
        assert word in done.stdout


# ---- arithmetic


def timed(seconds: float, rounds: list[RoundStat]) -> Timed:
    tokens = [1] * (1 + sum(r.emitted for r in rounds))
    return Timed([Completion(Request("a", (5,)), tokens, "length", rounds)], seconds, 0.1, forwards=len(rounds))


COSTS = Costs(0.5, (0.9, 1.0, 1.1, 1.2), {"x": 0.2}, {"x": 0.1}, (1, 2, 4))


def test_efficiency_is_one_where_rounds_take_what_their_parts_do(bench):
    """A round of 3 drafts costs 3·0.2 + 1.2 + 0.1 = 1.9 steps of half a second; a round without drafts one step."""
    rounds = [RoundStat(3, 3, 2, 3, "x"), RoundStat(0, 0, 0, 1, "none")]
    base = [timed(0.5 * 4, [RoundStat(0, 0, 0, 1)] * 4)] * 3
    exact = bench.costs.efficiency([COSTS] * 2, base, [timed(0.5 * 2.9, rounds)] * 3)
    assert exact["value"] == pytest.approx(1.0) and exact["interval"] == pytest.approx([1.0, 1.0]) and exact["n"] == 3
    assert bench.costs.efficiency([COSTS] * 2, base, [timed(2 * 0.5 * 2.9, rounds)] * 3)["value"] == pytest.approx(0.5)
    # Achieved over allowed, in other words:
    achieved = 4 / (0.5 * 2.9) / (4 / (0.5 * 4))
    allowed = 4 / 2.9
    assert achieved / allowed == pytest.approx(1.0)


def test_costs_are_medians_over_prompts(bench):
    many = [dataclasses.replace(COSTS, v=(0.9, 1.0 * k, 1.1, 1.2), o={"x": 0.1 * k}) for k in (1, 2, 9)]
    middle = bench.costs.middle(many)
    assert middle.v == pytest.approx((0.9, 2.0, 1.1, 1.2)) and middle.o == {"x": pytest.approx(0.2)}
    found = bench.costs.over([k.o["x"] for k in many], at_most=0.05)
    assert found["value"] == pytest.approx(0.2) and found["met"] is False and found["interval"] == pytest.approx([0.1, 0.9])
    widths = bench.costs.verify_costs(many)["by_width"]
    assert widths["2"]["value"] == pytest.approx(2.0 / 0.9) and widths["2"]["steps"] == pytest.approx(2.0)  # relative to our own w = 1


def test_break_even(bench):
    at = bench.contests.break_even
    assert at({1: 1.5, 2: 1.2, 4: 0.8, 8: 0.5}) == pytest.approx(3.0)
    assert at({1: 1.5, 2: 1.2}) is None
    assert at({1: 0.9, 2: 0.8}) == 1.0
    assert at({}) is None


def test_copies_are_those_to_the_host(bench):
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 96}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 4096}},
        {"cat": "cuda_runtime", "name": "cudaMemcpyAsync DtoH", "args": {}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 2048}},
    ]
    assert bench.roofline.copies_in(events) == [96, 2048]


def test_assisted_generation_is_timed_after_its_prefill():
    """A draft model that is the target itself is always right: 1 + 4 tokens with the prefill, then 5 a forward."""
    target = Target.from_model(tiny.model(), tiny.tokenizer())
    assistant = copy.deepcopy(target.model)
    assistant.generation_config.update(num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    requests, limits = [Request("a", tuple(range(5, 25)))], Limits(20, 64, ignore_eos=True)
    plain = measure.timed_generate(target.model, requests, Sampling(), limits, eos_ids=(), pad_id=3)
    assert (plain.prefill_tokens, plain.forwards, plain.decode_tokens) == (1, 19, 19)
    helped = measure.timed_generate(target.model, requests, Sampling(), limits, eos_ids=(), pad_id=3, assistant_model=assistant)
    assert helped.completions[0].tokens == plain.completions[0].tokens
    assert (helped.prefill_tokens, helped.forwards, helped.decode_tokens) == (5, 3, 15)


def test_cut_and_tuning(bench, folder):
    """The cut computes what the target's first layers compute; tuning brings it nearer to the target and leaves the target as it was."""
    target = Target.load(str(folder), device="cpu", packed=False)
    model = measure.plain_model(target)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    short = copy.deepcopy(first_layers(model, 2))  # as Pair.make before tuning
    ids = torch.arange(5, 45)[None]
    states = model.model(ids, output_hidden_states=True).hidden_states[2]
    assert torch.allclose(short(ids).logits, model.lm_head(model.model.norm(states)), atol=1e-5)

    def distance():
        with torch.no_grad():
            p, q = model(ids).logits.log_softmax(-1), short(ids).logits.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    far = distance()
    row = Completion(Request("a", tuple(ids[0, :20].tolist())), ids[0, 20:].tolist(), "length")
    assert bench.draft_pair.learn(short, model, [row], lambda steps: steps / 20) == 20
    assert distance() < 0.95 * far
    assert not any(p.requires_grad for p in short.parameters())
    assert torch.equal(short.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
