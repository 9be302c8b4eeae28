"""Reading a folder of another tool: config.json and its tensors, from safetensors, or from a pickle where that is allowed.

A pickle can run code when it is read. torch's restricted reader (weights_only) takes tensors and plain containers alone; it is used only with
--allow-pickle all the same, since readers have had holes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftheads.heads.formats import Raw
from draftheads.heads.formats.detect import INDEX, PICKLES, SAFETENSORS
from draftheads.recipes.schema import RecipeError

ALLOW = "--allow-pickle"


def fetch(name: str, revision: str | None = None, *, allow_pickle: bool = False) -> Path:
    """A folder as it is; a Hub id is downloaded: its config and weights, no pickles unless they are allowed."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or path.exists():
        raise RecipeError(f"no folder at {path}: give the folder of a head, or a Hub id ORG/NAME")
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", INDEX, *(PICKLES if allow_pickle else ())]
    try:
        found = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # httpx's, huggingface_hub's and OS errors have no common base
        raise RecipeError(f"cannot get {name} from the Hub ({_one_line(error)}): check the name and hf auth login, or download it beforehand "
                          "(hf download) and give the folder") from None
    if not any(found.glob("*.safetensors")) and not allow_pickle:
        raise RecipeError(f"{name} holds no safetensors file; if it has a pickle from somebody you trust, add {ALLOW}")
    return found


def read_raw(folder: Path, *, allow_pickle: bool = False, name: str | None = None) -> Raw:
    """config.json and all tensors, as stored; name: of the only file to read. RecipeError: nothing there, damaged, cut short, or a pickle that is
    not allowed."""
    if name is None or not (folder / name).is_file():
        return Raw(str(folder), read_config(folder / "config.json"), read_tensors(folder, allow_pickle=allow_pickle))
    if name in PICKLES and not allow_pickle:
        raise _not_allowed(folder / name)
    return Raw(str(folder), read_config(folder / "config.json"), _pickle(folder / name) if name in PICKLES else _safetensors(folder / name))


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no {path.name} in {path.parent}: give the folder of a head") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read {path}: {_one_line(error)}; copy or download it again") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{path} must hold a JSON object, found {type(config).__name__}")
    return config


def read_tensors(folder: Path, *, allow_pickle: bool = False) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        shards = sorted(set(read_config(folder / INDEX).get("weight_map", {}).values()))
        if any(not isinstance(s, str) or Path(s).name != s for s in shards):
            raise RecipeError(f"{folder / INDEX} names files outside its folder")
        return {name: t for shard in shards for name, t in _safetensors(folder / shard).items()}
    for name in SAFETENSORS:
        if (folder / name).is_file():
            return _safetensors(folder / name)
    pickles = [folder / name for name in PICKLES if (folder / name).is_file()]
    if not pickles:
        raise RecipeError(f"{folder} holds none of {', '.join((*SAFETENSORS, *PICKLES))}: give the folder of a head")
    if not allow_pickle:
        raise _not_allowed(pickles[0])
    return _pickle(pickles[0])


def _not_allowed(path: Path) -> RecipeError:
    return RecipeError(f"{path} is a pickle, which can run code when it is read: import it with {ALLOW} if you trust whoever made it, or "
                       "get the head as safetensors")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"cannot read {path} ({_one_line(error)}): it is damaged or cut short; copy or download it again") from None


def _pickle(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError for code, RuntimeError, EOFError, … for a damaged file
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise RecipeError(f"{path} was refused: it holds more than tensors, and reading that can run code; get the head as safetensors") from None
        raise RecipeError(f"cannot read {path} ({_one_line(error)[:120]}): it is damaged or cut short; copy or download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise RecipeError(f"{path} must hold a dict of tensors, found {type(found).__name__} of other things")
    return {name: t.contiguous() for name, t in found.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
