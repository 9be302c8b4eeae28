"""Distillation: the target's own answers to the prompts, and its states while it gave them, in a folder that training reads.

    prompts ─► fixed shards ─► regenerate (one shard at a time) ─► shard-XXXXX.* ─► manifest.json, failed.jsonl ─► RowStore

A shard is the unit of resuming: finished ones are never redone, an unfinished one is regenerated whole, so rows and states come out the
same bits as without the interruption (at an equal number of threads). Shards carry a key made of everything that decides their content;
data under another key is set aside, never reused and never deleted.

One set of rows serves several heads: data.taps captures what all of them read, and data.rows points a run at the rows of another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftheads.data.conversations import Conversation
from draftheads.data.features import (
    FORMAT,
    RowStore,
    ShardError,
    bytes_per_token,
    read_receipt,
    rows_folder,
    shard_name,
    write_manifest,
    write_shard,
)
from draftheads.data.progress import Progress, clock, say
from draftheads.data.regenerate import Regenerated, Taps, first_prompt_ids, prompt_room, regenerate
from draftheads.data.remote import regenerate_served
from draftheads.data.select import recipe_prompts
from draftheads.data.template import Refused
from draftheads.heads import head_config
from draftheads.inference.described import Described, describe_target
from draftheads.inference.drafters.choose import check_draft, choose
from draftheads.inference.requests import Round
from draftheads.inference.target import Target, load_target
from draftheads.recipes.files import locked, write_json, write_text
from draftheads.recipes.schema import Recipe, RecipeError, content_hash

# Of data.*, what decides a shard's content. batch_size does not (rows don't depend on their batch-mates), so it may change on resuming.
CONTENT = ("max_prompt_tokens", "max_new_tokens", "temperature", "top_k", "top_p", "shard_rows", "features", "drop_loops", "seed")
# Options that came later: where they are left at what was done before them, rows made before them are these.
LATER = {"min_prompt_tokens": 1, "states": "fp16"}
SAMPLE = 256  # prompts whose lengths stand for all in estimates
PROBE_BYTES = 1 << 20


def distill(recipe: Recipe, *, target: Target | None = None, progress: bool = True) -> RowStore:
    """Make, finish or just open the rows of this recipe in <run>/distill; with data.rows, check and open another run's.

    target: one that is loaded already.
    RecipeError: bad prompts, no usable row, prompts all too long, too little disk, another process at work in the same folder.
    """
    began = time.monotonic()
    folder = rows_folder(recipe)
    conversations, dropped = recipe_prompts(recipe)
    if recipe.data.rows is not None:
        store = _lent(recipe, _answering(recipe, target), folder, conversations)
        say(f"distil: {len(store)} rows of another run in {folder} (data {store.hash}), nothing to do", enabled=progress)
        return store
    check_draft(recipe.data.draft)
    shortcut = content_hash(_recipe_facts(recipe, conversations))
    with locked(recipe.run_dir / ".distill.lock", f"distilling into {folder}", "give this run another folder with --set run=DIR"):
        if target is None and (finished := _finished(folder, shortcut)) is not None:
            say(f"distil: {len(finished)} rows are ready in {folder} (data {finished.hash}), nothing to do", enabled=progress)
            return finished
        source = _answering(recipe, target)
        taps = _taps(recipe, source) if recipe.data.features == "capture" else None
        facts = _facts(recipe, source, taps, conversations)
        _set_aside(folder, facts, progress)
        shards = [conversations[i : i + recipe.data.shard_rows] for i in range(0, len(conversations), recipe.data.shard_rows)]
        receipts = _receipts(folder, facts, len(shards), progress)
        missing = [n for n, receipt in receipts.items() if receipt is None]
        if missing:
            _check_prompts(source, recipe, [c for n in missing for c in shards[n]], taps, folder)
            tokens, seconds = _regenerate_all(recipe, source, taps, folder, shards, receipts, facts, progress)
            say(f"distil: {tokens:,} tokens in {clock(seconds)} ({tokens / max(seconds, 1e-9):.0f} tok/s)", enabled=progress)
        store = _close(folder, [r for r in receipts.values() if r is not None], dropped, facts, {"shortcut": shortcut})
    summary = _summary(store) if missing else f"{len(store)} rows are ready (data {store.hash}), nothing to do"
    say(f"distil: {summary} → {folder} in {clock(time.monotonic() - began)}", enabled=progress)
    return store


def _answering(recipe: Recipe, target: Target | None) -> Target | Described:
    """Whose answers the rows are: with data.servers the weights are theirs, and none are loaded here."""
    return describe_target(recipe.target) if recipe.data.servers is not None else target or load_target(recipe.target)


def same_prompts(recipe: Recipe) -> bool | None:
    """Whether the rows of this run answer the very prompts that the recipe selects now; None where either cannot be read (any more)."""
    try:
        made = json.loads((rows_folder(recipe) / "manifest.json").read_text(encoding="utf-8"))["request"]["prompts"]
        conversations, _ = recipe_prompts(recipe)
    except (OSError, ValueError, KeyError, TypeError):  # a RecipeError is a ValueError
        return None
    return bool(made == _prompts_hash(conversations))


def _taps(recipe: Recipe, target: Target | Described) -> Taps:
    """What is captured, in rising order: data.taps, or the head's. RecipeError where the target has no such layer, or the head reads more."""
    head = tuple(head_config(recipe.head, target.geometry).taps)
    if recipe.data.taps is None:
        return head
    layers, named = target.geometry.num_layers, set(recipe.data.taps)
    if wrong := [t for t in recipe.data.taps if t != "final" and not 0 <= int(t) < layers]:
        raise RecipeError(f"data.taps: {wrong} are not in 0 … {layers - 1} for a target of {layers} layers")
    if missing := [t for t in head if t not in named and t != "final"]:
        raise RecipeError(f"data.taps {recipe.data.taps} lacks {missing}, which head {recipe.head['type']} reads: add them, or leave data.taps out")
    return (*sorted(t for t in named if isinstance(t, int)), *(["final"] if "final" in named else []))


def _lent(recipe: Recipe, target: Target | Described, folder: Path, conversations: Sequence[Conversation]) -> RowStore:
    """The finished rows of another run (data.rows). RecipeError where they are not what this recipe would make itself, taps apart."""
    store = RowStore.open(folder, deep=True)
    ours, theirs = (_comparable(f) for f in (_facts(recipe, target, None, conversations), store.manifest.get("request", {})))
    if ours != theirs:
        raise RecipeError(f"data.rows: the rows in {folder} were made from other facts than this recipe's: {_differences(theirs, ours)}; "
                          "make the two recipes agree, or leave data.rows out")
    if recipe.data.features == "capture":
        store.select(head_config(recipe.head, target.geometry).taps)
    return store


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Of a run's facts, what its rows have to share with another's: not how they are cut into shards, nor which states lie beside them,
    nor in which precision."""
    data = {k: v for k, v in facts.get("data", {}).items() if k not in ("shard_rows", "features", "states")}
    return {k: v for k, v in facts.items() if k != "taps"} | {"data": data}


# --- what decides the content ------------------------------------------------------------------------------------------------------------


def _recipe_facts(recipe: Recipe, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Known without the target: whether a finished folder can be opened at once."""
    section = recipe.target.model_dump(mode="json", exclude={"chat_template"})
    template = recipe.target.chat_template
    # With data.taps the rows are the same for all heads that these serve; without, the facts are what they were before there was data.taps.
    head = {k: recipe.head.get(k) for k in ("type", "taps")} if recipe.data.taps is None else {"taps": recipe.data.taps}
    return {
        "format": FORMAT, "target": section, "files": _fingerprint(Path(recipe.target.name)),
        "template": _fingerprint(Path(template)) if template else None,
        "head": head, **_data_facts(recipe, conversations),
    }


def _facts(recipe: Recipe, target: Target | Described, taps: Taps | None, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Everything that decides the shards' content, as a mapping that can be compared and shown. A local target is known by its files, so
    that a run may move with them; one from the Hub by its commit."""
    files = _fingerprint(Path(target.name))
    identity = {
        "name": target.name if files is None else None, "files": files, "revision": target.revision, "template": target.template_hash,
        "eos_ids": sorted(target.eos_ids),
    }
    if isinstance(target, Target):
        identity |= {"dtype": str(target.dtype), "weights": _weights_probe(target)}
    return {"format": FORMAT, "target": identity, "taps": None if taps is None else list(taps), **_data_facts(recipe, conversations)}


def _data_facts(recipe: Recipe, conversations: Sequence[Conversation]) -> dict[str, Any]:
    data = recipe.data.model_dump(mode="json")
    later = {k: data[k] for k, before in LATER.items() if data[k] != before}
    if recipe.data.servers is not None:  # not which: there may be more of them, or others, tomorrow
        later["served"] = recipe.data.servers.model or True
    return {"data": {k: data[k] for k in CONTENT} | later, "prompts": _prompts_hash(conversations)}


def _prompts_hash(conversations: Sequence[Conversation]) -> str:
    return content_hash([[c.id, c.category, c.hash] for c in conversations])


def _fingerprint(path: Path) -> str | None:
    """Of a file or a folder's files: names, sizes and the bytes at both ends and in the middle (all bytes of small files). None if absent."""
    files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as handle:
            for start in sorted({0, max(0, (size - PROBE_BYTES) // 2), max(0, size - PROBE_BYTES)}):
                handle.seek(start)
                digest.update(handle.read(PROBE_BYTES))
    return digest.hexdigest()[:16]


def _weights_probe(target: Target) -> str:
    """A few numbers of embedding, lm_head and norms (packing leaves those alone): tells models in memory, and replaced files, apart."""
    tensors = [target.embed_VD, target.lm_head_VD, *(p for name, p in target.model.named_parameters() if "norm" in name)]
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().flatten()
        digest.update(torch.cat([flat[:8], flat[len(flat) // 2 :][:8], flat[-8:]]).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# --- the folder --------------------------------------------------------------------------------------------------------------------------


def _finished(folder: Path, shortcut: str) -> RowStore | None:
    """The undamaged store of this very recipe, or None. (A manifest is written when every shard is there.)"""
    try:
        store = RowStore.open(folder, deep=True)
    except RecipeError:
        return None
    return store if store.manifest.get("shortcut") == shortcut else None


def _set_aside(folder: Path, facts: dict[str, Any], progress: bool) -> None:
    """Data made under other facts moves to a folder of its own; request.json holds the facts of what is here."""
    path = folder / "request.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if before != facts and list(folder.glob("shard-*.json")):
        goal = folder.with_name(f"distill.before-{content_hash(before)[:8]}")
        while goal.exists():
            goal = goal.with_name(f"{goal.name}+")
        os.replace(folder, goal)
        say(f"distil: {_differences(before, facts)} changed since the rows in {folder} were made; they are now in {goal}", enabled=progress)
    if before != facts:
        write_json(path, facts)
    for part in folder.glob(".*.part"):  # of a killed process
        part.unlink()


def _differences(before: Any, after: Any, name: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [k for k in sorted(before | after) if before.get(k) != after.get(k)]
        return ", ".join(_differences(before.get(k), after.get(k), f"{name}.{k}".lstrip(".")) for k in keys)
    return name or "the recipe"


def _receipts(folder: Path, facts: dict[str, Any], count: int, progress: bool) -> dict[int, dict[str, Any] | None]:
    """Per shard its receipt, None where it must be (re)generated."""
    found: dict[int, dict[str, Any] | None] = {}
    for number in range(count):
        try:
            receipt = read_receipt(folder, shard_name(number), deep=True)
        except ShardError as error:
            say(f"distil: {str(error).partition(';')[0]}; regenerating it", enabled=progress)
            receipt = None
        found[number] = receipt if receipt is not None and receipt.get("key") == _shard_key(facts, number) else None
    return found


def _shard_key(facts: dict[str, Any], number: int) -> str:
    return content_hash([facts, number])


def _check_prompts(target: Target | Described, recipe: Recipe, conversations: Sequence[Conversation], taps: Taps | None, folder: Path) -> None:
    """Before any long work: some prompt fits, and the disk holds what is to come."""
    room = prompt_room(target, recipe.data)
    lengths: list[int] = []
    refused: list[Refused] = []
    for conversation in sorted(conversations, key=lambda c: c.text is not None):  # chats first: is there a chat template?
        try:
            lengths.append(len(first_prompt_ids(target.tokenizer, conversation)))
        except Refused as refusal:  # of one of many; regenerate counts it
            refused.append(refusal)
        if len(lengths) >= SAMPLE and min(lengths) <= room:
            break
    if not lengths:
        raise refused[0]
    fitting = [n for n in lengths if n <= room]
    if not fitting:
        raise RecipeError(f"all {len(lengths)} prompts are longer than {room} tokens (the shortest has {min(lengths)}); raise "
                          f"data.max_prompt_tokens (the target has {target.geometry.max_positions} positions), or give shorter prompts")
    if recipe.train.supervise == "answers" and (recipe.data.max_new_tokens < 2 or min(fitting) + 2 > recipe.train.max_len):
        raise RecipeError(f"the mask covers nothing: no row can hold two answer tokens, as data.max_new_tokens is {recipe.data.max_new_tokens}, "
                          f"train.max_len {recipe.train.max_len} and the shortest prompt {min(fitting)} tokens; raise what is too small")
    tokens = sum(c.turns for c in conversations) * (sum(fitting) / len(fitting) + recipe.data.max_new_tokens)
    size = int(tokens * (bytes_per_token(len(taps), target.geometry.hidden_size, recipe.data.states) + 10 if taps is not None else 20))
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RecipeError(f"the rows of this recipe need about {size / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free; free some, "
                          "lower data.limit, or set data.features: online")


# --- the work ----------------------------------------------------------------------------------------------------------------------------


def _regenerate_all(recipe: Recipe, target: Target | Described, taps: Taps | None, folder: Path, shards: Sequence[Sequence[Conversation]],
                    receipts: dict[int, dict[str, Any] | None], facts: dict[str, Any], progress: bool) -> tuple[int, float]:
    """Make every missing shard and fill in its receipt. Returns the tokens produced and the seconds it took."""
    missing = [n for n, receipt in receipts.items() if receipt is None]
    total = sum(c.turns for n in missing for c in shards[n])
    with Progress("distil", total, 0.8 * recipe.data.max_new_tokens, enabled=progress) as bar:

        def keep(n: int, made: Regenerated, seconds: float) -> None:
            receipts[n] = write_shard(folder, shard_name(n), made.rows, _note(made, shards[n], target, seconds) | {"key": _shard_key(facts, n)},
                                      recipe.data.states)

        if isinstance(target, Described):
            journal = recipe.run_dir / "answers.jsonl"
            regenerate_served(target, {n: shards[n] for n in missing}, recipe.data, journal, bar, keep)
            return bar.tokens, time.monotonic() - bar.began
        drafter = choose(recipe.data.draft, target)
        for n in missing:
            bar.note, start, done = f"shard {n + 1}/{len(shards)}", time.monotonic(), bar.done

            def on_round(round: Round) -> None:
                bar.advance(sum(map(len, round.new_tokens.values())), len(round.finished), sum(len(c.tokens) for c in round.finished))

            keep(n, regenerate(target, shards[n], recipe.data, taps, on_round, drafter), time.monotonic() - start)
            bar.done = done + sum(c.turns for c in shards[n])  # turns that were left out count too
    return bar.tokens, time.monotonic() - bar.began


def _note(made: Regenerated, shard: Sequence[Conversation], target: Target | Described, seconds: float) -> dict[str, Any]:
    retokenised = sum(not r.extra.get("exact", True) for r in made.rows)
    return {
        "prompts": len(shard), "finish": dict(Counter(r.finish_reason for r in made.rows)),
        "categories": dict(Counter(r.category for r in made.rows)), "dropped": dict(made.dropped), "failed": made.failed,
        "seconds": round(seconds, 3), "threads": torch.get_num_threads(),
        "device": str(target.device) if isinstance(target, Target) else "servers", **({"retokenised": retokenised} if retokenised else {}),
    }


def _close(folder: Path, receipts: Sequence[dict[str, Any]], dropped: dict[str, int], facts: dict[str, Any], more: dict[str, Any]) -> RowStore:
    """Counts, failed.jsonl and the manifest. RecipeError where no row is left to train on."""
    failed = [f for r in receipts for f in r["failed"]]
    counts: dict[str, Any] = {key: sum(r[key] for r in receipts) for key in ("prompts", "rows", "tokens", "answer_tokens")}
    for key in ("finish", "categories", "dropped"):
        counts[key] = dict(sorted(sum((Counter(r[key]) for r in receipts), Counter(dropped if key == "dropped" else {})).items()))
    counts["failed"] = dict(Counter(f["reason"] for f in failed))
    if retokenised := sum(r.get("retokenised", 0) for r in receipts):
        counts["retokenised"] = retokenised
    counts["unfinished"], counts["loops_cut"] = counts["finish"].get("length", 0), counts["finish"].get("loop", 0)
    write_text(folder / "failed.jsonl", "".join(json.dumps(f, ensure_ascii=False) + "\n" for f in failed))
    if not counts["rows"]:
        raise RecipeError(f"no row is left to train on: of {counts['prompts']} prompts {_why(counts)}; see {folder / 'failed.jsonl'}")
    versions = {"torch": torch.__version__, "draft_data_format": FORMAT}
    provenance = {"threads": sorted({r["threads"] for r in receipts}), "devices": sorted({r["device"] for r in receipts}),
                  "seconds": round(sum(r["seconds"] for r in receipts), 1), "versions": versions}
    listed = [{k: v for k, v in r.items() if k != "failed"} for r in receipts]
    write_manifest(folder, listed, counts, {"key": content_hash(facts), "request": facts, "provenance": provenance, **more})
    return RowStore.open(folder)


def _why(counts: dict[str, Any]) -> str:
    found = {**counts["dropped"], **counts["failed"]}
    return ", ".join(f"{n} × {reason}" for reason, n in sorted(found.items(), key=lambda item: -item[1])) or "none was answered"


def _summary(store: RowStore) -> str:
    c = store.counts
    lost = "; ".join(text for text in (f"{c['unfinished']} cut at the length limit" if c["unfinished"] else "",
                                       f"{c['loops_cut']} cut where a loop begins" if c["loops_cut"] else "",
                                       f"{c['retokenised']} tokenised again, as the servers return no token ids" if c.get("retokenised") else "",
                                       f"left out: {_why(c)}" if c["dropped"] or c["failed"] else "") if text)
    return f"{c['prompts']} prompts, {c['rows']} rows, {c['answer_tokens']:,} answer tokens (data {store.hash})" + (f"; {lost}" if lost else "")
