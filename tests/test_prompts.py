"""The shipped prompts: well-formed, large enough, and held out in fact: no template, source text or 13-gram is on both sides."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"train": ROOT / "data" / "prompts", "held-out": ROOT / "eval" / "prompts"}
CATEGORIES = ["chat", "code", "extraction", "math", "qa", "rewriting", "summary"]
LEAST = {"train": 200, "held-out": 12}
WITH_SOURCES = {"extraction", "rewriting", "qa", "summary"}  # every prompt of these works on a text it carries
N = 13


def read(side: str) -> list[dict]:
    return [json.loads(line) for path in sorted(FOLDERS[side].glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]


def tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def grams(prompt: dict, n: int = N) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for message in prompt["messages"]:
        words = tokens(message["content"])
        found.update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return found


def leaks(train: list[dict], held_out: list[dict]) -> list[str]:
    """Ids of the held-out prompts that share a 13-gram with a training prompt, or that are shorter than one and stand whole in one."""
    seen: set[tuple[str, ...]] = set().union(*(grams(p) for p in train))
    short = {tuple(tokens(m["content"])) for p in train for m in p["messages"]}
    return [p["id"] for p in held_out if grams(p) & seen or any(tuple(tokens(m["content"])) in short for m in p["messages"])]


@pytest.mark.parametrize("side", FOLDERS)
def test_one_file_per_category_with_well_formed_lines(side):
    assert sorted(p.stem for p in FOLDERS[side].glob("*.jsonl")) == CATEGORIES
    for path in FOLDERS[side].glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) >= LEAST[side], path.name
        for line in lines:
            prompt = json.loads(line)
            assert set(prompt) == {"id", "category", "template", "source", "messages"}
            assert prompt["category"] == path.stem
            assert prompt["template"].startswith(path.stem + "/")
            roles = [m["role"] for m in prompt["messages"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt["id"]  # ends with the user: the target answers
            assert all(m["content"] == m["content"].strip() != "" for m in prompt["messages"])
            assert 15 <= sum(len(m["content"].split()) for m in prompt["messages"]) <= 250, prompt["id"]
            assert bool(prompt["source"]) or path.stem not in WITH_SOURCES, prompt["id"]


def test_ids_and_prompts_are_unique_over_both_sides():
    prompts = read("train") + read("held-out")
    assert len({p["id"] for p in prompts}) == len(prompts)
    assert len({json.dumps(p["messages"]) for p in prompts}) == len(prompts)


def test_training_prompts_are_varied():
    by_category: dict[str, list[dict]] = {c: [] for c in CATEGORIES}
    for prompt in read("train"):
        by_category[prompt["category"]].append(prompt)
    for category, prompts in by_category.items():
        templates = Counter(p["template"] for p in prompts)
        assert len(templates) >= 12, category
        assert len({p["template"] for p in prompts[:12]}) == 12, f"{category}: the first twelve lines should be of twelve templates"
        if category in WITH_SOURCES or category == "code":
            assert len({p["source"] for p in prompts if p["source"]}) >= 60, category


@pytest.mark.parametrize("field", ["template", "source"])
def test_sides_share_no_template_and_no_source(field):
    train, held_out = ({p[field] for p in read(side)} - {""} for side in FOLDERS)
    assert train.isdisjoint(held_out)


def test_held_out_prompts_share_no_13_gram_with_the_training_prompts():
    assert leaks(read("train"), read("held-out")) == []


def test_the_leak_check_finds_a_planted_leak():
    train, held_out = read("train"), read("held-out")
    words = max((tokens(p["messages"][0]["content"]) for p in train), key=len)[2 : 2 + N]
    planted = {"id": "planted", "messages": [{"role": "user", "content": "Before. " + ", ".join(w.upper() for w in words) + " After."}]}
    assert leaks(train, [*held_out, planted]) == ["planted"]
    copied = {"id": "copied", "messages": [{"role": "user", "content": " ".join(words[: N - 1]) + " new"}]}
    assert leaks(train, [copied]) == []


def test_licence_is_stated_and_the_files_are_small():
    text = (FOLDERS["train"] / "README.md").read_text(encoding="utf-8")
    assert "CC0" in text
    assert "eval/prompts" in text
    assert sum(p.stat().st_size for folder in FOLDERS.values() for p in folder.glob("*.jsonl")) < 2_500_000
