"""Reading a folder of another tool: config.json and its tensors, from safetensors, or from a pickle where that is allowed.

A pickle can run code when it is read. torch's restricted reader (weights_only) takes tensors and plain containers alone; it is used only with
--allow-pickle all the same, since readers have had holes.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftheads.heads.formats import Raw, shown
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


def read_config(path: Path, missing: str = "give the folder of a head") -> dict[str, Any]:
    """A JSON object. RecipeError: no such file (missing: what to do then), no JSON, JSON of another kind, or nested too deep."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no {path.name} in {path.parent}: {missing}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read {path}: {_one_line(error)}; copy or download it again") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{path} must hold a JSON object, found {type(config).__name__}: copy or download it again")
    return config


def read_tensors(folder: Path, *, allow_pickle: bool = False) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        places = read_config(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(s, str) for s in places.values()):
            raise RecipeError(f"{folder / INDEX}: weight_map must give each tensor the name of a file: copy or download it again")
        if any(Path(s).name != s for s in places.values()):
            raise RecipeError(f"{folder / INDEX} names files outside its folder: copy or download the head again")
        return {name: t for shard in sorted(set(places.values())) for name, t in _safetensors(folder / shard).items()}
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
        with warnings.catch_warnings():  # of old pickles and kinds of storage: what is wrong with them is said below
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError for code, RuntimeError, EOFError, … for a damaged file
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise RecipeError(f"{path} was refused: it holds more than tensors, and reading that can run code; get the head as safetensors") from None
        raise RecipeError(f"cannot read {path} ({_one_line(error)[:120]}): it is damaged or cut short; copy or download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise RecipeError(f"{path} must hold a dict of tensors, found {type(found).__name__} of other things")
    if odd := [name for name, t in found.items() if not _plain(t)]:
        raise RecipeError(f"{path}: {shown(odd)} must be dense, unquantised tensors with all their numbers in the file; save them so, or get the "
                          "head as safetensors")
    return {name: t.contiguous() for name, t in found.items()}


def _plain(tensor: Tensor) -> bool:
    """Whether its numbers are all in the file: a view that repeats a few of them may ask for any amount of memory."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized and not tensor.is_nested
    return dense and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
