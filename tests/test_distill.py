"""Distillation on a tiny target: token-exact rows, multi-turn on its own replies, kill and resume, reasons for everything that is lost."""

from __future__ import annotations

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

import tiny
from draftheads.data import distill as module
from draftheads.data import regenerate as regenerating
from draftheads.data.distill import distill
from draftheads.data.features import RowStore
from draftheads.data.regenerate import pick_temperature
from draftheads.data.show_mask import masked_rows, print_masks
from draftheads.data.template import render
from draftheads.inference.requests import Captured, Completion, Round
from draftheads.inference.target import Target
from draftheads.recipes.files import locked
from draftheads.recipes.schema import Recipe, RecipeError
from draftheads.train import run

WORDS = "tell me about the sea and what fish eat when winter comes over cold dark water".split()


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny.model(), tiny.tokenizer())


def prompts(count=10):
    for i in range(count):
        text = " ".join(WORDS[i % 7 : i % 7 + 2 + i % 4]) + f" {i}"
        yield {"id": f"p{i}", "category": "ab"[i % 2], "messages": [{"role": "user", "content": text}]}


def recipe_of(folder: Path, records=None, name="in-memory", head=None, **data) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (prompts() if records is None else records)))
    data = dict(prompts=str(path), max_new_tokens=10, batch_size=3, shard_rows=4, max_prompt_tokens=120, drop_loops=False) | data
    return Recipe.model_validate({"run": str(folder / "run"), "target": {"name": name, "dtype": "float32"}, "data": data,
                                  "head": head or {"type": "eagle3", "taps": [1, 2, 3]}})


def shard_bytes(folder: Path):
    files = sorted([*folder.glob("shard-*.safetensors"), *folder.glob("shard-*.jsonl")])
    return {f.name: f.read_bytes() for f in files}


# --- rows --------------------------------------------------------------------------------------------------------------------------------


def test_rows_are_what_was_sent_and_what_the_target_produced(tmp_path, target):
    recipe = recipe_of(tmp_path)
    store = distill(recipe, target=target, progress=False)
    sent = {r["id"]: r["messages"] for r in prompts()}
    assert sorted(r.id for r in store) == sorted(sent)
    for row in store:
        P = int((~row.flags).sum())
        assert row.ids[:P].tolist() == render(target.tokenizer, sent[row.id], add_generation_prompt=True)
        assert row.flags[P:].all()
        assert not row.flags[:P].any()
        with torch.no_grad():
            whole = target.model(row.ids[None], output_hidden_states=True, use_cache=False)
        answer = whole.logits[0, P - 1 : -1].argmax(-1)
        assert row.ids[P:].tolist() == answer.tolist()  # greedy, token by token
        assert row.finish_reason == ("eos" if int(row.ids[-1]) in target.eos_ids else "length")
        wanted_TF = torch.cat([whole.hidden_states[k][0, :-1] for k in (1, 2, 3)], -1)
        torch.testing.assert_close(row.features_TF, wanted_TF, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(row.final_TD, whole.hidden_states[-1][0, :-1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(row.lse_T, whole.logits[0, :-1].logsumexp(-1), rtol=1e-4, atol=1e-4)
    assert store.counts["prompts"] == store.counts["rows"] == 10
    assert store.counts["categories"] == {"a": 5, "b": 5}
    assert sum(store.counts["finish"].values()) == 10
    assert store.counts["answer_tokens"] == sum(int(r.flags.sum()) for r in store)
    assert store.manifest["provenance"]["threads"] == [torch.get_num_threads()]


def test_online_stores_tokens_only(tmp_path, target):
    captured = distill(recipe_of(tmp_path / "a"), target=target, progress=False)
    online = distill(recipe_of(tmp_path / "b", features="online"), target=target, progress=False)
    assert online[0].features_TF is None
    assert [r.ids.tolist() for r in online] == [r.ids.tolist() for r in captured]


def three_turns():
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "OLD"), ("user", "two"), ("assistant", "OLD"), ("user", "three")]
    return {"id": "talk", "messages": [{"role": r, "content": c} for r, c in turns]}


@pytest.mark.parametrize("batch_size", [1, 8])
def test_multi_turn_answers_build_on_the_new_replies(tmp_path, target, monkeypatch, batch_size):
    seen = []

    def watching(target, drafter, requests, *args, **options):
        return decode(target, drafter, map(lambda r: seen.append(r) or r, requests), *args, **options)

    decode = regenerating.decode
    monkeypatch.setattr(regenerating, "decode", watching)
    single = {"id": "single", "messages": [{"role": "user", "content": "hi"}]}
    records = [three_turns(), three_turns() | {"id": "other", "system": "be brief"}, single]
    records[1]["messages"] = [m | {"content": m["content"] + "!"} for m in three_turns()["messages"][1:]]
    store = distill(recipe_of(tmp_path, records, max_prompt_tokens=300, batch_size=batch_size), target=target, progress=False)
    rows = {r.id: r for r in store}
    assert sorted(rows) == ["other@1", "other@2", "other@3", "single", "talk@1", "talk@2", "talk@3"]
    history = [{"role": "system", "content": "be brief"}]
    for turn, text in enumerate(["one", "two", "three"], 1):
        history.append({"role": "user", "content": text})
        row = rows[f"talk@{turn}"]
        sent = next(r for r in seen if r.id == row.id)
        assert list(sent.prompt_ids) == render(target.tokenizer, history, add_generation_prompt=True)
        assert row.ids[: len(sent.prompt_ids)].tolist() == list(sent.prompt_ids)
        assert row.extra["turn"] == turn
        assert "OLD" not in target.tokenizer.decode(row.ids)
        history.append({"role": "assistant", "content": row.extra["answer"]})
    assert all(r.flags.any() for r in store)
    assert store.counts["prompts"] == 3
    assert store.counts["rows"] == 7


TOOLED = "{% if tools %}{{ '<|im_start|>tools' + (tools | tojson) + '<|im_end|>' }}{% endif %}" + tiny.CHATML.replace(
    "m['content'] +", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '') +")


def test_the_target_answers_at_a_tool_call_and_goes_on_from_its_result(tmp_path):
    target = Target.from_model(tiny.model(), tiny.tokenizer.__wrapped__(128, TOOLED))
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
    talk = [{"role": "user", "content": "1 and 2"}, call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "OLD"},
            {"role": "user", "content": "more"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {"id": "talk", "messages": [talk[0], call | {"tool_calls": json.dumps(call["tool_calls"])}, *talk[2:]], "tools": tools}
    rows = {r.id: r for r in distill(recipe_of(tmp_path, [record], max_prompt_tokens=400), target=target, progress=False)}
    assert sorted(rows) == ["talk@1", "talk@2", "talk@3"]
    answer = {"role": "assistant", "content": rows["talk@2"].extra["answer"]}
    for name, history in {"talk@1": talk[:1], "talk@2": talk[:3], "talk@3": [*talk[:3], answer, talk[4]]}.items():
        P = int((~rows[name].flags).sum())
        assert rows[name].ids[:P].tolist() == render(target.tokenizer, history, add_generation_prompt=True, tools=tools)


def test_what_the_template_refuses_is_left_out_and_counted(tmp_path):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + tiny.CHATML
    target = Target.from_model(tiny.model(), tiny.tokenizer.__wrapped__(128, refusing))
    store = distill(recipe_of(tmp_path / "some", [three_turns(), *prompts(3)], max_prompt_tokens=300), target=target, progress=False)
    assert store.counts["dropped"] == {"prompt refused by the chat template: no system": 1}
    assert len(store) == 3
    with pytest.raises(RecipeError, match="refuses a conversation of turns system, user: no system"):
        distill(recipe_of(tmp_path / "all", [three_turns()]), target=target, progress=False)


def test_short_prompts_are_left_out_and_counted(tmp_path, target):
    records = [{"id": "long", "prompt": "tell me about the sea"}, {"id": "short", "prompt": "a"}]
    store = distill(recipe_of(tmp_path, records, min_prompt_tokens=30), target=target, progress=False)
    assert ([r.id for r in store], store.counts["dropped"]) == (["long"], {"prompt shorter than 30 tokens": 1})


def test_plain_text_is_continued_without_a_template(tmp_path):
    bare = Target.from_model(tiny.model(), tiny.tokenizer.__wrapped__(128, None))
    store = distill(recipe_of(tmp_path, [{"id": "t", "text": "Once upon"}]), target=bare, progress=False)
    assert store[0].ids[:9].tolist() == bare.tokenizer("Once upon")["input_ids"]
    with pytest.raises(RecipeError, match="target.chat_template"):
        distill(recipe_of(tmp_path / "b"), target=bare, progress=False)


def test_answers_do_not_depend_on_the_batch(tmp_path, target):
    options = dict(temperature=[0.0, 1.0], features="online")
    one = distill(recipe_of(tmp_path / "a", batch_size=1, **options), target=target, progress=False)
    two = distill(recipe_of(tmp_path / "b", batch_size=4, shard_rows=10, **options), target=target, progress=False)
    assert {r.id: r.ids.tolist() for r in one} == {r.id: r.ids.tolist() for r in two}


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.7, 1.2]])
def test_drafts_change_no_answer_and_no_state(tmp_path, target, temperature):
    plain = distill(recipe_of(tmp_path / "a", temperature=temperature), target=target, progress=False)
    drafted = distill(recipe_of(tmp_path / "b", temperature=temperature, draft="ngram", draft_gamma=3), target=target, progress=False)
    for a, b in zip(plain, drafted, strict=True):
        assert (a.id, a.ids.tolist(), a.finish_reason) == (b.id, b.ids.tolist(), b.finish_reason)
        torch.testing.assert_close(a.features_TF, b.features_TF, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(a.lse_T, b.lse_T, rtol=1e-4, atol=1e-4)


def test_an_unknown_draft_is_an_error_before_the_target_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("loaded"))
    with pytest.raises(RecipeError, match="did you mean 'ngram'"):
        distill(recipe_of(tmp_path, draft="ngrm"), progress=False)


def test_temperature_mix_is_per_row_and_recorded(tmp_path, target):
    mix = [0.0, 0.7, 1.3]
    store = distill(recipe_of(tmp_path, prompts(24), temperature=mix, features="online"), target=target, progress=False)
    assert {r.temperature for r in store} == set(mix)
    assert all(r.temperature == pick_temperature(mix, 0, r.id) for r in store)
    assert len({r.seed for r in store}) == 24
    greedy = distill(recipe_of(tmp_path / "g", prompts(24), features="online"), target=target, progress=False)
    plain = {r.id: r.ids.tolist() for r in greedy}
    for row in store:
        assert (plain[row.id] == row.ids.tolist()) == (row.temperature == 0)


# --- what is lost ------------------------------------------------------------------------------------------------------------------------


def rigged(outcomes):
    """A decode() that ends rows as told: id -> (tokens, finish reason); the captured states are random."""

    def decode(target, drafter, requests, sampling, limits, *, batch_size, capture_taps, plan):
        for request in requests:
            tokens, reason = outcomes.get(request.id, ([50, 51, 2], "eos"))
            slots = len(request.prompt_ids) + len(tokens) - 1
            states = None
            if capture_taps is not None and reason != "error":
                states = Captured(torch.randn(slots, 64 * len(capture_taps)), torch.randn(slots, 64), torch.randn(slots))
            done = Completion(request, tokens, reason, captured=states, error="forced" if reason == "error" else None)
            yield Round({request.id: tokens}, {request.id: 0}, [done], width=1)

    return decode


def test_unfinished_rows_are_flagged_and_failed_ones_kept_apart(tmp_path, target, monkeypatch):
    outcomes = {"p0": ([50], "length"), "p1": ([], "error"), "p2": ([2], "eos"), "p3": ([5, 5, 2], "eos")}  # p3: blanks only
    monkeypatch.setattr(regenerating, "decode", rigged(outcomes))
    store = distill(recipe_of(tmp_path), target=target, progress=False)
    assert store.counts["finish"] == {"eos": 6, "length": 1}
    assert store.counts["unfinished"] == 1
    assert store.counts["failed"] == {"error": 1, "empty answer": 2}
    failed = [json.loads(line) for line in (tmp_path / "run/distill/failed.jsonl").read_text().splitlines()]
    assert {f["id"]: (f["reason"], f["error"]) for f in failed} == {
        "p1": ("error", "forced"), "p2": ("empty answer", None), "p3": ("empty answer", None)}
    assert {r.id: r.finish_reason for r in store}["p0"] == "length"
    assert all(r.flags.any() for r in store)


def test_a_failed_turn_ends_its_conversation(tmp_path, target, monkeypatch):
    monkeypatch.setattr(regenerating, "decode", rigged({"talk@2": ([], "error")}))
    store = distill(recipe_of(tmp_path, [three_turns()]), target=target, progress=False)
    assert [r.id for r in store] == ["talk@1"]
    assert store.counts["failed"] == {"error": 1}


def test_loops_are_cut_where_they_begin(tmp_path, target, monkeypatch):
    looping = [60, 61, 62, *([70, 71, 72] * 8)]
    monkeypatch.setattr(regenerating, "decode", rigged({"p0": (looping, "length")}))
    store = distill(recipe_of(tmp_path, drop_loops=True), target=target, progress=False)
    row = {r.id: r for r in store}["p0"]
    assert row.ids[row.flags].tolist() == [60, 61, 62, 70, 71, 72]
    assert row.finish_reason == "loop"
    assert len(row.features_TF) == len(row.ids) - 1
    assert store.counts["loops_cut"] == 1
    assert store.counts["unfinished"] == 0
    kept = distill(recipe_of(tmp_path / "b", drop_loops=False), target=target, progress=False)
    assert {r.id: r for r in kept}["p0"].ids[row.ids.shape[0] :].tolist() == looping[6:]


def test_long_prompts_are_dropped_and_counted_and_all_of_them_is_an_error(tmp_path, target):
    long = {"id": "long", "messages": [{"role": "user", "content": "x" * 300}]}
    store = distill(recipe_of(tmp_path, [*prompts(), long], features="online"), target=target, progress=False)
    assert store.counts["dropped"] == {"prompt longer than 120 tokens": 1}
    assert "long" not in {r.id for r in store}
    with pytest.raises(RecipeError, match="all 1 prompts are longer than 120 tokens.*data.max_prompt_tokens"):
        distill(recipe_of(tmp_path / "b", [long]), target=target, progress=False)
    with pytest.raises(RecipeError, match="data.max_new_tokens 600 leaves no room"):
        distill(recipe_of(tmp_path / "c", max_new_tokens=600), target=target, progress=False)


def test_nothing_left_is_an_error_that_says_why(tmp_path, target, monkeypatch):
    monkeypatch.setattr(regenerating, "decode", rigged({f"p{i}": ([2], "eos") for i in range(10)}))
    with pytest.raises(RecipeError, match="no row is left.*10 × empty answer"):
        distill(recipe_of(tmp_path), target=target, progress=False)


def test_reasons_of_the_reader_are_in_the_counts(tmp_path, target):
    bad = {"id": "bad", "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}
    store = distill(recipe_of(tmp_path, [*prompts(4), bad], features="online"), target=target, progress=False)
    assert store.counts["dropped"] == {"first turn from the assistant": 1}


def test_full_disk_is_noticed_before_the_work(tmp_path, target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(RecipeError, match="GB are free.*data.features: online"):
        distill(recipe_of(tmp_path), target=target, progress=False)


# --- resuming ----------------------------------------------------------------------------------------------------------------------------


def interrupted(recipe, target, monkeypatch, *, after: int) -> None:
    """Distil, and be interrupted when so many shards are finished."""
    left = iter(range(after))

    def work(*args, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return regenerating.regenerate(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "regenerate", work)
        distill(recipe, target=target, progress=False)


def test_finished_data_opens_at_once_and_finished_shards_are_never_redone(tmp_path, target, monkeypatch, capsys):
    recipe = recipe_of(tmp_path)
    interrupted(recipe, target, monkeypatch, after=2)
    times = {f: f.stat().st_mtime_ns for f in (tmp_path / "run/distill").glob("shard-*")}
    calls = []
    whole = regenerating.regenerate
    monkeypatch.setattr(module, "regenerate", lambda t, c, *a, **k: calls.append([x.id for x in c]) or whole(t, c, *a, **k))
    store = distill(recipe, target=target, progress=True)
    assert [len(c) for c in calls] == [2]
    assert len(store) == 10
    assert all(f.stat().st_mtime_ns == when for f, when in times.items())
    assert "3 prompts" not in capsys.readouterr().err
    again = distill(recipe, target=target)
    assert again.hash == store.hash
    assert len(calls) == 1
    err = capsys.readouterr().err
    assert "nothing to do" in err
    assert err.count("\n") == 1


def test_finished_data_needs_no_target(tmp_path, monkeypatch, capsys):
    tiny.save(tmp_path / "model")
    recipe = recipe_of(tmp_path, name=str(tmp_path / "model"))
    store = distill(recipe, progress=False)
    monkeypatch.setattr(Target, "load", lambda *a, **k: pytest.fail("the target was loaded"))
    assert distill(recipe).hash == store.hash
    assert "nothing to do" in capsys.readouterr().err
    # The same run elsewhere is still the same run; another target under the same path is not.
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert distill(recipe.model_copy(update={"run": str(tmp_path / "moved")}), progress=False).hash == store.hash
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    with pytest.raises(pytest.fail.Exception):
        distill(recipe.model_copy(update={"run": str(tmp_path / "moved")}), progress=False)


@pytest.mark.parametrize("change", [dict(max_new_tokens=6), dict(temperature=0.5), dict(seed=1), dict(limit=6), dict(head=[1, 2])])
def test_a_changed_recipe_reuses_nothing_and_loses_nothing(tmp_path, target, capsys, change):
    first = distill(recipe_of(tmp_path), target=target, progress=False)
    old = shard_bytes(tmp_path / "run/distill")
    head = {"type": "eagle3", "taps": change.pop("head")} if "head" in change else None
    second = distill(recipe_of(tmp_path, head=head, **change), target=target)
    assert second.hash != first.hash
    (aside,) = (tmp_path / "run").glob("distill.before-*")
    assert shard_bytes(aside) == old
    assert RowStore.open(aside).hash == first.hash
    wanted = "taps" if head else "prompts" if "limit" in change else "data." + next(iter(change))
    assert wanted in capsys.readouterr().err


def test_another_target_in_memory_reuses_nothing(tmp_path, target):
    first = distill(recipe_of(tmp_path, features="online"), target=target, progress=False)
    other = Target.from_model(tiny.model(seed=5), tiny.tokenizer())
    assert distill(recipe_of(tmp_path, features="online"), target=other, progress=False).hash != first.hash


def test_packing_the_weights_is_no_change_of_target(tmp_path, target):
    recipe = recipe_of(tmp_path, features="online")
    first = distill(recipe, target=target, progress=False)
    packed = Target.from_model(tiny.model(), tiny.tokenizer(), packed=True)
    assert distill(recipe, target=packed, progress=False).hash == first.hash
    assert not list((tmp_path / "run").glob("distill.before-*"))


def test_batch_size_may_change_between_shards(tmp_path, target, monkeypatch):
    interrupted(recipe_of(tmp_path), target, monkeypatch, after=1)
    times = (tmp_path / "run/distill/shard-00000.json").stat().st_mtime_ns
    distill(recipe_of(tmp_path, batch_size=1), target=target, progress=False)
    assert (tmp_path / "run/distill/shard-00000.json").stat().st_mtime_ns == times


def test_damaged_and_foreign_shards_are_regenerated_to_the_same_bytes(tmp_path, target, capsys):
    recipe = recipe_of(tmp_path)
    store = distill(recipe, target=target, progress=False)
    folder = tmp_path / "run/distill"
    before = shard_bytes(folder)
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert distill(recipe, target=target).hash == store.hash
    assert shard_bytes(folder) == before
    assert "shard-00001.safetensors has" in capsys.readouterr().err
    for suffix in ("safetensors", "jsonl", "json"):
        shutil.copy(folder / f"shard-00000.{suffix}", folder / f"shard-00001.{suffix}")
    assert distill(recipe, target=target, progress=False).hash == store.hash
    assert shard_bytes(folder) == before


def test_two_processes_in_one_folder(tmp_path, target):
    recipe = recipe_of(tmp_path)
    with locked(recipe.run_dir / ".distill.lock", "", ""), pytest.raises(RecipeError, match=f"pid {os.getpid()}.*--set run=DIR"):
        distill(recipe, target=target, progress=False)
    distill(recipe, target=target, progress=False)


SLOWLY = """
import sys, time, torch
torch.set_num_threads(1)
from draftheads.data import regenerate
from draftheads.data.distill import distill
from draftheads.recipes.schema import Recipe
inner = regenerate.decode
def decode(*args, **options):
    for round in inner(*args, **options):
        time.sleep(float(sys.argv[2]))
        yield round
regenerate.decode = decode
distill(Recipe.model_validate_json(open(sys.argv[1]).read()))
"""


def test_kill_in_mid_shard_then_resume_gives_the_same_bytes(tmp_path, target):
    tiny.save(tmp_path / "model")
    options = dict(name=str(tmp_path / "model"), temperature=[0.0, 0.8])
    recipe = recipe_of(tmp_path / "killed", **options)
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(tmp_path / "recipe.json"), "0.1"], env=env, stderr=subprocess.DEVNULL)
    folder = tmp_path / "killed/run/distill"
    until = time.monotonic() + 300
    while not (folder / "shard-00000.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)  # well inside the second shard
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "shard-00000.json").exists()
    assert not (folder / "shard-00002.json").exists()
    assert not (folder / "manifest.json").exists()
    first = (folder / "shard-00000.json").stat().st_mtime_ns
    (folder / ".shard-00001.safetensors.xyz.part").write_bytes(b"half")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed = distill(recipe, progress=False)
        straight = distill(recipe_of(tmp_path / "straight", **options), progress=False)
    finally:
        torch.set_num_threads(threads)
    assert (folder / "shard-00000.json").stat().st_mtime_ns == first
    assert shard_bytes(folder) == shard_bytes(tmp_path / "straight/run/distill")
    assert resumed.hash == straight.hash
    assert not list(folder.glob(".*.part"))


# --- one set of rows for several heads -----------------------------------------------------------------------------------------------------


def test_the_union_of_the_taps_is_captured_once_and_serves_all_heads(tmp_path, target, monkeypatch):
    union = distill(recipe_of(tmp_path / "union", taps=["final", 3, 1, 2]), target=target, progress=False)
    assert union.taps == [1, 2, 3, "final"]
    for number, taps in enumerate(([1, 2, 3], [1, 3], [2, "final"])):
        head = {"type": "eagle3", "taps": taps}
        alone = distill(recipe_of(tmp_path / str(number), head=head), target=target, progress=False)
        for row, expected in zip(union.select(taps), alone, strict=True):
            assert torch.equal(row.features_TF, expected.features_TF) and torch.equal(row.final_TD, expected.final_TD)
        monkeypatch.setattr(module, "regenerate", lambda *a, **k: pytest.fail("rows are made again"))
        same = distill(recipe_of(tmp_path / "union", head=head, taps=["final", 3, 1, 2]), target=target, progress=False)
        assert same.hash == union.hash
        monkeypatch.undo()
    for wrong, words in (([1, 3], r"lacks \[2\], which head eagle3 reads"), ([1, 2, 3, 4], r"\[4\] are not in 0 … 3")):
        with pytest.raises(RecipeError, match=words):
            distill(recipe_of(tmp_path / "wrong", taps=wrong), target=target, progress=False)


def test_a_run_uses_the_rows_of_another(tmp_path, target, capsys):
    first = distill(recipe_of(tmp_path / "a"), target=target, progress=False)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "a/run").rglob("*")}
    head = {"type": "eagle3", "taps": [1, 3]}
    for lender in ("a/run", "a/run/distill"):
        borrower = recipe_of(tmp_path / "b", head=head, rows=str(tmp_path / lender), shard_rows=64, batch_size=1)
        assert module.rows_folder(borrower) == tmp_path / "a/run/distill"
        store = distill(borrower, target=target)
        assert store.hash == first.hash
        assert "10 rows of another run" in capsys.readouterr().err
        assert module.same_prompts(borrower)
    assert not (tmp_path / "b/run/distill").exists()
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "a/run").rglob("*")} == before, "the lender is only read"
    distill(recipe_of(tmp_path / "c", rows=str(tmp_path / "a/run"), features="online"), target=target, progress=False)


def test_rows_of_another_recipe_are_refused(tmp_path, target):
    distill(recipe_of(tmp_path / "a"), target=target, progress=False)
    lender = str(tmp_path / "a/run")
    other = Target.from_model(tiny.model(seed=5), tiny.tokenizer())
    template = Target.from_model(tiny.model(), tiny.tokenizer.__wrapped__(128, tiny.CHATML.replace("assistant", "helper")))
    for change, who, words in [
        ({"records": list(prompts(9))}, target, "prompts"), ({"max_new_tokens": 9}, target, "data.max_new_tokens"), ({}, other, "target.weights"),
        ({}, template, "target.template"), ({"head": {"type": "eagle3", "taps": [0, 1]}}, target, r"reads \[0, 1\]: name \[0\] in data.taps"),
    ]:
        with pytest.raises(RecipeError, match=words) as error:
            distill(recipe_of(tmp_path / "b", rows=lender, **change), target=who, progress=False)
        assert "\n" not in str(error.value)
    with pytest.raises(RecipeError, match="no distilled data"):
        distill(recipe_of(tmp_path / "b", rows=str(tmp_path / "none")), target=target, progress=False)
    path = tmp_path / "a/run/distill/shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecipeError, match="shard-00000"):
        distill(recipe_of(tmp_path / "b", rows=lender), target=target, progress=False)


def test_a_head_trained_on_another_runs_rows_is_the_head_trained_on_its_own(tmp_path):
    """And a finished run stays finished: its facts know nothing of where the rows lie."""
    tiny.save(tmp_path / "model")
    options = dict(name=str(tmp_path / "model"), head={"type": "eagle3", "taps": [1, 3], "draft_vocab_size": 64})

    def trained(folder: str, **data) -> Recipe:
        recipe = recipe_of(tmp_path / folder, **options, **data)
        recipe = Recipe.model_validate(recipe.model_dump() | {"train": {"steps": 2, "batch_tokens": 256, "lr": 1e-2, "log_every": 1}})
        assert run.main(recipe) == 0
        return recipe

    own = trained("own")
    trained("lender", taps=[1, 2, 3])
    lent = trained("borrower", rows=str(tmp_path / "lender/run"))
    weights = [(r.run_dir / "ckpt/final/model.safetensors").read_bytes() for r in (own, lent)]
    assert weights[0] == weights[1]
    assert all(run.finished(r) for r in (own, lent))
    meta = json.loads((own.run_dir / "ckpt/final/draftheads.json").read_text())
    assert not {"taps", "rows"} & meta["extra"]["facts"]["data"].keys()
    shutil.rmtree(tmp_path / "lender")
    assert run.finished(lent)


def test_rows_are_named_relative_to_the_recipe(tmp_path):
    recipe = recipe_of(tmp_path, rows="../lender")
    (tmp_path / "r.yaml").write_text(recipe.dump())
    assert Recipe.load(tmp_path / "r.yaml").data.rows == str(tmp_path.parent / "lender")


# --- progress ----------------------------------------------------------------------------------------------------------------------------


def test_progress_says_rows_speed_and_eta_in_plain_lines(tmp_path, target, monkeypatch, capsys):
    monkeypatch.setattr("draftheads.data.progress.EVERY_S", 0.0)
    distill(recipe_of(tmp_path, features="online"), target=target)
    err = capsys.readouterr().err
    assert "distil 10/10" in err
    assert "tok/s" in err
    assert "ETA" in err
    assert "shard 3/3" in err
    assert "10 prompts, 10 rows" in err


# --- show-mask ---------------------------------------------------------------------------------------------------------------------------


def test_show_mask_reads_back_what_training_will_read(tmp_path, capsys):
    tiny.save(tmp_path / "model")
    talk = {"id": "t", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]}
    recipe = recipe_of(tmp_path, [talk, *prompts(3)], name=str(tmp_path / "model"), features="online")
    print_masks(masked_rows(recipe, 2))
    out = capsys.readouterr().out
    assert "[[hello you<|im_end|>]]" in out
    assert "hi<|im_end|>\n" in out
    store = distill(recipe, progress=False)
    found = masked_rows(recipe, 2)
    assert [r["id"] for r in found["rows"]] == [store[0].id, store[1].id]
    assert (found["supervised"], found["total"]) == (store.counts["answer_tokens"], store.counts["tokens"])
    print_masks(found)
    out = capsys.readouterr().out
    assert out.count("[[") == 2
    assert f"finish: {store.counts['finish']['length']} × length" in out
    with pytest.raises(RecipeError, match="run specdec distill first"):
        masked_rows(recipe_of(tmp_path / "b", name=str(tmp_path / "model")), 1)
