"""A target as an ordinary transformers folder: config.json, safetensors, the tokenizer with its chat template. What engines and transformers load.

    model, tokenizer ─► the config without traces of quantisation ─► folder under another name ─► stamped ─► renamed to its place

transformers refuses to save a model that it believes quantised (one that was read from a GGUF file), though its weights are plain by then: they move
to a model made anew from the config.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from draftheads.heads.checkpoint import Adapter
from draftheads.recipes.files import atomic_folder, folder_place, write_json
from draftheads.recipes.schema import RecipeError

# Which target a folder holds; also how a folder is known to be ours, and may be written again.
STAMP = "draftheads-target.json"


def save_target(model: Any, tokenizer: Any, out: str | os.PathLike[str], *, target: str = "", adapter: Adapter | None = None) -> Path:
    """Write the folder, whole or not at all, and return it. The model's dtype is kept; it must not be packed (Target.load(…, packed=False).model).

    target: its public name; adapter: what was merged into it. Both go into the stamp. RecipeError: a packed model, or a folder that holds something
    else.
    """
    check_target_place(out)
    if any(type(m).__module__.endswith("inference.packed") for m in model.modules()):
        raise RecipeError("a packed model has no weights that could be saved: load it with packed=False")
    with atomic_folder(out) as part:
        write_target(model, tokenizer, part)
        files = sorted(p.name for p in part.iterdir())
        write_json(part / STAMP, {"target": target, "adapter": None if adapter is None else adapter.files, "files": files})
    return Path(out)


def write_target(model: Any, tokenizer: Any, folder: Path) -> None:
    """Into a folder that is there."""
    config = type(model.config).from_dict({k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        plain = type(model)(config)
    try:
        plain.load_state_dict(model.state_dict(), assign=True)
    except RuntimeError as error:  # weights that are still codes, with their scales beside them
        raise RecipeError(f"this target's weights are quantised and cannot be written as plain ones: {' '.join(str(error).split())[:200]}") from None
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes it private


def check_target_place(out: str | os.PathLike[str], source: str | None = None) -> None:
    """RecipeError where `out` is there and no target that we wrote, or where it is `source`, the folder that the target is read from."""
    out = Path(out)
    folder_place(out)
    if source is not None and out.exists() and Path(source).exists() and out.samefile(source):
        raise RecipeError(f"{out} is the folder that the target is read from, and would be replaced: choose another")
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return
    what = "holds something else than a target that we wrote" if out.is_dir() else "is a file"
    if (out / STAMP).is_file():
        try:
            written = {*_stamp(out / STAMP)["files"], STAMP}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            written = {STAMP}
        foreign = sorted(p.name for p in out.iterdir() if p.name not in written)
        if not foreign:
            return
        what = f"holds {foreign[0]}, which no export wrote"
    raise RecipeError(f"{out} {what}: choose another folder, or remove it")


def stamped_adapter(folder: str | os.PathLike[str] | None) -> Adapter | None:
    """What is merged into the weights of a folder that save_target wrote; None for a folder as published, or for no folder. RecipeError for a stamp
    that says nothing: merging an adapter twice would be seen nowhere."""
    stamp = None if folder is None else Path(folder) / STAMP
    if stamp is None or not stamp.exists():
        return None
    try:
        found = _stamp(stamp)["adapter"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RecipeError(f"{stamp} cannot be read, and it says which adapter is merged into these weights: export the target again") from None
    return Adapter(stamp.parent, found) if isinstance(found, dict) else None


def _stamp(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
