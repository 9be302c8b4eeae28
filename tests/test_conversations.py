"""Readers: five forms, roles by name, reasons for what is dropped, even spread over categories, contamination."""

from __future__ import annotations

import itertools
import json

import pytest

from draftheads.data.conversations import Conversation
from draftheads.data.hygiene import Seen, contaminated
from draftheads.data.select import read_prompts, recipe_prompts
from draftheads.recipes.schema import Recipe, RecipeError

U, A, S = "user", "assistant", "system"
CALLED = {"role": A, "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}


def write(path, records):
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    return str(path)


def turns(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


def shape(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


def by_id(conversations):
    return {c.id: c for c in conversations}


def test_every_form_arrives_as_roles_by_name(tmp_path):
    path = write(tmp_path / "mixed.jsonl", [
        {"id": "m", "messages": turns((U, "one")), "category": "math"},
        {"id": "s", "conversations": [{"from": who, "value": text} for who, text in (("human", "two"), ("gpt", "2"), ("human", "more"))]},
        {"id": "i", "instruction": "three", "input": "with this", "output": "3"},
        {"id": "p", "prompt": "four"},
        {"id": "q", "prompt": turns((S, "be brief"), (U, "five"))},
        {"id": "t", "text": "Once upon a time"},
        {"id": "c", "messages": [{"role": "user", "content": [{"type": "text", "text": "six "}, {"type": "text", "text": "parts"}]}]},
    ])
    found, dropped = read_prompts(path)
    got = by_id(found)
    assert dropped == {}
    assert shape(got["m"]) == [(U, "one")]
    assert got["m"].category == "math"
    assert shape(got["s"]) == [(U, "two"), (A, "2"), (U, "more")]
    assert got["s"].category == got["s"].source == "mixed"
    assert shape(got["i"]) == [(U, "three\n\nwith this"), (A, "3")]
    assert shape(got["p"]) == [(U, "four")]
    assert shape(got["q"]) == [(S, "be brief"), (U, "five")]
    assert got["t"].text == "Once upon a time"
    assert shape(got["c"]) == [(U, "six parts")]


def test_system_as_turn_and_as_field_only_where_it_is_given(tmp_path):
    path = write(tmp_path / "x.jsonl", [
        {"id": "none", "messages": turns((U, "a"), (A, "b"))},
        {"id": "turn", "messages": turns((S, "sys"), (U, "c"))},
        {"id": "field", "messages": turns((U, "d")), "system": "sys"},
        {"id": "both", "messages": turns((S, "sys"), (U, "e")), "system": "sys"},
        {"id": "clash", "messages": turns((S, "sys"), (U, "f")), "system": "other"},
    ])
    found, dropped = read_prompts(path)
    got = by_id(found)
    assert shape(got["none"]) == [(U, "a"), (A, "b")]
    assert shape(got["turn"]) == [(S, "sys"), (U, "c")]
    assert shape(got["field"]) == [(S, "sys"), (U, "d")]
    assert shape(got["both"]) == [(S, "sys"), (U, "e")]
    assert dropped == {"two different system prompts": 1}
    got = by_id(read_prompts(path, system="default")[0])
    assert shape(got["none"])[0] == (S, "default")
    assert shape(got["turn"])[0] == (S, "sys")


def test_odd_conversations_are_dropped_with_their_reason_never_swapped(tmp_path):
    path = write(tmp_path / "x.jsonl", [
        {"id": "first", "conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "yo"}]},
        {"id": "twice", "messages": turns((U, "a"), (U, "b"))},
        {"id": "answers", "messages": turns((U, "a"), (A, "b"), (A, "c"))},
        {"id": "tail", "messages": turns((U, "a"), (A, "b"), (U, "c"))},
        {"id": "tool", "messages": turns((U, "a"), ("tool", "b"))},
        {"id": "empty", "messages": turns((U, "  "))},
        {"id": "nobody", "messages": turns((S, "x"))},
        {"id": "what", "foo": 1},
        {"id": "image", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"id": "lone", "messages": [{"role": A, "content": "x"}, {"role": "tool", "content": "y"}]},
        {"id": "unanswered", "messages": [*turns((U, "a")), CALLED, *turns((U, "b"))]},
        {"id": "result", "messages": [*turns((U, "b")), CALLED, *turns(("tool", "12"), (U, "c"))]},
        {"id": "nameless", "messages": [*turns((U, "a")), {"role": A, "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        {"id": "garbled", "conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "get(1)"}]},
        {"id": "again", "messages": turns((U, "a"), (A, "other reply"), (U, "c"))},
    ])
    found, dropped = read_prompts(path)
    assert [c.id for c in found] == ["tail"]
    assert shape(found[0]) == [(U, "a"), (A, "b"), (U, "c")]
    assert dropped == {
        "first turn from the assistant": 1, "two user turns in a row": 1, "two assistant turns in a row": 1, "a tool result without its call": 1,
        "empty turn": 1, "no user turn": 2, "no known form": 1, "content that is not text": 1, "duplicate": 1,
        "a tool call without its result": 1, "a tool result without an answer": 1, "a tool call without a name": 1,
        "a tool call that is not JSON": 1,
    }


def test_tools_calls_and_results_keep_their_places(tmp_path):
    """What is asked for: the call itself, the answer to its results, and what the user says next; the data's own call stays before its results."""
    results = [{"role": "tool", "content": "12", "tool_call_id": "1", "name": "add"}, {"from": "observation", "value": ""}]
    messages = [*turns((S, "sys"), (U, "a")), CALLED, *results, *turns((A, "b"), (S, "now be brief"), (U, "c"))]
    share = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
             {"from": "observation", "value": "12"}, {"from": "gpt", "value": "b"}]
    path = write(tmp_path / "x.jsonl", [{"id": "1", "messages": messages, "tools": [TOOL]},
                                        {"id": "2", "conversations": share, "tools": json.dumps([TOOL])}])
    got = by_id(read_prompts(path)[0])
    one, two = got["1"], got["2"]
    call = {"role": A, "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
    assert [(a.added, a.called) for a in one.asks()] == [
        (turns((S, "sys"), (U, "a")), None),
        ([{"role": "tool", "content": "12", "tool_call_id": "1", "name": "add"}, {"role": "tool", "content": ""}], call),
        (turns((S, "now be brief"), (U, "c")), None),
    ]
    assert (one.turns, two.turns) == (3, 2)
    assert one.tools == two.tools == [TOOL]
    assert two.messages[1]["tool_calls"] == [{k: v for k, v in call["tool_calls"][0].items() if k != "id"}]


def test_reasoning_has_a_place_of_its_own(tmp_path):
    turn = {"role": A, "content": "b", "reasoning": "because"}
    (found,) = read_prompts(write(tmp_path / "x.jsonl", [{"messages": [*turns((U, "a")), turn]}]))[0]
    assert found.messages[1] == {"role": A, "content": "b", "reasoning_content": "because"}


def test_caps_and_overlap_are_counted(tmp_path):
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    path = write(tmp_path / "x.jsonl", [{"id": f"{c}{i}", "category": c, "prompt": f"{c} {i}"} for c in "ab" for i in range(5)]
                 + [{"id": "bad", "prompt": f"Say: {words.upper()}!"}])
    held = Seen([Conversation("e", turns((U, f"well, {words}")), "c", "s")])
    found, dropped = read_prompts(path, per_category=3, held_out=held)
    assert sorted(c.category for c in found) == ["a"] * 3 + ["b"] * 3
    assert dropped == {"shares 13 words with an evaluation prompt": 1, "more than 3 of a category": 4}
    assert read_prompts(path, per_category=3, limit=4, held_out=held)[0] == found[:4]


def test_training_prompts_are_unlike_the_evaluation_s(tmp_path):
    """By default, and by what the recipe evaluates on."""
    words = " ".join(f"word{i}" for i in range(20))
    train = write(tmp_path / "train.jsonl", [{"id": "bad", "prompt": f"a {words}"}, {"id": "fine", "prompt": "b"}])
    write(tmp_path / "eval.jsonl", [{"prompt": f"{words}, and so on"}])
    recipe = {"target": {"name": "x"}, "data": {"prompts": train}, "eval": {"prompts": str(tmp_path / "eval.jsonl")}, "head": {"type": "medusa"}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    assert [c.id for c in recipe_prompts(Recipe.load(path))[0]] == ["fine"]
    both = recipe | {"data": {"prompts": recipe["eval"]["prompts"]}}
    path.write_text(json.dumps(both))
    with pytest.raises(RecipeError, match="1 × shares 13 words.*data.overlap_words: null"):
        recipe_prompts(Recipe.load(path))
    path.write_text(json.dumps(recipe | {"data": {"prompts": train, "overlap_words": None}}))
    assert sorted(c.id for c in recipe_prompts(Recipe.load(path))[0]) == ["bad", "fine"]


def test_only_as_many_records_as_are_asked_for(tmp_path, monkeypatch):
    import datasets

    asked = []

    def endless(*args, **options):
        asked.append((args, options))
        return ({"prompt": f"p {i}"} for i in itertools.count())

    monkeypatch.setattr(datasets, "load_dataset", endless)
    found, _ = read_prompts("org/some/config:test", streaming=True, most=7)
    assert (len(found), asked) == (7, [(("org/some", "config"), {"split": "test", "streaming": True})])


def test_limit_is_even_deterministic_and_independent_of_file_order(tmp_path):
    sizes = {"a": 50, "b": 30, "c": 3}
    records = [{"id": f"{cat}{i}", "category": cat, "prompt": f"{cat} {i}"} for cat, n in sizes.items() for i in range(n)]
    one = read_prompts(write(tmp_path / "1.jsonl", records), limit=19)[0]
    two = read_prompts(write(tmp_path / "1.jsonl", records[::-1]), limit=19)[0]
    assert one == two
    counts = {cat: sum(c.category == cat for c in one) for cat in "abc"}
    assert counts == {"a": 8, "b": 8, "c": 3}
    assert one != read_prompts(write(tmp_path / "1.jsonl", records), limit=19, seed=1)[0]
    assert read_prompts(write(tmp_path / "1.jsonl", records), limit=40)[0][:19] == one
    assert len(read_prompts(write(tmp_path / "1.jsonl", records))[0]) == 83


def test_ids_are_unique_and_stable(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}, {"prompt": "c"}])
    ids = sorted(c.id for c in read_prompts(path)[0])
    assert len(set(ids)) == 3
    assert [i.split("#")[0] for i in ids[:2]] == ["7", "7"]
    assert ids[2].startswith("x/")


def test_no_conversation_has_the_id_of_anothers_turn(tmp_path):
    two = {"id": "a", "messages": turns((U, "x"), (A, "y"), (U, "z"))}
    found = read_prompts(write(tmp_path / "x.jsonl", [two, {"id": "a@1", "prompt": "b"}, {"id": "a@3", "prompt": "c"}]))[0]
    rows = [c.row_id(turn + 1) for c in found for turn in range(c.turns)]
    assert len(set(rows)) == len(rows) == 4
    assert "a@3" in rows  # `a` has no third turn


def test_parquet_and_json_and_lists_of_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": ["p1"], "prompt": ["from parquet"]}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([{"id": "j1", "prompt": "from json"}]))
    found, _ = read_prompts([str(tmp_path / "a.parquet"), str(tmp_path / "b.json")])
    assert sorted(c.id for c in found) == ["j1", "p1"]
    assert {c.source for c in found} == {"a", "b"}


@pytest.mark.parametrize(("content", "message"), [
    ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
    ('{"prompt": "a"}\n\n[1, 2]\n', "line 3.*object"),
    ("", "no usable prompt.*empty"),
    ('{"foo": 1}\n', "no usable prompt.*1 × no known form.*foo"),
])
def test_bad_files_say_where_and_what(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(RecipeError, match=message) as error:
        read_prompts(str(path))
    assert "\n" not in str(error.value)


def test_missing_files_and_unknown_data_sets(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="no prompts file"):
        read_prompts(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(RecipeError, match="no such prompts file"):
        read_prompts("./nothing")
    import datasets

    def offline(*args, **options):
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(RecipeError, match="org/none:train_sft.*ConnectionError.*reach") as error:
        read_prompts("org/none:train_sft")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: [{"prompt": f"{name} {split}"}])
    assert shape(read_prompts("org/some:test")[0][0]) == [(U, "org/some test")]


def test_line_separators_inside_strings_are_no_line_ends(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert shape(read_prompts(str(path))[0][0]) == [(U, "a\u2028b\x85c")]


def test_builtin_prompts_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "somewhere"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write(package / "math.jsonl", [{"prompt": "one"}])
    monkeypatch.syspath_prepend(tmp_path)
    assert [c.source for c in read_prompts("builtin", builtin="somewhere")[0]] == ["math"]


def test_contamination_is_found_through_case_and_punctuation():
    words = "the quick brown fox jumps over the lazy dog and then runs away again today".split()

    def talk(name, text):
        return Conversation(name, turns((U, text)), "c", "s")

    fine = " ".join(words[:12]) + " never again"
    train = [talk("bad", "Please: " + ", ".join(words).upper()), talk("fine", fine), talk("short", "Say hi!")]
    held = [talk("e1", "x y z " + " ".join(words)), talk("e2", "say  hi")]
    assert {k: v[0] for k, v in contaminated(train, held).items()} == {"bad": "e1", "short": "e2"}
