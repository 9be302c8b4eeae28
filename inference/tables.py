"""The target's two tables, its embedding and its lm_head, read alone: an export needs nothing else, and of a large target they are some percent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftheads.inference import sources
from draftheads.inference.gguf import quiet
from draftheads.recipes.schema import Geometry, RecipeError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tables(name: str, *, revision: str | None = None, dtype: str = "auto", trust_remote_code: bool = False,
                geometry: Geometry | None = None) -> tuple[Tensor, Tensor, Geometry] | None:
    """embed_VD, lm_head_VD and geometry, as `Target.load` with these arguments has them on a CPU. Of a Hub model only the shards that hold them are
    downloaded. geometry: the recipe's; RecipeError for a target that differs.

    None where the files do not hold the two as plain tensors by the names that transformers gives them (quantised weights, a tied lm_head that is
    stored all the same, pickles, …) or are not to be had: load the target then, which also says what is wrong."""
    source = sources.locate(name, revision)
    try:
        found = sources.read_geometry(name, revision, trust_remote_code)
    except RecipeError:
        return None
    if geometry is not None:
        sources.check_geometry(geometry, found, name)
    try:
        with quiet():
            tables = _tables(source, trust_remote_code)
    except Exception:  # the Hub's, safetensors' and remote code's errors have no common base
        return None
    if tables is None or any(table.shape != (found.vocab_size, found.hidden_size) for table in tables):
        return None
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    embed_VD, lm_head_VD = (table.to(kind) for table in tables)
    return embed_VD, lm_head_VD, found


def _tables(source: sources.Source, trust_remote_code: bool) -> tuple[Tensor, Tensor] | None:
    from transformers import AutoConfig, AutoModelForCausalLM

    where: dict[str, Any] = {} if source.local else {"revision": source.revision}
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, **where)
    if getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = dict(model.named_modules(remove_duplicate=False))
    embed, lm_head = (next(f"{n}.weight" for n, m in names.items() if m is wanted)
                      for wanted in (model.get_input_embeddings(), model.get_output_embeddings()))
    files = _files(source)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if embed not in files or (lm_head in files) == tied:
        return None
    tensors = [_tensor(source, files[n], n) for n in ((embed,) if tied else (embed, lm_head))]
    return tensors[0], tensors[-1]


def _files(source: sources.Source) -> dict[str, str]:
    """Which file holds each tensor."""
    try:
        index = _file(source, INDEX)
    except OSError:  # FileNotFoundError; the Hub's EntryNotFoundError is one too where it is in the cache as missing
        index = None
    if index is not None:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    with safe_open(_file(source, WEIGHTS), "pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _tensor(source: sources.Source, file: str, name: str) -> Tensor:
    with safe_open(_file(source, file), "pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found


def _file(source: sources.Source, name: str) -> Path:
    """FileNotFoundError, or the Hub's own error, where there is none."""
    if source.local:
        path = Path(source.path) / name
        if not path.is_file():
            raise FileNotFoundError(path)
        return path
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source.path, name, revision=source.revision))
