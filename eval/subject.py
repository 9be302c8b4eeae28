"""What is evaluated: a checkpoint, the target it names, and prompts. Everything that can be wrong with them is found here, before long work.

    --ckpt DIR (checkpoint folder, or run folder ─► ckpt/final) ─► draftheads.json + recipe ─► prompts ─► target ─► head ─► drafters
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftheads.data.conversations import Conversation
from draftheads.data.select import EVALUATION, read_prompts
from draftheads.data.template import encode, render
from draftheads.heads.checkpoint import Adapter, HeadMeta, adapter_of, read_meta, run_folder, stored_recipe
from draftheads.inference.checkpoints import find_folder
from draftheads.inference.drafters.base import Drafter, Plan
from draftheads.inference.drafters.choose import choose
from draftheads.inference.drafters.composite import Composite
from draftheads.inference.drafters.draft_model import DraftModelDrafter
from draftheads.inference.drafters.ngram import NgramDrafter
from draftheads.inference.drafters.suffix import SuffixDrafter
from draftheads.inference.int8 import can_int8
from draftheads.inference.requests import Request, Sampling
from draftheads.inference.shapes import Dynamic, Sampled, Shape, parse_shape
from draftheads.inference.target import Target
from draftheads.recipes.files import sha256_file
from draftheads.recipes.schema import EvalSection, Recipe, RecipeError, apply_override, validate


@dataclass
class Checkpoint:
    """folder: of the weights; run: of the run it belongs to, if it lies in one; recipe: the stored one with the command's overrides."""

    folder: Path
    run: Path | None
    meta: HeadMeta
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.run.name if self.run is not None else self.folder.name

    @property
    def adapter(self) -> Adapter | None:
        return adapter_of(self.folder, self.meta)

    def hashes(self) -> dict[str, str]:
        return {p.name: sha256_file(p)[:16] for p in sorted(self.folder.iterdir()) if p.is_file()}


def open_checkpoint(path: str | Path, overrides: Sequence[str] = (), options: dict[str, Any] | None = None) -> Checkpoint:
    """`options` are values for the recipe's `eval` section, `overrides` are --set items over the whole recipe; both beat what is stored."""
    folder = find_folder(Path(path).expanduser())
    meta = read_meta(folder)
    raw = stored_recipe(folder, meta)
    stored = raw.get("target") or {}
    raw["target"] = {**stored, "name": meta.target or stored.get("name", ""), "revision": meta.revision}
    raw["target"].pop("trust_remote_code", None)  # a checkpoint may come from anywhere: it cannot allow itself to run code
    raw.setdefault("head", meta.head)
    for item in overrides:
        apply_override(raw, item)
    if isinstance(raw.get("eval") or {}, dict):
        raw["eval"] = {**(raw.get("eval") or {}), **(options or {})}
        if raw["eval"].get("drafters") is None:  # `--set eval.drafters=null`, too, means the default
            raw["eval"].pop("drafters", None)
        drafters = raw["eval"].get("drafters", list(EvalSection().drafters))
        named = "draft_model" in (options or {}) and "drafters" not in (options or {})
        if named and isinstance(drafters, list) and "draft_model" not in drafters:
            raw["eval"]["drafters"] = [*drafters, "draft_model"]
    recipe: Recipe = validate(Recipe, raw, f"recipe of {folder}")
    parse_shape(recipe.eval.tree)
    # An exported head's report is its own: it must not take the place of the run's.
    run = run_folder(folder) if meta.layout is None and meta.geometry is not None else None
    return Checkpoint(folder, run, meta, recipe)


# ---- prompts


@dataclass
class Prompt:
    """One prompt, rendered. text: what the user wrote last, for the report."""

    id: str
    category: str
    ids: tuple[int, ...]
    text: str


def read_conversations(section: EvalSection) -> tuple[list[Conversation], list[Conversation], dict[str, int]]:
    """(those to evaluate, sorted by category; others of the same source, for calibration; counts of dropped records)."""
    found, dropped = read_prompts(section.prompts, seed=section.seed, builtin=EVALUATION)
    known = sorted({c.category for c in found})
    for wanted in section.categories or ():
        if wanted not in known:
            near = difflib.get_close_matches(wanted, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"found: {', '.join(known)}"
            raise RecipeError(f"eval.categories: no prompt of category {wanted!r}; {cure}")
    chosen, rest, taken = [], [], dict.fromkeys(known, 0)
    for c in found:  # round-robin over categories already, in an order fixed by content and seed
        fits = section.categories is None or c.category in section.categories
        if fits and (section.per_category is None or taken[c.category] < section.per_category):
            taken[c.category] += 1
            chosen.append(c)
        else:
            rest.append(c)
    return sorted(chosen, key=lambda c: c.category), rest, dropped


def render_prompts(target: Target, conversations: Iterable[Conversation], room: int) -> list[Prompt]:
    """Prompt ids up to the last user turn. RecipeError for one that leaves less than `room` tokens."""
    prompts = []
    for c in conversations:
        messages = list(c.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            ids = render(target.tokenizer, messages, add_generation_prompt=True, tools=c.tools)
        else:
            ids = encode(target.tokenizer, c.text or "", special=True)
        longest = target.geometry.max_positions - room
        if len(ids) > longest:
            raise RecipeError(f"prompt {c.id} has {len(ids)} tokens; {target.name} has {target.geometry.max_positions} positions and {room} are "
                              f"needed for the answer: shorten it to {longest}, or lower eval.max_new_tokens")
        prompts.append(Prompt(c.id, c.category, tuple(ids), messages[-1]["content"] if messages else c.text or ""))
    return prompts


def request(prompt: Prompt, seed: int) -> Request:
    """The row's noise depends on the evaluation's seed and the prompt, not on its place in the list."""
    import zlib

    return Request(prompt.id, prompt.ids, seed=(seed << 32) | zlib.crc32(prompt.id.encode()))


# ---- target and drafters


def load_drafters(checkpoint: Checkpoint, target: Target, names: Sequence[str]) -> dict[str, Drafter]:
    """The named drafters, ready for decode(); head and composite share one head (only one of them decodes at a time)."""
    section = checkpoint.recipe.eval
    head = choose(checkpoint.folder, target, int8=int8(section, target)) if {"head", "composite"} & set(names) else None
    found: dict[str, Drafter] = {}
    for name in dict.fromkeys(names):
        if name == "head" and head is not None:
            found[name] = head
        elif name == "composite":
            found[name] = choose(head, target, copy_first=section.copy_first, **copying(section))
        elif name == "draft_model":
            found[name] = choose(section.draft_model, target)
            if not isinstance(found[name], DraftModelDrafter):
                raise RecipeError(f"eval.draft_model is {section.draft_model!r}, which names no model; wanted a Hub id, folder or named target")
        else:
            found[name] = choose(name, target, **copying(section))
    return found


def copying(section: EvalSection) -> dict[str, Any]:
    """What `choose` wants to know about copying drafters: {"ngram": arguments, "suffix": arguments}."""
    return {"ngram": section.ngram.model_dump(), "suffix": {k: v for k, v in section.suffix.model_dump().items() if v is not None}}


def sampling(section: EvalSection) -> Sampling:
    return Sampling(section.temperature, section.top_k, section.top_p, section.min_p, section.repetition_penalty, section.no_repeat_ngram_size,
                    section.min_new_tokens, section.lossy)


def int8(section: EvalSection, target: Target) -> bool:
    """On CPUs a draft step in int8 costs a fraction and loses hardly an acceptance (benchmarks/RESULTS.md); the output is the target's anyway."""
    wanted = section.draft_weights
    able = target.device.type == "cpu" and target.dtype == torch.float32 and can_int8()
    if wanted == "int8" and not able:
        raise RecipeError("eval.draft_weights int8 wants a float32 target on a CPU with torch's quantised operators; use float32")
    return able and wanted != "float32"


# ---- how much they draft


def parts(drafter: Drafter) -> tuple[Drafter, ...]:
    """A composite's drafters, or the drafter itself. Their names are the sources that rounds speak of."""
    return drafter.drafters if isinstance(drafter, Composite) else (drafter,)


def has_length(source: str, tree: Shape | None) -> bool:
    """Whether a source drafts as many tokens as it is told, rather than a tree (a suffix drafter grows Dynamic ones only)."""
    return tree is None or source == "ngram" or (source == "suffix" and not isinstance(tree, Dynamic))


def make_plan(drafter: Drafter, gamma: dict[str, int], tree: Shape | None = None) -> Plan:
    """gamma {source: draft length} as a Plan; copying drafters keep theirs themselves. Sources without a length grow the tree, if they can."""
    chains, grows = [], False
    for part in parts(drafter):
        if isinstance(part, NgramDrafter | SuffixDrafter):
            part.gamma = gamma.get(part.name)
        elif part.name in gamma:
            chains.append(gamma[part.name])
        grows = grows or (part.name not in (*gamma, "none") and not has_length(part.name, tree))
    return Plan(chains[0] if chains else max(gamma.values(), default=1), tree=tree if grows and not chains else None)


def tree_text(tree: Shape | None) -> str | None:
    """What parse_shape reads, whole: of a static tree from a file its paths."""
    if tree is None:
        return None
    if isinstance(tree, Dynamic):
        return f"dynamic:depth={tree.depth},top_k={tree.top_k},nodes={tree.nodes}"
    if isinstance(tree, Sampled):
        return "sampled:" + ",".join(map(str, tree.widths))
    return "static:" + ";".join(",".join(map(str, path)) for path in tree.ordered)
