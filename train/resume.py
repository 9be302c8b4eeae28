"""Resumable states: ckpt/state-XXXXXX, written whole or not at all, and the newest intact one is where the same command goes on.

A batch is a pure function of (seed, epoch, index), noise is keyed by (seed, step, row), torch's generator by (seed, step, rank) and the
rate is a function of the step. So a state is only weights, optimizer moments, the step, and the sums of the log window; resuming is exact
to the bit at an equal number of threads and processes (fp32, CPU). Another number of processes sees the same batches.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.heads import head_section
from draftheads.recipes.files import atomic_folder, sha256_file
from draftheads.recipes.schema import Recipe, RecipeError
from draftheads.train.step import TrainStep

# Of the recipe's train section, what may change between a run and its resumption: it doesn't change what is computed (but the order of sums).
FREE = ("log", "log_every", "checkpoint_every", "keep", "micro_batch_tokens", "loss_chunk")
# The rows themselves are compared by their hash, so their files may move.
FREE_DATA = ("prompts", "batch_size", "limit", "shard_rows", "taps", "rows")


@dataclass
class State:
    folder: Path
    step: int
    facts: dict[str, Any]
    window: dict[str, list[float]]


def facts_of(recipe: Recipe, data_hash: str) -> dict[str, Any]:
    """What must be equal when training goes on: recipe sections that decide the result, and the data."""
    raw = recipe.model_dump(mode="json")
    return {
        "target": {k: v for k, v in raw["target"].items() if k != "geometry"},
        "data": {k: v for k, v in raw["data"].items() if k not in FREE_DATA} | {"hash": data_hash},
        # With its defaults: when one changes, a run from before is another.
        "head": head_section(raw["head"]).model_dump(mode="json"),
        "train": {k: v for k, v in raw["train"].items() if k not in FREE},
    }


def check_facts(before: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """RecipeError that names every key in which the two differ."""
    found = []
    for section in now:
        old, new = before.get(section, {}), now[section]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(f"{section}.{name} was {old.get(name)!r}, is {new.get(name)!r}")
    if found:
        raise RecipeError(f"{where} was trained under another recipe: {'; '.join(found)}. Restore it, or give a new run folder: --set run=DIR")


def save_state(
    ckpt: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Any], facts: dict[str, Any], window: dict[str, list[float]], keep: int
) -> Path:
    """Write state-<step> and remove all but the newest `keep` up to it."""
    goal = ckpt / f"state-{step:06d}"
    with atomic_folder(goal) as part:
        save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, part / "model.safetensors")
        torch.save(optimizer, part / "optimizer.pt")
        files = {p.name: sha256_file(p) for p in sorted(part.iterdir())}
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        (part / "state.json").write_text(json.dumps({"step": step, "facts": facts, "window": window, "files": files, "machine": machine}, indent=1))
    found = _folders(ckpt)
    # A state with a higher number was passed over as damaged: it must not take the place of an intact one.
    stale = [f for f in found if _step(f) > step]
    for old in [*stale, *[f for f in found if f not in stale][keep:]]:
        shutil.rmtree(old, ignore_errors=True)
    return goal


def newest_state(ckpt: Path, *, clean: bool = True) -> tuple[State | None, list[str]]:
    """The newest intact state, and a line for each damaged one that was passed over. clean: remove what a killed process left half-written."""
    for part in [*ckpt.glob(".state-*"), *ckpt.glob(".final.*.part")] if clean and ckpt.is_dir() else []:
        shutil.rmtree(part, ignore_errors=True)
    skipped: list[str] = []
    for folder in _folders(ckpt):
        try:
            raw = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            for name, digest in raw["files"].items():
                if sha256_file(folder / name) != digest:
                    raise ValueError(f"{name} is not what was written")
            return State(folder, raw["step"], raw["facts"], raw["window"]), skipped
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(f"{folder} is damaged ({type(error).__name__}: {error}); going back to the state before it")
    return None, skipped


def load_state(state: State, step: TrainStep, optimizer: Any) -> None:
    """Into the step module and the optimizer of the same run."""
    step.restore(load_file(state.folder / "model.safetensors"))
    optimizer.load_state_dict(torch.load(state.folder / "optimizer.pt", map_location="cpu", weights_only=True))


def _folders(ckpt: Path) -> list[Path]:
    """State folders, newest first."""
    found = [p for p in ckpt.glob("state-*") if re.fullmatch(r"state-\d{6,}", p.name)] if ckpt.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("state-"))
