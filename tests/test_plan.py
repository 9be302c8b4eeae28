"""Where `specdec plan` puts things: by what fits, with the reason, and by rates that the run has measured itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftheads.eval import placement
from draftheads.eval.plan import make_plan
from draftheads.recipes.schema import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"
H100 = {"tflops": 400.0, "bandwidth": 2500.0}


def plan(tmp_path, name="llama70b", *sets, **options):
    return make_plan(Recipe.load(RECIPES / f"{name}.yaml", [f"run={tmp_path}", "data.prompts=org/some", *sets]), **(H100 | options))


@pytest.fixture
def disk(monkeypatch):
    def has(gib):
        monkeypatch.setattr(placement, "free_gib", lambda folder: gib)

    return has


def test_states_go_where_they_fit(tmp_path, disk):
    sets = "data.features=capture", "data.limit=1000"
    needs = plan(tmp_path, "llama70b", *sets)["disk_gib"]["distill"]
    for free, wanted in ((needs * 2, "capture"), (needs * 0.8, "capture, data.states: fp8"), (needs * 0.3, "online")):
        disk(free)
        assert plan(tmp_path, "llama70b", *sets)["placement"]["states"]["choice"] == wanted, free
    disk(needs * 0.8)
    halved = plan(tmp_path, "llama70b", *sets, "data.states=fp8")["disk_gib"]["distill"]
    assert 0.5 < halved / needs < 0.55


def test_the_target_is_whole_where_it_fits_and_spread_where_it_does_not(tmp_path, disk):
    disk(0.0)
    sets = "data.features=online", "data.servers.urls=[http://x/v1]"

    def choice(**options):
        return plan(tmp_path, "llama70b", *sets, **options)["placement"]["target"]

    weights = plan(tmp_path, "llama70b", *sets)["memory_gib"]["target"]
    assert 125 < weights < 140  # 70 billion in bfloat16
    assert choice(processes=8, memory_gib=2 * weights)["choice"] == "replicate"
    assert choice(processes=8, memory_gib=80)["choice"] == "shard"
    assert choice(processes=1, memory_gib=80)["choice"] == "does not fit"
    alone = choice(processes=1, memory_gib=80)["why"]
    assert "spread over" in alone
    wanted = int(alone.split("spread over ")[1].split()[0])
    assert choice(processes=wanted, memory_gib=80)["choice"] == "shard"
    assert choice(processes=wanted - 1, memory_gib=80)["choice"] != "shard"
    assert choice()["choice"] == "not judged"


def test_with_stored_states_training_needs_no_target(tmp_path, disk):
    disk(1e6)
    made = plan(tmp_path, "llama8b", "data.limit=1000", "data.features=capture", memory_gib=80)
    assert made["placement"] == made["placement"] | {"states": made["placement"]["states"] | {"choice": "capture"}}
    assert made["memory_gib"]["train"] == made["memory_gib"]["train_alone"]
    online = plan(tmp_path, "llama8b", "data.limit=1000", "data.features=online")
    assert online["memory_gib"]["train"] == pytest.approx(made["memory_gib"]["train"] + made["memory_gib"]["target"], abs=0.01)


def test_what_the_run_has_measured_counts_before_estimates(tmp_path):
    before = plan(tmp_path, "llama8b", "data.limit=1000")
    (tmp_path / "distill").mkdir()
    (tmp_path / "distill" / "shard-00000.json").write_text(json.dumps({"seconds": 2.0, "answer_tokens": 1000}))
    (tmp_path / "distill" / "shard-00001.json").write_text("half a recei")
    (tmp_path / "train.jsonl").write_text('{"tokens_per_s": 1}\n{"tokens_per_s": 250.0}\n')
    after = plan(tmp_path, "llama8b", "data.limit=1000")
    assert before["rates"] == {"distill": None, "train": None}
    assert after["rates"] == {"distill": 500.0, "train": 250.0}
    assert after["hours"]["distill"] == pytest.approx(after["tokens"]["answer"] / 500 / 3600, abs=1e-4)
    assert after["hours"]["train"] == pytest.approx(after["tokens"]["trained"] / 250 / 3600, abs=1e-4)
