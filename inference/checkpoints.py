"""Where a checkpoint is, found without importing torch: a wrong path must not cost ten seconds of imports."""

from __future__ import annotations

import difflib
from pathlib import Path

from draftheads.heads.formats.detect import is_head_folder
from draftheads.recipes.files import existing_folder
from draftheads.recipes.schema import RecipeError

META = "draftheads.json"


def find_folder(path: Path) -> Path:
    """The folder that holds draftheads.json: the given one, or ckpt/final of a run folder; or a head of another tool, without one. RecipeError
    says what is there instead."""
    for candidate in map(existing_folder, (path, path / "ckpt" / "final", path / "final")):
        if (candidate / META).is_file():
            return candidate
    if is_head_folder(path):
        return path
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [], n=1)
        cure = f"did you mean {path.parent / near[0]}?" if near else "give a checkpoint folder or a run folder"
        raise RecipeError(f"no checkpoint at {path}; {cure}")
    if (path / "ckpt").is_dir() or (path / "distill").is_dir():
        raise RecipeError(f"{path} is a run folder without ckpt/final: its training has not ended; run the training command again, it resumes")
    raise RecipeError(f"no {META} in {path}: give a checkpoint folder, or a run folder with ckpt/final (a model that drafts has a config.json)")
