"""Recipes: every shipped one parses and its head builds; bad keys name their neighbour; overrides, numbers and paths mean what they say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from draftheads.heads import build_head, head_config
from draftheads.recipes.schema import NgramSection, Recipe, RecipeError, SuffixSection
from draftheads.train.timetable import unroll_steps

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml"))
MINIMAL = "target: {name: smollm2-135m}\nhead: {type: eagle3}\n"
# Trainable parameters of an EAGLE-3.1 head with three taps, from the public geometries: 3H·H for fc, 2H wide q, k, v, o, SwiGLU, seven norms.
PARAMETERS = {"smollm2-135m": 5_091_264, "llama8b": 293_629_952, "llama70b": 1_140_908_032, "qwen3-8b": 268_464_128}


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    (tmp_path / "r.yaml").write_text(text)
    return Recipe.load(tmp_path / "r.yaml", overrides)


def test_the_shipped_recipes_are_there():
    assert {r.stem for r in RECIPES} >= set(PARAMETERS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_shipped_recipe_parses_and_its_head_builds(path):
    recipe = Recipe.load(path)
    geometry = recipe.target.geometry
    assert geometry is not None, "planning and head building must work offline"
    assert geometry.num_heads % geometry.num_kv_heads == 0
    config = head_config(recipe.head, geometry)
    ids_U = torch.arange(config.draft_vocab_size)
    with torch.device("meta"):  # shapes only: filling the head of a 70B target takes half a minute
        head = build_head(recipe.head, geometry, ids_U)
    assert len(head.d2t) == config.draft_vocab_size
    assert all(t == "final" or 0 <= t < geometry.num_layers for t in head.taps)
    if path.stem in PARAMETERS:
        assert sum(p.numel() for p in head.trainable_parameters()) == PARAMETERS[path.stem]
    first, last = (unroll_steps(s, 100, recipe.train) for s in (0, 99))
    assert 1 <= first <= last
    assert recipe.train.micro_batch_tokens >= min(recipe.train.max_len, recipe.data.max_prompt_tokens + recipe.data.max_new_tokens)
    assert recipe.train.max_len <= geometry.max_positions


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_shipped_recipe_carries_its_command_and_survives_a_round_trip(path, tmp_path):
    text = path.read_text()
    assert re.search(rf"train/(eagle|medusa|block)\.py --recipe recipes/{re.escape(path.name)}", text.split("\ntarget:")[0])
    recipe = Recipe.load(path)
    (tmp_path / "again.yaml").write_text(recipe.dump())
    again = Recipe.load(tmp_path / "again.yaml")
    assert again == recipe
    assert again.hash() == recipe.hash()


@pytest.mark.parametrize(("text", "message"), [
    (MINIMAL + "train: {epoch: 3}", "unknown key 'train.epoch'; did you mean 'epochs'?"),
    (MINIMAL + "trian: {}", "unknown key 'trian'; did you mean 'train'?"),
    ("target: {name: a, geometri: 1}\nhead: {type: eagle3}", "did you mean 'geometry'?"),
    ("head: {type: eagle3}", "target is missing"),
    (MINIMAL + "train: {epochs: many}", "train.epochs"),
    (MINIMAL + "train: {unroll: [{until: 0.5, steps: 1}]}", "end at 1.0"),
    (MINIMAL + "data: {temperature: []}", "data.temperature"),
    (MINIMAL + "data: {temperature: [0.0, -1]}", "data.temperature"),
    (MINIMAL + "eval: {drafters: []}", "eval.drafters"),
    (MINIMAL + "eval: {categories: []}", "eval.categories"),
    (MINIMAL + "eval: {ngram: {prompt_lookup_min: 4, prompt_lookup_max: 3}}", "prompt_lookup_min 4 is more than prompt_lookup_max 3"),
    (MINIMAL + "eval: {draft_model: a/b}", "add draft_model to drafters (none, ngram, head, composite)"),
    (MINIMAL + "eval: {drafters: [none, draft_model]}", "name it: draft_model: NAME"),
    (MINIMAL + "eval: {suffix: {max_tree_dept: 4}}", "unknown key 'eval.suffix.max_tree_dept'; did you mean 'max_tree_depth'?"),
    (MINIMAL + "eval: {copy_first: head}", "eval.copy_first"),
    (MINIMAL + "eval: {lossy: medusa}", "eval.lossy"),
    (MINIMAL + "eval: {min_p: 1.5}", "eval.min_p"),
    (MINIMAL + "eval: {gamma: 0}", "eval.gamma is 0; wanted 'auto' or a draft length of 1 … 256"),
    (MINIMAL + "eval: {gamma: 257}", "eval.gamma is 257"),
    (MINIMAL + "eval: {tau_gamma: 257}", "eval.tau_gamma"),
    (MINIMAL + "eval: {ngram: {gamma: 257}}", "eval.ngram.gamma"),
    (MINIMAL + "eval: {suffix: {gamma: 257}}", "eval.suffix.gamma"),
    (MINIMAL + "train: {lr: 1, lr: 2}", "key 'lr' is given twice"),
    ("- a\n- b", "must be a mapping"),
    ("target: [", "not valid YAML"),
])
def test_a_bad_recipe_is_one_clear_line(tmp_path, text, message):
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_recipe_names_its_neighbour(tmp_path):
    load(tmp_path, MINIMAL)
    with pytest.raises(RecipeError, match=r"no recipe at .*; did you mean .*r\.yaml"):
        Recipe.load(tmp_path / "rr.yaml")


def test_bad_head_keys_and_sizes_are_found_without_the_target():
    recipe = Recipe.load(RECIPES[0])
    geometry = recipe.target.geometry
    for change, message in (({"draft_vocab_sise": 1}, "did you mean 'draft_vocab_size'"), ({"draft_vocab_size": 10**6}, "exceeds the target's"),
                            ({"type": "eagel3"}, "did you mean 'eagle3'"), ({"taps": [2, 10**3]}, "taps")):
        with pytest.raises(RecipeError, match=message):
            head_config(recipe.head | change, geometry)


def test_numbers_in_every_notation(tmp_path):
    """PyYAML by itself reads 1e-4 as a string."""
    for text, value in (("1e-4", 1e-4), ("1.0e-4", 1e-4), ("0.0001", 1e-4), ("1E-4", 1e-4), ("2", 2.0)):
        assert load(tmp_path, MINIMAL + f"train: {{lr: {text}}}").train.lr == value
        assert load(tmp_path, MINIMAL, f"train.lr={text}").train.lr == value


def test_overrides(tmp_path):
    recipe = load(tmp_path, MINIMAL, "train.steps=7", "head.taps=[1, 2]", "train.log=[jsonl, wandb]", "target.revision=null", "data.system=a=b")
    assert recipe.train.steps == 7
    assert recipe.head["taps"] == [1, 2]
    assert recipe.train.log == ["jsonl", "wandb"]
    assert recipe.target.revision is None
    assert recipe.data.system == "a=b"
    for bad in ("train", "=3", "train.=3", "train.stepz=3", "run.x=1" if recipe.run is None else "train.lr.x=1"):
        with pytest.raises(RecipeError):
            load(tmp_path, MINIMAL + "train: {lr: 1e-3}", bad)


def test_relative_paths_are_relative_to_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/model").mkdir()
    (tmp_path / "deep/a.jsonl").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "deep/my.yaml").write_text("target: {name: ./model}\nhead: {type: eagle3}\n"
                                           "data: {prompts: [a.jsonl, builtin, org/name, ../b.parquet]}\n"
                                           "eval: {prompts: ./a.jsonl, drafters: [draft_model], draft_model: ./model, tree: 'static:t.json'}")
    recipe = Recipe.load("../deep/my.yaml")
    base = (tmp_path / "deep").resolve()
    assert recipe.target.name == str(base / "model")
    assert recipe.data.prompts == [str(base / "a.jsonl"), "builtin", "org/name", str(base.parent / "b.parquet")]
    assert recipe.eval.prompts == str(base / "a.jsonl")
    assert (recipe.eval.draft_model, recipe.eval.tree) == (str(base / "model"), f"static:{base / 't.json'}")
    assert recipe.run_dir == Path.cwd() / "runs/my"
    assert Recipe.load("../deep/my.yaml", ["run=out"]).run_dir == Path.cwd() / "out"


def test_sections_are_named_as_the_arguments_of_their_drafters():
    from draftheads.inference.drafters.ngram import NgramDrafter
    from draftheads.inference.drafters.suffix import SuffixDrafter

    for section, drafter in ((NgramSection, NgramDrafter), (SuffixSection, SuffixDrafter)):
        arguments = inspect.signature(drafter).parameters
        assert set(section.model_fields) == set(arguments)
        unlike = {name for name, field in section.model_fields.items() if field.default != arguments[name].default}
        assert unlike <= {"gamma", "min_score"}  # where None leaves it to the plan, or to what comes after it


def test_the_hash_is_of_the_content(tmp_path):
    a, b = load(tmp_path, MINIMAL), load(tmp_path, MINIMAL, "run=/elsewhere")
    assert a.hash() == b.hash()
    assert a.hash() != load(tmp_path, MINIMAL, "train.seed=1").hash()
