"""How a run is watched: the live view, train.jsonl (always), and tensorboard or wandb by recipe, through accelerate's trackers.

Only the main process shows and writes. A resumed run drops the records after the state it resumes from, so every step is logged once.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import time
from pathlib import Path
from typing import Any

from draftheads.data.progress import Meter, clock
from draftheads.recipes.files import write_text
from draftheads.recipes.schema import Recipe, RecipeError, content_hash


def tracker_names(recipe: Recipe) -> list[str]:
    """The trackers accelerate must open. RecipeError for one that is not installed. Never lets wandb ask for a login or wait for a server."""
    names: list[str] = [n for n in dict.fromkeys(recipe.train.log) if n != "jsonl"]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(f"train.log: {name} is not installed; pip install 'draftheads[{name}]', or take it out of train.log")
    if "wandb" in names and "WANDB_MODE" not in os.environ and not _has_wandb_key():
        os.environ["WANDB_MODE"] = "offline"
    return names


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


class Trackers:
    """`log` writes a record; `show` updates the view. accelerator: one made with `log_with=tracker_names(recipe)`."""

    def __init__(self, recipe: Recipe, accelerator: Any, resumed_at: int) -> None:
        self.main = accelerator.is_main_process
        self.accelerator = accelerator if accelerator.log_with else None
        self.file = recipe.run_dir / "train.jsonl"
        if self.main:
            _drop_after(self.file, resumed_at)
        if self.accelerator is not None:
            accelerator.init_trackers("draftheads", config=_flat(recipe.model_dump(mode="json", exclude={"target": {"geometry"}})), init_kwargs={
                "wandb": {"id": content_hash([recipe.hash(), str(recipe.run_dir)]), "resume": "allow", "dir": str(recipe.run_dir),
                          "name": recipe.run_dir.name},
            })

    def log(self, step: int, record: dict[str, Any]) -> None:
        if not self.main:
            return
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **record}) + "\n")
        if self.accelerator is not None:
            self.accelerator.log({f"train/{k}": v for k, v in _flat(record).items()}, step=step)

    def close(self) -> None:
        if self.accelerator is not None:
            self.accelerator.end_training()


def _flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys, lists of figures as key_1 …; what is neither number, text nor flag as its text."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out |= _flat(item, f"{name}{key}.")
        elif isinstance(item, list) and item and all(isinstance(i, int | float) for i in item):
            out |= {f"{name}{key}_{i + 1}": x for i, x in enumerate(item)}
        else:
            out[f"{name}{key}"] = item if isinstance(item, int | float | str | bool) else str(item)
    return out


def _drop_after(file: Path, step: int) -> None:
    """Keep the whole records up to this step; a torn last line (kill -9) goes too."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    write_text(file, "".join(kept))


class View(Meter):
    """A bar with loss, τ, tokens/s and ETA on a terminal, else a plain line every few seconds. On stderr."""

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        super().__init__("train", total, done, enabled=enabled)
        self.tokens = 0

    def advance(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens

    def speed(self) -> float:
        return self.tokens / max(time.monotonic() - self.began, 1e-9)

    def show(self, figures: dict[str, Any], cost_left: float) -> None:
        """cost_left: work to come in units of the work done so far (later stages unroll more steps)."""
        eta = clock(cost_left * (time.monotonic() - self.began))
        moved = f"  KL {figures['kl']:.4f}" if "kl" in figures else ""
        self.draw(f"loss {figures['loss']:.3f}{moved}  τ {figures['tau']:.2f}  {self.speed():.0f} tok/s  ETA {eta}", now=self.done == self.total)
